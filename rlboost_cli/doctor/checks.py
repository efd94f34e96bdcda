"""Which checks there are, in the order in which they are made.

The machine is always looked at; a job's model, data and reward where a job is given; then each place that the
job wants machines from has checks of its own: one entry in `PLACES` per kind of infra. Where the head is
elsewhere, that machine is looked at instead: this one only types. Where one is to be bought, its cloud is
asked, and those of the spot machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rlboost_cli.doctor import clouds, head, local, machine, model, preflight
from rlboost_cli.doctor.findings import Check, DoctorContext, Finding, Verdict, failed
from rlboost_cli.terminal import extras
from rlboost_runtime.job import Job

MACHINE: Sequence[Check] = (
    Check(machine.python),
    Check(machine.packages),
    Check(machine.home),
    Check(machine.clock),
    Check(machine.open_files),
    Check(machine.loopback),
)
LAPTOP: Sequence[Check] = (Check(machine.python), Check(machine.home), Check(machine.clock))
"""What a machine needs that only types."""
TOOLS: Sequence[Check] = (Check(preflight.engine), Check(preflight.tracker), Check(preflight.output))
SECRETS = Check(head.secrets)
HEAD: Sequence[Check] = (Check(head.head, announce="checking the head over SSH"),)
BOUGHT: Sequence[Check] = (
    Check(clouds.offer, announce="looking up the head's machine in its cloud"),
    Check(clouds.identity),
)
PLACES: Mapping[str, Sequence[Check]] = {
    "local": (
        Check(local.cpus),
        Check(local.memory),
        Check(local.gpu),
        Check(local.disk),
        Check(local.ports),
        Check(local.machines, announce="starting and ending a machine of the local provider"),
    )
}
"""By the word before the slash of an `infra`."""
ELSEWHERE = Check(clouds.offers, announce="querying the job's clouds and hosts for their current offers")


def checks_for(job: Job | None) -> Iterator[Check]:
    """Yield what is to be looked at."""
    if job is not None and job.trainer.is_elsewhere:
        yield from LAPTOP
        yield Check(preflight.output)
        yield from job_checks() if head.can_train_here() else [Check(model.resolves), Check(head.not_here)]
        yield SECRETS
        if job.trainer.is_bought:
            yield from BOUGHT
        if head.place_of(job) is not None:
            yield from HEAD
        if job.trainer.is_bought:
            yield ELSEWHERE
        return
    yield from MACHINE
    if job is None:
        return
    yield from job_checks() if head.can_train_here() else ()  # MACHINE has named what is missing
    yield from TOOLS
    places = dict.fromkeys(infra.partition("/")[0] for infra in _infras(job))
    for place in places:
        yield from PLACES.get(place, ())
    if places.keys() - PLACES.keys():
        yield ELSEWHERE


def job_checks() -> Iterator[Check]:
    """What a job needs wherever it runs; loads what trains."""
    from rlboost_cli.doctor import job as of_job

    yield Check(of_job.model, announce="checking the model (importing torch takes seconds)")
    yield Check(of_job.prompts, announce="reading the prompts")
    yield Check(of_job.reward, announce="calling the reward function")
    yield Check(of_job.environment)
    yield Check(of_job.sandbox)


def examine(
    context: DoctorContext, announce: Callable[[str], None] = lambda words: None
) -> Iterator[Finding]:
    """Yield each finding as it is made; a problem that was found before is not explained again."""
    before: dict[tuple[str, str], str] = {}
    for check in checks_for(context.job):
        if check.announce:
            announce(check.announce)
        for finding in _found(check, context):
            problem = (finding.found, finding.remedy)
            is_known = problem in before and finding.verdict is Verdict.FAIL
            first = before.setdefault(problem, finding.check)
            yield replace(finding, found=f"see {first} above", remedy="") if is_known else finding


def _found(check: Check, context: DoctorContext) -> Iterator[Finding]:
    """Yield what a check finds; a package that it lacks is a finding too, and the other checks are made."""
    try:
        yield from check.examine(context)
    except ModuleNotFoundError as absent:
        missing = extras.explained(absent)
        if missing is None:
            raise
        yield failed("packages", missing)


def _infras(job: Job) -> Iterator[str]:
    yield job.trainer.infra
    if job.rollout.spot.max_instances:
        yield from (offer.infra for offer in job.rollout.spot.any_of)
