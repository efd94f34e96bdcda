"""Arithmetic that has a fast form on some devices: attention, experts, the head, norms, the optimizer's step.

Enter at `checks`, which decides at the start, on the device itself, which form is used. `casting` lets a pass
compute in another dtype than that of the weights.
"""
