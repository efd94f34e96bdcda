"""Faults on purpose in a running run: a seed draws what dies when, and the audit of the ended run judges.

On this machine every process of the run is within reach: roles of the head, and agents and engines of local
machines. Machines of a cloud are preempted as `rlboost preempt` does it. Where the head is elsewhere, its own
`rlboost chaos` makes each fault.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import psutil

from rlboost_cli.evidence.audit import audit_of
from rlboost_cli.runs import client
from rlboost_cli.terminal.text import counted
from rlboost_runtime.billing.books import unsettled
from rlboost_runtime.errors import ConfigError, NotFound, RLBoostError
from rlboost_runtime.processes import kill_tagged, tagged, tagged_by_machine
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.index import is_open

Say = Callable[[str], None]

NOTICE_S = (2.0, 10.0)
"""Shortest and longest notice of a preemption."""
PAUSE_S = (0.5, 8.0)
"""Shortest and longest pause of a process: some are shorter than a heartbeat's deadline, some longer."""
REMOTE_FAULT_S = 120.0
"""Longest wait for a fault on a head elsewhere."""
_POLL_S = 0.5


@dataclass(slots=True)
class Chaos:
    """What was done to a run. `faults`: how often, by kind; `missed`: how often there was nothing to hit."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)


def require_evidence(run: RunFolder) -> None:
    """Raise `ConfigError` for a run that cannot be audited afterwards, `NotFound` for one that has ended."""
    if not is_open(run):
        raise NotFound(f"run {run.name} has ended", "rlboost status lists open runs")
    if not ((read_json(run.job_json) or {}).get("evidence") or {}).get("keep_journal"):
        raise ConfigError(
            f"{run.name} could not be audited afterwards: evidence.keep_journal is not set in its job",
            "write `evidence: {keep_journal: true, count_tokens: true}` into the job file of the next run",
        )


def make_faults(
    run: RunFolder,
    *,
    seed: int,
    kinds: Iterable[str],
    every_s: float,
    seconds: float,
    most: int | None,
    say: Say,
) -> Chaos:
    """Make faults in `run` until it ends, `seconds` have passed or `most` were made.

    Kinds and their times follow from the seed alone; what they hit depends on what lives. Between two faults
    pass `every_s` on average, between half and one and a half times that.
    """
    random, among = Random(seed), sorted(kinds)  # noqa: S311 - not for secrets
    done, until = Chaos(seed), time.monotonic() + seconds
    while is_open(run) and time.monotonic() < until and (most is None or done.faults.total() < most):
        kind, own_seed = random.choice(among), random.getrandbits(64)
        try:
            what = (_fault_there if run.head.exists() else _fault_here)(run, kind, own_seed)
        except RLBoostError as problem:  # the coordinator restarts, the machine is already gone, ...
            say(f"{kind}: nothing done, {problem}")
            what = ""
        else:
            say(what or f"{kind}: nothing to hit")
        (done.faults if what else done.missed)[kind] += 1
        if most is None or done.faults.total() < most:
            _wait_while_open(run, min(random.uniform(0.5, 1.5) * every_s, until - time.monotonic()))
    return done


def verdict(run: RunFolder, done: Chaos) -> dict[str, Any]:
    """Return what chaos did to an ended run and what its audit found; `pass`: it trained all its steps, every
    promise held and nothing is left of it."""
    found, outcome = audit_of(run), read_json(run.outcome) or {}
    left = [f"process {process.pid}" for process in tagged(run.path)] + [
        f"machine {bill.machine}" for bill in unsettled(run)
    ]
    return {
        "run": run.name,
        "seed": done.seed,
        "faults": dict(sorted(done.faults.items())),
        "missed": dict(sorted(done.missed.items())),
        "state": outcome.get("state"),
        "responses": found["responses"],
        "tokens": found["tokens"],
        "problems": found["problems"],
        "left": left,
        "pass": bool(found["clean"] and not left and outcome.get("state") == "done"),
    }


def verdict_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the verdict as a person reads it."""
    yield f"seed       {found['seed']}"
    yield f"faults     {_counts(found['faults'])}"
    if found["missed"]:
        yield f"missed     {_counts(found['missed'])}: nothing to hit, or the run did not answer"
    yield f"run        {found['state']}"
    yield f"responses  {_counts(found['responses'])}"
    lost = found["tokens"]["lost"]
    yield f"tokens     {found['tokens']['accepted']:,} accepted" + (
        "" if lost is None else f", {lost:,} lost with their instances and generated again"
    )
    problems = [*found["problems"], *(f"{name} is left" for name in found["left"])]
    if found["pass"]:
        yield "\npassed: every response ended once, with tokens of its step's policy version only"
    elif problems:
        yield f"\nfailed, {counted(len(problems), 'problem')}:"
        yield from (f"  {problem}" for problem in problems)
    else:
        yield f"\nfailed: the run {found['state']}; rlboost logs {found['run']} shows what happened"


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in numbers.items() if number) or "none"


