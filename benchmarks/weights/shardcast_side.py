"""Time the `shardcast` package on a file, by an interpreter that has it, in a network namespace of its own.

    unshare --net PYTHON benchmarks/weights/shardcast_side.py FILE FOLDER

Its origin listens on all addresses, hence the namespace. Prints one JSON line: seconds and CPU-seconds of
publishing (cutting into shards, digest) and of one client's download (wget per shard, joining, digest).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

PORT = 8000


def _now() -> tuple[float, float]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in used)


def main(path: str, folder: str) -> None:
    """Publish and download."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    data, out = Path(folder) / "origin", Path(folder) / "client"
    data.mkdir(parents=True)
    (data / "data1.bin").write_bytes(bytes(1_000_000))  # its client asks for this first, and gives up without
    (published, serves) = os.pipe()
    origin = os.fork()
    if origin == 0:
        _serve(path, data, serves)
    published_s = json.loads(os.read(published, 100))
    from shardcast import ClientNode  # type: ignore[import-not-found] # only in the interpreter that runs this

    began = _now()
    found = ClientNode([f"http://127.0.0.1:{PORT}"], str(out)).download_version("v1")
    ended = _now()
    os.kill(origin, 9)
    if found is None or Path(found).stat().st_size != Path(path).stat().st_size:
        sys.exit("the download failed")
    seconds, cpu_s = ended[0] - began[0], ended[1] - began[1]
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "publish_s": published_s}))


def _serve(path: str, data: Path, serves: int) -> None:
    from shardcast import OriginServer

    began = time.perf_counter()
    OriginServer(str(data), PORT).broadcast(path)
    os.write(serves, json.dumps(time.perf_counter() - began).encode())
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
