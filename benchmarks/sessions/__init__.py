"""Many conversations at once on one endpoint; the engine is emulated. Enter at `__main__`."""
