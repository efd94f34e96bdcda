"""Chat templates, parquet, `datasets`, and several sources at once: the same prompts, exactly encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import PromptData, PromptDataset, PromptFile, ReasoningGym
from rlboost_runtime.trainer.data.chat import PromptEncoder
from rlboost_runtime.trainer.data.prompts import PromptSource
from rlboost_runtime.trainer.data.reading import read_examples
from rlboost_runtime.trainer.rewards.outcome import RewardCall
from rlboost_runtime.trainer.rewards.scorer import RewardScorer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|/h|>{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant<|/h|>{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }} {{ m.content }}</turn>"
    "{% endfor %}{% if add_generation_prompt %}<turn>model {% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|h|>", "<|/h|>", "<|eot|>", "<turn>", "</turn>", "<bos>", "?"]


def tokenizer(template: str | None, *, adds_bos: bool) -> Any:
    vocabulary = {name: i for i, name in enumerate([*SPECIAL, *map(chr, range(10, 127))])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = Split("", "isolated")
    made.add_special_tokens(SPECIAL[:-1])
    if adds_bos:
        made.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>" if adds_bos else None)
    fast.chat_template = template
    return fast


TOKENIZERS = {
    "chatml": tokenizer(CHATML, adds_bos=False),
    "llama": tokenizer(LLAMA, adds_bos=True),
    "gemma": tokenizer(GEMMA, adds_bos=True),
}
TURNS = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And times 4?"},
]
ROWS = [{"messages": TURNS, "answer": 20}, {"messages": TURNS[:1], "answer": 5}]


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "chat.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def encoded(data: PromptData | list[PromptData], folder: Path, model: str) -> list[tuple[str, list[int]]]:
    return [PromptEncoder(TOKENIZERS[model])(each) for each in read_examples(data, folder)]


@pytest.mark.parametrize("model", TOKENIZERS)
@pytest.mark.parametrize("args", [{}, {"enable_thinking": False}])
def test_token_ids_are_those_of_apply_chat_template(tmp_path: Path, model: str, args: dict[str, Any]) -> None:
    write_rows(tmp_path, ROWS)
    data = PromptFile(source="chat.jsonl", messages_field="messages", template_args=args)
    found = encoded(data, tmp_path, model)
    for (_, ids), row in zip(found, ROWS, strict=True):
        assert ids == TOKENIZERS[model].apply_chat_template(
            row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False, **args
        )
        bos = TOKENIZERS[model].bos_token_id
        assert ids.count(bos) == (0 if model == "chatml" else 1)


def test_a_system_prompt_is_added_where_there_is_none_and_refused_by_row(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Mine."}, *TURNS[:1]]
    write_rows(tmp_path, [{"messages": TURNS[:1]}, {"messages": own}])
    data = PromptFile(source="chat.jsonl", system_prompt="Be brief.")
    added, kept = encoded(data, tmp_path, "llama")
    assert added[0].startswith("<bos><|h|>system<|/h|>Be brief.<|eot|><|h|>user")
    assert "Be brief." not in kept[0]
    with pytest.raises(ConfigError, match=r"chat\.jsonl:1: .*System role not supported"):
        encoded(data, tmp_path, "gemma")


def test_text_is_left_alone_unless_asked_and_never_gets_two_bos(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"prompt": "Hi"}, {"prompt": "<bos><|h|>user<|/h|>Hi<|eot|>"}])
    plain, by_hand = encoded(PromptFile(source="chat.jsonl"), tmp_path, "llama")
    bos = TOKENIZERS["llama"].bos_token_id
    assert (plain[0], plain[1].count(bos), by_hand[1].count(bos)) == ("Hi", 1, 1)
    asked = PromptFile(source="chat.jsonl", chat_template="tokenizer")
    assert encoded(asked, tmp_path, "llama")[0][1] == TOKENIZERS["llama"].apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )


def test_a_template_file_serves_a_tokenizer_without_one_and_none_refuses_messages(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    (tmp_path / "own.jinja").write_text(LLAMA)
    bare = PromptEncoder(tokenizer(None, adds_bos=True))
    (example, _) = read_examples(PromptFile(source="chat.jsonl", chat_template="own.jinja"), tmp_path)
    assert bare(example)[1] == TOKENIZERS["llama"].apply_chat_template(
        TURNS, add_generation_prompt=True, return_dict=False
    )
    (first, _) = read_examples(PromptFile(source="chat.jsonl"), tmp_path)
    with pytest.raises(ConfigError, match=r"chat\.jsonl:1: a chat template is needed"):
        bare(first)
    with pytest.raises(ConfigError, match="chat_template is none"):
        encoded(PromptFile(source="chat.jsonl", chat_template="none"), tmp_path, "llama")


def test_a_final_answer_of_the_assistant_is_refused_dropped_or_continued(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"messages": TURNS[:2]}])
    with pytest.raises(ConfigError, match=r"chat\.jsonl:1: .*end with the assistant"):
        read_examples(PromptFile(source="chat.jsonl"), tmp_path)
    dropped = encoded(PromptFile(source="chat.jsonl", final_assistant="drop"), tmp_path, "llama")
    assert dropped[0][0].endswith("5<|eot|>") is False
    assert dropped[0][0].endswith("<|h|>assistant<|/h|>")
    goes_on = encoded(PromptFile(source="chat.jsonl", final_assistant="continue"), tmp_path, "llama")
    assert goes_on[0][0].endswith("<|h|>assistant<|/h|>5")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"chat": TURNS}, "write messages_field: chat"),
        ({"messages": []}, "set data.prompt_field"),
        ({"messages": [{"role": "user"}]}, "message 1 of messages has no text"),
        ({"messages": [{"role": "user", "content": "a"}, "b"]}, "message 2 of messages has no role"),
        ({"messages": [{"role": "system", "content": "a"}]}, "no user message"),
    ],
)
def test_a_bad_row_is_told_by_its_place_with_a_remedy(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    write_rows(tmp_path, [ROWS[0], row])
    with pytest.raises(ConfigError) as caught:
        read_examples(PromptFile(source="chat.jsonl"), tmp_path)
    assert "chat.jsonl:2: " in caught.value.problem
    assert told in f"{caught.value.problem}; {caught.value.remedy}"


def test_lines_parquet_and_a_folder_of_datasets_give_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {"prompt": TURNS, "answer": "20", "level": i, "unused": "x" * 99, "share": i / 3} for i in range(5)
    ]
    write_rows(tmp_path, rows)
    (tmp_path / "set").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set" / "train.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    kept = {"columns": ["level"]}
    found = [
        read_examples(data, tmp_path)
        for data in (
            PromptFile(source="chat.jsonl", **kept),
            PromptFile(source="chat.parquet", **kept),
            PromptDataset(dataset="./set", **kept),
            PromptDataset(dataset=str(tmp_path / "saved"), **kept),
        )
    ]
    assert found[0][3].row == {"prompt": TURNS, "answer": "20", "level": 3}
    assert found == [found[0]] * 4
    assert len(read_examples(PromptDataset(dataset="./set", split="train[:2]"), tmp_path)) == 2
    with pytest.raises(ConfigError, match="split tset"):
        read_examples(PromptDataset(dataset="./set", split="tset"), tmp_path)
    with pytest.raises(ConfigError, match="no column lvl"):
        read_examples(PromptFile(source="chat.parquet", columns=["lvl"]), tmp_path)


def mixture(folder: Path) -> PromptSource:
    write_rows(folder, [{"prompt": f"a{i}"} for i in range(30)], "a.jsonl")
    write_rows(folder, [{"prompt": f"b{i}"} for i in range(6)], "b.jsonl")
    examples = read_examples(
        [
            PromptFile(source="a.jsonl", weight=1),
            PromptFile(source="b.jsonl", weight=3, reward="exact", shuffle=False),
        ],
        folder,
    )
    return PromptSource(
        examples, PromptEncoder(TOKENIZERS["chatml"]), prompts_per_step=8, max_prompt_tokens=9, seed=5
    )


def test_sources_are_mixed_by_weight_each_with_its_own_order_and_reward(tmp_path: Path) -> None:
    source = mixture(tmp_path)
    batches = [source.batch(step) for step in range(60)]
    of_b = [[p.question for p in batch if p.question.startswith("b")] for batch in batches]
    assert all(len(each) == 6 for each in of_b)  # 3 of 4, in every step
    assert of_b[0] == of_b[7] == [f"b{i}" for i in range(6)]
    of_a = [p.question for batch in batches for p in batch if p.question.startswith("a")]
    assert sorted(of_a[:30]) == sorted(of_a[30:60]) == sorted(f"a{i}" for i in range(30))
    assert of_a[:30] != of_a[30:60]
    assert {p.reward for p in batches[0]} == {None, "exact"}
    again = mixture(tmp_path)  # another process, which begins in the middle
    assert [p.question for p in again.batch(41)] == [p.question for p in batches[41]]


def test_every_source_gives_its_share_of_what_is_held_out(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"prompt": f"a{i}"} for i in range(30)], "a.jsonl")
    write_rows(tmp_path, [{"prompt": f"b{i}"} for i in range(10)], "b.jsonl")
    examples = read_examples([PromptFile(source="a.jsonl"), PromptFile(source="b.jsonl")], tmp_path)
    encode = PromptEncoder(TOKENIZERS["chatml"])
    source = PromptSource(examples, encode, prompts_per_step=4, max_prompt_tokens=9, seed=0, num_held_out=8)
    assert [p.question for p in source.held_out] == [f"a{i}" for i in range(24, 30)] + ["b8", "b9"]
    held = {p.question for p in source.held_out}
    assert not held & {p.question for step in range(40) for p in source.batch(step)}


def test_what_is_skipped_is_told_in_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(tmp_path, [{"prompt": "ab" * n} for n in (1, 2, 9)])
    examples = read_examples(PromptFile(source="chat.jsonl"), tmp_path)
    encode = PromptEncoder(TOKENIZERS["chatml"])
    PromptSource(examples, encode, prompts_per_step=1, max_prompt_tokens=4, seed=0)
    told = caplog.records[0].fields  # type: ignore[attr-defined]
    assert (told["skipped"], told["too_long"], told["longest"], told["of"]) == (1, 1, 18, 3)


def test_generated_questions_become_messages_without_their_newline(tmp_path: Path) -> None:
    data = ReasoningGym(reasoning_gym=["spell_backward"], size=1, chat_template="tokenizer")
    ((text, _),) = encoded(data, tmp_path, "chatml")
    question = read_examples(data, tmp_path)[0].row["question"]
    assert text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_each_source_is_scored_by_its_own_reward(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def one(response):\n    return 7.0\n")
    with RewardScorer(
        "r.py:one", tmp_path, timeout_s=30, log_file=tmp_path / "log", others=["exact"]
    ) as scorer:
        call = RewardCall("q", "yes", {"answer": "yes"})
        assert scorer.submit(call).result().value == 7.0
        assert scorer.submit(call, "exact").result().value == 1.0


# --- responses that sft learns -----------------------------------------------------------------------------


def learnt(data: PromptFile, folder: Path, model: str) -> list[tuple[list[int], list[int]]]:
    encoder = PromptEncoder(TOKENIZERS[model])
    return [(encoder(each)[1], encoder.response(each)) for each in read_examples(data, folder)]


@pytest.mark.parametrize("model", TOKENIZERS)
def test_prompt_and_response_are_the_whole_conversation(tmp_path: Path, model: str) -> None:
    """As TRL's SFTTrainer (1.16.0) has them for prompt and completion."""
    write_rows(tmp_path, [{"messages": TURNS[:2]}, {"messages": TURNS[:1], "answer": 5}])
    data = PromptFile(source="chat.jsonl", final_assistant="drop")
    for prompt, response in learnt(data, tmp_path, model):
        whole = TOKENIZERS[model].apply_chat_template(TURNS[:2], tokenize=True, return_dict=False)
        assert prompt + response == whole
        assert prompt == TOKENIZERS[model].apply_chat_template(
            TURNS[:1], add_generation_prompt=True, tokenize=True, return_dict=False
        )


