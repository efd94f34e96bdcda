"""Step metrics for TensorBoard and Weights & Biases, and a trace per step for OpenTelemetry, as the job's
`tracking` asks for.

Guarantees: a run that comes back goes on with the same curves. What it repeats replaces what TensorBoard has;
W&B keeps what it was told first. A tracker that is asked for and not installed is a `ConfigError` before the
run begins; one that fails (a full disk, no network) is switched off with a warning and never ends a run, nor
holds it up for longer than `OPEN_S` at its beginning and `CLOSE_S` at its end. W&B that cannot be reached at
the beginning is kept offline instead.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, TypeAlias

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job, Wandb
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import RunFolder

log = logging.getLogger(__name__)


OPEN_S = 60.0
"""Longest time that W&B may take to begin a run."""
CLOSE_S = 60.0
"""Longest time for the last curves to arrive at W&B; what is left then lies in the run's `wandb/`."""


EXPORT_S = 10
"""Longest time for a batch of traces to arrive."""
LEAST_WAIT_NS = 1_000_000
"""Gaps shorter than this are none."""


class Block(NamedTuple):
    """What the trainer did at a time, in nanoseconds since the Unix epoch."""

    name: str
    began_ns: int
    ended_ns: int


Tracker: TypeAlias = "_TensorBoard | _Wandb | _Traces"
"""One place that curves or traces go to."""


class Trackers:
    """All that the job asks for; opened before the first step, for the training thread."""

    def __init__(self, run: RunFolder, job: Job, first_step: int) -> None:
        """Raises `ConfigError`."""
        require_packages(job)
        wanted = job.tracking.wandb
        self._trackers: list[Tracker] = []
        if job.tracking.tensorboard:
            self._open("tensorboard", lambda: _TensorBoard(run, first_step))
        if (otlp := job.tracking.otlp) is not None:
            self._open("otlp", lambda: _Traces(run, otlp))
        if wanted is None:
            return
        if wanted.offline or not self._open("wandb", lambda: _Wandb(run, job, wanted)):
            kept = wanted.model_copy(update={"offline": True})
            self._open("wandb, offline", lambda: _Wandb(run, job, kept))

    def _open(self, name: str, make: Callable[[], Tracker]) -> bool:
        """Add a tracker; return whether it could be opened."""
        try:
            self._trackers.append(make())
        except Exception as problem:  # noqa: BLE001 - as below
            event(log, "tracking.not_opened", level=logging.WARNING, tracker=name, problem=repr(problem))
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in list(self._trackers):
            self._guarded(tracker, tracker.close)

    def log(self, line: Mapping[str, float], blocks: Sequence[Block] = ()) -> None:
        """Take a step's line of `metrics.jsonl`, and what the trainer did in it."""
        for tracker in list(self._trackers):
            self._guarded(tracker, partial(tracker.log, line, blocks))

    def _guarded(self, tracker: Tracker, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as problem:  # noqa: BLE001 - a foreign service's edge: curves are not worth a run
            self._trackers.remove(tracker)
            event(
                log, "tracking.switched_off", level=logging.WARNING,
                tracker=type(tracker).__name__.strip("_"), problem=repr(problem),
            )  # fmt: skip


def require_packages(job: Job) -> None:
    """Raise `ConfigError` if a package that the job's `tracking` needs is not installed here."""
    needed = {
        "tensorboard": ("tensorboard", "tensorboard", job.tracking.tensorboard),
        "otlp": (
            "opentelemetry.exporter.otlp.proto.http",
            "opentelemetry-exporter-otlp-proto-http",
            job.tracking.otlp is not None,
        ),
        "wandb": ("wandb", "wandb", job.tracking.wandb is not None),
    }
    for field, (package, distribution, is_wanted) in needed.items():
        if is_wanted and not _is_installed(package):
            raise ConfigError(
                f"tracking.{field}: {distribution} is not installed on the head",
                "type: pip install 'rlboost[track]'",
            )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


class _TensorBoard:
    """Event files in the run's `tensorboard/`; steps from the first one on replace what is there."""

    def __init__(self, run: RunFolder, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # a second to import

        self._writer = SummaryWriter(str(run.tensorboard), purge_step=first_step or None)

    def log(self, line: Mapping[str, float], blocks: Sequence[Block]) -> None:
        for name, value in line.items():
            self._writer.add_scalar(name, value, int(line["step"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A W&B run of the same name; offline it lies in the run's `wandb/` and `wandb sync` sends it later."""

    def __init__(self, run: RunFolder, job: Job, wanted: Wandb) -> None:
        import wandb  # seconds to import

        settings = wandb.Settings(
            console="off", silent=True, init_timeout=OPEN_S, login_timeout=OPEN_S, finish_timeout=CLOSE_S,
        )  # fmt: skip
        try:
            self._run: Any = wandb.init(  # its types are incomplete
                project=wanted.project, entity=wanted.entity, name=run.name, id=run.name, resume="allow",
                dir=str(run.path), mode="offline" if wanted.offline else "online",
                config=job.model_dump(mode="json"), settings=settings,
            )  # fmt: skip
        except Exception:
            wandb.teardown()  # its service would hold the name of this run
            raise

    def log(self, line: Mapping[str, float], blocks: Sequence[Block]) -> None:
        self._run.log(dict(line), step=int(line["step"]))

    def close(self) -> None:
        self._run.finish()


class _Traces:
    """A trace per step, sent by OTLP over HTTP: the step with its figures, below it what the trainer did.

    Time of the step that no block covers is a `wait`: for responses, rewards or the GPUs. Sent by a thread of
    its own; what a collector does not take within its deadline is dropped.
    """

    def __init__(self, run: RunFolder, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would say each lost batch
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "rlboost", "rlboost.run": run.name})
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rlboost")

    def log(self, line: Mapping[str, float], blocks: Sequence[Block]) -> None:
        from opentelemetry import trace

        if not blocks or "step_s" not in line:
            return  # of the final weights: there is no step
        ended = max(block.ended_ns for block in blocks)
        began = min(blocks[0].began_ns, ended - round(line["step_s"] * 1e9))
        root = self._tracer.start_span("step", start_time=began, attributes=dict(line))
        within = trace.set_span_in_context(root)
        for name, from_ns, to_ns in _with_waits(blocks, began):
            self._tracer.start_span(name, within, start_time=from_ns).end(to_ns)
        root.end(ended)

    def close(self) -> None:
        self._provider.shutdown()


def _with_waits(blocks: Sequence[Block], began_ns: int) -> list[Block]:
    """Return the blocks in order, those of one name that follow one another as one, and the gaps as waits."""
    found: list[Block] = []
    at = began_ns
    for block in sorted(blocks, key=lambda block: block.began_ns):
        if block.began_ns - at > LEAST_WAIT_NS:
            found.append(Block("wait", at, block.began_ns))
        last = found[-1] if found else None
        if last is not None and last.name == block.name:
            found[-1] = Block(block.name, last.began_ns, max(last.ended_ns, block.ended_ns))
        else:
            found.append(block)
        at = max(at, block.ended_ns)
    return found
