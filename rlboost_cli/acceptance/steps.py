"""The checks of an acceptance, in order of cost: `STEPS`, and after them `CLEANING`.

Each check returns in words what it found. It raises `NotChecked` where there was nothing to check, and any
other `RLBoostError` where it failed. What a check needs it takes from the commands that do the same:
`doctor`, `up`, `launch`, `preempt`, `audit`, `down`, `gc` and `cost`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rlboost_cli.acceptance.trial_job import NUM_SPOT, Trial
from rlboost_cli.doctor import checks
from rlboost_cli.doctor import head as head_doctor
from rlboost_cli.doctor.findings import DoctorContext, Finding, Verdict
from rlboost_cli.evidence.audit import audit_of
from rlboost_cli.head import control
from rlboost_cli.head.renting import rate_of, rent
from rlboost_cli.planning.launching import prepared
from rlboost_cli.runs import sweep
from rlboost_cli.runs.supervision import want_training
from rlboost_cli.runs.teardown import end_run, end_without_head
from rlboost_cli.views.live import follow, outcome_of
from rlboost_providers.base.provider import MachineStatus, MachineView
from rlboost_providers.base.tags import head_of
from rlboost_providers.registry import head_provider, provider_for
from rlboost_providers.ssh.connection import address_of
from rlboost_runtime.billing.books import report_of
from rlboost_runtime.billing.launch_records import current_head_machine
from rlboost_runtime.billing.report import CostReport, MachineCost
from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.money import MICRO_USD_PER_USD
from rlboost_runtime.protocol.status import MachineRow, Status
from rlboost_runtime.run.folder import RunFolder, home
from rlboost_runtime.run.head import kept_place

Say = Callable[[str], None]

CLOSED_PORTS = (
    111,
    2375,
    5000,
    6379,
    8000,
    8080,
    8265,
    8888,
    10001,
    29400,
    29500,
    *range(32768, 61000, 1000),
)
"""A sample of what must not be reached from outside: well-known services, and of the range of free ports."""
DIAL_S = 3.0
LAG_S = 5.0
"""Pause between two looks for what is left."""
BILL_SLACK_S = 30.0
"""Between a cloud's clock of a machine and our books: polling, and how late a cloud reports an end."""
MIN_BILLED_S = 60.0
"""Clouds bill at most this much of a machine that ended sooner."""
SLOW_DISK = 0.8
"""Share of the throughput asked for below which a disk fails."""


class NotChecked(RLBoostError):
    """There was nothing to check; `problem` is why."""

    def __init__(self, why: str) -> None:
        super().__init__(why, "")


@dataclass(slots=True)
class Contact:
    """What is known so far."""

    trial: Trial
    say: Say
    run: RunFolder | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What `remote/doctor.py` said on the head."""

    @property
    def job(self) -> Job:
        """The trial's job."""
        return self.trial.job

    @property
    def its_run(self) -> RunFolder:
        """The run, for steps that come after it was made."""
        assert self.run is not None
        return self.run


@dataclass(frozen=True, slots=True)
class Step:
    """One check. `remedy`: for failures that do not explain themselves, such as a passed deadline."""

    name: str
    shows: str
    deadline_s: float
    check: Callable[[Contact], str]
    remedy: str
    is_paid: bool = True
    """False where nothing has been bought by then."""
    is_needed: bool = True
    """True if nothing after it can be checked where it fails."""


# --- before anything is bought ------------------------------------------------------------------------------


def credentials(contact: Contact) -> str:
    """Do what `rlboost doctor` does: the clouds are asked for offers with the credentials that are here."""
    context = DoctorContext(home(), contact.job, contact.trial.job_file)
    return _judged(checks.examine(context, contact.say))


def plan(contact: Contact) -> str:
    """Make the run, with the plan that `launch` shows."""
    contact.run = prepared(str(contact.trial.job_file), None, resume=False, yes=True)
    head, spot = contact.job.trainer, contact.job.rollout.spot
    return (
        f"{head.accelerators} in {head.infra} as the head and {spot.max_instances} spot machines, at most"
        f" ${contact.trial.usd_per_hour:.2f} per hour; all end after {contact.trial.life_s / 60:.0f} minutes"
    )


