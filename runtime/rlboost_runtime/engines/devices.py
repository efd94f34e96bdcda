"""Which of a machine's GPUs an engine has. Standard library only: nothing here asks a GPU."""

from __future__ import annotations

from collections.abc import Mapping

from rlboost_runtime.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices_of(
    index: int, num_engines: int, per_engine: int, inherited: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the GPUs of the `index`-th of a machine's `num_engines` engines, as `VISIBLE` names them.

    () where there is but one engine: it has all that are there. What the machine's owner leaves visible to us
    is divided; raises `ConfigError` where that is too little.
    """
    if num_engines == 1:
        return ()
    start, end = index * per_engine, (index + 1) * per_engine
    visible = inherited.get(VISIBLE, "").strip()
    if not visible:
        return tuple(str(number) for number in range(start, end))
    names = tuple(name.strip() for name in visible.split(","))
    if end > len(names):
        raise ConfigError(
            f"engine {index} of {num_engines} is to have {per_engine} GPUs, but {VISIBLE}={visible} names"
            f" {len(names)} for all of them",
            "name fewer in accelerators, or make more visible",
        )
    return names[start:end]


def device_environment(devices: tuple[str, ...]) -> dict[str, str]:
    """Return what an engine's process is to find in its environment."""
    return {VISIBLE: ",".join(devices)} if devices else {}
