"""`python -m cloudlab FOLDER CACHE LOCK`: serve the lab until standard input ends; JSON lines both ways.

First line out: {"url"}. Then one answer per request {"do", ...}: {"ok": result} or {"error": text}.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from cloudlab.cloud import Cloud
from cloudlab.image import build_image
from cloudlab.machine import alone

ACTIONS = ("machines", "refuse", "bare_images", "cut_off_registry", "reclaim", "roles", "shell")


def main() -> int:
    """Serve; returns the exit code."""
    folder, cache, lock_file = (Path(argument) for argument in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of standard input ends us
    with alone():
        cloud = Cloud(folder, build_image(cache, lock_file))
        _say({"url": cloud.start(0)})
        try:
            for line in sys.stdin:
                _say(_obey(cloud, json.loads(line)))
        finally:
            cloud.stop()
    return 0


def _obey(cloud: Cloud, request: dict[str, Any]) -> dict[str, Any]:
    action = request.pop("do")
    if action not in ACTIONS:
        return {"error": f"no action {action}"}
    try:
        return {"ok": getattr(cloud, action)(**request)}
    except Exception as problem:  # the edge: the test that asked is told
        return {"error": repr(problem)}


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