# --- the head -----------------------------------------------------------------------------------------------


def head_quota(contact: Contact) -> str:
    """Buy the head: only a purchase shows quota and capacity, and one that is refused costs nothing."""
    began = time.monotonic()
    rent(contact.its_run, contact.say)
    machine = current_head_machine(contact.its_run)
    assert machine is not None
    seconds = time.monotonic() - began
    return f"{machine.accelerator} in {machine.zone} at {rate_of(machine)}, logged in after {seconds:.0f} s"


def image(contact: Contact) -> str:
    """Look at what the image brings: a Python, room on the disk, a clock that is right."""
    facts = contact.facts = head_doctor.look(kept_place(contact.its_run), listen=False)
    place = kept_place(contact.its_run)
    findings = [head_doctor.judge_python(facts["python"], place), *_room(contact.job, facts)]
    return _judged([*findings, head_doctor.judge_clock(facts["clock"]["ahead_s"], place.host)])


def driver(contact: Contact) -> str:
    """Look for the GPU that was paid for."""
    found = contact.facts["gpu"]
    if not found["gpus"] and not found["problem"]:
        if contact.job.trainer.allow_cpu:
            raise NotChecked("no GPU")
        raise RuntimeFault(
            f"a machine with {contact.job.trainer.accelerators} was bought, and nvidia-smi is not there",
            "name an image with the driver 580 or newer: trainer.image in --with FILE",
        )
    return _judged([head_doctor.judge_gpu(found, {"is_there": False})])


def disk(contact: Contact) -> str:
    """Measure the disk, and compare it with what was asked for."""
    measured = head_doctor.look(kept_place(contact.its_run), listen=False, measure=True)["throughput"]
    if measured["problem"]:
        raise RuntimeFault(f"a file could not be written: {measured['problem']}", "look at trainer.disk_gb")
    got, wanted = measured["write_mib_per_s"], contact.job.trainer.disk_mib_per_s
    words = f"{got:.0f} MiB/s to a file of 512 MiB with fsync"
    if isinstance(wanted, int) and got < SLOW_DISK * wanted:
        raise RuntimeFault(
            f"{words}; {wanted} MiB/s were asked for",
            "choose a machine type with more bandwidth to its disk, or a higher trainer.disk_mib_per_s",
        )
    return words + (
        f"; {wanted} were asked for" if isinstance(wanted, int) else "; no throughput was asked for"
    )


def head_boot(contact: Contact) -> str:
    """Install what trains, as `up` does, and let torch look for the GPUs."""
    began = time.monotonic()
    control.bring_up(contact.its_run, contact.say)
    seconds = time.monotonic() - began
    facts = contact.facts = head_doctor.look(kept_place(contact.its_run), listen=False)
    found = _judged([head_doctor.judge_python(facts["python"], kept_place(contact.its_run))])
    gpu = facts["gpu"]
    if gpu["gpus"] or gpu["problem"]:
        found += "; " + _judged([head_doctor.judge_gpu(gpu, facts["python"])])
    return f"installed and started in {seconds:.0f} s; {found}"


def ports(contact: Contact) -> str:
    """Dial the head from here: its two ports answer, and a sample of the others does not."""
    name = address_of(kept_place(contact.its_run).host).name
    wanted = contact.job.trainer.head_ports
    others = [port for port in CLOSED_PORTS if port not in wanted]
    with ThreadPoolExecutor(32) as pool:
        answers = dict(pool.map(lambda port: (port, _answers(name, port)), [*wanted, *others]))
    shut = [port for port in wanted if not answers[port]]
    loose = [port for port in others if answers[port]]
    if shut:
        raise RuntimeFault(
            f"nothing answers at {', '.join(map(str, shut))}, which spot machines need",
            "let TCP to these ports of the head in (docs/head.md shows the rule)",
        )
    words = f"{wanted[0]} and {wanted[1]} answer; of {len(others)} others"
    if contact.job.trainer.private_address:
        found = ", ".join(map(str, loose)) or "none"
        raise NotChecked(f"{words} {found}, seen from within the network, not through its firewall")
    if loose:
        raise RuntimeFault(
            f"{words} these do: {', '.join(map(str, loose))}",
            "close them in the cloud's firewall: the head needs SSH and its two ports, nothing else",
        )
    return f"{words} none does"


