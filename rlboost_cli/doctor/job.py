"""What a job needs wherever it runs: its model, its prompts, its reward."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlboost_cli.doctor.findings import DoctorContext, Finding, fail, failed, ok, warn
from rlboost_cli.doctor.model import resolves
from rlboost_runtime.errors import ConfigError, RLBoostError
from rlboost_runtime.job import HttpReward, Job, TinyModel, data_sources, reward_files, reward_parts
from rlboost_runtime.protocol.reward_failures import WORDS, RewardFailure
from rlboost_runtime.run.create import copy_files
from rlboost_runtime.trainer.data.reading import Example, read_examples
from rlboost_runtime.trainer.episodes.runner import try_to_load
from rlboost_runtime.trainer.rewards.outcome import Reward
from rlboost_runtime.trainer.rewards.sandbox import INSTALL, Sandbox
from rlboost_runtime.trainer.rewards.scorer import RewardCall, RewardScorer

MAX_PROMPTS_MEASURED = 2000
"""Prompts whose length is taken; evenly spread over a larger data set."""


def model(context: DoctorContext) -> Iterator[Finding]:
    """Architecture, weights' names and tokenizer, without loading a weight."""
    job = context.wanted
    facts = context.model
    if isinstance(facts, RLBoostError):
        yield failed("model", facts)
    elif facts is None:
        yield from resolves(context)
    else:
        kind = "made here, random" if isinstance(job.model, TinyModel) else str(job.model)
        yield ok("model", f"{facts.num_parameters / 1e6:,.2f} M parameters ({kind}), tokenizer loads")


