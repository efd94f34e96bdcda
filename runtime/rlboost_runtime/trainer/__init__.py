"""The training loop on the reserved node: samples in, weight versions out.

Enter at `loop.TrainerLoop`. `node` starts one process per rank; the rooms below hold the parts of a step.
"""
