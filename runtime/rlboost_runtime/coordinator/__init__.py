"""The shell around the core on the head node: who may decide nothing, but owns every effect."""
