"""Configurations of other frameworks become job files; what these do not express is listed by option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlboost_cli.foreign.job_text import translated_job
from rlboost_cli.foreign.mapping import Framework, Translation, our_default, translate
from rlboost_cli.foreign.openrlhf import OPENRLHF
from rlboost_cli.foreign.prime_rl import PRIME_RL
from rlboost_cli.foreign.reading import FRAMEWORKS, read_foreign
from rlboost_cli.foreign.shell import read_script
from rlboost_cli.foreign.trl import TRL
from rlboost_cli.foreign.verl import VERL
from rlboost_cli.main import app
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.load import check_sense
from rlboost_runtime.job.file.shape import validate
from rlboost_runtime.job.file.tree import parse

SCRIPT = """\
#!/usr/bin/env bash
# A comment with data.seed=9 in it.
set -xeuo pipefail
PLACE=${PLACE:-here}
batch=${BATCH:-64}
tokens=$((1024 * 2 + 48))
lr=1e-5
case "${PLACE}" in
    there | nowhere) lr=1 ;;
    here)
        lr=2e-6
        ;;
    *) lr=3 ;;
esac
if [ "$(hostname)" = a ]; then
    warm=3
fi
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$HOME/a/train.parquet', '$HOME/b/train.parquet']"
    data.train_batch_size=${batch}   # prompts
    data.max_response_length=$tokens
)
DATA+=(data.max_prompt_length='256')
python3 -m verl.trainer.main_ppo \\
    "${DATA[@]}" \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.optim.lr=${lr} \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=${warm} \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    +trainer.of_my_own=1 \\
    trainer.logger='["console","tensorboard"]' \\
    trainer.total_training_steps=50 "$@" | tee log
"""
VERL_AS_YAML = """\
algorithm: {adv_estimator: grpo}
data:
  train_files: [/home/me/a/train.parquet, /home/me/b/train.parquet]
  train_batch_size: 64
  max_response_length: 2096
  max_prompt_length: 256
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B}
  rollout: {n: 4, prompt_length: "${data.max_prompt_length}"}
  actor:
    ppo_mini_batch_size: 16
    use_kl_loss: true
    ppo_micro_batch_size_per_gpu: 2
    optim: {lr: 2.0e-6, _target_: verl.Optimizer}
