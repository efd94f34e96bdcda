"""What runs have measured, kept for later runs of the same model, machines and workload.

One file for each such combination: `priors/KEY.json` in `$RLBOOST_HOME`, with the combination in it for
people to read, and a copy at the job's `output`, below `.rlboost/priors`, for heads that begin with an empty
disk. The newest run that has learned from a step writes it. It may be deleted at any time: the next run then
begins as a first run does.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rlboost_runtime.core.base.prior import Prior
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.job import Job
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.run.folder import home, parse_json, read_json, write_json

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

OUTPUT_S = 10.0
"""Longest wait for a copy at the `output`, either way. A run begins without one rather than later."""
_AT_OUTPUT = ".rlboost/priors"
"""No run has such a name: names have no dots."""

_ALGORITHM = (
    *("loss", "group_size", "prompts_per_step", "max_prompt_tokens", "max_response_tokens", "temperature"),
    *("top_p", "minibatches_per_step", "old_logprobs", "kl", "lora", "max_staleness", "spare_prompts"),
    "max_refills",
)
_TRAINER = (
    *("infra", "accelerators", "instance_type", "local_engines", "threads", "ranks", "nodes", "dtype"),
    *("micro_batch_tokens", "activation_checkpointing", "optimizer_offload"),
)
_ROLLOUT = ("engine", "tensor_parallel", "engine_args", "vllm_args")
_OFFER = ("infra", "accelerators", "instance_type", "preload", "hosts")


class KeptPrior(msgspec.Struct, frozen=True):
    """A file of `priors`."""

    run: str
    """That measured it."""
    at: float
    """When, in seconds since the Unix epoch."""
    workload: dict[str, Any]
    prior: Prior


def workload_of(job: Job) -> dict[str, Any]:
    """Return the fields of the job that decide how long responses become and how long steps take."""
    whole = job.model_dump(mode="json")

    def some(section: str, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: whole[section][name] for name in names}

    offers = [{name: offer.get(name) for name in _OFFER} for offer in whole["rollout"]["spot"]["any_of"]]
    return {
        **{name: whole[name] for name in ("model", "data", "reward", "environment")},
        "algorithm": some("algorithm", _ALGORITHM),
        "trainer": some("trainer", _TRAINER),
        "rollout": some("rollout", _ROLLOUT),
        "spot": sorted(offers, key=lambda offer: json.dumps(offer, sort_keys=True)),
        "transfer": whole["weights"]["transfer"],
    }


def key_of(workload: dict[str, Any]) -> str:
    """Return the name of the file for a workload."""
    return hashlib.blake2b(json.dumps(workload, sort_keys=True).encode(), digest_size=12).hexdigest()


@dataclass(slots=True)
class PriorStore:
    """The file of one run's workload, here and at the job's `output`."""

    job: Job
    run: str

    def read(self) -> KeptPrior | None:
        """Return what is kept here, else at the output; None where there is nothing that can be used. Blocks
        for at most `OUTPUT_S`."""
        for place, found in (("home", self._here), ("output", self._at_output)):
            try:
                data = found()
                kept = None if data is None else _checked(data)
            except (RLBoostError, OSError, ValueError) as problem:
                told = str(problem).partition("\n")[0]
                log_event(log, "prior.unusable", level=logging.WARNING, place=place, problem=told)
                continue
            if kept is not None:
                return kept
        return None

    def write(self, prior: Prior, at: float) -> None:
        """Keep `prior` here, measured until `at`. Errors are logged: nothing depends on it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self._plain(prior, at))
        except OSError as problem:
            log_event(log, "prior.not_kept", level=logging.WARNING, problem=str(problem))

    def copy(self) -> None:
        """Copy what is kept here to the output, if there is one. Blocks for at most `OUTPUT_S`."""
        if self.job.output is None or not self._path.exists():
            return
        import obstore
        from obstore import exceptions

        try:
            obstore.put(self._bucket(self.job.output), self._name, self._path)
        except (exceptions.BaseError, RLBoostError, OSError, ValueError) as problem:
            told = str(problem).partition("\n")[0]
            log_event(log, "prior.not_copied", level=logging.WARNING, problem=told)

    def _plain(self, prior: Prior, at: float) -> dict[str, Any]:
        return {"run": self.run, "at": at, "workload": workload_of(self.job), "prior": asdict(prior)}

    def _here(self) -> dict[str, Any] | None:
        found = read_json(self._path)
        return found if isinstance(found, dict) else None

    def _at_output(self) -> dict[str, Any] | None:
        if self.job.output is None:
            return None
        import obstore
        from obstore import exceptions

        try:
            data = bytes(obstore.get(self._bucket(self.job.output), self._name).bytes())
        except (exceptions.NotFoundError, FileNotFoundError):
            return None
        except exceptions.BaseError as problem:
            raise OSError(str(problem).partition("\n")[0]) from problem
        found = parse_json(data)
        return found if isinstance(found, dict) else None

    @property
    def _name(self) -> str:
        return f"{_AT_OUTPUT}/{key_of(workload_of(self.job))}.json"

    @property
    def _path(self) -> Path:
        return home() / "priors" / f"{key_of(workload_of(self.job))}.json"

    @staticmethod
    def _bucket(output: str) -> ObjectStore:
        from rlboost_runtime.run.bucket import open_bucket, url_of

        return open_bucket(url_of(output), OUTPUT_S, what="output")


def _checked(found: dict[str, Any]) -> KeptPrior:
    """Return the file's content. Raises `ValueError` for what cannot be begun with."""
    kept = msgspec.convert(found, KeptPrior)
    if problem := kept.prior.problem():
        raise ValueError(problem)
    return kept
