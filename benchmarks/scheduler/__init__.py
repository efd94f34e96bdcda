"""The scheduler by itself: promises under random faults, cost of an event, choice of fleet size. Simulated.

`quickstart` is the exception: it runs the quickstart and compares it with its forecast.
"""
