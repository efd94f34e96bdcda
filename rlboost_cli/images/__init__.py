"""Machine and container images with everything installed: made, listed and deleted (docs/images.md)."""
