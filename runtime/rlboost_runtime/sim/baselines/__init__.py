"""What RLBoost is compared with: the rules of the paper, of its published code and of plain set-ups.

Enter at `sim.policies`, which names and combines them. Live runs know none of this.
"""
