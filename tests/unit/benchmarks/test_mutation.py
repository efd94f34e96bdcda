"""What is made of mutmut's exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.mutation import __main__ as mutation

NAMES = {
    "rlboost_runtime.core.core.xǁCoreǁhandle__mutmut_1": 1,
    "rlboost_runtime.core.core.xǁCoreǁhandle__mutmut_2": 0,
    "rlboost_runtime.billing.ledger.x_open__mutmut_1": 33,
    "rlboost_runtime.protocol.session.x_accept__mutmut_1": -24,
    "rlboost_runtime.coordinator.storage.journal.x__crc__mutmut_1": 3,
    "rlboost_runtime.coordinator.storage.journal.x__crc__mutmut_2": None,
}


def test_the_score_counts_what_a_test_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = tmp_path / "mutants" / "src" / "any.py.meta"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"exit_code_by_key": NAMES}))
    monkeypatch.setattr(mutation, "_diff", lambda folder, name: [f"- of {name[-8:]}"])
    found = mutation._result(tmp_path, [name for name, code in NAMES.items() if code is not None])
    assert (found["sample"], found["killed"], found["survived"], found["unreached"]) == (5, 3, 1, 1)
    assert found["score"] == 0.6
    assert {part: counts["score"] for part, counts in found["parts"].items()} == {
        "core": 0.5, "ledger": 0.0, "wire": 1.0, "journal": 1.0,
    }  # fmt: skip
    assert found["text_alone"] == 0
    assert set(found["survivors"]) == {name for name, code in NAMES.items() if code in (0, 33)}


@pytest.mark.parametrize(
    ("diff", "is_text"),
    [
        (["- raise ValueError(f'no {name}')", "+ raise ValueError(f'XXno {name}XX')"], True),
        (['- rows = db("SELECT a FROM b", (x,))', '+ rows = db("select a from b", (x,))'], True),
        (["- raise ValueError('no')", "+ raise ValueError(None)"], False),
        (["- if a < 'b':", "+ if a <= 'b':"], False),
        (["- a = 1"], False),
    ],
)
def test_a_mutant_of_a_text_alone_is_told_apart(diff: list[str], is_text: bool) -> None:
    assert mutation.is_text_alone(diff) is is_text


def test_mutants_of_a_text_alone_do_not_count_against_the_score() -> None:
    found = mutation.counts([mutation.KILLED] * 3 + [mutation.SURVIVED] + [mutation.TEXT] * 4)
    assert (found["sample"], found["text_alone"], found["score"]) == (8, 4, 0.75)
