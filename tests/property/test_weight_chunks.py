from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.child_pipe import PullProgress
from rlboost_runtime.weights.manifest import Chunk, File, Manifest, Probe, describe_file
from rlboost_runtime.weights.pull.chunk_scheduler import RANGE_BYTES, ChunkScheduler, SourceState
from rlboost_runtime.weights.store.part_folder import part_folder, pieces_of

pytestmark = pytest.mark.property

PROBE = Probe((1,), (2,), (-0.5,), 0.1)


def manifest_of(files: tuple[File, ...], version: int = 1) -> Manifest:
    return Manifest(
        manifests.SCHEMA, version, "full", None, files, (), (), PROBE, manifests.content_digest(files), 0.0
    )


@given(st.binary(max_size=5000), st.integers(1, 600))
@settings(deadline=None)
def test_chunks_tile_every_file_exactly(data: bytes, chunk_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        path.write_bytes(data)
        file = describe_file(path, chunk_bytes)
    again = manifests.decode_manifest(manifests.encode_manifest(manifest_of((file,)))).files[0]
    parts = [data[c.offset : c.offset + c.length] for c in again.chunks]
    assert b"".join(parts) == data
    assert [manifests.digest(part) for part in parts] == [c.blake3 for c in again.chunks]
    assert all(0 < len(part) <= chunk_bytes for part in parts)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_a_chunk_map_with_one_number_off_is_refused(lengths: list[int], data: st.DataObject) -> None:
    chunks = [Chunk(sum(lengths[:i]), n, "a" * 64) for i, n in enumerate(lengths)]
    which = data.draw(st.integers(0, len(chunks) - 1))
    off = data.draw(st.integers(-60, 60).filter(bool))
    key = data.draw(st.sampled_from(["offset", "length"]))
    chunks[which] = msgspec.structs.replace(chunks[which], **{key: getattr(chunks[which], key) + off})
    files = (File("f", sum(lengths), tuple(chunks)),)
    with pytest.raises(ProtocolError):
        manifests.decode_manifest(msgspec.json.encode(manifest_of(files)))


@given(
    st.lists(st.lists(st.integers(1, 64 * 2**20), max_size=12), max_size=4),
    st.integers(1, 32),
    st.data(),
)
def test_runs_cover_what_is_missing_once_and_in_one_piece(
    sizes: list[list[int]], num_streams: int, data: st.DataObject
) -> None:
    files = tuple(
        File(f"f{i}", sum(ns), tuple(Chunk(sum(ns[:k]), n, "a" * 64) for k, n in enumerate(ns)))
        for i, ns in enumerate(sizes)
    )
    pieces = pieces_of(manifest_of(files))
    missing = [piece for piece in pieces if data.draw(st.booleans())]
    scheduler = ChunkScheduler(missing, PullProgress(), num_streams)
    head = SourceState("head", is_peer=False, rank=1)
    scheduler.add_source(head)
    runs = []
    while (taken := scheduler.take(head, 0.0)) is not None:
        runs.append(list(taken.pieces))
    assert [piece for run in runs for piece in run] == missing
    for run in runs:
        assert len({piece.file.name for piece in run}) == 1
        for one, next_one in pairwise(run):
            assert one.chunk.offset + one.chunk.length == next_one.chunk.offset
        assert len(run) == 1 or sum(piece.chunk.length for piece in run) <= RANGE_BYTES


@given(st.binary(min_size=1, max_size=400), st.integers(1, 60), st.data())
@settings(deadline=None, max_examples=60)
def test_a_resumed_part_asks_for_all_but_what_is_right_on_disk(
    body: bytes, chunk_bytes: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "f"
        source.write_bytes(body)
        manifest = manifest_of((describe_file(source, chunk_bytes),))
        pieces = pieces_of(manifest)
        folder = Path(name) / "versions"
        kept = [piece for piece in pieces if data.draw(st.booleans())]
        with part_folder(folder, manifest) as part:
            assert part.prepare() == pieces
            for piece in kept:
                part.write(piece, memoryview(body)[piece.chunk.offset :][: piece.chunk.length])
        damaged = [piece for piece in kept if data.draw(st.booleans())]
        path = folder / "v000001.part" / "f"
        with path.open("r+b") as file:
            for piece in damaged:
                file.seek(piece.chunk.offset)
                file.write(bytes([body[piece.chunk.offset] ^ 1]))
        expected = [piece for piece in pieces if piece not in kept or piece in damaged]
        with part_folder(folder, manifest) as part:
            assert part.prepare() == expected
            for piece in expected:
                part.write(piece, memoryview(body)[piece.chunk.offset :][: piece.chunk.length])
            final = part.finish()
        assert (final / "f").read_bytes() == body
        assert sorted(os.listdir(final)) == ["f", "manifest.json"]
