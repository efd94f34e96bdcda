"""Runs that only serve, with a random model whose likeliest tokens vary, and their clients."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from random import Random
from typing import Any

import openai

from rlboost_runtime.run.folder import RunFolder
from tests.e2e.e2e_rig import Cli

PROMPT_TOKENS, MAX_TOKENS = 64, 128
CHARACTERS = "abcdefghijklmnopqrstuvwxyz "
IDS = {"return_token_ids": True, "ignore_eos": True}


def job(offer: dict[str, Any], spot: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """Return what a served job has beside its model and data."""
    return {
        "algorithm": {
            "temperature": 0.0,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": MAX_TOKENS,
        },
        "endpoint": {"trains": False, "max_requests": 4096, **rest.pop("endpoint", {})},
        "trainer": {"local_engines": 1, **rest.pop("trainer", {})},
        "rollout": {
            "engine_args": {"max_running": 8, **rest.pop("engine_args", {})},
            "spot": {"any_of": [{"infra": "local", "preload": True, **offer}], **spot},
        },
        **rest,
    }


def emulated_job(context: int) -> dict[str, Any]:
    """Return `job` with one machine whose engine has no model and gives a token a millisecond; prompts and
    responses may have `context` tokens each."""
    made = job(
        {"price_usd_per_hour": 2.66}, {"min_instances": 1, "max_instances": 1}, trainer={"local_engines": 0},
        engine_args={"max_running": 256, "tokens_per_s_per_response": 1_000},
    )  # fmt: skip
    made["algorithm"] |= {"temperature": 1.0, "max_prompt_tokens": context, "max_response_tokens": context}
    return made


def prompts(number: int, seed: int) -> list[str]:
    """Return prompts that differ."""
    random = Random(seed)
    return ["".join(random.choices(CHARACTERS, k=random.randint(8, 24))) + f" {i}" for i in range(number)]


def client(run: RunFolder) -> openai.AsyncOpenAI:
    """Return the unmodified client, which does not try again: each failure is seen."""
    context = ssl.create_default_context(cafile=str(run.certificate))
    return openai.AsyncOpenAI(
        base_url=json.loads(run.api_endpoint.read_bytes())["url"] + "/v1",
        api_key=run.api_keys.read_text().split()[0],
        http_client=openai.DefaultAsyncHttpxClient(verify=context),
        timeout=900.0,
        max_retries=0,
    )


def serve(cli: Cli, name: str, model: Path, made: dict[str, Any]) -> RunFolder:
    """Serve a job; return its run once an engine serves."""
    cli("serve", cli.job(name, model=str(model), **made), "--yes", "--detach", timeout_s=300)
    cli.wait(name, lambda s: any(i["state"] == "ready" for i in s["instances"]), timeout_s=120)
    return cli.run_folder(name)
