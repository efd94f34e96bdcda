"""The rollouts of a run, for a training loop of your own (docs/own-trainer.md)::

    with RolloutClient.of_run() as client:            # the run that started this process
        model = AutoModelForCausalLM.from_pretrained(client.model())
        tokenizer = AutoTokenizer.from_pretrained(client.model())
        for step in range(client.job.algorithm.steps):
            client.publish(model, tokenizer)          # weights of this step
            groups = client.roll_out(step, prompts, group_size=8, max_response_tokens=512)
            reward_mean = train(model, prompts, groups)
            client.trained(step, reward_mean=reward_mean)
        client.finished(save(model))

Our own trainer (`loop.py`) is written on it, too, with the parts that overlap: `begin_publication` returns
while the version is written, `request_step` returns at once, and `stream` (`StepStream`) gives groups one by
one as they finish, recalls of the GPU and the end of the run.

Guarantees: `roll_out` returns every response of every prompt exactly once, whatever machines come and go, all
of its tokens sampled from the weights last published; the GPU is the caller's from its return to its next
call. A version number is never used for other weights. A process that was killed may ask for its step again:
under the same weights it is given what is finished, under others the step is generated anew.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.fit.plan import host_bytes_to_come
from rlboost_runtime.job import Job, TinyModel
from rlboost_runtime.protocol.messages import (
    DeliverGroupMessage,
    FinishedResponse,
    PromptSpec,
    StepTrainedMessage,
    VersionPublishedMessage,
)
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.resolved import read_resolved
from rlboost_runtime.trainer.artifacts.output import OutputCopies
from rlboost_runtime.trainer.artifacts.publisher import Publication, Publisher, VersionContent
from rlboost_runtime.trainer.data.reading import Example, read_examples
from rlboost_runtime.trainer.learn.model_files import (
    find_tied,
    greedy_probe,
    next_logprobs,
    stop_token_ids,
    version_configs,
)
from rlboost_runtime.trainer.learn.sample import Logprobs, TokenIds
from rlboost_runtime.trainer.models.tiny import prepare
from rlboost_runtime.trainer.rollout.metrics import MetricsLog
from rlboost_runtime.trainer.rollout.step_stream import StepStream
from rlboost_runtime.weights.delta.torch_finder import best_finder
from rlboost_runtime.weights.store.placing import VersionPlacing
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
        found: list[int] = self.ids.tolist()
        return found

    @property
    def logprobs(self) -> list[float]:
        """Return `token_logprobs` as Python numbers, made anew for each call."""
        found: list[float] = self.token_logprobs.tolist()
        return found


class RolloutClient:
    """See the module. For one thread; `with` opens and closes the connection."""

    def __init__(self, run: RunFolder, job: Job, stream: StepStream[DeliverGroupMessage]) -> None:
        self.run = run
        self.job = job
        self.stream = stream
        self.store = WeightStore(
            run.weights,
            keep=KEEP_VERSIONS + job.algorithm.max_staleness,
            chunk_bytes=job.weights.chunk_bytes,
            max_deltas=0 if job.weights.transfer in ("full", "lora") else job.weights.max_deltas,
            finder=best_finder(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        )
        placing = VersionPlacing(
            run.weights, job.weights.keep_in, self.store.keep + 1,
            others=lambda: host_bytes_to_come(job, run.files), retire=self.store.retire,
        )  # fmt: skip
        dtype = job.rollout.engine_args.dtype
        self.publisher = Publisher(self.store, dtype, self._announce, placing.prepare)
        self.metrics = MetricsLog(run.metrics)
        self.version = -1
        """The version published last, or on its way into the store; -1: none."""
        self._stops: frozenset[int] = frozenset()
        self._began = time.monotonic()
        self._last_trained: int | None = None
        self._num_tokens = 0

    @classmethod
    def of_run(cls, folder: str | Path | None = None) -> RolloutClient:
        """Return the client of the run in `folder`; None: of the run that started this process.

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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.publisher.__exit__(kind, error, trace)
        finally:
            self.stream.close()

    # --- what the job says ---------------------------------------------------------------------------------

    def model(self) -> str:
        """Return the folder or hub id of the job's model; a tiny one is made, without a warm-up."""
        model = self.job.model
        if isinstance(model, TinyModel):
            bare = model.model_copy(update={"warmup": None})
            folder, _ = prepare(self.job, bare, self.run.files, warm=None)
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
        names = {entry.name for entry in tied}
        own = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in names}
        weights = own if state is None else state
        self._stops = stop_token_ids(model, tokenizer)
        keep_tokenizer(self.run, tokenizer)
        dtype = self.job.rollout.engine_args.dtype
        text = tokenizer.encode("The probe")[:64]
        content = VersionContent(
            weights.items,
            lambda: version_configs(model, dtype),
            lambda: greedy_probe(lambda ids: next_logprobs(model, ids), text, self._stops, dtype),
            tied,
        )
        if self.version >= 0 or not self.reuse_stored(content):
            self.begin_publication(content)
        self.publisher.ready()
        return self.version

    def begin_publication(self, content: VersionContent, at_least: int = 0) -> None:
        """Copy the weights; write the copy and announce it, under the next unused number, meanwhile.

        The number is `at_least` so high. `Publisher.ready` waits for the end; see `Publisher`.
        """
        version = max(at_least, self.version + 1, self.store.last_number() + 1)
        self.publisher.begin(version, content)
        self.version = version

    def reuse_stored(self, content: VersionContent) -> bool:
        """Announce the stored version with the same content, if there is one: an earlier process's. One that
        a lost head had is published again, under its number."""
        manifest = self.publisher.find_stored(content)
        if manifest is None:
            former = self.publisher.former_number(content)
            if former is not None:
                self.publisher.begin(former, content)
                self.version = former
            return former is not None
        self.version = manifest.version
        self._announce(Publication(manifest, 0.0, 0.0))
        return True

    def _announce(self, done: Publication) -> None:
        """Report that a version lies in the store; also called on the publisher's thread."""
        manifest = done.manifest
        self.stream.publish(
            VersionPublishedMessage(
                manifest.version,
                manifest.content_digest,
                manifest.num_bytes,
                done.stop_s + done.publish_s,
                stop_s=done.stop_s,
                delta_bytes=done.delta_bytes,
            )
        )

    # --- steps ---------------------------------------------------------------------------------------------

    def roll_out(
        self, step: int, prompts: Sequence[Sequence[int]], *, group_size: int, max_response_tokens: int
    ) -> list[list[Completion]]:
        """Return `group_size` responses for each prompt (token ids), in the prompts' order.

        Blocks until all are there and the GPU is the caller's; while it blocks, reserved engines may use the
        GPU, so its memory must be free (or `trainer.local_engines` 0). Raises what ended the stream.
        """
        if self.version < 0:
            raise RuntimeFault("nothing was published yet", "call publish before roll_out")
        self._began = time.monotonic()
        self.request_step(
            step, self.version, prompt_specs(prompts), group_size=group_size,
            max_response_tokens=max_response_tokens, stop_token_ids=self._stops,
        )  # fmt: skip
        done: dict[int, DeliverGroupMessage] = {}
        while groups := self.stream.next_groups(group_size * len(prompts)):
            done |= {group.group: group for group in groups}
        self.stream.hold_lease()
        found = [[_completion(each) for each in done[group].responses] for group in range(len(prompts))]
        self._num_tokens = sum(each.ids.size for group in found for each in group)
        return found

    def request_step(
        self,
        step: int,
        version: int,
        prompts: Sequence[PromptSpec],
        *,
        group_size: int,
        max_response_tokens: int,
        stop_token_ids: frozenset[int],
        keep_lease: bool = False,
        are_episodes: bool = False,
        in_flight_updates: bool = False,
        open_from: int | None = None,
    ) -> None:
        """Request a step's groups and return at once; see `StepStream.request_step`.

        A version that is still on its way into the store is waited for by the request, not by the caller.
        """
        self.stream.request_step(
            step, version, prompts, group_size=group_size, max_response_tokens=max_response_tokens,
            stop_token_ids=sorted(stop_token_ids), keep_lease=keep_lease,
            once_published=self.publisher.is_busy, are_episodes=are_episodes,
            in_flight_updates=in_flight_updates, open_from=open_from,
        )  # fmt: skip

    def trained(self, step: int, *, reward_mean: float, metrics: Mapping[str, float] | None = None) -> None:
        """Report a step as trained and saved: its tokens are dropped, its numbers go to status, cost report
        and `metrics.jsonl`. Call it once what the step made would survive a crash."""
        waits = self.stream.waits
        step_s = time.monotonic() - self._began
        wait_s = waits.with_lease_s + waits.without_lease_s + waits.for_lease_s
        line = {
            "step": float(step),
            "policy_version": float(self.version),
            "reward_mean": reward_mean,
            "tokens_trained": float(self._num_tokens),
            "rollout_wait_s": wait_s,
            "step_s": step_s,
            **(metrics or {}),
        }
        if self._last_trained is None:
            self.metrics.rewind(step)  # a step that was trained, but not saved, before this process began
        self._last_trained = step
        busy_s = max(0.0, step_s - wait_s)
        self.report(StepTrainedMessage(step, waits.with_lease_s, busy_s, self._num_tokens, reward_mean, line))

    def report(self, trained: StepTrainedMessage) -> None:
        """Add the step's line to `metrics.jsonl` and report the step to the coordinator."""
        self.metrics.append(dict(trained.metrics))
        self.stream.trained(trained)

    def finished(self, model_path: str | Path) -> None:
        """Copy the model, a folder, to the job's `output`; then report the run as done and where the model
        lies: the fleet is ended. Raises `RuntimeFault`, having reported it, if it cannot be copied."""
        output = OutputCopies.for_run(self.run, self.job)
        if output is not None:
            try:
                output.finish(Path(model_path))
            except RuntimeFault as fault:
                self.stream.failed(fault.problem, fault.remedy)
                raise
        self.stream.finished(str(model_path))

    def failed(self, problem: str, remedy: str) -> None:
        """Report why the run cannot continue and what a person should do; exit with status 78 afterwards."""
        self.stream.failed(problem, remedy)


def prompt_specs(prompts: Sequence[Sequence[int]]) -> list[PromptSpec]:
    """Return prompts that are all answered as their step says."""
    return [PromptSpec(group, np.asarray(ids, dtype="<i4").tobytes()) for group, ids in enumerate(prompts)]


def _completion(response: FinishedResponse) -> Completion:
    return Completion(
        np.frombuffer(response.token_ids, "<i4"),
        np.frombuffer(response.logprobs, "<f4"),
        str(response.finish_reason),
        len({segment.instance for segment in response.segments}),
    )


def keep_tokenizer(run: RunFolder, tokenizer: PreTrainedTokenizerBase) -> None:
    """Leave the model's tokenizer where the endpoint finds it, complete, once."""
    if not run.tokenizer.exists():
        with tempfile.TemporaryDirectory(dir=run.path, prefix=".tokenizer.") as folder:
            tokenizer.save_pretrained(f"{folder}/tokenizer")
            os.rename(f"{folder}/tokenizer", run.tokenizer)
