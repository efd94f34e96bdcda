"""One training step: log-probabilities, packing, losses, optimizer, ranks and LoRA.

Enter at `learner`. Knows nothing of machines or connections; `trainer.loop` feeds it samples.
"""