trainer: {of_my_own: 1, logger: [console, tensorboard], total_training_steps: 50}
"""
TRL_ARGUMENTS = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "dataset_name": "me/maths",
    "num_processes": 7,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 8,
    "num_generations": 14,
    "max_steps": 100,
    "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "beta": 0.04,
    "epsilon_high": 0.28,
    "use_vllm": True,
    "max_completion_length": 1024,
    "eval_strategy": "steps",
    "eval_steps": 20,
    "reward_funcs": ["accuracy", "format"],
    "push_to_hub": True,
}
PRIME = """\
max_steps = 20
seq_len = 2048
[model]
name = "Qwen/Qwen3-0.6B"
[monitors.wandb]
project = "reversal"
[orchestrator]
batch_size = 128
rollouts_per_example = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
temperature = 1.0
[[orchestrator.train.source]]
name = "reverse-text"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
[trainer.optim]
lr = 3e-6
[trainer.model.lora]
rank = 8
[trainer.scheduler]
type = "linear"
decay_steps = 5
[inference.vllm]
gpu_memory_utilization = 0.5
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("PLACE", "BATCH"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def checked(text: str) -> Job:
    """The job of a text that `check` would accept, but for files that are not there."""
    tree = parse(text)
    job, mistakes = validate(tree.data)
    assert [*tree.mistakes, *mistakes, *check_sense(tree.data)] == []
    assert job is not None
    return job


def reasons(not_taken: list[Any]) -> dict[str, str]:
    return {each.option: each.reason for each in not_taken}


# --- shell scripts ------------------------------------------------------------------------------------------


def test_a_script_is_followed_without_running_it(tmp_path: Path) -> None:
    text, left = translated_job(written(tmp_path, "run.sh", SCRIPT), "aws", None)
    job = checked(text)
    algorithm = job.algorithm
    assert (algorithm.loss, algorithm.group_size, algorithm.prompts_per_step) == ("dapo", 4, 64)
    assert (algorithm.minibatches_per_step, algorithm.steps, algorithm.learning_rate) == (4, 50, 2e-6)
    assert (algorithm.max_prompt_tokens, algorithm.max_response_tokens) == (256, 2096)
    assert [source.source for source in job.data] == ["a/train.parquet", "b/train.parquet"]  # type: ignore
    assert job.tracking.tensorboard
    assert job.tracking.wandb is None
    found = reasons(left)
    lr_warmup = "actor_rollout_ref.actor.optim.lr_warmup_steps"
    assert found[lr_warmup] == "depends on warm, which the script sets under a condition"
    assert found["trainer.of_my_own"] == "no counterpart"
    assert "micro_batch_tokens" in found["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"]
    assert set(found) <= {line[4:].partition(" = ")[0].partition(": ")[0] for line in text.splitlines()}


def test_the_environment_counts_as_for_the_script() -> None:
    found = read_script(SCRIPT, {"HOME": "/h", "PLACE": "there", "BATCH": "8"})
    assert found.options["actor_rollout_ref.actor.optim.lr"] == "1"
    assert found.options["data.train_batch_size"] == "8"
    unknown = read_script(SCRIPT.replace("${PLACE:-here}", "$(where am i)"), {"HOME": "/h"})
    assert unknown.open["actor_rollout_ref.actor.optim.lr"] == "lr, which the script sets under a condition"


def test_an_option_that_stays_open_is_not_taken_for_the_default(tmp_path: Path) -> None:
    script = SCRIPT.replace("    warm=3", "    batch=8")
    text, left = translated_job(written(tmp_path, "run.sh", script), "aws", None)
    assert "prompts_per_step" not in text.partition("# --- where")[0].replace(
        "prompts / prompts_per_step", ""
    )
    assert (
        reasons(left)["data.train_batch_size"] == "depends on batch, which the script sets under a condition"
    )


def test_the_yaml_of_a_script_means_the_same(tmp_path: Path) -> None:
    script = SCRIPT.replace("    actor_rollout_ref.actor.optim.lr_warmup_steps=${warm} \\\n", "")
    of_script = read_foreign(written(tmp_path, "run.sh", script))
    of_yaml = read_foreign(written(tmp_path, "verl.yaml", VERL_AS_YAML))
    assert translate(VERL, of_script.options) == translate(VERL, of_yaml.options)


# --- what each framework's options mean ---------------------------------------------------------------------


def fields(framework: Framework, **options: Any) -> dict[str, Any]:
    found = translate(framework, {name.replace("__", "."): value for name, value in options.items()})
    return {name: line.value for name, line in found.fields.items()}


def test_defaults_that_differ_from_ours_become_lines() -> None:
    found = translate(VERL, {"algorithm.adv_estimator": "grpo"}).fields
    assert found["algorithm.weight_decay"].value == 0.01
    assert "by default" in found["algorithm.weight_decay"].comment
    assert found["algorithm.clip_high"].value == 0.2
    assert found["algorithm.importance_sampling"].value == "none"
    assert "algorithm.temperature" not in found
    assert fields(TRL)["algorithm.learning_rate_schedule"] == "linear"
    assert fields(PRIME_RL)["algorithm.adam_betas"] == [0.9, 0.999]


@pytest.mark.parametrize(
    ("options", "loss", "is_exact"),
    [
        ({}, "dapo", True),
        ({"actor.loss_agg_mode": "seq-mean-token-mean"}, "grpo", True),
        ({"actor.use_token_level_loss": False}, "grpo", True),
        ({"actor.loss_agg_mode": "seq-mean-token-sum-norm", "norm": False}, "dr_grpo", True),
        ({"norm": False}, "dr_grpo", False),
        ({"actor.policy_loss.loss_mode": "gspo"}, "gspo", True),
        ({"actor.policy_loss.loss_mode": "cispo"}, "cispo", True),
        ({"actor.policy_loss.loss_mode": "sapo"}, "dapo", False),
        ({"estimator": "rloo", "actor.loss_agg_mode": "seq-mean-token-sum"}, "rloo", True),
        ({"estimator": "rloo"}, "rloo", False),
        ({"estimator": "reinforce_plus_plus_baseline"}, "reinforce_pp", True),
        ({"estimator": "reinforce_plus_plus"}, "reinforce_pp", False),
        ({"estimator": "gae"}, "ppo", True),
        ({"estimator": "remax"}, "dapo", False),
    ],
)
def test_losses_of_verl(options: dict[str, Any], loss: str, is_exact: bool) -> None:
    names = {"norm": "algorithm.norm_adv_by_std_in_grpo", "estimator": "algorithm.adv_estimator"}
    given = {names.get(name, f"actor_rollout_ref.{name}"): value for name, value in options.items()}
    found = translate(VERL, {"algorithm.adv_estimator": "grpo"} | given)
    assert found.fields["algorithm.loss"].value == loss
    assert (set(reasons(found.not_taken)) & set(found.framework.rules[4].options) == set()) == is_exact


def test_a_critic_of_verl() -> None:
    """As in examples/ppo_trainer there. Its first step is number 1, and the policy rests below
    `critic_warmup`."""
    model = "actor_rollout_ref.model.path"
    given = {
        model: "me/policy", "critic.model.path": "me/rewards", "critic.optim.lr": 9e-6, "algorithm.lam": 0.95,
        "trainer.critic_warmup": 5, "critic.ppo_micro_batch_size_per_gpu": 4, "critic.ppo_epochs": 2,
    }  # fmt: skip
    found = translate(VERL, given)
    values = {name: line.value for name, line in found.fields.items()}
    assert (values["algorithm.loss"], values["algorithm.group_size"]) == ("ppo", 1)
    assert values["algorithm.ppo"] == {
        "critic": "me/rewards", "warmup_steps": 4, "learning_rate": 9e-6, "gamma": 1.0, "gae_lambda": 0.95,
        "value_clip": 0.5,
    }  # fmt: skip
    told = reasons(found.not_taken)
    assert set(told) == {
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.ppo_epochs",
        "trainer.total_training_steps",
    }
    same = translate(VERL, {model: "me/policy", "critic.model.path": "me/policy"})
    assert "critic" not in same.fields["algorithm.ppo"].value
    assert (
        "no effect"
        in reasons(translate(VERL, given | {"algorithm.adv_estimator": "grpo"}).not_taken)["critic.optim.lr"]
    )


def test_options_of_vllm_say_that_trl_has_engines() -> None:
    """As in TRL's examples/scripts/nemo_gym/config.yaml, whose script sets use_vllm and reads model_name."""
    found = translate(TRL, {"vllm_importance_sampling_correction": True, "model_name": "me/model"})
    values = {name: line.value for name, line in found.fields.items()}
    assert values["algorithm.importance_sampling"] == "sequence_mask"
    assert values["algorithm.importance_cap"] == 3.0
    assert values["model"] == "me/model"
    assert "algorithm.importance_sampling" not in fields(TRL)


def test_kl_and_sampling_of_verl() -> None:
    kl = "actor_rollout_ref.actor.kl_loss"
    on = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.use_kl_loss": True}
    found = translate(VERL, on | {f"{kl}_coef": 0.01, f"{kl}_type": "mse"}).fields["algorithm.kl"].value
    assert found == {"coef": 0.01, "estimator": "k2", "in": "loss"}
    in_reward = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.02}
    assert translate(VERL, in_reward).fields["algorithm.kl"].value == {
        "coef": 0.02,
        "estimator": "k1",
        "in": "reward",
    }
    off = translate(VERL, {f"{kl}_coef": 0.01})
    assert "algorithm.kl" not in off.fields
    assert reasons(off.not_taken)[f"{kl}_coef"] == "has no effect with the other options"
    dapo = {
        "algorithm.filter_groups.enable": True,
        "data.gen_batch_size": 1536,
        "data.train_batch_size": 512,
        "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 4096,
        "data.max_response_length": 20480,
    }
    values = {name: line.value for name, line in translate(VERL, dapo).fields.items()}
    assert (values["algorithm.zero_variance_groups"], values["algorithm.spare_prompts"]) == ("replace", 1024)
    assert values["algorithm.max_refills"] == 10, "veRL's default is no bound"
    bound = "algorithm.filter_groups.max_num_gen_batches"
    assert "a bound is needed" in reasons(translate(VERL, dapo).not_taken)[bound]
    bounded = translate(VERL, dapo | {bound: 10, "data.gen_batch_size": 512})
    found = [bounded.fields[f"algorithm.{each}"].value for each in ("spare_prompts", "max_refills")]
    assert found == [0, 9]
    assert bound not in reasons(bounded.not_taken)
    assert values["algorithm.overlong_penalty_tokens"] == 4096


