"""`model: {init: tiny}`: a small Qwen3 with a byte-level tokenizer, made offline, saved as a Hugging Face
folder.

The tokenizer is BPE over the 256 byte symbols **without merges**, `<|pad|>` 256 and `<|endoftext|>` 257: any
text round-trips. With the default sizes the model has 328,704 parameters. Random weights have nothing that RL
could sharpen, so a short supervised warm-up comes first (`warmup.py`) and is named as what it is.

The result is kept in `$RLBOOST_HOME/cache/tiny/DIGEST/`, DIGEST being that of everything that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlboost_runtime.job import Job, TinyModel, data_files, data_sources, reward_files
from rlboost_runtime.run.folder import home, read_json, write_json
from rlboost_runtime.trainer.learn.policy import Policy

PAD, END = "<|pad|>", "<|endoftext|>"
PAD_ID, END_ID = 256, 257
VOCABULARY = 258

_RECIPE = 1
"""Part of the digest: raise it when model, tokenizer or warm-up change."""
_HEAD_DIM = 32


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """How the tiny model came to be. `reward`: mean of sampled held-out responses at the end."""

    steps: int
    seconds: float
    reward: float
    greedy_reward: float
    reached: bool

    def describe(self) -> str:
        """Say what this model is, for logs and reports."""
        text = f"tiny model, random init + {self.seconds:.1f} s supervised warm-up, reward {self.reward:.2f}"
        return text if self.reached else f"{text} (stopped by warmup.max_seconds before the target)"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    assert fast.convert_tokens_to_ids([PAD, END]) == [PAD_ID, END_ID]
    return fast


def make_model(tiny: TinyModel, max_positions: int) -> Qwen3ForCausalLM:
    """Return the random model; the same seed gives the same weights."""
    heads = tiny.hidden_size // _HEAD_DIM
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=tiny.hidden_size,
        intermediate_size=2 * tiny.hidden_size,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=_HEAD_DIM,
        max_position_embeddings=max(512, max_positions),
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True
    )
    return model


Warm = Callable[[Policy], WarmupReport]


def prepare(job: Job, tiny: TinyModel, files: Path, warm: Warm | None) -> tuple[Path, WarmupReport | None]:
    """Return the folder of the job's tiny model, made now or found in the cache.

    `warm` trains it where `tiny` has a warm-up. A folder in the cache is complete; two runs that make the
    same one at once end up with either's.
    """
    final = home() / "cache" / "tiny" / _digest(job, tiny, files)
    if not final.exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=final.parent, prefix=".building-"))
        try:
            _make(job, tiny, building, warm)
            os.rename(building, final)
        except OSError:
            if not final.exists():
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    stored = read_json(final / "warmup.json")
    return final, None if stored is None else WarmupReport(**stored)


def _make(job: Job, tiny: TinyModel, folder: Path, warm: Warm | None) -> None:
    model = make_model(tiny, job.max_context_tokens)
    policy = Policy(model, make_tokenizer())
    if tiny.warmup is not None:
        assert warm is not None
        report = warm(policy)
        write_json(folder / "warmup.json", {name: getattr(report, name) for name in WarmupReport.__slots__})
    policy.save(folder)


def _digest(job: Job, tiny: TinyModel, files: Path) -> str:
    algorithm = job.algorithm
    parts: dict[str, object] = {
        "recipe": _RECIPE,
        "tiny": tiny.model_dump(),
        "positions": job.max_context_tokens,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    if tiny.warmup is not None:
        parts |= {
            "data": _data_of(job),
            "reward": job.model_dump(mode="json")["reward"],
            "files": _digest_of_files(job, files),
            "max_prompt_tokens": algorithm.max_prompt_tokens,
            "max_response_tokens": algorithm.max_response_tokens,
            "temperature": algorithm.temperature,
        }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _data_of(job: Job) -> object:
    """Return the job's data, without what it does not say: a field that is new makes no other model."""
    return [source.model_dump(exclude_defaults=True) for source in data_sources(job.data)]


def _digest_of_files(job: Job, files: Path) -> dict[str, str]:
    names = list(job.files)
    names += data_files(job.data)
    names += reward_files([job.reward])
    found = {name: files / name for name in names}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items() if path.is_file()
    }
