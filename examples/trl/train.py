"""Train with TRL's GRPOTrainer while RLBoost's fleet generates: TRL asks its `rollout_func` for completions.

Started, and started again if it dies, by `rlboost launch examples/trl/job.yaml`; TRL resumes from its own
checkpoint then. All that is RLBoost's is in `FleetRollout`.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOConfig, GRPOTrainer

from rlboost_runtime.trainer.rollout.client import RolloutClient


class FleetRollout(TrainerCallback):
    """TRL's `rollout_func`, and a callback that reports the training to the run."""

    def __init__(self, client: RolloutClient) -> None:
        self.client = client
        self.group_size = client.job.algorithm.group_size
        self.numbers: dict[str, float] = {}

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return a completion for each prompt; TRL repeats a prompt once for each of its generations."""
        tokenizer = trainer.processing_class
        self.client.publish(trainer.model, tokenizer)
        texts = [text for text, same in groupby(prompts) for _ in range(len(list(same)) // self.group_size)]
        prompt_ids = [tokenizer.encode(text) for text in texts]
        groups = self.client.roll_out(
            trainer.state.global_step, prompt_ids,
            group_size=self.group_size, max_response_tokens=trainer.args.max_completion_length,
        )  # fmt: skip
        done = [completion for group in groups for completion in group]
        return {
            "prompt_ids": [ids for ids in prompt_ids for _ in range(self.group_size)],
            "completion_ids": [completion.token_ids or [tokenizer.eos_token_id] for completion in done],
            "logprobs": [completion.logprobs or [0.0] for completion in done],
            "num_instances": [completion.num_instances for completion in done],  # reaches reward functions
        }

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        """A step is trained, but would not survive a crash yet."""
        if "reward" in logs:
            self.numbers = {
                name: float(value) for name, value in logs.items() if isinstance(value, int | float)
            }

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The step's checkpoint is written: `save_steps` is 1, so every step has one."""
        reward_mean = self.numbers["reward"]
        self.client.trained(state.global_step - 1, reward_mean=reward_mean, metrics=self.numbers)


def newest_whole(output: Path) -> str | None:
    """Return TRL's newest complete checkpoint. Its state file is written last, and a process may be killed
    before."""
    whole = [path for path in output.glob("checkpoint-*") if (path / TRAINER_STATE_NAME).is_file()]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def lower_case(completions: list[str], **_: Any) -> list[float]:
    """Return the share of lower-case letters: a random model has some to begin with, and can learn more."""
    return [sum("a" <= c <= "z" for c in said) / max(1, len(said)) for said in completions]


def main() -> None:
    """Train the job's model as its `algorithm` says."""
    with RolloutClient.of_run() as client:
        algorithm = client.job.algorithm
        model = AutoModelForCausalLM.from_pretrained(client.model())
        tokenizer = AutoTokenizer.from_pretrained(client.model())
        output = client.run.checkpoints / "trl"
        rollout = FleetRollout(client)
        trainer = GRPOTrainer(
            model,
            reward_funcs=[lower_case],
            train_dataset=Dataset.from_list([{"prompt": example.text} for example in client.examples()]),
            processing_class=tokenizer,
            rollout_func=rollout,
            callbacks=[rollout],
            args=GRPOConfig(
                output_dir=str(output),
                max_steps=algorithm.steps,
                per_device_train_batch_size=algorithm.prompts_per_step * algorithm.group_size,
                num_generations=algorithm.group_size,
                max_completion_length=algorithm.max_response_tokens,
                temperature=algorithm.temperature,
                learning_rate=algorithm.learning_rate,
                seed=algorithm.seed,
                save_steps=1,
                save_total_limit=2,
                logging_steps=1,
                bf16=torch.cuda.is_available(),
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train(resume_from_checkpoint=newest_whole(output))
        final = client.run.checkpoints / "model"
        trainer.save_model(str(final))
        client.finished(final)


if __name__ == "__main__":
    main()