def test_each_file_that_verl_validates_on_is_an_evaluation(tmp_path: Path) -> None:
    rollout = {"n": 8, "val_kwargs": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "n": 4}}
    options = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"val_files": ["/a/aime.parquet", "/b/math500.parquet"]},
        "trainer": {"test_freq": 5, "val_before_train": False, "total_training_steps": 50},
        "actor_rollout_ref": {"rollout": rollout},
    }
    sampling = {"every_steps": 5, "samples": 4, "temperature": 0.6, "top_p": 0.95, "at_start": False}
    text, left = translated_job(written(tmp_path, "a.yaml", json.dumps(options)), "aws", None)
    assert [each.model_dump(exclude_unset=True) for each in checked(text).evaluations] == [
        {"name": name, "source": f"{name}.parquet", "prompt_field": "prompt", **sampling}
        for name in ("aime", "math500")
    ]
    assert not [each for each in left if "val" in each.option]


@pytest.mark.parametrize("name", ["args.yaml", "args.json"])
def test_batches_of_trl_count_the_responses_of_all_devices(tmp_path: Path, name: str) -> None:
    text, left = translated_job(written(tmp_path, name, json.dumps(TRL_ARGUMENTS)), "own-machines", None)
    job = checked(text)
    algorithm = job.algorithm
    assert algorithm.prompts_per_step == 7 * 16 * 8 // 14
    assert (algorithm.minibatches_per_step, algorithm.steps, algorithm.learning_rate_warmup_steps) == (
        2,
        50,
        5,
    )
    assert (algorithm.loss, algorithm.clip_low, algorithm.clip_high) == ("dapo", 0.2, 0.28)
    assert (algorithm.learning_rate_schedule, algorithm.learning_rate_floor) == ("cosine", 0.1)
    assert (algorithm.dual_clip, algorithm.old_logprobs) == (None, "recompute")
    assert (algorithm.importance_sampling, algorithm.importance_cap) == ("sequence_mask", 3.0)
    assert algorithm.kl is not None
    assert algorithm.kl.model_dump() == {
        "in": "loss", "coef": 0.04, "estimator": "k3", "reference": "start"
    }  # fmt: skip
    assert [each.model_dump(exclude_unset=True) for each in job.evaluations] == [
        {"dataset": "me/maths", "split": "test", "every_steps": 10, "at_start": False}
    ]
    assert job.trainer.infra == "ssh"
    assert set(reasons(left)) == {"reward_funcs", "push_to_hub"}


