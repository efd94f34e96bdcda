"""Rewards: built in, a user's function in child processes, or an HTTP service.

Enter at `scorer.RewardScorer`. A reward that fails is recorded, never guessed.
"""
