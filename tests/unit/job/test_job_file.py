"""Every mistake in a job file is told in one helpful line; jobs without mistakes load as written."""

# ruff: noqa: E501 - the exact lines that people read

from __future__ import annotations

import json
import pickle
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import HttpReward, Job, PromptFile, TinyModel
from rlboost_runtime.job.file.load import JobErrors, describe_fields, hints, load_job
from rlboost_runtime.job.file.shape import sections
from rlboost_runtime.job.file.tree import MAX_NODES
from rlboost_runtime.weights.manifest import MAX_CHUNK_BYTES

ROOT = Path(__file__).resolve().parents[3]
GOOD = """\
name: good
model: {init: tiny}
data: {reasoning_gym: [spell_backward]}
"""
Check = Callable[[str], list[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n\n{"prompt": "2+2"}\n')
    (tmp_path / "rewards.py").write_text("import math as m\n\ndef score(response):\n    return m.pi\n")
    return tmp_path


@pytest.fixture
def check(folder: Path) -> Check:
    """Return the lines that a job file is answered with."""

    def lines_of(text: str) -> list[str]:
        (folder / "job.yaml").write_text(textwrap.dedent(text))
        try:
            load_job(Path("job.yaml"))
        except JobErrors as exc:
            return exc.lines
        return []

    return lines_of


# --- good files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_example_loads(example: Path) -> None:
    assert load_job(example).name


def test_a_small_job_gets_every_default(check: Check, folder: Path) -> None:
    assert check(GOOD) == []
    job = load_job(Path("job.yaml"))
    assert isinstance(job.model, TinyModel)
    assert job.algorithm.group_size == 8
    assert job.reward == "reasoning_gym"


def test_yaml_1_2_numbers_text_anchors_and_merges_work(check: Check, folder: Path) -> None:
    text = GOOD.replace("good", "2024-01-01") + textwrap.dedent("""\
        algorithm: {learning_rate: 1e-6, group_size: 0x10, steps: 1_000}
        rollout:
          spot:
            any_of:
              - &first {infra: local, price_usd_per_hour: 1}
              - {<<: *first, price_usd_per_hour: 2}
        """)
    assert check(text) == []
    job = load_job(Path("job.yaml"))
    assert job.name == "2024-01-01"
    assert (job.algorithm.learning_rate, job.algorithm.group_size, job.algorithm.steps) == (1e-6, 16, 1000)
    assert [offer.price_usd_per_hour for offer in job.rollout.spot.any_of] == [1, 2]


def test_escaped_halves_of_one_character_are_that_character(check: Check, folder: Path) -> None:
    assert check(GOOD + 'env: {A: "\\ud83d\\ude00"}\n') == []
    assert load_job(Path("job.yaml")).env == {"A": "\N{GRINNING FACE}"}


def test_own_prompts_and_reward_keep_their_names(check: Check, folder: Path) -> None:
    assert check("""\
        name: own
        model: {init: tiny, warmup: null}
        data: {source: prompts.jsonl}
        reward: rewards.py:score
        files: [rewards.py]
        """) == []  # fmt: skip
    job = load_job(folder / "job.yaml")
    assert isinstance(job.data, PromptFile)
    assert (job.data.source, job.reward, job.files) == ("prompts.jsonl", "rewards.py:score", ["rewards.py"])


def test_a_model_folder_becomes_absolute(check: Check, folder: Path) -> None:
    (folder / "my-model").mkdir()
    text = GOOD.replace("{init: tiny}", "my-model")
    assert check(text) == [
        "job.yaml:2: model: found folder my-model without config.json; write a folder in HF format"
    ]
    (folder / "my-model" / "config.json").write_text("{}")
    assert check(text) == []
    assert load_job(Path("job.yaml")).model == str(folder.resolve() / "my-model")


def test_a_hub_id_and_other_surprises_are_hints(check: Check, folder: Path) -> None:
    text = GOOD.replace("{init: tiny}", "Qwen/Qwen3-8B") + "reward: {http: 'http://127.0.0.1:9/score'}\n"
    assert check(text + "algorithm: {temperature: 0, top_p: 0.9, lora: {rank: 8}}\n") == []
    job = load_job(Path("job.yaml"))
    assert isinstance(job.reward, HttpReward)
    assert [hint.split(":")[0] for hint in hints(job)] == [
        "model", "reward", "algorithm.temperature", "algorithm.learning_rate", "algorithm.top_p",
    ]  # fmt: skip


def test_prompts_exported_from_reasoning_gym_may_use_its_scorer(check: Check, folder: Path) -> None:
    (folder / "gym.jsonl").write_text('{"prompt": "x", "metadata": {"source_dataset": "spell_backward"}}\n')
    assert check("name: a\nmodel: {init: tiny}\ndata: {source: gym.jsonl}\n") == []


# --- the file and its YAML ---------------------------------------------------------------------------------

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "1: the file is empty; write at least name, model and data"),
        ("# nothing yet\n", "1: the file is empty; write at least name, model and data"),
        ("- a\n", "1: found no fields; write `field: value` lines, at least name, model and data"),
        ("name: x\n\ty: 1\n", "2: found a tab; indent with spaces"),
        (
            "name: a\nreward: b: c\n",
            "2: found a colon where none can be; put the value in quotes, or indent the line as its section",
        ),
        ("name: a\n---\nname: b\n", "2: found a second document (---); write one job per file"),
        (
            "name: *other\n",
            "1: found undefined alias 'other'; define it with & above, or put the text in quotes",
        ),
        ("a: 1\nb: &x\n  c: *x\n", "2: found an alias of the section that it is in; write it out"),
        (
            "files: [a\n",
            "1: not YAML: expected ',' or ']', but got '<stream end>' while parsing a flow sequence;"
            " check quotes, brackets and indentation here",
        ),
        ("name: a\nb: \x07\n", "2: found a character that YAML does not allow; remove it"),
        ('name: a\nb: "\\ud800x"\n', r"2: found '\ud800x', with half a character; write all of it"),
        ('name: a\n"\\udc00": 8\n', r"2: found '\udc00', with half a character; write all of it"),
        (
            'name: a\nb: {<<: {"\\ud800": 8}}\n',
            r"2: found '\ud800', with half a character; write all of it",
        ),
        (BOMB, f"1: more than {MAX_NODES} entries; write fewer, or use fewer aliases"),
        ("[" * 600, "1: nested too deeply; write it flatter"),
    ],
)
def test_a_file_that_is_not_yaml_says_where(check: Check, text: str, line: str) -> None:
    assert check(text) == [f"job.yaml:{line}"]


