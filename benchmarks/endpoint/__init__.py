"""What the endpoint adds to its engine, and a stream through kills. Enter at `__main__`."""
