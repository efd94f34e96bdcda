"""The rollout fleet of a run, for a training loop of your own (docs/own-trainer.md)::

    with Fleet.of_run() as fleet:                     # the run that started this process
        model = AutoModelForCausalLM.from_pretrained(fleet.model())
        tokenizer = AutoTokenizer.from_pretrained(fleet.model())
        for step in range(fleet.job.algorithm.steps):
            fleet.publish(model, tokenizer)           # weights of this step
            groups = fleet.roll_out(step, prompts, group_size=8, max_response_tokens=512)
            reward_mean = train(model, prompts, groups)
            fleet.trained(step, reward_mean=reward_mean)
        fleet.finished(save(model))

A thin layer over `StepStream` (the conversation with the coordinator) and `WeightStore` (immutable versions),
which may be used directly where this is too simple: groups one by one as they finish, recalls of the GPU.

Guarantees: `roll_out` returns every response of every prompt exactly once, whatever machines come and go, all
of its tokens sampled from the weights last published; the GPU is the caller's from its return to its next
call. A process that was killed may ask for its step again: under the same weights it is given what is
finished, under others the step is generated anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.job import Job, TinyModel, read_resolved
from rlboost_runtime.protocol.messages import (
    DeliverGroupMessage,
    FinishedResponse,
    PromptSpec,
    StepTrainedMessage,
    VersionPublishedMessage,
)
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.trainer.artifacts.output import OutputCopies
from rlboost_runtime.trainer.data.prompts import Example, read_examples
from rlboost_runtime.trainer.learn.sample import Logprobs, TokenIds
from rlboost_runtime.trainer.learn.version_files import (
    find_tied,
    greedy_probe,
    scratch_folder,
    stop_token_ids,
    untied_state,
    write_version,
)
from rlboost_runtime.trainer.models.tiny import prepare
from rlboost_runtime.trainer.rollout.metrics import MetricsLog
from rlboost_runtime.trainer.rollout.step_stream import StepStream
from rlboost_runtime.weights.manifest import Manifest, content_digest, describe_file, read_manifest
from rlboost_runtime.weights.store.store import WeightStore

KEEP_VERSIONS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One response. `token_logprobs`: natural logs under the distribution sampled from, one per token."""

    ids: TokenIds
    token_logprobs: Logprobs
    finish_reason: str
    """stop, length, or quarantined: it made engines fail, and has whatever tokens it got to."""
    num_instances: int
    """Machines that had a part in it; more than 1: it was migrated."""

    @property
    def token_ids(self) -> list[int]:
        """Return `ids` as Python numbers, made anew for each call."""
        return self.ids.tolist()

    @property
    def logprobs(self) -> list[float]:
        """Return `token_logprobs` as Python numbers, made anew for each call."""
        return self.token_logprobs.tolist()


