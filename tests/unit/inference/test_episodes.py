"""What is recorded of an episode: samples that are exactly what was sampled, whatever a template does."""

from __future__ import annotations

from array import array
from typing import Any

import jinja2
import numpy as np
import pytest

from rlboost_runtime.inference.bodies import BadRequest, SamplingBody
from rlboost_runtime.inference.episodes import (
    Episode,
    EpisodeOpening,
    EpisodeRecord,
    Episodes,
    RecordedSample,
)

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRIPS_THINKING = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
"""As Qwen3's: what the assistant thought in earlier turns is left out."""
TRIMS = PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}")
"""As Llama 3's: every message is stripped."""


def encode(text: str) -> list[int]:
    return [ord(each) for each in text]


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


class Talk:
    """An episode as a chat client leads it, with the test as the model."""

    def __init__(self, template: str) -> None:
        self._template = jinja2.Template(template)
        self.episode = Episode(EpisodeOpening("e", "o", "k", 0, 99))
        self.messages: list[dict[str, Any]] = []
        self.sampled = ""

    def ask(self, text: str, response: str, *, keep: bool = True, role: str = "user") -> list[int]:
        """Say `text`, have the model say `response`; return the ids that it was given."""
        told = [*self.messages, {"role": role, "content": text}]
        self.episode.begin_turn(SamplingBody())
        rendered = self._template.render(messages=told, add_generation_prompt=True)
        place = self.episode.at_rendered(rendered, encode)
        ids = encode(response + "<|end|>")
        self.episode.record(
            place, ids, [-float(i) for i in range(len(ids))], text=response + "<|end|>", shown=response,
            finish_reason="stop", versions=[3],
        )  # fmt: skip
        self.sampled += response + "<|end|>"
        if keep:
            self.messages = [*told, {"role": "assistant", "content": response}]
        return place.prompt_ids

    def samples(self) -> list[tuple[str, str, str]]:
        """Return prompt, all that follows, and what of that was sampled, of each sample."""
        return [shown(sample) for sample in self.episode.finished().samples]


def shown(sample: RecordedSample) -> tuple[str, str, str]:
    ids = array("i", sample.token_ids)
    chosen = [i for i, is_sampled in zip(ids, sample.sampled, strict=True) if is_sampled]
    return decode(array("i", sample.prompt_ids)), decode(ids), decode(chosen)


def test_turns_of_a_plain_template_are_one_sample() -> None:
    talk = Talk(PLAIN)
    assert decode(talk.ask("one", "1")) == "<|user|>one<|end|><|assistant|>"
    assert (
        decode(talk.ask("two", "2"))
        == "<|user|>one<|end|><|assistant|>1<|end|><|user|>two<|end|><|assistant|>"
    )
    ((prompt, rest, sampled),) = talk.samples()
    assert prompt == "<|user|>one<|end|><|assistant|>"
    assert rest == "1<|end|><|user|>two<|end|><|assistant|>2<|end|>"
    assert sampled == "1<|end|>2<|end|>"
    record = talk.episode.finished()
    logprobs = np.frombuffer(record.samples[0].logprobs, "<f4")
    mask = np.frombuffer(record.samples[0].sampled, np.uint8).astype(bool)
    assert logprobs[~mask].tolist() == [0.0] * int((~mask).sum())
    assert logprobs[mask].tolist() == [-float(i) for i in range(8)] * 2
    assert (record.num_turns, record.versions, record.last_response) == (2, (3,), "2")


@pytest.mark.parametrize(("template", "first"), [(STRIPS_THINKING, "hm</think>1"), (TRIMS, " 1 ")])
def test_a_template_that_rewrites_history_begins_another_sample(template: str, first: str) -> None:
    talk = Talk(template)
    talk.ask("one", first)
    given = talk.ask("two", "2")
    (one, two) = talk.samples()
    assert one == ("<|user|>one<|end|><|assistant|>", f"{first}<|end|>", f"{first}<|end|>")
    assert two[0] == decode(given)
    assert two[0] == "<|user|>one<|end|><|assistant|>1<|end|><|user|>two<|end|><|assistant|>"
    assert two[1:] == ("2<|end|>", "2<|end|>")


@pytest.mark.parametrize("template", [PLAIN, STRIPS_THINKING, TRIMS])
def test_every_sampled_token_is_in_one_sample_after_what_it_was_sampled_after(template: str) -> None:
    talk = Talk(template)
    given = [talk.ask(f"q{i}", f"<think>{i}</think> a{i} ") for i in range(4)]
    given.append(talk.ask("aside", "left", keep=False))
    given.append(talk.ask("more", "right"))
    samples = talk.samples()
    assert "".join(sampled for _, _, sampled in samples) == talk.sampled
    contexts = []
    for sample in talk.episode.finished().samples:
        ids = [*array("i", sample.prompt_ids)]
        last = 0
        for token, is_sampled in zip(array("i", sample.token_ids), sample.sampled, strict=True):
            if is_sampled and not last:
                contexts.append(list(ids))
            ids.append(token)
            last = is_sampled
    assert contexts == given


