"""The quickstart over several seeds: what a new user sees, as often as it takes to trust it."""