def test_text_that_is_not_utf8_says_where(check: Check, folder: Path) -> None:
    (folder / "job.yaml").write_bytes(b"name: a\nmodel: \xff\n")
    with pytest.raises(JobErrors) as caught:
        load_job(Path("job.yaml"))
    assert caught.value.lines == ["job.yaml:2: not UTF-8 text; save it as UTF-8"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no.yaml", "no.yaml: no such job file"),
        (".", ".: a folder"),
        ("job.yaml/x", "job.yaml/x: no such job file"),
    ],
)
def test_a_file_that_is_not_there_is_a_config_error(check: Check, name: str, problem: str) -> None:
    check(GOOD)
    with pytest.raises(ConfigError) as caught:
        load_job(Path(name))
    assert caught.value.problem == problem
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: other\n", "4: name: already given in line 1; keep one of the two"),
        ("8: x\n", "4: 8: found 8 as a field's name; write text"),
        ("[a, b]: x\n", "4: a list or section: found a list or section as a field's name; write text"),
        ("reward: !env REWARD\n", "4: reward: found the tag !env; write the value without a tag"),
        ("weights: !!set {streams}\n", "4: weights: found the tag !!set; write the value without a tag"),
        (
            "reward_timeout_s: !!int x\n",
            "4: reward_timeout_s: found 'x', which is no int; write it without the tag",
        ),
        ("<<: 8\n", "4: <<: found << without a section to merge; write <<: *NAME"),
    ],
)
def test_odd_yaml_is_a_mistake(check: Check, text: str, line: str) -> None:
    assert check(GOOD + text) == [f"job.yaml:{line}"]


# --- one field ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "rollout:\n  spot:\n    max_instance: 3\n",
            "6: rollout.spot.max_instance: unknown field; did you mean max_instances?",
        ),
        ("algorithm: {group-size: 4}\n", "4: algorithm.group-size: unknown field; did you mean group_size?"),
        ("steps: 3\n", "4: steps: unknown field here; did you mean algorithm.steps?"),
        ("budget {max_usd: 3}\n", "4: budget {max_usd: a colon is missing after budget; write budget: ..."),
        ("budget: {eur: 3}\n", "4: budget.eur: unknown field; there are max_usd, max_usd_per_hour"),
        ("algorithm: {group_size: '8'}\n", "4: algorithm.group_size: found '8' (text); write 8"),
        (
            "algorithm: {group_size: 8.0}\n",
            "4: algorithm.group_size: found 8.0 (a number with a fraction); write 8",
        ),
        (
            "algorithm: {group_size: 8.5}\n",
            "4: algorithm.group_size: found 8.5 (a number with a fraction); write a whole number of at least 1,"
            " at most 10000",
        ),
        (
            "algorithm: {group_size: true}\n",
            "4: algorithm.group_size: found true; write a whole number of at least 1, at most 10000",
        ),
        (
            "algorithm: {group_size: 1}\n",
            "4: algorithm.group_size: is 1, but dapo compares the responses to a prompt; write at least 2",
        ),
        (
            "algorithm: {prompts_per_step: 1000000007, minibatches_per_step: 1000000006}\n",
            "4: algorithm.prompts_per_step: found 1000000007; write a whole number of at least 1, at most 1000000",
        ),
        ("algorithm: {clip_low: 1}\n", "4: algorithm.clip_low: found 1; write a number greater than 0, less than 1, or null"),
        ("algorithm: {clip_high: -1}\n", "4: algorithm.clip_high: found -1; write a number greater than 0, or null"),
        (
            "algorithm: {learning_rate: .nan}\n",
            "4: algorithm.learning_rate: found nan; write a number greater than 0, at most 10",
        ),
        (
            "algorithm: {learning_rate: 1e999}\n",
            "4: algorithm.learning_rate: found inf; write a number greater than 0, at most 10",
        ),
        ("reward_timeout_s: 10s\n", "4: reward_timeout_s: found '10s' (text); write a number greater than 0"),
        (
            "algorithm:\n  temperature:\n",
            "5: algorithm.temperature: found nothing;"
            " write a number of at least 0, or remove the line for the default 1.0",
        ),
        ("algorithm:\n", "4: algorithm: found nothing; indent its fields below it, or remove the line"),
        ("budget: 5\n", "4: budget: found 5 (a number); write a section with any of max_usd, max_usd_per_hour"),
        ("evidence: {keep_journal: yes}\n", "4: evidence.keep_journal: found 'yes' (text); write true"),
        ("algorithm: {loss: grpoo}\n", "4: algorithm.loss: found 'grpoo'; write grpo or dapo or dr_grpo"
         " or gspo or cispo or rloo or reinforce_pp or ppo or dpo or rejection or sft"),
        ("files: rewards.py\n", "4: files: found 'rewards.py' (text); write [rewards.py]"),
        ("files: [rewards.py, 8]\n", "4: files[1]: found 8 (a number); write '8'"),
        (
            "rollout: {spot: {any_of: []}}\n",
            "4: rollout.spot.any_of: found an empty list; write a list with at least one entry",
        ),
        (
            "rollout:\n  spot:\n    any_of:\n    - infra: local\n    - price_usd_per_hour: 1\n",
            "8: rollout.spot.any_of[1].infra: missing; add `infra: local`",
        ),
        (
            "rollout:\n  spot:\n    any_of:\n    - infra: local\n      market:\n        sed: 1\n",
            "9: rollout.spot.any_of[0].market.sed: unknown field; did you mean seed?",
        ),
    ],
)  # fmt: skip
def test_a_wrong_field_says_what_was_found_and_what_to_do(check: Check, text: str, line: str) -> None:
    assert check(GOOD + text) == [f"job.yaml:{line}"]


def test_long_and_many_line_text_stays_one_short_line(check: Check) -> None:
    (line,) = check(GOOD + f"reward_timeout_s: |\n  two\n  lines {'x' * 200}\n")
    assert line.startswith(r"job.yaml:4: reward_timeout_s: found 'two\nlines xxx")
    assert len(line) < 200


def test_missing_fields_point_to_their_section(check: Check) -> None:
    assert check("algorithm: {}\n") == [
        "job.yaml:1: name: missing; add `name: my-run`",
        "job.yaml:1: model: missing; add `model: {init: tiny}`",
        "job.yaml:1: data: missing; add `data: {source: prompts.jsonl}`",
    ]


@pytest.mark.parametrize("name", ["My Run", "-x", "a" * 64, "a/b", ""])
def test_a_name_that_cannot_be_a_folder_is_refused(check: Check, name: str) -> None:
    (line,) = check(GOOD.replace("good", f"'{name}'"))
    assert line.startswith("job.yaml:1: name: found '")
    assert line.endswith("; write lower-case letters, digits and dashes (at most 63), such as my-run")


# --- fields with several forms: one line per mistake -----------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("8", "model: found 8 (a number); write a folder in HF format, a Hugging Face id, or {init: tiny}"),
        ("[a]", "model: found a list; write a folder in HF format, a Hugging Face id, or {init: tiny}"),
        (
            "{}",
            "model: found an empty section; write a folder in HF format, a Hugging Face id, or {init: tiny}",
        ),
        ("{int: tiny}", "model.int: unknown field; did you mean init?"),
        ("{init: small}", "model.init: found 'small'; write tiny"),
        (
            "{init: tiny, hidden_size: 100}",
            "model.hidden_size: found 100; write a whole number of at least 32, at most 16384, a multiple of 32",
        ),
        ("{hidden_size: 64}", "model.init: missing; add `init: tiny`"),
        ("tiny", "model: found 'tiny', which is not a folder here; write {init: tiny}"),
        ("./gone", "model: found './gone', which does not exist; write a folder in HF format"),
        ("models/a/b", "model: found 'models/a/b', which does not exist; write a folder in HF format"),
        (
            "~nobody-here/a",
            "model: found '~nobody-here/a', which does not exist; write a folder in HF format",
        ),
        ("m" * 300, f"model: found '{'m' * 57}'..., which does not exist; write a folder in HF format"),
    ],
)
def test_model_has_one_message(check: Check, model: str, line: str) -> None:
    assert check(GOOD.replace("{init: tiny}", model)) == [f"job.yaml:2: {line}"]


