"""Compute Engine through google-cloud-compute: spot and on-demand machines and error texts."""