# --- the fleet and the run ----------------------------------------------------------------------------------


def spot_quota(contact: Contact) -> str:
    """Wait until the head has bought its spot machines and an agent of each has dialled in."""
    what = f"{NUM_SPOT} spot machines have joined"
    return _boots(_until(contact, lambda status: sum(m.joined for m in _spot(status)) >= NUM_SPOT, what))


def network(contact: Contact) -> str:
    """Train, and wait until the spot machines serve the first weights, which they fetch from the head."""
    want_training(contact.its_run)
    control.bring_up(contact.its_run, contact.say)
    status = _until(contact, lambda status: len(_serving(status)) >= NUM_SPOT, "two spot machines serve")
    versions = [v for v in status.weights.get("versions", []) if v.get("slowest_pull_s")]
    rates = [
        f"{v['full_bytes'] / v['slowest_pull_s'] / 2**20:.0f}" for v in versions[:1] if v.get("full_bytes")
    ]
    size = versions[0]["full_bytes"] / 2**20 if versions else 0
    pulled = (
        f"{size:,.0f} MiB of weights at {rates[0]} MiB/s to the slowest" if rates else "weights were fetched"
    )
    return f"{pulled}; {_boots(status)}"


def preemption(contact: Contact) -> str:
    """End a busy spot machine as its cloud would, and see the run go on."""
    before = _until(contact, lambda status: status.step >= 1, "step 1 is trained")
    if contact.its_run.outcome.exists():
        raise NotChecked("the run had ended before")
    words = control.preempt(contact.its_run, None, None)
    after = _until(
        contact,
        lambda status: status.preemptions.total > before.preemptions.total and status.step > before.step,
        "the loss is noticed and another step is trained",
    )
    moved = after.responses.migrated - before.responses.migrated
    went_on = f"{moved} responses went on elsewhere, step {after.step} was trained"
    return f"{words} in step {before.step + 1}; {went_on}"


def ten_steps(contact: Contact) -> str:
    """Follow the run to its end."""
    status = _until(contact, lambda status: False, "the run is done", ends=True)
    outcome = outcome_of(contact.its_run)
    if outcome.state != "done":
        raise RuntimeFault(f"the run {outcome.state}: {outcome.problem}", outcome.remedy)
    model = contact.job.model if isinstance(contact.job.model, str) else "a tiny model"
    rewards = [f"{reward:.3f}" for reward in status.reward_history if reward is not None]
    return (
        f"{status.step} steps of {model},"
        f" {status.tokens.trained:,} tokens trained; rewards {', '.join(rewards)}"
    )


def promises(contact: Contact) -> str:
    """Audit the run on its head: each response ended once, no token was trained that no engine sampled."""
    found = audit_of(contact.its_run)
    if not found["clean"]:
        raise RuntimeFault("; ".join(map(str, found["problems"])), "send in the report with the run's logs")
    return f"{found['responses']['requested']} responses, each ended once"


# --- ending -------------------------------------------------------------------------------------------------


def end(contact: Contact) -> str:
    """End run, fleet and head, as `down` does; the model is given up."""
    run = contact.its_run
    try:
        control.end_run(run, contact.say, keeps_model=False)
        end_run(run, contact.say)  # notes that it was stopped
    except RLBoostError as failure:
        end_without_head(run, contact.say)
        raise RuntimeFault(
            f"`down` failed, and everything was ended from here: {failure.problem}", failure.remedy
        ) from failure
    return "run, spot machines and head"


