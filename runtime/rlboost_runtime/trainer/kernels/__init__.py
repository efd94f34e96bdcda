"""Arithmetic that has a fast form on some devices: attention, experts, the head, the optimizer's step.

Enter at `checks`, which decides at the start, on the device itself, which form is used.
"""
