"""`rlboost doctor`: whether a machine, an account and a job are ready before anything runs or costs."""
