"""Does the simulator predict the paper (arXiv 2510.19225)? Fitted on three published numbers, then compared
with the others. Everything here is simulated."""
