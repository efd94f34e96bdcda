"""The trainer's loop: prompts out, groups in, micro-batches while the lease is ours, publish, checkpoint,
report.

It is written on the public `RolloutClient`. One step, in order: request the step's groups (which gives the
GPU back) -> score groups as they arrive -> once the lease is granted, train micro-batches in the order in
which groups finished -> one division, clip and AdamW step per mini-batch (where old logprobs are recomputed,
the first one waits for all groups; ppo, which whitens advantages over the step, waits before any) -> publish
the next version -> copy the checkpoint -> a line in `metrics.jsonl` -> `StepTrainedMessage`. The copy is
written while the next step is rolled out; `Checkpointed` is sent once it is durable.

Guarantees:

- every micro-batch is made of whole groups, its size fixed by the job and never by timing, so that the same
  groups in the same order give the same weights, on a CPU bit for bit, whether or not the trainer was killed
  in between;
- a version number is never used for other weights: a trainer that comes back publishes again under the next
  unused number, or reuses the stored version whose content digest equals its own. So the policy version
  grows, and need not equal the step;
- killed at any moment, it goes on after its newest complete checkpoint: a step whose checkpoint was still
  being written is requested again, and its line in `metrics.jsonl` replaced. No step is missing from the
  weights, and none is in them twice.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from rlboost_runtime.logs import bind, event
from rlboost_runtime.protocol.messages import Evaluated, StepTrainedMessage
from rlboost_runtime.run.checkpoints import saved_steps, step_folder
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import CheckpointWriter, TrainedState, TrainingState
from rlboost_runtime.trainer.artifacts.output import OutputCopies, copying
from rlboost_runtime.trainer.artifacts.publisher import VersionContent
from rlboost_runtime.trainer.data.feed import PromptFeed
from rlboost_runtime.trainer.data.prompts import Prompt, PromptSource
from rlboost_runtime.trainer.episodes.outcome import require_some_episode
from rlboost_runtime.trainer.episodes.runner import EpisodeRunner
from rlboost_runtime.trainer.learn.companions import Critic, Reference
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.model_files import version_configs
from rlboost_runtime.trainer.learn.policy import Policy, Residency
from rlboost_runtime.trainer.learn.ranks import ALONE, Ranks
from rlboost_runtime.trainer.learn.sample import GroupSelection, Sample
from rlboost_runtime.trainer.rewards.outcome import require_some_reward
from rlboost_runtime.trainer.rewards.scorer import RewardScorer
from rlboost_runtime.trainer.rollout.client import RolloutClient
from rlboost_runtime.trainer.rollout.early import EarlyResponses
from rlboost_runtime.trainer.rollout.episodes import StepEpisodes
from rlboost_runtime.trainer.rollout.evaluation import due, evaluated_rows, evaluation_metrics, prompt_spec
from rlboost_runtime.trainer.rollout.groups import (
    GroupScorer,
    PendingGroup,
    RequestedStep,
    RequestedSteps,
    ScoredGroup,
)
from rlboost_runtime.trainer.rollout.metrics import (
    MetricsLog,
    choice_metrics,
    early_metrics,
    group_metrics,
    newer_tokens,
    pick_samples,
)
from rlboost_runtime.trainer.rollout.step_stream import Waits
from rlboost_runtime.trainer.tracking import Block, Trackers

log = logging.getLogger(__name__)

EARLY_SHARE = 1 / 16
"""Of a step's responses, how many at most have their logprobs computed at once before their groups are
complete."""


@dataclass(slots=True)
class Seconds:
    """Seconds of a step by activity."""

    spent: dict[str, float] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    """When each was done, in order."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        started, began = time.monotonic(), time.time_ns()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self.spent[name] = self.spent.get(name, 0.0) + seconds
            self.blocks.append(Block(name, began, began + round(seconds * 1e9)))


