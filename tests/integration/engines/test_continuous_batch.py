"""The library's continuous batching as we step it: its own thread agrees, drops are exact."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlboost_runtime.engines.base import Request, RequestEnded
from rlboost_runtime.engines.transformers.continuous_batch import (
    ContinuousBatch,
    batching_config,
    generation_config,
)
from rlboost_runtime.protocol.messages import Sampling

pytestmark = pytest.mark.integration

GREEDY = Sampling(temperature=0.0)


def make_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(20, 258, (n,), generator=generator).tolist() for n in lengths]


def run_out(
    batch: ContinuousBatch,
) -> tuple[dict[int, list[int]], dict[int, list[float]], list[RequestEnded]]:
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    ended: list[RequestEnded] = []
    while not batch.is_empty:
        result = batch.step(0)
        assert len(set(result.request_ids)) == len(result.request_ids) == sum(result.counts)  # one token each
        for i, token, logprob in zip(result.request_ids, result.token_ids, result.logprobs, strict=True):
            ids.setdefault(i, []).append(token)
            logprobs.setdefault(i, []).append(logprob)
        ended += result.ended
    return ids, logprobs, ended


def test_stepping_equals_the_librarys_own_thread():
    """Guards the one private method that we call: the public way must make the same tokens."""
    model = make_model()
    asked = prompts([5, 70, 1, 600, 33, 12])
    manager = model.init_continuous_batching(generation_config(GREEDY), batching_config(4, 1024))
    manager.start()
    try:
        for i, prompt in enumerate(asked):
            manager.add_request(prompt, request_id=str(i), max_new_tokens=20)
        theirs = {}
        while len(theirs) < len(asked):
            output = manager.get_result(timeout=30)
            assert output is not None
            assert output.error is None
            theirs[int(output.request_id)] = output
    finally:
        manager.stop(block=True, hard_stop=True)
        manager.destroy()

    batch = ContinuousBatch(model, GREEDY, 4, 1024)
    for i, prompt in enumerate(asked):
        batch.add(Request(i, prompt, 20))
    ids, logprobs, ended = run_out(batch)
    assert {end.request_id: end.reason for end in ended} == dict.fromkeys(range(6), "length")
    for i, output in theirs.items():
        assert ids[i] == output.generated_tokens
        assert logprobs[i] == pytest.approx(output.logprobs, abs=1e-5)


def test_each_request_is_sampled_as_it_asks():
    """Beside requests of the engine's own sampling: greedily, colder, from a part of the vocabulary."""
    model = make_model()
    asked = {0: None, 1: Sampling(0.0), 2: Sampling(0.5), 3: Sampling(1.3, 0.6), 4: None}
    batch = ContinuousBatch(model, Sampling(1.0), 8, 256)
    prompt_of = dict(enumerate(prompts([5, 9, 3, 40, 7])))
    for i, sampling in asked.items():
        batch.add(Request(i, prompt_of[i], 30, sampling=sampling))
    ids, logprobs, _ = run_out(batch)
    alone = ContinuousBatch(model, GREEDY, 8, 256)
    alone.add(Request(1, prompt_of[1], 30))
    assert ids[1] == run_out(alone)[0][1]
    assert logprobs[1] == pytest.approx([0.0] * 30)
    for i in (0, 2, 3, 4):
        sampling = asked[i] or Sampling()
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt_of[i] + ids[i]])).logits[0, len(prompt_of[i]) - 1 : -1]
        probs_TV = (logits_TV / sampling.temperature).softmax(-1)
        ranked_TV, order_TV = probs_TV.sort(descending=True)
        out_TV = torch.zeros_like(probs_TV, dtype=torch.bool)
        out_TV.scatter_(1, order_TV, ranked_TV.cumsum(-1) - ranked_TV >= sampling.top_p)
        kept_TV = probs_TV.masked_fill(out_TV, 0.0)
        expected_T = (kept_TV / kept_TV.sum(-1, keepdim=True))[range(30), ids[i]].log()
        assert logprobs[i] == pytest.approx(expected_T.tolist(), abs=1e-4), i


