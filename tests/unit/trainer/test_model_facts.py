"""Sizes of a model from its configuration, and folders that are not what they seem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.fit.shape import find_shape
from rlboost_runtime.job import Job, TinyModel
from rlboost_runtime.trainer.data.reading import Example
from rlboost_runtime.trainer.models.facts import look_at_model
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer


def job(model: Any, **changes: Any) -> Job:
    fields = {"name": "demo", "model": model, "data": {"reasoning_gym": ["basic_arithmetic"]}}
    return Job.model_validate_json(json.dumps({**fields, **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(TinyModel(init="tiny", warmup=None), 128).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def copy(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_the_tiny_model_is_as_large_as_it_is_made() -> None:
    facts = look_at_model(job({"init": "tiny"}))
    assert facts.num_parameters == 328_704
    shape = find_shape(job({"init": "tiny"}).model)
    assert shape is not None
    assert shape.parameters == facts.num_parameters
    assert shape.kv_elements_per_token == 2 * 2 * 2 * 32  # keys and values, layers, heads, head size
    assert len(facts.encode(Example("abc", None, {}))[1]) == 3  # bytes


def test_a_folder_is_looked_at_without_its_weights(folder: Path) -> None:
    facts = look_at_model(job(str(folder)))
    assert facts.num_parameters == 328_704  # tied embeddings count once and are stored once
    assert len(facts.encode(Example("abc", None, {}))[1]) == 3


def test_weights_that_are_missing_are_named(folder: Path, tmp_path: Path) -> None:
    broken = copy(folder, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights of its model, such as model\.norm\.weight"):
        look_at_model(job(str(broken)))


def test_weights_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    broken = copy(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        look_at_model(job(str(broken)))


def test_a_folder_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    broken = copy(folder, tmp_path / "broken")
    for path in broken.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        look_at_model(job(str(broken)))


def test_an_architecture_that_nobody_knows(folder: Path, tmp_path: Path) -> None:
    broken = copy(folder, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "no-such-thing"}))
    with pytest.raises(ConfigError, match=r"cannot be loaded|no causal language model"):
        look_at_model(job(str(broken)))


def test_a_hub_id_that_is_not_here_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LookupError, match="no-such/model-at-all"):
        look_at_model(job("no-such/model-at-all"))
