"""Models with experts or windows of attention: loaded, swapped in place, and computed as the trainer does."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

from rlboost_runtime.engines.base import Request
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.models.tiny import make_tokenizer
from tests.vllm.vllm_rig import EXPERTS, MARKS, WINDOWS, Reader, prompts

pytestmark = MARKS

TOLERANCE = 1e-3
"""Nats by which a token's logprob may differ between the trainer's packed row and vLLM, in float32."""
NEW = 40


@pytest.mark.parametrize("server", [EXPERTS, WINDOWS], indirect=True)
async def test_every_version_has_the_trainers_logprobs(server):
    """Taken at the start and twice in place: the CPU build of vLLM packs experts at its start only."""
    names = load_file(server.versions.folder(0) / "model.safetensors").keys()
    assert any("experts.7.up_proj" in name for name in names) == (server.versions.family == "qwen3_moe")
    async with Reader.of(server.engine) as reader:
        for version, source in ((0, 0), (11, 1), (12, 0)):
            if version:
                server.versions.models[version] = server.versions[source]
                await server.engine.load(version, server.versions.folder(source))
            asked = dict(enumerate(prompts(8, seed=version), 100 * version))
            server.engine.submit([Request(i, prompt, NEW) for i, prompt in asked.items()])
            responses = await reader.ends(asked)
            assert {(each.finished, len(each.ids)) for each in responses} == {("length", NEW)}
            policy = Policy(copy.deepcopy(server.versions[source]), make_tokenizer())
            assert policy.scorer.why_not_packed is None
            with torch.no_grad():
                found = policy.forward(list(asked.values()), [each.ids for each in responses], 1.0).logprobs
            theirs = torch.tensor([each.logprobs for each in responses])
            assert (found - theirs).abs().max() < TOLERANCE
