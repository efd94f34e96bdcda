"""Versions in main memory: any folder beside the disk stands in for it here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run import in_memory
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.weights.store import placing
from rlboost_runtime.weights.store.placing import VersionPlacing
from rlboost_runtime.weights.store.store import FORMER, WeightStore
from tests.unit.weights.test_weight_store import PROBE, writer

BODY = os.urandom(50_000)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "fast"
    root.mkdir()
    yield root
    in_memory.free(tmp_path / "run" / "weights")


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    (tmp_path / "run").mkdir()
    return WeightStore(tmp_path / "run" / "weights", chunk_bytes=10_000)


def placed(store: WeightStore, keep_in: str | Path, **more: object) -> VersionPlacing:
    found = VersionPlacing(store.folder, str(keep_in), 3, retire=store.retire, **more)  # type: ignore[arg-type]
    found.prepare(len(BODY))
    return found


def told(caplog: pytest.LogCaptureFixture) -> str:
    return str([vars(record) for record in caplog.records])


def ours(root: Path) -> list[Path]:
    return list(root.glob(f"rlboost-{os.getuid()}/*"))


def test_versions_lie_beside_the_disk_and_their_manifests_on_it(store: WeightStore, root: Path) -> None:
    placed(store, root)
    manifest = store.publish(3, writer(BODY), PROBE)
    assert store.path(3).resolve().is_relative_to(root)
    assert store.versions() == [3]
    assert store.former() == [manifest]
    assert in_memory.root_of(store.folder) == root


def test_what_memory_has_no_room_for_lies_on_local_nvme(
    store: WeightStore, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_memory, "MEMORY", tmp_path / "no memory")
    monkeypatch.setattr(in_memory, "NVME", root)
    placed(store, placing.AUTO)
    store.publish(1, writer(BODY), PROBE)
    assert in_memory.root_of(store.folder) == root
    assert in_memory.sweep(in_memory.roots(placing.AUTO)) == 0, "held"


def test_after_a_reboot_the_same_weights_get_their_number_again_and_others_never(
    store: WeightStore, root: Path
) -> None:
    placed(store, root)
    published = store.publish(7, writer(BODY), PROBE)
    shutil.rmtree(ours(root)[0])  # main memory is gone; the link is not
    assert store.versions() == []
    assert store.last_number() == 7
    placed(store, root)
    again = store.publish(7, writer(BODY), PROBE)
    assert again.content_digest == published.content_digest == store.former()[0].content_digest


def test_content_that_is_deleted_under_a_living_trainer_is_made_anew(store: WeightStore, root: Path) -> None:
    choice = placed(store, root)
    store.publish(1, writer(BODY), PROBE)
    shutil.rmtree(ours(root)[0])
    choice.prepare(len(BODY))
    store.publish(2, writer(BODY), PROBE)
    assert store.versions() == [2]
    assert store.path(2).resolve().is_relative_to(root)


@pytest.mark.parametrize("keep_in", ["disk", "/no/such/folder"])
def test_on_the_disk_nothing_is_left_elsewhere(store: WeightStore, root: Path, keep_in: str) -> None:
    placed(store, keep_in)
    store.publish(1, writer(BODY), PROBE)
    assert not store.folder.is_symlink()
    assert not (store.folder.with_name(FORMER)).exists()


def test_what_does_not_fit_beside_everything_else_goes_to_the_disk_with_words(
    store: WeightStore, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(in_memory, "is_memory", lambda path: True)
    monkeypatch.setattr(in_memory, "available_memory", lambda: 10_000_000_000)
    with caplog.at_level("INFO"):
        placed(store, root, others=lambda: 9_999_900_000)
    assert not store.folder.is_symlink()
    assert "versions need" in told(caplog)
    assert "beside 10.0 GB for everything else" in told(caplog)
    caplog.clear()
    with caplog.at_level("INFO"):
        placed(store, root, others=lambda: 9_999_000_000)
    assert store.folder.is_symlink()


def test_where_memory_becomes_short_the_versions_move_to_the_disk(
    store: WeightStore, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = placed(store, root)
    first = store.publish(1, writer(BODY), PROBE)
    monkeypatch.setattr(in_memory, "room_in", lambda root: 1000)
    with caplog.at_level("WARNING"):
        choice.prepare(len(BODY))
    assert "the next version needs" in told(caplog)
    assert not store.folder.is_symlink()
    assert ours(root) == []
    store.publish(2, writer(os.urandom(100)), PROBE)
    assert store.versions() == [1, 2]
    assert store.put_damaged_aside() == []
    assert store.former()[0] == first  # its number stays known
    monkeypatch.undo()
    choice.prepare(len(BODY))
    assert not store.folder.is_symlink(), "they do not move to and fro"


def test_versions_of_an_earlier_launch_on_the_disk_make_way(store: WeightStore, root: Path) -> None:
    first = store.publish(1, writer(BODY), PROBE)
    (store.folder / "v000004.damaged").mkdir()
    (store.folder / "former").mkdir()
    (store.folder / "former" / "v000000.json").write_bytes((store.path(1) / "manifest.json").read_bytes())
    placed(store, root)
    assert store.versions() == []
    assert store.last_number() == 4
    assert store.former() == [first]


def test_a_full_memory_is_named_as_such(store: WeightStore, root: Path) -> None:
    placed(store, root)

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RuntimeFault) as found:
        store.publish(1, full, PROBE)
    assert str(root) in found.value.problem
    assert "weights.keep_in: disk" in found.value.remedy


def test_a_killed_process_leaves_nothing_once_the_next_one_sweeps(tmp_path: Path, root: Path) -> None:
    program = """
        import os, sys
        from pathlib import Path
        from rlboost_runtime.run import in_memory
        folder = Path(sys.argv[1]) / "weights"
        in_memory.move_out(folder, Path(sys.argv[2]))
        (folder / "content").write_bytes(bytes(1 << 20))
        print("there", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        assert in_memory.sweep([root]) == 0, "it is held"
        assert (tmp_path / "weights" / "content").exists()
        process.kill()
        process.wait()
    assert in_memory.sweep([root]) >= 1 << 20
    assert list(root.iterdir()) == []
    assert in_memory.drop_dead_link(tmp_path / "weights")


def test_a_run_and_its_machines_free_what_they_have(tmp_path: Path, root: Path) -> None:
    run = RunFolder(tmp_path / "a-run")
    engine = run.reserved / "reserved-0" / "weights" / "0"
    engine.mkdir(parents=True)
    for folder in (run.weights, engine):
        in_memory.move_out(folder, root)
    assert len(ours(root)) == 2
    in_memory.free_run(run)
    assert list(root.iterdir()) == []
    in_memory.free_run(run)  # again: nothing


def test_only_folders_of_this_kind_are_deleted_through_a_link(tmp_path: Path, root: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    link = tmp_path / "weights"
    link.symlink_to(precious)
    in_memory.free(link)
    assert precious.is_dir()
    assert in_memory.root_of(link) is None


def test_another_users_folder_is_not_used(store: WeightStore, root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / f"rlboost-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    placed(store, root)
    assert not store.folder.is_symlink()
    assert in_memory.sweep([root]) == 0


def test_receivers_on_the_head_lie_where_the_store_does(
    store: WeightStore, root: Path, tmp_path: Path
) -> None:
    mine = VersionPlacing(tmp_path / "engine", "auto", 3)
    assert not mine.prepare_beside(store.folder)
    placed(store, root)
    assert mine.prepare_beside(store.folder)
    assert in_memory.root_of(tmp_path / "engine") == root
    assert not VersionPlacing(tmp_path / "other", placing.DISK, 3).prepare_beside(store.folder)
    in_memory.free(tmp_path / "engine")
