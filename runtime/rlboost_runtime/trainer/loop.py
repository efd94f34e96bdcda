"""The trainer's loop: prompts out, groups in, micro-batches while the lease is ours, publish, checkpoint,
report.

One step, in order: ask for the step's groups (which gives the GPU back) -> score groups as they arrive ->
once the lease is granted, train micro-batches in the order in which groups finished -> one division, clip and
AdamW step per mini-batch (where old logprobs are recomputed, the first one waits for all groups) -> publish
the next version -> checkpoint -> a line in `metrics.jsonl` -> `Trained`.

Guarantees:

- every micro-batch is made of whole groups, its size fixed by the job and never by timing, so that the same
  groups in the same order give the same weights, on a CPU bit for bit, whether or not the trainer was killed
  in between;
- a version number is never used for other weights: a trainer that comes back publishes again under the next
  unused number, or reuses the stored version whose content digest equals its own. So the policy version
  grows, and need not equal the step;
- `metrics.jsonl` and the coordinator hear of each step once, even where the trainer died between checkpoint
  and report.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from rlboost_runtime.job import Job
from rlboost_runtime.logs import bind, event
from rlboost_runtime.run_folder import RunFolder
from rlboost_runtime.trainer import checkpoint
from rlboost_runtime.trainer.checkpoint import TrainedState
from rlboost_runtime.trainer.data import Prompt, PromptSource
from rlboost_runtime.trainer.groups import GroupDesk, ScoredGroup
from rlboost_runtime.trainer.metrics import MetricsLog, group_metrics
from rlboost_runtime.trainer.policy import Policy, Residency
from rlboost_runtime.trainer.ranks import ALONE, Ranks
from rlboost_runtime.trainer.reward_outcome import require_some_reward
from rlboost_runtime.trainer.rewards import RewardScorer
from rlboost_runtime.trainer.sample import Sample
from rlboost_runtime.trainer.selection import GroupSelection
from rlboost_runtime.trainer.step_stream import StepStream
from rlboost_runtime.trainer.update import Learner, recomputes_old
from rlboost_runtime.weights.manifest import Manifest, content_digest, read_manifest
from rlboost_runtime.weights.store import WeightStore, describe_file
from rlboost_runtime.wire import PromptSpec, Published, Trained

log = logging.getLogger(__name__)

KEEP_VERSIONS = 2


@dataclass(slots=True)
class Seconds:
    """Where a step's time went."""

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - started