DATA_FORMS = "{source: FILE}, {dataset: ID}, {reasoning_gym: [NAME, ...]}, or a list of them"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ("prompts.jsonl", f"data: found 'prompts.jsonl' (text); write {DATA_FORMS}"),
        ("{foo: 1}", f"data: found a section; write {DATA_FORMS}"),
        ("{sorce: prompts.jsonl}", "data.sorce: unknown field; did you mean source?"),
        ("{source: 3}", "data.source: found 3 (a number); write '3'"),
        (
            "{reasoning_gym: spell_backward}",
            "data.reasoning_gym: found 'spell_backward' (text); write [spell_backward]",
        ),
        (
            "{reasoning_gym: []}",
            "data.reasoning_gym: found an empty list; write a list with at least one entry",
        ),
        (
            "{reasoning_gym: [dice], size: 0}",
            "data.size: found 0; write a whole number of at least 1, at most 100000000",
        ),
        (
            "{reasoning_gym: [dice], config: {a: [1]}}",
            "data.config.a: found a list; write a number, text, true or false",
        ),
        (
            "{reasoning_gym: [dice, spell_backwards]}",
            "data.reasoning_gym[1]: found 'spell_backwards', no such data set; did you mean spell_backward?",
        ),
        (
            "{reasoning_gym: [spell_backward], config: {min_word_length: 3}}",
            "data.config.min_word_length: spell_backward has no such option; did you mean min_word_len?",
        ),
        (
            "{reasoning_gym: [spell_backward], config: {size: 3}}",
            "data.config.size: spell_backward has no such option; write data.size",
        ),
    ],
)
def test_data_has_one_message(check: Check, data: str, line: str) -> None:
    assert check(GOOD.replace("{reasoning_gym: [spell_backward]}", data)) == [f"job.yaml:3: {line}"]


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (
            "8",
            "found 8 (a number); write FILE.py:FUNCTION, reasoning_gym, math, exact, {http: URL}, or a list of named ones",
        ),
        (
            "{url: x}",
            "found a section; write FILE.py:FUNCTION, reasoning_gym, math, exact, {http: URL}, or a list of named ones",
        ),
        ("reasoning-gym", "found 'reasoning-gym'; did you mean reasoning_gym?"),
        ("score", "found 'score'; write FILE.py:FUNCTION or one of reasoning_gym, math, exact"),
        ("rewards:score", "found 'rewards:score'; write FILE.py:FUNCTION, such as rewards.py:score"),
        ("rewards.py", "found rewards.py without a function; write rewards.py:score"),
        (
            "rewards.py:scor",
            "found rewards.py:scor, but rewards.py has no function scor; did you mean score?",
        ),
        (
            "rewards.py:nothing",
            "found rewards.py:nothing, but rewards.py has no function nothing; write rewards.py:score",
        ),
        ("reward.py:score", "found 'reward.py', which does not exist; did you mean rewards.py?"),
        ("broken.py:score", "found broken.py:2: not Python: invalid syntax; correct it"),
        (
            "../rewards.py:score",
            "found '../rewards.py', which is not below the job file's folder; put it there",
        ),
    ],
)
def test_reward_says_what_is_wrong_with_the_function(
    check: Check, folder: Path, reward: str, problem: str
) -> None:
    (folder / "broken.py").write_text("\ndef score(:\n")
    assert check(GOOD + f"reward: {reward}\n") == [f"job.yaml:4: reward: {problem}"]


@pytest.mark.parametrize("reward", ["math", "exact"])
def test_a_reward_that_compares_answers_needs_them(check, tmp_path, reward):
    job = GOOD.replace("{reasoning_gym: [spell_backward]}", "{source: prompts.jsonl}")
    assert check(job + f"reward: {reward}\n") == []
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1"}\n')
    told = f"{reward} compares with the field answer, which prompts.jsonl lacks; add it to every line"
    assert check(job + f"reward: {reward}\n") == [f"job.yaml:4: reward: {told}"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "reward_model": {"ground_truth": "2"}}\n')
    assert check(job + f"reward: {reward}\n") == []


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http:///score", "http://[::1", "http://h:99999/x", "http://h:0", "http://a b/x"],
)
def test_a_reward_url_must_be_one(check: Check, url: str) -> None:
    line = f"job.yaml:4: reward.http: found '{url}'; write a URL such as https://HOST/score"
    assert check(GOOD + f"reward: {{http: '{url}'}}\n") == [line]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "https://[::1]:8000/score", "http://me@host/x?y=1"])
def test_reward_urls_of_any_kind_of_host_pass(check: Check, url: str) -> None:
    assert check(GOOD + f"reward: {{http: '{url}'}}\n") == []


BUCKET = "s3://BUCKET/PREFIX, gs://... or az://..."


@pytest.mark.parametrize("bucket", ["", "nonsense", "ftp://x", "http://x/y", "s3:///prefix", "file://x"])
def test_a_bucket_must_be_one_that_weights_can_lie_in(check: Check, bucket: str) -> None:
    line = f"job.yaml:4: weights.bucket: found {bucket!r}; write {BUCKET}"
    assert check(GOOD + f"weights: {{bucket: '{bucket}'}}\n") == [line]


@pytest.mark.parametrize("bucket", ["s3://b/p", "gs://b", "az://b/p", "file:///tmp/b", None])
def test_buckets_of_every_cloud_pass(check: Check, bucket: str | None) -> None:
    assert check(GOOD + f"weights: {{bucket: {bucket or 'null'}}}\n") == []


def test_a_chunk_may_be_as_large_as_a_receiver_takes(check: Check) -> None:
    assert check(GOOD + f"weights: {{chunk_bytes: {MAX_CHUNK_BYTES}}}\n") == []
    assert check(GOOD + f"weights: {{chunk_bytes: {MAX_CHUNK_BYTES + 1}}}\n") == [
        f"job.yaml:4: weights.chunk_bytes: found {MAX_CHUNK_BYTES + 1};"
        f" write a whole number of at least 65536, at most {MAX_CHUNK_BYTES}"
    ]


@pytest.mark.parametrize(
    ("section", "written"),
    [
        ("algorithm", "algorithm: {seed: SEED}"),
        ("model", "model: {init: tiny, seed: SEED}"),
        ("data", "data: {reasoning_gym: [spell_backward], seed: SEED}"),
        (
            "rollout.spot.any_of[0].market",
            "rollout: {spot: {any_of: [{infra: local, market: {seed: SEED}}]}}",
        ),
    ],
)
def test_a_seed_is_one_that_every_generator_takes(check: Check, section: str, written: str) -> None:
    kept = [line for line in GOOD.splitlines() if not line.startswith(f"{section}:")]
    text = "\n".join([*kept, written, ""])
    assert check(text.replace("SEED", str(2**63 - 1))) == []
    assert check(text.replace("SEED", str(2**63))) == [
        f"job.yaml:{len(kept) + 1}: {section}.seed: found {2**63};"
        f" write a whole number of at least 0, less than {2**63}"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "from x import score",
        "score = print",
        "try:\n    from a import score\nexcept ImportError:\n    def score(): ...",
        "if True:\n    async def score(): ...",
        "from x import *",
    ],
)
def test_a_reward_may_be_bound_in_any_way_and_is_never_run(check: Check, folder: Path, source: str) -> None:
    (folder / "rewards.py").write_text(f"{source}\nraise SystemExit('imported')\n")
    assert check(GOOD + "reward: rewards.py:score\n") == []


