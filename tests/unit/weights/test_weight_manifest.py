from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.manifest import Chunk, File, Manifest, Probe, Tensor, Tied

PROBE = Probe((1, 2, 3), (4, 5, 6), (-0.1, -0.2, -0.3), 0.05)


def make(version: int = 7, **changes: Any) -> Manifest:
    files = (
        File("model.safetensors", 10, (Chunk(0, 6, "a" * 64), Chunk(6, 4, "b" * 64))),
        File("config.json", 3, (Chunk(0, 3, "c" * 64),)),
        File("empty", 0, ()),
    )
    manifest = Manifest(
        schema=manifests.SCHEMA,
        version=version,
        encoding="full",
        base=None,
        files=files,
        tensors=(Tensor("w", "F32", (1,), "model.safetensors", 6, 4),),
        tied=(Tied("lm_head.weight", "w"),),
        probe=PROBE,
        content_digest=manifests.content_digest(files),
        created_at=1.0,
    )
    return msgspec.structs.replace(manifest, **changes)


def with_file(file: File) -> Manifest:
    files = (make().files[0], file)
    return make(files=files, content_digest=manifests.content_digest(files))


def test_a_manifest_reads_back_equal(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(manifests.encode_manifest(make()))
    assert manifests.read_manifest(tmp_path) == make()
    assert make().num_bytes == 13


def test_unknown_keys_are_ignored() -> None:
    data = json.loads(manifests.encode_manifest(make()))
    data["new"] = data["files"][0]["new"] = 1
    data["schema"] = [1, 9]
    assert manifests.decode_manifest(json.dumps(data).encode()).files == make().files


def test_content_digest_knows_content_but_not_version() -> None:
    files = make().files
    assert make(version=8).content_digest == make().content_digest
    assert manifests.content_digest(files[::-1]) == manifests.content_digest(files)
    renamed = (msgspec.structs.replace(files[0], name="other"), *files[1:])
    assert manifests.content_digest(renamed) != manifests.content_digest(files)


BAD_PROBES = [
    Probe((), (4,), (-0.1,), 0.1),
    Probe((1,), (), (), 0.1),
    Probe((1,), (4,), (-0.1, -0.2), 0.1),
    Probe((1,), (4,), (-0.1,), -1.0),
]


@pytest.mark.parametrize(
    "manifest",
    [
        make(version=-1),
        make(encoding="delta"),
        make(base=3),
        make(content_digest="a" * 64),
        make(tensors=(Tensor("w", "F32", (2,), "model.safetensors", 6, 8),)),
        make(tensors=(Tensor("w", "F32", (1,), "nowhere", 0, 0),)),
        make(tensors=(Tensor("w", "F32", (1,), "model.safetensors", -4, 4),)),
        make(tied=(Tied("lm_head.weight", "nothing"),)),
        *(make(probe=probe) for probe in BAD_PROBES),
        *(
            with_file(File(name, 0, ()))
            for name in (
                "..",
                "../x",
                "/etc/passwd",
                "a/b",
                ".lease",
                "",
                "manifest.json",
                "model.safetensors",
                "a\nb",
                "a\n",
            )
        ),
        with_file(File("f", 5, (Chunk(0, 4, "a" * 64),))),
        with_file(File("f", 4, (Chunk(0, 5, "a" * 64),))),
        with_file(File("f", 4, (Chunk(0, 2, "a" * 64), Chunk(3, 1, "a" * 64)))),
        with_file(File("f", 4, (Chunk(0, 3, "a" * 64), Chunk(2, 2, "a" * 64)))),
        with_file(File("f", 0, (Chunk(0, 0, "a" * 64),))),
        with_file(File("f", 4, (Chunk(0, 4, "A" * 64),))),
        with_file(File("f", 4, (Chunk(0, 4, "a" * 63),))),
        with_file(File("f", 2**40, (Chunk(0, 2**40, "a" * 64),))),
    ],
)
def test_nonsense_is_refused_when_written_and_when_read(manifest: Manifest) -> None:
    with pytest.raises(ProtocolError):
        manifests.encode_manifest(manifest)
    with pytest.raises(ProtocolError):
        manifests.decode_manifest(msgspec.json.encode(manifest))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"schema": 1}',
        b'{"schema": []}',
        b'{"schema": [1, 0]}',
        b"null",
        b"3",
    ],
)
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        manifests.decode_manifest(data)


def test_another_major_schema_is_named() -> None:
    with pytest.raises(ProtocolError, match="schema 2"):
        manifests.decode_manifest(msgspec.json.encode(make(schema=(2, 0))))


def test_no_manifest_is_a_protocol_error(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="no weight manifest"):
        manifests.read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("v000000", 0),
        ("v000012", 12),
        ("v1234567", 1234567),
        ("v12", None),
        ("v0000012", None),
        ("v000012.part", None),
        ("x000012", None),
        ("v00001\u0662", None),
    ],
)
def test_version_names_are_read_strictly(name: str, version: int | None) -> None:
    assert manifests.parse_version_name(name) == version
    if version is not None:
        assert manifests.version_name(version) == name


# --- probe -----------------------------------------------------------------------------------------------


def test_the_same_continuation_matches() -> None:
    assert manifests.probe_matches(make(), [4, 5, 6], [-0.1, -0.24, -0.26]) is None


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "problem"),
    [
        ([4, 5, 6], [-0.1, -0.26, -0.3], "position 1"),  # too far off
        ([4, 5, 6], [-0.1, math.nan, -0.3], "nan"),
        ([4, 9, 6], [-0.1, -0.2, math.nan], "nan"),  # also after a near tie
        ([4, 5, 6], [-0.1, -math.inf, -0.3], "inf"),
        ([4, 9, 6], [-0.1, -0.3, -0.3], "instead of 5"),  # another token, and no tie
        ([4, 5], [-0.1, -0.2], "2 tokens instead of 3"),
        ([4, 5, 6, 7], [-0.1, -0.2, -0.3, -0.1], "4 tokens instead of 3"),
        ([], [], "0 tokens"),
        ([4, 5, 6], [-0.1, -0.2], "2 logprobs"),
    ],
)
def test_a_wrong_continuation_is_told_in_words(
    token_ids: list[int], logprobs: list[float], problem: str
) -> None:
    found = manifests.probe_matches(make(), token_ids, logprobs)
    assert found is not None
    assert problem in found


def test_after_a_near_tie_nothing_more_is_compared() -> None:
    assert manifests.probe_matches(make(), [4, 9, 1], [-0.1, -0.21, -5.0]) is None
    assert manifests.probe_matches(make(), [4, 9], [-0.1, -0.21]) is None  # it may also end earlier


# --- safetensors -----------------------------------------------------------------------------------------


def safetensors(header: bytes, body: bytes = b"\0" * 8) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def test_tensors_come_from_the_safetensors_header(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "b": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [4, 8]},
            "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(header))
    start = 8 + len(header)
    assert manifests.read_tensors(path) == (
        Tensor("a", "F32", (), "model.safetensors", start, 4),
        Tensor("b", "BF16", (2, 1), "model.safetensors", start + 4, 4),
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 20,
        safetensors(b"[]"),
        safetensors(b"{"),
        safetensors(b'{"a": 1}'),
        safetensors(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}'),
        safetensors(b"\xff\xff"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ProtocolError, match=r"model\.safetensors"):
        manifests.read_tensors(path)
