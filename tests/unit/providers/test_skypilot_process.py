"""SkyPilot's child as we hear it: what its sayings and answers do when they cannot be taken in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlboost_providers.skypilot import session as module
from rlboost_providers.skypilot.session import SkyPilotProcess
from rlboost_runtime.errors import ProviderError

CHILD = """
import json, os, sys, threading
def obey(line):
    request = json.loads(line)
    number, do = request["id"], request["do"]
    if do == "babble":
        print("this is no answer", flush=True)
    elif do != "be silent":
        print(json.dumps({"id": number, "said": "on my way"}), flush=True)
        print(json.dumps({"id": number, "ok": do}), flush=True)
for line in sys.stdin:
    threading.Thread(target=obey, args=(line,), daemon=True).start()
os._exit(0)
"""


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SkyPilotProcess]:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(module, "_CHILD", child)
    process = SkyPilotProcess(Path(sys.executable), tmp_path / "sky", {})
    yield process
    process.close()


def full_disk(line: str) -> None:
    raise OSError(28, "No space left on device")


def test_a_saying_that_cannot_be_written_down_is_lost_alone(sky: SkyPilotProcess) -> None:
    assert sky.begin("launch", full_disk).result(10) == "launch"
    assert sky.ask("clusters", 10) == "clusters"


def test_a_child_that_is_not_understood_is_ended_and_the_next_ask_has_another(sky: SkyPilotProcess) -> None:
    launching = sky.begin("be silent", lambda line: None)
    with pytest.raises(ProviderError, match="ended without an answer"):
        sky.ask("babble", 10)
    with pytest.raises(ProviderError, match="ended without an answer"):
        launching.result(10)
    assert sky.ask("clusters", 10) == "clusters"
