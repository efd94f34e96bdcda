"""Deltas: the code itself, files of it, which of them a version offers, and when they pay."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.child_pipe import TransferSettings
from rlboost_runtime.weights.delta import codes as delta_codes
from rlboost_runtime.weights.delta import kernels
from rlboost_runtime.weights.delta import torch_finder as delta_torch
from rlboost_runtime.weights.delta.file import BadDelta, DeltaFile, DeltaStats, write_delta
from rlboost_runtime.weights.manifest import Chunk, Probe
from rlboost_runtime.weights.pull.sources import LinkCost, cost_usd, num_deltas
from rlboost_runtime.weights.store.store import WeightStore

PROBE = Probe((1,), (2,), (-0.5,), 0.1)
CHUNK = 8192
BEST_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def patterns(num: int, seed: int = 0) -> np.ndarray:
    """bfloat16 patterns of weights around 0.02."""
    values = np.random.default_rng(seed).normal(0, 0.02, num).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)


def changed(base: np.ndarray, share: float, seed: int = 1, *, wild: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    new = base.copy()
    where = rng.random(base.size) < share
    steps = rng.integers(-40_000, 40_000, base.size) if wild else rng.choice([-2, -1, 1, 2, 200], base.size)
    new[where] += steps[where].astype(np.int16)
    return new


def chunks_of(size: int, chunk: int = CHUNK) -> list[Chunk]:
    return [Chunk(at, min(chunk, size - at), "") for at in range(0, size, chunk)]


def coded(
    tmp_path: Path, old: bytes, new: bytes, *, max_share: float = 1.5, chunk: int = CHUNK
) -> DeltaStats | None:
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    return write_delta(
        tmp_path / "old",
        tmp_path / "new",
        chunks_of(len(new), chunk),
        tmp_path / "delta",
        threads=2,
        max_share=max_share,
    )


def applied(path: Path, old: bytes) -> bytes:
    out = bytearray(old)
    with DeltaFile(path) as delta:
        for i, chunk in enumerate(chunks_of(len(old))):
            delta.apply(i, memoryview(out)[chunk.offset : chunk.offset + chunk.length])
    return bytes(out)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.25, 1.0])
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("num", [0, 1, 63, 64, 65, 4096, 50_001])
def test_a_delta_gives_the_very_bytes(tmp_path: Path, num: int, share: float, wild: bool) -> None:
    base = patterns(num)
    new = changed(base, share, wild=wild)
    stats = coded(tmp_path, base.tobytes(), new.tobytes())
    assert stats is not None
    assert applied(tmp_path / "delta", base.tobytes()) == new.tobytes()
    assert stats.changed == pytest.approx((base != new).sum() / max(1, num))


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.25, 1.0])
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("num", [1, 64, 65, 4096, 4097, 50_001, 300_000])
def test_torch_gives_the_bytes_of_the_kernel(num: int, share: float, wild: bool) -> None:
    base = patterns(num)
    new = changed(base, share, wild=wild)
    new[-1] += 1  # a change behind a gap of any length
    torch_finder = delta_torch.finder(BEST_DEVICE)
    outcomes = []
    for find in (kernels.find_changes(), torch_finder.tokens):
        tokens = np.zeros(kernels.max_tokens(num), np.uint8)
        extras = np.zeros(kernels.max_extras(num), np.uint8)
        num_tokens, num_extras, num_changed = find(base, new, tokens, extras)
        outcomes.append((tokens[:num_tokens].tobytes(), extras[:num_extras].tobytes(), num_changed))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] == (base != new).sum()
    outcomes.clear()
    for find_codes in (delta_codes.find_codes(), torch_finder.codes):
        codes = np.zeros(delta_codes.num_codes(num), np.uint8)
        extras = np.zeros(delta_codes.max_extras(num), np.uint8)
        num_extras, num_changed = find_codes(base, new, codes, extras)
        outcomes.append((codes.tobytes(), extras[:num_extras].tobytes(), num_changed))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] == (base != new).sum()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 1.0])
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("num", [1, 31, 32, 4096, 4127, 50_001])
def test_codes_give_the_very_patterns(num: int, share: float, wild: bool) -> None:
    base = patterns(num)
    new = changed(base, share, wild=wild)
    codes = np.zeros(delta_codes.num_codes(num), np.uint8)
    extras = np.zeros(delta_codes.max_extras(num) + kernels.EXTRAS_PADDING, np.uint8)
    num_extras, num_changed = delta_codes.find_codes()(base, new, codes, extras)
    found = base.copy()
    assert delta_codes.apply_codes()(found, codes, extras[: num_extras + kernels.EXTRAS_PADDING])
    assert (found == new).all()
    assert num_changed == (base != new).sum()


@pytest.mark.parametrize(("share", "kind"), [(0.1, 1), (0.3, 3)])
def test_where_much_changed_a_chunk_has_codes(tmp_path: Path, share: float, kind: int) -> None:
    base = patterns(300_000)
    assert coded(tmp_path, base.tobytes(), changed(base, share).tobytes(), chunk=200_000) is not None
    with DeltaFile(tmp_path / "delta") as delta:
        assert set(delta._rows["kind"].tolist()) == {kind}


def test_a_delta_by_torch_is_the_same_file(tmp_path: Path) -> None:
    base = patterns(100_000)
    new = changed(base, 0.05, wild=True)
    new[50_000:] = changed(base, 0.5, wild=True)[50_000:]
    for name, data in (("old", base), ("new", new)):
        (tmp_path / name).write_bytes(data.tobytes())
    paths = tmp_path / "old", tmp_path / "new", chunks_of(200_000)
    for name, finder in (("cores", None), ("torch", delta_torch.finder(BEST_DEVICE))):
        assert write_delta(*paths, tmp_path / name, threads=2, finder=finder) is not None
    assert (tmp_path / "cores").read_bytes() == (tmp_path / "torch").read_bytes()


def test_where_the_device_is_full_the_cores_look_for_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(delta_torch, "encode", full)
    monkeypatch.setattr(delta_torch, "encode_all", full)
    base = patterns(1000)
    tokens, extras = np.zeros(kernels.max_tokens(1000), np.uint8), np.zeros(3003, np.uint8)
    finder = delta_torch.finder(torch.device("cpu"))
    assert finder.tokens(base, changed(base, 0.5), tokens, extras)[2] > 400
    codes = tokens[: delta_codes.num_codes(1000)]
    assert finder.codes(base, changed(base, 0.5), codes, extras)[1] > 400


def test_bytes_that_are_no_patterns_are_kept_too(tmp_path: Path) -> None:
    old, new = os.urandom(20_001), os.urandom(20_001)
    assert coded(tmp_path, old, new) is not None
    assert applied(tmp_path / "delta", old) == new
    almost = old[:-1] + bytes([old[-1] ^ 1])  # the odd byte at the end
    assert coded(tmp_path, old, almost) is not None
    assert applied(tmp_path / "delta", old) == almost


def test_few_small_changes_take_few_bytes(tmp_path: Path) -> None:
    base = patterns(500_000)
    rng = np.random.default_rng(3)
    new = base + (rng.random(base.size) < 0.04) * rng.choice([-1, 1], base.size).astype(np.int16)
    stats = coded(tmp_path, base.tobytes(), new.astype(np.int16).tobytes(), chunk=1_000_000)
    assert stats is not None
    assert base.nbytes / stats.num_bytes > 40


def test_unchanged_chunks_take_nothing(tmp_path: Path) -> None:
    data = os.urandom(100 * CHUNK)
    stats = coded(tmp_path, data, data)
    assert stats is not None
    assert stats.num_bytes < 100 * 24
    with DeltaFile(tmp_path / "delta") as delta:
        assert delta.num_chunks == 100
        assert all(delta.is_empty(i) for i in range(100))


def test_a_delta_that_does_not_pay_is_not_written(tmp_path: Path) -> None:
    assert coded(tmp_path, os.urandom(50_000), os.urandom(50_000), max_share=0.6) is None
    assert not (tmp_path / "delta").exists()


def test_files_of_different_sizes_have_no_delta(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size"):
        coded(tmp_path, b"abc", b"abcd")


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_delta_is_bad_or_gives_other_bytes_but_never_harm(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = patterns(20_000, seed)
    coded(tmp_path, base.tobytes(), changed(base, 0.1 if seed % 8 < 4 else 0.4, seed).tobytes())
    data = bytearray((tmp_path / "delta").read_bytes())
    if seed % 4 == 0:
        del data[int(rng.integers(len(data))) :]
    else:
        for at in rng.integers(0, len(data), 1 + seed % 3):
            data[at] ^= 1 << int(rng.integers(8))
    (tmp_path / "delta").write_bytes(data)
    with contextlib.suppress(BadDelta, IndexError):
        assert len(applied(tmp_path / "delta", base.tobytes())) == base.nbytes


def test_tokens_that_lead_outside_are_refused() -> None:
    zeros = np.zeros(100, np.int16)
    padding = np.zeros(kernels.EXTRAS_PADDING, np.uint8)

    def apply(*tokens: int, extras: int = 0) -> bool:
        return kernels.apply_changes()(
            zeros.copy(), np.array(tokens, np.uint8), np.concatenate([np.zeros(extras, np.uint8), padding])
        )

    assert apply(63 << 2, 35 << 2)  # positions 63 and 99
    assert not apply(63 << 2, 36 << 2)  # 100
    assert not apply((63 << 2) | 3)  # skips 4,096
    assert apply(2, extras=1)
    assert not apply(2, extras=0)  # an extra that is not there
    assert not apply(2, extras=2)  # one too many


def test_codes_that_lead_outside_are_refused() -> None:
    zeros = np.zeros(70, np.int16)  # two times eight bytes of codes, and six patterns more
    padding = np.zeros(kernels.EXTRAS_PADDING, np.uint8)
    codes = np.zeros(16, np.uint8)
    codes[3] = 2

    def apply(num_extras: int, size: int = 70, first: int = 0) -> bool:
        extras = np.zeros(num_extras, np.uint8)
        extras[:1] = first
        return delta_codes.apply_codes()(zeros[:size].copy(), codes, np.concatenate([extras, padding]))

    assert apply(1 + 2 * 6)
    assert not apply(2 * 6)  # an extra that is not there
    assert not apply(2 + 2 * 6)  # one too many
    assert apply(3 + 2 * 6, first=255)
    assert not apply(1 + 2 * 6, first=255)  # a pattern that is not there
    assert not apply(1, size=60)  # more codes than patterns


@pytest.mark.parametrize("size", [0, 8, 1023, 1032])
def test_another_number_of_codes_is_refused(tmp_path: Path, size: int) -> None:
    base = patterns(CHUNK // 2)
    assert coded(tmp_path, base.tobytes(), changed(base, 0.5).tobytes()) is not None
    with DeltaFile(tmp_path / "delta") as delta:
        delta._rows = delta._rows.copy()
        assert delta._rows[0]["main"] == 1024
        delta._rows["main"] = size
        with pytest.raises(BadDelta, match="codes, expected 1024"):
            delta.apply(0, memoryview(bytearray(base.tobytes())))


# --- what a version offers -------------------------------------------------------------------------------


def writer(values: np.ndarray, name: str = "w", dtype: str = "BF16") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        entry = {name: {"dtype": dtype, "shape": [values.size], "data_offsets": [0, values.nbytes]}}
        header = json.dumps(entry).encode()
        header += b" " * (-len(header) % 8)
        (folder / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + values.tobytes()
        )
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").write_text("{}")

    return write


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=2, chunk_bytes=CHUNK, max_deltas=3)


def test_a_version_offers_deltas_from_the_last_few(store: WeightStore) -> None:
    values = patterns(60_000)
    manifest = store.publish(0, writer(values), PROBE)
    assert manifest.deltas == ()
    digests = [manifest.content_digest]
    for version in range(1, 6):
        values = changed(values, 0.01, version)
        manifest = store.publish(version, writer(values), PROBE)
        digests.append(manifest.content_digest)
        bases = [version - 1 - i for i in range(min(3, version))]
        assert [delta.base for delta in manifest.deltas] == bases
        assert [delta.base_digest for delta in manifest.deltas] == [digests[b] for b in bases]
        for delta in manifest.deltas:
            assert (store.path(version) / delta.file.name).stat().st_size == delta.file.size
        assert manifests.read_manifest(store.path(version)) == manifest
    assert manifest.deltas[0].changed == pytest.approx(0.01, rel=0.2)


def test_what_has_changed_too_much_offers_no_delta_and_begins_a_new_chain(store: WeightStore) -> None:
    first, second = patterns(60_000, 1), patterns(60_000, 2)
    store.publish(0, writer(first), PROBE)
    assert store.publish(1, writer(second), PROBE).deltas == ()
    third = store.publish(2, writer(changed(second, 0.01)), PROBE)
    assert [delta.base for delta in third.deltas] == [1]


def test_another_layout_offers_no_delta(store: WeightStore) -> None:
    store.publish(0, writer(patterns(10_000)), PROBE)
    assert store.publish(1, writer(patterns(10_000), name="other"), PROBE).deltas == ()


def test_float32_offers_no_delta(store: WeightStore) -> None:
    store.publish(0, writer(patterns(10_000), dtype="F32"), PROBE)
    assert store.publish(1, writer(patterns(10_000), dtype="F32"), PROBE).deltas == ()


def test_a_damaged_earlier_manifest_costs_the_delta_only(store: WeightStore) -> None:
    store.publish(0, writer(patterns(10_000)), PROBE)
    (store.path(0) / "manifest.json").write_text("{}")
    assert store.publish(1, writer(patterns(10_000)), PROBE).deltas == ()


# --- when they pay ---------------------------------------------------------------------------------------

FULL = 16_000_000_000
FREE_10G = LinkCost(bytes_per_s=1.25e9)
DEAR_1G = LinkCost(bytes_per_s=125e6, usd_per_gb=0.09, usd_per_hour=2.0)


@pytest.mark.parametrize(
    ("transfer", "sizes", "link", "num"),
    [
        (TransferSettings.AUTO, [FULL // 40], FREE_10G, 1),
        (TransferSettings.AUTO, [FULL // 40], DEAR_1G, 1),
        (TransferSettings.AUTO, [FULL // 2], FREE_10G, 0),  # restoring takes longer than the bytes saved
        (TransferSettings.AUTO, [FULL // 2], DEAR_1G, 1),
        (TransferSettings.AUTO, [None, FULL // 20], DEAR_1G, 2),  # a base two versions back
        (TransferSettings.AUTO, [None, None], DEAR_1G, 0),
        (TransferSettings.AUTO, [], DEAR_1G, 0),
        (TransferSettings.AUTO, [FULL * 2], DEAR_1G, 0),  # far behind
        (TransferSettings.FULL, [1], DEAR_1G, 0),
        (TransferSettings.DELTA, [FULL // 2], FREE_10G, 1),
    ],
)
def test_the_cheaper_way_is_taken(
    transfer: TransferSettings, sizes: list[int | None], link: LinkCost, num: int
) -> None:
    assert num_deltas(transfer, FULL, sizes, link) == num


def test_where_nothing_can_be_written_the_loops_are_compiled_without_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_it = kernels.numba.njit

    def njit(**options: bool) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available for file")
        return compile_it(**options)

    monkeypatch.setattr(kernels.numba, "njit", njit)
    loop = kernels.compiled(lambda patterns: patterns.size)
    assert loop(np.zeros(3, np.int16)) == 3


def test_cost_is_egress_and_waiting() -> None:
    assert cost_usd(10**9, 0, LinkCost(1e9, 0.08, 3600.0)) == pytest.approx(0.08 + 1.0)
    assert cost_usd(0, 3 * 10**9, LinkCost(1e9, 0.08, 3600.0)) == pytest.approx(2.0)
