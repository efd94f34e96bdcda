"""What a run looks like: from its coordinator while it answers, else from the files that it left.

Data only; `output` shows it.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from rlboost_runtime.errors import NotFound, RLBoostError
from rlboost_runtime.money import MICRO_USD_PER_USD
from rlboost_runtime.protocol.status import Status, read_status
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.index import all_runs, is_supervised

if TYPE_CHECKING:
    from rlboost_cli.head.connection import Head


_ALWAYS = (
    *("step", "steps", "policy_version", "reward_mean", "reward_history", "tokens", "responses"),
    *("preemptions", "seeding", "machines", "instances", "cost", "warnings"),
)
"""Keys of `status --json` that are there also before the coordinator has written its first status."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A status and how much to trust it."""

    data: dict[str, Any]
    """A `Status` as JSON, with the `outcome` of a run that has ended."""
    is_live: bool
    """From the coordinator itself, just now."""
    has_ended: bool
    age_s: float
    """Age of the data: 0 where live."""
    problem: str | None = None
    """Why the coordinator does not answer; None where it does, or has nothing left to do."""
    is_supervised: bool = True
    """True if somebody restarts the run's processes; not asked of a run that has ended."""
    is_reached: bool = True
    """True if the head answers; a run goes on without the laptop, so that silence says nothing about it."""
    was_started: bool = True
    """False until a head elsewhere has been asked to start the run."""

    @property
    def status(self) -> Status:
        """`data` as a structure, where what is missing has its default."""
        return read_status(self.data)


def run_status(run: RunFolder, timeout_s: float = 2.0, head: Head | None = None) -> RunStatus:
    """Return one run's status; from its files where it has ended or its coordinator does not answer.

    `head`: an open conversation with a head elsewhere.
    """
    if run.head.exists():
        return _status_elsewhere(run, head)
    ended = run.outcome.exists()
    problem = None
    if not ended:
        from rlboost_cli.runs import client  # TLS: a tenth of a second that the list of runs does without

        try:
            data = client.get_status(run, timeout_s)
            return RunStatus(data, is_live=True, has_ended=False, age_s=0.0, is_supervised=is_supervised(run))
        except client.NotAnswering as silence:
            ended = run.outcome.exists()  # it may have ended this very moment
            is_ending = run.ending.exists() and is_supervised(run)  # then its coordinator leaves on purpose
            problem = None if ended or is_ending else silence.problem
    return RunStatus(
        _stored(run),
        is_live=False,
        has_ended=ended,
        age_s=_age_s(run),
        problem=problem,
        is_supervised=ended or is_supervised(run),
    )


def status_json(run: RunFolder, found: RunStatus) -> dict[str, Any]:
    """Return the status as one JSON object."""
    job = read_json(run.job_json) or {}
    nothing_yet = to_builtins(Status(steps=job.get("algorithm", {}).get("steps")))
    nothing_yet["cost"] |= {"spent_usd": 0.0, "budget_usd": job.get("budget", {}).get("max_usd")}
    first = {name: nothing_yet[name] for name in _ALWAYS}
    return first | found.data | {"live": found.is_live, "age_s": round(found.age_s, 1)}


def runs_table() -> list[dict[str, Any]]:
    """Return one row per run, oldest first, from files only: quick, and also right while nothing answers."""
    return [_row(run) for run in all_runs()]


def _row(run: RunFolder) -> dict[str, Any]:
    """Return one run's row, also where a file of it is damaged: it must not hide the others."""
    try:
        return _sound_row(run)
    except (RLBoostError, OSError, ValueError, TypeError, AttributeError):
        unknown = dict.fromkeys(("steps", "reward_mean", "spent_usd", "age_s"))
        return {"run": run.name, "state": "damaged", "running": False, "step": 0, **unknown}


def spent_micro_usd(run: RunFolder) -> int | None:
    """Return what the run has spent by its ledger; None where it has none."""
    from rlboost_runtime.billing.ledger import Ledger

    try:
        with closing(Ledger(run.ledger, read_only=True)) as ledger:
            return ledger.total_micro_usd(time.time())
    except NotFound:
        return None


def _status_elsewhere(run: RunFolder, head: Head | None) -> RunStatus:
    """Return the status that the head elsewhere has now, or that it had when it was last seen."""
    from rlboost_cli.head.mirror import is_live, refresh_if_elsewhere, was_started
    from rlboost_cli.runs.refresh import asked_of_its_cloud

    if not run.outcome.exists() and not was_started(run):
        return _status_before_its_start(run)
    silence = refresh_if_elsewhere(run, head=head)
    if silence is not None:
        silence = asked_of_its_cloud(run, lambda words: None, silence)
    ended, live = run.outcome.exists(), silence is None and is_live(run)
    problem = silence
    if silence is None and not ended and not live and not run.ending.exists():
        problem = f"the coordinator of {run.name} does not answer on its head"
    return RunStatus(
        _stored(run),
        is_live=live and not ended,
        has_ended=ended,
        age_s=0.0 if live and not ended else _age_s(run),
        problem=None if ended else problem,
        is_supervised=ended or is_supervised(run),
        is_reached=ended or silence is None,
    )


def _status_before_its_start(run: RunFolder) -> RunStatus:
    from rlboost_cli.head.renting import rate_of
    from rlboost_runtime.billing.launch_records import current_head_machine

    bought, cost = current_head_machine(run), ""
    if bought is not None and bought.ended_at is None:
        cost = f"; {bought.machine} in {bought.zone} may be running for it, at {rate_of(bought)}"
    return RunStatus(
        _stored(run),
        is_live=False,
        has_ended=False,
        age_s=_age_s(run),
        problem=f"{run.name} was not started on its head yet{cost}",
        is_reached=False,
        was_started=False,
    )


def _stored(run: RunFolder) -> dict[str, Any]:
    data: dict[str, Any] = {"run": run.name, "state": "provisioning"} | (read_json(run.status) or {})
    outcome = read_json(run.outcome)
    if outcome is not None:
        data |= {"state": outcome.get("state", "stopped"), "outcome": outcome}
        data["cost"] = _closed(run, data.get("cost") or {})
    if data.get("steps") is None:  # nothing has reported yet: the job says it
        data["steps"] = (read_json(run.job_json) or {}).get("algorithm", {}).get("steps")
    return data


def _closed(run: RunFolder, cost: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of an ended run: a coordinator that was killed did not write what the books say now."""
    with contextlib.suppress(RLBoostError):
        spent = spent_micro_usd(run)
        if spent is not None:
            known = cost.get("spent_usd") or 0.0
            return {**cost, "spent_usd": max(known, spent / MICRO_USD_PER_USD)}
    return cost


def _age_s(run: RunFolder) -> float:
    path = run.status if run.status.exists() else run.job_json
    return max(0.0, time.time() - path.stat().st_mtime)


def _sound_row(run: RunFolder) -> dict[str, Any]:
    status = read_status(_stored(run))
    job = read_json(run.job_json) or {}
    spent, serving = spent_micro_usd(run), status.serving
    steps = job.get("algorithm", {}).get("steps") if status.steps is None else status.steps
    return {
        "run": run.name,
        "state": status.state,
        "running": not run.outcome.exists() and is_supervised(run),
        "step": status.step,
        "steps": steps if serving is None else None,
        "requests_answered": None if serving is None else serving.finished,
        "reward_mean": status.reward_mean,
        "spent_usd": None if spent is None else spent / MICRO_USD_PER_USD,
        "age_s": round(_age_s(run), 1),
        "started_at": status.started_at,
    }
