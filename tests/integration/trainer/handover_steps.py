"""Not a test: the hand-overs that `test_handovers.py` judges, run as one of two ranks.

`python handover_steps.py FILE` (with torchrun's environment) writes what rank 0 found. The accelerator is
`FakeDevice`: memory of this process that only a mover may fill.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rank_steps import AT, samples, stored_state
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from rlboost_runtime.job import Algorithm, Kl, Lora, Ppo, TinyModel, Trainer
from rlboost_runtime.run.checkpoints import step_folder
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import TrainingState
from rlboost_runtime.trainer.artifacts.publisher import Publisher, VersionContent
from rlboost_runtime.trainer.device.mover import Mover
from rlboost_runtime.trainer.learn.companions import Critic, Reference
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.loading import hollow_model
from rlboost_runtime.trainer.learn.model_files import version_configs
from rlboost_runtime.trainer.learn.policy import Policy, Residency
from rlboost_runtime.trainer.learn.rank_worker import serve
from rlboost_runtime.trainer.learn.ranks import End, Ranks
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.learn.sharded_state import CRITIC, StoredState
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer
from rlboost_runtime.weights.manifest import read_manifest
from rlboost_runtime.weights.store.store import WeightStore

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tied": (10, {}, {}),
    "untied": (3, {}, {"optimizer_offload": True}),
    "lora": (2, {"lora": Lora(rank=4)}, {}),
    "bfloat16": (2, {}, {"dtype": "bfloat16"}),
    "ppo": (
        2,
        {"loss": "ppo", "ppo": Ppo(learning_rate=1e-2), "kl": Kl(coef=0.1, **{"in": "reward"})},
        {},
    ),
}
"""Number of cycles, changes of the algorithm and of the trainer."""

OLD_MOVER = "old mover"
PROBE_IDS = [1, 2, 3]
FREED_S = 5.0
"""gloo's threads release the buffers of a finished collective a moment after it is over."""


def local_part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class FakeDevice(TorchDispatchMode, Mover):
    """A device in main memory. What is moved gets fresh memory and the old memory is overwritten, so that a
    stale reference reads NaN. It knows what lies on it: what was moved there, and every tensor that was made
    while the policy was there. `Tensor.cpu` goes past it: results that are kept are copied by
    `in_main_memory`."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        Mover.__init__(self, torch.device("cpu"))
        self.is_ours = False
        self.num_moved = 0
        self._held: set[StorageWeakRef] = set()

    @property
    def moves(self) -> bool:
        return True

    def onto(self, tensor: Tensor) -> Tensor:
        self.num_moved += 1
        return tensor if self.holds(tensor) else self._copy(tensor, onto=True)

    def off(self, tensor: Tensor) -> Tensor:
        return self._copy(tensor, onto=False) if self.holds(tensor) else tensor

    def release(self) -> None:
        pass  # `live_bytes` collects garbage

    def live_bytes(self) -> int:
        gc.collect()
        gc.freeze()  # what is left stays; the next look is quicker for it
        self._held = {each for each in self._held if not each.expired()}
        found = [torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._held]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def settled_bytes(self) -> int:
        """Return `live_bytes` once the threads that communicate have let go of what they sent."""
        deadline, found = time.monotonic() + FREED_S, [self.live_bytes()]
        while len(found) < 10 or len({*found[-10:]}) > 1:
            assert time.monotonic() < deadline, f"what lies on the device keeps changing: {found}"
            time.sleep(0.01)
            found.append(self.live_bytes())
        return found[-1]

    @contextmanager
    def in_main_memory(self) -> Iterator[None]:
        before, self.is_ours = self.is_ours, False
        yield
        self.is_ours = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_ours:
            self._held |= self._refs([result]) - self._refs(args)  # a view is where its base is
        return result

    def _refs(self, values: Any) -> set[StorageWeakRef]:
        flat = [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]
        return {self._ref(each) for each in flat if isinstance(each, Tensor)}

    def _ref(self, tensor: Tensor) -> StorageWeakRef:
        return StorageWeakRef(local_part(tensor).untyped_storage())

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on this device."""
        return self._ref(tensor) in self._held

    def _copy(self, tensor: Tensor, *, onto: bool) -> Tensor:
        with self.in_main_memory():
            copy = tensor.detach().clone()
            if tensor.is_floating_point():
                local_part(tensor).fill_(torch.nan)
        if onto:
            self._held.add(self._ref(copy))
        return copy


