"""What a trainer keeps on its accelerator, and in main memory while engines have it.

Enter at `mover`. `trainer/learn` decides when something moves (`Residency`).
"""
