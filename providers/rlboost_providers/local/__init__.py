"""This machine as a cloud: processes for machines, and a market that follows a trace."""
