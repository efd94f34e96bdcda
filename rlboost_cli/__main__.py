"""`python -m rlboost_cli`: the same as `rlboost`."""

from rlboost_cli.main import run

run()
