"""The real stack at the paper's scale in real time; engines and trainer are emulated. Enter at `__main__`."""