def _wait_while_open(run: RunFolder, seconds: float) -> None:
    until = time.monotonic() + seconds
    while is_open(run) and (left := until - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left))


def _fault_there(run: RunFolder, kind: str, seed: int) -> str:
    from rlboost_cli.head.connection import Head

    one = ("--only", kind, "--seed", str(seed), "--faults", "1", "--no-audit", "--yes-this-costs", "--json")
    with Head(run) as head:
        answer = json.loads(head.rlboost("chaos", run.name, *one, seconds=REMOTE_FAULT_S).out)
    return f"{kind}, on the head" if answer["faults"] else ""


def _fault_here(run: RunFolder, kind: str, seed: int) -> str:
    return FAULTS[kind](run, Random(seed))  # noqa: S311


# --- kinds: each returns what it did; "" where there was nothing to do it to --------------------------------


def _kill_role(role: str, name: str) -> Callable[[RunFolder, Random], str]:
    def kill(run: RunFolder, random: Random) -> str:
        return f"killed the {name} (SIGKILL)" if kill_tagged(run.path, role=role) else ""

    return kill


def _kill_on_machine(run: RunFolder, random: Random) -> str:
    found = _process_of_a_machine(run, random)
    if found is None:
        return ""
    machine, process = found
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return ""
    return f"killed process {process.pid} of {machine} (SIGKILL)"


def _pause(run: RunFolder, random: Random) -> str:
    """Stop a process for a while, as a machine does that swaps or a hypervisor that moves it."""
    found = _process_of_a_machine(run, random)
    roles = [("the coordinator", process) for process in tagged(run.path, role="coordinator")[:1]]
    name, process = random.choice([*roles, *([found] if found else [])] or [("", None)])
    if process is None:
        return ""
    seconds = random.uniform(*PAUSE_S)
    try:
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:  # also after Ctrl-C
            process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        return ""
    return f"stopped process {process.pid} of {name} for {seconds:.1f} s"


def _preempt(run: RunFolder, random: Random) -> str:
    machine = _spot_machine(run, random)
    if machine:
        client.preempt(run, machine, None)
    return f"preempted {machine} at once" if machine else ""


def _notice(run: RunFolder, random: Random) -> str:
    machine, seconds = _spot_machine(run, random), random.uniform(*NOTICE_S)
    if machine:
        client.preempt(run, machine, seconds)
    return f"preempted {machine} with {seconds:.1f} s of notice" if machine else ""


FAULTS: dict[str, Callable[[RunFolder, Random], str]] = {
    "coordinator": _kill_role("coordinator", "coordinator"),
    "trainer": _kill_role("trainer", "trainer"),
    "weights": _kill_role("weights", "weight server"),
    "process": _kill_on_machine,
    "pause": _pause,
    "preempt": _preempt,
    "notice": _notice,
}
"""Each kind of fault; the same names are what `--only` takes."""


def _process_of_a_machine(run: RunFolder, random: Random) -> tuple[str, psutil.Process] | None:
    processes = [(name, each) for name, found in tagged_by_machine(run.path).items() for each in found]
    return random.choice(sorted(processes, key=lambda pair: pair[1].pid)) if processes else None


def _spot_machine(run: RunFolder, random: Random) -> str:
    machines = client.get_status(run)["machines"]
    running = sorted(row["id"] for row in machines if row["pool"] == "spot" and row["state"] == "running")
    return random.choice(running) if running else ""
