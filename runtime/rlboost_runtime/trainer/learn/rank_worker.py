"""The loop of the ranks other than 0: enter the methods that rank 0 enters, until it sends `End`."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

import torch

from rlboost_runtime.job import Job
from rlboost_runtime.trainer.learn.companions import Critic, Reference
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy, Residency
from rlboost_runtime.trainer.learn.ranks import (
    Accumulate,
    Apply,
    BeginStep,
    End,
    Free,
    GatherModel,
    LoadPolicy,
    RankCommand,
    Ranks,
    Recompute,
    RestoreMoments,
    RunProbe,
    SaveState,
    ScoreReference,
    ScoreValues,
    Take,
)
from rlboost_runtime.trainer.learn.sharded_state import StateSaver, restore_moments


def run_worker(ranks: Ranks) -> None:
    """Load the model and serve rank 0's commands; return when rank 0 is done."""
    match ranks.receive():
        case LoadPolicy(source=source, job=text, files=files) as command:
            job = Job.model_validate_json(text)
            torch.set_num_threads(job.trainer.threads)
            policy = Policy.bare(files) if files else Policy.load(source, ranks)
            policy.set_up(job.trainer, job.algorithm, ranks, is_sent=bool(files))
            reference = None
            if job.algorithm.reference is not None:
                few, folder = command.reference_files, command.reference
                other = None if folder is None else Policy.bare(few) if few else Policy.load(folder, ranks)
                reference = Reference(policy, other, ranks, is_sent=bool(few))
            critic = None
            if command.critic is not None:
                few = command.critic_files
                body = Policy.bare(few) if few else Policy.load(command.critic, ranks)
                critic = Critic(body, job.algorithm, job.trainer, ranks, is_sent=bool(few))
            learner = Learner(policy, job.algorithm, job.trainer, ranks, reference, critic)
            residency = Residency(policy, learner.optimizer, critic=learner.critic_state)
            serve(ranks, policy, learner, residency)
        case End():
            return
        case command:
            raise AssertionError(f"{command} before the model was loaded")


def serve(ranks: Ranks, policy: Policy, learner: Learner, residency: Residency) -> None:
    """Serve rank 0's commands with a policy that is set up; return at `End`."""
    critic = learner.critic_state
    saver = StateSaver(policy.model, learner.optimizer, ranks, critic and (critic[0].model, critic[1]))
    while not isinstance(command := ranks.receive(), End):
        match command:
            case SaveState(folder=folder):
                saver.begin(Path(folder))
            case RestoreMoments(folder=folder, steps=steps, is_critic=is_critic):
                model, optimizer = policy.model, learner.optimizer
                if is_critic:
                    assert critic is not None
                    model, optimizer = critic[0].model, critic[1]
                restore_moments(model, optimizer, Path(folder), steps, ranks, is_critic=is_critic)
            case _:
                _execute(command, policy, learner, residency)
    saver.wait()


def _execute(command: RankCommand, policy: Policy, learner: Learner, residency: Residency) -> None:
    match command:
        case BeginStep(step=step):
            learner.begin_step(step)
        case Accumulate(samples=samples):
            learner.accumulate(samples)
        case Recompute(samples=samples):
            learner.recompute(samples)
        case ScoreReference(samples=samples):
            learner.score_reference(samples)
        case ScoreValues(samples=samples):
            learner.score_values(samples)
        case Apply():
            learner.apply()
        case GatherModel():
            policy.full_state()
        case RunProbe(token_ids=token_ids, dtype=dtype):
            policy.probe(token_ids, dtype)
        case Free():
            residency.free()
        case Take():
            residency.take()
        case SaveState() | RestoreMoments() | LoadPolicy() | End():
            raise AssertionError(f"{command} is not expected here")
        case _:
            assert_never(command)
