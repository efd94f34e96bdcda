"""Not a test: the steps that `test_ranks.py` compares, run alone or as one of several ranks.

`python rank_steps.py FILE` (with torchrun's environment) writes what rank 0 found.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader

from rlboost_runtime.job import Algorithm, Dpo, EntropyBonus, Kl, Lora, Ppo, TinyModel, Trainer
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import TrainedState, TrainingState
from rlboost_runtime.trainer.learn.companions import Critic, Reference
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.logprobs import VALUE_HEAD
from rlboost_runtime.trainer.learn.policy import Policy, Residency
from rlboost_runtime.trainer.learn.rank_worker import serve
from rlboost_runtime.trainer.learn.ranks import (
    ALONE,
    Adam,
    End,
    Ranks,
    full_tensor,
    local_part,
    rows_by_rank,
)
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.learn.sharded_state import CRITIC, StoredState
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer
from tests.model_families import random_model

SHARED: dict[str, Any] = {"ranks": 2, "context_parallel": 2}
LOSSES = ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{loss: ({"loss": loss}, {}) for loss in LOSSES},
    "lora": ({"lora": Lora(rank=4)}, {}),
    "kl": (
        {"kl": Kl(coef=0.3), "entropy_bonus": EntropyBonus(coef=0.1), "weight_decay": 0.1},
        {},
    ),
    "kl_lora": ({"lora": Lora(rank=4), "kl": Kl(coef=0.3, estimator="k2")}, {}),
    "sft": ({"loss": "sft"}, {}),
    "rejection_kl": ({"loss": "rejection", "kl": Kl(coef=0.3)}, {}),
    "dpo": ({"loss": "dpo", "dpo": Dpo(beta=0.3)}, {}),
    "dpo_lora": ({"loss": "dpo", "lora": Lora(rank=4)}, {}),
    "ppo": ({"loss": "ppo", "kl": Kl(coef=0.3, **{"in": "reward"}), "ppo": Ppo(learning_rate=1e-3)}, {}),
    "ppo_lora": ({"loss": "ppo", "lora": Lora(rank=4), "ppo": Ppo(learning_rate=1e-3)}, {}),
    "checkpointing": ({}, {"activation_checkpointing": True}),
    "far": ({}, {}),
    "qwen3_moe": ({}, {"activation_checkpointing": True}),
    "gemma3": ({}, {}),
    "qwen3_moe_context": ({"router_aux_loss_coef": 0.0}, SHARED | {"activation_checkpointing": True}),
    "gemma3_context": ({}, SHARED),
    "context_kl_lora": ({"lora": Lora(rank=4), "kl": Kl(coef=0.3, estimator="k2")}, SHARED),
    "context_dpo": ({"loss": "dpo", "dpo": Dpo(beta=0.3)}, SHARED),
    "context_ppo": ({"loss": "ppo", "ppo": Ppo(learning_rate=1e-3)}, SHARED),
    "qwen3_moe_replayed": (
        {"router_replay": "recompute", "old_logprobs": "recompute", "minibatches_per_step": 2},
        {},
    ),
}
"""Changes of the algorithm and of the trainer. "far": rank 1 does not see rank 0's files. The last ones are
families of models."""
FOUR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3_pairs": ({}, {"ranks": 4, "context_parallel": 2}),
    "gemma3_all": ({"loss": "grpo"}, {"ranks": 4, "context_parallel": 4}),
}
"""Those of four ranks."""
FAMILIES = ("qwen3_moe", "gemma3")
JUDGED = ("values", "returns", "advantages")
"""What a critic makes of a sample, per token."""

AT = TrainedState(0, 0, 0.0, 0.0, 0, 0.0, {})


def samples(seed: int, num: int = 12) -> list[Sample]:
    draw = np.random.default_rng(seed)
    found = []
    for i in range(num):
        n, m = int(draw.integers(1, 6)), int(draw.integers(1, 9))
        found.append(
            Sample.of(
                draw.integers(0, 256, m).tolist(), draw.integers(0, 256, n).tolist(),
                draw.normal(-5.5, 0.2, n).tolist(), float(draw.normal()), usable=i != 4,
            )
        )  # fmt: skip
    return found


def paired(found: list[Sample]) -> list[Sample]:
    """The samples as best and worst of groups, one pair of them unusable."""
    return [
        replace(each, advantage=float(1 - 2 * (i % 2)), usable=i // 2 != 2) for i, each in enumerate(found)
    ]


def note(optimizer: Adam, model: torch.nn.Module, gradients: list[torch.Tensor]) -> None:
    """Have the optimizer add the gradients of each of its updates."""
    step = optimizer.update

    def noting() -> None:
        found = [p.grad for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat([full_tensor(grad).flatten() for grad in found]))
        step()

    optimizer.update = noting  # type: ignore[method-assign]


def stored_rows(folder: Path, model: torch.nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """A checkpoint's weights or moments of what is trained of `model`."""
    stored = StoredState(folder)
    trained = {name: len(each) for name, each in model.named_parameters() if each.requires_grad}
    return {f"{kind}/{name}": stored.rows(name, 0, n, kind) for name, n in trained.items()}


