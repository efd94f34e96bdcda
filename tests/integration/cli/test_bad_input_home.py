"""RLBOOST_HOME that cannot be used, a second run of a name, commands killed half-way or typed twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.processes import tagged

pytestmark = pytest.mark.integration

NO_ENGINE = ("trainer: {price_usd_per_hour: 10.0}", "trainer: {local_engines: 0}")
ONE_SPOT = ("max_instances: 0", "max_instances: 1")


def light_job(rlboost: Any, **changes: Any) -> Path:
    """A job whose `up` starts no engine: nothing loads a model before a step is asked for."""
    job: Path = rlboost.job(**changes)
    job.write_text(job.read_text().replace(*NO_ENGINE).replace(*ONE_SPOT))
    return job


def error_and_hint(text: str) -> tuple[str, str]:
    """The one error of what was printed, and its hint."""
    assert text.count("error:") == text.count("hint:") == 1, text
    _, _, rest = text.partition("error: ")
    problem, _, hint = rest.partition("\n\nhint: ")
    return problem, hint.strip()


# --- a home that cannot be used ----------------------------------------------------------------------------


def test_a_read_only_home_is_told_once_with_what_to_set(rlboost: Any, mount: Callable[..., Path]) -> None:
    rlboost.home = mount(rlboost.folder / "disk", 8192, read_only=True)
    job = rlboost.job()
    for command in (("launch", job, "--yes"), ("up", job)):
        said = rlboost(*command)
        problem, hint = error_and_hint(said.err)
        assert problem == f"RLBOOST_HOME: runs cannot be kept in {rlboost.home}: its disk is read-only"
        assert hint == "set RLBOOST_HOME to a folder that can be written; the default is ~/.rlboost"
        assert (said.code, said.out) == (2, "")
    assert "no runs yet" in rlboost("status").err  # looking needs no writing
    assert list(rlboost.home.iterdir()) == []


def test_a_home_that_is_a_file_is_told(rlboost: Any) -> None:
    rlboost.home = rlboost.folder / "rewards.py"
    said = rlboost("launch", rlboost.job(), "--yes")
    problem, hint = error_and_hint(said.err)
    assert problem.endswith("a part of it is a file, not a folder")
    assert "set RLBOOST_HOME" in hint
    assert said.code == 2


def test_a_full_home_starts_nothing_and_blocks_nothing(
    rlboost: Any, mount: Callable[..., Path], fill: Callable[..., Path]
) -> None:
    rlboost.home = mount(rlboost.folder / "disk", 8192)
    job = light_job(rlboost)
    fill(rlboost.home, leave=2 << 20)
    said = rlboost("launch", job, "--yes")
    problem, hint = error_and_hint(said.err)
    told = f"the disk of {rlboost.home}/runs is full (0.00 of 0.01 GB free): nothing was started"
    assert problem == told
    assert hint.startswith("make room there: a run needs 4 MiB")
    assert (said.code, said.out) == (1, "")
    assert [p.name for p in rlboost.home.iterdir()] == ["fill"]


# --- killed half-way, twice, the same name -----------------------------------------------------------------


def killed_while_it_makes_a_run(rlboost: Any, job: Path) -> None:
    """`up`, killed by SIGKILL while it copies the job's files."""
    with (rlboost.folder / "data.bin").open("wb") as file:
        file.truncate(256 << 20)  # takes a moment to copy
    half = job.with_name("half.yaml")
    half.write_text(job.read_text() + "files: [data.bin]\n")
    process = rlboost.start("up", half)
    deadline = time.monotonic() + 60
    while not list((rlboost.home / "runs").glob(".new-*/*/files/data.bin")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def two_at_once_one_of_them_killed(rlboost: Any, job: Path) -> str:
    """Two `up`, one of them killed while the run's processes start; returns what the other one said."""
    killed, other = (rlboost.start("up", job) for _ in range(2))
    deadline = time.monotonic() + 60
    while not tagged(rlboost.run().path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    out, err = other.communicate(timeout=100)
    assert (other.returncode, out[:10]) == (0, "demo is up"), err
    return err


@pytest.mark.timeout(300)
def test_a_run_lives_through_killed_commands_and_mistakes_and_goes_down_once(rlboost: Any) -> None:
    job = light_job(rlboost)
    runs = rlboost.home / "runs"

    killed_while_it_makes_a_run(rlboost, job)
    assert [p.name[:5] for p in runs.iterdir()] == [".new-"]
    two_at_once_one_of_them_killed(rlboost, job)
    assert [p.name for p in runs.iterdir()] == ["demo"]  # what was left half made is gone
    noted = rlboost.run().processes / "supervisor.json"
    supervisor = noted.read_bytes()

    # the same name and job again: the same run, no second supervisor
    said = rlboost("up", job)
    assert (said.code, "continuing run demo in" in said.err) == (0, True)
    assert noted.read_bytes() == supervisor

    # the job edited under the open run
    job.write_text(job.read_text().replace("steps: 2", "steps: 9"))
    said = rlboost("launch", job, "--yes")
    problem, hint = error_and_hint(said.err)
    assert problem == f"{job}: run demo has another job: algorithm.steps: 2 there, 9 here"
    assert "rlboost launch demo; or end it: rlboost down demo; or give demo.yaml another name" in hint
    assert said.code == 2

    # a machine that never was, and one that is gone
    said = rlboost("preempt", "demo", "spot-7")
    assert said.err.startswith("error: no living spot machine or instance spot-7\n\nhint: ")
    assert said.code == 3
    deadline = time.monotonic() + 60
    while rlboost("preempt", "demo", "spot-0").code != 0:
        assert time.monotonic() < deadline  # it is being launched
    while (said := rlboost("preempt", "demo", "spot-0")).code == 0:
        assert time.monotonic() < deadline  # its end has not been noticed yet
    assert said.err.startswith("error: no living spot machine or instance spot-0\n\nhint: ")
    assert said.code == 3

    # down, twice at once, and again
    both = [rlboost.start("down", "demo", "--yes") for _ in range(2)]
    told = [process.communicate(timeout=100) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert all("nothing of demo is still running" in err for _, err in told), told
    rlboost.assert_nothing_left()
    before = {p: p.read_bytes() for p in (rlboost.run().outcome, rlboost.run().job_json)}
    again = rlboost("down", "demo")
    assert (again.code, "nothing of demo is still running" in again.err) == (0, True)
    assert {p: p.read_bytes() for p in before} == before
    said = rlboost("preempt", "demo", "spot-0")
    assert said.err.startswith("error: run demo has ended and has no instance spot-0\n\nhint: ")
    assert said.code == 3


@pytest.mark.timeout(300)
def test_down_while_up_is_under_way_ends_both(rlboost: Any) -> None:
    job = light_job(rlboost)
    up = rlboost.start("up", job)
    deadline = time.monotonic() + 100
    while not tagged(rlboost.run().path):  # its first process
        assert time.monotonic() < deadline
        time.sleep(0.01)
    said = rlboost("down", "demo", "--yes")
    assert said.code == 0, said.err
    out, err = up.communicate(timeout=100)
    assert "Traceback" not in err
    assert (up.returncode == 0) == out.startswith("demo is up"), (out, err)
    if up.returncode:
        assert "error: " in err
        assert "hint: " in err
    rlboost.assert_nothing_left()
    again = rlboost("down", "demo", "--yes")
    assert (again.code, "nothing of demo is still running" in again.err) == (0, True)
