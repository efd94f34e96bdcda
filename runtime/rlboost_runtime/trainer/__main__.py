"""`python -m rlboost_runtime.trainer RUN_FOLDER`: train the run's job to its end.

Exit code 0: all steps are trained and the model is saved. 78: the run cannot continue and a restart would not
help; problem and remedy are in the log and with the coordinator. Anything else: start it again, it resumes.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import transformers

from rlboost_runtime import logs
from rlboost_runtime.errors import GpuMissing, RLBoostError, RuntimeFault, is_disk_full
from rlboost_runtime.fit.gpus import ask_driver, require_gpus
from rlboost_runtime.fit.plan import resolved
from rlboost_runtime.fit.shape import shape_of_config
from rlboost_runtime.job import Job, TinyModel, num_devices
from rlboost_runtime.run.checkpoints import ancestors_of, saved_steps, step_folder
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.head import node_address
from rlboost_runtime.run.resolved import read_resolved
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.data.chat import PromptEncoder
from rlboost_runtime.trainer.data.prompts import PromptSource
from rlboost_runtime.trainer.data.reading import Example, read_examples
from rlboost_runtime.trainer.episodes.runner import EpisodeRunner
from rlboost_runtime.trainer.learn.companions import Critic, Reference
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.rank_worker import run_worker
from rlboost_runtime.trainer.learn.ranks import ALONE, End, LoadPolicy, Ranks
from rlboost_runtime.trainer.learn.sharded_state import CRITIC
from rlboost_runtime.trainer.loop import TrainerLoop
from rlboost_runtime.trainer.models.hub import StartupProgress, fetch
from rlboost_runtime.trainer.models.tiny import WarmupReport, prepare
from rlboost_runtime.trainer.models.warmup import warm_up, warmup_data
from rlboost_runtime.trainer.node import (
    TrainerNode,
    die_with_launcher,
    is_rank,
    run_ranks,
    use_growing_segments,
    watch_nodes,
)
from rlboost_runtime.trainer.rewards.outcome import RewardWatch
from rlboost_runtime.trainer.rewards.scorer import RewardCall, RewardScorer
from rlboost_runtime.trainer.rollout.client import RolloutClient, keep_tokenizer
from rlboost_runtime.trainer.rollout.evaluation import evaluation_prompts

log = logging.getLogger(__name__)

EXIT_CANNOT_GO_ON = 78
"""EX_CONFIG: the supervisor must not restart the trainer."""


def main(arguments: list[str]) -> int:
    """Run the trainer; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m rlboost_runtime.trainer RUN_FOLDER", file=sys.stderr)
        return 2
    run = RunFolder(Path(arguments[0]).absolute())
    job = read_resolved(run.job_json)
    use_growing_segments()
    if not is_rank():
        try:
            look_for_gpus(job)
        except GpuMissing as missing:
            return _refuse(run, missing)
    if job.trainer.ranks * job.trainer.nodes == 1:
        return lead(run, ALONE)
    if not is_rank():
        address = node_address(job.trainer) if job.trainer.nodes > 1 else None
        place = TrainerNode(job.trainer.ranks, job.trainer.nodes, 0, address)
        if job.trainer.bought_nodes:
            watch_nodes(run)
        command = ["-m", "rlboost_runtime.trainer", *arguments]
        return run_ranks(run.name, command, place, (EXIT_CANNOT_GO_ON,))
    die_with_launcher()
    ranks = Ranks.join()
    if ranks.leads:
        code = lead(run, ranks)
    else:
        logs.setup(f"trainer-{ranks.rank}")
        run_worker(ranks)
        code = 0
    ranks.leave()
    return code


def look_for_gpus(job: Job) -> None:
    """Raise `GpuMissing` where torch sees fewer GPUs than the head was bought with."""
    accelerators = job.trainer.accelerators or "cpu"
    if not accelerators.lower().startswith("cpu") and not job.trainer.allow_cpu:
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        require_gpus(num_devices(accelerators), seen, ask_driver(), torch.version.cuda or "")


def fit_to_gpu(job: Job, policy: Policy) -> Job:
    """Return `job` with what it leaves to the plan filled in by this GPU's memory; unchanged on a CPU."""
    if policy.mover.device.type != "cuda":
        return job
    try:
        shape = shape_of_config(policy.model.config.to_dict())
    except (KeyError, TypeError, ValueError):
        return job  # no transformer that the plan can count: as on a CPU
    found = resolved(job, shape, torch.cuda.mem_get_info()[1])
    switches = ("activation_checkpointing", "optimizer_offload", "micro_batch_tokens")
    logs.event(log, "trainer.memory", **{name: getattr(found.trainer, name) for name in switches})
    return found


