"""A machine's GPUs are divided among its engines."""

from __future__ import annotations

import pytest

from rlboost_runtime.engines.base import device_environment, devices_of
from rlboost_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("index", "num_engines", "per_engine", "visible", "expected"),
    [
        (0, 1, 1, None, ()),
        (0, 1, 8, "3", ()),
        (0, 8, 1, None, ("0",)),
        (7, 8, 1, "", ("7",)),
        (1, 4, 2, None, ("2", "3")),
        (1, 2, 2, "4,5, 6,7", ("6", "7")),
        (1, 2, 1, "GPU-aa,MIG-bb", ("MIG-bb",)),
    ],
)
def test_each_engine_has_devices_of_its_own(
    index: int, num_engines: int, per_engine: int, visible: str | None, expected: tuple[str, ...]
) -> None:
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices_of(index, num_engines, per_engine, inherited) == expected


def test_an_engine_without_enough_devices_says_so() -> None:
    with pytest.raises(ConfigError, match=r"engine 1 of 2 is to have 2 GPUs, but CUDA_VISIBLE_DEVICES=0,1,2"):
        devices_of(1, 2, 2, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_an_engine_that_has_all_devices_inherits_what_is_visible() -> None:
    assert device_environment(()) == {}
    assert device_environment(("2", "3")) == {"CUDA_VISIBLE_DEVICES": "2,3"}
