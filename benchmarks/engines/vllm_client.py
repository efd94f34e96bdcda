"""vLLM's own benchmark client, run by the engine's Python: one JSON order per line in, one JSON result out.

An order: `prompts` (lists of token ids) and `num_new`, all sent at once. The result: `tokens`, `seconds` and
`problems`. The requests are made by `vllm.benchmarks`, as `vllm bench serve` makes them; but for the socket.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

URL = "http://engine/v1/completions"


async def serve(socket: str, model: str) -> None:
    """Carry out orders until stdin ends."""
    connector = aiohttp.UnixConnector(path=socket, limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            inputs = [
                RequestFuncInput(
                    prompt=prompt,
                    api_url=URL,
                    prompt_len=len(prompt),
                    output_len=order["num_new"],
                    model=model,
                    logprobs=0,
                    ignore_eos=True,
                    extra_body={"temperature": 1.0, "return_tokens_as_token_ids": True},  # no tokenizer there
                )
                for prompt in order["prompts"]
            ]
            began = time.perf_counter()
            outputs = await asyncio.gather(*(async_request_openai_completions(i, session) for i in inputs))
            seconds = time.perf_counter() - began
            result = {
                "tokens": sum(output.output_tokens or 0 for output in outputs),
                "seconds": seconds,
                "problems": [output.error for output in outputs if not output.success],
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:3]))