# --- what this version has not yet ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rollout: {engine: transformers, tensor_parallel: 2}", "rollout.tensor_parallel: is 2, but the engine transformers uses one device; write engine: vllm, or remove it"),
        (
            'rollout: {engine: vllm, tensor_parallel: 3, spot: {any_of: [{infra: aws/us-east-1, accelerators: "H100:8"}]}}',
            "rollout.tensor_parallel: is 3, which does not divide the devices of H100:8 in spot.any_of; write a number that does",
        ),
        ("rollout: {engine: sglang}", "rollout.engine: found sglang, which is not in this version yet; use transformers or vllm"),
        (
            "rollout: {engine_args: {fp8: true}}",
            "rollout.engine_args: has fp8, an option of vllm, but the engine is transformers; write engine: vllm, or remove it",
        ),
        ("weights: {transfer: lora}", "weights.transfer: found lora, but there are no adapters without algorithm.lora; write it, or another transfer"),
        (
            "trainer: {infra: kubernetes, accelerators: 'H100:8'}",
            "trainer.infra: found kubernetes, which is not in this version yet; use local, ssh, aws/REGION or gcp/REGION;"
            " with via: skypilot also azure, lambda or nebius",
        ),
    ],
)  # fmt: skip
def test_things_of_later_versions_are_named_as_such_once(check: Check, text: str, line: str) -> None:
    assert check(GOOD + text + "\n") == [f"job.yaml:4: {line}"]


REACHED = "trainer: {address: head.example.org}\n"
BOUGHT = "trainer: {infra: aws/us-east-1, accelerators: 'H100:8'}\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "trainer: {infra: aws/us-east-1}",
            "4: trainer.accelerators: is missing, but infra is aws/us-east-1; add accelerators: \"H100:8\"",
        ),
        (
            "trainer: {infra: gcp/us-east4/us-east1-b, accelerators: 'H100:8'}",
            "4: trainer.infra: gcp/us-east4/us-east1-b names a zone that is not in us-east4; write gcp/us-east4/us-east4-a, or gcp/us-east4 for all its zones",
        ),
        (
            "trainer: {infra: aws, accelerators: 'H100:8'}",
            "4: trainer.infra: aws cannot be bought direct; write aws/REGION or gcp/REGION, or via: skypilot",
        ),
        (
            "trainer: {infra: runpod, accelerators: 'H100:8', via: skypilot}",
            "4: trainer.infra: found runpod, which is not in this version yet; use local, ssh, aws/REGION or"
            " gcp/REGION; with via: skypilot also azure, lambda or nebius",
        ),
        (
            "trainer: {infra: lambda, accelerators: 'H100:8', via: skypilot}",
            "4: trainer.infra: lambda is a cloud in which a head cannot end itself without your account's key,"
            " which stays on your machine: while that is off it costs until you end it; write aws or gcp,"
            " or allow_unended: true",
        ),
        (
            "trainer: {infra: gcp, accelerators: 'H100:8', via: skypilot, role: me}",
            "4: trainer.role: is me, but SkyPilot gives machines of gcp a role of its own; remove it",
        ),
        (
            "trainer: {infra: aws/us-east-1, accelerators: 'H100:8', allow_unended: true}",
            "4: trainer.allow_unended: is for via: skypilot, but via is direct; remove it",
        ),
        (
            "trainer: {via: skypilot}",
            "4: trainer.via: is for a head that is bought, but infra is local; write infra: aws/REGION, or remove it",
        ),
        (
            "trainer: {infra: aws, role: head, accelerators: 'H100:8', via: skypilot, nodes: 2}",
            "4: trainer.nodes: is 2, which are bought via: direct only: SkyPilot puts each cluster where it finds"
            " capacity, not beside the head",
        ),
        (
            "trainer: {infra: aws/us-east-1, accelerators: 'H100:8', nodes: 2, local_engines: 0}",
            "4: trainer.nodes: is 2, but local_engines is 0: a node's engines are how the head knows that it lives;"
            " write at least 1",
        ),
        (
            "trainer: {infra: aws/us-east-1, accelerators: 'H100:8', nodes: 2, node_address: 'a:1'}",
            "4: trainer.node_address: is for nodes that you start; those that are bought find the head: remove it",
        ),
        (
            "trainer: {infra: aws/us-east-1, accelerators: 'H100:8', nodes: 2,"
            " node_offer: {infra: aws/us-east-1, accelerators: 'H100:8'}}",
            "4: trainer.node_offer: is for infra: local, but infra is aws/us-east-1, whose nodes are like the head;"
            " remove it",
        ),
        (
            "trainer: {infra: aws/us-east-1, accelerators: 'H100:8', price_usd_per_hour: 9.0}",
            "4: trainer.price_usd_per_hour: is for a machine of your own, but infra is aws/us-east-1; write infra: ssh, or remove it",
        ),
        (
            "trainer: {image: ami-1}",
            "4: trainer.image: is for a head that is bought, but infra is local; write infra: aws/REGION, or remove it",
        ),
        (
            "trainer: {infra: ssh, hosts: [me@a], role: x}",
            "4: trainer.role: is for a head that is bought, but infra is ssh; write infra: aws/REGION, or remove it",
        ),
        (
            "after: {done: stay}",
            "4: after: is for a head that is bought in a cloud, but trainer.infra is local: that machine stays as it is; remove it",
        ),
        (
            BOUGHT + "output: /mnt/runs",
            "5: output: is /mnt/runs, and the head ends itself after the run, with the model on its disk; write output:"
            " s3://BUCKET/PREFIX; or leave time to fetch it with rlboost down: after: {idle_minutes: 240};"
            " or keep the head: after: {done: stay}",
        ),
    ],
)  # fmt: skip
def test_a_head_that_is_bought_says_what_is_bought_and_what_becomes_of_it(
    check: Check, text: str, line: str
) -> None:
    assert check(GOOD + text + "\n") == [f"job.yaml:{line}"]


@pytest.mark.parametrize(
    "text",
    [
        "output: s3://bucket/runs",
        "after: {idle_minutes: 240}",
        "after: {done: stay}",
    ],
)
def test_a_bought_head_may_end_itself_where_the_model_is_kept_or_somebody_was_told(
    check: Check, text: str
) -> None:
    assert check(GOOD + BOUGHT + text + "\n") == []


@pytest.mark.parametrize(
    "trainer",
    [
        "{infra: aws/us-east-1, accelerators: 'H100:8', nodes: 2}",
        "{infra: gcp/us-central1, accelerators: 'H100:8', nodes: 2}",
        "{nodes: 2, node_offer: {infra: aws/us-east-1, accelerators: 'H100:8', via: direct}}",
    ],
)
def test_the_nodes_of_a_trainer_are_bought_beside_its_head(check: Check, trainer: str) -> None:
    assert check(GOOD + f"trainer: {trainer}\noutput: s3://bucket/runs\n") == []


