"""The trainer's side of rollout: asks the coordinator for responses and gives them on in groups.

Enter at `client`. Imported by `trainer.loop` only.
"""