def test_devices_of_trl_are_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, "args.yaml", "{per_device_train_batch_size: 4, num_generations: 8}")
    assert "say --devices N" in reasons(translated_job(path, "aws", None)[1])["num_processes"]
    with_devices, left = translated_job(path, "aws", 8)
    assert checked(with_devices).algorithm.prompts_per_step == 4
    assert "num_processes" not in reasons(left)
    with pytest.raises(ConfigError, match="--devices is for TRL"):
        translated_job(written(tmp_path, "rl.toml", PRIME), "aws", 8)


@pytest.mark.parametrize(
    ("options", "loss", "is_exact"),
    [
        ({}, "dapo", True),
        ({"loss_type": "grpo"}, "grpo", True),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "gspo", True),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, "dr_grpo", True),
        ({"loss_type": "dr_grpo"}, "dr_grpo", False),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", True),
        ({"scale_rewards": "batch"}, "reinforce_pp", True),
        ({"loss_type": "bnpo"}, "dapo", False),
        ({"loss_type": "sapo"}, "dapo", False),
    ],
)
def test_losses_of_trl(options: dict[str, Any], loss: str, is_exact: bool) -> None:
    found = translate(TRL, options)
    line = found.fields.get("algorithm.loss")
    assert (our_default("algorithm.loss") if line is None else line.value) == loss
    about_loss = {"loss_type", "scale_rewards", "importance_sampling_level"}
    assert (not about_loss & set(reasons(found.not_taken))) == is_exact
    if loss == "cispo":
        assert found.fields["algorithm.clip_high"].value == 4.0, "the bound itself there"


