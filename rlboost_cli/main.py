"""The `rlboost` program: which commands there are. Importing this loads nothing heavy.

Exit codes: 0 done or detached, 1 failed, 2 bad input, 3 no such run or instance, 4 no capacity, 5 budget
reached, 6 credentials or quota, 7 cloud unreachable, 130 interrupted before there was a run.
"""

from __future__ import annotations

import typer

from rlboost_cli.commands.check import check
from rlboost_cli.commands.cost import cost
from rlboost_cli.commands.down import down
from rlboost_cli.commands.launch import launch
from rlboost_cli.commands.logs import logs
from rlboost_cli.commands.preempt import preempt
from rlboost_cli.commands.status import status
from rlboost_cli.commands.up import up
from rlboost_cli.errors import explained

app = typer.Typer(
    name="rlboost",
    help="RL post-training of LLMs with rollout on spot GPUs: machines vanish, tokens don't",
    epilog="Exit codes: 0 done or detached, 1 failed, 2 bad input, 3 no such run or instance, 4 no capacity,"
    " 5 budget reached, 6 credentials or quota, 7 cloud unreachable, 130 interrupted before there was a run",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

for _command in (check, up, launch, status, logs, cost, preempt, down):
    app.command()(explained(_command))


def run() -> None:
    """Run the command that was typed; never returns."""
    app(prog_name="rlboost")


if __name__ == "__main__":
    run()