def nothing_left(contact: Contact) -> str:
    """Ask the cloud what it has of the run, and for any machine with our tags, until it has none."""
    run, job = contact.its_run, contact.job
    while True:
        views = _all_views(run, job)
        found = sweep.look(
            contact.say, [job.trainer.cloud if job.trainer.via == "direct" else job.trainer.via]
        )
        living = [view.machine for view in views if view.state is not MachineStatus.GONE]
        strays = [stray.machine for stray in found.strays if stray.is_ours and stray.run == run.name]
        if found.silent:
            raise found.silent[0]
        if not living and not strays:
            gone = ", ".join(sorted({view.machine for view in views})) or "none of them"
            return f"the cloud lists {gone} as gone, and nothing with our tags"
        contact.say(f"waiting for {', '.join(dict.fromkeys([*living, *strays]))} to be gone")
        time.sleep(LAG_S)


def bill(contact: Contact) -> str:
    """Compare the books with the cloud's own times and prices of the machines."""
    run, job = contact.its_run, contact.job
    report = report_of(run)
    if report.total_usd > contact.trial.max_usd:
        raise RuntimeFault(
            f"${report.total_usd:.4f} were spent, more than ${contact.trial.max_usd:g}", "send in the report"
        )
    seen = {view.machine: view for view in _all_views(run, job)}
    lines, wrong = [], []
    for machine in report.machines:
        view = seen.get(machine.id) or (_head_view(seen, run) if machine.pool == "reserved" else None)
        words, is_right = _compared(machine, view)
        lines.append(words)
        wrong += [] if is_right else [words]
    if wrong:
        raise RuntimeFault(
            "; ".join(wrong), "send in the report, and compare with the cloud's bill in two days"
        )
    if not lines:
        raise NotChecked("nothing was bought")
    later = f"The invoice comes in a day or two: filter it by the tag rlboost-run={run.name}"
    return f"{_total(report)}; {'; '.join(lines)}. {later}"


# --- parts --------------------------------------------------------------------------------------------------


def _judged(findings: Iterable[Finding]) -> str:
    """Return findings in words. Raises `RuntimeFault` with those that failed."""
    told = list(findings)
    failures = [each for each in told if each.verdict is Verdict.FAIL]
    if failures:
        error = RuntimeFault(
            "; ".join(f"{each.check}: {each.found}" for each in failures),
            "; ".join(dict.fromkeys(each.remedy for each in failures if each.remedy)),
        )
        error.exit_code = min(each.exit_code for each in failures)
        raise error
    doubts = [f"note: {each.found}; {each.remedy}" for each in told if each.verdict is Verdict.WARN]
    fine = (f"{each.check}: {each.found}" for each in told if each.verdict is Verdict.OK)
    return "\n".join(["; ".join(fine), *doubts])


def _room(job: Job, facts: dict[str, Any]) -> Iterator[Finding]:
    yield from head_doctor.judge_room(facts["disk"], head_doctor.wanted_bytes(job, facts["python"]))


def _answers(name: str, port: int) -> bool:
    try:
        socket.create_connection((name, port), DIAL_S).close()
    except OSError:
        return False
    return True


def _until(contact: Contact, ready: Callable[[Status], bool], what: str, *, ends: bool = False) -> Status:
    """Follow the run until `ready`, and return its status; `ends`: its end is what is waited for. Raises
    `RuntimeFault` where the run ends before."""
    last = Status()
    for found in follow(contact.its_run):
        last = found.status
        contact.say(f"waiting until {what}; step {last.step}{_last_event(last)}")
        if ready(last):
            return last
    if not ends:
        raise RuntimeFault(f"the run ended before {what}", _problem_of(contact.its_run))
    return last


def _problem_of(run: RunFolder) -> str:
    outcome = outcome_of(run)
    return (
        f"it is {outcome.state}: {outcome.problem}; {outcome.remedy}" if outcome.problem else "read its logs"
    )


def _last_event(status: Status) -> str:
    return f"; {status.events[-1].text}" if status.events else ""


def _serving(status: Status) -> set[str | None]:
    return {i.machine for i in status.instances if i.pool == "spot" and i.policy_version is not None}


