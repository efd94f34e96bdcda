"""Job files from configurations of other frameworks: `rlboost init --from FILE` enters at `job_text.py`.

`reading.py` reads a file, `verl.py`, `trl.py`, `prime_rl.py` and `openrlhf.py` are the tables of options, and
`mapping.py` applies them. docs/coming-from.md is made of the same tables.
"""