@pytest.mark.parametrize(
    "head", ["infra: aws, role: head", "infra: gcp/us-central1", "infra: lambda, allow_unended: true"]
)
def test_through_skypilot_a_head_is_bought_where_it_can_end_itself_or_where_that_is_accepted(
    check: Check, head: str
) -> None:
    trainer = f"trainer: {{{head}, accelerators: 'H100:8', via: skypilot}}\n"
    assert check(GOOD + trainer + "output: s3://bucket/runs\n") == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trainer: {infra: ssh}", "trainer.hosts: is missing, but infra is ssh; add hosts: [ME@MACHINE]"),
        (
            "trainer: {hosts: [me@a]}",
            "trainer.hosts: is for a head elsewhere, but infra is local; write infra: ssh, or remove it",
        ),
        (
            "trainer: {infra: ssh, hosts: [me@a], nodes: 2, node_address: 'a:1'}",
            "trainer.nodes: is 2, but a head by ssh is one machine; write 1, or start RLBoost on the head itself,"
            " with infra: local",
        ),
        (
            "trainer: {node_offer: {infra: aws/us-east-1, accelerators: 'H100:8', via: direct}}",
            "trainer.node_offer: is for nodes beside the head, but nodes is 1; write nodes: 2",
        ),
        (
            "requirements: [sympy]",
            "requirements: are for a head elsewhere, but trainer.infra is local: rewards run in this Python; install them here, and remove it",
        ),
        ("secrets: ['MY KEY']", "secrets: has 'MY KEY', no name of a variable; write one like HF_TOKEN"),
        ('env: {A: "b\\0c"}', "env: has A with a NUL, which ends every value; remove it"),
        ("secrets: [A]\nenv: {A: b}", "secrets: has A, and so has env; remove one of them"),
    ],
)  # fmt: skip
def test_a_head_elsewhere_needs_a_place_and_what_it_alone_has_is_refused_here(
    check: Check, text: str, line: str
) -> None:
    assert check(GOOD + text + "\n") == [f"job.yaml:4: {line}"]


@pytest.mark.parametrize(
    ("offer", "line"),
    [
        (
            "{infra: lambda/x, accelerators: 'H100:2', via: direct}",
            "rollout.spot.any_of[0].infra: lambda/x cannot be used direct; write aws/REGION or gcp/REGION, or via: skypilot",
        ),
        (
            "{infra: aws/us-east-2}",
            "rollout.spot.any_of[0].accelerators: missing; add `accelerators: \"H100:8\"`",
        ),
        (
            "{infra: aws/us-east-2, accelerators: '8 H100'}",
            "rollout.spot.any_of[0].accelerators: found '8 H100'; write a GPU and how many per machine, such as H100:8",
        ),
        (
            "{infra: aws/us-east-2, accelerators: 'H100:8', max_price_usd: 20.0}",
            "rollout.spot.any_of[0].max_price_usd: unknown field; did you mean max_price_usd_per_hour?",
        ),
        (
            "{infra: aws/us-east-1/us-east-2a, accelerators: 'H100:8', via: direct}",
            "rollout.spot.any_of[0].infra: aws/us-east-1/us-east-2a names a zone that is not in us-east-1; write aws/us-east-1/us-east-1a, or aws/us-east-1 for all its zones",
        ),
        (
            "{infra: gcp/us-central1/a, accelerators: 'H100:8'}",
            "rollout.spot.any_of[0].infra: gcp/us-central1/a names a zone that is not in us-central1; write gcp/us-central1/us-central1-a, or gcp/us-central1 for all its zones",
        ),
        ("{infra: ssh}", "rollout.spot.any_of[0].hosts: missing; add `hosts: [ME@MACHINE]`"),
        (
            "{infra: mycloud, accelerators: 'H100:8'}",
            "rollout.spot.any_of[0].infra: found 'mycloud'; write local, ssh, or CLOUD/REGION such as aws/us-east-2",
        ),
    ],
)  # fmt: skip
def test_an_offer_of_a_cloud_is_checked_as_what_it_was_meant_to_be(
    check: Check, offer: str, line: str
) -> None:
    assert check(GOOD + f"rollout: {{spot: {{any_of: [{offer}]}}}}\n") == [f"job.yaml:4: {line}"]


@pytest.mark.parametrize(
    ("infra", "gpus", "field", "words"),
    [
        ("aws/us-esat-1", "H100:8", "infra", "aws has no region us-esat-1; did you mean us-east-1"),
        ("aws/us-east1", "H100:8", "infra", "aws has no region us-east1; did you mean us-east-1"),
        ("gcp/us-east-1", "H100:8", "infra", "gcp has no region us-east-1; did you mean us-east1"),
        ("aws/atlantis", "H100:8", "infra", "aws has no region atlantis; write one such as us-east-1"),
        ("aws/us-east-1", "H1000:8", "accelerators", "no GPU is called H1000; did you mean H100"),
        ("runpod/US", "A100-40GB", "accelerators", "no GPU is called A100-40GB; did you mean A100-80GB"),
    ],
)  # fmt: skip
def test_regions_and_gpus_that_do_not_exist_are_refused_with_the_nearest(
    check: Check, infra: str, gpus: str, field: str, words: str
) -> None:
    offer = f"{{infra: {infra}, accelerators: '{gpus}'}}"
    (line,) = check(GOOD + REACHED + f"rollout: {{spot: {{any_of: [{offer}]}}}}\n")
    assert f"rollout.spot.any_of[0].{field}: {words}" in line


def test_the_head_s_region_is_checked_too(check: Check) -> None:
    head = "trainer: {infra: aws/us-esat-1, accelerators: 'H100:8'}\noutput: s3://b/p\n"
    spot = "rollout: {spot: {any_of: [{infra: aws/us-east-1, accelerators: 'H100:8'}]}}\n"
    (line,) = check(GOOD + head + spot)
    assert "trainer.infra: aws has no region us-esat-1; did you mean us-east-1" in line


@pytest.mark.parametrize(
    ("infra", "gpus", "hint"),
    [
        ("runpod/US", "H100:8", "infra: the regions of runpod are not listed in this version: not checked"),
        ("aws/us-east-3", "H100:8", "infra: aws has no region us-east-3 that this version knows; did you mean"),
        ("aws", "Z9000:8", "accelerators: Z9000 is no GPU that this version knows: not checked"),
        ("aws/us-east-2", "h100:8", None),
        ("lambda", "tpu-v6e-8", None),
    ],
)  # fmt: skip
def test_what_may_be_newer_than_the_lists_passes_with_a_note(
    check: Check, tmp_path: Path, infra: str, gpus: str, hint: str | None
) -> None:
    text = GOOD + REACHED + f"rollout: {{spot: {{any_of: [{{infra: {infra}, accelerators: '{gpus}'}}]}}}}\n"
    assert check(text) == []
    found = [each for each in hints(load_job(tmp_path / "job.yaml")) if "any_of" in each]
    assert len(found) == (hint is not None)
    assert not hint or found[0].startswith(f"rollout.spot.any_of[0].{hint}")


def test_offers_of_several_kinds_stand_side_by_side(check: Check) -> None:
    offers = (
        "[{infra: local}, {infra: ssh, hosts: [me@a]}, {infra: gcp/us-central1, accelerators: L4},"
        " {infra: aws/us-east-2, accelerators: 'H100:8', via: direct, max_price_usd_per_hour: 14.0}]"
    )
    assert check(GOOD + REACHED + f"rollout: {{spot: {{any_of: {offers}}}}}\n") == []


