"""What tests of a real vLLM share: tiny random models on disk, servers, a reader of an engine's outputs."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rlboost_runtime.engines.base import EngineSpec, VllmOptions
from rlboost_runtime.engines.vllm.engine import VllmServerEngine
from rlboost_runtime.file_tensors import FileLayout
from rlboost_runtime.protocol.messages import Sampling
from tests.model_families import random_model

VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
NEAR_TIE = 1e-3
UNKNOWN_FLAG = "--not-an-option-of-this-version"
SLOWNESS = float(os.environ.get("RLBOOST_TEST_SLOWNESS", "1"))
"""Stretches every deadline of these tests: a server starts in 30 s on two idle cores."""
STARTS_AT_ONCE = 2
"""A start keeps a core busy for most of its time."""
MARKS = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600 * SLOWNESS),
]


def tiny(family: str, *, tied: bool, seed: int, **changes: object) -> PreTrainedModel:
    """A random model, other weights for other seeds."""
    torch.manual_seed(seed)
    if family in ("qwen3_moe", "gemma3"):
        return random_model(family, seed, vocab_size=VOCABULARY, eos_token_id=None, pad_token_id=None)
    shape = SHAPE | changes
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=tied)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32, tie_word_embeddings=tied)).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write the model as a weight version has it."""
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    layout = FileLayout.of(model)
    parts = (part for pair in model.state_dict().items() for part in layout.split(*pair))
    state = {name: tensor.clone() for name, tensor in parts}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors")
    return folder


@dataclass
class Versions:
    """Versions 0, 1, ... of one model, on disk and in memory."""

    family: str
    tied: bool
    root: Path
    models: dict[int, PreTrainedModel] = field(default_factory=dict)

    def __getitem__(self, version: int) -> PreTrainedModel:
        if version not in self.models:
            self.models[version] = tiny(self.family, tied=self.tied, seed=version)
            save(self.models[version], self.root / f"v{version:06d}")
        return self.models[version]

    def folder(self, version: int) -> Path:
        """The version's folder."""
        assert self[version] is not None
        return self.root / f"v{version:06d}"


def spec_for(folder: Path, **changes) -> EngineSpec:
    spec = EngineSpec(
        kind="vllm",
        sampling=Sampling(temperature=0.0),
        max_context_tokens=1024,
        max_running=64,
        dtype="float32",
        seed=1,
        threads=1,
        log=folder / "engine.log",
        vllm=VllmOptions(kv_cache_mib=64),
    )
    return msgspec.structs.replace(spec, **changes)


# --- servers ---------------------------------------------------------------------------------------------

MAIN, SECOND, DRAFTING = "main", "second", "drafting"
LLAMA_TIED, LLAMA, QWEN, HALVES = "llama-tied", "llama", "qwen3", "qwen3-halves"
EXPERTS, WINDOWS = "qwen3-moe", "gemma3"


PLAIN = VllmOptions(kv_cache_mib=64)


@dataclass(frozen=True)
class Server:
    """A kind of server, and the models that it is given."""

    family: str = "qwen3"
    tied: bool = True
    options: VllmOptions = PLAIN
    tensor_parallel: int = 1


KINDS = {
    MAIN: Server(options=VllmOptions(kv_cache_mib=64, max_lora_rank=8)),
    SECOND: Server(),
    DRAFTING: Server(options=VllmOptions(kv_cache_mib=64, speculative="ngram")),
    LLAMA_TIED: Server("llama"),
    LLAMA: Server("llama", tied=False),
    QWEN: Server(tied=False),
    HALVES: Server(tensor_parallel=2),
    EXPERTS: Server("qwen3_moe", tied=False),
    WINDOWS: Server("gemma3"),
}
TIED_QWEN = (MAIN, SECOND, DRAFTING)
"""They share their versions, so that one can go on where another ended."""


@dataclass(frozen=True)
class Up:
    """A server that is up."""

    engine: VllmServerEngine
    versions: Versions