def _refuse(run: RunFolder, error: RLBoostError) -> int:
    logs.setup("trainer")
    logs.explain(log, error)
    with RolloutClient.of_run(run.path) as client:
        client.stream.failed(error.problem, error.remedy, error.exit_code)
    return EXIT_CANNOT_GO_ON


def lead(run: RunFolder, ranks: Ranks) -> int:
    """Run the trainer as rank 0 of its ranks; return the exit code."""
    logs.setup("trainer")
    with RolloutClient.of_run(run.path) as client:
        try:
            train(client, ranks)
        except Exception as exc:
            known = _explained(exc, run)
            if known is None:
                raise
            log.info("the run cannot continue", exc_info=True)
            logs.explain(log, known)
            client.stream.failed(known.problem, known.remedy, known.exit_code)
            ranks.broadcast(End())
            return EXIT_CANNOT_GO_ON
    return 0


def _explained(error: Exception, run: RunFolder) -> RLBoostError | None:
    """Return the error to show to people; None where only a restart may help."""
    if is_disk_full(error):
        free = shutil.disk_usage(run.path).free / 1e9
        what = (
            error.problem if isinstance(error, RLBoostError) else "a checkpoint or metrics cannot be written"
        )
        return RuntimeFault(
            f"the disk of {run.path} is full ({free:.2f} GB free): {what}",
            f"make room there, then type rlboost launch {run.name} --resume: it continues from its"
            " last checkpoint",
        )
    return error if isinstance(error, RLBoostError) else None


def train(client: RolloutClient, ranks: Ranks = ALONE) -> Path:
    """Prepare model, data and rewards, then train; return the folder of the final model."""
    run, job = client.run, client.job
    torch.set_num_threads(job.trainer.threads)
    torch.manual_seed(job.algorithm.seed)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    run.logs.mkdir(parents=True, exist_ok=True)
    progress = StartupProgress(run)
    progress.report("reading the prompts")
    examples = read_examples(job.data, run.files)
    with RewardScorer.for_job(job, run.files, run.logs / "reward.log") as scorer:
        policy = load_policy(client, examples, scorer, progress, ranks)
        keep_tokenizer(run, policy.tokenizer)
        if job.endpoint is not None and not job.endpoint.trains:
            progress.finish()
            serve_model(client, policy)
        progress.report("encoding the prompts")
        encoder, imitates = PromptEncoder(policy.tokenizer), job.algorithm.loss == "sft"
        source = PromptSource(
            examples, encoder, prompts_per_step=job.algorithm.prompts_asked_per_step,
            max_prompt_tokens=job.algorithm.max_prompt_tokens, seed=job.algorithm.seed,
            num_held_out=0 if job.held_out is None else job.held_out.prompts,
            encode_response=encoder.response if imitates else None,
            max_response_tokens=job.algorithm.max_response_tokens,
        )  # fmt: skip
        evaluated = evaluation_prompts(job, run.files, encoder, source.held_out)
        other = load_reference(client, examples, scorer, progress, ranks)
        client.job = job = fit_to_gpu(job, policy)
        files = _files_to_send(policy, job)
        others = {} if other is None else _files_to_send(other, job)
        folder = None if other is None else str(other.source)
        body = load_critic(client, examples, scorer, progress, ranks)
        bodies = {} if body is None else _files_to_send(body, job)
        ranks.broadcast(
            LoadPolicy(
                str(policy.source), job.canonical_json(), files, folder, others,
                None if body is None else str(body.source), bodies,
            )
        )  # fmt: skip
        policy.set_up(job.trainer, job.algorithm, ranks, is_sent=bool(files))
        reference = None
        if job.algorithm.reference is not None:
            reference = Reference(policy, other, ranks, is_sent=bool(others))
        critic = None
        if body is not None:
            critic = Critic(body, job.algorithm, job.trainer, ranks, is_sent=bool(bodies))
        progress.finish()
        with contextlib.ExitStack() as playing:
            episodes = None
            if job.episodes is not None:
                log_file = run.logs / "environment.log"
                episodes = playing.enter_context(EpisodeRunner(job, run, log_file))
            loop = TrainerLoop(client, policy, source, scorer, ranks, reference, evaluated, episodes, critic)
            final = loop.train()
        ranks.broadcast(End())
        return final


