"""The training half on one GPU, or in miniature on a CPU: `python -m benchmarks.gpu`, `make gpu-check`."""