def test_a_toml_of_prime_rl(tmp_path: Path) -> None:
    text, left = translated_job(written(tmp_path, "rl.toml", PRIME), "aws", None)
    job = checked(text)
    algorithm = job.algorithm
    assert (algorithm.group_size, algorithm.prompts_per_step, algorithm.steps) == (16, 8, 20)
    assert (algorithm.max_prompt_tokens, algorithm.max_response_tokens) == (1920, 128)
    assert (algorithm.loss, algorithm.max_staleness) == ("dr_grpo", 1)
    assert algorithm.zero_variance_groups == "drop"
    assert algorithm.learning_rate_schedule == "warmup_stable_decay"
    assert (algorithm.learning_rate_warmup_steps, algorithm.learning_rate_decay_steps) == (10, 5)
    assert algorithm.lora is not None
    assert (algorithm.lora.rank, algorithm.lora.alpha) == (8, 32)
    assert job.tracking.wandb is not None
    found = reasons(left)
    assert "environments" in found["orchestrator.train.source.0.env.taskset.id"]
    assert "drops tokens" in found["trainer.loss.type"], "a default without a counterpart is listed as well"
    assert "your machines" in found["inference.vllm.gpu_memory_utilization"]


FILTERED = """\
MODEL=Qwen/Qwen3-8B
PLACE=$(pwd)
DATA=(
   --data.prompt_dataset zhuzilin/dapo-math-17k   # of the hub
   --data.input_key prompt
   --data.label_key label
   --data.max_len 10240
   --rollout.max_new_tokens 8192
   --data.apply_chat_template
   # --reward.model_name_or_path ${REWARDS}
)
MORE="--actor.adam.lr 5e-7 --actor.entropy_coef 0.0"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/o"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   ${DATA[@]} $MORE \\
   --actor.model_name_or_path ${MODEL} \\
   --reward.remote_url /o/reward_func.py \\
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size=256 \\
   --algo.advantage.estimator group_norm \\
   --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.0 1.0 \\
   --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 \\
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \\
   --actor.eps_clip_low_high 0.2 0.27 \\
   --actor.lr_warmup_ratio 0 \\
   --ckpt.output_dir ${PLACE}/out --vllm.num_engines 4 --my.own 1 2>&1 | tee log --not.ours
"""


def test_a_script_of_openrlhf(tmp_path: Path) -> None:
    text, left = translated_job(written(tmp_path, "filtered.sh", FILTERED), "aws", None)
    job, found = checked(text), reasons(left)
    algorithm = job.algorithm
    assert (job.model, algorithm.loss, algorithm.learning_rate) == ("Qwen/Qwen3-8B", "dapo", 5e-7)
    assert (algorithm.group_size, algorithm.prompts_per_step, algorithm.minibatches_per_step) == (8, 128, 4)
    assert (algorithm.max_prompt_tokens, algorithm.max_response_tokens) == (2048, 8192)
    assert (algorithm.zero_variance_groups, algorithm.max_refills) == ("replace", 10)
    assert algorithm.kl is not None
    assert (algorithm.kl.coef, algorithm.kl.estimator, algorithm.kl.is_in_reward) == (0.001, "k3", False)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.27, None)
    correction = (algorithm.importance_sampling, algorithm.importance_floor, algorithm.importance_cap)
    assert correction == ("icepop", 0.5, 5.0)
    assert (algorithm.learning_rate_schedule, algorithm.learning_rate_floor) == ("cosine", 0.1)
    assert (algorithm.old_logprobs, algorithm.adam_betas) == ("recompute", [0.9, 0.95])
    assert json.loads(job.model_dump_json(exclude_unset=True))["data"] == {
        "dataset": "zhuzilin/dapo-math-17k", "prompt_field": "prompt", "chat_template": "tokenizer",
    }  # fmt: skip
    assert found.keys() >= {"reward.remote_url", "data.label_key", "train.num_episodes", "ckpt.output_dir"}
    assert "a command that the script runs" in found["ckpt.output_dir"]
    assert found["my.own"] == "no counterpart"
    assert not found.keys() & {"not.ours", "address", "runtime-env-json", "reward.model_name_or_path"}


