"""SkyPilot's start, which is waited for in the background and tried anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost_providers.skypilot import session as session_module
from rlboost_providers.skypilot.session import Session


def test_whatever_kept_skypilot_from_starting_the_next_call_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def no_room(say: object) -> Path:
        tries.append(say)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session_module, "skypilot_python", no_room)
    session = Session(tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            session.sky()
    assert len(tries) == 2
