"""Pulls by deltas, by links, and from several holders at once: real servers, over TLS, some of them bad."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run import security
from rlboost_runtime.run.bucket import open_bucket
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.weights.child_pipe import (
    PullProgress,
    PullReport,
    PullRequest,
    PullSource,
    SourceKind,
    TransferSettings,
)
from rlboost_runtime.weights.manifest import Manifest, Probe, read_manifest
from rlboost_runtime.weights.pull import chunk_scheduler as works
from rlboost_runtime.weights.pull.bucket import prune_bucket, upload
from rlboost_runtime.weights.pull.pull import Deadlines, pull
from rlboost_runtime.weights.serve.catalog import Catalog, Entry, PulledCatalog, StoreCatalog
from rlboost_runtime.weights.serve.http import WeightHttpServer
from rlboost_runtime.weights.store.store import LEASE, WeightStore

pytestmark = pytest.mark.integration

PROBE = Probe((1,), (2,), (-0.5,), 0.1)
CHUNK = 64 * 1024
PATIENT = Deadlines(idle_s=5, progress_s=20)


class Lab:
    """A run's store with a chain of versions, and machines that pull it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = RunFolder(path / "run")
        security.create_secrets(self.run)
        self.store = WeightStore(self.run.weights, keep=3, chunk_bytes=CHUNK, max_deltas=4)
        self.values = np.random.default_rng(0).normal(0, 0.02, 1_000_000).astype(np.float16).view(np.int16)

    def publish(self, version: int, share: float = 0.01) -> Manifest:
        """Publish weights of 2 MB of which a share has moved by one since the last version."""
        rng = np.random.default_rng(version)
        where = rng.random(self.values.size) < share
        self.values = self.values + where * rng.choice([-1, 1], self.values.size).astype(np.int16)
        return self.store.publish(version, self._write, PROBE)

    def _write(self, folder: Path) -> None:
        size = self.values.nbytes
        entry = {"w": {"dtype": "F16", "shape": [self.values.size], "data_offsets": [0, size]}}
        header = json.dumps(entry).encode()
        header += b" " * (-len(header) % 8)
        data = len(header).to_bytes(8, "little") + header + self.values.tobytes()
        (folder / "model.safetensors").write_bytes(data)
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").write_text("{}")

    def folder(self, machine: str) -> Path:
        return self.path / machine / "weights"

    @contextmanager
    def head(self) -> Iterator[PullSource]:
        with self.serving("head", SourceKind.HEAD, self.run, StoreCatalog(self.store, 0.2)) as holder:
            yield holder

    @contextmanager
    def peer(self, machine: str) -> Iterator[PullSource]:
        identity = RunFolder(self.path / machine / "identity")
        security.create_secrets(identity)
        catalog = PulledCatalog([self.folder(machine)])
        with self.serving(machine, SourceKind.PEER, identity, catalog) as holder:
            yield holder

    @contextmanager
    def serving(
        self, name: str, kind: SourceKind, identity: RunFolder, catalog: Catalog
    ) -> Iterator[PullSource]:
        is_peer = kind is SourceKind.PEER
        token = f"{name}'s own" if is_peer else security.read_token(self.run)
        with serve(security.server_context(identity), token, catalog) as server:
            url = f"https://127.0.0.1:{server.server_address[1]}"
            certificate = identity.certificate.read_text()
            yield PullSource(name, kind, url, certificate, token=token if is_peer else "")

    def pull(self, machine: str, head: PullSource, version: int, **changes: Any) -> PullReport:
        fields: dict[str, Any] = {
            "url": head.url,
            "version": version,
            "folder": str(self.folder(machine)),
            "token": security.read_token(self.run),
            "certificate": self.run.certificate.read_text(),
            "receiver": machine,
        }
        return pull(PullRequest(**fields | changes), PullProgress(), PATIENT)

    def holds(self, machine: str, version: int) -> bool:
        name = f"v{version:06d}"
        mine = self.folder(machine) / name
        files = [f for f in (self.run.weights / name).iterdir() if f.name != LEASE and f.suffix != ".bin"]
        return all((mine / file.name).read_bytes() == file.read_bytes() for file in files)


