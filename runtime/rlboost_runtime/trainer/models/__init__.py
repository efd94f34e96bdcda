"""Models before a run: tiny ones made here, warm starts, hub downloads, and their memory and disk needs."""