def test_a_ppo_script_of_an_earlier_openrlhf(tmp_path: Path) -> None:
    script = """deepspeed --module openrlhf.cli.train_ppo_ray \\
        --pretrain a/policy --reward_pretrain a/reward --actor_learning_rate 5e-7 \\
        --critic_learning_rate 9e-6 \\
        --prompt_data a/prompts,b.jsonl --prompt_data_probs 0.75,0.25 --input_key messages \\
        --rollout_batch_size 1024 --train_batch_size 128 --prompt_max_len 1000 --generate_max_len 1024 \\
        --freezing_actor_steps 16 --normalize_reward --zero_stage 3 --bf16 --micro_train_batch_size 8
    """
    text, left = translated_job(written(tmp_path, "old.sh", script), "aws", None)
    job, found = checked(text), reasons(left)
    assert (job.algorithm.loss, job.algorithm.group_size) == ("ppo", 1)
    assert job.algorithm.critic is not None
    assert (job.algorithm.critic.critic, job.algorithm.critic.warmup_steps) == ("a/reward", 2)
    assert (job.algorithm.max_prompt_tokens, job.algorithm.max_response_tokens) == (1000, 1024)
    assert job.algorithm.minibatches_per_step == 8
    assert job.algorithm.kl is not None
    assert (job.algorithm.kl.coef, job.algorithm.kl.is_in_reward) == (0.01, True)
    assert isinstance(job.data, list)
    assert [each.weight for each in job.data] == [0.75, 0.25]
    assert found.keys() >= {"reward_pretrain", "normalize_reward", "zero_stage", "bf16"}
    assert "no counterpart" not in found.values()


def test_other_programs_of_openrlhf_are_refused(tmp_path: Path) -> None:
    script = "torchrun --nproc 8 openrlhf/cli/train_sft.py --data.max_len 2048"
    with pytest.raises(ConfigError, match="runs OpenRLHF's train_sft, and only train_ppo_ray is translated"):
        read_foreign(written(tmp_path, "sft.sh", script))


# --- nothing is dropped -------------------------------------------------------------------------------------

OTHERS = {
    "data.train_files": "b.parquet",
    "trainer.logger": ["tensorboard"],
    "report_to": "tensorboard",
    "scale_rewards": "batch",
    "eval_strategy": "epoch",
    "reward_funcs": ["mine"],
    "reward_weights": [1.0],
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "data.apply_chat_template_kwargs": {"enable_thinking": False},
    "chat_template_kwargs": {"enable_thinking": False},
    "actor_rollout_ref.actor.optim.betas": [0.8, 0.9],
    "orchestrator.batch_size": 64,
    "orchestrator.seq_len": 4096,
    "seq_len": 4096,
    "actor_rollout_ref.rollout.top_p": 0.9,
    "actor.adam.betas": [0.8, 0.9],
    "actor.eps_clip_low_high": [0.1, 0.3],
    "actor.lr_scheduler": "linear",
    "actor.min_lr_ratio": 0.2,
    "actor.lr_warmup_ratio": 0.1,
    "actor.entropy_coef": 0.001,
    "actor.dual_clip": 3.0,
    "algo.advantage.estimator": "rloo",
    "algo.advantage.is_correction_threshold": [0.3, 4.0],
    "algo.advantage.is_correction_type": "icepop",
    "algo.dynamic_filtering_range": [0.1, 0.9],
    "algo.kl.estimator": "k2",
    "algo.kl.target": 6.0,
    "critic.freezing_steps": 16,
    "data.prompt_probs": 1.0,
    "ds.lora.target_modules": ["q_proj"],
    "prompt_max_len": 256,
    "reward.overlong_buffer_len": 128,
    "rollout.max_new_tokens": 1024,
    "rollout.n_samples_per_prompt": 4,
}


