"""Requests to a head elsewhere, over SSH: one connection per command line.

Guarantees: every wait has a deadline; every error names the machine, what it reported and what to type. The
connection is the one of `infra: ssh`: host keys are checked; agent, keys and jump host are those of `ssh`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, BinaryIO

from rlboost_cli.terminal.errors import ERRORS_VARIABLE, read_error
from rlboost_providers.base.tags import owner_of
from rlboost_providers.ssh.connection import SshHost
from rlboost_runtime.errors import CredentialsRejected, ProviderError, RLBoostError, RuntimeFault
from rlboost_runtime.run.folder import RunFolder, home
from rlboost_runtime.run.head import HeadPlace, kept_place

Say = Callable[[str], None]

COMMAND_S = 180.0
"""Longest time of a command that is run there; the commands themselves give up sooner."""
QUIET_S = 90.0
"""Longest silence of the machine: it reports progress every 5 s while it works."""
_TIMED_OUT = 124


class HeadUnreachable(ProviderError):
    """The machine does not answer: off, or no way to it. The run may go on there."""


class HeadRefused(RLBoostError):
    """A command failed on the head; `exit_code` is that command's."""

    def __init__(self, problem: str, remedy: str, exit_code: int = 1) -> None:
        super().__init__(problem, remedy)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Printed:
    """What a command there printed."""

    out: str
    err: str


class Head:
    """The head of one run."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.place = kept_place(run)
        self._ssh = ssh_to(self.place)
        self._program = resources.files("rlboost_runtime.remote").joinpath("head.py").read_bytes()

    def ask(
        self,
        do: str,
        *,
        say: Say = lambda words: None,
        payload: Iterable[bytes] = (),
        seconds: float = COMMAND_S,
        **more: object,
    ) -> tuple[dict[str, Any], bytes]:
        """Return the answer of `remote/head.py` there, and the bytes that came with it. Raises
        `HeadUnreachable`, `CredentialsRejected`, and `RuntimeFault` where the machine cannot do it."""
        if not self.place.host:
            raise HeadUnreachable(
                f"the head of {self.run.name} has not been rented yet",
                f"rlboost launch {self.run.name} rents it; rlboost down {self.run.name} abandons the run",
            )
        request = {
            "do": do,
            "folder": self.place.folder,
            "python": self.place.python,
            "owner": owner_of(home()),
            "run": self.run.name,
            "seconds": seconds,
            **more,
        }
        try:
            answer, blob = self._ssh.talk(
                self._program,
                request,
                lambda output: _read_answer(output, say, time.monotonic() + seconds + QUIET_S),
                payload,
                QUIET_S,
            )
        except CredentialsRejected:
            raise
        except ProviderError as error:
            raise HeadUnreachable(
                f"the head of {self.run.name} does not answer: {error.problem}",
                f"repeat the command once `ssh {self.place.host} true` works; a run that has started"
                " continues there",
            ) from error
        if "problem" in answer:
            raise RuntimeFault(
                f"{self.place.host}: {answer['problem']}", "correct that there, then repeat the command"
            )
        return answer, blob

    def rlboost(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        seconds: float = COMMAND_S,
        answers_with: Container[int] = (0,),
    ) -> Printed:
        """Run a command of `rlboost` there; its exit codes `answers_with` come with an answer. Raises
        `HeadRefused` with the error that it reports."""
        answer, _ = self.ask(
            "rlboost",
            arguments=list(arguments),
            environment={**(environment or {}), ERRORS_VARIABLE: "json"},
            seconds=seconds,
        )
        if answer["status"] not in answers_with or (answer["status"] != 0 and not answer["out"]):
            raise self._refusal(arguments, answer, seconds)
        return Printed(answer["out"], answer["err"])

    def close(self) -> None:
        """Close the connection."""
        self._ssh.close()

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refusal(self, arguments: tuple[str, ...], answer: dict[str, Any], seconds: float) -> HeadRefused:
        if answer["status"] == _TIMED_OUT:
            return HeadRefused(
                f"`rlboost {arguments[0]}` on {self.place.host} took more than {seconds:.0f} s",
                f"rlboost logs {self.run.name} shows what was printed there; repeat the command",
            )
        printed, code = str(answer["err"]), int(answer["status"])
        error = read_error(printed)
        if error is None:  # a usage error, or no `rlboost` that can be started
            remedy = f"rlboost logs {self.run.name} shows what was printed there"
            return HeadRefused(f"on {self.place.host}: {printed.strip()}", remedy, code)
        return HeadRefused(f"on {self.place.host}: {error.problem}", error.remedy, error.exit_code)


def ssh_to(place: HeadPlace) -> SshHost:
    """Return the connection to the machine of a head; it is opened by the first request."""
    return SshHost(
        place.host, jump_host=place.jump_host, identity_file=place.identity_file, host_key=place.host_key
    )


def _read_answer(output: BinaryIO, say: Say, deadline: float) -> tuple[dict[str, Any], bytes]:
    """Read up to the answer. Raises `RuntimeFault` at the deadline, `ValueError` if it ends without one."""
    for line in iter(output.readline, b""):
        message = json.loads(line)
        if "answer" in message:
            blob = output.read(message["bytes"])
            if len(blob) != message["bytes"]:
                raise ValueError("the answer was cut off")
            return message["answer"], blob
        if message["say"]:
            say(message["say"])
        if time.monotonic() > deadline:
            raise RuntimeFault("the head is still busy with it", "repeat the command")
    raise ValueError("it printed no answer")
