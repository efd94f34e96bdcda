from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.manifest import Probe, Tied
from rlboost_runtime.weights.pull.sources import link_version
from rlboost_runtime.weights.store.store import LEASE, VersionGone, WeightStore
from tests.fakes.damage import spoil

PROBE = Probe((1,), (2,), (-0.5,), 0.1)


def writer(body: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        header = json.dumps(
            {"w": {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}}
        ).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").write_text("{}")

    return write


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=2, chunk_bytes=1000)


def listing(store: WeightStore) -> list[str]:
    return sorted(os.listdir(store.folder))


def test_a_published_version_is_complete(store: WeightStore) -> None:
    body = os.urandom(10_500)
    manifest = store.publish(12, writer(body), PROBE, tied=[Tied("lm_head.weight", "w")])
    folder = store.path(12)
    assert folder.name == "v000012"
    assert sorted(os.listdir(folder)) == sorted(
        [LEASE, "config.json", "generation_config.json", "manifest.json", "model.safetensors"]
    )
    assert manifests.read_manifest(folder) == manifest
    model = next(file for file in manifest.files if file.name == "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    assert [manifests.digest(data[c.offset : c.offset + c.length]) for c in model.chunks] == [
        c.blake3 for c in model.chunks
    ]
    (tensor,) = manifest.tensors
    assert data[tensor.offset : tensor.offset + tensor.length] == body
    assert manifest.tied == (Tied("lm_head.weight", "w"),)


def test_an_empty_store_has_no_versions(store: WeightStore) -> None:
    assert store.versions() == []
    assert store.latest() is None
    assert store.collect() == []
    with pytest.raises(VersionGone):
        store.read(0)


def test_version_zero_is_a_version(store: WeightStore) -> None:
    store.publish(0, writer(b"a"), PROBE)
    assert store.latest() == 0
    store.read(0).release()


def test_the_same_content_may_be_published_again(store: WeightStore) -> None:
    first = store.publish(3, writer(b"same"), PROBE)
    assert store.publish(3, writer(b"same"), PROBE) == first
    assert listing(store) == ["v000003"]


def test_other_content_under_a_taken_number_is_refused(store: WeightStore) -> None:
    first = store.publish(3, writer(b"one"), PROBE)
    with pytest.raises(RuntimeFault, match="published already"):
        store.publish(3, writer(b"two"), PROBE)
    assert manifests.read_manifest(store.path(3)) == first
    assert listing(store) == ["v000003"]


def test_old_versions_go_new_ones_stay(store: WeightStore) -> None:
    for version in range(4):
        store.publish(version, writer(bytes([version])), PROBE)
    assert store.versions() == [2, 3]
    assert listing(store) == ["v000002", "v000003"]


def test_a_version_being_read_is_never_deleted(store: WeightStore) -> None:
    store.publish(0, writer(b"a"), PROBE)
    first, second = store.read(0), store.read(0)
    for version in (1, 2, 3):
        store.publish(version, writer(b"a"), PROBE)
    assert store.versions() == [0, 2, 3]
    first.release()
    assert store.collect() == []
    assert (second.folder / "model.safetensors").exists()
    second.release()
    second.release()
    assert store.collect() == [0]
    assert listing(store) == ["v000002", "v000003"]


