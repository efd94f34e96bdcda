"""Adapter-only versions: what is written once, what travels, and that engines compute what was trained."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlboost_runtime.engines.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlboost_runtime.engines.transformers.child import probe
from rlboost_runtime.engines.transformers.model_loading import (
    Unloadable,
    add_adapters,
    build_model,
    load_weights,
)
from rlboost_runtime.engines.vllm.swap import base_folder, is_adapter, peft_folder
from rlboost_runtime.job import TinyModel
from rlboost_runtime.trainer.artifacts.publisher import Publisher
from rlboost_runtime.trainer.models.tiny import make_model
from rlboost_runtime.weights.manifest import probe_matches, read_manifest
from rlboost_runtime.weights.store import part_folder
from rlboost_runtime.weights.store import store as stores
from tests.integration.engines.adapter_rig import Trained

pytestmark = pytest.mark.integration

WEIGHTS = "model.safetensors"


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trained]:
    monkeypatch.setattr(part_folder, "LEAST_LINKED_BYTES", 10_000)
    trained = Trained(
        tmp_path, make_model(TinyModel(init="tiny", hidden_size=64, num_layers=2), max_positions=64)
    )
    with trained.serving():
        yield trained


def served_by(folder: Path) -> Any:
    model = build_model(folder, torch.float32, torch.device("cpu"))
    load_weights(model, folder)
    add_adapters(model, folder)
    return model


def test_frozen_weights_are_written_digested_and_sent_once(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[str] = []
    describe = stores.describe_file
    monkeypatch.setattr(stores, "describe_file", lambda p, n: digested.append(p.name) or describe(p, n))
    with Publisher(trained.store, "float32", lambda _: None) as publisher:
        for version in range(4):
            trained.train(version)
            trained.publish(publisher, version)
            pulled = trained.pull(version)
            manifest = read_manifest(pulled.path)
            assert manifest.deltas == ()
            assert pulled.how == ("part" if version else "full")
            if version:
                large = next(file.size for file in manifest.files if file.name == WEIGHTS)
                assert pulled.pulled_bytes == manifest.num_bytes - large
            model = served_by(pulled.path)
            ids, logprobs = probe(model, list(manifest.probe.token_ids), len(manifest.probe.next_token_ids))
            assert probe_matches(manifest, ids, logprobs) is None
            wanted = trained.policy.model(torch.tensor([[5, 6, 7]])).logits
            torch.testing.assert_close(model(torch.tensor([[5, 6, 7]])).logits, wanted, rtol=1e-4, atol=1e-4)
    assert digested.count(WEIGHTS) == 1
    deadline = time.monotonic() + 10.0
    while trained.store.versions() != [2, 3] and time.monotonic() < deadline:
        time.sleep(0.05)  # the server holds a version a little longer than it is read
        trained.store.collect()
    assert trained.store.versions() == [2, 3]
    assert sorted(path.name for path in trained.machine.iterdir()) == ["v000002", "v000003"]
    for folder in (trained.store.folder, trained.machine):
        assert (folder / "v000002" / WEIGHTS).samefile(folder / "v000003" / WEIGHTS)


def test_a_newcomer_and_one_whose_frozen_weights_were_cut_short_fetch_them(trained: Trained) -> None:
    with Publisher(trained.store, "float32", lambda _: None) as publisher:
        for version in range(2):
            trained.train(version)
            trained.publish(publisher, version)
    whole = read_manifest(trained.store.path(1)).num_bytes
    assert trained.pull(1).pulled_bytes == whole
    shutil.rmtree(trained.machine)
    trained.pull(0)
    with (trained.machine / "v000000" / WEIGHTS).open("r+b") as file:
        file.truncate(1000)
    assert trained.pull(1).pulled_bytes == whole
    assert (trained.machine / "v000001" / WEIGHTS).read_bytes() == (
        trained.store.path(1) / WEIGHTS
    ).read_bytes()


def test_a_pull_that_died_after_the_link_goes_on(trained: Trained) -> None:
    with Publisher(trained.store, "float32", lambda _: None) as publisher:
        for version in range(2):
            trained.train(version)
            trained.publish(publisher, version)
    trained.pull(0)
    manifest = read_manifest(trained.store.path(1))
    with part_folder.part_folder(trained.machine, manifest) as part:
        part.prepare([trained.machine / "v000000"])
    assert trained.pull(1).how == "part"
    files = [file.name for file in manifest.files]
    there, here = trained.store.path(1), trained.machine / "v000001"
    assert all((there / name).read_bytes() == (here / name).read_bytes() for name in files)


def test_a_publisher_that_begins_anew_writes_the_frozen_weights_again_and_they_are_the_same(
    trained: Trained,
) -> None:
    for version in range(2):
        trained.train(version)
        with Publisher(trained.store, "float32", lambda _: None) as publisher:
            trained.publish(publisher, version)
        assert trained.pull(version).how == ("part" if version else "full")


def test_adapters_that_do_not_fit_change_nothing(trained: Trained) -> None:
    with Publisher(trained.store, "float32", lambda _: None) as publisher:
        trained.publish(publisher, 0)
    folder = trained.pull(0).path
    other = make_model(TinyModel(init="tiny", hidden_size=96, num_layers=2), max_positions=64)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(Unloadable, match="do not fit"):
        add_adapters(other, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_vllm_gets_them_by_the_names_that_it_looks_for(trained: Trained) -> None:
    with Publisher(trained.store, "float32", lambda _: None) as publisher:
        trained.publish(publisher, 0)
    folder = trained.pull(0).path
    for _ in range(2):
        inner = peft_folder(folder)
        assert is_adapter(inner)
        assert not is_adapter(folder)
        assert base_folder(inner) == folder.resolve()
    assert (inner / "adapter_model.safetensors").read_bytes() == (folder / ADAPTER_WEIGHTS).read_bytes()
    assert (inner / "adapter_config.json").read_bytes() == (folder / ADAPTER_CONFIG).read_bytes()
    assert [path.name for path in folder.glob("*.safetensors")] == [WEIGHTS]
    (folder / ADAPTER_WEIGHTS).unlink()
    assert peft_folder(folder) == folder
