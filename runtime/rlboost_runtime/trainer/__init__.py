"""The training loop on the reserved node: samples in, weight versions out."""
