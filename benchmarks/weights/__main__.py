"""Measure how versions travel: our server and puller beside raw TCP, curl, aria2c, nginx and shardcast.

- *loopback*: unshaped, our pull without TLS and with it, beside raw TCP with as many streams, all into
  files whose pages are there before the clock starts; rounds are interleaved, the median counts: on a shared
  machine the raw base swings more than the effects. A transfer during which the host gave more than 3 % of
  the cores' time to others (`steal`) is repeated, up to five times, and the least disturbed one counts.
  *least*, in the same rounds, is raw TCP with the digest, and with the digest and AES-256-GCM on both sides:
  what has to be done whoever does it, without writing anything (`benchmarks.weights.side`).
- *others*: `curl` and `aria2c -x8` from nginx to a file, and the `shardcast` package where `--shardcast`
  names an interpreter that has it (root only: it listens on all addresses, so it gets a network namespace).
- *shaped*: the head sends through a 5 Gbit/s link (tc, two network namespaces), TLS and digests on (root
  only); *shaped_slower*: the same at 2 Gbit/s, where the cores that both sides share here are not the limit.
- *peers*: eight receivers in namespaces behind a head of 1 Gbit/s, against one (root only);
  *peers_slow_link*: the same at 100 Mbit/s, where the cores that all nine share here are not the limit.
- *publish*: how long training stands still for a publication, beside a plain cast-copy of the same tensors.

::

    python -m benchmarks.weights [--mb 2000] [--rounds 3] [--only PART ...] [--out FILE]

Parts may be measured one at a time: what `--out` has of others is kept. The last line of stdout is one JSON
object with a verdict per target and every figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.weights import network
from benchmarks.weights.machine import DISTURBED, Stolen, describe_machine
from benchmarks.weights.side import TOKEN
from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.weights.manifest import Probe
from rlboost_runtime.weights.store.part_folder import part_folder
from rlboost_runtime.weights.store.store import WeightStore

STREAMS = 4
RECEIVERS = 8
PORT = 7741
SIDE_S = 300.0
"""Longest wait for one transfer."""
TRIES = 6
"""Most times that a transfer is measured for one round."""
SHAPED_MBIT, PEERS_MBIT = 5000, 1000
SLOWER_MBIT, SLOW_MBIT = 2000, 100
"""Of heads whose receivers do not fill the cores that all share here."""
TARGETS = {
    "shaped_of_raw": 0.95,
    "loopback_of_raw": 0.70,
    "loopback_tls_of_raw": 0.35,
    "receiver_cpu_s_per_gb": 1.5,
    "peers_8_over_1": 1.5,
    "publish_stop_over_cast_copy": 1.2,
}
PARTS = ("loopback", "others", "shaped", "shaped_slower", "peers", "peers_slow_link", "publish")
AT_MOST = ("receiver_cpu_s_per_gb", "peers_8_over_1", "publish_stop_over_cast_copy")

Measure = Callable[[], dict[str, Any]]


class Lab:
    """A store with one version in shared memory, and destinations there."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        self.run = RunFolder(folder / "run")
        security.create_secrets(self.run)
        self.store = WeightStore(folder / "store")
        size = megabytes * 1_000_000
        header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        header += b" " * (-len(header) % 8)

        def write(at: Path) -> None:
            body = np.random.default_rng(0).integers(0, 256, size, np.uint8)
            with (at / "model.safetensors").open("wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                file.write(body.data)

        self.manifest = self.store.publish(1, write, Probe((1,), (2,), (-0.5,), 0.1))
        self.file = self.store.path(1) / "model.safetensors"
        self.size = self.file.stat().st_size

    def request(self, url: str, name: str, **more: object) -> str:
        """Return a pull request of machine `name`, whose folder is emptied."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        fields: dict[str, object] = {
            "url": url, "version": 1, "folder": str(target), "token": TOKEN, "streams": STREAMS,
            "certificate": self.run.certificate.read_text(), "receiver": name,
        }  # fmt: skip
        return json.dumps(fields | more)

    def into_pages(self, url: str, name: str, namespace: str | None = None) -> dict[str, Any]:
        """Pull into files whose pages are there, as raw TCP does; the files go afterwards."""
        request = self.request(url, name)
        with part_folder(self.folder / name, self.manifest) as part:
            part.prepare()
            for file in self.manifest.files:
                with part.file(file.name).open("r+b") as pages:
                    for at in range(0, file.size, 1 << 20):
                        pages.write(bytes(min(1 << 20, file.size - at)))
        try:
            return transfer("pull", request, namespace=namespace)
        finally:
            shutil.rmtree(self.folder / name)

    def raw_target(self) -> Path:
        """Return a file of the version's size, its pages there."""
        path = self.folder / "raw"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.size)
        return path


