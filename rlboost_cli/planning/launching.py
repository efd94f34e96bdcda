"""From what is to be launched to a run that has started, and to how it ended: what `rlboost launch` and the
Python package share."""

from __future__ import annotations

from rlboost_cli.doctor.findings import DoctorContext
from rlboost_cli.doctor.preflight import require_launchable
from rlboost_cli.planning.agreement import agree, planned
from rlboost_cli.runs.target import Target, find_target, is_place
from rlboost_cli.terminal import extras, output
from rlboost_cli.views import screens
from rlboost_cli.views.live import Outcome, outcome_of
from rlboost_runtime.billing.planned import keep_plan
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import RunFolder, home


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
