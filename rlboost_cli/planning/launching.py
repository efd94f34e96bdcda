"""From what is to be launched to a run that has started, and to how it ended: what `rlboost launch` and the
Python package share."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from rlboost_cli.doctor.findings import DoctorContext
from rlboost_cli.doctor.preflight import require_launchable
from rlboost_cli.planning.agreement import agree, planned
from rlboost_cli.runs.target import Target, find_target, is_place
from rlboost_cli.terminal import extras, output
from rlboost_cli.views import screens
from rlboost_cli.views.live import Outcome, outcome_of
from rlboost_runtime.billing.planned import keep_plan
from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder, home, read_json
from rlboost_runtime.run.security import client_context

_POLL_S = 0.5
_ANSWER_S = 5.0
SILENCE_S = 120.0
"""Longest wait without any sign of the endpoint, once the model is published."""


def prepared(
    job_or_run: str,
    question: str | None,
    *,
    resume: bool,
    yes: bool,
    checks: bool = False,
    start: str | None = None,
    address: str | None = None,
) -> RunFolder:
    """Return the run that was named, made or opened again where needed, once its plan was agreed to.

    `question`, `yes`: as for `agree`. `checks`: data, reward, engine and secrets are tried first. `start`:
    the checkpoint from which a new run goes on. `address`: of this machine, which
    replaces a lost head. Raises `ConfigError`, `NotFound`, and `RuntimeFault` where
    the disk has no room.
    """
    if resume and is_place(job_or_run):
        from rlboost_cli.runs.restoring import resume_from_copy  # needs what reads buckets

        return resume_from_copy(job_or_run, address, question, yes=yes)
    if address is not None or "://" in job_or_run:
        raise ConfigError(
            f"{job_or_run}: a place with the copy of a head, OUTPUT/RUN, and --address go with --resume",
            "type: rlboost launch --resume OUTPUT/RUN, such as s3://BUCKET/PREFIX/RUN",
        )
    target = find_target(job_or_run, resume=resume, start=start, say=output.progress)
    extras.require(target.job)
    if checks and target.is_to_start:
        with output.working("checking data, reward and secrets"):
            _check(target)
    plan = None
    if target.is_to_start:
        steps = {"algorithm": target.job.algorithm.model_copy(update={"steps": target.num_steps_left})}
        plan = planned(target.name, target.job.model_copy(update=steps), target.folder)
        agree(plan, question, yes=yes)
    with output.working("copying the job's files"):
        found = target.prepare(resume=resume, say=output.progress)
    if plan is not None and plan.forecast is not None:
        keep_plan(found.run, plan.forecast.parts)
    screens.found_run(found)
    return found.run


def collected(run: RunFolder) -> Outcome:
    """Return how the ended run ended, once its results are here; its head may be elsewhere."""
    outcome = outcome_of(run)
    if run.head.exists():
        from rlboost_cli.head.control import collect_results

        with output.working() as say:
            collect_results(run, say)
    return outcome


def _check(target: Target) -> None:
    file = target.job_file
    if file is None and target.run is not None:
        file = target.run.files / target.run.job_json.name
    require_launchable(DoctorContext(home(), target.job, file), output.progress)


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
