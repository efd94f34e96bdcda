from __future__ import annotations

import pytest

from rlboost_providers.local.machines import inherited_environment


def test_a_machine_knows_where_programs_are_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RLBOOST_VLLM_PYTHON",
        "VLLM_CACHE_ROOT",
        "HF_HOME",
        "HF_TOKEN",
        "VLLM_API_KEY",
        "AWS_PROFILE",
    ):
        monkeypatch.setenv(name, "x")
    found = inherited_environment()
    assert {"RLBOOST_VLLM_PYTHON", "VLLM_CACHE_ROOT", "HF_HOME", "PATH"} <= found.keys()
    assert found.keys().isdisjoint({"HF_TOKEN", "VLLM_API_KEY", "AWS_PROFILE", "RLBOOST_HOME"})