@contextmanager
def serve(tls: ssl.SSLContext, token: str, catalog: Catalog) -> Iterator[WeightHttpServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = WeightHttpServer(listener, tls, token, catalog)
    stop = threading.Event()
    thread = threading.Thread(target=server.serve_until, args=(stop,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(10)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def head(lab: Lab) -> Iterator[PullSource]:
    with lab.head() as holder:
        yield holder


# --- deltas ----------------------------------------------------------------------------------------------


def test_twenty_versions_follow_one_another_by_deltas(lab: Lab, head: PullSource) -> None:
    full = lab.publish(0).num_bytes
    assert lab.pull("a", head, 0).how == "full"
    for version in range(1, 21):
        lab.publish(version)
        pulled = lab.pull("a", head, version)
        assert pulled.how == "delta"
        assert pulled.pulled_bytes < full / 20
        assert pulled.restored_bytes > 0.99 * full
        assert lab.holds("a", version)


def test_a_receiver_that_missed_versions_takes_several_deltas(lab: Lab, head: PullSource) -> None:
    lab.publish(0)
    lab.pull("a", head, 0)
    for version in (1, 2, 3):
        last = lab.publish(version)
    pulled = lab.pull("a", head, 3)
    assert pulled.how == "delta"
    assert pulled.pulled_bytes >= sum(delta.file.size for delta in last.deltas[:3])
    assert lab.holds("a", 3)


def test_one_that_is_too_far_behind_takes_the_version_whole(lab: Lab, head: PullSource) -> None:
    lab.publish(0)
    lab.pull("a", head, 0)
    for version in range(1, 7):
        lab.publish(version)
    assert lab.pull("a", head, 6).how == "full"
    assert lab.holds("a", 6)


def test_a_newcomer_and_one_told_to_take_all_fetch_whole(lab: Lab, head: PullSource) -> None:
    lab.publish(0)
    lab.pull("a", head, 0)
    lab.publish(1)
    assert lab.pull("b", head, 1).how == "full"
    assert lab.pull("a", head, 1, transfer=TransferSettings.FULL).how == "full"


def test_a_base_with_a_wrong_byte_costs_one_chunk(lab: Lab, head: PullSource) -> None:
    lab.publish(0)
    lab.pull("a", head, 0)
    with (lab.folder("a") / "v000000" / "model.safetensors").open("r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)[0]
        file.seek(1_000_000)
        file.write(bytes([byte ^ 1]))
    lab.publish(1)
    pulled = lab.pull("a", head, 1)
    assert pulled.how == "delta"
    assert pulled.pulled_bytes > CHUNK
    assert "did not come out right" in pulled.complaints["delta"]
    assert lab.holds("a", 1)


def test_a_base_of_other_content_is_not_used(lab: Lab, head: PullSource) -> None:
    lab.publish(0)
    lab.pull("a", head, 0)
    shutil.rmtree(lab.run.weights / "v000000")
    lab.publish(0, share=0.5)
    lab.publish(1)
    assert lab.pull("a", head, 1).how == "full"
    assert lab.holds("a", 1)


def test_a_base_that_is_cut_short_is_fetched_whole(lab: Lab, head: PullSource) -> None:
    lab.publish(0)
    lab.pull("a", head, 0)
    os.truncate(lab.folder("a") / "v000000" / "model.safetensors", 0)
    lab.publish(1)
    assert lab.pull("a", head, 1).how == "full"
    assert lab.holds("a", 1)


def test_a_damaged_delta_in_the_store_is_fetched_around(lab: Lab, head: PullSource) -> None:
    lab.publish(0)
    lab.pull("a", head, 0)
    lab.publish(1)
    path = lab.run.weights / "v000001" / "delta-v000000.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    pulled = lab.pull("a", head, 1)
    assert pulled.how == "full"
    assert "came wrong" in pulled.complaints["delta"]
    assert lab.holds("a", 1)


def test_a_delta_that_did_not_come_whole_is_not_offered_to_peers(lab: Lab, head: PullSource) -> None:
    lab.publish(0)
    lab.pull("a", head, 0)
    manifest = lab.publish(1)
    path = lab.run.weights / "v000001" / "delta-v000000.bin"
    path.write_bytes(bytes(path.stat().st_size))
    assert lab.pull("a", head, 1).how == "full"
    num_own = sum(len(file.chunks) for file in manifest.files)
    with PulledCatalog([lab.folder("a")]).reading(1) as entry:
        marks = entry.marks()
    assert b"\0" not in marks[:num_own]
    assert set(marks[num_own:]) == {0}


def test_a_killed_restore_is_taken_up_again(
    lab: Lab, head: PullSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlboost_runtime.weights.pull import restore as restoring

    lab.publish(0)
    lab.pull("a", head, 0)
    full = lab.publish(1).num_bytes
    whole, calls = restoring.restore, []

    def half(part: Any, base: Path, deltas: Any, pieces: Any, progress: PullProgress) -> int:
        calls.append(whole(part, base, deltas, pieces[: len(pieces) // 2], progress))
        raise KeyboardInterrupt

    monkeypatch.setattr(restoring, "restore", half)
    with pytest.raises(KeyboardInterrupt):
        lab.pull("a", head, 1)
    monkeypatch.setattr(restoring, "restore", whole)
    pulled = lab.pull("a", head, 1)
    assert 0 < pulled.restored_bytes < 0.6 * full
    assert lab.holds("a", 1)


# --- links -----------------------------------------------------------------------------------------------


def test_on_the_heads_own_machine_nothing_is_copied(lab: Lab, head: PullSource) -> None:
    lab.publish(3)
    pulled = lab.pull("a", head, 3, store=str(lab.run.weights))
    assert (pulled.how, pulled.pulled_bytes) == ("linked", 0)
    mine = lab.folder("a") / "v000003" / "model.safetensors"
    assert mine.samefile(lab.run.weights / "v000003" / "model.safetensors")
    assert sorted(os.listdir(lab.folder("a"))) == ["v000003"]
    shutil.rmtree(lab.run.weights / "v000003")
    assert mine.stat().st_size > 2_000_000


def test_a_store_without_the_version_or_with_another_one_is_not_linked(lab: Lab, head: PullSource) -> None:
    manifest = lab.publish(3)
    other = Lab(lab.path / "other")
    other.publish(3, share=0.5)
    store = str(other.run.weights)
    assert lab.pull("a", head, 3, store=store, digest=manifest.content_digest).how == "full"
    assert lab.pull("b", head, 3, store=str(lab.path / "nowhere")).how == "full"
    assert lab.holds("a", 3)


def test_a_half_linked_version_is_pulled_over_the_network(lab: Lab, head: PullSource) -> None:
    lab.publish(3)
    part = lab.folder("a") / "v000003.part"
    part.mkdir(parents=True)
    original = lab.run.weights / "v000003" / "model.safetensors"
    os.link(original, part / "model.safetensors")
    before = original.read_bytes()
    assert lab.pull("a", head, 3).how == "full"
    assert original.read_bytes() == before
    assert not (lab.folder("a") / "v000003" / "model.safetensors").samefile(original)


def test_a_file_cut_short_in_the_store_is_not_linked(lab: Lab, head: PullSource) -> None:
    manifest = lab.publish(3)
    os.truncate(lab.run.weights / "v000003" / "model.safetensors", 1000)
    with pytest.raises(RuntimeFault, match="came wrong"):
        lab.pull("a", head, 3, store=str(lab.run.weights), digest=manifest.content_digest)
    assert not (lab.folder("a") / "v000003").exists()


# --- peers -----------------------------------------------------------------------------------------------


def test_a_complete_peer_spares_the_head(lab: Lab, head: PullSource) -> None:
    lab.publish(1)
    lab.pull("a", head, 1)
    with lab.peer("a") as peer:
        pulled = lab.pull("b", head, 1, extra_sources=(peer,), part=(0, 0))
    assert pulled.sources == {"a": pulled.pulled_bytes}
    assert lab.holds("b", 1)


def test_receivers_that_pull_at_once_take_one_copy_from_the_head(lab: Lab) -> None:
    names = ["a", "b", "c", "d"]
    manifest = lab.publish(1)
    results: dict[str, PullReport] = {}
    with lab.head() as head, ExitStack() as stack:
        peers = {name: stack.enter_context(lab.peer(name)) for name in names}

        def run(i: int, name: str) -> None:
            others = tuple(peer for other, peer in peers.items() if other != name)
            results[name] = lab.pull(name, head, 1, extra_sources=others, part=(i, len(names)), streams=2)

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    from_head = sum(pulled.sources.get("head", 0) for pulled in results.values())
    assert manifest.num_bytes <= from_head < 1.6 * manifest.num_bytes
    assert all(lab.holds(name, 1) for name in names)


class Wrong(PulledCatalog):
    """A peer that says it has everything and sends something else."""

    def __init__(self, folder: Path, wrong: Path) -> None:
        super().__init__([folder])
        self._wrong = wrong

    @contextmanager
    def reading(self, version: int) -> Iterator[Any]:
        import dataclasses

        with super().reading(version) as entry:
            name = f"v{version:06d}"
            shutil.copytree(entry.folder, self._wrong / name, dirs_exist_ok=True)
            path = self._wrong / name / "model.safetensors"
            data = bytearray(path.read_bytes())
            for at in range(100, len(data), CHUNK // 2):
                data[at] ^= 1
            path.write_bytes(data)
            yield dataclasses.replace(entry, folder=self._wrong / name)


def test_a_lying_peer_is_left_out(lab: Lab, head: PullSource, tmp_path: Path) -> None:
    lab.publish(1)
    lab.pull("a", head, 1)
    identity = RunFolder(tmp_path / "liar")
    security.create_secrets(identity)
    catalog = Wrong(lab.folder("a"), tmp_path / "wrong")
    with lab.serving("liar", SourceKind.PEER, identity, catalog) as liar:
        pulled = lab.pull("b", head, 1, extra_sources=(liar,), part=(0, 2))
    assert "came wrong" in pulled.complaints["liar"]
    assert pulled.num_corrupt == works.MAX_EXTRA_CORRUPT
    assert lab.holds("b", 1)


def test_a_peer_that_is_not_there_costs_little_time(lab: Lab, head: PullSource) -> None:
    lab.publish(1)
    with lab.peer("a") as gone:
        pass
    began = time.monotonic()
    pulled = lab.pull("b", head, 1, extra_sources=(gone,), part=(0, 2))
    assert time.monotonic() - began < 5
    assert "ConnectionRefused" in pulled.complaints["a"]
    assert lab.holds("b", 1)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "https://h:99999",
        "https://[::1",
        "https://.h:1",
        f"https://{'h' * 64}:1",
        "https://h\0:1",
        "https://h:1/\u20ac",
        "",
    ],
)
def test_a_peer_of_an_impossible_address_is_left_out(lab: Lab, head: PullSource, url: str) -> None:
    lab.publish(1)
    nonsense = PullSource("a", SourceKind.PEER, url, lab.run.certificate.read_text())
    pulled = lab.pull("b", head, 1, extra_sources=(nonsense,), part=(0, 2))
    assert "cannot pull from" in pulled.complaints["a"]
    assert lab.holds("b", 1)


def test_a_peer_whose_certificate_is_none_is_left_out(lab: Lab, head: PullSource) -> None:
    lab.publish(1)
    with lab.peer("a") as peer:
        garbled = PullSource("a", SourceKind.PEER, peer.url, "garbage")
        pulled = lab.pull("b", head, 1, extra_sources=(garbled,), part=(0, 2))
    assert "certificate cannot be read" in pulled.complaints["a"]
    assert lab.holds("b", 1)


def test_a_peer_with_another_certificate_never_sees_the_token(lab: Lab, head: PullSource) -> None:
    lab.publish(1)
    with lab.peer("a") as peer:
        impostor = PullSource("a", SourceKind.PEER, peer.url, lab.run.certificate.read_text())
        pulled = lab.pull("b", head, 1, extra_sources=(impostor,), part=(0, 2))
    assert "another certificate" in pulled.complaints["a"]
    assert lab.holds("b", 1)


def test_only_verified_chunks_of_a_part_are_handed_out(lab: Lab, head: PullSource) -> None:
    manifest = lab.publish(1)
    lab.pull("a", head, 1)
    folder = lab.folder("a")
    whole, part = folder / "v000001", folder / "v000001.part"
    whole.rename(part)
    num = sum(len(file.chunks) for file in manifest.all_files)
    marks = bytes(random.Random(0).choices((0, 1), k=num))
    (part / ".verified").write_bytes(marks)
    catalog = PulledCatalog([folder])
    with catalog.reading(1) as entry:
        assert entry.marks() == marks
        file = next(f for f in manifest.files if f.name == "model.safetensors")
        first = sum(len(f.chunks) for f in manifest.files[: manifest.files.index(file)])
        for i, chunk in enumerate(file.chunks):
            end = chunk.offset + chunk.length
            assert entry.has(file.name, chunk.offset, end) == bool(marks[first + i])
    with lab.peer("a") as peer:
        pulled = lab.pull("b", head, 1, extra_sources=(peer,), part=(0, 0))
    assert 0 < pulled.sources["a"] < manifest.num_bytes
    assert lab.holds("b", 1)


def test_a_peer_remembers_only_the_versions_that_are_here(lab: Lab, head: PullSource) -> None:
    catalog = PulledCatalog([lab.folder("a")])
    for version in range(4):
        lab.publish(version)
        lab.pull("a", head, version)
        whole = lab.folder("a") / f"v{version:06d}"
        part = whole.rename(whole.with_suffix(".part"))
        (part / ".verified").write_bytes(bytes(len(Entry(part, read_manifest(part)).marks())))
        with catalog.reading(version) as entry:
            assert entry.is_part
        part.rename(whole)
        with catalog.reading(version) as entry:
            assert not entry.is_part
        catalog.tidy()
    assert {path.name for path in catalog._manifests} == {"v000002", "v000003"}


# --- engines of one machine ------------------------------------------------------------------------------


def test_a_machines_engines_fetch_a_version_once_and_share_its_pages(lab: Lab, head: PullSource) -> None:
    manifest = lab.publish(1)
    folders = [lab.path / "machine" / "weights" / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir(parents=True)

    def engine(number: int) -> PullReport:
        siblings = tuple(str(folder) for folder in folders if folder != folders[number])
        return lab.pull("machine", head, 1, folder=str(folders[number]), siblings=siblings)

    with ThreadPoolExecutor(4) as pool:
        pulls = list(pool.map(engine, range(4)))
    assert sorted(pulled.how for pulled in pulls) == ["full", "linked", "linked", "linked"]
    assert sum(pulled.pulled_bytes for pulled in pulls) == manifest.num_bytes
    assert len({(pulled.path / "model.safetensors").stat().st_ino for pulled in pulls}) == 1


def test_an_engine_links_a_version_of_which_its_neighbour_has_some_deltas_or_none(
    lab: Lab, head: PullSource
) -> None:
    folders = [lab.path / "machine" / name for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
    lab.publish(0)
    names = set()
    for version in (1, 2, 3):  # the first comes whole, and offers a delta from what was never here
        lab.publish(version)
        mine, other = (
            lab.pull("machine", head, version, folder=str(folder), siblings=(str(sibling),))
            for folder, sibling in (folders, reversed(folders))
        )
        assert (mine.how, other.how) == ("full" if version == 1 else "delta", "linked")
        assert set(os.listdir(mine.folder)) == set(os.listdir(other.folder))
        names |= set(os.listdir(other.folder))
    assert {"delta-v000001.bin", "delta-v000002.bin"} <= names
    with PulledCatalog([folders[1]]).reading(3) as entry:
        assert entry.manifest.deltas[0].file.name == "delta-v000002.bin"
        num_own = sum(len(file.chunks) for file in entry.manifest.files)
        assert entry.marks()[num_own] == 1


def test_an_engine_whose_neighbour_lacks_a_file_pulls_itself(lab: Lab, head: PullSource) -> None:
    lab.publish(1)
    mine, theirs = (lab.path / "machine" / name for name in "ab")
    mine.mkdir(parents=True)
    lab.pull("machine", head, 1, folder=str(theirs))
    (theirs / "v000001" / "model.safetensors").unlink()
    assert lab.pull("machine", head, 1, folder=str(mine), siblings=(str(theirs),)).how == "full"


def test_an_engine_does_not_take_other_content_from_its_neighbour(lab: Lab, head: PullSource) -> None:
    manifest = lab.publish(1)
    other = Lab(lab.path / "other")
    other.publish(1, share=0.5)
    mine, theirs = (lab.path / "machine" / name for name in "ab")
    mine.mkdir(parents=True)
    shutil.copytree(other.run.weights / "v000001", theirs / "v000001")
    pulled = lab.pull(
        "machine", head, 1, folder=str(mine), siblings=(str(theirs),), digest=manifest.content_digest
    )
    assert pulled.how == "full"


# --- a bucket --------------------------------------------------------------------------------------------


def test_a_bucket_spares_the_head_its_egress(lab: Lab, head: PullSource) -> None:
    manifest = lab.publish(1)
    url = f"file://{lab.path}/bucket"
    sent = upload(open_bucket(url, 5.0), lab.run.weights / "v000001")
    assert sent > manifest.num_bytes
    bucket = PullSource("bucket", SourceKind.BUCKET, url)
    pulled = lab.pull("a", head, 1, extra_sources=(bucket,), usd_per_gb=0.1)
    assert pulled.sources.get("bucket", 0) > 0.5 * manifest.num_bytes
    assert lab.holds("a", 1)


def test_with_the_head_away_the_bucket_alone_is_enough_if_the_content_is_announced(lab: Lab) -> None:
    manifest = lab.publish(1)
    url = f"file://{lab.path}/bucket"
    upload(open_bucket(url, 5.0), lab.run.weights / "v000001")
    bucket = PullSource("bucket", SourceKind.BUCKET, url)
    with lab.head() as head:
        pass
    pulled = lab.pull("a", head, 1, extra_sources=(bucket,), digest=manifest.content_digest)
    assert pulled.sources == {"bucket": manifest.num_bytes}
    assert lab.holds("a", 1)


def test_a_bucket_with_other_content_than_announced_is_not_believed(lab: Lab, head: PullSource) -> None:
    manifest = lab.publish(1)
    other = Lab(lab.path / "other")
    other.publish(1, share=0.5)
    url = f"file://{lab.path}/bucket"
    upload(open_bucket(url, 5.0), other.run.weights / "v000001")
    bucket = PullSource("bucket", SourceKind.BUCKET, url)
    pulled = lab.pull("a", head, 1, extra_sources=(bucket,), digest=manifest.content_digest)
    assert lab.holds("a", 1)
    assert pulled.sources["head"] > 0


def test_a_version_that_is_not_in_the_bucket_comes_from_the_head(lab: Lab, head: PullSource) -> None:
    lab.publish(1)
    bucket = PullSource("bucket", SourceKind.BUCKET, f"file://{lab.path}/bucket")
    pulled = lab.pull("a", head, 1, extra_sources=(bucket,), usd_per_gb=0.1)
    assert pulled.sources == {"head": pulled.pulled_bytes}
    assert lab.holds("a", 1)


def test_old_versions_leave_the_bucket(lab: Lab) -> None:
    bucket = open_bucket(f"file://{lab.path}/bucket", 5.0)
    for version in range(3):
        lab.publish(version)
        upload(bucket, lab.run.weights / f"v{version:06d}")
    assert prune_bucket(bucket, keep=2) == [0]
    left = {path.name for path in (lab.path / "bucket").glob("v*") if any(path.iterdir())}
    assert left == {"v000001", "v000002"}
    kept = [read_manifest(lab.run.weights / name) for name in left]
    files = {(file.name, file.chunks): file.size for manifest in kept for file in manifest.all_files}
    there = [path.stat().st_size for path in (lab.path / "bucket" / "files").iterdir()]
    assert sorted(there) == sorted(files.values())


def test_a_url_that_is_no_bucket_is_told(lab: Lab, head: PullSource) -> None:
    lab.publish(1)
    with pytest.raises(Exception, match=r"weights.bucket 'nonsense' cannot be used"):
        lab.pull("a", head, 1, extra_sources=(PullSource("bucket", SourceKind.BUCKET, "nonsense"),))


def test_a_bucket_that_does_not_answer_delays_nobody(
    lab: Lab, head: PullSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.publish(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        bucket = PullSource("bucket", SourceKind.BUCKET, "s3://b/p")
        began = time.monotonic()
        lab.pull("a", head, 1, extra_sources=(bucket,))
        assert time.monotonic() - began < PATIENT.idle_s - 0.5
    assert lab.holds("a", 1)


# --- a head that is shared -------------------------------------------------------------------------------


def test_a_newcomer_goes_before_those_that_serve(lab: Lab) -> None:
    from rlboost_runtime.weights.serve.connections import FairShare

    shares = FairShare()
    serving = [shares.begin("old", None) for _ in range(3)]
    assert all(quickly(shares.wait, sending) for sending in serving)
    newcomer = [shares.begin("new", 500) for _ in range(3)]
    assert [quickly(shares.wait, sending) for sending in newcomer] == [True] * 3
    assert [quickly(shares.wait, sending) for sending in serving] == [True, False, False]
    soonest = shares.begin("newest", 100)
    assert quickly(shares.wait, soonest)
    assert [quickly(shares.wait, sending) for sending in newcomer] == [True, False, False]
    shares.end(soonest)
    for sending in newcomer:
        shares.end(sending)
    assert all(quickly(shares.wait, sending) for sending in serving)


def quickly(wait: Callable[[Any], bool], sending: Any) -> bool:
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(wait(sending)))
    thread.start()
    thread.join(0.15)
    return done == [True]


def test_a_receiver_that_reads_a_byte_a_second_delays_nobody(lab: Lab, head: PullSource) -> None:
    import http.client

    lab.publish(1)
    context = security.client_context(lab.run.certificate.read_text())
    host, port = head.url.removeprefix("https://").split(":")
    slow = [http.client.HTTPSConnection(host, int(port), timeout=5, context=context) for _ in range(20)]
    headers = {"Authorization": f"Bearer {security.read_token(lab.run)}", "X-RLBoost-Left": "1"}
    responses = []
    for connection in slow:
        connection.request("GET", "/v1/weights/1/model.safetensors", headers=headers)
        responses.append(connection.getresponse())
        responses[-1].read(1)
    began = time.monotonic()
    lab.pull("a", head, 1)
    assert time.monotonic() - began < 4
    assert lab.holds("a", 1)
    for closed in (*responses, *slow):
        closed.close()


def test_nobody_at_all_is_told(lab: Lab) -> None:
    lab.publish(1)
    with lab.head() as head:
        pass
    request = PullRequest(head.url, 1, str(lab.folder("a")), "token", lab.run.certificate.read_text())
    with pytest.raises(RuntimeFault, match="no progress"):
        pull(request, PullProgress(), Deadlines(idle_s=1, progress_s=0.5))
