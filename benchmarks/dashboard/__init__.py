"""What the page of a head costs its coordinator, and how late it is. Enter at `__main__`."""
