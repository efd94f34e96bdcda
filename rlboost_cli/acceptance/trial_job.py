"""The job that an acceptance runs: ten steps of a small model on the cheapest machines that will do.

Guarantees: the job's budget is the command's; its head ends itself before head and spot machines, at the
highest prices that the job accepts, can have cost more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlboost_cli.terminal.text import counted
from rlboost_providers.base.accelerators import MEMORY_GIB
from rlboost_providers.base.prices import Quote, on_demand_prices, shipped_book
from rlboost_providers.base.traits import cloud_traits, known_clouds
from rlboost_providers.registry import head_usd_per_hour
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import CloudOffer, Job
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.job.file.tree import SyntaxMistake, parse
from rlboost_runtime.run.folder import home, write_atomically

MODEL = "Qwen/Qwen3-0.6B"
NUM_SPOT = 2
LEAST_GPU_GIB = 20
"""The model with its optimizer (10 GB) beside an engine; GPUs with less also lack bfloat16."""
END_S = 900.0
"""Kept of the budget for ending: a supervisor's 300 s, the cloud's 180 s, and twice as much to spare."""
LEAST_S = 1500.0
"""Shortest trial that gets through its steps: installing takes minutes on each machine."""
MOST_S = 5400.0
IDLE_MINUTES = 5.0
"""Until a head ends itself that nobody asks anything: after a command that was killed."""
EXTRAS = 1.1
"""Disks and public addresses cost up to a tenth of the cheapest GPU machines (list prices, 2026-11)."""

Json = dict[str, Any]  # fields of a job file


@dataclass(frozen=True, slots=True)
class Trial:
    """A job, and what it may cost."""

    job: Job
    job_file: Path
    max_usd: float
    usd_per_hour: float
    """The most that an hour of all machines costs."""

    @property
    def machines(self) -> str:
        """What is bought, in words."""
        head, spot = self.job.trainer, self.job.rollout.spot
        offers = [
            f"{offer.accelerators} in {offer.infra}" for offer in spot.any_of if isinstance(offer, CloudOffer)
        ]
        return (
            f"a head with {head.accelerators} in {head.infra} and up to"
            f" {counted(spot.max_instances, 'spot machine')} with {' or '.join(offers)}"
        )

    @property
    def life_s(self) -> float:
        """After so long everything is ended, whatever it is doing."""
        assert self.job.after.max_hours is not None
        return self.job.after.max_hours * 3600


def trial(infra: str, via: str | None, max_usd: float, changes: Path | None) -> Trial:
    """Return the trial of a cloud, its job file written in the home. `changes`: a YAML file with fields of a
    job that replace ours, null to leave one out. Raises `ConfigError`."""
    cloud = infra.partition("/")[0]
    if cloud not in known_clouds():
        raise ConfigError(f"{cloud} is no known cloud", f"write one of {', '.join(known_clouds())}")
    wanted = {} if changes is None else read_changes(changes)
    seller = via or ("direct" if cloud_traits(cloud).is_direct else "skypilot")
    fields = merged(merged(_fields(infra, seller), wanted), _ending(max_usd, wanted))
    path = home() / "acceptance" / f"{fields['name']}.yaml"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    loaded = _loaded(path, fields)
    rate = EXTRAS * _rate(loaded)
    life_s = min(MOST_S, max_usd / rate * 3600 - END_S)
    if life_s < LEAST_S:
        needed = (LEAST_S + END_S) / 3600 * rate
        raise ConfigError(
            f"these machines cost up to ${rate:.2f} per hour, and ${max_usd:g} does not last for a trial",
            f"write --max-usd {needed:.1f} or more, or name cheaper accelerators with --with FILE",
        )
    if loaded.after.max_hours is None or loaded.after.max_hours * 3600 > life_s:
        loaded = _loaded(path, merged(fields, {"after": {"max_hours": round(life_s / 3600, 4)}}))
    return Trial(loaded, path, max_usd, rate)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Json:
    """Return `base` with `changes` laid over it, field by field; null removes a field."""
    result = dict(base)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
            continue
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if both else value
    return result


def cheapest_machine(infra: str) -> Quote | None:
    """Return the machine type and region where a head and its spot machines are cheapest together; None:
    nothing that will do is in the shipped table."""
    found = [
        quote
        for quote in shipped_book().find(count=1, infra="/".join(infra.split("/")[:2]))
        if quote.on_demand_usd_per_hour and quote.spot_usd_per_hour
        if MEMORY_GIB.get(quote.accelerator, 0) >= LEAST_GPU_GIB
    ]
    return min(found, key=_together, default=None)


def _together(quote: Quote) -> float:
    return (quote.on_demand_usd_per_hour or 0) + NUM_SPOT * (quote.spot_usd_per_hour or 0)


def _ending(max_usd: float, wanted: Json) -> Json:
    """Return the fields that hold the budget; of these only a shorter idle time may be wanted."""
    idle = (wanted.get("after") or {}).get("idle_minutes")
    shorter = min(idle, IDLE_MINUTES) if isinstance(idle, int | float) else IDLE_MINUTES
    after = {"done": "down", "failed": "down", "idle_minutes": shorter}
    return {"budget": {"max_usd": max_usd}, "after": after}


def _fields(infra: str, via: str) -> Json:
    """Return the job's fields; machines are left out where the table has none, for the user to name."""
    cloud, quote = infra.partition("/")[0], cheapest_machine(infra)
    takes_role = via == "direct" or cloud_traits(cloud).skypilot_takes_role
    head: Json = {"infra": infra, "via": via, "disk_gb": 100}
    head |= {"role": "rlboost-head"} if takes_role else {}
    spot: Json = {"infra": infra, "via": via}
    if quote is not None:
        place = infra if "/" in infra else f"{cloud}/{quote.region}"
        gpu = f"{quote.accelerator}:{quote.accelerator_count}"
        head |= {"infra": place, "accelerators": gpu}
        spot |= {"infra": place, "accelerators": gpu}
    return {
        "name": f"acceptance-{cloud}",
        "model": MODEL,
        "data": {"reasoning_gym": ["basic_arithmetic"], "size": 500, "chat_template": "tokenizer"},
        "reward": "reasoning_gym",
        "algorithm": {
            "steps": 10,
            "prompts_per_step": 8,
            "group_size": 8,
            "max_prompt_tokens": 256,
            "max_response_tokens": 512,
            "learning_rate": 1e-6,
        },
        "trainer": head,
        "rollout": {
            "engine": "vllm",
            "engine_args": {"dtype": "bfloat16", "gpu_memory_utilization": 0.5},
            "spot": {"min_instances": NUM_SPOT, "max_instances": NUM_SPOT, "any_of": [spot]},
        },
        "evidence": {"keep_journal": True},
    }


