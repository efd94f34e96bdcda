"""Network namespaces joined by a bridge, each a machine with a link of a given rate. Root only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "10.214.9"
BRIDGE = "rlbw-br"


def run(command: str, *, check: bool = True) -> None:
    """Run a command of `ip` or `tc`."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


@contextmanager
def machines(num: int, head_mbit_per_s: int) -> Iterator[list[tuple[str, str]]]:
    """Yield (namespace, address) of a head and `num` others; the head sends no faster than said."""
    names = [f"rlbw-{i}" for i in range(num + 1)]
    try:
        run(f"ip link add {BRIDGE} type bridge")
        run(f"ip link set {BRIDGE} up")
        for i, name in enumerate(names):
            run(f"ip netns add {name}")
            run(f"ip link add rlbw-v{i} type veth peer name eth0 netns {name}")
            run(f"ip link set rlbw-v{i} master {BRIDGE} up")
            run(f"ip -n {name} addr add {PREFIX}.{i + 1}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {name} link set lo up")
        shape = f"tbf rate {head_mbit_per_s}mbit burst 4mb latency 50ms"
        run(f"ip netns exec {names[0]} tc qdisc add dev eth0 root {shape}")
        yield [(name, f"{PREFIX}.{i + 1}") for i, name in enumerate(names)]
    finally:
        for i, name in enumerate(names):
            run(f"ip netns del {name}", check=False)
            run(f"ip link del rlbw-v{i}", check=False)
        run(f"ip link del {BRIDGE}", check=False)