class TrainerLoop:
    """Trains a job from where its folder says it was left. Runs on one thread."""

    def __init__(
        self,
        run: RunFolder,
        job: Job,
        policy: Policy,
        source: PromptSource,
        scorer: RewardScorer,
        stream: StepStream,
        ranks: Ranks = ALONE,
    ) -> None:
        """`policy` is set up; with several ranks this is the one that leads."""
        self._run = run
        self._job = job
        self._policy = policy
        self._source = source
        self._scorer = scorer
        self._stream = stream
        self._learner = Learner(policy, job.algorithm, job.trainer, ranks)
        self._residency = Residency(policy, self._learner.optimizer, ranks)
        self._desk = GroupDesk(policy.decode, scorer, job.algorithm)
        self._store = WeightStore(run.weights, keep=KEEP_VERSIONS, chunk_bytes=job.weights.chunk_bytes)
        self._metrics = MetricsLog(run.metrics)
        self._version = -1
        stream.attach(on_group=self._desk.arrived, on_recall=self._residency.free)

    def train(self) -> Path:
        """Train all remaining steps; return the folder of the final model, saved and said to the
        coordinator."""
        first = self._resume()
        for step in range(first, self._job.algorithm.steps):
            self._step(step)
        final = self._run.checkpoints / "model"
        checkpoint.replace_folder(final, self._policy.export)
        event(log, "run.trained", model=str(final))
        self._stream.finished(str(final))
        return final

    # --- resuming and publishing --------------------------------------------------------------------------

    def _resume(self) -> int:
        """Take up the newest checkpoint, if any; return the step to do next, with its version published."""
        saved = checkpoint.saved_steps(self._run.checkpoints)
        if not saved:
            self._metrics.rewind(0)
            self._publish_current(0)
            return 0
        folder = checkpoint.step_folder(self._run.checkpoints, saved[-1])
        state = checkpoint.read_state(folder)
        checkpoint.restore_optimizer(folder, self._learner.optimizer)
        if self._metrics.rewind(state.step + 1) != state.step:
            self._metrics.append(dict(state.line))
        event(log, "trainer.resumed", after_step=state.step, policy_version=state.policy_version)
        self._publish_current(state.policy_version)
        self._stream.trained(_report(state, checkpointed=True))
        return state.step + 1

    def _publish_current(self, at_least: int) -> None:
        """Publish the weights as they are, unless the store has the very same ones already."""
        stored = {version: read_manifest(self._store.path(version)) for version in self._store.versions()}
        digest = self._content_digest() if stored else None
        for _, manifest in sorted(stored.items(), reverse=True):
            if manifest.content_digest == digest:
                self._residency.free()
                self._announce(manifest, 0.0)
                return
        self._publish(max([at_least, *(version + 1 for version in stored)]))

    def _content_digest(self) -> str:
        with tempfile.TemporaryDirectory(dir=self._run.path) as name:
            folder = Path(name)
            self._write(folder)
            paths = sorted(folder.iterdir())
            return content_digest([describe_file(path, self._store.chunk_bytes) for path in paths])

    def _write(self, folder: Path) -> None:
        self._policy.write_weights(folder, self._job.rollout.engine_args.dtype)

    def _publish(self, version: int) -> None:
        """Put a version into the store, leave the GPU, and say so."""
        started = time.monotonic()
        probe = self._policy.probe(
            list(self._source.batch(0)[0].token_ids), self._job.rollout.engine_args.dtype
        )
        manifest = self._store.publish(version, self._write, probe, self._policy.tied())
        self._announce(manifest, time.monotonic() - started)

    def _announce(self, manifest: Manifest, seconds: float) -> None:
        self._version = manifest.version
        if not self._stream.holds_lease:
            self._residency.free()  # engines may load what we announce
        self._stream.publish(
            Published(manifest.version, manifest.content_digest, manifest.num_bytes, seconds)
        )

    # --- one step ------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        bind(step=step, policy_version=self._version)
        seconds = Seconds()
        started = time.monotonic()
        rollout_version = self._version
        prompts = self._source.batch(step)
        selection = GroupSelection(
            self._job.algorithm.zero_variance_groups, self._job.algorithm.prompts_per_step
        )
        groups = self._roll_out_and_train(step, prompts, selection, seconds)
        require_some_reward(
            [response.reward for group in groups for response in group.responses], self._scorer.name
        )
        with seconds.timed("publish"):
            self._publish(max(self._version, *self._store.versions()) + 1)
        waits = self._stream.waits
        line = {
            "step": float(step),
            "policy_version": float(rollout_version),
            **group_metrics(groups),
            **selection.metrics(),
            **self._learner.sums.metrics(),
            "learning_rate": self._learner.learning_rate(step),
            "prompts_skipped": float(self._source.num_skipped),
            "rollout_wait_s": waits.without_lease_s + waits.for_lease_s,
            "train_wait_s": waits.with_lease_s,
            "reward_wait_s": self._desk.reward_wait_s,
            "train_s": seconds.spent.get("train", 0.0),
            "publish_s": seconds.spent["publish"],
            "step_s": time.monotonic() - started,
        }
        state = TrainedState(
            step=step,
            policy_version=self._version,
            wait_s=waits.with_lease_s,
            busy_s=line["train_s"],
            tokens_trained=self._learner.sums.tokens,
            reward_mean=line["reward_mean"],
            line=line,
        )
        self._finish(state, seconds)

    def _finish(self, state: TrainedState, seconds: Seconds) -> None:
        """Checkpoint where it is due, then report."""
        every, steps = self._job.trainer.checkpoint_every_steps, self._job.algorithm.steps
        is_due = (state.step + 1) % every == 0 or state.step + 1 == steps
        if is_due:
            with seconds.timed("checkpoint"):
                checkpoint.save(
                    self._run.checkpoints, self._policy, self._learner.optimizer, state,
                    keep=self._job.trainer.keep_checkpoints,
                )  # fmt: skip
        state.line["checkpoint_s"] = seconds.spent.get("checkpoint", 0.0)
        self._metrics.append(dict(state.line))
        self._stream.trained(_report(state, checkpointed=is_due))
        event(
            log, "step.trained", reward_mean=round(state.reward_mean, 4), tokens=state.tokens_trained,
            train_s=round(state.busy_s, 3), wait_s=round(state.wait_s, 3),
        )  # fmt: skip

    def _roll_out_and_train(
        self, step: int, prompts: list[Prompt], selection: GroupSelection, seconds: Seconds
    ) -> list[ScoredGroup]:
        """Ask for the groups and train on them as they finish; return them all, in that order."""
        algorithm = self._job.algorithm
        self._learner.begin_step(step)
        self._desk.begin_step(step, self._version, prompts)
        self._residency.free()
        self._stream.request_step(
            step, self._version, [_spec(group, prompt) for group, prompt in enumerate(prompts)],
            group_size=algorithm.group_size, max_response_tokens=algorithm.max_response_tokens,
            stop_token_ids=sorted(self._policy.stop_token_ids),
        )  # fmt: skip
        groups: list[ScoredGroup] = []
        chosen = self._chosen(len(prompts), selection, groups)
        must_recompute = recomputes_old(algorithm)
        for size in micro_batch_sizes(
            algorithm.prompts_per_step,
            algorithm.minibatches_per_step,
            algorithm.group_size,
            algorithm.micro_batch_responses,
        ):
            if size:
                self._train_micro_batch(
                    [sample for group in islice(chosen, size) for sample in group], seconds
                )
                continue
            if must_recompute:
                chosen = iter([self._recompute(group, seconds) for group in chosen])
                must_recompute = False
            self._train_apply(seconds)
        deque(chosen, maxlen=0)  # a step ends when all its groups are in, also spares that nobody needed
        return groups

    def _chosen(
        self, num_groups: int, selection: GroupSelection, arrived: list[ScoredGroup]
    ) -> Iterator[list[Sample]]:
        """Yield the samples of each group to train, as soon as it is known to be one; note all in
        `arrived`."""
        waiting: dict[int, ScoredGroup] = {}
        for number in self._completion_order(num_groups):
            group = self._desk.collect(number, self._stream.answer_recall)
            arrived.append(group)
            waiting[number] = group
            for each in selection.arrived(number, flat=group.zero_variance):
                yield [response.sample for response in waiting.pop(each).responses]

    def _completion_order(self, num_groups: int) -> Iterator[int]:
        """Yield group numbers as they finish, asking for a micro-batch's worth at a time."""
        done = 0
        while done < num_groups:
            arrived = self._stream.next_groups(self._job.algorithm.micro_batch_responses)
            for group in arrived:
                yield group.group
            done += len(arrived)

    def _train_micro_batch(self, samples: list[Sample], seconds: Seconds) -> None:
        self._stream.hold_lease()
        self._residency.take()
        with seconds.timed("train"):
            self._learner.accumulate(samples)
        self._stream.answer_recall()

    def _recompute(self, samples: list[Sample], seconds: Seconds) -> list[Sample]:
        self._stream.hold_lease()
        self._residency.take()
        with seconds.timed("train"):
            found = self._learner.recompute(samples)
        self._stream.answer_recall()
        return found

    def _train_apply(self, seconds: Seconds) -> None:
        self._stream.hold_lease()
        self._residency.take()
        with seconds.timed("train"):
            self._learner.apply()


def micro_batch_sizes(
    num_groups: int, num_minibatches: int, group_size: int, micro_batch_responses: int
) -> Iterator[int]:
    """Yield the sizes, in groups, of a step's micro-batches; 0 stands for the optimizer step after a
    mini-batch.

    A micro-batch is the fewest whole groups that have `micro_batch_responses`; the last of a mini-batch may
    be smaller.
    """
    full = -(-micro_batch_responses // group_size)
    per_minibatch = num_groups // num_minibatches
    for _ in range(num_minibatches):
        left = per_minibatch
        while left:
            yield min(full, left)
            left -= min(full, left)
        yield 0


def _spec(group: int, prompt: Prompt) -> PromptSpec:
    return PromptSpec(group, np.asarray(prompt.token_ids, dtype="<i4").tobytes())


def _report(state: TrainedState, *, checkpointed: bool) -> Trained:
    return Trained(
        state.step, state.wait_s, state.busy_s, state.tokens_trained, state.reward_mean, dict(state.line),
        checkpointed,
    )  # fmt: skip