def test_a_lease_of_another_process_counts_and_ends_with_it(store: WeightStore) -> None:
    store.publish(0, writer(b"a"), PROBE)
    code = (
        "import sys; from pathlib import Path; from rlboost_runtime.weights.store.store import WeightStore;"
        "lease = WeightStore(Path(sys.argv[1])).read(0); print('held', flush=True); sys.stdin.read()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(store.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"held\n"
            store.publish(1, writer(b"a"), PROBE)
            store.publish(2, writer(b"a"), PROBE)
            assert store.versions() == [0, 1, 2]
        finally:
            reader.kill()
            reader.wait()
    assert store.collect() == [0]


def test_readers_can_read_as_soon_as_the_name_appears(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, seen = os.rename, []

    def rename_then_read(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name == "v000005":
            with store.read(5) as lease:
                seen.append(manifests.read_manifest(lease.folder).version)

    monkeypatch.setattr(os, "rename", rename_then_read)
    store.publish(5, writer(b"a"), PROBE)
    assert seen == [5]


def test_a_build_under_way_is_left_alone_by_others(store: WeightStore) -> None:
    def write(folder: Path) -> None:
        WeightStore(store.folder).collect()
        writer(b"a")(folder)

    store.publish(1, write, PROBE)
    assert store.versions() == [1]


def test_remains_of_killed_builds_are_removed(store: WeightStore) -> None:
    remains = store.folder / ".building-x"
    remains.mkdir(parents=True)
    (remains / LEASE).touch()
    (remains / "model.safetensors").write_bytes(b"part")
    store.publish(1, writer(b"a"), PROBE)
    assert listing(store) == ["v000001"]


@pytest.mark.parametrize("fails_with", [KeyError("bug"), KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_a_failing_writer_leaves_nothing_behind(store: WeightStore, fails_with: BaseException) -> None:
    store.publish(1, writer(b"a"), PROBE)

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise fails_with

    with pytest.raises(type(fails_with)):
        store.publish(2, write, PROBE)
    assert listing(store) == ["v000001"]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let the operating system refuse files larger than this, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_explained_and_leaves_old_versions_intact(store: WeightStore) -> None:
    first = store.publish(1, writer(b"a" * 10), PROBE)
    with largest_file(50_000), pytest.raises(RuntimeFault, match="no space left") as caught:
        store.publish(2, writer(b"a" * 100_000), PROBE)
    assert "free some disk space" in caught.value.remedy
    assert listing(store) == ["v000001"]
    assert manifests.read_manifest(store.path(1)) == first


def test_a_disk_filled_by_the_manifest_is_explained_too(store: WeightStore) -> None:
    small = WeightStore(store.folder, chunk_bytes=8)  # its manifest is larger than the weights
    with largest_file(6_000), pytest.raises(RuntimeFault, match="no space left"):
        small.publish(2, writer(b"a" * 4_000), PROBE)
    assert listing(store) == []


def test_a_delta_that_finds_no_space_is_left_out(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path, folder: Path, *__: object) -> None:
        (folder / "delta-v000001.bin").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    def write(folder: Path) -> None:
        header = b'{"w": {"dtype": "BF16", "shape": [800], "data_offsets": [0, 1600]}}'
        body = bytes([next(versions)]) + bytes(1599)
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)

    versions = itertools.count()
    store.max_deltas = 2
    store.publish(1, write, PROBE)
    assert [d.base for d in store.publish(2, write, PROBE).deltas] == [1]
    monkeypatch.setattr("rlboost_runtime.weights.delta.file.add_deltas", full)
    assert store.publish(3, write, PROBE).deltas == ()
    assert not list(store.path(3).glob("delta-*"))


def test_an_error_in_words_from_safetensors_is_understood(store: WeightStore) -> None:
    def write(folder: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(RuntimeFault, match="no space left"):
        store.publish(2, write, PROBE)


def test_what_makes_no_version_is_refused(store: WeightStore) -> None:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"not tensors")

    with pytest.raises(ProtocolError):
        store.publish(1, write, PROBE)
    with pytest.raises(ProtocolError):
        store.publish(1, writer(b"a"), Probe((1,), (2,), (float("nan"),), 0.1))
    assert listing(store) == []


def test_a_damaged_version_is_neither_linked_nor_kept_and_its_number_is_not_used_again(
    store: WeightStore, tmp_path: Path
) -> None:
    for version in (1, 2):
        store.publish(version, writer(os.urandom(10_500)), PROBE)
    assert store.put_damaged_aside() == []
    assert link_version(store.folder, 2, tmp_path / "here", "") is not None
    model = store.path(2) / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[3_100] ^= 1
    model.unlink()  # not the linked copy
    model.write_bytes(data)
    assert link_version(store.folder, 2, tmp_path / "there", "") is None
    found = f"chunk 3 of {model} (from byte 3000 on) is damaged"
    assert manifests.damage(store.path(2), manifests.read_manifest(store.path(2))) == found
    assert store.put_damaged_aside() == [found]
    assert store.versions() == [1]
    assert store.last_number() == 2
    (store.path(1) / "manifest.json").write_bytes(b"{")
    assert len(store.put_damaged_aside()) == 1
    assert store.versions() == []


FLIPS = int(os.environ.get("RLBOOST_FLIPS", "4"))


def test_no_damage_of_a_versions_files_is_served(store: WeightStore) -> None:
    """Seeded; FLIPS tries per file (`make soak-corruption`)."""
    store.publish(1, writer(os.urandom(10_500)), PROBE)
    rng, intact, found = random.Random(23), store.path(1).with_name("intact"), 0
    shutil.copytree(store.path(1), intact)
    manifest = manifests.read_manifest(intact)
    names = sorted(path.name for path in intact.iterdir() if path.stat().st_size)
    for name in names * FLIPS:
        shutil.rmtree(store.path(1), ignore_errors=True)
        shutil.copytree(intact, store.path(1))
        spoil(store.path(1) / name, rng)
        if store.put_damaged_aside():
            found += 1
            assert store.versions() == []
        else:
            served = [each for each in names if each != "manifest.json"]
            assert manifests.read_manifest(store.path(1)) == manifest, name
            assert all((store.path(1) / each).read_bytes() == (intact / each).read_bytes() for each in served)
    print(json.dumps({"pass": True, "files": names, "flips": FLIPS * len(names), "found": found}))
