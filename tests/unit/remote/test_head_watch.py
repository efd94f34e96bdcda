"""What ends a bought head: when it does, when it does not, and what it sees on the disk."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlboost_providers.base.traits import cloud_traits
from rlboost_runtime.remote import watch
from rlboost_runtime.remote.watch import Facts, facts_of, reason_to_end

SETTINGS = {"idle_s": 900.0, "done": "down", "failed": "down", "ends_itself": True, "max_s": None}


@pytest.mark.parametrize(
    ("facts", "quiet_s", "ends"),
    [
        (Facts(is_supervised=True, trains=True), 10_000, False),
        (Facts(is_supervised=True, trains=True, ended="done"), 10_000, False),  # it ends its machines
        (Facts(is_supervised=True), 899, False),  # up, and nobody launches
        (Facts(is_supervised=True), 900, True),
        (Facts(trains=True), 899, False),  # its runtime was killed
        (Facts(trains=True), 900, True),
        (Facts(), 900, True),  # nothing was ever brought there
        (Facts(ended="done"), 899, False),  # it waits to be fetched from
        (Facts(ended="done"), 900, True),
        (Facts(ended="done", is_safe=True), 29, False),  # a laptop that is on ends it
        (Facts(ended="done", is_safe=True), 30, True),
        (Facts(ended="failed"), 900, True),
    ],
)
def test_a_head_ends_once_nothing_goes_on_there(facts: Facts, quiet_s: float, ends: bool) -> None:
    assert bool(reason_to_end(SETTINGS, facts, quiet_s, 1e6)) is ends


@pytest.mark.parametrize(
    ("ended", "stays"), [("done", True), ("failed", False), ("stopped", False), (None, False)]
)
def test_only_after_a_run_that_ended_so_it_stays_where_it_is_to(ended: str | None, stays: bool) -> None:
    settings = {**SETTINGS, "done": "stay"}
    facts = Facts(ended=ended, is_safe=True)
    assert (reason_to_end(settings, facts, 10_000, 1e6) == "") is stays


@pytest.mark.parametrize(
    ("facts", "ends"),
    [
        (Facts(), False),
        (Facts(ended="done"), False),  # its model lies there
        (Facts(ended="failed", is_safe=True), False),
        (Facts(trains=True), False),
        (Facts(is_supervised=True, trains=True), False),
        (Facts(is_supervised=True), True),  # up, and nobody launches: its spot machines cost
    ],
)
def test_where_a_head_cannot_end_itself_only_its_runs_are_ended(facts: Facts, ends: bool) -> None:
    settings = {**SETTINGS, "ends_itself": False}
    assert bool(reason_to_end(settings, facts, 10_000, 1e6)) is ends


@pytest.mark.parametrize(
    ("facts", "ends_itself", "age_s", "ends"),
    [
        (Facts(is_supervised=True, trains=True), True, 3599, False),
        (
            Facts(is_supervised=True, trains=True),
            True,
            3600,
            True,
        ),  # its coordinator may hang
        (Facts(ended="done"), True, 3600, True),
        (Facts(is_supervised=True, trains=True), False, 3600, True),
        (Facts(ended="done"), False, 3600, False),  # nothing is left to be ended there
    ],
)
def test_a_head_with_a_longest_life_ends_then_whatever_goes_on_there(
    facts: Facts, ends_itself: bool, age_s: float, ends: bool
) -> None:
    settings = {**SETTINGS, "done": "stay", "ends_itself": ends_itself, "max_s": 3600.0}
    assert bool(reason_to_end(settings, facts, 0.0, age_s)) is ends


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "heads/me/runs/far"
    (folder / "processes").mkdir(parents=True)
    (folder / "job.json").write_text("{}")
    return folder


def test_a_supervisor_counts_while_it_lives_and_is_this_runs(run: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "RLBOOST_RUN": str(run)}
    wait = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", wait], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (run / "processes/supervisor.json").write_text(json.dumps({"pid": child.pid}))
        (run / "wanted.json").write_text('{"train": true}')
        assert facts_of(tmp_path) == Facts(is_supervised=True, trains=True)
        (run / "processes/supervisor.json").write_text(json.dumps({"pid": os.getpid()}))
        assert not facts_of(tmp_path).is_supervised, "another program has its number now"
        child.communicate()
    (run / "processes/supervisor.json").write_text(json.dumps({"pid": child.pid}))
    assert facts_of(tmp_path) == Facts(trains=True)


def test_what_is_half_written_is_no_reason_to_stop_watching(run: Path, tmp_path: Path) -> None:
    assert facts_of(tmp_path / "nothing") == Facts()
    for name in ("wanted.json", "outcome.json", "processes/supervisor.json"):
        (run / name).write_text("{")
    assert facts_of(tmp_path) == Facts(ended="stopped")


def test_of_several_runs_one_that_goes_on_keeps_the_machine(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = run.with_name("later")
    (later / "processes").mkdir(parents=True)
    (later / "job.json").write_text("{}")
    os.utime(run / "job.json", (1, 1))
    (run / "outcome.json").write_text('{"state": "failed"}')
    (later / "outcome.json").write_text('{"state": "done"}')
    assert facts_of(tmp_path).ended == "done", "the one that ended last"
    (run / "outcome.json").unlink()
    (run / "wanted.json").write_text('{"train": true}')
    monkeypatch.setattr(watch, "supervisor_of", lambda each: 1 if each == run else None)
    assert facts_of(tmp_path) == Facts(is_supervised=True, trains=True)


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The account of SkyPilot's runtime, and a `runuser` that stays who it is."""
    home, tools = tmp_path / "home", tmp_path / "tools"
    (home / ".sky").mkdir(parents=True)
    (home / ".sky/python_path").write_text(f"{sys.executable}\n")
    tools.mkdir()
    (tools / "runuser").write_text('#!/bin/sh\n[ "$1 $2 $3" = "-u sky --" ] || exit 9\nshift 3\nexec "$@"\n')
    (tools / "runuser").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    whose = pwd.struct_passwd(("sky", "x", 1, 1, "", str(home), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwnam", {"sky": whose}.__getitem__)
    (tmp_path / "skypilot-account").write_text("sky\n")
    return tmp_path / "skypilot-account"


def test_skypilots_own_code_ends_a_machine_that_it_bought_with_what_the_run_may(
    run: Path, account: Path, tmp_path: Path
) -> None:
    package = tmp_path / "home/sky"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("utils.py").write_text(
        "class cluster_utils:\n"
        "    SKY_CLUSTER_YAML_REMOTE_PATH = '~/.sky/sky_ray.yml'\n"
        "    get_provider_name = staticmethod(lambda cluster: 'aws')\n"
        "class yaml_utils:\n"
        "    read_yaml = staticmethod(lambda path: {'cluster_name': path, 'provider': {'region': 'x'}})\n"
    )
    package.joinpath("provision.py").write_text(
        "import json, os\n"
        "def terminate_instances(*what):\n"
        "    open('ended.json', 'w').write(json.dumps([*what, os.environ['KEY']]))\n"
    )
    (run / "secrets").mkdir()
    (run / "secrets/environment.json").write_text('{"KEY": "of the run"}')
    assert watch.ask_skypilot(account, watch.END_CLUSTER, watch.environment(tmp_path))
    asked = json.loads((tmp_path / "home/ended.json").read_text())
    assert asked == ["aws", f"{tmp_path}/home/.sky/sky_ray.yml", {"region": "x"}, "of the run"]
    assert not watch.ask_skypilot(account, watch.END_CLUSTER, {}), (
        "without the right to, it is to be shut down"
    )


def test_where_skypilots_runtime_is_not_there_the_watch_goes_on(account: Path, tmp_path: Path) -> None:
    (tmp_path / "home/.sky/python_path").unlink()
    assert not watch.ask_skypilot(account, watch.STAY_AWAKE, {})
    assert not watch.ask_skypilot(tmp_path / "nobody", watch.STAY_AWAKE, {})


def test_it_speaks_the_language_of_old_pythons() -> None:
    import ast

    ast.parse(Path(watch.__file__).read_text(), feature_version=(3, 8))


def test_a_machine_that_would_stay_deletes_itself_with_its_own_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deletion = cloud_traits("gcp").self_deletion
    assert deletion is not None
    answers = {
        "/instance/zone": "projects/77/zones/us-central1-a",
        "/project/project-id": "mine",
        "/instance/name": "rlboost-head-1",
        "/instance/service-accounts/default/token": json.dumps({"access_token": "t0ken"}),
    }
    deleted: list[tuple[str, str | None]] = []

    class Google(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            self.answer(answers[self.path])

        def do_DELETE(self) -> None:
            deleted.append((self.path, self.headers["Authorization"]))
            self.answer("{}")

        def answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(watch, "OFF_S", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Google) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        here = f"http://127.0.0.1:{server.server_port}"
        how = asdict(deletion)
        how |= {"metadata_url": f"{here}/", "url": how["url"].replace("https://compute.googleapis.com", here)}
        try:
            watch.delete_itself(how)
        finally:
            server.shutdown()
            serving.join()
    place = "/compute/v1/projects/mine/zones/us-central1-a/instances/rlboost-head-1"
    assert deleted == [(place, "Bearer t0ken")]
    watch.delete_itself(how)  # nobody answers now
    assert "it cannot delete itself" in capsys.readouterr().out
