"""The process that starts a run's roles, restarts what died and ends what is over.

Enter at `supervisor.main`, or `python -m rlboost_runtime.supervisor RUN`. The CLI starts it as a process.
"""