KEEPS_THINKING_OF_THE_LAST_QUERY = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen3's: thinking stays while tools are called, and is left out once the user speaks again."""


def test_a_template_that_forgets_thinking_at_the_next_query_splits_the_episode_there_alone() -> None:
    talk = Talk(KEEPS_THINKING_OF_THE_LAST_QUERY)
    talk.ask("one", "hm</think>call")
    talk.ask("found", "so</think>1", role="tool")
    given = talk.ask("two", "2")
    first, second = talk.samples()
    assert first[2] == "hm</think>call<|end|>so</think>1<|end|>", "the tool's cycle is one sample"
    assert second == (decode(given), "2<|end|>", "2<|end|>")
    assert "</think>" not in second[0]


def test_two_requests_that_continue_the_same_sample_do_not_train_it_twice() -> None:
    talk = Talk(PLAIN)
    talk.ask("one", "1")
    talk.ask("left", "l", keep=False)
    talk.ask("right", "r", keep=False)
    assert [sampled for _, _, sampled in talk.samples()] == ["1<|end|>l<|end|>", "r<|end|>"]


def test_text_that_a_client_puts_together_continues_what_it_was_shown() -> None:
    """A client of completions sees no special tokens; those that were sampled stay in the sample."""
    episode = Episode(EpisodeOpening("e", "o", "k", 0, 9))
    place = episode.at_text("ask: ", encode, encode)
    common: dict[str, Any] = {"finish_reason": "stop", "versions": [0]}
    episode.record(place, [*encode("yes"), 0], [0.0] * 4, text="yes<|end|>", shown="yes", **common)
    place = episode.at_text("ask: yes, why? ", encode, encode)
    assert place.prompt_ids == [*encode("ask: yes"), 0, *encode(", why? ")]
    episode.record(place, encode("so"), [0.0] * 2, text="so", shown="so", **common)
    (sample,) = episode.finished().samples
    assert list(array("i", sample.token_ids)) == [*encode("yes"), 0, *encode(", why? so")]
    assert list(sample.sampled) == [1, 1, 1, 1] + [0] * 7 + [1, 1]


def test_ids_continue_ids() -> None:
    episode = Episode(EpisodeOpening("e", "o", "k", 0, 9))
    common: dict[str, Any] = {"text": "", "shown": "", "finish_reason": "stop", "versions": [0]}
    episode.record(episode.at_ids([1, 2]), [3, 4], [0.0, 0.0], **common)
    episode.record(episode.at_ids([1, 2, 3, 4, 5]), [6], [0.0], **common)
    episode.record(episode.at_ids([1, 2, 3, 9]), [6], [0.0], **common)
    one, two = episode.finished().samples
    assert list(array("i", one.token_ids)) == [3, 4, 5, 6]
    assert list(one.sampled) == [1, 1, 0, 1]
    assert list(array("i", two.prompt_ids)) == [1, 2, 3, 9]


def test_an_episode_is_sampled_as_the_policy_is_trained() -> None:
    episode = Episode(EpisodeOpening("e", "o", "k", 0, 9, temperature=0.7, top_p=1.0))
    body = SamplingBody()
    episode.begin_turn(body)
    assert (body.temperature, body.top_p) == (0.7, 1.0)
    with pytest.raises(BadRequest, match=r"temperature is 0.1, but this episode is sampled with 0.7"):
        episode.begin_turn(SamplingBody(temperature=0.1))


def test_turns_are_limited_and_a_lost_one_does_not_count() -> None:
    episode = Episode(EpisodeOpening("e", "o", "k", 0, 2))
    episode.begin_turn(SamplingBody())
    episode.lose("its machine")
    for _ in range(2):
        episode.begin_turn(SamplingBody())
    with pytest.raises(BadRequest, match="max_turns 2"):
        episode.begin_turn(SamplingBody())
    assert episode.finished().limit == "turns"


def test_tool_calls_are_rendered_as_the_model_wrote_them() -> None:
    episode = Episode(EpisodeOpening("e", "o", "k", 0, 2))
    episode.raw["call_1"] = '<tool_call>{"name":"f"}</tool_call>'
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {"role": "assistant", "content": "x", "tool_calls": [call | {"id": "call_2"}]}
    told = episode.as_written(
        [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}, other]
    )
    assert told[1] == {"role": "assistant", "content": '<tool_call>{"name":"f"}</tool_call>'}
    assert told[2] == other


def test_another_trainers_episodes_are_forgotten() -> None:
    episodes = Episodes()
    episodes.open(EpisodeOpening("a", "first", "k", 0, 2))
    episodes.open(EpisodeOpening("b", "first", "k", 1, 2))
    assert isinstance(episodes.close("a"), EpisodeRecord)
    episodes.open(EpisodeOpening("c", "second", "k", 0, 2))
    assert episodes.close("b") is None
    assert episodes.get("c") is not None