def test_a_request_ends_by_its_own_stop_tokens():
    model, (prompt,) = make_model(), prompts([12])
    alone = ContinuousBatch(model, GREEDY, 1, 256)
    alone.add(Request(0, prompt, 30))
    likeliest = run_out(alone)[0][0]
    stop = likeliest[7]
    batch = ContinuousBatch(model, Sampling(stop_token_ids=(stop,)), 8, 256)
    batch.add(Request(0, prompt, 30, sampling=Sampling(0.0)))
    batch.add(Request(1, prompt, 30, sampling=Sampling(0.0, ignore_eos=True)))
    batch.add(Request(2, prompt, 30, sampling=Sampling(0.0, 1.0, (likeliest[3],), ignore_eos=True)))
    ids, _, ended = run_out(batch)
    reasons = {end.request_id: end.reason for end in ended}
    assert (ids[0], reasons[0]) == (likeliest[: likeliest.index(stop) + 1], "stop")
    assert (ids[1], reasons[1]) == (likeliest, "length")
    assert (ids[2], reasons[2]) == (likeliest[: likeliest.index(likeliest[3]) + 1], "stop")


def test_a_greedy_engine_refuses_to_sample():
    batch = ContinuousBatch(make_model(), GREEDY, 2, 64)
    assert "temperature 0" in (batch.refusal(Request(0, [20], 5, sampling=Sampling(0.7))) or "")
    assert batch.refusal(Request(0, [20], 5, sampling=GREEDY)) is None


def test_new_weights_meet_no_key_of_the_old_ones():
    """A prompt of many pages, asked again right after its first answer: the likeliest to be found cached."""
    model, other = make_model(0), make_model(1)
    batch = ContinuousBatch(model, GREEDY, 2, 1024)
    (prompt,) = prompts([300])
    batch.add(Request(0, prompt, 10))
    before, _, _ = run_out(batch)
    model.load_state_dict(other.state_dict())
    batch.add(Request(1, prompt, 10))
    after, logprobs, _ = run_out(batch)
    with torch.no_grad():
        expected_TV = other(torch.tensor([prompt + after[1]])).logits[0, 299:-1].log_softmax(-1)
    chosen = expected_TV[torch.arange(10), torch.tensor(after[1])]
    assert chosen.tolist() == pytest.approx(logprobs[1], abs=1e-4)
    assert before[0] != after[1]


def test_a_dropped_request_gets_no_further_token_and_its_id_may_come_back_at_once():
    batch = ContinuousBatch(make_model(), GREEDY, 2, 256)
    for i in range(3):
        batch.add(Request(i, [20 + i], 30))
    assert (batch.num_running, batch.num_waiting) == (2, 1)
    batch.step(0)
    assert batch.drop([0, 2, 7]) == [0, 2]
    batch.add(Request(0, [50], 4))  # before the library has seen the cancellation
    ids, _, ended = run_out(batch)
    assert {i: len(got) for i, got in ids.items()} == {0: 4, 1: 29}
    assert {end.request_id: end.reason for end in ended} == {0: "length", 1: "length"}


def test_aborts_leak_no_cache():
    """Many more aborted responses than the cache could hold; each needs all of its room."""
    batch = ContinuousBatch(make_model(), GREEDY, 2, 64)
    for i in range(20):
        batch.add(Request(i, [20] * 60, 4))
        batch.step(0)
        assert batch.drop([i]) == [i]
    batch.add(Request(99, [20] * 60, 4))
    ids, _, _ = run_out(batch)
    assert len(ids[99]) == 4


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_fail_the_request_and_good_weights_serve_again(sampling):
    model = make_model()
    batch = ContinuousBatch(model, sampling, 2, 256)
    good = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    batch.add(Request(0, [20], 5))
    ids, _, ended = run_out(batch)
    assert ids == {}
    assert [(end.request_id, end.reason) for end in ended] == [(0, "failed")]
    assert ended[0].problem
    with torch.no_grad():
        model.lm_head.weight.copy_(good)
    batch.add(Request(1, [20], 5))
    ids, _, _ = run_out(batch)
    assert len(ids[1]) == 5


def test_equal_seeds_repeat_and_others_do_not():
    batch = ContinuousBatch(make_model(), Sampling(temperature=1.0), 2, 256)
    drawn = []
    for i, seed in enumerate([1, 1, 2]):
        batch.seed(seed)
        batch.add(Request(i, [20], 40))
        drawn.append(run_out(batch)[0][i])
    assert drawn[0] == drawn[1] != drawn[2]