def prompts(context: DoctorContext) -> Iterator[Finding]:
    """Check that the data can be read and its prompts are short enough."""
    job = context.wanted
    if job.only_serves and not data_sources(job.data):
        yield ok("prompts", "none: clients bring them")
        return
    try:
        examples = read_examples(job.data, context.folder)
    except ConfigError as error:
        yield failed("prompts", error)
        return
    facts = context.model
    if facts is None or isinstance(facts, RLBoostError):
        yield warn(
            "prompts", f"{len(examples):,} read; not measured: there is no tokenizer", "see model above"
        )
        return
    every = max(1, -(-len(examples) // MAX_PROMPTS_MEASURED))
    try:
        lengths = [len(facts.encode(example)[1]) for example in examples[::every]]
        if job.algorithm.loss == "sft":
            yield _judge_responses([len(facts.encode.response(each)) for each in examples[::every]], job)
    except ConfigError as error:
        yield failed("prompts", error)
        return
    yield judge_lengths(lengths, len(examples), job)
    sources = data_sources(job.data)
    if facts.has_chat_template and any(
        example.messages is None
        and not example.chat.takes_text
        and sources[example.source].chat_template == "auto"
        for example in examples[::every]
    ):
        yield warn(
            "chat template",
            "the model's tokenizer has one, but text prompts are used without it",
            "write data.chat_template: tokenizer; or none to keep it that way",
        )


def data(context: DoctorContext) -> Iterator[Finding]:
    """Check only that the data can be read."""
    if context.wanted.only_serves and not data_sources(context.wanted.data):
        return
    try:
        examples = read_examples(context.wanted.data, context.folder)
    except ConfigError as error:
        yield failed("prompts", error)
    else:
        yield ok("prompts", f"{len(examples):,} read")


def _judge_responses(lengths: Sequence[int], job: Job) -> Finding:
    """Judge the lengths in tokens of the responses that are learnt."""
    limit = job.algorithm.max_response_tokens
    found = f"of {min(lengths)} to {max(lengths)} tokens (limit {limit})"
    too_long = sum(length > limit for length in lengths) / len(lengths)
    remedy = "raise algorithm.max_response_tokens"
    if too_long == 1:
        return fail("responses", f"{found}; all are too long", remedy)
    if too_long:
        return warn("responses", f"{found}; {too_long:.1%} are too long and will be skipped", remedy)
    return ok("responses", found)


def judge_lengths(lengths: Sequence[int], num_examples: int, job: Job) -> Finding:
    """Judge the lengths in tokens of (some of) `num_examples` prompts."""
    limit = job.algorithm.max_prompt_tokens
    fitting = sum(0 < length <= limit for length in lengths)
    if not fitting:
        shortest = min(lengths, default=0)
        return fail(
            "prompts",
            f"none of {num_examples:,} has 1 to {limit} tokens (the shortest: {shortest})",
            f"raise algorithm.max_prompt_tokens (the longest: {max(lengths, default=0)}) or shorten them",
        )
    share = fitting / len(lengths)
    found = f"{num_examples:,}, of {min(lengths)} to {max(lengths)} tokens (limit {limit})"
    if share < 1:
        return warn(
            "prompts",
            f"{found}; {1 - share:.1%} are too long or empty and will be skipped",
            "raise algorithm.max_prompt_tokens, or accept it",
        )
    if num_examples < job.algorithm.prompts_per_step:
        return warn(
            "prompts",
            f"{found}; a step takes {job.algorithm.prompts_per_step:,}, so it has each up to"
            f" {-(-job.algorithm.prompts_per_step // num_examples):,} times",
            "lower algorithm.prompts_per_step, or add prompts",
        )
    return ok("prompts", found)


def reward(context: DoctorContext) -> Iterator[Finding]:
    """Score one response as the run will: in a child process, from copies of the files that the job names."""
    job = context.wanted
    if not job.is_scored:
        why = "the model is only served" if job.only_serves else "loss sft learns the data's own responses"
        yield ok("reward", f"none: {why}")
        return
    try:
        with tempfile.TemporaryDirectory(prefix="rlboost-doctor-") as folder:
            files, log = Path(folder) / "files", Path(folder) / "reward.log"
            files.mkdir()
            copy_files(job, context.folder, files)
            examples = read_examples(job.data, files)
            firsts = {example.source: example for example in reversed(examples)}
            with RewardScorer.for_job(job, files, log) as scorer:
                for _, example in sorted(firsts.items()):
                    yield judge_reward(_score(scorer, example, job), example, job)
    except ConfigError as error:
        yield failed("reward", error)


def _score(scorer: RewardScorer, example: Example, job: Job) -> Reward:
    """Score a group of the run's size, which functions of groups may insist on; a service is asked once."""
    response = "" if example.answer is None else example.answer
    wanted = job.reward if example.reward is None else example.reward
    is_service = any(isinstance(source, HttpReward) for _, _, source in reward_parts(wanted))
    count = 1 if is_service else job.algorithm.group_size
    calls = [RewardCall(example.text, response, example.row)] * count
    first, *others = scorer.submit_group(calls, example.reward)
    found = first.result()
    for other in others:
        if found.failure is not None:
            return found  # the rest may take as long to fail
        found = other.result()
    return found


def environment(context: DoctorContext) -> Iterator[Finding]:
    """Whether the job's environment can be loaded, if it has one."""
    job = context.wanted
    if job.episodes is None:
        return
    with tempfile.TemporaryDirectory() as name:
        files = Path(name) / "files"
        try:
            files.mkdir()
            copy_files(job, context.folder, files)
            try_to_load(job, files, Path(name))
        except ConfigError as error:
            yield failed("environment", error)
            return
    yield ok("environment", f"{job.episodes.name} loads")


def sandbox(context: DoctorContext) -> Iterator[Finding]:
    """What keeps the job's own reward functions apart, if it has any and they run on this machine."""
    job = context.wanted
    is_mine = job.environment is not None or bool(reward_files(job.rewards))
    if is_mine and not job.trainer.is_elsewhere:
        try:
            yield judge_sandbox(job, Sandbox.of(job).problem())
        except ConfigError as error:
            yield failed("sandbox", error)


def judge_sandbox(job: Job, problem: str) -> Finding:
    """Judge what keeps the job's reward functions apart; `problem` as `Sandbox.problem` returns it."""
    if job.reward_sandbox == "off":
        return ok("sandbox", "off: reward functions may do whatever you may")
    if problem:
        return warn("sandbox", f"{problem}: reward functions may do whatever you may", INSTALL)
    network = "with a network" if job.reward_network else "without a network"
    return ok("sandbox", f"reward functions run in bubblewrap, {network}")


def _remedy(job: Job, failure: RewardFailure) -> str:
    """Return what to do about a reward function that fails."""
    match failure:
        case RewardFailure.NOT_A_NUMBER | RewardFailure.NOT_FINITE:
            remedy = "return a finite float; a run ends if all rewards of a step fail"
        case RewardFailure.MEMORY:
            remedy = "raise reward_memory_mib; a run ends if all rewards of a step fail"
        case RewardFailure.TIMEOUT:
            remedy = "make it faster, or raise reward_timeout_s; a run ends if all rewards of a step fail"
        case _:
            remedy = "correct the function; a run ends if all rewards of a step fail"
    may_lack_network = failure in (RewardFailure.RAISED, RewardFailure.TIMEOUT)
    if may_lack_network and job.reward_sandbox != "off" and not job.reward_network:
        what = "neither a network nor the job's secrets" if job.secrets else "no network"
        remedy += f". In the sandbox it has {what} unless the job has reward_network: true"
    return remedy


def judge_reward(scored: Reward, example: Example, job: Job) -> Finding:
    """Judge the reward of the example's own answer, or of an empty response where it has none."""
    what = "an empty response" if example.answer is None else "the first prompt's own answer"
    if scored.failure is not None:
        return fail(
            "reward",
            f"{WORDS[scored.failure]} for {what}: {scored.problem.strip()}",
            _remedy(job, scored.failure),
        )
    if example.answer is not None and scored.value <= 0:
        return warn(
            "reward",
            f"{scored.value:g} for {what}",
            "fine if the reward wants a format, such as \\boxed{}; else check the function",
        )
    return ok("reward", f"loads in its own process, {scored.value:g} for {what}")
