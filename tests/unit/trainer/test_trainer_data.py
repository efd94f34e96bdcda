"""Where prompts come from: order, skipping, and what a person is told about a bad file."""

import json

import pytest

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import PromptFile, ReasoningGym
from rlboost_runtime.trainer.data.prompts import PromptSource
from rlboost_runtime.trainer.data.reading import Example, read_examples


def encode(example: Example) -> tuple[str, list[int]]:
    return example.text, list(example.text.encode())


def source(num: int = 10, *, per_step: int = 4, seed: int = 0, longest: int = 99) -> PromptSource:
    examples = [Example("x" * (i + 1), None, {"i": i}) for i in range(num)]
    return PromptSource(examples, encode, prompts_per_step=per_step, max_prompt_tokens=longest, seed=seed)


def indices(prompts: PromptSource, step: int) -> list[int]:
    return [prompt.index for prompt in prompts.batch(step)]


def test_a_batch_is_a_pure_function_of_the_step():
    one, other = source(), source()
    forwards = [indices(one, step) for step in range(12)]
    backwards = [indices(other, step) for step in reversed(range(12))]
    assert forwards == backwards[::-1]


def test_each_epoch_visits_every_prompt_once_in_another_order():
    order = [i for step in range(5) for i in indices(source(), step)]
    first, second = order[:10], order[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != [i for step in range(5) for i in indices(source(seed=1), step)][:10]


def test_a_step_may_be_larger_than_the_data_set():
    assert sorted(indices(source(3, per_step=7), 0)[:3]) == [0, 1, 2]


def test_long_prompts_are_skipped_and_counted(caplog):
    prompts = source(10, longest=6)
    assert prompts.num_skipped == 4
    assert len(prompts) == 6
    assert all(len(p.token_ids) <= 6 for step in range(9) for p in prompts.batch(step))
    assert caplog.records[0].fields["skipped"] == 4


def test_nothing_usable_is_said_with_the_shortest_length():
    with pytest.raises(ConfigError, match="shortest has 1"):
        source(3, longest=0)
    with pytest.raises(ConfigError, match="empty"):
        source(0)


def test_prompt_file(tmp_path):
    rows = [{"q": "a?", "answer": 4, "more": [1]}, {"q": "b?"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = read_examples(PromptFile(source="p.jsonl", prompt_field="q"), tmp_path)
    assert found == [Example("a?", "4", rows[0], response="4"), Example("b?", None, rows[1])]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_text_may_hold_line_breaks_that_are_none_in_json_lines(tmp_path, mark):
    row = {"prompt": f"one{mark}two"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_examples(PromptFile(source="p.jsonl"), tmp_path) == [Example(row["prompt"], None, row)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"prompt": "a"}\n{', "p.jsonl:2: not JSON"),
        ("[1]", "p.jsonl:1: a list"),
        ('{"text": "a"}', r"no text in field prompt \(fields: text\)"),
        ('{"prompt": ""}', "no text in field"),
        (b"\xff", "not UTF-8"),
        (None, "does not exist"),
    ],
)
def test_a_bad_prompt_file_is_explained(tmp_path, content, told):
    if content is not None:
        (tmp_path / "p.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=told):
        read_examples(PromptFile(source="p.jsonl"), tmp_path)


def test_reasoning_gym_mixes_evenly_and_is_deterministic(tmp_path):
    data = ReasoningGym(reasoning_gym=["spell_backward", "gcd"], size=5, seed=3)
    found = read_examples(data, tmp_path)
    assert [e.row["metadata"]["source_dataset"] for e in found] == ["spell_backward", "gcd"] * 2 + [
        "spell_backward"
    ]
    assert found == read_examples(data, tmp_path)
    assert all(e.text == e.row["question"] + "\n" for e in found)


@pytest.mark.parametrize("config", [{"no_such_option": 1}, {"min_word_len": -1}])
def test_unknown_options_are_explained(tmp_path, config):
    with pytest.raises(ConfigError, match="spell_backward"):
        read_examples(ReasoningGym(reasoning_gym=["spell_backward"], size=2, config=config), tmp_path)


def test_unknown_data_set_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="no_such_set"):
        read_examples(ReasoningGym(reasoning_gym=["no_such_set"], size=2), tmp_path)
