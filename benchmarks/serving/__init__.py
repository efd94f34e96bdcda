"""A served fleet under an hour of load on a market that kills."""
