"""Check a run against the promises, from what its roles left on disk. Only reads.

Enter at `run.audit`. It knows the coordinator's and the trainer's files, and only the command line knows it.
"""
