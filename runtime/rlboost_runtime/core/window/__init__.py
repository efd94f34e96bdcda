"""How long reserved GPUs generate before they train: the seeding window of adaptive offload (paper 4.1).

Enter at `predicted`, the rule of live runs. Imported by `core.core` and the controllers beside it.
"""