def inside(namespace: str | None) -> list[str]:
    """Return the words that run a command in a namespace."""
    return [] if namespace is None else ["ip", "netns", "exec", namespace]


def side(*words: str, namespace: str | None = None) -> list[str]:
    """Return the command of one side."""
    return [*inside(namespace), sys.executable, "-m", "benchmarks.weights.side", *words]


@contextmanager
def server(*words: str, namespace: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a serving side meanwhile."""
    process = subprocess.Popen(side(*words, namespace=namespace), stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{words} did not start")
            yield process
        finally:
            process.kill()


def transfer(*words: str, namespace: str | None = None) -> dict[str, Any]:
    """Run a pulling side; return what it said, with GB per second."""
    done = subprocess.run(
        side(*words, namespace=namespace), capture_output=True, text=True, timeout=SIDE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    found["gb_per_s"] = found["bytes"] / 1e9 / found["seconds"]
    found["cpu_s_per_gb"] = found["cpu_s"] / (found["bytes"] / 1e9)
    return found


def timed(command: list[str], size: int, folder: Path) -> dict[str, Any]:
    """Time another tool's download into a folder, which is emptied afterwards."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=SIDE_S)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for path in folder.iterdir():
        path.unlink()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": seconds,
        "cpu_s": cpu,
        "gb_per_s": size / 1e9 / seconds,
        "cpu_s_per_gb": cpu / (size / 1e9),
    }