def test_plain_text_ends_with_the_end_of_text(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"prompt": "2 + 3 = ", "solution": "5", "answer": "five"}])
    plain = TOKENIZERS["llama"]
    found = learnt(PromptFile(source="chat.jsonl", response_field="solution"), tmp_path, "llama")
    assert found == [(plain.encode("2 + 3 = "), plain.encode("5", add_special_tokens=False))]  # it has no end
    plain.eos_token = "<|eot|>"
    try:
        ((_, response),) = learnt(PromptFile(source="chat.jsonl"), tmp_path, "llama")
    finally:
        plain.eos_token = None
    assert plain.convert_ids_to_tokens(response) == [*"five", "<|eot|>"]


def test_a_row_without_a_response_is_told(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"prompt": "a", "answer": "b"}, {"prompt": "c"}])
    with pytest.raises(ConfigError, match=r"chat\.jsonl:2: no response to learn"):
        learnt(PromptFile(source="chat.jsonl"), tmp_path, "llama")


def test_a_template_that_changes_the_prompt_is_refused(tmp_path: Path) -> None:
    """This one writes that there is no thought only where none of it was written yet."""
    write_rows(tmp_path, [{"messages": TURNS[:2]}])
    data = PromptFile(source="chat.jsonl", final_assistant="drop", template_args={"enable_thinking": False})
    with pytest.raises(ConfigError, match="renders the prompt otherwise"):
        learnt(data, tmp_path, "chatml")


def test_long_responses_are_left_out_and_counted(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"prompt": "a", "answer": "b" * n} for n in (3, 9, 5)])
    encoder = PromptEncoder(TOKENIZERS["llama"])
    examples = read_examples(PromptFile(source="chat.jsonl"), tmp_path)
    settings = {"prompts_per_step": 2, "max_prompt_tokens": 9, "seed": 0, "encode_response": encoder.response}
    source = PromptSource(examples, encoder, max_response_tokens=5, **settings)
    assert (len(source), source.num_skipped) == (2, 1)
    assert sorted(len(each.response_ids) for each in source.batch(0)) == [3, 5]
    with pytest.raises(ConfigError, match="none of 3 responses has at most max_response_tokens 2"):
        PromptSource(examples, encoder, max_response_tokens=2, **settings)
