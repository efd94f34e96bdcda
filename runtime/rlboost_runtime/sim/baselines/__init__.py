"""What RLBoost is compared with: the policies of the paper, of its published code and of plain set-ups.

Enter at `policies`. Imported by the simulator and by benchmarks; live runs know none of this.
"""
