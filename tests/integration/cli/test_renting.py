"""Renting a head, against EC2 on loopback: noted before, once, waited for, given back."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from ruamel.yaml import YAML
from typer.testing import CliRunner

from rlboost_cli.head import control, head_books, renting
from rlboost_cli.head.connection import Head, HeadRefused
from rlboost_cli.head.head_books import find_out, settle, take_report
from rlboost_cli.head.mirror import close_mirror, is_complete, open_mirror
from rlboost_cli.head.renting import give_back, rent
from rlboost_cli.main import app
from rlboost_cli.planning import agreement as probe
from rlboost_cli.runs import sweep
from rlboost_cli.runs.target import find_target
from rlboost_cli.runs.teardown import end_run, end_without_head
from rlboost_providers.aws.provider import AwsProvider
from rlboost_providers.base.provider import LaunchRequest, MachineStatus, MachineView
from rlboost_providers.base.traits import ProviderTraits
from rlboost_providers.registry import head_usd_per_hour, provider_for
from rlboost_providers.skypilot import session
from rlboost_providers.skypilot.provider import SkyPilotProvider
from rlboost_runtime.billing.books import report_of
from rlboost_runtime.billing.launch_records import (
    HeadMachine,
    LaunchBackup,
    LaunchRecords,
    current_head_machine,
    keep_head_machine,
    kept_head_machines,
)
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.errors import ConfigError, CredentialsRejected, NoCapacity, ProviderError, RuntimeFault
from rlboost_runtime.job import Trainer
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.run.create import prepare_run, reopen, stored_job
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.head import kept_place
from rlboost_runtime.trainer.artifacts.report import put_report
from tests.fakes.ec2 import IMAGE, REGION, FakeEc2, Refusal, fake_ec2
from tests.fakes.skypilot import ON_DEMAND, FakeSkyPilot

pytestmark = pytest.mark.integration
KIND, ZONE = "g5.xlarge", f"{REGION}a"


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEc2]:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    with fake_ec2() as fake:
        fake.sign_in(monkeypatch)
        fake.prices = {(KIND, ZONE): 0.30}
        yield fake


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(renting, "_LOOK_S", 0.05)
    return made(tmp_path)


def made(tmp_path: Path) -> RunFolder:
    fields = {
        "name": "far",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["spell_backward"]},
        "trainer": {
            "infra": f"aws/{REGION}",
            "accelerators": "A10G:1",
            "image": IMAGE,
            "private_address": True,
        },
        "rollout": {
            "spot": {
                "any_of": [
                    {"infra": f"aws/{REGION}", "accelerators": "A10G:1", "via": "direct", "image": IMAGE}
                ]
            }
        },
        "after": {"idle_minutes": 15.0},
    }
    path = tmp_path / "job.yaml"
    with path.open("w") as file:
        YAML().dump(fields, file)
    return prepare_run(path, load_job(path)).run


def let_in(monkeypatch: pytest.MonkeyPatch, *refusals: str) -> None:
    """Have the machine let us in after so many refusals; the lab's tests have a real one."""
    said = iter(refusals)
    monkeypatch.setattr(renting, "_is_let_in", lambda run: next(said, None))


def silently(words: str) -> None:
    pass


def test_the_machine_is_noted_before_it_is_asked_for_and_found_again_by_who_types_again(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch, "its key is another yet")
    launch = AwsProvider.launch

    def cut_off(provider: AwsProvider, request: Any) -> Any:
        noted = current_head_machine(run)
        assert noted is not None
        assert (noted.machine, noted.launched_at) == (request.machine, None), "the intent comes first"
        launch(provider, request)
        raise KeyboardInterrupt  # the laptop dies before it hears of the machine

    monkeypatch.setattr(AwsProvider, "launch", cut_off)
    with pytest.raises(KeyboardInterrupt):
        rent(run, silently)
    monkeypatch.setattr(AwsProvider, "launch", launch)
    for _ in range(2):
        rent(run, silently)
    (instance,) = ec2.instances()
    assert [head.machine for head in kept_head_machines(run)] == ["head-1"]
    place = kept_place(run)
    assert place.host == f"rlboost@{instance.private_ip}"
    assert place.host_key is not None
    assert place.host_key.startswith("ssh-ed25519 ")
    secrets = [path for path in (run.path / "secrets").iterdir() if path.stat().st_mode & 0o77]
    assert secrets == []


def waiting(run: RunFolder, minutes: float) -> None:
    job = json.loads(run.job_json.read_text())
    job["trainer"]["max_wait_minutes"] = minutes
    write_json(run.job_json, job)


