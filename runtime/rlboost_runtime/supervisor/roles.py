"""The processes of a run on its head: what each is started with, and when it may start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlboost_providers.registry import has_market
from rlboost_runtime.agent.bootstrap import write_bootstrap
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.deploy.bootstrap import make_bootstrap, reserved_instances
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.reserved import RESERVED_MACHINE, joined_nodes


@dataclass(frozen=True, slots=True)
class Role:
    """One process that is kept alive. Its identity file has the same `name`."""

    name: str
    command: tuple[str, ...]
    machine: str | None = None
    """Its machine tag, for reserved agents."""
    log_name: str | None = None
    """File under the run's logs; by default NAME.log."""
    may_start: Callable[[], bool] = lambda: True
    prepare: Callable[[], None] = lambda: None
    """Called right before each start."""
    progress: Callable[[], int] = lambda: 0
    """Returns a number that changes with every progress that is not to count against the role."""
    measures_progress: bool = False
    """True if only that is progress; else living long enough is, too."""

    @property
    def needs_memory(self) -> bool:
        """True if it holds a model, so that a SIGKILL most likely means that there was no memory left."""
        return self.name.startswith(("trainer", "agent-"))

    def identity(self, run: RunFolder) -> Path:
        """Return the file that identifies its process: {"pid", "start"}."""
        return run.processes / f"{self.name}.json"

    def log(self, run: RunFolder) -> Path:
        """Return its log file."""
        return run.logs / (self.log_name or f"{self.name}.log")


def roles_of(job: Job, run: RunFolder) -> list[Role]:
    """Return the roles of `job`, in the order in which they are started."""
    shared = partial(_run_progress, run)
    roles = [
        _module("coordinator", "rlboost_runtime.coordinator", run),
        _module("weights", "rlboost_runtime.weights.serve.server", run),
        *(_reserved_agent(job, run, instance) for instance in reserved_instances(job)),
    ]
    if job.endpoint is not None or job.environment is not None:
        roles.append(_module("endpoint", "rlboost_runtime.inference", run))
    if job.dashboard is not None:
        roles.append(_module("dashboard", "rlboost_cli.dashboard", run))
    if job.output is not None:
        roles.append(_module("backup", "rlboost_runtime.backup", run))
    if has_market(job):
        roles.append(_module("market", "rlboost_providers.local.market", run))
    script = job.trainer.script
    trainer = Role(
        "trainer",
        _python("rlboost_runtime.trainer", str(run.path))
        if script is None
        else (sys.executable, str(run.files / script)),
        may_start=lambda: bool((read_json(run.wanted) or {}).get("train")) and _nodes_are_there(job, run),
        progress=lambda: _num_lines(run.metrics),
        measures_progress=True,
    )
    return [*(replace(role, progress=shared) for role in roles), trainer]


def _nodes_are_there(job: Job, run: RunFolder) -> bool:
    """Return True if all further nodes that are bought for the trainer have dialled in."""
    return len(joined_nodes(run)) >= job.trainer.bought_nodes


def _run_progress(run: RunFolder) -> int:
    """Return a number that changes when any role gets on: steps are trained, or tokens are journalled."""
    segments = (path.stat().st_size for path in run.journal.glob("*.seg"))
    try:
        num_bytes = sum(segments)
    except FileNotFoundError:  # a step's was dropped this moment: it is trained
        num_bytes = 0
    return hash((num_bytes, _num_lines(run.metrics)))


def _module(name: str, module: str, run: RunFolder) -> Role:
    return Role(name, _python(module, str(run.path)))


def _reserved_agent(job: Job, run: RunFolder, instance: str) -> Role:
    number = instance.rpartition("/")[2]
    bootstrap = run.reserved / RESERVED_MACHINE / "bootstrap.json"

    def prepare() -> None:
        bootstrap.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        instances = reserved_instances(job)
        write_bootstrap(bootstrap, make_bootstrap(job, run, RESERVED_MACHINE, Pool.RESERVED, instances))

    return Role(
        f"agent-{RESERVED_MACHINE}-{number}",
        _python("rlboost_runtime.agent", str(bootstrap), instance),
        machine=RESERVED_MACHINE,
        log_name=f"machines/{RESERVED_MACHINE}/agent-{number}.log",
        may_start=run.endpoint.exists,
        prepare=prepare,
    )


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def _num_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
