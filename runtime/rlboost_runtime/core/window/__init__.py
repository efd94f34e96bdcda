"""How long reserved GPUs generate before they train: the seeding window of adaptive offload (paper 4.1).

`algorithm_1` is the paper's rule, `predicted` ours, `gpu_lease` who holds the reserved GPUs. Imported by
`core.core` and the controllers beside it.
"""