def stored_state(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's weights and moments, of the policy and of a critic."""
    found = {}
    for part in ("", f"{CRITIC}/"):
        if StoredState.is_in(folder / part):
            stored = StoredState(folder / part)
            for name, tensor in FileSystemReader(folder / part).read_metadata().state_dict_metadata.items():
                kind, _, of = name.partition(".")
                found[part + name] = stored.rows(of, 0, tensor.size[0], kind)
    return found


def split(found: list[Sample], seed: int, together: int = 1) -> Iterator[list[Sample]]:
    """Any order, in up to four calls, also with one sample for two ranks."""
    draw = np.random.default_rng(seed)
    units = [found[i : i + together] for i in range(0, len(found), together)]
    order, cuts = draw.permutation(len(units)), sorted(draw.integers(1, len(units), 3).tolist())
    for start, end in zip([0, *cuts], [*cuts, len(units)], strict=True):
        if start < end:
            yield [sample for i in order[start:end] for sample in units[i]]


def draw_value_head(critic: Critic, ranks: Ranks) -> None:
    """A head that has learned something: a new one's values are 0, and its body has no gradient."""
    head = getattr(critic.body.model, VALUE_HEAD)
    drawn = torch.randn(head.shape, generator=torch.Generator().manual_seed(4))
    local_part(head.detach()).copy_(rows_by_rank(drawn, ranks)[ranks.rank])


def run_case(case: str, ranks: Ranks, seed: int | None) -> dict[str, Any]:
    """Two mini-batches; return their gradients, the weights, metrics, optimizer state and probe."""
    changes, setup = (CASES | FOUR)[case]
    algorithm = Algorithm(
        learning_rate=1e-3, learning_rate_warmup_steps=0, max_response_tokens=8, grad_clip=1e9, **changes
    )
    trainer = Trainer(micro_batch_tokens=1000 if seed is None else 25, **setup)
    if ranks.num == 1:
        trainer = trainer.model_copy(update={"context_parallel": 1})
    width = 32 * trainer.ranks  # a head for each that shares a row
    tiny = TinyModel(init="tiny", hidden_size=width, num_layers=2)
    family = re.sub("_(replayed|context|pairs|all)$", "", case)
    model = random_model(family) if family in FAMILIES else make_model(tiny, 64)
    policy = Policy(model, make_tokenizer())
    policy.set_up(trainer, algorithm, ranks)
    reference = None
    if algorithm.reference is not None:
        start = make_model(TinyModel(init="tiny", hidden_size=width, num_layers=2, seed=5), 64)
        other = None if algorithm.lora is not None else Policy(start, make_tokenizer())
        reference = Reference(policy, other, ranks)
    critic = None
    if algorithm.critic is not None:
        body = make_model(TinyModel(init="tiny", hidden_size=width, num_layers=2, seed=6), 64)
        critic = Critic(Policy(body, make_tokenizer()), algorithm, trainer, ranks)
        draw_value_head(critic, ranks)
    learner = Learner(policy, algorithm, trainer, ranks, reference, critic)
    gradients: list[torch.Tensor] = []
    models = {learner.optimizer: policy.model}
    if critic is not None:
        models[critic.optimizer] = critic.body.model
    for optimizer, model in models.items():
        note(optimizer, model, gradients)
    if not ranks.leads:
        serve(ranks, policy, learner, Residency(policy, learner.optimizer))
        return {}
    learner.begin_step(3)
    is_paired = algorithm.loss == "dpo"
    first, second = paired(samples(0)) if is_paired else samples(0), samples(1)
    if critic is not None:
        both = [replace(each, reward=each.advantage) for each in (*first, *second)]
        judged = critic.judge(
            learner.score_values(both if reference is None else learner.score_reference(both))
        )
        first, second = judged[: len(first)], judged[len(first) :]
    old = learner.recompute(paired(second) if is_paired else second)
    for number, batch in enumerate((first, old)):
        for part in [batch] if seed is None else split(batch, seed + number, 1 + is_paired):
            learner.accumulate(part if reference is None else learner.score_reference(part))
        learner.apply()
    weights = policy.full_state()
    moments: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as name:
        training = TrainingState(learner, ranks)
        folder = checkpoint.write(Path(name), training.take(Path(name)), AT, keep=2)
        training.restore(folder)
        later = replace(AT, step=1)
        again = checkpoint.write(Path(name), training.take(Path(name)), later, keep=2)
        parts = {".": policy.model} | ({} if critic is None else {CRITIC: critic.body.model})
        for part, model in parts.items():
            found, copies = (stored_rows(each / part, model, "exp_avg") for each in (folder, again))
            assert all(torch.equal(found[each], copies[each]) for each in found)
            moments += stored_rows(folder / part, model, "exp_avg_sq").values()
        if critic is not None:
            weights |= stored_rows(folder / CRITIC, critic.body.model, "model")
    result = {
        "gradients": gradients,
        "weights": weights,
        "metrics": learner.metrics(),
        "moments": moments,
        "old": [sample.old_logprobs for sample in old],
        "routes": [sample.routes for sample in old],
        "judged": [getattr(each, name) for each in (*first, *second) for name in JUDGED],
        "probe": policy.probe([1, 2, 3], "float32").logprobs,
    }
    ranks.broadcast(End())
    return result


LOADED = {
    "stored": None, "adapters": Lora(rank=4), "sent": None, "renamed": None, "qwen3_moe": None,
}  # fmt: skip
"""Ways in which the weights of a folder reach the ranks, with the job's adapters."""


def write_model(folder: Path, case: str) -> None:
    """A model of 19 M parameters in bfloat16; "renamed": as `transformers` has to read it. The
    experts of a mixture are in the files one by one."""
    tiny = TinyModel(init="tiny", hidden_size=1024 if case == "stored" else 64, num_layers=2)
    model = (random_model(case) if case in FAMILIES else make_model(tiny, 64)).to(torch.bfloat16)
    stored = model.model if case == "renamed" else model
    stored.save_pretrained(folder, max_shard_size="10MB")
    make_tokenizer().save_pretrained(folder)


def anonymous_bytes() -> int:
    """This process's memory that is no file's."""
    (line,) = (row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def load_case(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Load the folder's model as the trainer does; return the weights and the largest growth of a rank."""
    before, growth, is_over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            growth[0] = max(growth[0], anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    is_sent = case in ("sent", "renamed")
    files = Policy.load(folder, ranks).small_files() if is_sent else {}
    policy = Policy.bare(files) if is_sent and not ranks.leads else Policy.load(folder, ranks)
    policy.set_up(Trainer(), Algorithm(lora=LOADED[case]), ranks, is_sent=is_sent)
    is_over.set()
    watcher.join()
    (largest,) = ranks.largest([growth[0]])
    if ranks.leads:
        found = {"hollow": policy.stored is not None, "state": policy.full_state(), "bytes": largest}
        ranks.broadcast(End())
        return found
    learner = Learner(policy, Algorithm(), Trainer(), ranks)
    serve(ranks, policy, learner, Residency(policy, learner.optimizer))
    return {}


def main(path: str) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join()
    far = replace(ranks, num_here=1)
    cases = FOUR if ranks.num == 4 else CASES
    found = {case: run_case(case, far if case == "far" else ranks, seed=7) for case in cases}
    for case in LOADED if ranks.num == 2 else ():
        folder = Path(path).parent / f"loaded-{case}"
        if ranks.leads:
            write_model(folder, case)
        ranks.sum([0.0])
        found[f"loaded {case}"] = load_case(case, ranks, folder)
    if ranks.leads:
        torch.save(found, path)
    ranks.leave()


def alone(case: str) -> dict[str, Any]:
    """The same without micro-batches, order and ranks."""
    return run_case(case, ALONE, seed=None)


if __name__ == "__main__":
    main(sys.argv[1])