class Servers:
    """Servers by name. One that a test killed is started anew when somebody asks for it again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._turn = asyncio.Semaphore(STARTS_AT_ONCE)
        self._up: dict[str, asyncio.Task[VllmServerEngine]] = {}
        self._versions: dict[str, Versions] = {}

    def prepare(self, names: Iterable[str]) -> None:
        """Start these, the first of them first; nobody waits for them yet."""
        for name in names:
            self._up[name] = asyncio.get_running_loop().create_task(self._start(name))

    async def get(self, name: str) -> Up:
        """Return a living server that serves version 0."""
        if name not in self._up:
            self.prepare([name])
        engine = await self._up[name]
        if engine._died is not None:
            await engine.stop()
            self.prepare([name])
            engine = await self._up[name]
        if engine.version != 0:
            await engine.load(0, self.versions(name).folder(0))
        return Up(engine, self.versions(name))

    def versions(self, name: str) -> Versions:
        """The versions that a server is given."""
        kind = KINDS[name]
        shared = MAIN if name in TIED_QWEN else name
        if shared not in self._versions:
            self._versions[shared] = Versions(kind.family, kind.tied, self._folder / f"{shared}-versions")
        return self._versions[shared]

    async def stop(self) -> None:
        """End all of them, also those that are still starting."""
        for start in self._up.values():
            start.cancel()
        engines = await asyncio.gather(*self._up.values(), return_exceptions=True)
        await asyncio.gather(*(e.stop() for e in engines if isinstance(e, VllmServerEngine)))

    async def _start(self, name: str) -> VllmServerEngine:
        self._starts += 1
        folder = self._folder / f"{name}-{self._starts}"
        folder.mkdir()
        kind = KINDS[name]
        spec = spec_for(folder, vllm=kind.options, tensor_parallel=kind.tensor_parallel)
        engine = VllmServerEngine(spec)
        async with self._turn:
            try:
                await engine.start(60 * SLOWNESS)
                await engine.load(0, self.versions(name).folder(0))
            except BaseException:
                await engine.stop()
                raise
        return engine


@dataclass
class Response:
    """What an engine gave for one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: str = ""
    problem: str = ""


class Reader:
    """Reads an engine's outputs in the background and files them by request."""

    @classmethod
    @asynccontextmanager
    async def of(cls, engine) -> AsyncIterator[Reader]:
        """Read `engine`; leave it without requests and without words unread."""
        reader = cls(engine)
        try:
            yield reader
        finally:
            if engine._died is None:
                await engine.abort(list(engine.streams.open))
            await reader.close()
            while engine._queue.take() is not None:
                pass

    def __init__(self, engine) -> None:
        self.responses: dict[int, Response] = {}
        self.died: Exception | None = None
        self._engine = engine
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            async for out in self._engine.outputs():
                for request_id, start, end in out.slices():
                    response = self.responses.setdefault(request_id, Response())
                    assert response.finished == "", f"{out} after the end"
                    response.ids += out.token_ids[start:end]
                    response.logprobs += out.logprobs[start:end]
                    response.versions += [out.policy_version] * (end - start)
                for ended in out.ended:
                    response = self.responses.setdefault(ended.request_id, Response())
                    assert response.finished == "", f"{out} after the end"
                    response.finished, response.problem = ended.reason, ended.problem
                self._changed.set()
        except Exception as exc:
            self.died = exc
            self._changed.set()

    async def until(self, ready, timeout_s: float = 90.0) -> None:
        """Wait until `ready()`, or the engine has died."""
        try:
            async with asyncio.timeout(timeout_s * SLOWNESS):
                while not ready() and self.died is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            came = {i: (len(r.ids), r.finished) for i, r in self.responses.items()}
            pytest.fail(f"not within {timeout_s * SLOWNESS:g} s: {came}, {self._engine.progress()}")

    async def ends(self, numbers: Iterable[int], timeout_s: float = 90.0) -> list[Response]:
        """Wait for the ends of these requests and return them in order."""
        numbers = list(numbers)

        def over() -> bool:
            return all(n in self.responses and self.responses[n].finished for n in numbers)

        await self.until(over, timeout_s)
        assert self.died is None, self.died
        return [self.responses[n] for n in numbers]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def prompts(n: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (n,), generator=generator).tolist()
    return [torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def logprobs_under(model: PreTrainedModel, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """The trainer's forward pass: logprobs (T, V) of the positions that gave `ids`."""
    with torch.no_grad():
        return model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def assert_under(
    model: PreTrainedModel, prompt: list[int], response: Response, tolerance: float = 1e-4
) -> None:
    """The response is the greedy one of `model` (or nearly ties), with its very logprobs."""
    expected_TV = logprobs_under(model, prompt, response.ids)
    chosen = expected_TV[torch.arange(len(response.ids)), torch.tensor(response.ids)]
    apart = (chosen - torch.tensor(response.logprobs)).abs().max()
    assert apart < tolerance, f"logprobs {response.logprobs} instead of {chosen.tolist()}"
    assert (expected_TV.max(dim=-1).values - chosen).max() < NEAR_TIE


async def counter(engine, name: str) -> float:
    """A counter of the engine's own metrics."""
    text = await engine.server.api.text("/metrics")
    return sum(
        float(value) for value in re.findall(rf"^vllm:{name}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    )
