"""What training leaves behind: published versions, checkpoints, the output folder and the run's report."""