def interleaved(measures: dict[str, Measure], rounds: int) -> dict[str, dict[str, Any]]:
    """Run all measures in turn, so often; return medians and ranges."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in measures}
    for number in range(rounds):
        for name, measure in measures.items():
            found[name].append(undisturbed(measure))
            rate, stolen = found[name][-1]["gb_per_s"], found[name][-1]["stolen"]
            print(
                f"round {number + 1} of {rounds}: {name} {rate:.2f} GB/s ({stolen:.0%} stolen)",
                file=sys.stderr,
            )
    return {name: _summary(results) for name, results in found.items()}


def undisturbed(measure: Measure) -> dict[str, Any]:
    """Measure until the host left us alone, but no more than `TRIES` times; the least disturbed counts."""
    tries: list[dict[str, Any]] = []
    while len(tries) < TRIES:
        stolen = Stolen()
        tries.append(measure())
        tries[-1]["stolen"] = stolen.share()
        if tries[-1]["stolen"] <= DISTURBED:
            break
    return min(tries, key=lambda each: each["stolen"]) | {"tries": len(tries)}


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [result["gb_per_s"] for result in results]
    more = {
        name: round(statistics.median(result[name] for result in results), 4)
        for name in ("publish_s",)
        if name in results[0]
    }
    return more | {
        "gb_per_s": round(statistics.median(rates), 4),
        "range": [round(min(rates), 4), round(max(rates), 4)],
        "cpu_s_per_gb": round(statistics.median(result["cpu_s_per_gb"] for result in results), 4),
        "stolen": [round(result["stolen"], 3) for result in results],
        "tries": [result["tries"] for result in results],
    }


# --- the parts -------------------------------------------------------------------------------------------


def loopback(lab: Lab, rounds: int) -> dict[str, Any]:
    """Unshaped: raw, ours plain, ours with TLS."""
    host, ports = "127.0.0.1", [str(PORT + i) for i in range(5)]
    raw_words = (f"{host}:{ports[0]}", str(lab.raw_target()), str(lab.size))
    least = [("least-pull", f"{host}:{port}", str(lab.size), str(STREAMS)) for port in ports[3:]]
    with ExitStack() as stack:
        stack.enter_context(server("raw-serve", str(lab.file), host, ports[0]))
        stack.enter_context(server("serve", str(lab.store.folder), host, ports[1]))
        stack.enter_context(server("serve", str(lab.store.folder), host, ports[2], str(lab.run.path)))
        stack.enter_context(server("least-serve", str(lab.file), host, ports[3]))
        stack.enter_context(server("least-serve", str(lab.file), host, ports[4], "seal"))
        measures: dict[str, Measure] = {
            "raw_1": lambda: transfer("raw-pull", *raw_words, "1"),
            f"raw_{STREAMS}": lambda: transfer("raw-pull", *raw_words, str(STREAMS)),
            "least_digest": lambda: transfer(*least[0]),
            "least_digest_and_seal": lambda: transfer(*least[1], "seal"),
            "ours_plain": lambda: lab.into_pages(f"http://{host}:{ports[1]}", "plain"),
            "ours_tls": lambda: lab.into_pages(f"https://{host}:{ports[2]}", "tls"),
        }
        return interleaved(measures, rounds)


def others(lab: Lab, rounds: int, shardcast: str | None) -> dict[str, Any]:
    """Unshaped: other tools, to a file as each of them writes it."""
    out = lab.folder / "other"
    out.mkdir(exist_ok=True)
    url = f"http://127.0.0.1:{PORT}/model.safetensors"
    tools = {
        "nginx_curl": ["curl", "-s", "-o", str(out / "curl"), url],
        "nginx_aria2c_x8": [
            "aria2c", "-q", "-x8", "-s8", "--file-allocation=none", "--allow-overwrite=true",
            "-d", str(out), "-o", "aria", url,
        ],
    }  # fmt: skip
    measures: dict[str, Measure] = {}
    with (
        server("serve", str(lab.store.folder), "127.0.0.1", str(PORT + 1)),
        nginx(lab, str(PORT)) as has_nginx,
    ):
        measures["ours_plain_to_file"] = lambda: transfer(
            "pull", lab.request(f"http://127.0.0.1:{PORT + 1}", "plain")
        )
        for name, command in tools.items():
            if has_nginx and shutil.which(command[0]):
                measures[name] = partial(timed, command, lab.size, out)
        if shardcast is not None:
            measures["shardcast"] = partial(run_shardcast, shardcast, lab)
        return interleaved(measures, rounds)


def run_shardcast(python: str, lab: Lab) -> dict[str, Any]:
    """Publish and download by the package; the download is what counts."""
    script, out = Path(__file__).with_name("shardcast_side.py"), lab.folder / "shardcast"
    try:
        done = subprocess.run(
            ["unshare", "--net", python, str(script), str(lab.file), str(out)],
            capture_output=True, text=True, timeout=SIDE_S, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        raise RuntimeError(f"shardcast: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {
        "gb_per_s": lab.size / 1e9 / found["seconds"],
        "cpu_s_per_gb": found["cpu_s"] / (lab.size / 1e9),
    }


@contextmanager
def nginx(lab: Lab, port: str) -> Iterator[bool]:
    """Serve the version's folder by nginx meanwhile; False where there is none."""
    if shutil.which("nginx") is None:
        yield False
        return
    folder = lab.folder / "nginx"
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log; user root;"
        "events {} http { access_log off; sendfile on; tcp_nopush on;"
        f" server {{ listen 127.0.0.1:{port}; root {lab.store.path(1)}; }} }}"
    )
    process = subprocess.Popen(["nginx", "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        yield process.poll() is None
    finally:
        process.terminate()
        process.wait(10)


def shaped(lab: Lab, rounds: int, mbit_per_s: int) -> dict[str, Any]:
    """Through a link: raw, and ours with TLS and digests."""
    with network.machines(1, mbit_per_s) as ((head, address), (receiver, _)), ExitStack() as stack:
        ports = [str(PORT), str(PORT + 1)]
        stack.enter_context(server("raw-serve", str(lab.file), address, ports[0], namespace=head))
        words = ("serve", str(lab.store.folder), address, ports[1], str(lab.run.path))
        stack.enter_context(server(*words, namespace=head))
        raw_words = (f"{address}:{ports[0]}", str(lab.raw_target()), str(lab.size), str(STREAMS))
        url = f"https://{address}:{ports[1]}"
        return interleaved(
            {
                f"raw_{STREAMS}": lambda: transfer("raw-pull", *raw_words, namespace=receiver),
                "ours_tls": lambda: lab.into_pages(url, "shaped", receiver),
            },
            rounds,
        )


def peers(lab: Lab, rounds: int, head_mbit_per_s: int) -> dict[str, Any]:
    """Eight receivers at once behind a head, each serving the others, against one alone."""
    one, eight, from_head = [], [], []
    with network.machines(RECEIVERS, head_mbit_per_s) as ((head, address), *rest), ExitStack() as stack:
        words = ("serve", str(lab.store.folder), address, str(PORT), str(lab.run.path))
        stack.enter_context(server(*words, namespace=head))
        url = f"https://{address}:{PORT}"
        sources = [
            stack.enter_context(_peer(lab, name, f"peer-{i}", at)) for i, (name, at) in enumerate(rest)
        ]
        for _ in range(rounds):
            one.append(transfer("pull", lab.request(url, "alone"), namespace=rest[0][0])["seconds"])
            results = _all_at_once(lab, url, rest, sources)
            eight.append(max(result["seconds"] for result in results))
            from_head.append(sum(result["sources"].get("head", 0) for result in results) / lab.size)
            print(f"one {one[-1]:.2f} s, {RECEIVERS} with peers {eight[-1]:.2f} s", file=sys.stderr)
    return {
        "one_s": round(statistics.median(one), 4),
        "eight_s": round(statistics.median(eight), 4),
        "eight_range_s": [round(min(eight), 4), round(max(eight), 4)],
        "copies_from_head": round(statistics.median(from_head), 3),
    }


@contextmanager
def _peer(lab: Lab, namespace: str, name: str, address: str) -> Iterator[dict[str, str]]:
    """Run a peer's server meanwhile; yield it as a source."""
    request = {"folder": str(lab.folder / name), "token": TOKEN, "host": address}
    process = subprocess.Popen(
        [*inside(namespace), sys.executable, "-m", "rlboost_runtime.weights.serve.peer"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            said = json.loads(process.stdout.readline())
            yield {"name": name, "kind": "peer", **said}
        finally:
            process.kill()


def _all_at_once(
    lab: Lab, url: str, machines: list[tuple[str, str]], sources: list[dict[str, str]]
) -> list[dict[str, Any]]:
    processes = []
    for i, (namespace, _) in enumerate(machines):
        others_ = [*sources[i + 1 :], *sources[:i]]
        request = lab.request(url, f"peer-{i}", extra_sources=others_, part=(i, len(machines)), streams=2)
        words = side("pull", request, "gate", namespace=namespace)
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True))
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("a receiver did not start")
    results = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, _ = process.communicate(timeout=SIDE_S)
        results.append(json.loads(out))
    return results


def publish(rounds: int) -> dict[str, Any]:
    """How long training stands still, beside casting the same tensors into memory that is there already."""
    import torch

    from rlboost_runtime.trainer.artifacts.publisher import WeightsCopy

    torch.set_num_threads(os.cpu_count() or 1)
    weights = {f"layers.{i}.weight": torch.randn(2048, 4096) for i in range(12)}
    targets = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in weights.items()}
    copy = WeightsCopy("bfloat16")
    copy.take(weights.items())
    stops, casts = [], []
    for _ in range(4 * rounds):
        began = time.perf_counter()
        for name, tensor in weights.items():
            targets[name].copy_(tensor)
        casts.append(time.perf_counter() - began)
        began = time.perf_counter()
        copy.take(weights.items())
        stops.append(time.perf_counter() - began)
    size = sum(tensor.nbytes for tensor in weights.values())
    return {
        "stop_s": round(min(stops), 5),
        "cast_copy_s": round(min(casts), 5),
        "float32_bytes": size,
        "basis": "the best of interleaved rounds; without the probe's forward passes",
    }


def verdicts(found: dict[str, Any]) -> dict[str, float]:
    """Return the figure that each target is about, as far as it was measured."""
    figures: dict[str, float] = {}
    if "loopback" in found:
        each = found["loopback"]
        raw = each[f"raw_{STREAMS}"]["gb_per_s"]
        figures["loopback_of_raw"] = each["ours_plain"]["gb_per_s"] / raw
        figures["loopback_tls_of_raw"] = each["ours_tls"]["gb_per_s"] / raw
        figures["receiver_cpu_s_per_gb"] = each["ours_tls"]["cpu_s_per_gb"]
    if "shaped" in found:
        each = found["shaped"]
        figures["shaped_of_raw"] = each["ours_tls"]["gb_per_s"] / each[f"raw_{STREAMS}"]["gb_per_s"]
    if "peers" in found:
        figures["peers_8_over_1"] = found["peers"]["eight_s"] / found["peers"]["one_s"]
    if "publish" in found:
        figures["publish_stop_over_cast_copy"] = found["publish"]["stop_s"] / found["publish"]["cast_copy_s"]
    return {name: round(value, 4) for name, value in figures.items()}


def _measured_before(path: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a result file has, and which parts could not be measured then."""
    if path is None or not path.exists():
        return {}, {}
    detail = json.loads(path.read_text())["detail"]
    return detail["measured"], detail["skipped"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shardcast", help="an interpreter that has the shardcast package")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found, skipped = _measured_before(options.out)
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None, prefix="rlboost-bench-") as name:
        lab = Lab(Path(name), options.mb)
        parts: dict[str, Measure] = {
            "loopback": lambda: loopback(lab, options.rounds),
            "others": lambda: others(lab, options.rounds, options.shardcast),
            "shaped": lambda: shaped(lab, options.rounds, SHAPED_MBIT),
            "shaped_slower": lambda: shaped(lab, options.rounds, SLOWER_MBIT),
            "peers": lambda: peers(lab, options.rounds, PEERS_MBIT),
            "peers_slow_link": lambda: peers(lab, options.rounds, SLOW_MBIT),
            "publish": lambda: publish(options.rounds),
        }
        for part in options.only:
            about = {"megabytes": options.mb, "rounds": options.rounds, "machine": describe_machine()}
            skipped.pop(part, None)
            try:
                found[part] = parts[part]() | {"about": about}
            except RuntimeError as exc:
                found.pop(part, None)
                skipped[part] = str(exc).strip().splitlines()[-1]
    figures = verdicts(found)
    passes = {
        name: value <= TARGETS[name] if name in AT_MOST else value >= TARGETS[name]
        for name, value in figures.items()
    }
    result = {
        "name": "weights",
        "value": figures.get("loopback_of_raw"),
        "unit": "of raw TCP's rate, unshaped loopback, digests on",
        "target": TARGETS["loopback_of_raw"],
        "pass": not skipped and all(passes.values()),
        "detail": {
            "verdicts": passes, "figures": figures, "targets": TARGETS, "skipped": skipped,
            "streams": STREAMS, "measured": found,
        },
    }  # fmt: skip
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
