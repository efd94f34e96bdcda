"""What `rlboost serve` asks of a job, and waits for: an endpoint that answers."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.security import client_context

_POLL_S = 0.5
_ANSWER_S = 5.0
SILENCE_S = 120.0
"""Longest wait without any sign of the endpoint, once the model is published."""


def require_served(typed: str, job: Job) -> None:
    """Raise `ConfigError` for a job that trains."""
    if not job.only_serves:
        raise ConfigError(
            f"{typed}: the job trains its model",
            "write endpoint: {trains: false} to serve it only, or type: rlboost launch",
        )


def wait_until_served(run: RunFolder, say: Callable[[str], None]) -> str:
    """Return the endpoint's URL once it takes requests; machines may still boot. Loading the model has no
    deadline, what follows has.

    Raises `RuntimeFault` where the run ends meanwhile, or the endpoint stays silent.
    """
    if run.head.exists():  # its endpoint listens there, and its files are fetched as they come
        return str((read_json(run.api_endpoint) or {}).get("url", "on the head (docs/serving.md)"))
    published_at: float | None = None
    while True:
        if run.outcome.exists():
            found = read_json(run.outcome) or {}
            raise RuntimeFault(
                f"{run.name} has ended: {found.get('problem') or found.get('state')}",
                str(found.get("remedy") or f"rlboost logs {run.name}"),
            )
        status = read_json(run.status) or {}
        say(f"{run.name}: {status.get('phase') or 'starting'}")
        known = read_json(run.api_endpoint)
        if known is not None and _is_healthy(run, str(known["url"])):
            return str(known["url"])
        if status.get("policy_version") is not None:
            published_at = published_at or time.monotonic()
            if time.monotonic() - published_at > SILENCE_S:
                raise RuntimeFault(
                    f"the endpoint of {run.name} does not answer {SILENCE_S:.0f} s after its model was"
                    " published",
                    f"read {run.logs / 'endpoint.log'}",
                )
        time.sleep(_POLL_S)


def _is_healthy(run: RunFolder, url: str) -> bool:
    context = client_context(run.certificate.read_text())
    connection = http.client.HTTPSConnection(urlsplit(url).netloc, timeout=_ANSWER_S, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
