"""What the endpoint reads of a run's model: as the trainer leaves it, with transformers' own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlboost_runtime.inference.bodies import BadRequest, as_conversation
from rlboost_runtime.inference.model import NotReady, load_model
from rlboost_runtime.inference.text import Words
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.trainer.models.tiny import END_ID, make_tokenizer
from rlboost_runtime.trainer.rollout.client import keep_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def job(temperature: float = 0.7, engine: str = "transformers") -> Any:
    algorithm = SimpleNamespace(
        max_prompt_tokens=64, max_response_tokens=36, temperature=temperature, top_p=0.9
    )
    return SimpleNamespace(algorithm=algorithm, rollout=SimpleNamespace(engine=engine))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "served")
    version = folder.weights / "v000003"
    version.mkdir(parents=True)
    (version / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, END_ID]}))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    keep_tokenizer(folder, tokenizer)
    keep_tokenizer(folder, tokenizer)
    return folder


def test_nothing_is_served_before_a_version_is_published(tmp_path: Path) -> None:
    with pytest.raises(NotReady):
        load_model(RunFolder(tmp_path), job())


def test_a_model_has_its_runs_name_stops_and_context(run: RunFolder) -> None:
    model = load_model(run, job())
    assert (model.name, model.stop_token_ids, model.max_model_len) == ("served", (7, END_ID), 100)
    assert model.sampling_of(None, None, (1,)) == Sampling(0.7, 0.9, (1,), ignore_eos=True)
    assert model.sampling_of(0.0, 0.5, ()) == Sampling(0.0, 0.5, (), ignore_eos=True)
    text = "naïve ☃"
    ids = model.encode(text)
    words = Words(model)
    assert "".join(words.add([token]) for token in ids) + words.add([END_ID]) + words.flush() == text


def test_greedy_transformers_engines_take_no_temperature(run: RunFolder) -> None:
    greedy = load_model(run, job(0.0))
    assert greedy.sampling_of(None, None, ()).temperature == 0
    with pytest.raises(BadRequest, match="decodes greedily"):
        greedy.sampling_of(1.0, None, ())
    assert load_model(run, job(0.0, "vllm")).sampling_of(1.0, None, ()).temperature == 1.0


def test_a_chat_is_rendered_by_the_models_own_template(run: RunFolder) -> None:
    model = load_model(run, job())
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    ids = model.render(messages, tools, add_generation_prompt=True, continue_final_message=False)
    assert model.decode(ids, skip_special_tokens=False) == "[f]user: hi\nassistant: "
    assert model.decode(model.render(messages), skip_special_tokens=False) == "user: hi\n"
    (run.tokenizer / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(BadRequest, match="no system role"):
        load_model(run, job()).render(messages)
    (run.tokenizer / "chat_template.jinja").unlink()
    with pytest.raises(BadRequest, match="no chat template"):
        load_model(run, job()).render(messages)


def test_messages_are_as_templates_know_them() -> None:
    """Clients send the arguments of a call as text; a template that prints them as JSON would quote it."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    odd = [{**call, "function": {"name": "add", "arguments": text}} for text in ("[1]", "{", "{" * 10**5)]
    shown = as_conversation(
        [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "tool_calls": [call, *odd, "no call"], "reasoning": "so"},
            {"role": "assistant", "content": "", "tool_calls": None},
        ]
    )
    assert shown[0]["content"] == "one\ntwo"
    assert shown[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert shown[1]["tool_calls"][1:] == [*odd, "no call"]
    assert shown[1]["reasoning_content"] == "so"
    assert shown[2]["tool_calls"] is None
    assert call["function"]["arguments"] == '{"a": 2}', "the client's own message is left alone"
