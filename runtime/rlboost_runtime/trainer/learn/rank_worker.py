"""The loop of the ranks other than 0: enter the methods that rank 0 enters, until it sends `End`."""

from __future__ import annotations

from typing import assert_never

import torch

from rlboost_runtime.job import Job
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy, Residency
from rlboost_runtime.trainer.learn.ranks import (
    Accumulate,
    Apply,
    BeginStep,
    End,
    Free,
    GatherModel,
    GatherOptimizer,
    LoadPolicy,
    RankCommand,
    Ranks,
    Recompute,
    RunProbe,
    ScatterOptimizer,
    ScoreReference,
    Take,
)
from rlboost_runtime.trainer.learn.reference import Reference


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
            learner = Learner(policy, job.algorithm, job.trainer, ranks, reference)
            serve(ranks, policy, learner, Residency(policy, learner.optimizer))
        case End():
            return
        case command:
            raise AssertionError(f"{command} before the model was loaded")


def serve(ranks: Ranks, policy: Policy, learner: Learner, residency: Residency) -> None:
    """Serve rank 0's commands with a policy that is set up; return at `End`."""
    while not isinstance(command := ranks.receive(), End):
        _execute(command, policy, learner, residency)


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
        case Apply():
            learner.apply()
        case GatherModel():
            policy.full_state()
        case GatherOptimizer():
            learner.optimizer.state_dict()
        case ScatterOptimizer(steps=steps):
            learner.optimizer.receive_state(steps)
        case RunProbe(token_ids=token_ids, dtype=dtype):
            policy.probe(token_ids, dtype)
        case Free():
            residency.free()
        case Take():
            residency.take()
        case LoadPolicy() | End():
            raise AssertionError(f"{command} is not expected here")
        case _:
            assert_never(command)