class WatchedResidency(Residency):
    """Asserts, on every rank, that nothing is left on the device."""

    def __init__(self, policy: Policy, learner: Learner, ranks: Ranks, device: FakeDevice) -> None:
        super().__init__(policy, learner.optimizer, ranks, learner.critic_state)
        self._device = device
        assert device.num_moved == device.live_bytes() == 0, "it begins in main memory"

    def take(self) -> None:
        self._device.is_ours = True
        super().take()

    def free(self) -> None:
        super().free()
        self._device.is_ours = False
        deadline = time.monotonic() + FREED_S
        while self._device.live_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self._device.live_bytes() == 0, "something stayed on the device"


class OldResidency(WatchedResidency):
    """Moves the model inside FSDP's root, as versions up to 14388ed did."""

    def free(self) -> None:
        Residency.free(self)
        self._device.is_ours = False

    def _move(self, how: Callable[[Tensor], Tensor]) -> None:
        self._policy.model._apply(how)
        self._moved[0][1].move(how)


class Run:
    """A trainer's life as far as `Residency` is concerned."""

    def __init__(self, case: str, ranks: Ranks, model: PreTrainedModel, source: Path | None = None) -> None:
        """`source`: the checkpoint that a hollow `model` goes on from."""
        _, changes, setup = CASES.get(case, (0, {}, {}))
        algorithm = Algorithm(
            learning_rate=1e-2, learning_rate_warmup_steps=0, max_response_tokens=8, **changes
        )
        trainer = Trainer(micro_batch_tokens=60, **setup)
        self.ranks, self.device = ranks, FakeDevice()
        self.device.__enter__()
        self.policy = Policy(model, make_tokenizer(), source, mover=self.device)
        self.policy.stored = None if source is None else StoredState(source)
        self.policy.set_up(trainer, algorithm, ranks)
        self.critic = self.reference = None
        if algorithm.reference is not None:
            start = Policy(new_model(case), make_tokenizer(), mover=self.device)
            self.reference = Reference(self.policy, start, ranks)
        if algorithm.critic is not None:
            self.critic = Critic(self._new_critic(case, source), algorithm, trainer, ranks)
        self.learner = Learner(self.policy, algorithm, trainer, ranks, self.reference, self.critic)
        self.state = TrainingState(self.learner, ranks)
        kind = OldResidency if case == OLD_MOVER else WatchedResidency
        self.residency = kind(self.policy, self.learner, ranks, self.device)
        trained = [(self.policy, self.learner.optimizer)]
        if self.learner.critic_state is not None:
            trained.append(self.learner.critic_state)
        if case == OLD_MOVER:  # whose mistake is that what is used lies elsewhere
            return
        for model, optimizer in trained:
            model.scorer.register_forward_pre_hook(self._require_device)
            optimizer.register_step_pre_hook(self._require_state)

    def _new_critic(self, case: str, source: Path | None) -> Policy:
        if source is None:
            return Policy(new_model(case), make_tokenizer(), mover=self.device)
        body = Policy(hollow_model(source / CRITIC), make_tokenizer(), source / CRITIC, mover=self.device)
        body.stored = StoredState(source / CRITIC)
        return body

    def _require_device(self, module: torch.nn.Module, arguments: object) -> None:
        assert not self.policy.is_away, "FSDP would gather weights on the device"
        self._require(module.named_parameters())

    def _require_state(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter, state in optimizer.state.items():
            assert parameter.grad is not None
            self._require([("gradient", parameter.grad), *state.items()])

    def _require(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            assert self.device.holds(tensor), f"{name} is in main memory where it is used"

    def end(self) -> None:
        """End rank 0's part, or serve until it does."""
        if self.ranks.leads:
            self.ranks.broadcast(End())
        else:
            serve(self.ranks, self.policy, self.learner, self.residency)
        self.device.__exit__(None, None, None)

    def train(self, step: int, *, recalled: bool) -> None:
        self.residency.take()
        self.learner.begin_step(step)
        asked = [*samples(2 * step, 5), *samples(2 * step + 1, 5)]
        if self.reference is not None:
            asked = in_main_memory(self.learner.score_reference(asked))
        if self.critic is not None:
            asked = [replace(each, reward=each.advantage) for each in asked]
            asked = self.critic.judge(self._values(asked))
        self.learner.accumulate(asked[:5])
        if recalled:  # gradients move along
            self.residency.free()
            self.residency.take()
        self.learner.accumulate(asked[5:])
        self.learner.apply()

    def _values(self, asked: list[Sample]) -> list[Sample]:
        """Samples with values; the pass leaves nothing on the device, such as a gathered embedding."""
        before = self.device.settled_bytes()
        found = in_main_memory(self.learner.score_values(asked))
        left = self.device.settled_bytes() - before
        assert left <= 0, f"values left {left} bytes on the device"
        return found

    def save(self, folder: Path, step: int) -> Path:
        return checkpoint.write(folder, self.state.take(folder), replace(AT, step=step), keep=3)

    def publish(self, store: WeightStore, version: int) -> dict[str, Any]:
        """Publish; return what the trainer, the manifest and a fresh load of the version compute."""
        probe = self.policy.probe(PROBE_IDS, "float32")
        content = VersionContent(
            self.policy.weights,
            lambda: version_configs(self.policy.model, "float32"),
            lambda: probe,
            self.policy.tied(),
        )
        with self.device.in_main_memory(), Publisher(store, "float32", lambda done: None) as publisher:
            publisher.begin(version, content)
        folder = store.path(version)
        stored = read_manifest(folder).probe
        asked = [*samples(99, 4), Sample.of(stored.token_ids, stored.next_token_ids, stored.logprobs, 0.0)]
        self.residency.take()
        self.learner.begin_step(version)
        trained = [each.old_logprobs.copy() for each in self.learner.recompute(asked) if each.usable]
        with self.device.in_main_memory():
            fresh = Policy(
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), make_tokenizer()
            )
            loaded = [logprobs_of(fresh, each) for each in asked if each.usable]
        return {
            "trainer": np.concatenate(trained), "fresh": np.concatenate(loaded),
            "probe": np.array(stored.logprobs), "trainer_probe": trained[-1], "fresh_probe": loaded[-1],
            "greedy": fresh.probe(PROBE_IDS, "float32").next_token_ids == stored.next_token_ids,
        }  # fmt: skip


def in_main_memory(found: list[Sample]) -> list[Sample]:
    """What models computed, as `Tensor.cpu` brings it from a device that has memory of its own."""
    names = "values", "reference_logprobs"
    known = [{name: getattr(each, name) for name in names} for each in found]
    copied = [{name: x.copy() for name, x in each.items() if x is not None} for each in known]
    return [replace(sample, **each) for sample, each in zip(found, copied, strict=True)]


@torch.no_grad()
def logprobs_of(policy: Policy, sample: Sample) -> np.ndarray:
    return policy.forward([sample.prompt_ids], [sample.token_ids], 1.0).logprobs[0].numpy()


def new_model(case: str) -> PreTrainedModel:
    model = make_model(TinyModel(init="tiny", hidden_size=32, num_layers=2), 64)
    if case != "untied":
        return model
    model.config.tie_word_embeddings = False
    torch.manual_seed(0)
    untied = Qwen3ForCausalLM(model.config)
    untied.generation_config = model.generation_config
    return untied


def cycles(case: str, ranks: Ranks, num: int, folder: Path) -> list[dict[str, Any]]:
    """free -> take -> train -> publish, the GPU being ours or not; the first publication is before any."""
    run, found = Run(case, ranks, new_model(case)), []
    if ranks.leads:
        store = WeightStore(folder / "versions", keep=2)
        found.append(run.publish(store, 0))
        for step in range(num):
            run.residency.free()
            run.train(step, recalled=step % 3 == 1)
            if step % 2:
                run.residency.free()
            found.append(run.publish(store, step + 1))
        run.residency.free()
        run.save(folder, 0)
        run.train(num, recalled=False)
        run.save(folder, 1)
    run.end()
    return found


def resumed(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Resume from what `cycles` saved; return the first publication and the distance after one step."""
    names = [str(folder)]
    torch.distributed.broadcast_object_list(names)
    source = step_folder(Path(names[0]), 0)
    run = Run(case, ranks, hollow_model(source), source)
    found: dict[str, Any] = {}
    if ranks.leads:
        run.state.restore(source)
        run.residency.free()
        with_probe = run.policy.probe(PROBE_IDS, "float32")
        assert with_probe.next_token_ids
        assert run.device.num_moved == run.device.live_bytes() == 0, "nothing there before the first take"
        run.train(CASES[case][0], recalled=True)
        state, wanted = (stored_state(each) for each in (run.save(folder, 2), step_folder(folder, 1)))
        assert any(name.startswith(f"{CRITIC}/exp_avg.") for name in wanted) == (run.critic is not None)
        assert state.keys() == wanted.keys()
        found["distance"] = max(float((state[name] - wanted[name]).abs().max()) for name in wanted)
    run.end()
    return found


def main(path: str) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join()
    found: dict[str, Any] = {}
    for case, (num, _, _) in CASES.items():
        with tempfile.TemporaryDirectory(dir=Path(path).parent) as name:
            cycle = cycles(case, ranks, num, Path(name))
            found[case] = {"cycles": cycle, **resumed(case, ranks, Path(name))}
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as name:
        found[OLD_MOVER] = {"cycles": cycles(OLD_MOVER, ranks, 2, Path(name))}
    if ranks.leads:
        torch.save(found, path)
    ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1])
