"""Everything that runs on machines: the pure core, the roles around it, and what they share.

Ground floor (this folder): errors, logging, processes, exact money and the seams that tests replace. Above
it `job` and `run` (what is to be run, and its folder), `protocol` (what roles send each other), `core` (every
decision, without effects), then the roles: `coordinator`, `agent`, `trainer` and `supervisor`.
"""
