from __future__ import annotations

import itertools
import os
import stat
import threading
from pathlib import Path

import pytest

from rlboost_cli.views import screens
from rlboost_providers.base.provider import Offer
from rlboost_runtime.billing.launch_records import HeadMachine, LaunchRecords, keep_head_machine
from rlboost_runtime.errors import ConfigError, NotFound, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.run.create import differences, files_of, prepare_run, reopen, stored_job
from rlboost_runtime.run.folder import RunFolder, home, write_json
from rlboost_runtime.run.index import all_runs, find_run, is_open
from rlboost_runtime.run.resolved import read_resolved


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "lib").mkdir(parents=True)
    (folder / "rewards.py").write_text("def score(): ...")
    (folder / "prompts.jsonl").write_text("{}")
    (folder / "lib" / "helper.py").write_text("x = 1")
    (folder / "job.yaml").write_text("# as the user wrote it")
    return folder / "job.yaml"


def make_job(**changes: object) -> Job:
    fields: dict[str, object] = {
        "name": "demo",
        "model": {"init": "tiny"},
        "data": {"source": "prompts.jsonl"},
        "reward": "rewards.py:score",
        "files": ["lib/helper.py"],
    }
    return Job.model_validate(fields | changes)


def end(run: RunFolder) -> None:
    write_json(run.outcome, {"state": "done", "exit_code": 0})


