"""`python -m rlboost_runtime.trainer RUN_FOLDER`: train the run's job to its end.

Exit code 0: all steps are trained and the model is saved. 78: the run cannot go on and a restart would not
help; problem and remedy are in the log and with the coordinator. Anything else: start it again, it resumes.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch
import transformers

from rlboost_runtime import logs
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.job import Job, TinyModel, read_resolved
from rlboost_runtime.run_folder import RunFolder
from rlboost_runtime.trainer import checkpoint
from rlboost_runtime.trainer.data import Example, PromptSource, read_examples
from rlboost_runtime.trainer.loop import TrainerLoop
from rlboost_runtime.trainer.policy import Policy
from rlboost_runtime.trainer.rewards import RewardCall, RewardScorer
from rlboost_runtime.trainer.step_stream import StepStream
from rlboost_runtime.trainer.tiny import WarmupReport, prepare
from rlboost_runtime.trainer.warmup import warm_up, warmup_data

log = logging.getLogger(__name__)

EXIT_CANNOT_GO_ON = 78
"""EX_CONFIG: the supervisor must not start us again."""


def main(arguments: list[str]) -> int:
    """Run the trainer; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m rlboost_runtime.trainer RUN_FOLDER", file=sys.stderr)
        return 2
    run = RunFolder(Path(arguments[0]).absolute())
    logs.setup("trainer")
    with StepStream.for_run(run) as stream:
        try:
            train(run, read_resolved(run.job_json), stream)
        except RLBoostError as exc:
            log.info("the run cannot go on", exc_info=True)
            logs.explain(log, exc)
            stream.failed(exc.problem, exc.remedy)
            return EXIT_CANNOT_GO_ON
    return 0


def train(run: RunFolder, job: Job, stream: StepStream) -> Path:
    """Prepare model, data and rewards, then train; return the folder of the final model."""
    torch.set_num_threads(job.trainer.threads)
    torch.manual_seed(job.algorithm.seed)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    run.logs.mkdir(parents=True, exist_ok=True)
    examples = read_examples(job.data, run.files)
    with RewardScorer(
        job.reward, run.files, timeout_s=job.reward_timeout_s, log_file=run.logs / "reward.log",
        num_children=max(1, min(8, (os.cpu_count() or 1) // 4)),
    ) as scorer:  # fmt: skip
        policy = load_policy(run, job, examples, scorer)
        source = PromptSource(
            examples, policy.encode, prompts_per_step=job.algorithm.prompts_per_step,
            max_prompt_tokens=job.algorithm.max_prompt_tokens, seed=job.algorithm.seed,
        )  # fmt: skip
        return TrainerLoop(run, job, policy, source, scorer, stream).train()


def load_policy(run: RunFolder, job: Job, examples: list[Example], scorer: RewardScorer) -> Policy:
    """Return the policy to go on with: of the newest checkpoint, else the job's model."""
    saved = checkpoint.saved_steps(run.checkpoints)
    if saved:
        return Policy.load(checkpoint.step_folder(run.checkpoints, saved[-1]))
    if isinstance(job.model, TinyModel):
        return _tiny_policy(run, job, job.model, examples, scorer)
    folder = run.files / job.model
    return Policy.load(folder if folder.is_dir() else job.model)


def _tiny_policy(
    run: RunFolder, job: Job, tiny: TinyModel, examples: list[Example], scorer: RewardScorer
) -> Policy:
    algorithm = job.algorithm

    def score(pairs: list[tuple[Example, str]]) -> list[float]:
        calls = [RewardCall(example.text, text, example.row) for example, text in pairs]
        return [reward.value for reward in scorer.score(calls)]

    def warm(policy: Policy) -> WarmupReport:
        assert tiny.warmup is not None
        return warm_up(
            policy, warmup_data(job.data, examples), score, tiny.warmup,
            max_prompt_tokens=algorithm.max_prompt_tokens, max_response_tokens=algorithm.max_response_tokens,
            temperature=algorithm.temperature, seed=tiny.seed,
        )  # fmt: skip

    folder, report = prepare(job, tiny, run.files, warm)
    what = "tiny model, random init, no warm-up" if report is None else report.describe()
    logs.event(log, "model.ready", what=what, folder=str(folder))
    return Policy.load(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
