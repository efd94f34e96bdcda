"""Settings that are legal one by one and make no sense together.

Only what a person wrote is judged, never a default: so this works on the plain data of the file. A setting
that would be ignored is a mistake too, because whoever wrote it counts on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlboost_runtime.job import IMPORTANCE_CAPS, Job
from rlboost_runtime.job_checks.tree import Mistake

Section = dict[str, Any]  # any JSON values


def check_sense(data: Section) -> list[Mistake]:
    """Return the contradictions in `data`."""
    algorithm = data.get("algorithm", {})
    if not isinstance(algorithm, dict):
        return []
    transfer = [Mistake(("weights", "transfer"), problem) for problem in _transfer(data, algorithm)]
    checks = (*_clips(algorithm), *_importance(algorithm), *_old_logprobs(algorithm), *_spares(algorithm))
    return [*transfer, *(Mistake(("algorithm", name), problem) for name, problem in checks)]


def check_reach(job: Job) -> list[Mistake]:
    """Return whether machines elsewhere are told no address of the head."""
    elsewhere = [offer.infra for offer in job.rollout.spot.any_of if offer.infra != "local"]
    if not elsewhere or job.trainer.is_elsewhere or job.trainer.address is not None:
        return []
    problem = (
        f"missing, though machines of {elsewhere[0]} are to reach the head, this machine; add its name or IP"
        " address, or a trainer.infra that they reach"
    )
    return [Mistake(("trainer", "address"), problem)]


def _transfer(data: Section, algorithm: Section) -> Iterator[str]:
    weights = data.get("weights")
    if isinstance(weights, dict) and weights.get("transfer") == "lora" and algorithm.get("lora") is None:
        yield "found lora, but there are no adapters without algorithm.lora; write it, or another transfer"


Finding = tuple[str, str]
"""Field of `algorithm`, and what is wrong with it."""


def _clips(algorithm: Section) -> Iterator[Finding]:
    loss = algorithm.get("loss")
    if loss in ("gspo", "cispo") and algorithm.get("dual_clip") is not None:
        yield "dual_clip", f"found {algorithm['dual_clip']}, but {loss} has no dual clip; remove it"


def _importance(algorithm: Section) -> Iterator[Finding]:
    kind = algorithm.get("importance_sampling", "token")
    cap, floor = algorithm.get("importance_cap"), algorithm.get("importance_floor")
    if kind == "none" and cap is not None:
        yield "importance_cap", f"found {cap}, but importance_sampling is none; remove one of them"
    if floor is None:
        return
    if kind != "icepop":
        yield (
            "importance_floor",
            f"found {floor}, but only icepop has a floor; remove it, or write importance_sampling: icepop",
        )
        return
    cap = IMPORTANCE_CAPS["icepop"] if cap is None else cap
    if _are_numbers(cap, floor) and floor >= cap:
        yield "importance_floor", f"found {floor}, which is not below importance_cap {cap}; lower it"


def _old_logprobs(algorithm: Section) -> Iterator[Finding]:
    written, parts = algorithm.get("old_logprobs"), algorithm.get("minibatches_per_step", 1)
    if written in ("recompute", "engine") and parts == 1:
        yield (
            "old_logprobs",
            f"found {written}, but with minibatches_per_step 1 the training pass itself gives them;"
            " remove it",
        )


def _spares(algorithm: Section) -> Iterator[Finding]:
    policy, spares = algorithm.get("zero_variance_groups", "keep"), algorithm.get("spare_prompts", 0)
    if policy == "replace" and spares == 0:
        prompts = algorithm.get("prompts_per_step", 128)
        some = max(1, prompts // 4) if isinstance(prompts, int) else 1
        yield (
            "zero_variance_groups",
            f"found replace, but there are no spare_prompts to take; write spare_prompts: {some}, or drop",
        )
    if policy != "replace" and spares != 0 and _are_numbers(spares):
        yield (
            "spare_prompts",
            f"found {spares}, but they are used only with zero_variance_groups: replace;"
            " write that, or remove them",
        )


def _are_numbers(*values: Any) -> bool:  # any JSON values
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
