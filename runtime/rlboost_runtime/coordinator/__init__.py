"""The process on the head node that owns every effect of the core: sockets, disk, clouds and clocks.

Enter at `service`, which wires the parts. Decisions are made in `rlboost_runtime.core` only.
"""
