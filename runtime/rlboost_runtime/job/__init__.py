"""The job file: what a person writes, checked strictly, every field with its unit and a default that works.

`job.file.load.load_job` turns a YAML file into a `Job` or raises `JobErrors`, one line per mistake:
`job.yaml:14: rollout.spot.max_instance: unknown field; did you mean max_instances?`
The resolved job is stored as JSON beside the run and read back with `run.resolved.read_resolved`.
"""

from __future__ import annotations

from rlboost_runtime.job.algorithm import (
    IMPORTANCE_CAPS,
    WITHOUT_RATIO,
    Algorithm,
    Dpo,
    EntropyBonus,
    Kl,
    Lora,
    Loss,
    Ppo,
    Rejection,
)
from rlboost_runtime.job.base import Model
from rlboost_runtime.job.data import (
    CHAT_TEMPLATES,
    Curriculum,
    PromptData,
    PromptDataset,
    PromptFile,
    ReasoningGym,
    data_files,
    data_sources,
)
from rlboost_runtime.job.environment import Environment
from rlboost_runtime.job.evaluation import Evaluation, HeldOut, sources_of
from rlboost_runtime.job.rollout import CloudOffer, LocalOffer, Market, Rollout, Spot, SshOffer, num_devices
from rlboost_runtime.job.run import Budget, Dashboard, Endpoint, Job, Wandb
from rlboost_runtime.job.task import (
    BUILT_IN_REWARDS,
    HttpReward,
    RewardSetting,
    RewardSource,
    TinyModel,
    Warmup,
    reward_files,
    reward_parts,
)
from rlboost_runtime.job.trainer import BOUGHT_MACHINE, NODE_PORT, After, Trainer

__all__ = [
    "BOUGHT_MACHINE",
    "BUILT_IN_REWARDS",
    "CHAT_TEMPLATES",
    "IMPORTANCE_CAPS",
    "NODE_PORT",
    "WITHOUT_RATIO",
    "After",
    "Algorithm",
    "Budget",
    "CloudOffer",
    "Curriculum",
    "Dashboard",
    "Dpo",
    "Endpoint",
    "EntropyBonus",
    "Environment",
    "Evaluation",
    "HeldOut",
    "HttpReward",
    "Job",
    "Kl",
    "LocalOffer",
    "Lora",
    "Loss",
    "Market",
    "Model",
    "Ppo",
    "PromptData",
    "PromptDataset",
    "PromptFile",
    "ReasoningGym",
    "Rejection",
    "RewardSetting",
    "RewardSource",
    "Rollout",
    "Spot",
    "SshOffer",
    "TinyModel",
    "Trainer",
    "Wandb",
    "Warmup",
    "data_files",
    "data_sources",
    "num_devices",
    "reward_files",
    "reward_parts",
    "sources_of",
]