@pytest.mark.parametrize(
    ("trainer", "rollout", "words"),
    [
        ("ranks: 8", "{}", []),
        ("ranks: 4", "{}", ["trainer.ranks: 4 of H100:8 train, the others are paid for too; write 8"]),
        (
            "ranks: 8, local_engines: 3",
            "{engine: vllm, tensor_parallel: 4}",
            ["trainer.local_engines: 3 of 4 GPUs each are more than H100:8 has; write at most 2"],
        ),
    ],
)
def test_gpus_of_a_bought_head_that_would_do_nothing_are_named(
    check: Check, folder: Path, trainer: str, rollout: str, words: list[str]
) -> None:
    text = f"trainer: {{infra: aws/us-east-1, accelerators: 'H100:8', {trainer}}}\nrollout: {rollout}\n"
    text += "output: s3://bucket/runs\n"
    assert check(GOOD + text) == []
    assert hints(load_job(folder / "job.yaml")) == words


# --- fields that disagree, and what they name on disk ---------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "algorithm: {prompts_per_step: 10, minibatches_per_step: 3}",
            "algorithm.minibatches_per_step: 3 does not divide prompts_per_step 10 (10 = 3 x 3 + 1); write 2",
        ),
        (
            "algorithm: {prompts_per_step: 2, minibatches_per_step: 3}",
            "algorithm.minibatches_per_step: 3 does not divide prompts_per_step 2 (2 = 0 x 3 + 2); write 2",
        ),
        (
            "algorithm: {prompts_per_step: 999983, minibatches_per_step: 999999999999}",
            "algorithm.minibatches_per_step: 999999999999 does not divide prompts_per_step 999983"
            " (999983 = 0 x 999999999999 + 999983); write 999983",
        ),
        (
            "algorithm: {max_response_tokens: 8, overlong_penalty_tokens: 8}",
            "algorithm.overlong_penalty_tokens: 8 is not less than max_response_tokens 8; write at most 7",
        ),
        (
            "rollout: {spot: {min_instances: 4}}",
            "rollout.spot.min_instances: 4 exceeds max_instances 3; write at most 3, or raise max_instances",
        ),
        (
            "{trainer: {local_engines: 0}, rollout: {spot: {max_instances: 0}}}",
            "trainer.local_engines: 0 reserved engines + 0 rollout.spot.max_instances = no engine generates;"
            " raise one of them",
        ),
    ],
)
def test_fields_that_disagree_show_the_arithmetic(check: Check, text: str, line: str) -> None:
    if text.startswith("{trainer"):
        text = "trainer: {local_engines: 0}\nrollout: {spot: {max_instances: 0}}"
    assert check(GOOD + text + "\n") == [f"job.yaml:4: {line}"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "found 'mine.jsonl', which does not exist; write a JSON-lines or .parquet file"),
        ("", "found mine.jsonl, which is empty; write a JSON-lines or .parquet file"),
        ("\n \n", "found mine.jsonl without a single prompt; write one JSON object per line"),
        ('{"prompt": "a"}\nb\n', "found mine.jsonl:2: not JSON; write one JSON object per line"),
        ('"a"\n', "found mine.jsonl:1: 'a'; write one JSON object per line"),
        (
            '{"prompts": "a"}\n',
            "found mine.jsonl:1: no text in field prompt (fields: prompts); set prompt_field: prompts",
        ),
        (
            '{"prompt": 1}\n',
            "found mine.jsonl:1: no text in field prompt (fields: prompt); set data.prompt_field",
        ),
        ('{"prompt": "", "messages": [{"role": "user", "content": "a"}]}\n', None),
        (
            '{"chat": [{"role": "user", "content": "a"}]}\n',
            "found mine.jsonl:1: no prompt in field prompt (fields: chat); write messages_field: chat",
        ),
        (
            '{"prompt": "a"}\n{"promt": "a"}\n',
            "found mine.jsonl:2: no text in field prompt (fields: promt); correct this line: those before it"
            " have prompt",
        ),
        ('{"q": "a"}\n', "found mine.jsonl:1: no text in field prompt (fields: q); set data.prompt_field"),
    ],
)
def test_a_prompt_file_must_hold_prompts(
    check: Check, folder: Path, content: str | None, problem: str | None
) -> None:
    if content is not None:
        (folder / "mine.jsonl").write_text(content)
    text = "name: a\nmodel: {init: tiny}\ndata:\n  source: mine.jsonl\nreward: rewards.py:score\n"
    assert check(text) == ([f"job.yaml:4: data.source: {problem}"] if problem else [])


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("def score(response, row, *, strict=True): return 1", None),
        ("async def score(responses, **more): return []", None),
        ("@wraps\ndef score(completion): return 1", None),
        (
            "def score(completion, row): return 1",
            "found mine.py:1: score takes completion, but a reward gets prompt, response, row; correct it",
        ),
        (
            "\ndef score(responses, response, gold): return 1",
            "found mine.py:2: score takes response, gold, but a reward gets prompt, responses, row;"
            " correct it",
        ),
    ],
)
def test_a_rewards_parameters_are_checked(
    check: Check, folder: Path, function: str, problem: str | None
) -> None:
    (folder / "mine.py").write_text(function + "\n")
    (folder / "mine.jsonl").write_text('{"prompt": "a"}\n')
    text = "name: a\nmodel: {init: tiny}\ndata: {source: mine.jsonl}\nreward: mine.py:score\n"
    assert check(text) == ([f"job.yaml:4: reward: {problem}"] if problem else [])


def test_the_field_of_the_answers_is_not_guessed_to_be_the_prompts(check: Check, folder: Path) -> None:
    (folder / "mine.jsonl").write_text('{"task": "a", "answer": "b"}\n')
    text = "name: a\nmodel: {init: tiny}\ndata: {source: mine.jsonl, prompt_field: answer_text}\n"
    (line,) = check(text + "reward: rewards.py:score\n")
    assert line.endswith("no text in field answer_text (fields: answer, task); set data.prompt_field")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{source: prompts.jsonl, weight: 2, reward: math}", None),
        ("{source: prompts.jsonl, wieght: 2}", "data[1].wieght: unknown field; did you mean weight?"),
        ("{source: no.jsonl}", "data[1].source: found 'no.jsonl', which does not exist; write a JSON-lines"),
        (
            "{source: prompts.jsonl, chat_template: tokeniser}",
            "data[1].chat_template: found tokeniser, which",
        ),
        ("{source: prompts.jsonl, chat_template: none, system_prompt: x}", "data[1].system_prompt: is for a"),
        ("{dataset: ./nowhere}", "data[1].dataset: found ./nowhere, which is not a folder here"),
        ("nothing", "data[1]: found 'nothing' (text); write {source: FILE}, {dataset: ID} or"),
    ],
)
def test_several_sources_are_checked_each(check: Check, source: str, problem: str | None) -> None:
    text = f"name: a\nmodel: {{init: tiny}}\ndata:\n- {{dataset: me/mine, subset: main}}\n- {source}\n"
    found = check(text + "reward: rewards.py:score\n")
    assert len(found) == (0 if problem is None else 1)
    assert problem is None or found[0].startswith(f"job.yaml:5: {problem}")


def test_own_prompts_need_an_own_reward(check: Check) -> None:
    problem = "reasoning_gym cannot score prompts.jsonl, whose lines name no data set; write FILE.py:FUNCTION"
    text = "name: a\nmodel: {init: tiny}\ndata: {source: prompts.jsonl}\n"
    assert check(text) == [f"job.yaml:1: reward: {problem}"]
    assert check(text + "reward: reasoning_gym\n") == [f"job.yaml:4: reward: {problem}"]