def _spot(status: Status) -> list[MachineRow]:
    return [machine for machine in status.machines if machine.pool == "spot"]


def _boots(status: Status) -> str:
    """Return how spot machines came into service, in seconds by phase."""
    phases = {
        f"{machine.id} in {machine.zone}": ", ".join(
            f"{name} {took:.0f}" for name, took in machine.boot_s.items()
        )
        for machine in _spot(status)
        if machine.joined
    }
    return "; ".join(f"{where}: {took or 'no times yet'} (s)" for where, took in phases.items())


def _all_views(run: RunFolder, job: Job) -> list[MachineView]:
    """Return what the cloud says of the run's machines, those that are gone too while it lists them."""
    return [*head_provider(job, run).describe(head_of(run.name)), *provider_for(job, run).describe(run.name)]


def _head_view(seen: dict[str, MachineView], run: RunFolder) -> MachineView | None:
    machine = current_head_machine(run)
    return None if machine is None else seen.get(machine.machine)


def _compared(machine: MachineCost, view: MachineView | None) -> tuple[str, bool]:
    """Return a machine's bill beside what its cloud says, and whether they agree."""
    price = f"${machine.price_usd_per_hour:.4f} ({machine.price_source})"
    words = f"{machine.id}: {machine.billed_s:.0f} s at {price}"
    if view is None or view.started_at is None:
        return f"{words}, which the cloud no longer lists", True
    now = view.price_micro_usd_per_hour
    told = "" if now is None else f" at ${now / MICRO_USD_PER_USD:.4f}"
    if view.ended_at is None:
        return f"{words}; the cloud tells no end{told}", True
    there_s = view.ended_at - view.started_at
    is_right = there_s - BILL_SLACK_S <= machine.billed_s <= max(there_s, MIN_BILLED_S) + BILL_SLACK_S
    return f"{words}; the cloud: {there_s:.0f} s{told}", is_right


def _total(report: CostReport) -> str:
    parts = {**report.compute_usd, **report.other_usd}
    words = ", ".join(f"{name} ${usd:.4f}" for name, usd in parts.items() if usd)
    return f"${report.total_usd:.4f} ({words})"


STEPS = (
    Step(
        "credentials",
        "account, region and machine types",
        300,
        credentials,
        "look at `rlboost doctor`",
        False,
    ),
    Step("plan", "prices, and that the budget suffices", 300, plan, "look at `rlboost plan`", False),
    Step(
        "head quota", "quota and capacity on demand, first boot, SSH", 900, head_quota, "try another region"
    ),
    Step("image", "Python, disk and clock of the image", 300, image, "name another trainer.image"),
    Step("driver", "the GPU that was paid for, and its driver", 60, driver, "name another trainer.image"),
    Step("disk", "throughput of the head's disk", 180, disk, "raise trainer.disk_mib_per_s", is_needed=False),
    Step(
        "head boot", "installation, and that torch sees the GPU", 1500, head_boot, "read the logs of the run"
    ),
    Step("ports", "what the internet reaches of the head", 60, ports, "see docs/head.md", is_needed=False),
    Step("spot quota", "spot quota, the head's identity, a boot", 1200, spot_quota, "see docs/clouds.md"),
    Step("network", "from the head to the zone, engine start", 900, network, "read the logs of the run"),
    Step("preemption", "a spot machine is lost in a step", 600, preemption, "read the logs", is_needed=False),
    Step(
        "ten steps", "a small real model learns", 900, ten_steps, "read the logs of the run", is_needed=False
    ),
    Step("promises", "the run's records, audited", 600, promises, "audit it by hand", is_needed=False),
)
"""In order of cost."""
_LEFT = "type the command again: it only ends what is left; or look into the cloud's own console"
CLEANING = (
    Step("end", "everything can be ended", 600, end, _LEFT, is_needed=False),
    Step("nothing left", "the cloud has no machine of it", 300, nothing_left, _LEFT, is_needed=False),
    Step(
        "bill", "our books against the cloud's times and prices", 120, bill, "compare them", is_needed=False
    ),
)
"""Always taken once there is a run."""
