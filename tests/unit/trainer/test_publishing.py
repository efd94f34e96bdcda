"""Publications beside training: what is copied, when it counts, and what becomes of errors."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlboost_runtime.trainer.artifacts import publisher as publishing
from rlboost_runtime.trainer.artifacts.publisher import Publication, Publisher, VersionContent, WeightsCopy
from rlboost_runtime.weights.manifest import Probe
from rlboost_runtime.weights.store.store import WeightStore

pytestmark = pytest.mark.usefixtures("one_thread")

PROBE = Probe((1,), (2,), (-0.5,), 0.1)
CONFIGS = {"config.json": b"{}", "generation_config.json": b"{}"}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "b.weight": torch.randn(7, 5),
        "a.weight": torch.randn(3),
        "steps": torch.tensor([1, 2, 3]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


def content(state: dict[str, torch.Tensor]) -> VersionContent:
    return VersionContent(state.items, lambda: CONFIGS, lambda: PROBE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_copy_is_what_safetensors_reads(tmp_path: Path, dtype: str) -> None:
    copy = WeightsCopy(dtype)
    for seed in (0, 1):  # the second one reuses the first one's memory
        copy.take(weights(seed).items())
        copy.write(tmp_path / "model.safetensors")
        found = load_file(tmp_path / "model.safetensors")
        expected = weights(seed)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            kind = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
            assert found[name].dtype == kind
            assert torch.equal(found[name], tensor.to(kind))


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    for name, order in (("one", 1), ("two", -1)):
        copy = WeightsCopy("bfloat16")
        copy.take(list(weights().items())[::order])
        copy.write(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_weights_that_are_missing_are_noticed() -> None:
    copy = WeightsCopy("bfloat16")
    copy.take(weights().items())
    with pytest.raises(AssertionError, match="missing"):
        copy.take(list(weights().items())[:-1])


class Held(WeightStore):
    """Publishes once it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, max_deltas=2)
        self.go = threading.Event()

    def publish(self, *args, **options):
        assert self.go.wait(20)
        return super().publish(*args, **options)


def test_training_goes_on_with_other_weights_while_a_version_is_published(tmp_path: Path) -> None:
    store, told = Held(tmp_path), list[Publication]()
    values = weights()
    before = {name: tensor.clone() for name, tensor in values.items()}
    with Publisher(store, "float32", told.append) as publisher:
        publisher.begin(0, content(values))
        for tensor in values.values():
            tensor.add_(1)
        assert told == []
        store.go.set()
        publisher.ready()
        assert [each.manifest.version for each in told] == [0]
        found = load_file(store.path(0) / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
        publisher.begin(1, content(values))
    assert [each.manifest.version for each in told] == [0, 1]
    assert told[1].stop_s > 0
    assert told[1].publish_s > 0
    found = load_file(store.path(1) / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in values.items())


def test_the_next_publication_waits_for_the_last_one(tmp_path: Path) -> None:
    store, told = Held(tmp_path), list[Publication]()
    with Publisher(store, "float32", told.append) as publisher:
        publisher.begin(0, content(weights(0)))
        threading.Timer(0.2, store.go.set).start()
        publisher.begin(1, content(weights(1)))
        assert [each.manifest.version for each in told] == [0]
    first = load_file(store.path(0) / "model.safetensors")
    assert torch.equal(first["b.weight"], weights(0)["b.weight"])


class Broken(WeightStore):
    def publish(self, *_args, **_options):
        raise OSError("broken")


def publish_broken(folder: Path, then: Exception | None) -> None:
    with Publisher(Broken(folder), "float32", lambda _: pytest.fail("announced")) as publisher:
        publisher.begin(0, content(weights()))
        if then is not None:
            raise then


def test_what_goes_wrong_is_raised_in_the_training_thread(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="broken"):
        publish_broken(tmp_path, None)


def test_an_error_of_training_is_not_hidden_by_one_of_publishing(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        publish_broken(tmp_path, KeyError("training"))


def test_a_small_step_is_published_with_a_delta(tmp_path: Path) -> None:
    told = list[Publication]()
    values = {"w": torch.randn(200_000) * 0.02}
    with Publisher(WeightStore(tmp_path, max_deltas=2), "bfloat16", told.append) as publisher:
        publisher.begin(0, content(values))
        values["w"] -= 1e-6 * torch.randn(200_000).sign()
        publisher.begin(1, content(values))
    assert told[0].delta_bytes == 0
    assert 0 < told[1].delta_bytes < 400_000 / 20


def test_every_dtype_that_is_published_has_a_name() -> None:
    assert set(publishing._SPELLED.values()) >= {"BF16", "F16", "F32", "I64", "BOOL"}


def test_only_a_version_with_the_same_content_is_reused(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    with Publisher(store, "bfloat16", lambda _: None) as publisher:
        assert publisher.find_stored(content(weights(0))) is None
        for version in (0, 1):
            publisher.begin(version, content(weights(version)))
        publisher.ready()
    with Publisher(store, "bfloat16", lambda _: None) as later:
        found = [later.find_stored(content(weights(seed))) for seed in range(3)]
    assert [None if each is None else each.version for each in found] == [0, 1, None]


def test_weights_of_a_lost_head_keep_their_number_and_no_other_weights_get_it(tmp_path: Path) -> None:
    lost = WeightStore(tmp_path / "lost")
    with Publisher(lost, "bfloat16", lambda _: None) as publisher:
        for version in (4, 5):
            publisher.begin(version, content(weights(version)))
        publisher.ready()
    store = WeightStore(tmp_path / "weights")
    (store.folder / "former").mkdir(parents=True)
    for version in (4, 5):
        shutil.copyfile(
            lost.path(version) / "manifest.json", store.folder / "former" / f"v{version:06d}.json"
        )
    assert (store.versions(), store.last_number()) == ([], 5)
    with Publisher(store, "bfloat16", lambda _: None) as later:
        assert [later.former_number(content(weights(seed))) for seed in (3, 4)] == [None, 4]
        later.begin(4, content(weights(4)))
        later.ready()
        assert later.former_number(content(weights(4))) is None  # it is stored here now
    assert store.last_number() == 5


def test_a_scratch_folder_is_empty_and_gone_even_after_a_kill(tmp_path: Path) -> None:
    left = tmp_path / ".scratch-of-a-killed-one"
    left.mkdir()
    (left / "weights").write_bytes(b"x")
    with publishing.scratch_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
        assert not list(folder.iterdir())
    assert not list(tmp_path.iterdir())