def test_files_and_traces_must_be_there_below_the_job_file(check: Check, folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "trace.csv").write_text("0,add,a\n5000,remove,a\n")
    (folder / "sub" / "bad.csv").write_text("0,add,a\n5000,remove,b\n")
    assert check(
        GOOD
        + textwrap.dedent("""\
            files:
            - rewards.py
            - reward.py
            - sub
            - /etc/hosts
            rollout:
              spot:
                any_of:
                - {infra: local, market: {trace: sub/trace.csv}}
                - {infra: local, market: {trace: sub/traces.csv}}
                - {infra: local, market: {trace: sub/bad.csv}}
            """)
    ) == [
        "job.yaml:6: files[1]: found 'reward.py', which does not exist; did you mean rewards.py?",
        "job.yaml:7: files[2]: found 'sub', which is a folder; write a file",
        "job.yaml:8: files[3]: found '/etc/hosts', which is not below the job file's folder; put it there",
        "job.yaml:13: rollout.spot.any_of[1].market.trace: found 'sub/traces.csv', which does not exist;"
        " did you mean sub/trace.csv?",
        "job.yaml:14: rollout.spot.any_of[2].market.trace: sub/bad.csv:2: `b` is removed but never came;"
        " add it in an earlier row, or delete this one",
    ]


def test_a_name_that_no_file_can_have_is_one_that_does_not_exist(check: Check) -> None:
    name = "a" * 300
    places = {
        "data.source": f"data: {{source: {name}}}",
        "reward": f"reward: {name}.py:score",
        "files[0]": f"files: [{name}]",
        "trainer.script": f"trainer: {{script: {name}}}",
        "rollout.spot.any_of[0].market.trace": f"rollout: {{spot: {{any_of: [{{infra: local, market: {{trace: {name}}}}}]}}}}",
    }
    found = check("name: a\nmodel: {init: tiny}\n" + "".join(f"{text}\n" for text in places.values()))
    assert [line.split(" found ")[0] for line in found] == [
        f"job.yaml:{number}: {field}:" for number, field in enumerate(places, 3)
    ]
    assert all("which does not exist; write a" in line for line in found)


# --- all of it ---------------------------------------------------------------------------------------------


def test_all_mistakes_come_at_once_in_the_order_of_lines(check: Check, folder: Path) -> None:
    lines = check("""\
        name: My Run
        model: {init: tiny, hidden_size: 100}
        data: {source: none.jsonl}
        reward: rewards.py:scor
        algorithm:
          group_size: '8'
          loss: gpo
          group_size: 8
        rollout:
          spot:
            max_instance: 3
        files: [gone.txt]
        """)
    assert [line.split(": ")[0] + " " + line.split(": ")[1] for line in lines] == [
        "job.yaml:1 name",
        "job.yaml:2 model.hidden_size",
        "job.yaml:3 data.source",
        "job.yaml:4 reward",
        "job.yaml:6 algorithm.group_size",
        "job.yaml:7 algorithm.loss",
        "job.yaml:8 algorithm.group_size",
        "job.yaml:11 rollout.spot.max_instance",
        "job.yaml:12 files[0]",
    ]


def test_the_error_tells_how_to_go_on_and_survives_pickling(check: Check) -> None:
    check("name: 8\n")
    with pytest.raises(JobErrors) as caught:
        load_job(Path("job.yaml"))
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.lines == caught.value.lines
    assert error.problem == "\n".join(error.lines)
    assert error.remedy == "correct the file, then run `rlboost check job.yaml`"
    assert error.exit_code == 2


def test_every_field_is_described_with_a_type_and_a_default() -> None:
    fields = describe_fields()
    for field in fields:
        assert field.doc.endswith("."), f"{field.path} needs a docstring"
        assert field.type
    assert len({(field.path, field.form) for field in fields}) == len(fields)
    by_path = {field.path: field for field in fields}
    assert by_path["algorithm.group_size"][:4] == (
        "algorithm.group_size", "a whole number of at least 1, at most 10000", "8",
        "Responses per prompt; at least 2, but for ppo, which compares no responses.",
    )  # fmt: skip
    assert by_path["name"].default == "required"
    assert by_path["rollout.spot.any_of[].market.seed"].default == "0"
    names = {(*path, name) for path, model in sections() for name in model.model_fields}
    assert len(names) == len(by_path)


def test_prompts_elsewhere_may_be_read_in_place(check: Check) -> None:
    text = GOOD.replace("{reasoning_gym: [spell_backward]}", "{source: /data/prompts.jsonl}")
    (line,) = check(text)
    assert "put it there, or write dataset: FOLDER, which is read in place" in line


def test_forms_of_a_section_are_described_apart() -> None:
    """Nothing of an SSH host is said of a machine of this computer."""
    path = "rollout.spot.any_of[].accelerators"
    forms = {field.form: field for field in describe_fields() if field.path == path}
    assert [(field.default, field.doc.split()[0]) for field in forms.values()] == [
        ("cpu", "What"),
        ("null", "GPU"),
        ("required", "GPU"),
    ]
    page = (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8")
    kinds = page.partition("### `rollout.spot.any_of[]`")[2].partition("###")[0]
    assert kinds.count("| `accelerators` |") == 3
    assert kinds.count("| field | value |") == 3


SSH = "rollout: {spot: {any_of: [{infra: ssh, hosts: [HOSTS]}]}}\n"
A_HOST = "write USER@HOST, USER@HOST:PORT, or a name from ~/.ssh/config"


@pytest.mark.parametrize("host", ["a b", "a:99999", "-oProxyCommand=x", "a:0", "me@", ""])
def test_what_is_no_host_is_refused_before_anything_is_launched(check: Check, host: str) -> None:
    """A run whose machines cannot even be named cannot be ended either."""
    found = f"5: rollout.spot.any_of[0].hosts[0]: found {host!r}; {A_HOST}"
    assert check(GOOD + REACHED + SSH.replace("HOSTS", f"'{host}'")) == [f"job.yaml:{found}"]


@pytest.mark.parametrize("host", ["me@a:22", "a.example.org", "gpu_1", "me@[fe80::1]:2222", "10.0.0.1"])
def test_what_ssh_takes_for_a_host_is_one(check: Check, host: str) -> None:
    assert check(GOOD + REACHED + SSH.replace("HOSTS", f"'{host}'")) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            SSH.replace("HOSTS", "me@a"),
            "1: trainer.address: missing, though machines of ssh are to reach the head, this machine; add its"
            " name or IP address, or a trainer.infra that they reach",
        ),
        (
            REACHED + SSH.replace("HOSTS", "a, a"),
            "5: rollout.spot.any_of[0].hosts: has a twice, but is one machine each; remove one",
        ),
        (
            "trainer: {infra: aws/us-east-1, accelerators: 'H100:8', ranks: 16}\noutput: s3://b/p\n",
            "4: trainer.ranks: is 16, one per GPU, but H100:8 has 8; write at most that",
        ),
        (
            "trainer: {infra: ssh, hosts: [a, b]}\n",
            "4: trainer.hosts: found a list; write exactly one host, such as [ME@MACHINE]",
        ),
        (
            "trainer: {address: 'http://x:80'}\n",
            "4: trainer.address: found 'http://x:80'; write a name or an IP address, without scheme and port; or"
            " null",
        ),
        (
            "reward: {http: 'https://h/x', model: m}\n",
            "4: reward.model: is m, but speaks is plain; write speaks: chat, or remove it",
        ),
        (
            "reward: {http: 'http://u:p@h/x'}\n",
            "4: reward.http: found a URL with a password, which everyone can read; name its variable: key_variable",
        ),
        ("secrets: [A, A]\n", "4: secrets: has A twice; remove one"),
        (
            "env: {RLBOOST_HOME: x}\n",
            "4: env: has RLBOOST_HOME, which RLBoost sets for its own processes; remove it",
        ),
        (
            "rollout: {spot: {max_instances: 1000000000}}\n",
            "4: rollout.spot.max_instances: found 1000000000; write a whole number of at least 0, at most 10000",
        ),
        (
            "budget: {max_usd: 1.0e300}\n",
            "4: budget.max_usd: found 1e+300; write a number greater than 0, at most 1000000000, or null",
        ),
        (
            "output: s3://B_ad..Bucket/x\n",
            "4: output: found 's3://B_ad..Bucket/x'; write s3://BUCKET/PREFIX, gs://..., az://..., or a folder by"
            " its whole path, such as /mnt/runs",
        ),
    ],
)
def test_what_would_fail_once_it_costs_money_is_refused(check: Check, text: str, line: str) -> None:
    assert check(GOOD + text) == [f"job.yaml:{line}"]


