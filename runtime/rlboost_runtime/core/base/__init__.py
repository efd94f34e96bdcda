"""What the rest of the core is written in: messages, settings, timers and the state-machine check.

Imports nothing else of ours. The messages are also what the coordinator and the simulator speak.
"""
