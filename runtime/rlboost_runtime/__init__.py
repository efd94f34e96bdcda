"""Everything that runs on machines: the pure core, the roles around it, and what they share."""
