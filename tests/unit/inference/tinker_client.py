"""What a Tinker client does, in a process of its own: the SDK leaves threads and sockets to its end."""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker

PROMPT = list(b"hello")


def main(url: str, key: str, model: str, stop: int) -> None:
    """Print what was sampled."""
    found: dict[str, Any] = {}
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        sampler = service.create_sampling_client(base_model=model).result(timeout=60)
        prompt = tinker.ModelInput.from_ints(PROMPT)

        def sample(num_samples: int = 1, **params: Any) -> list[dict[str, Any]]:
            wanted = tinker.SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **params})
            answer = sampler.sample(prompt, num_samples=num_samples, sampling_params=wanted)
            return [
                {
                    "tokens": list(map(int, each.tokens)),
                    "logprobs": len(each.logprobs or ()),
                    "id": each.sequence_id,
                    "reason": each.stop_reason,
                }
                for each in answer.result(timeout=60).sequences
            ]

        found["one"], found["three"], found["stopped"] = sample(), sample(3), sample(stop=[stop])
        refused: list[str] = []
        for ask in (lambda: sample(top_k=5), lambda: sampler.compute_logprobs(prompt).result(timeout=60)):
            try:
                ask()
            except Exception as problem:
                refused.append(str(problem))
        found["refused"] = refused
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