def another(option: str, default: Any) -> Any:
    """A value that is not the default."""
    if option in OTHERS:
        return OTHERS[option]
    if isinstance(default, bool):
        return not default
    if option in ("epsilon_high", "vllm_importance_sampling_clip_min", "warmup_ratio", "delta"):
        return 0.3
    if isinstance(default, int):
        return max(default, 1) * 2
    if isinstance(default, float):
        return default / 2 or 0.5
    return (
        2
        if default is None and option.endswith(("_size", "_steps", "seed", "tokens"))
        else f"x{default or 1}"
    )


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda each: each.name)
def test_every_option_is_in_the_job_or_in_the_list(framework: Framework, tmp_path: Path) -> None:
    ending = {VERL.name: ".yaml", TRL.name: ".json", PRIME_RL.name: ".toml"}.get(framework.name, ".sh")
    for option, default in framework.defaults.items():
        found = translate(framework, {option: another(option, default)})
        said = {name for line in found.fields.values() for name in line.options}
        assert option in said | {each.option for each in found.not_taken}, option
    for option in framework.elsewhere:
        name = option.replace("*", "x")
        found = translate(framework, {name: "x"})
        assert name in reasons(found.not_taken), option
    assert reasons(translate(framework, {f"nobody.has{ending}": 1}).not_taken) == {
        **reasons(translate(framework, {}).not_taken),
        f"nobody.has{ending}": "no counterpart",
    }


def text_of(framework: Framework, options: dict[str, Any], folder: Path) -> str:
    tree: dict[str, Any] = {}
    for option, value in options.items():
        *sections, name = option.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    path = written(folder, "args.json", json.dumps(tree))
    return translated_job(path, "aws", 1 if framework is TRL else None)[0]


@pytest.mark.parametrize("framework", [VERL, TRL], ids=lambda each: each.name)
def test_whatever_option_is_set_the_job_is_valid(framework: Framework, tmp_path: Path) -> None:
    begin = {"algorithm.adv_estimator": "grpo"} if framework is VERL else {"num_generations": 8}
    for option, default in framework.defaults.items():
        given = begin | {option: another(option, default)}
        checked(text_of(framework, given, tmp_path))


def test_whatever_option_of_openrlhf_is_set_the_job_is_valid(tmp_path: Path) -> None:
    begin = {"rollout.n_samples_per_prompt": 8}
    for estimator in ("gae", "group_norm", "reinforce_baseline"):
        for option, default in OPENRLHF.defaults.items():
            given = {"algo.advantage.estimator": estimator, **begin, option: another(option, default)}
            words = ["python3 -m openrlhf.cli.train_ppo_ray"]
            for name, value in given.items():
                values = [] if value is True else value if isinstance(value, list) else [value]
                words += [f"--{name}", *(f"'{each}'" for each in values)]
            path = written(tmp_path, "args.sh", " ".join(words))
            checked(translated_job(path, "aws", None)[0])


def test_rules_name_fields_and_options_that_exist() -> None:
    for framework in FRAMEWORKS:
        for rule in framework.rules:
            assert set(rule.options) <= set(framework.defaults), rule.field
            section, _, name = rule.field.rpartition(".")
            if section == "algorithm":
                our_default(rule.field)
                assert name in type(Job.model_fields["algorithm"].default).model_fields, rule.field
        assert not set(framework.defaults) & set(framework.renamed), framework.name
        assert isinstance(translate(framework, {}), Translation)


# --- the command --------------------------------------------------------------------------------------------


def test_init_translates_and_lists(tmp_path: Path) -> None:
    path = written(tmp_path, "rl.toml", PRIME)
    done = CliRunner().invoke(app, ["init", str(tmp_path), "--from", str(path), "--template", "own-machines"])
    assert done.exit_code == 0, done.output
    assert "options are not in the job file, or not exactly:" in done.output
    assert "inference.vllm.gpu_memory_utilization = 0.5: follows from your machines" in done.output
    text = (tmp_path / "job.yaml").read_text(encoding="utf-8")
    assert checked(text).trainer.infra == "ssh"
    assert "temperature: 1.0                   # prime-rl:" in text, "a default that is said"
    assert "top_p" not in text, "a default that it does not say has none"
    assert "group_size: 16                     # prime-rl: orchestrator.group_size" in text


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.yaml", "{a: 1}", "has no options of veRL, TRL, prime-rl or OpenRLHF"),
        ("a.sh", "echo hello", "has no options of veRL, TRL, prime-rl or OpenRLHF"),
        ("a.yaml", "{a: [}", "is no yaml"),
        ("a.toml", "a = ", "is no toml"),
        ("a.json", "{", "is no json"),
        ("a.json", "[1]", "has no options"),
    ],
)
def test_files_that_are_no_configuration_are_refused(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_foreign(written(tmp_path, name, text))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_foreign(tmp_path / "missing.yaml")