def serve_model(client: RolloutClient, policy: Policy) -> NoReturn:
    """Publish the model; then there is nothing to do until the supervisor ends this process."""
    client.publish(policy.model, policy.tokenizer)
    logs.event(log, "model.served", version=client.version)
    while True:
        time.sleep(3600.0)


def load_policy(
    client: RolloutClient,
    examples: list[Example],
    scorer: RewardScorer,
    progress: StartupProgress,
    ranks: Ranks = ALONE,
) -> Policy:
    """Return the policy to go on with: of the newest checkpoint that is intact, else the job's model."""
    if saved_steps(client.run.checkpoints):
        progress.report("loading the checkpoint")
    saved = checkpoint.newest_intact(client.run.checkpoints)
    if saved is None and (ancestors := ancestors_of(client.run)):
        raise RuntimeFault(
            f"the checkpoint that the run was forked from, {ancestors[0]}, is gone",
            "start the fork again as a new run, from another checkpoint",
        )
    if saved is not None:
        return Policy.load(saved, ranks)
    progress.report("loading the model")
    return _start_policy(client, examples, scorer, progress, ranks)


def load_reference(
    client: RolloutClient,
    examples: list[Example],
    scorer: RewardScorer,
    progress: StartupProgress,
    ranks: Ranks,
) -> Policy | None:
    """Return the reference's model; None where there is no reference, or the base under adapters serves."""
    reference = client.job.algorithm.reference
    if reference is None or not client.job.algorithm.has_reference_model:
        return None
    progress.report("loading the reference model")
    return _model_beside(reference, client, examples, scorer, progress, ranks)


def load_critic(
    client: RolloutClient,
    examples: list[Example],
    scorer: RewardScorer,
    progress: StartupProgress,
    ranks: Ranks,
) -> Policy | None:
    """Return the model that the critic goes on with, of the newest checkpoint, or begins as; None without
    one."""
    settings = client.job.algorithm.critic
    if settings is None:
        return None
    progress.report("loading the critic")
    if saved := saved_steps(client.run.checkpoints):
        kept = step_folder(client.run.checkpoints, saved[-1]) / CRITIC
        if kept.is_dir():  # else the run is the fork of one without a critic
            return Policy.load(kept, ranks)
    return _model_beside(settings.critic, client, examples, scorer, progress, ranks)


def _model_beside(
    name: str,
    client: RolloutClient,
    examples: list[Example],
    scorer: RewardScorer,
    progress: StartupProgress,
    ranks: Ranks,
) -> Policy:
    if name == "start":
        return _start_policy(client, examples, scorer, progress, ranks)
    if not Path(name).is_dir():
        fetch(name, progress)
    return Policy.load(name, ranks)


def _start_policy(
    client: RolloutClient,
    examples: list[Example],
    scorer: RewardScorer,
    progress: StartupProgress,
    ranks: Ranks,
) -> Policy:
    """Return the policy that the run begins with."""
    if isinstance(client.job.model, TinyModel):
        return Policy.load(_tiny_folder(client, client.job.model, examples, scorer, progress), ranks)
    model = client.model()
    if model == client.job.model:
        fetch(model, progress)
        progress.report("loading the model")
    return Policy.load(model, ranks)


def _files_to_send(policy: Policy, job: Job) -> dict[str, bytes]:
    """Return the files beside the weights where other ranks cannot read the model's folder themselves."""
    return policy.small_files() if job.trainer.nodes > 1 or policy.stored is None else {}


def _tiny_folder(
    client: RolloutClient,
    tiny: TinyModel,
    examples: list[Example],
    scorer: RewardScorer,
    progress: StartupProgress,
) -> Path:
    job, algorithm = client.job, client.job.algorithm
    watch = RewardWatch(scorer.name)

    def score(pairs: list[tuple[Example, str]]) -> list[float]:
        calls = [(RewardCall(each.text, text, each.row), each.reward) for each, text in pairs]
        values = []
        for future in [scorer.submit(*call) for call in calls]:
            reward = future.result()
            watch.saw([reward])
            values.append(reward.value)
        return values

    def warm(policy: Policy) -> WarmupReport:
        assert tiny.warmup is not None
        return warm_up(
            policy, warmup_data(job.data, examples), score, tiny.warmup,
            max_prompt_tokens=algorithm.max_prompt_tokens, max_response_tokens=algorithm.max_response_tokens,
            temperature=algorithm.temperature, seed=tiny.seed, report=progress.report,
        )  # fmt: skip

    folder, report = prepare(job, tiny, client.run.files, warm)
    what = "tiny model, random init, no warm-up" if report is None else report.describe()
    logs.event(log, "model.ready", what=what, folder=str(folder))
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