class RolloutClient:
    """See the module. For one thread; `with` starts and ends the connection."""

    def __init__(self, run: RunFolder, job: Job, stream: StepStream) -> None:
        self.run = run
        self.job = job
        self.stream = stream
        self._store = WeightStore(run.weights, keep=KEEP_VERSIONS, chunk_bytes=job.weights.chunk_bytes)
        self._metrics = MetricsLog(run.metrics)
        self._version: int | None = None
        self._stops: frozenset[int] = frozenset()
        self._began = time.monotonic()
        self._last_trained: int | None = None
        self._num_tokens = 0

    @classmethod
    def of_run(cls, folder: str | Path | None = None) -> RolloutClient:
        """Return the fleet of the run in `folder`; None: of the run that started this process.

        Raises `ConfigError` where there is no such run.
        """
        named = folder if folder is not None else os.environ.get("RLBOOST_RUN", "")
        run = RunFolder(Path(named).absolute())
        if not named or not run.job_json.exists():
            raise ConfigError(
                f"no run in {named!r}" if named else "this process belongs to no run",
                "name the script as trainer.script in a job file and type rlboost launch, or give a folder",
            )
        return cls(run, read_resolved(run.job_json), StepStream.for_run(run))

    def __enter__(self) -> Self:
        self.stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.__exit__(kind, error, trace)

    # --- what the job says ---------------------------------------------------------------------------------

    def model(self) -> str:
        """Return the folder or hub id of the job's model; a tiny one is made, without a warm-up."""
        model = self.job.model
        if isinstance(model, TinyModel):
            bare = model.model_copy(update={"warmup": None})
            folder, _ = prepare(self.job, bare, self.run.files, warm=lambda policy: _no_warmup())
            return str(folder)
        folder = self.run.files / model
        return str(folder) if folder.is_dir() else model

    def examples(self) -> list[Example]:
        """Return the job's data set. Raises `ConfigError`."""
        return read_examples(self.job.data, self.run.files)

    # --- weights -------------------------------------------------------------------------------------------

    def publish(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        state: Mapping[str, Tensor] | None = None,
    ) -> int:
        """Make the model's weights the ones that engines roll out with; return their version.

        `state`: all weights by name, whole, on any device, for models whose own parameters are not (sharded,
        or with adapters that have to be merged first); then `model` must still be able to compute logits.
        Blocks for the disk. Weights that are stored already are not written again.
        """
        tied = find_tied(model)
        self._stops = stop_token_ids(model, tokenizer)
        dtype = self.job.rollout.engine_args.dtype
        started = time.monotonic()
        weights = untied_state(model, tied) if state is None else state

        def write(folder: Path) -> None:
            write_version(folder, model, weights, dtype)

        manifest = self._stored(write) if self._version is None else None
        if manifest is None:
            text = tokenizer.encode("The probe")[:64]
            probe = greedy_probe(model, text, self._stops, dtype)
            version = max([-1, *self._store.versions()]) + 1
            manifest = self._store.publish(version, write, probe, tied)
        self._version = manifest.version
        seconds = time.monotonic() - started
        self.stream.publish(
            VersionPublishedMessage(manifest.version, manifest.content_digest, manifest.num_bytes, seconds)
        )
        return manifest.version

    def _stored(self, write: Callable[[Path], None]) -> Manifest | None:
        """Return the stored version with the same content: what was published before this process began."""
        versions = self._store.versions()
        if not versions:
            return None
        with scratch_folder(self.run.path) as folder:
            write(folder)
            files = [describe_file(path, self._store.chunk_bytes) for path in sorted(folder.iterdir())]
            digest = content_digest(files)
        manifests = (read_manifest(self._store.path(version)) for version in reversed(versions))
        return next((manifest for manifest in manifests if manifest.content_digest == digest), None)

    # --- steps ---------------------------------------------------------------------------------------------

    def roll_out(
        self, step: int, prompts: Sequence[Sequence[int]], *, group_size: int, max_response_tokens: int
    ) -> list[list[Completion]]:
        """Return `group_size` responses for each prompt (token ids), in the prompts' order.

        Blocks until all are there and the GPU is the caller's; while it blocks, reserved engines may use the
        GPU, so its memory must be free (or `trainer.local_engines` 0). Raises what ended the stream.
        """
        if self._version is None:
            raise RuntimeFault("nothing was published yet", "call publish before roll_out")
        self._began = time.monotonic()
        specs = [PromptSpec(group, _bytes(token_ids)) for group, token_ids in enumerate(prompts)]
        self.stream.request_step(
            step, self._version, specs, group_size=group_size, max_response_tokens=max_response_tokens,
            stop_token_ids=sorted(self._stops),
        )  # fmt: skip
        done: dict[int, DeliverGroupMessage] = {}
        while groups := self.stream.next_groups(group_size * len(prompts)):
            done |= {group.group: group for group in groups}
        self.stream.hold_lease()
        found = [[_completion(each) for each in done[group].responses] for group in range(len(prompts))]
        self._num_tokens = sum(each.ids.size for group in found for each in group)
        return found

    def trained(self, step: int, *, reward_mean: float, metrics: Mapping[str, float] | None = None) -> None:
        """Say that a step is trained and saved: its tokens are forgotten, its numbers go to status, cost
        report and `metrics.jsonl`. Say it once what the step made would survive a crash."""
        waits = self.stream.waits
        step_s = time.monotonic() - self._began
        wait_s = waits.with_lease_s + waits.without_lease_s + waits.for_lease_s
        line = {
            "step": float(step),
            "policy_version": float(self._version or 0),
            "reward_mean": reward_mean,
            "tokens_trained": float(self._num_tokens),
            "rollout_wait_s": wait_s,
            "step_s": step_s,
            **(metrics or {}),
        }
        if self._last_trained is None:
            self._metrics.rewind(step)  # a step that was trained, but not saved, before this process began
        self._last_trained = step
        self._metrics.append(dict(line))
        busy_s = max(0.0, step_s - wait_s)
        self.stream.trained(
            StepTrainedMessage(step, waits.with_lease_s, busy_s, self._num_tokens, reward_mean, line)
        )

    def finished(self, model_path: str | Path) -> None:
        """Copy the model, a folder, to the job's `output`; then say that the run is done and where the model
        lies: the fleet is ended. Raises `RuntimeFault`, having said it, where it cannot be copied."""
        output = OutputCopies.for_run(self.run, self.job)
        if output is not None:
            try:
                output.finish(Path(model_path))
            except RuntimeFault as fault:
                self.stream.failed(fault.problem, fault.remedy)
                raise
        self.stream.finished(str(model_path))

    def failed(self, problem: str, remedy: str) -> None:
        """Say that the run cannot go on, why, and what a person should do; then exit with status 78."""
        self.stream.failed(problem, remedy)


def _no_warmup() -> NoReturn:
    raise AssertionError("a bare tiny model has no warm-up")


def _bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def _completion(response: FinishedResponse) -> Completion:
    return Completion(
        np.frombuffer(response.token_ids, "<i4"),
        np.frombuffer(response.logprobs, "<f4"),
        str(response.finish_reason),
        len({segment.instance for segment in response.segments}),
    )