def test_an_evaluation_leaves_prompts_to_train_on(check: Check) -> None:
    data = "name: a\nmodel: {init: tiny}\ndata: {reasoning_gym: [dice], size: 32}\n"
    (line,) = check(data + "evaluation: {prompts: 32}\n")
    assert line.endswith("is 32, which leaves none of data.size 32 to train on; write at most 31")
    assert check(data + "evaluation: {prompts: 31}\n") == []


@pytest.mark.parametrize(
    ("evaluation", "problem"),
    [
        ("[{prompts: 3}, {name: b, reasoning_gym: [spell_backward]}]",
         "evaluation: has several entries, one of them without a name; add name: NAME"),
        ("[{name: b, prompts: 3}, {name: b, reasoning_gym: [spell_backward]}]",
         "evaluation: has b twice; each needs a name of its own"),
        ("[{name: b}, {name: c}]",
         "evaluation: holds prompts of the training data out twice; give all entries but one a source,"
         " dataset or reasoning_gym"),
        ("{reasoning_gym: [spell_backward], weight: 3}",
         "evaluation.weight: is for prompts that are trained on; remove it"),
        ("{sorce: a.jsonl}", "evaluation.sorce: unknown field; did you mean source?"),
        ("{source: a.jsonl}",
         "evaluation.source: found 'a.jsonl', which does not exist; write a JSON-lines or .parquet file"),
        ("{samples: 4, pass_at: [8]}", "evaluation.pass_at: has 8, but samples is 4; raise samples"),
        ("{pass_at: [16]}", "evaluation: asks for pass@16 of 8 samples; write samples: 16"),
        ("{name: A}", "evaluation.name: found 'A'; write lower-case letters, digits, - and _ (at most 32), a"
         " letter first, such as aime24"),
        ("[{name: x, samples: two}]", "evaluation[0].samples: found 'two' (text); write a whole number of at"
         " least 1, at most 1024, or null"),
        ("[{name: x, reasoning_gym: [spel_backward]}]", "evaluation[0].reasoning_gym[0]: found 'spel_backward',"
         " no such data set; did you mean spell_backward?"),
    ],
)  # fmt: skip
def test_an_evaluation_is_checked_like_the_training_data(check: Check, evaluation: str, problem: str) -> None:
    job = "name: a\nmodel: {init: tiny}\ndata: {reasoning_gym: [spell_backward]}\n"
    assert check(job + f"evaluation: {evaluation}\n") == [f"job.yaml:4: {problem}"]


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("[{name: a, python: exact}, {name: a, python: math}]",
         "reward: has a twice; give each a name of its own"),
        ("[{name: a, pyton: exact}]", "reward[0].pyton: unknown field; did you mean python?"),
        ("[{name: A, python: exact}]", "reward[0].name: found 'A'; write lower-case letters, digits, - and _"
         " (at most 32), a letter first, such as format"),
        ("[{name: a, python: missing.py:score}]",
         "reward[0].python: found 'missing.py', which does not exist; write a Python file"),
        ("[{name: a, http: 'ftp://x'}]",
         "reward[0].http: found 'ftp://x'; write a URL such as https://HOST/score"),
    ],
)  # fmt: skip
def test_each_of_several_rewards_is_checked(check: Check, reward: str, problem: str) -> None:
    job = "name: a\nmodel: {init: tiny}\ndata: {reasoning_gym: [spell_backward]}\n"
    assert check(job + f"reward: {reward}\n") == [f"job.yaml:4: {problem}"]


def test_evaluations_are_read_in_every_form() -> None:
    base = {"name": "a", "model": {"init": "tiny"}, "data": {"reasoning_gym": ["spell_backward"]}}

    def read(evaluation: object) -> Job:
        return Job.model_validate_json(json.dumps(base | {"evaluation": evaluation}))

    job = read({"every_steps": 5, "prompts": 8})
    assert (job.held_out and job.held_out.prompts, job.max_context_tokens) == (8, 512 + 4096)
    assert [updates for updates in range(13) if job.evaluations[0].is_due(updates, 12)] == [0, 5, 10, 12]
    job = read([{"name": "x", "source": "x.jsonl", "max_tokens": 9000, "at_start": False, "every_steps": 3},
                {"name": "y", "at_end": False, "every_steps": None, "prompts": 2}])  # fmt: skip
    assert [job.evaluations[0].is_due(n, 7) for n in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert [job.evaluations[1].is_due(n, 7) for n in range(8)] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert job.max_context_tokens == 512 + 9000
    assert Job.model_validate_json(job.canonical_json()) == job


def test_an_evaluation_leaves_lines_of_a_prompt_file_to_train_on(check: Check, folder: Path) -> None:
    (folder / "few.jsonl").write_text('{"prompt": "a", "answer": "1"}\n' * 3 + "\n")
    text = (
        "name: a\nmodel: {init: tiny}\ndata: {source: few.jsonl}\nreward: exact\nevaluation: {prompts: NUM}\n"
    )
    assert check(text.replace("NUM", "3")) == [
        "job.yaml:5: evaluation.prompts: found 3, which leaves none of the 3 in few.jsonl to train on; write less"
    ]
    assert check(text.replace("NUM", "2")) == []


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        ("{min_word_len: 3, max_word_len: 8}", []),
        ("{min_word_len: '3'}", ["data.config.min_word_len: found '3'; write a whole number"]),
        ("{min_word_len: 2.5}", ["data.config.min_word_len: found 2.5; write a whole number"]),
        ("{min_word_len: true}", ["data.config.min_word_len: found true; write a whole number"]),
    ],
)
def test_options_of_a_data_set_have_its_types(check: Check, config: str, problems: list[str]) -> None:
    text = f"name: a\nmodel: {{init: tiny}}\ndata: {{reasoning_gym: [spell_backward], config: {config}}}\n"
    assert check(text) == [f"job.yaml:3: {problem}" for problem in problems]
