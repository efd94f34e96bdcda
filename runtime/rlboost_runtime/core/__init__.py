"""Decisions as pure functions of events and time: the standard library only, no clock, no socket.

Enter at `core.Core`, which takes an event and a time and returns commands. The coordinator drives it live,
`rlboost_runtime.sim` under a virtual clock; a restarted coordinator drives it from its log.
"""