def test_a_launch_waits_for_capacity_as_long_as_the_job_says(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    monkeypatch.setattr(renting, "RETRY_S", 0.1)
    waiting(run, 0.5)
    ec2.capacity = {ZONE: 0}
    said: list[str] = []

    def say(words: str) -> None:
        said.append(words)
        if sum("retrying" in each for each in said) == 3:
            ec2.capacity = {ZONE: 1}

    rent(run, say)
    assert len(ec2.instances()) == 1
    assert "InsufficientInstanceCapacity" in said[1]
    assert "retrying every 0 s for " in said[1]
    assert [head.launched_at is None for head in kept_head_machines(run)] == [True, True, True, False]


def test_a_launch_gives_up_when_its_wait_is_over(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renting, "RETRY_S", 0.1)
    ec2.capacity = {ZONE: 0}
    waiting(run, 0)
    with pytest.raises(NoCapacity):
        rent(run, silently)  # and what is imported at the first call takes no part of the next wait
    assert len(kept_head_machines(run)) == 1
    waiting(run, 0.05)
    with pytest.raises(NoCapacity):
        rent(run, silently)
    assert len(kept_head_machines(run)) in range(2, 40)  # a round takes its time on a busy machine


def test_two_commands_at_once_rent_one_machine(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    both = [threading.Thread(target=rent, args=(run, silently)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(timeout=60)
    assert len(ec2.instances(alive=False)) == 1


def test_a_look_while_the_head_is_being_launched_does_not_take_it_for_gone(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    monkeypatch.setattr(renting, "provider_traits", lambda name: ProviderTraits(name, launch_lag_s=0.0))
    launch = AwsProvider.launch

    def looked_at_meanwhile(provider: AwsProvider, request: LaunchRequest) -> Any:
        find_out(run, silently)  # `rlboost status`, which EC2 tells of no machine yet
        noted = current_head_machine(run)
        assert noted is not None
        assert noted.ended_at is None, "it is being launched"
        return launch(provider, request)

    monkeypatch.setattr(AwsProvider, "launch", looked_at_meanwhile)
    rent(run, silently)
    head = current_head_machine(run)
    assert head is not None
    assert (head.launched_at is None, head.ended_at) == (False, None)
    give_back(run, silently)
    assert ec2.instances() == []


def test_a_machine_that_its_cloud_does_not_list_yet_is_waited_for_before_it_is_called_gone(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = AwsProvider.launch

    def cut_off(provider: AwsProvider, request: LaunchRequest) -> Any:
        launch(provider, request)
        raise KeyboardInterrupt

    monkeypatch.setattr(AwsProvider, "launch", cut_off)
    with pytest.raises(KeyboardInterrupt):
        rent(run, silently)
    ec2.lists_lag = True
    find_out(run, silently)
    head = current_head_machine(run)
    assert head is not None
    assert (head.launched_at, head.ended_at) == (None, None), "only its intent is known, and it is young"

    def listed(words: str) -> None:
        ec2.lists_lag = "waiting until" not in words

    give_back(run, listed)
    assert ec2.instances() == []
    (head,) = kept_head_machines(run)
    assert head.launched_at is not None, "it is billed"


def test_a_launched_machine_that_is_not_listed_yet_is_not_launched_twice(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    monkeypatch.setattr(renting, "_await_it", lambda *_: None)
    ec2.lists_lag = True
    rent(run, silently)
    assert len(ec2.instances(alive=False)) == 1
    assert [head.machine for head in kept_head_machines(run)] == ["head-1"]


def test_down_ends_a_head_that_still_boots_and_the_run_can_be_resumed_on_another(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(run: RunFolder) -> str | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(renting, "_is_let_in", cut_off)
    with pytest.raises(KeyboardInterrupt):
        rent(run, silently)
    assert len(ec2.instances()) == 1
    end_run(run, silently)
    assert ec2.instances() == []
    assert is_complete(run), "the head need not be asked any more"
    let_in(monkeypatch)
    find_target("far", resume=True).prepare(resume=True)
    rent(run, silently)
    assert [head.machine for head in kept_head_machines(run)] == ["head-1", "head-2"]


def test_ctrl_c_while_the_head_boots_says_that_nothing_goes_on(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(run: RunFolder) -> str | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(renting, "_is_let_in", cut_off)
    for command in ("launch", "up"):
        said = CliRunner().invoke(app, [command, "far", "--yes"])
        assert said.exit_code == 130
        assert "far has not been started on its head" in said.output
        assert "ends the head, which costs money until then" in said.output
        assert "is still running\n" not in said.output
    open_mirror(run)
    said = CliRunner().invoke(app, ["launch", "far", "--yes"])
    assert (said.exit_code, "detached; far is still running" in said.output) == (0, True)


def test_ctrl_c_while_a_job_is_measured_says_what_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(run: RunFolder, say: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(probe, "bring_up", cut_off)
    job = tmp_path / "job.yaml"
    job.write_text("name: near\nmodel: {init: tiny}\ndata: {reasoning_gym: [spell_backward]}\n")
    said = CliRunner().invoke(app, ["plan", str(job), "--probe", "--yes"])
    assert said.exit_code == 130
    assert "near-probe is still running" in said.output
    assert "rlboost down near-probe" in said.output


def test_a_run_whose_start_was_never_heard_of_is_not_bought_a_second_time(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)

    typed = []

    class CutOff(Head):
        """The laptop is cut off right after it has typed the command there."""

        def ask(self, do: str, **more: Any) -> tuple[dict[str, Any], bytes]:
            return {"supervised": False, "exists": True, "ended": False}, b""

        def rlboost(self, *arguments: str, **more: Any) -> Any:
            typed.append(arguments)
            raise KeyboardInterrupt

    monkeypatch.setattr(control, "Head", CutOff)
    monkeypatch.setattr(control, "install", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        control.bring_up(run, silently)
    assert typed == [("up", "far", "--yes")], "nobody is there to be asked"
    ec2.powered_off("head-1")  # it trained the run to its end
    with pytest.raises(RuntimeFault, match="is gone, with everything on its disk"):
        rent(run, silently)
    find_out(run, silently)
    assert "with everything on its disk, and the outcome" in (read_json(run.outcome) or {})["problem"]
    assert ec2.instances() == []
    (bill,) = to_builtins(report_of(run))["machines"]
    assert bill["ended_at"] is not None


def test_where_the_head_refuses_the_job_the_run_has_nothing_there_to_lose(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)

    class Refusing(Head):
        def ask(self, do: str, **more: Any) -> tuple[dict[str, Any], bytes]:
            return {"supervised": False, "exists": False, "ended": False}, b""

        def rlboost(self, *arguments: str, **more: Any) -> Any:
            raise HeadRefused("no such bucket", "make it")

    monkeypatch.setattr(control, "Head", Refusing)
    monkeypatch.setattr(control, "install", lambda *_: None)
    monkeypatch.setattr(control, "ship", lambda *_: "job.yaml")
    with pytest.raises(HeadRefused, match="no such bucket"):
        control.bring_up(run, silently)
    ec2.powered_off("head-1")
    find_out(run, silently)
    assert not run.outcome.exists()
    rent(run, silently)
    assert [head.machine for head in kept_head_machines(run)] == ["head-1", "head-2"]


def test_a_machine_that_never_lets_us_in_is_given_back_and_billed_and_the_next_try_rents_another(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renting, "BOOT_S", 0.2)
    let_in(monkeypatch, *["no way to port 22"] * 1000)
    ec2.console = "".join(f"line {n}\r\n" for n in range(30)) + "\x1b[31msshd: no host key\x1b[0m\x07\r\n"
    with pytest.raises(RuntimeFault, match=r"was not reached by SSH within .* no way to port 22") as failure:
        rent(run, silently)
    log = run.logs / "machines" / "head-1" / "console.log"
    *_, told = failure.value.problem.partition(f"; its console ({log}) ends with:\n")
    assert told.splitlines() == [*(f"  line {n}" for n in range(16, 30)), "  sshd: no host key"]
    assert log.read_text().startswith("line 0\nline 1\n")
    assert ec2.instances() == []
    let_in(monkeypatch)
    rent(run, silently)
    assert [head.machine for head in kept_head_machines(run)] == ["head-1", "head-2"]
    give_back(run, silently)
    settle(run)
    bills = {bill["id"]: bill for bill in to_builtins(report_of(run))["machines"]}
    assert set(bills) == {"head-1", "reserved-0"}
    assert all(bill["price_usd_per_hour"] == 1.006 for bill in bills.values())


def test_a_cloud_that_is_silent_for_a_moment_while_the_head_boots_is_asked_again(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch, "not yet", "not yet")
    look, looks = renting.view_of, itertools.count()

    def now_and_then(*asked: Any) -> Any:
        if next(looks) == 1:
            raise ProviderError("EC2 cannot be reached: timed out", "wait; the launch is retried")
        return look(*asked)

    monkeypatch.setattr(renting, "view_of", now_and_then)
    rent(run, silently)
    assert len(ec2.instances(alive=False)) == 1


@pytest.mark.parametrize("is_back", [True, False])
def test_a_head_that_cannot_be_waited_for_is_given_back_or_named_as_left(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    look, looks = renting.view_of, itertools.count()

    def rejected(*asked: Any) -> Any:
        if next(looks) == 0 or not is_back:
            raise CredentialsRejected("the token has expired", "sign in again")
        return look(*asked)

    monkeypatch.setattr(renting, "view_of", rejected)
    expected, words = (CredentialsRejected, "expired") if is_back else (RuntimeFault, "and costs money")
    with pytest.raises(expected, match=words) as failure:
        rent(run, silently)
    assert (len(ec2.instances()) == 0) is is_back
    assert is_back or "rlboost down far" in failure.value.remedy


def test_without_a_way_to_reach_it_no_head_is_bought(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(ConfigError, match="paramiko, which is not installed"):
        rent(run, silently)
    assert ec2.instances(alive=False) == []


def test_a_head_on_which_the_run_was_started_is_not_given_back_because_we_cannot_reach_it(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    open_mirror(run)
    monkeypatch.setattr(renting, "BOOT_S", 0.2)
    let_in(monkeypatch, *["no way to port 22"] * 1000)
    with pytest.raises(RuntimeFault, match="was not reached by SSH") as failure:
        rent(run, silently)
    assert "given back" not in failure.value.problem
    assert len(ec2.instances()) == 1


def test_a_head_on_which_the_run_was_started_stays_where_an_outcome_comes_while_it_is_waited_for(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    open_mirror(run)

    def learns_of_an_end(run: RunFolder) -> str:
        write_json(run.outcome, {"state": "stopped"})  # what `status` fetches, elsewhere
        return "not yet"

    monkeypatch.setattr(renting, "_is_let_in", learns_of_an_end)
    with pytest.raises(RuntimeFault, match="far was stopped in the meantime"):
        rent(run, silently)
    assert len(ec2.instances()) == 1, "its checkpoints are there"


def test_a_console_that_may_not_be_read_does_not_hide_why_it_was_looked_at(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renting, "BOOT_S", 0.2)
    let_in(monkeypatch, *["no way to port 22"] * 1000)
    ec2.refusals.append(Refusal("GetConsoleOutput", "UnauthorizedOperation", 403))
    with pytest.raises(RuntimeFault, match=r"no way to port 22; its console cannot be read: ") as failure:
        rent(run, silently)
    assert "ends with" not in failure.value.problem
    with pytest.raises(RuntimeFault, match=r"no way to port 22; its console is empty yet"):
        rent(run, silently)
    assert ec2.instances() == []


def test_a_run_whose_head_was_never_bought_is_shown_as_such_and_ended_without_asking_a_cloud(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be bought for want of credentials needs none to be ended."""

    def is_asked(*_: object) -> None:
        raise CredentialsRejected("no credentials", "sign in")

    monkeypatch.setattr(AwsProvider, "describe", is_asked)
    monkeypatch.setattr(AwsProvider, "terminate", is_asked)
    said = CliRunner().invoke(app, ["status", "far"])
    assert "far was not started on its head yet" in said.output
    assert "still running" not in said.output
    said = CliRunner().invoke(app, ["down", "far", "--yes"])
    assert (said.exit_code, is_complete(run)) == (0, True), said.output


def test_status_names_a_head_that_was_bought_for_a_run_that_never_came_to_it(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    assert (
        "head-1 in us-east-2a may be running for it, at $"
        in CliRunner().invoke(app, ["status", "far"]).output
    )


def test_who_waits_for_another_command_that_rents_the_head_says_so(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    said: list[str] = []
    with renting.alone(run):
        other = threading.Thread(target=rent, args=(run, said.append))
        other.start()
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said[:1] == ["waiting for another command, which launches or ends the head of far"]
    other.join(timeout=60)
    assert len(ec2.instances()) == 1


def test_where_there_is_none_nothing_is_rented_and_another_id_is_asked_for_next(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    ec2.capacity[ZONE] = 0
    with pytest.raises(NoCapacity) as refusal:
        rent(run, silently)
    assert refusal.value.exit_code == 4
    ec2.capacity[ZONE] = 1
    rent(run, silently)
    assert [head.machine for head in kept_head_machines(run)] == ["head-1", "head-2"]
    assert len(ec2.instances(alive=False)) == 1


def test_a_price_above_the_bound_rents_nothing(ec2: FakeEc2, run: RunFolder) -> None:
    job = json.loads(run.job_json.read_text())
    job["trainer"]["max_price_usd_per_hour"] = 0.5
    write_json(run.job_json, job)
    with pytest.raises(NoCapacity, match=r"costs more than trainer\.max_price_usd_per_hour, \$0\.5"):
        rent(run, silently)
    assert ec2.instances(alive=False) == []


def test_a_region_whose_prices_nobody_knows_is_not_bought_in_blindly(run: RunFolder, ec2: FakeEc2) -> None:
    job = json.loads(run.job_json.read_text())
    job["trainer"]["infra"] = "aws/eu-nowhere-1"
    write_json(run.job_json, job)
    with pytest.raises(ConfigError, match="no price of A10G:1 in aws/eu-nowhere-1 is known"):
        rent(run, silently)


def test_a_run_that_is_ended_while_its_head_boots_leaves_no_head(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_it(run: RunFolder) -> str:
        write_json(run.outcome, {"state": "stopped"})  # what `down` does, elsewhere
        return "not yet"

    monkeypatch.setattr(renting, "_is_let_in", ends_it)
    with pytest.raises(RuntimeFault, match="far was stopped in the meantime"):
        rent(run, silently)
    assert ec2.instances() == []


def test_down_ends_a_head_of_which_only_the_intent_is_known_here_and_what_it_launched(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    write_json(run.mirror, {"at": 0.0, "supervised": True, "marks": {}})
    fleet = provider_for(stored_job(run), run)
    bootstrap = {"machine": "spot-0", "instances": ("spot-0/0",)}
    fleet.launch(LaunchRequest(run.name, "spot-0", fleet.offers()[0], bootstrap))
    found = {(stray.run, stray.machine) for stray in sweep.look(silently, ["aws"]).strays}
    assert found == set(), "its run is open"
    ec2.powered_off("head-1")  # it ended itself, with the laptop off
    find_out(run, silently)
    assert "with everything on its disk, and the outcome" in (read_json(run.outcome) or {})["problem"]
    found = {(stray.run, stray.machine) for stray in sweep.look(silently, ["aws"]).strays}
    assert found == {("far", "spot-0")}
    control.end_run(run, silently)
    assert ec2.instances() == []
    bill = next(bill for bill in to_builtins(report_of(run))["machines"] if bill["pool"] == "reserved")
    head = current_head_machine(run)
    assert head is not None
    assert (bill["started_at"], bill["ended_at"]) == (head.launched_at, head.ended_at)


def test_machines_that_a_lost_head_launched_after_the_last_look_are_ended_and_billed(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    job = json.loads(run.job_json.read_text())
    job["output"] = str(tmp_path / "bucket")
    write_json(run.job_json, job)
    write_json(run.mirror, {"at": 0.0, "supervised": True, "marks": {}})
    fleet = provider_for(stored_job(run), run)
    offer = fleet.offers()[0]
    on_head = RunFolder(tmp_path / "head" / run.name)  # what the head's coordinator does before a launch
    on_head.path.mkdir(parents=True)
    for name in ("spot-0", "spot-1"):
        LaunchRecords(on_head.cloud / "bought.json").add(name, offer)
        assert LaunchBackup(on_head, stored_job(run).output).put()
    bootstrap = {"machine": "spot-0", "instances": ("spot-0/0",)}
    fleet.launch(LaunchRequest(run.name, "spot-0", offer, bootstrap))  # spot-1 came to nothing
    ec2.powered_off("head-1")
    control.end_run(run, silently)
    assert ec2.instances() == []
    bills = {bill["id"]: bill for bill in to_builtins(report_of(run))["machines"]}
    assert set(bills) == {"reserved-0", "spot-0", "spot-1"}
    assert bills["spot-0"]["started_at"] is not None
    assert bills["spot-1"]["billed_s"] == 0


def test_the_report_of_the_end_before_a_resumption_says_nothing_of_a_head_that_is_lost_after_it(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    let_in(monkeypatch)
    job = json.loads(run.job_json.read_text()) | {"output": str(tmp_path / "bucket")}
    write_json(run.job_json, job)
    rent(run, silently)
    on_head = RunFolder(tmp_path / "head" / run.name)
    on_head.logs.mkdir(parents=True)

    def spends(folder: RunFolder, *machines: str) -> None:
        ledger = Ledger(folder.ledger)
        for name in machines:
            ledger.intend(HeadMachine(name, "aws", ZONE, "A10G:1", 36_000_000, "t", 1000.0))
            ledger.launched(name, 1000.0)
            ledger.ended(name, 4600.0)
        ledger.close()

    def ends(state: str) -> list[int]:
        write_json(on_head.outcome, {"state": state})
        assert put_report(on_head, job["output"])
        facts = on_head.outcome.stat()
        return [facts.st_size, facts.st_mtime_ns]

    spends(on_head, "spot-0")
    mark = ends("stopped")
    write_json(run.outcome, {"state": "stopped"})  # as it was fetched
    write_json(run.mirror, {"at": 0.0, "supervised": False, "marks": {"outcome.json": mark}})
    reopen(run)
    spends(run, "spot-0", "spot-1")  # as it was fetched after the resumption
    ec2.powered_off("head-1")
    find_out(run, silently)
    assert "with everything on its disk, and the outcome" in (read_json(run.outcome) or {})["problem"]
    bills = {bill["id"] for bill in to_builtins(report_of(run))["machines"]}
    assert bills == {"reserved-0", "spot-0", "spot-1"}


def test_the_report_of_the_end_after_a_resumption_is_taken(run: RunFolder, tmp_path: Path) -> None:
    write_json(run.job_json, (read_json(run.job_json) or {}) | {"output": str(tmp_path / "bucket")})
    on_head = RunFolder(tmp_path / "head" / run.name)
    on_head.logs.mkdir(parents=True)
    write_json(on_head.outcome, {"state": "done"})
    assert put_report(on_head, str(tmp_path / "bucket"))
    before = on_head.outcome.stat().st_mtime_ns - 1
    write_json(run.mirror, {"at": 0.0, "supervised": True, "marks": {}, "former_end_ns": before})
    take_report(run, silently)
    assert (read_json(run.outcome) or {})["state"] == "done"


@pytest.mark.parametrize(
    ("state", "ends_itself", "is_left"),
    [("done", True, 0), ("failed", True, 1), ("budget", True, 1), ("failed", False, 0)],
)
def test_a_watched_launch_leaves_the_head_of_a_run_that_failed_to_be_looked_at_and_resumed_on(
    ec2: FakeEc2,
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    ends_itself: bool,
    is_left: int,
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    open_mirror(run)
    write_json(run.outcome, {"state": state})
    monkeypatch.setattr(control, "refresh_and_close", lambda run, head: close_mirror(run))
    monkeypatch.setattr(control, "_fetch_model_and_checkpoint", lambda *_: None)
    monkeypatch.setattr(Trainer, "ends_itself", ends_itself)
    control.collect_results(run, silently)
    assert len(ec2.instances()) == is_left
    if is_left:
        said = capsys.readouterr().err
        assert "note: the head of far stays for 15 min at $1.0060 per hour" in said
        assert "rlboost launch far --resume continues there" in said
        find_target("far", resume=True).prepare(resume=True)


@pytest.mark.parametrize(("has_output", "gives_model"), [(True, False), (False, True), (False, False)])
def test_down_gives_a_head_back_that_cannot_tell_its_books_unless_its_model_is_nowhere_else(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch, has_output: bool, gives_model: bool
) -> None:
    let_in(monkeypatch)
    if has_output:
        write_json(run.job_json, json.loads(run.job_json.read_text()) | {"output": "/somewhere"})
    rent(run, silently)
    open_mirror(run)

    class DiskFull(Head):
        def ask(self, do: str, **more: Any) -> tuple[dict[str, Any], bytes]:
            if do == "mirror" or (do == "results" and not gives_model):
                raise RuntimeFault("far cannot do it: ledger.sqlite: disk is full", "correct that there")
            return {"exists": True, "status": 0, "out": "", "err": "", "files": []}, b""

    monkeypatch.setattr(control, "Head", DiskFull)
    if has_output or gives_model:
        end_run(run, silently)
        assert (ec2.instances(), is_complete(run)) == ([], True)
        return
    with pytest.raises(RuntimeFault, match="its model is still on its head, which costs money") as refusal:
        end_run(run, silently)
    assert "--lost-head` releases the head" in refusal.value.remedy
    assert len(ec2.instances()) == 1
    end_without_head(run, silently)
    assert ec2.instances() == []


@pytest.mark.parametrize("content", [b"", b'[{"machine": "head-1", "pro', b"\x00\xff"])
def test_a_rental_file_that_was_cut_off_is_named(run: RunFolder, content: bytes) -> None:
    run.head_machines.write_bytes(content)
    with pytest.raises(RuntimeFault, match=r"rentals\.json is damaged") as fault:
        current_head_machine(run)
    assert "rlboost gc finds the machine" in fault.value.remedy
    assert CliRunner().invoke(app, ["down", "far", "--yes"]).exit_code == 1


def test_gc_finds_a_head_by_its_tags_once_its_run_has_ended(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    run.head_machines.unlink()  # not even the intent is left
    write_json(run.outcome, {"state": "done"})
    (stray,) = sweep.look(silently).strays
    assert (stray.run, stray.machine, stray.is_ours) == ("far", "head-1", True)
    assert "`rlboost down far` fetches it and ends the machine" in stray.why
    said = CliRunner().invoke(app, ["gc", "--yes"])
    assert (said.exit_code, len(ec2.instances())) == (0, 1), "nothing else has its results"
    assert sweep.end([stray], silently) == []
    assert ec2.instances() == []


def test_gc_finds_the_machines_of_an_open_run_whose_head_is_gone(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    open_mirror(run)
    fleet = provider_for(stored_job(run), run)
    bootstrap = {"machine": "spot-0", "instances": ("spot-0/0",)}
    fleet.launch(LaunchRequest(run.name, "spot-0", fleet.offers()[0], bootstrap))
    assert CliRunner().invoke(app, ["gc", "--yes"]).exit_code == 0
    assert len(ec2.instances()) == 2, "its run is open"
    ec2.powered_off("head-1")
    said = CliRunner().invoke(app, ["gc"])
    assert (said.exit_code, len(ec2.instances())) == (2, 1), "nobody was asked"
    assert "add --yes" in said.output
    assert CliRunner().invoke(app, ["gc", "--yes"]).exit_code == 0
    assert ec2.instances() == []


def test_a_run_that_cannot_be_read_hides_no_machine_of_its_cloud(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    write_json(run.outcome, {"state": "done"})
    run.job_json.write_text('{"of": "another version"}')
    found = sweep.look(silently, ["aws"])
    assert [(stray.run, stray.machine) for stray in found.strays] == [("far", "head-1")]
    assert ["cannot be read" in problem.problem for problem in found.silent] == [True]


def test_a_head_that_ended_itself_unseen_is_billed_no_longer_than_it_can_have_been_there(
    ec2: FakeEc2, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    rent(run, silently)
    head = current_head_machine(run)
    assert head is not None
    assert head.launched_at is not None
    day_ago = head.launched_at - 86_400
    keep_head_machine(run, replace(head, launched_at=day_ago))
    ledger = Ledger(run.ledger)  # as its coordinator closed it, and the laptop fetched it
    head_books._enter(ledger, "reserved-0", replace(head, launched_at=day_ago, ended_at=day_ago + 600))
    ledger.close()
    write_json(run.outcome, {"state": "done"})
    write_json(run.mirror, {"at": 0.0, "supervised": False, "marks": {}, "complete": True})
    monkeypatch.setattr(head_books, "view_of", lambda *_: None)  # EC2 has forgotten it
    find_out(run, silently)
    (bill,) = to_builtins(report_of(run))["machines"]
    assert bill["billed_s"] == 600 + 15 * 60, "its idle_minutes after the run"
    with pytest.raises(RuntimeFault, match="is gone, with everything on its disk"):
        find_target("far", resume=True).prepare(resume=True)
    assert run.outcome.exists(), "it was not opened again"


# --- through SkyPilot ---------------------------------------------------------------------------------------


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSkyPilot]:
    """SkyPilot from memory, which whoever asks for a head's provider, or for what is left, gets."""
    fake = FakeSkyPilot()
    monkeypatch.setattr(session.Session, "sky", lambda self: fake)
    yield fake
    fake.join()


def through_skypilot(run: RunFolder, **changes: object) -> None:
    job = json.loads(run.job_json.read_text())
    job["trainer"] |= {
        "infra": "aws",
        "via": "skypilot",
        "image": None,
        "disk_mib_per_s": "auto",
        "private_address": False,
        **changes,
    }
    write_json(run.job_json, job)


def test_a_head_is_bought_through_skypilot_at_its_price_found_again_and_given_back(
    run: RunFolder, sky: FakeSkyPilot, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    through_skypilot(run, role="rlboost-head")
    assert head_usd_per_hour(stored_job(run)) == ON_DEMAND
    through_skypilot(run, role="rlboost-head", accelerators="NEW:1")  # in no shipped table
    assert head_usd_per_hour(stored_job(run)) == ON_DEMAND
    sky.is_down = True
    assert head_usd_per_hour(stored_job(run)) is None
    sky.is_down = False
    through_skypilot(run, role="rlboost-head", accelerators="A10G:1")
    rent(run, silently)
    rent(run, silently)
    assert len(sky.launched) == 1
    head = current_head_machine(run)
    assert head is not None
    assert (head.provider, head.zone) == ("skypilot", "aws/us-west-2/us-west-2a")
    assert head.price_micro_usd_per_hour == round(ON_DEMAND * 1e6)
    assert head.price_source == "SkyPilot catalogue"
    assert kept_place(run).host == "rlboost@203.0.113.9"
    (script,) = run.cloud.rglob("start.sh")
    assert '"cloud": "skypilot"' in script.read_text()
    assert sweep.look(silently).strays == (), "its run is open"
    write_json(run.outcome, {"state": "stopped"})
    (stray,) = sweep.look(silently).strays
    assert (stray.run, stray.machine, stray.provider) == ("far", "head-1", "skypilot")
    give_back(run, silently)
    assert sky.clusters == {}
    settle(run)
    (bill,) = to_builtins(report_of(run))["machines"]
    assert (bill["pool"], bill["price_usd_per_hour"]) == ("reserved", ON_DEMAND)


def test_where_skypilots_cloud_has_none_the_next_zone_is_asked_and_the_intents_stay_in_the_books(
    run: RunFolder, sky: FakeSkyPilot, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    through_skypilot(run, role="rlboost-head")
    sky.refuse["us-west-2a"] = ("ResourcesUnavailableError", "InsufficientInstanceCapacity")
    rent(run, silently)
    head = current_head_machine(run)
    assert head is not None
    assert (head.machine, head.zone) == ("head-2", "aws/us-east-1/us-east-1a")
    assert [(each.machine, each.launched_at is None) for each in kept_head_machines(run)] == [
        ("head-1", True),
        ("head-2", False),
    ]
    assert [cluster["zone"] for cluster in sky.clusters.values()] == ["us-east-1a"]


def test_a_refusal_that_is_told_late_is_billed_nothing_and_the_next_zone_is_asked(
    run: RunFolder, sky: FakeSkyPilot, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    through_skypilot(run, role="rlboost-head")
    launch, look = SkyPilotProvider.launch, renting.view_of
    none_left, late = "no capacity for this machine now", {"head-1"}

    def begun(provider: SkyPilotProvider, request: LaunchRequest) -> MachineView:
        if request.machine not in late:
            return launch(provider, request)
        return MachineView(request.machine, MachineStatus.STARTING, None, None)

    def told(provider: Any, run: RunFolder, head: HeadMachine) -> MachineView | None:
        if head.machine not in late:
            return look(provider, run, head)
        return MachineView(head.machine, MachineStatus.GONE, None, time.time(), none_left)

    monkeypatch.setattr(SkyPilotProvider, "launch", begun)
    monkeypatch.setattr(renting, "view_of", told)
    rent(run, silently)
    assert [(each.machine, each.zone, each.launched_at is None) for each in kept_head_machines(run)] == [
        ("head-1", "aws/us-west-2/us-west-2a", True),
        ("head-2", "aws/us-east-1/us-east-1a", False),
    ]
    give_back(run, silently)
    late |= {f"head-{n}" for n in range(10)}
    with pytest.raises(NoCapacity, match=none_left) as refusal:
        rent(run, silently)
    assert refusal.value.exit_code == 4
    settle(run)


def test_a_head_of_skypilot_that_ended_itself_is_noticed_and_its_books_are_closed(
    run: RunFolder, sky: FakeSkyPilot, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(monkeypatch)
    through_skypilot(run, role="rlboost-head")
    rent(run, silently)
    write_json(run.mirror, {"at": 0.0, "supervised": True, "marks": {}})
    sky.reclaim(sky.launched[0])
    monkeypatch.setattr(renting, "provider_traits", lambda name: ProviderTraits(name, launch_lag_s=0.0))
    find_out(run, silently)
    assert "with everything on its disk, and the outcome" in (read_json(run.outcome) or {})["problem"]
    head = current_head_machine(run)
    assert head is not None
    assert head.ended_at is not None
    with pytest.raises(RuntimeFault, match="far was stopped in the meantime"):
        rent(run, silently)
    assert len(sky.launched) == 1
