"""An acceptance: what it buys, how steps keep to deadlines and budget, and what its report keeps back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import convert

from rlboost_cli.acceptance import runner as runner_module
from rlboost_cli.acceptance import steps
from rlboost_cli.acceptance.report import Report, Result, StepResult, scrubbed
from rlboost_cli.acceptance.runner import Runner, interruptible, left_over
from rlboost_cli.acceptance.steps import Contact, NotChecked, Step
from rlboost_cli.acceptance.trial_job import END_S, LEAST_S, Trial, cheapest_machine, trial
from rlboost_cli.doctor import head as head_doctor
from rlboost_providers.base.provider import MachineStatus, MachineView
from rlboost_runtime.billing.launch_records import HeadMachine, keep_head_machine
from rlboost_runtime.billing.report import MachineCost
from rlboost_runtime.errors import ConfigError, QuotaExceeded
from rlboost_runtime.remote import doctor as remote_doctor
from rlboost_runtime.run.create import prepare_run
from rlboost_runtime.run.folder import RunFolder, write_json


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


# --- what it buys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_it_buys_the_cheapest_machines_with_a_gpu_that_will_do(cloud: str) -> None:
    found = trial(cloud, None, 5.0, None)
    quote = cheapest_machine(cloud)
    assert quote is not None
    spot = found.job.rollout.spot
    assert found.job.trainer.infra == f"{cloud}/{quote.region}" == spot.any_of[0].infra
    assert found.job.trainer.accelerators == f"{quote.accelerator}:1"
    assert (spot.min_instances, spot.max_instances, found.job.algorithm.steps) == (2, 2, 10)
    assert found.job.budget.max_usd == 5.0
    machine = f"{quote.accelerator}:1 in {cloud}/{quote.region}"
    assert found.machines == f"a head with {machine} and up to 2 spot machines with {machine}"


def test_its_head_ends_itself_before_the_budget_can_be_spent() -> None:
    found = trial("aws", None, 1.9, None)
    assert found.life_s < 5400
    assert (found.life_s + END_S) / 3600 * found.usd_per_hour <= 1.9 + 1e-3  # hours have four decimals


def test_a_budget_that_is_too_small_for_a_trial_is_refused_and_the_least_is_named() -> None:
    with pytest.raises(ConfigError, match="does not last") as refused:
        trial("aws", None, 0.2, None)
    least = float(refused.value.remedy.split()[2])
    assert trial("aws", None, least + 0.1, None).life_s >= LEAST_S


def test_fields_are_changed_but_not_those_that_hold_the_budget(tmp_path: Path) -> None:
    changes = tmp_path / "more.yaml"
    changes.write_text(
        "trainer: {role: null, ssh_from: [203.0.113.7/32]}\nbudget: {max_usd: 900}\n"
        "after: {failed: stay, done: stay, max_hours: 100}\n"
    )
    job = trial("aws/us-east-2", None, 5.0, changes).job
    assert (job.trainer.role, job.trainer.ssh_from) == (None, ["203.0.113.7/32"])
    assert (job.budget.max_usd, job.after.failed, job.after.done) == (5.0, "down", "down")
    assert job.after.max_hours is not None
    assert job.after.max_hours <= 1.5


def test_what_cannot_be_bought_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no known cloud"):
        trial("awz", None, 5.0, None)
    with pytest.raises(ConfigError, match="no machine with one GPU of 20 GiB") as unknown:
        trial("gcp/europe-west4", None, 5.0, None)
    assert "--with FILE" in unknown.value.remedy
    broken = tmp_path / "broken.yaml"
    broken.write_text("trainer: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml cannot be read"):
        trial("aws", None, 5.0, broken)


# --- how steps are taken ------------------------------------------------------------------------------------


def step(name: str, check: Callable[[Contact], str], **more: object) -> Step:
    return Step(name, f"shows {name}", 5.0, check, f"mend {name}", **more)  # type: ignore[arg-type]


def passes(contact: Contact) -> str:
    return "well"


def makes_run(contact: Contact) -> str:
    contact.run = prepare_run(contact.trial.job_file, contact.job, resume=False).run
    return "made"


def quota(contact: Contact) -> str:
    raise QuotaExceeded("no quota for G machines", "ask for some")


def hangs(contact: Contact) -> str:
    with contextlib.suppress(Exception):  # as any code on the way might
        time.sleep(60)
    return "never"


class Taken:
    """A runner over steps of a test, and what was shown."""

    def __init__(self, patch: pytest.MonkeyPatch, taken: list[Step], cleaning: list[Step]) -> None:
        patch.setattr(runner_module, "STEPS", tuple(taken))
        patch.setattr(runner_module, "CLEANING", tuple(cleaning))
        self.shown: list[StepResult] = []
        self.trial: Trial = trial("aws", None, 5.0, None)
        self.report = Report("aws/us-east-2", "direct", 5.0, 0.0)
        self.runner = Runner(self.trial, self.report, Path("out"), lambda words: None, self.shown.append)

    @property
    def results(self) -> list[tuple[str, Result]]:
        return [(each.step, each.result) for each in self.shown]


P, F, N = Result.PASSED, Result.FAILED, Result.NOT_CHECKED


def test_after_a_needed_step_failed_the_others_are_not_checked_and_all_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = step("no", quota, is_needed=False)
    taken = [step("make", makes_run, is_paid=False), nothing, step("buy", quota), step("train", passes)]
    found = Taken(monkeypatch, taken, [step("end", passes), step("left", passes)])
    found.runner.check()
    assert found.results == [("make", P), ("no", F), ("buy", F), ("train", N), ("end", P), ("left", P)]
    buy, train = found.shown[2:4]
    assert (buy.found, buy.remedy, buy.exit_code) == ("no quota for G machines", "ask for some", 6)
    assert train.found == "buy failed"
    assert found.report.run == "acceptance-aws"


def test_a_step_that_passes_its_deadline_is_given_up_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    late = replace(step("late", hangs, is_needed=False), deadline_s=0.2)
    found = Taken(monkeypatch, [step("make", makes_run), late, step("next", passes)], [step("end", passes)])
    found.runner.check()
    assert found.results == [("make", P), ("late", F), ("next", P), ("end", P)]
    assert (found.shown[1].found, found.shown[1].remedy) == ("not over within 0 s", "mend late")


def test_what_is_not_there_to_be_checked_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(contact: Contact) -> str:
        raise NotChecked("no GPU")

    found = Taken(monkeypatch, [step("driver", no_gpu)], [])
    found.runner.check()
    assert found.results == [("driver", N)]
    assert found.shown[0].found == "not checked here: no GPU"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_acceptance_ends_what_it_bought(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def interrupted(contact: Contact) -> str:
        os.kill(os.getpid(), number)
        time.sleep(5)
        return "never"

    taken = [step("make", makes_run), step("boot", interrupted), step("train", passes)]
    found = Taken(monkeypatch, taken, [step("end", passes)])
    with interruptible():
        found.runner.check()
    assert found.results == [("make", P), ("boot", N), ("end", P)]
    assert found.shown[1].found == "interrupted"


def test_an_error_that_nobody_expected_does_not_leave_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    def crashes(contact: Contact) -> str:
        raise ZeroDivisionError("by nothing")

    taken = [step("make", makes_run), step("boot", crashes)]
    found = Taken(monkeypatch, taken, [step("end", passes)])
    found.runner.check()
    assert found.results == [("make", P), ("boot", F), ("end", P)]
    assert found.shown[1].found == "ZeroDivisionError: by nothing"


def bought(run: RunFolder, age_s: float, ended_s: float | None = None) -> None:
    now = time.time()
    head = HeadMachine("head-1", "aws", "us-east-2a", "L4:1", 805_000, "a test", now - age_s, now - age_s)
    keep_head_machine(run, replace(head, ended_at=None if ended_s is None else now - ended_s))


@pytest.mark.parametrize(("begins", "left_s"), [(False, -1.0), (True, 0.3)])
def test_no_step_begins_or_goes_on_beyond_the_budget(
    monkeypatch: pytest.MonkeyPatch, begins: bool, left_s: float
) -> None:
    began: list[bool] = []

    def buys(contact: Contact) -> str:
        found = makes_run(contact)
        bought(contact.its_run, contact.trial.life_s - left_s)
        return found

    def dear(contact: Contact) -> str:
        began.append(True)
        return hangs(contact)

    taken = [step("buy", buys), step("train", dear, is_needed=False), step("more", passes)]
    found = Taken(monkeypatch, taken, [step("end", passes)])
    found.runner.check()
    assert bool(began) is begins
    assert found.results == [("buy", P), ("train", F), ("more", N), ("end", P)]
    assert found.shown[1].exit_code == 5


def test_a_command_that_was_killed_is_completed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [step("make", makes_run), step("boot", passes), step("train", passes)]
    killed = Taken(monkeypatch, taken, [step("end", passes)])
    for each in taken[:2]:
        killed.runner._take(each)
        killed.report.run = "acceptance-aws"
    killed.runner._keep(taken[1], P, "well")
    killed.report.steps.pop()
    run = left_over("acceptance-aws")
    assert run is not None
    again = Taken(monkeypatch, taken, [step("end", passes)])
    again.runner.clean(run)
    kept = json.loads(Path("out.json").read_text())
    results = [(each["step"], each["result"], each["found"]) for each in kept["steps"]]
    assert results[0] == ("make", "passed", "made")
    assert results[-2:] == [
        ("train", "not checked", "the command was killed before"),
        ("end", "passed", "well"),
    ]
    assert "| end | shows end | passed | well |" in Path("out.md").read_text()


def test_a_run_is_left_over_until_its_head_is_known_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_over("acceptance-aws") is None
    found = Taken(monkeypatch, [step("make", makes_run)], [])
    found.runner.check()
    run = left_over("acceptance-aws")
    assert run is not None
    write_json(run.outcome, {"state": "done"})
    assert left_over("acceptance-aws") is None
    bought(run, 100.0)
    assert left_over("acceptance-aws") is not None
    bought(run, 100.0, ended_s=1.0)
    assert left_over("acceptance-aws") is None


# --- what single steps find ---------------------------------------------------------------------------------


@pytest.fixture
def contact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Contact:
    (tmp_path / "more.yaml").write_text("trainer: {disk_mib_per_s: 400}\n")
    found = Contact(trial("aws", None, 5.0, tmp_path / "more.yaml"), lambda words: None)
    makes_run(found)
    return found


@pytest.mark.parametrize(("mib_per_s", "passes_"), [(390.0, True), (110.0, False)])
def test_a_disk_below_what_was_asked_for_fails(
    contact: Contact, monkeypatch: pytest.MonkeyPatch, mib_per_s: float, passes_: bool
) -> None:
    told = {"throughput": {"write_mib_per_s": mib_per_s, "problem": ""}}
    monkeypatch.setattr(head_doctor, "look", lambda *_, **__: told)
    if passes_:
        assert "390 MiB/s" in steps.disk(contact)
    else:
        with pytest.raises(Exception, match=r"110 MiB/s .* 400 MiB/s were asked for"):
            steps.disk(contact)


def test_a_gpu_that_was_paid_for_and_is_not_there_fails_unless_cpus_are_allowed(contact: Contact) -> None:
    contact.facts = {"gpu": {"gpus": [], "driver": "", "problem": ""}}
    with pytest.raises(Exception, match="L4:1 was bought, and nvidia-smi is not there"):
        steps.driver(contact)
    trainer = contact.job.trainer.model_copy(update={"allow_cpu": True})
    contact.trial = replace(contact.trial, job=contact.job.model_copy(update={"trainer": trainer}))
    with pytest.raises(NotChecked, match="no GPU"):
        steps.driver(contact)


@pytest.fixture
def listening() -> Iterator[list[int]]:
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        yield [a.getsockname()[1], b.getsockname()[1]]


def test_a_port_that_is_open_besides_the_heads_two_fails(
    contact: Contact, monkeypatch: pytest.MonkeyPatch, listening: list[int]
) -> None:
    from rlboost_runtime.run.head import HeadPlace

    monkeypatch.setattr(steps, "kept_place", lambda run: HeadPlace("me@127.0.0.1"))
    ports = {"control_port": listening[0], "bytes_port": listening[1]}
    trainer = contact.job.trainer.model_copy(update=ports)
    contact.trial = replace(contact.trial, job=contact.job.model_copy(update={"trainer": trainer}))
    monkeypatch.setattr(steps, "CLOSED_PORTS", (1, 2))
    assert steps.ports(contact).endswith("of 2 others none does")
    with socket.create_server(("127.0.0.1", 0)) as stray:
        monkeypatch.setattr(steps, "CLOSED_PORTS", (1, stray.getsockname()[1]))
        with pytest.raises(Exception, match=f"these do: {stray.getsockname()[1]}"):
            steps.ports(contact)


@pytest.mark.parametrize(
    ("billed_s", "there_s", "agrees"),
    [(300, 310, True), (300, 350, False), (60, 12, True), (300, 200, False), (300, None, True)],
)
def test_a_bill_agrees_with_the_clouds_own_clock_or_fails(
    billed_s: float, there_s: float | None, agrees: bool
) -> None:
    ended_at = None if there_s is None else 1000.0 + there_s
    view = MachineView("spot-0", MachineStatus.GONE, 1000.0, ended_at)
    machine = convert(
        {
            **dict.fromkeys(MachineCost.__struct_fields__, ""),
            "id": "spot-0",
            "started_at": 1000.0,
            "ended_at": None,
            "num_lives": 1,
            "billed_s": billed_s,
            "price_usd_per_hour": 0.4,
            "cost_usd": 0.0,
            "useful_usd": 0.0,
            "wasted_usd": {},
        },
        MachineCost,
    )
    words, found = steps._compared(machine, view)
    assert found is agrees
    assert f"{billed_s:.0f} s at $0.4000" in words


def test_throughput_is_measured_and_the_file_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_doctor, "MEASURED_BYTES", 4 << 20)
    folder = tmp_path / "disk"
    folder.mkdir()
    found = remote_doctor.throughput(folder / "not-there-yet")
    assert found["write_mib_per_s"] > 0
    assert found["problem"] == ""
    assert list(folder.iterdir()) == []


# --- what the report keeps back -----------------------------------------------------------------------------


def test_a_report_has_no_secret_address_account_or_home_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    monkeypatch.setenv("JUDGE", "s3cret-of-mine")
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "my-company-42")
    said = (
        "arn:aws:iam::123456789012:user/x at 203.0.113.7 and 2001:db8:0:1::7, key AKIAIOSFODNN7EXAMPLE,"
        " wJalrXUtnFEMI/K7MDENG, s3cret-of-mine, projects/other-company-7/zones, me@example.com,"
        f" my-company-42, {os.environ['RLBOOST_HOME']}/runs, {Path.home()}/.aws at 12:34:56"
    )
    found = scrubbed(said, ["JUDGE"])
    for gone in (
        *("123456789012", "203.0.113.7", "2001:db8", "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI", "s3cret"),
        *("other-company", "me@example", "my-company", os.environ["RLBOOST_HOME"], f"{Path.home()}/"),
    ):
        assert gone not in found, gone
    assert "user/x at <address>" in found
    assert found.endswith("~/.aws at 12:34:56")


# --- what the pages say of it -------------------------------------------------------------------------------

DOCS = Path(__file__).parents[3] / "docs"
NAMES = [step.name for step in (*steps.STEPS, *steps.CLEANING)]


def test_the_page_has_every_step_in_order() -> None:
    page = (DOCS / "first-run.md").read_text()
    rows = re.findall(r"^\| ([a-z ,]+) \| (?!shows)", page, re.MULTILINE)
    assert ", ".join(rows).split(", ") == NAMES


def test_each_limit_of_what_was_tried_names_a_step_or_says_that_there_is_none() -> None:
    page = (DOCS / "limits.md").read_text().partition("## What only a real account can show")[2]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", page.partition("\n## ")[0], re.MULTILINE)[1:]
    named = {name for row in rows if not row.startswith("none: ") for name in row.split(", ")}
    assert len(rows) > 10
    assert named <= set(NAMES), named - set(NAMES)


@pytest.mark.parametrize("tool", ["aws", "gcloud"])
def test_set_up_commands_of_the_page_are_those_that_tests_type(tool: str) -> None:
    """`tests/cloud/test_aws_setup.py` and `tests/integration/providers` type those of the other two pages."""
    elsewhere = (DOCS / "clouds.md").read_text() + (DOCS / "head.md").read_text()
    typed = [line for line in (DOCS / "first-run.md").read_text().splitlines() if line.startswith(f"{tool} ")]
    assert len(typed) > 5
    assert [line for line in typed if line not in elsewhere] == []