def read_changes(path: Path) -> Json:
    """Return the fields of a job that a YAML file has. Raises `ConfigError`."""
    try:
        return dict(parse(path.read_text(encoding="utf-8")).data)
    except (OSError, UnicodeDecodeError, SyntaxMistake) as problem:
        raise ConfigError(
            f"{path} cannot be read: {problem}", "write fields of a job file in it (docs/job-file.md)"
        ) from None


def _loaded(path: Path, fields: Json) -> Job:
    if "accelerators" not in fields["trainer"]:
        raise ConfigError(
            f"no machine with one GPU of {LEAST_GPU_GIB} GiB is known in {fields['trainer']['infra']}",
            "name one with --with FILE: trainer.accelerators, rollout.spot.any_of and their"
            " max_price_usd_per_hour",
        )
    write_atomically(path, json.dumps(fields, indent=2).encode())  # which is YAML, too
    return load_job(path)


def _rate(job: Job) -> float:
    """Return the most that an hour of the head and all spot machines costs. Raises `ConfigError`."""
    head = job.trainer.max_price_usd_per_hour or head_usd_per_hour(job)
    bids = [_bid(each) for each in job.rollout.spot.any_of if isinstance(each, CloudOffer)]
    if head is None or None in bids:
        raise ConfigError(
            "the price of these machines is not known", "name max_price_usd_per_hour of each with --with FILE"
        )
    return head + job.rollout.spot.max_instances * max((bid for bid in bids if bid is not None), default=0.0)


def _bid(offer: CloudOffer) -> float | None:
    """Return the most that a spot machine costs: the bid, or without one the on-demand price."""
    return offer.max_price_usd_per_hour or max(on_demand_prices(offer), default=None)