@pytest.mark.parametrize("is_there", [True, False], ids=["with its originals", "without them"])
def test_copies_that_a_killed_resumption_put_away_are_put_back(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    run = prepare_run(job_file, make_job()).run
    end(run)
    rewards = job_file.parent / "rewards.py"
    rewards.write_text("def score(): corrected")
    rename, renames = os.rename, itertools.count()

    def cut_off(source: Path, target: Path) -> None:
        if next(renames) == 1:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr("rlboost_runtime.run.create.os.rename", cut_off)
    with pytest.raises(KeyboardInterrupt):
        prepare_run(job_file, make_job(), resume=True)
    assert not run.files.exists()
    monkeypatch.setattr("rlboost_runtime.run.create.os.rename", rename)
    if not is_there:
        rewards.unlink()
    prepare_run(job_file, make_job(), resume=True)
    assert (run.files / "rewards.py").read_text() == f"def score(): {'corrected' if is_there else '...'}"
    assert (run.files / "prompts.jsonl").exists()


def test_an_intent_is_on_the_disk_before_anybody_acts_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    replaces, fsync = os.replace, os.fsync

    def notes_fsync(fd: int) -> None:
        told.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def notes_rename(source: str, target: Path) -> None:
        told.append("rename")
        replaces(source, target)

    monkeypatch.setattr(os, "fsync", notes_fsync)
    monkeypatch.setattr(os, "replace", notes_rename)
    run = RunFolder(tmp_path)
    keep_head_machine(run, HeadMachine("head-1", "aws", "us-east-2a", "A10G:1", 1, "t", 1000.0))
    assert told == ["file", "rename", "folder"]
    LaunchRecords(run.cloud / "bought.json").add("spot-0", Offer("aws", "us-east-2a", "L4:1", 1, True, "t"))
    assert told == ["file", "rename", "folder"] * 2


def test_a_new_run_holds_everything_it_needs(job_file: Path) -> None:
    found = prepare_run(job_file, make_job())
    run = found.run
    assert found.is_new
    assert run == RunFolder.named("demo")
    assert run.job_yaml.read_text() == "# as the user wrote it"
    assert read_resolved(run.job_json) == make_job() == found.job
    assert sorted(p.relative_to(run.files).as_posix() for p in run.files.rglob("*.*")) == [
        "lib/helper.py",
        "prompts.jsonl",
        "rewards.py",
    ]
    assert run.token.stat().st_mode & 0o777 == 0o600
    assert "CERTIFICATE" in run.certificate.read_text()
    assert [p.name for p in (home() / "runs").iterdir()] == ["demo"]  # nothing of the making is left


def test_the_same_job_continues_an_open_run(job_file: Path) -> None:
    first = prepare_run(job_file, make_job())
    token = first.run.token.read_text()
    again = prepare_run(job_file, make_job())
    assert (again.run, again.is_new, again.changed_files) == (first.run, False, ())
    assert again.run.token.read_text() == token


def test_changed_files_of_a_continued_run_are_named(job_file: Path) -> None:
    prepare_run(job_file, make_job())
    (job_file.parent / "rewards.py").write_text("def score(): return 1")
    assert prepare_run(job_file, make_job()).changed_files == ("rewards.py",)


def test_another_job_under_an_open_runs_name_is_told_what_differs(job_file: Path) -> None:
    prepare_run(job_file, make_job())
    with pytest.raises(ConfigError) as error:
        prepare_run(job_file, make_job(algorithm={"steps": 7}, budget={"max_usd": 2.0}))
    assert "algorithm.steps: 200 there, 7 here" in error.value.problem
    assert "budget.max_usd: null there, 2.0 here" in error.value.problem
    assert "rlboost down demo" in error.value.remedy


def test_an_ended_runs_name_gets_the_next_number(job_file: Path) -> None:
    end(prepare_run(job_file, make_job()).run)
    second = prepare_run(job_file, make_job())
    assert (second.run.name, second.job.name, second.is_new) == ("demo-2", "demo-2", True)
    assert prepare_run(job_file, make_job()).run.name == "demo-2"  # open: continued
    end(second.run)
    assert prepare_run(job_file, make_job(algorithm={"steps": 3})).run.name == "demo-3"


def test_a_number_never_makes_a_name_too_long(job_file: Path) -> None:
    name = "n" * 63
    end(prepare_run(job_file, make_job(name=name)).run)
    assert prepare_run(job_file, make_job(name=name)).run.name == "n" * 61 + "-2"


def test_resume_opens_the_newest_run_again(job_file: Path) -> None:
    end(prepare_run(job_file, make_job()).run)
    second = prepare_run(job_file, make_job()).run
    end(second)
    found = prepare_run(job_file, make_job(), resume=True)
    assert (found.run, found.is_new) == (second, False)
    assert is_open(second)
    assert not is_open(RunFolder.named("demo"))


def test_resume_refuses_another_job_and_leaves_the_run_ended(job_file: Path) -> None:
    run = prepare_run(job_file, make_job()).run
    end(run)
    with pytest.raises(ConfigError, match=r"algorithm\.group_size"):
        prepare_run(job_file, make_job(algorithm={"group_size": 7}), resume=True)
    assert not is_open(run)


def test_an_ended_run_may_be_resumed_to_train_longer_or_to_spend_more(job_file: Path) -> None:
    run = prepare_run(job_file, make_job()).run
    with pytest.raises(ConfigError, match=r"algorithm\.steps"):  # not while it is open
        prepare_run(job_file, make_job(algorithm={"steps": 7}))
    end(run)
    longer = make_job(algorithm={"steps": 7}, budget={"max_usd": 3.0})
    assert prepare_run(job_file, longer, resume=True).run == run
    assert is_open(run)
    assert stored_job(run).algorithm.steps == 7


def test_there_must_be_something_to_resume(job_file: Path) -> None:
    with pytest.raises(NotFound, match="no run demo"):
        prepare_run(job_file, make_job(), resume=True)


@pytest.mark.parametrize("name", ["../secret.py", "/etc/hostname", "missing.py"])
def test_a_file_that_cannot_be_copied_leaves_no_run_behind(job_file: Path, name: str) -> None:
    (job_file.parent.parent / "secret.py").write_text("")
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        prepare_run(job_file, make_job(files=[name]))
    assert list((home() / "runs").iterdir()) == []


def test_two_makers_at_once_make_one_run(job_file: Path) -> None:
    found = []
    barrier = threading.Barrier(4)

    def make() -> None:
        barrier.wait()
        found.append(prepare_run(job_file, make_job()))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {f.run.name for f in found} == {"demo"}
    assert sum(f.is_new for f in found) == 1
    assert [p.name for p in (home() / "runs").iterdir()] == ["demo"]


def test_runs_are_found_by_name_only(job_file: Path) -> None:
    run = prepare_run(job_file, make_job()).run
    assert find_run("demo") == run
    assert all_runs() == [run]
    for name in ("other", "../runs/demo", ".", ""):
        with pytest.raises(NotFound, match="no run") as error:
            find_run(name)
        assert "demo" in error.value.remedy


def test_an_unreadable_job_is_explained(job_file: Path) -> None:
    run = prepare_run(job_file, make_job()).run
    run.job_json.write_text('{"name": "demo", "from_the_future": 1}')
    with pytest.raises(RuntimeFault, match=r"job\.json cannot be read"):
        stored_job(run)


def test_every_file_that_a_job_names_is_known() -> None:
    spot = {"any_of": [{"infra": "local", "market": {"trace": "market.csv"}}, {"infra": "local"}]}
    job = make_job(rollout={"spot": spot}, files=["lib/helper.py", "rewards.py"])
    assert files_of(job) == ["lib/helper.py", "rewards.py", "prompts.jsonl", "market.csv"]
    built_in = make_job(data={"reasoning_gym": ["x"]}, reward="reasoning_gym", files=[])
    assert files_of(built_in) == []


def test_the_same_job_has_no_differences() -> None:
    assert differences(make_job(), make_job()) == []
    assert differences(make_job(), make_job(files=[])) == [
        'files[0]: "lib/helper.py" there, nothing here',
        "files: nothing there, [] here",
    ]


def test_an_ended_run_that_is_opened_again_forgets_how_it_was_to_end(job_file: Path) -> None:
    run = prepare_run(job_file, make_job()).run
    write_json(run.ending, {"state": "done"})
    reopen(run)
    assert run.ending.exists()  # it is still being wound up
    end(run)
    reopen(run)
    assert is_open(run)
    assert not run.ending.exists()


def test_a_second_run_of_a_name_says_where_the_first_is(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepare_run(job_file, make_job())
    screens.found_run(first)
    assert "ended run" not in capsys.readouterr().err
    end(first.run)
    screens.found_run(prepare_run(job_file, make_job()))
    assert "note: there is an ended run demo; rlboost launch demo shows it" in capsys.readouterr().err