class TrainerLoop:
    """Trains a job from its newest checkpoint on. Runs on one thread."""

    def __init__(
        self,
        client: RolloutClient,
        policy: Policy,
        source: PromptSource,
        scorer: RewardScorer,
        ranks: Ranks = ALONE,
        reference: Reference | None = None,
        evaluated: Sequence[Prompt] = (),
        episodes: EpisodeRunner | None = None,
        critic: Critic | None = None,
    ) -> None:
        """`policy` is set up; with several ranks this is rank 0. `reference`: for a KL penalty. `evaluated`:
        the prompts of all evaluations. `episodes`: plays rollouts of several turns. `critic`: ppo's."""
        self._client = client
        self._run, self._job = client.run, client.job
        algorithm, trainer = self._job.algorithm, self._job.trainer
        self._policy = policy
        self._has_reference = reference is not None
        self._imitates = algorithm.loss == "sft"
        self._source = source
        refills = algorithm.max_refills > 0
        self._feed = PromptFeed(source, max_staleness=algorithm.max_staleness, refills=refills)
        self._evaluated = evaluated
        self._reward_name = scorer.name
        self._learner = Learner(policy, algorithm, trainer, ranks, reference, critic)
        self._residency = Residency(policy, self._learner.optimizer, ranks, self._learner.critic_state)
        self._episodes = None if episodes is None else StepEpisodes(episodes, client.stream, algorithm)
        self._scorer = GroupScorer(
            policy.decode, scorer, algorithm,
            None if self._episodes is None else self._episodes.of_group,
            "" if self._episodes is None else self._episodes.name,
            lambda: client.version,
        )  # fmt: skip
        self._early = EarlyResponses(self._scorer.prompt_of)
        self._works_early = algorithm.early_passes > 0 and episodes is None
        if self._works_early:
            client.stream.on_response(self._early.arrived)
        client.stream.on_recall(self._residency.free)
        self._stream = client.stream.on_group(self._scorer.start)
        sends_adapters = self._job.weights.transfer == "lora"
        dtype = self._job.rollout.engine_args.dtype
        self._content = VersionContent(
            lambda: policy.weights(frozen=sends_adapters),
            lambda: (
                version_configs(policy.model, dtype) | (policy.adapter_files(dtype) if sends_adapters else {})
            ),
            lambda: policy.probe(list(source.batch(0)[0].token_ids), dtype),
            policy.tied(),
            are_frozen=sends_adapters,
        )
        self._samples = MetricsLog(self._run.samples)
        self._evaluations = MetricsLog(self._run.evaluations)
        self._output = OutputCopies.for_run(self._run, self._job)
        self._copy_out: Callable[[Path], None] = lambda folder: None
        self._state = TrainingState(self._learner, ranks)
        every = trainer.checkpoint_every_steps
        self._writer = CheckpointWriter(
            self._run.checkpoints, self._state.take, every_steps=None if every == "auto" else every,
            keep=trainer.keep_checkpoints, on_durable=self._durable,
        )  # fmt: skip
        self._requested = RequestedSteps[PendingGroup](
            algorithm.max_staleness, algorithm.steps, asks_early=algorithm.in_flight_updates
        )
        self._requested_before: dict[int, tuple[int, int]] = {}
        self._past_waits = Waits()

    def train(self) -> Path:
        """Train all remaining steps; return the folder of the final model, saved and reported to the
        coordinator."""
        is_new = not saved_steps(self._run.checkpoints)
        with (
            copying(self._output, is_new=is_new) as self._copy_out,
            self._writer,
            self._client.publisher,
        ):
            first = self._resume()
            with Trackers(self._run, self._job, first) as self._trackers:
                for step in range(first, self._job.algorithm.steps):
                    self._step(step)
                self._evaluate_final()
        final = self._run.checkpoints / "model"
        dtype = self._job.rollout.engine_args.dtype
        checkpoint.replace_folder(final, lambda folder: self._policy.export(folder, dtype))
        if self._output is not None:
            self._output.finish(final)
        event(log, "run.trained", model=str(final))
        self._stream.finished(str(final))
        return final

    def _durable(self, step: int) -> None:
        """The checkpoint after `step` would survive a power cut; on the writer's thread."""
        if self._episodes is not None:
            self._episodes.saved(step)
        self._stream.checkpointed(step)
        self._copy_out(step_folder(self._run.checkpoints, step))

    # --- resuming and publishing --------------------------------------------------------------------------

    def _resume(self) -> int:
        """Resume from the newest checkpoint, if any; publish its weights and return the next step."""
        saved = saved_steps(self._run.checkpoints)
        if not saved:
            for log_file in (self._client.metrics, self._samples, self._evaluations):
                log_file.rewind(0)
            self._publish_current(0)
            return 0
        folder = step_folder(self._run.checkpoints, saved[-1])
        state = checkpoint.read_state(folder)
        self._state.restore(folder)
        self._feed.restore(state.feed, state.step + 1)
        self._samples.rewind(state.step + 1)
        if self._client.metrics.rewind(state.step + 1) != state.step:
            self._client.metrics.append(dict(state.line))
        if not self._is_evaluated():
            self._evaluations.rewind(state.step + 1)
        self._requested_before = {step: (version, updates) for step, version, updates in state.ahead}
        event(log, "trainer.resumed", after_step=state.step, policy_version=state.policy_version)
        self._publish_current(state.policy_version)
        # One that worked ahead may have trained several steps without a coordinator to report them to.
        for line in self._client.metrics.since(state.step - self._job.algorithm.max_staleness):
            if line["step"] < state.step:
                self._stream.trained(_reported(line))
        self._stream.trained(_report(state, checkpointed=True))
        return state.step + 1

    def _publish_current(self, at_least: int) -> None:
        """Publish the weights as they are, unless the store has the very same ones already."""
        self._residency.free()  # engines may load what is announced
        if not self._client.reuse_stored(self._content):
            self._client.begin_publication(self._content, at_least)

    # --- one step ------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        bind(step=step, policy_version=self._client.version)
        seconds = Seconds()
        started = time.monotonic()
        waited, reward_waited = self._waits(), self._scorer.reward_wait_s
        early = self._early.num_used
        awake_s, asleep_s = self._residency.awake_s, self._residency.asleep_s
        requested = self._requested.get(step) or self._request(step, step)
        if self._job.algorithm.in_flight_updates:
            self._request_ahead(step)
        selection = GroupSelection(
            self._job.algorithm.zero_variance_groups, self._job.algorithm.prompts_per_step
        )
        groups, held_out = self._train_as_they_arrive(requested, selection, seconds)
        if groups:
            require_some_reward(
                [response.reward for group in groups for response in group.responses], self._reward_name
            )
            if self._episodes is not None:
                require_some_episode([e for group in groups for e in group.episodes], self._episodes.name)
        with seconds.timed("publish"):
            if self._is_rolled_out(step + 1):
                self._client.begin_publication(self._content)
            if not self._stream.holds_lease:
                self._residency.free()  # engines may load what is announced
        self._requested.remove(step)
        self._early.forget(step)
        if self._episodes is not None:
            self._episodes.trained(step)
        waits = self._waits() - waited
        line = {
            "step": float(step),
            "policy_version": float(requested.policy_version),
            "staleness": float(requested.staleness),
            **(group_metrics(groups) | selection.metrics() if groups else {}),
            **self._evaluation(requested, held_out),
            **(newer_tokens(groups) if self._job.algorithm.in_flight_updates and groups else {}),
            **self._learner.metrics(),
            **choice_metrics(groups, self._job.algorithm),
            **(early_metrics(groups, self._early.num_used - early) if self._works_early else {}),
            "learning_rate": self._learner.learning_rate(step),
            "prompts_skipped": float(self._source.num_skipped),
            **self._feed.metrics(step),
            "refills": float(requested.num_refills),
            "rollout_wait_s": waits.without_lease_s + waits.for_lease_s,
            "train_wait_s": waits.with_lease_s,
            "reward_wait_s": self._scorer.reward_wait_s - reward_waited,
            "train_s": seconds.spent.get("train", 0.0),
            "lease_wait_s": waits.for_lease_s,
            "handover_s": self._residency.awake_s - awake_s,
            "handover_asleep_s": self._residency.asleep_s - asleep_s,
            "gpu_peak_bytes": _gpu_peak_bytes(),
            "publish_s": seconds.spent["publish"],
            "step_s": time.monotonic() - started,
        }
        state = TrainedState(
            step=step,
            policy_version=self._client.version,
            wait_s=waits.with_lease_s,
            busy_s=line["train_s"],
            tokens_trained=self._learner.sums.tokens,
            reward_mean=line.get("reward_mean"),
            line=line,
            ahead=self._requested.versions(),
            feed=self._feed.state_after(step),
        )
        self._samples.append(*pick_samples(step, groups, requested.prompts, self._policy.decode))
        self._finish(state, seconds)

    def _finish(self, state: TrainedState, seconds: Seconds) -> None:
        """Copy the checkpoint where it is due, report, and have the copy written meanwhile."""
        is_due = self._writer.is_due(state.step) or state.step + 1 == self._job.algorithm.steps
        with seconds.timed("checkpoint"):
            if is_due:
                self._writer.copy()
        state.line["checkpoint_s"] = seconds.spent["checkpoint"]
        state.line["checkpoint_write_s"] = self._writer.last_write_s
        self._client.report(_report(state, checkpointed=False))
        self._trackers.log(state.line, seconds.blocks)
        event(
            log, "step.trained", reward_mean=state.reward_mean and round(state.reward_mean, 4),
            loss=round(state.line["loss"], 4), tokens=state.tokens_trained,
            train_s=round(state.busy_s, 3), wait_s=round(state.wait_s, 3),
        )  # fmt: skip
        if is_due:
            self._writer.submit(state)

    def _request(self, step: int, training: int) -> RequestedStep[PendingGroup]:
        """Request a step's groups, while step `training` is the oldest that is not trained.

        That gives the GPU back, unless step `training` is being trained.
        """
        if step == training:  # there is nothing else to do meanwhile
            self._client.publisher.ready()
        self._stream.answer_recall()
        if not self._stream.holds_lease or step == training:
            self._residency.free()
        newest = self._client.version, training
        version, updates = self._requested_before.get(step, newest)
        if version not in self._client.store.versions():
            version, updates = newest
        steps = self._job.algorithm.steps
        trains = step < steps and not self._imitates  # or the final weights alone
        prompts = self._feed.of_step(step) if trains else []
        prompts = prompts + due(self._evaluated, step, steps)
        requested = RequestedStep[PendingGroup](step, version, updates, prompts)
        self._requested.add(requested)
        self._scorer.expect(step, version, requested.prompts)
        if self._episodes is not None:
            self._episodes.expect(step, version, requested.prompts)
        self._past_waits += self._stream.waits
        algorithm = self._job.algorithm
        self._client.request_step(
            step, version, [prompt_spec(*each, algorithm) for each in enumerate(requested.prompts)],
            group_size=algorithm.group_size, max_response_tokens=algorithm.max_response_tokens,
            stop_token_ids=self._policy.stop_token_ids, keep_lease=step != training,
            are_episodes=self._episodes is not None, in_flight_updates=algorithm.in_flight_updates,
            open_from=self._requested.open_from,
        )  # fmt: skip
        return requested

    def _is_rolled_out(self, updates: int) -> bool:
        """Return True if engines need the weights with so many updates: sft's only where an evaluation is
        due."""
        return not self._imitates or bool(due(self._evaluated, updates, self._job.algorithm.steps))

    # --- evaluations ---------------------------------------------------------------------------------------

    def _evaluation(
        self, requested: RequestedStep[PendingGroup], groups: Sequence[ScoredGroup]
    ) -> dict[str, float]:
        """Return the metrics of the evaluations that were requested with a step; keep their responses."""
        if not groups:
            return {}
        self._evaluations.append(
            *evaluated_rows(requested.step, groups, requested.prompts, self._policy.decode)
        )
        return evaluation_metrics(groups, requested.prompts) | {"eval_updates": float(requested.updates)}

    def _is_evaluated(self) -> bool:
        """Return True if the final weights were evaluated."""
        return self._client.metrics.last().get("eval_updates") == self._job.algorithm.steps

    def _evaluate_final(self) -> None:
        """Evaluate the final weights, if the job asks for it; their metrics join those of the last step.

        A trainer that was killed meanwhile requests the same responses again and is given what is finished;
        what a former process has found is only reported again.
        """
        steps = self._job.algorithm.steps
        if not due(self._evaluated, steps, steps):
            return
        line = self._client.metrics.last()
        if not self._is_evaluated():
            requested, answer_recall = self._request(steps, steps), self._stream.answer_recall
            arrived = self._completion_order(requested, Seconds())
            groups = [self._scorer.finish(each, answer_recall) for each in arrived]
            found = self._evaluation(requested, groups)
            self._requested.remove(steps)
            line |= found
            self._client.metrics.rewind(steps - 1)
            self._client.metrics.append(line)
            self._trackers.log({"step": float(steps), **found})
            event(log, "run.evaluated", found={name: round(value, 4) for name, value in found.items()})
        found = {name: value for name, value in line.items() if name.startswith("eval_")}
        self._stream.evaluated(Evaluated(steps - 1, found))

    def _waits(self) -> Waits:
        """Return all waits since this process began."""
        return self._past_waits + self._stream.waits

    def _receive(
        self, training: int, min_responses: int, or_once: Callable[[], bool] = lambda: False
    ) -> None:
        """Receive groups, at least `min_responses` of step `training` or the rest of it, or what there is
        `or_once` there is something else to do; request the next steps where it is time."""
        for group in self._stream.next_groups(min_responses, training, or_once):
            requested = self._requested.get(group.step)
            assert requested is not None, f"step {group.step} is open"
            requested.arrived.append(group)
        self._request_ahead(training)

    def _request_ahead(self, training: int) -> None:
        """Request the steps that may be requested now, while step `training` is trained or waited for."""
        while (ahead := self._requested.next_ahead(training)) is not None:
            self._request(ahead, training)

    def _train_as_they_arrive(
        self, requested: RequestedStep[PendingGroup], selection: GroupSelection, seconds: Seconds
    ) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """Train on a step's groups as they finish; return them all, in that order, and those of
        evaluations."""
        algorithm = self._job.algorithm
        self._learner.begin_step(requested.step, requested.staleness)
        groups: list[ScoredGroup] = []
        held_out: list[ScoredGroup] = []
        chosen = self._chosen(requested, selection, groups, held_out, seconds)
        if self._imitates:
            deque(chosen, maxlen=0)  # evaluations, whose engines may need the GPU
            chosen = ([imitated(prompt)] for prompt in self._source.batch(requested.step))
        must_recompute = algorithm.recomputes_old_logprobs
        if self._learner.critic is not None:
            chosen = self._judged(chosen, self._learner.critic, seconds)
            must_recompute = False
        for size in micro_batch_sizes(
            algorithm.prompts_per_step,
            algorithm.minibatches_per_step,
            1 if self._imitates else algorithm.group_size,
            algorithm.micro_batch_responses,
        ):
            if size:
                samples = [sample for group in islice(chosen, size) for sample in group]
                if must_recompute:  # until the first update the training pass itself gives them
                    samples = [replace(sample, old_logprobs=None, routes=None) for sample in samples]
                with self._on_gpu(seconds):
                    if self._has_reference and any(each.reference_logprobs is None for each in samples):
                        samples = self._learner.score_reference(samples)
                    self._learner.accumulate(samples)
                if algorithm.max_staleness:
                    self._receive(requested.step, 0)
                continue
            if must_recompute:
                chosen = iter([self._recompute(group, seconds) for group in chosen])
                must_recompute = False
            with self._on_gpu(seconds):
                self._learner.apply()
        deque(chosen, maxlen=0)  # a step ends when all its groups are in, also unused spares
        return groups, held_out

    def _chosen(
        self,
        requested: RequestedStep[PendingGroup],
        selection: GroupSelection,
        arrived: list[ScoredGroup],
        held_out: list[ScoredGroup],
        seconds: Seconds,
    ) -> Iterator[list[Sample]]:
        """Yield the samples of each group to train as soon as it is chosen; add all groups to `arrived` or
        `held_out`."""
        waiting: dict[int, ScoredGroup] = {}
        for pending in self._completion_order(requested, seconds):
            group = self._scorer.finish(pending, self._stream.answer_recall)
            number = group.group
            if pending.prompt.evaluation is not None:
                held_out.append(group)
            else:
                arrived.append(group)
                waiting[requested.place(number)] = group
                self._feed.saw(requested.step, number, pending.prompt, group.usable_rewards)
                for each in selection.arrived(requested.place(number), flat=group.zero_variance):
                    yield [sample for response in waiting.pop(each).responses for sample in response.samples]
            if len(arrived) + len(held_out) == len(requested.prompts):
                self._refill(requested, selection, len(arrived))

    def _refill(
        self, requested: RequestedStep[PendingGroup], selection: GroupSelection, num_arrived: int
    ) -> None:
        """Ask for further prompts of a step that lacks groups, all of which have arrived, if it may have
        more."""
        algorithm, step = self._job.algorithm, requested.step
        num = selection.num_to_ask_for(num_arrived)
        if not num or not algorithm.max_refills:
            return
        if requested.num_refills == algorithm.max_refills:
            refills = requested.num_refills
            event(log, "step.not_full", level=logging.WARNING, lacks=selection.num_missing, refills=refills)
            return
        first = len(requested.prompts)
        requested.prompts += self._feed.more(step, num)
        requested.num_refills += 1
        self._scorer.expect(step, requested.policy_version, requested.prompts)
        event(log, "step.refilled", prompts=num, refills=requested.num_refills)
        specs = enumerate(requested.prompts[first:], start=first)
        self._stream.request_more([prompt_spec(*each, algorithm) for each in specs])

    def _completion_order(
        self, requested: RequestedStep[PendingGroup], seconds: Seconds
    ) -> Iterator[PendingGroup]:
        """Yield groups as they finish, waiting for a micro-batch's worth at a time."""
        given, step, enough = 0, requested.step, self._job.algorithm.micro_batch_responses
        while given < len(requested.prompts):
            while given == len(requested.arrived):
                self._receive(step, enough, lambda: self._early.num_waiting(step) >= enough)
                if given == len(requested.arrived):
                    self._score_early(step, seconds)
            arrived = [self._with_early(group) for group in requested.arrived[given:]]
            given += len(arrived)
            needs_reference = self._job.algorithm.kl is not None  # also of what the loss does not choose
            yield from self._with_reference(arrived, seconds) if needs_reference else arrived

    def _score_early(self, step: int, seconds: Seconds) -> None:
        """Compute logprobs of responses whose groups are not complete, if some wait for that: as many as are
        done before a recall is answered."""
        algorithm = self._job.algorithm
        most = int(EARLY_SHARE * algorithm.prompts_per_step * algorithm.group_size)
        if self._early.num_waiting(step):
            with self._on_gpu(seconds):
                self._early.score(step, max(algorithm.micro_batch_responses, most), self._early_logprobs)

    def _early_logprobs(self, samples: list[Sample]) -> list[Sample]:
        algorithm = self._job.algorithm
        if algorithm.kl is not None:
            samples = self._learner.score_reference(samples)
        return self._learner.recompute(samples) if algorithm.recomputes_old_logprobs else samples

    def _with_early(self, group: PendingGroup) -> PendingGroup:
        """Return a group with the logprobs that its responses had before it was complete."""
        if not self._works_early or group.prompt.evaluation is not None:
            return group
        samples = [sample for response in group.responses for sample in response.samples]
        return group.with_samples(self._early.completed(group.step, group.group, samples))

    def _with_reference(self, arrived: list[PendingGroup], seconds: Seconds) -> list[PendingGroup]:
        """Return the groups with the reference's logprobs: in one pass for all that have arrived, while their
        rewards may still be computed."""
        trained = [each for each in arrived if each.prompt.evaluation is None]
        samples = [sample for each in trained for sample in each.samples()]
        lacking = [sample for sample in samples if sample.reference_logprobs is None]
        if not lacking:
            return arrived
        with self._on_gpu(seconds):
            found = iter(self._learner.score_reference(lacking))
        scored = (next(found) if sample.reference_logprobs is None else sample for sample in samples)
        return [each if each.prompt.evaluation else each.with_samples(scored) for each in arrived]

    def _judged(
        self, groups: Iterator[list[Sample]], critic: Critic, seconds: Seconds
    ) -> Iterator[list[Sample]]:
        """Return all groups of a step with their advantages, and with old logprobs where updates after the
        first need them. Values are computed as groups arrive, for as many as a micro-batch has."""
        algorithm = self._job.algorithm
        sizes: list[int] = []
        valued: list[Sample] = []
        while part := list(islice(groups, -(-algorithm.micro_batch_responses // algorithm.group_size))):
            sizes += map(len, part)
            with self._on_gpu(seconds):
                valued += self._learner.score_values([sample for group in part for sample in group])
        samples = critic.judge(valued)
        if algorithm.recomputes_old_logprobs:
            samples = self._recompute(samples, seconds)
        rest = iter(samples)
        return iter([list(islice(rest, size)) for size in sizes])

    @contextmanager
    def _on_gpu(self, seconds: Seconds) -> Iterator[None]:
        """Hold the lease with the model on the GPU for a block of training; answer a recall after it."""
        self._stream.hold_lease()
        self._residency.take()
        with seconds.timed("train"):
            yield
        self._stream.answer_recall()

    def _recompute(self, samples: list[Sample], seconds: Seconds) -> list[Sample]:
        lacking = [sample for sample in samples if sample.old_logprobs is None]
        if not lacking:
            return samples
        with self._on_gpu(seconds):
            found = iter(self._learner.recompute(lacking))
        return [next(found) if sample.old_logprobs is None else sample for sample in samples]


def imitated(prompt: Prompt) -> Sample:
    """Return a prompt's own response as what sft trains on; no engine has logprobs of it."""
    ids = np.array(prompt.response_ids, np.int32)
    return Sample(np.array(prompt.token_ids, np.int32), ids, np.zeros(len(ids), np.float32), 1.0)


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


def _gpu_peak_bytes() -> float:
    """Return the most GPU memory that this process has had allocated since it was last asked; 0 without."""
    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return float(peak)


def _reported(line: Mapping[str, float]) -> StepTrainedMessage:
    """Return the report of a step that a checkpoint covers, from its line in `metrics.jsonl`."""
    return StepTrainedMessage(
        int(line["step"]), line["train_wait_s"], line["train_s"], int(line["tokens_trained"]),
        line.get("reward_mean"), dict(line),
    )  # fmt: skip


def _report(state: TrainedState, *, checkpointed: bool) -> StepTrainedMessage:
    return StepTrainedMessage(
        state.step, state.wait_s, state.busy_s, state.tokens_trained, state.reward_mean, dict(state.line),
        checkpointed,
    )  # fmt: skip
