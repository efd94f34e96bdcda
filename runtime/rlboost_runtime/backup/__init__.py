"""The head's copy: what a run needs to go on is copied to its job's `output` while it runs, and a new head
goes on from there. Enter at `streamer` (copying) and `restore` (the way back); `layout` says what lies where.
"""
