"""Episodes: rollouts of several turns. User code plays them in processes of its own; the endpoint records
what is sampled; the trainer gets samples and rewards."""
