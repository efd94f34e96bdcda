"""Commands on the machines of a run: `ssh`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal import completion
from rlboost_cli.terminal.completion import RunName


def ssh(
    run: RunName,
    machine: Annotated[
        str,
        typer.Argument(
            help="A machine or instance; without it, the head",
            metavar="INSTANCE",
            show_default=False,
            autocompletion=completion.instances,
        ),
    ] = "head",
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to run there, after --; without it, a shell", metavar="-- COMMAND", show_default=False
        ),
    ] = None,
) -> None:
    """Open a shell on a run's head or on one of its machines

    Example: rlboost ssh my-run head -- nvidia-smi
    """
    import os
    import shutil

    from rlboost_cli.head.shell import shell_command
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    words = shell_command(find_run(run), machine, command or [])
    if shutil.which(words[0]) is None:
        raise ConfigError("ssh is not installed", "install OpenSSH's client")
    os.execvp(words[0], words)  # noqa: S606 - a list of words, no shell
