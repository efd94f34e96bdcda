"""The arithmetic and the verdict of the GPU check."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.__main__ import environment, passes, problem_of, result
from benchmarks.gpu.parts import PARTS, TINY, every_import, losses
from benchmarks.gpu.shapes import SHAPES, fit, peak_flops, step_bytes

H100, HOST = 84_000_000_000, 128_000_000_000


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("0.6B", 596_049_920), ("1.7B", 1_720_574_976), ("8B", 8_190_735_360), ("30B-A3B", 30_532_122_624)],
)
def test_shapes_have_the_published_number_of_parameters(size: str, parameters: int) -> None:
    assert SHAPES[size].parameters == parameters


def test_small_shapes_fit_an_h100_whole_and_8b_with_fewer_layers() -> None:
    assert fit(SHAPES["0.6B"], 8192, H100, HOST).shape == SHAPES["0.6B"]
    assert fit(SHAPES["1.7B"], 8192, H100, HOST).shape == SHAPES["1.7B"]
    found = fit(SHAPES["8B"], 8192, H100, HOST)
    assert found.shape is not None
    assert 8 <= found.shape.layers < 36
    assert found.checkpointing
    assert "131.1 GB" in found.why, "the arithmetic is given"
    assert sum(step_bytes(found.shape, 8192, checkpointing=True).values()) <= 0.9 * H100


def test_some_layers_of_a_mixture_fit_an_h100() -> None:
    found = fit(SHAPES["30B-A3B"], 8192, H100, HOST)
    assert found.shape is not None
    assert 4 <= found.shape.layers < 12, "each has 0.63 G parameters"
    whole = SHAPES["30B-A3B"]
    active = whole.flops_per_token(0) / 6 + whole.vocabulary * whole.hidden  # the embedding too
    assert active == pytest.approx(3.3e9, rel=0.05), "A3B: what computes a token"


def test_a_shape_that_does_not_fit_at_all_is_skipped_with_the_arithmetic() -> None:
    found = fit(SHAPES["8B"], 8192, 16_000_000_000, HOST)
    assert found.shape is None
    assert "16.0 GB" in found.why


def test_main_memory_bounds_the_layers_too() -> None:
    found = fit(SHAPES["8B"], 8192, H100, 60_000_000_000)
    assert found.shape is not None
    assert 14 * found.shape.parameters <= 0.7 * 60e9


def test_the_longest_name_of_a_device_counts_and_an_unknown_one_has_no_peak() -> None:
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("Something Else") is None


def test_only_what_ran_and_held_passes() -> None:
    good: dict[str, Any] = {"training": {"checks": {"a": True}}}
    assert passes(good)
    assert passes(good | {"vllm": {"skipped": "no vLLM"}})
    assert not passes({})
    assert not passes({"training": {"checks": {"a": False}}})
    assert not passes({"training": {"checks": {}}}), "a part without checks has shown nothing"
    assert not passes(good | {"deltas": {"failed": "RuntimeError"}})
    assert not passes(good | {"deltas": {"skipped": "no time was left for it"}})


def test_missing_imports_are_reported_with_what_is_lost() -> None:
    lost = losses(PARTS, ["numba"])
    assert set(lost) == {"deltas", "whole_run"}
    assert "numba" in lost["deltas"]
    assert losses(PARTS, []) == {}
    assert set(losses(PARTS, ["torch"])) == {part.name for part in PARTS}
    assert len(every_import(PARTS)) == len(set(every_import(PARTS)))


def test_without_a_device_nothing_but_the_miniature_runs() -> None:
    asked: dict[str, Any] = {"missing": {}, "versions": {"torch": "2.13"}, "torch": {"available": False}}
    assert problem_of(asked, tiny=True) is None
    problem = problem_of(asked, tiny=False)
    assert problem is not None
    assert result(asked, {}, problem, tiny=False)["pass"] is False


def test_a_miniature_is_a_cpu_s_also_beside_a_gpu() -> None:
    asked: dict[str, Any] = {"missing": {}, "versions": {}, "torch": {"name": "NVIDIA H100", "cuda": "13"}}
    line = result(asked, {"training": {"checks": {"a": True}}}, None, tiny=True)
    assert (line["device"], line["device_properties"], line["pass"]) == ("cpu", None, True)
    assert environment(tiny=True)["CUDA_VISIBLE_DEVICES"] == ""
    assert all(part.size.startswith("tiny") for part in TINY)
