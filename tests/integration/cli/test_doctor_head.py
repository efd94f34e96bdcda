"""`rlboost doctor` on a head elsewhere, over a real sshd: what is there is told, and nothing is changed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlboost_cli.doctor import head
from rlboost_cli.doctor.findings import DoctorContext, Finding, Verdict
from rlboost_runtime import remote
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.run.create import prepare_run
from tests.fakes.sshd import Sshd, make_home, sshd_on

pytestmark = pytest.mark.integration

SECRET = "the-secret-itself"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    home = make_home(tmp_path / "user")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with sshd_on(tmp_path / "sshd", home) as made:
        yield made


def job_file(server: Sshd, tmp_path: Path, **trainer: Any) -> Path:
    fields = {
        "name": "far",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["spell_backward"]},
        "trainer": {
            "infra": "ssh", "hosts": [server.host], "folder": str(tmp_path / "head"), **trainer
        },
        "rollout": {"spot": {"any_of": [{"infra": "aws/us-east-1", "accelerators": "A10G:1"}]}},
    }  # fmt: skip
    path = tmp_path / "job.yaml"
    with path.open("w") as file:
        YAML().dump(fields, file)
    return path


def findings(path: Path, tmp_path: Path) -> dict[str, Finding]:
    found = head.head(DoctorContext(tmp_path / "home", load_job(path), path))
    return {finding.check: finding for finding in found}


def test_what_is_on_the_head_is_told_and_nothing_is_left_there(server: Sshd, tmp_path: Path) -> None:
    found = findings(job_file(server, tmp_path, python=sys.executable), tmp_path)
    verdicts = {check: finding.verdict for check, finding in found.items()}
    assert {
        name: verdicts[name] for name in ("head", "head python", "head clock", "head ports")
    } == dict.fromkeys(("head", "head python", "head clock", "head ports"), Verdict.OK), found
    assert "rlboost 0" in found["head python"].found
    assert str(tmp_path) in found["head disk"].found
    assert not (tmp_path / "head").exists()


SAID = """\
import json, sys
sys.argv = ["program"]
source = open({path!r}).read().replace("METADATA = ", "METADATA = {url!r} #", 1)
names = {{"__name__": "program"}}
exec(compile(source, "program", "exec"), names)
print(json.dumps(names["credentials"]({clouds!r})))
"""


def credentials(home: Path, url: str = "http://127.0.0.1:9") -> dict[str, str]:
    """What the program finds for a user with this home, and a metadata service at `url`."""
    program = SAID.format(
        path=str(Path(remote.__file__).with_name("doctor.py")),
        url=url,
        clouds=head.credential_places(["aws", "gcp"]),
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"HOME": str(home)}, capture_output=True, text=True, check=True
    )
    assert SECRET not in done.stdout
    return json.loads(done.stdout)


def test_where_its_cloud_credentials_are_is_told_but_not_what_they_are(tmp_path: Path) -> None:
    assert credentials(tmp_path) == {"aws": "", "gcp": ""}
    for name in (".aws/credentials", ".config/gcloud/application_default_credentials.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(SECRET)
    found = credentials(tmp_path)
    assert found["aws"] == "~/.aws/credentials"
    assert found["gcp"].endswith("application_default_credentials.json")


def test_a_role_that_its_cloud_gave_it_is_told(tmp_path: Path) -> None:
    class Metadata(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.answer("token-1" if self.path == "/latest/api/token" else "")

        def do_GET(self) -> None:
            has_token = self.headers.get("X-aws-ec2-metadata-token") == "token-1"
            is_google = self.headers.get("Metadata-Flavor") == "Google"
            said = {
                "/latest/meta-data/iam/security-credentials/": "trainer" if has_token else "",
                "/computeMetadata/v1/instance/service-accounts/default/email": "me@here" if is_google else "",
            }
            self.answer(said.get(self.path, ""))

        def answer(self, text: str) -> None:
            self.send_response(200 if text else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            found = credentials(tmp_path, f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            serving.join()
    assert found == {"aws": "its role trainer", "gcp": "its service account me@here"}


def test_a_head_that_does_not_answer_is_named(server: Sshd, tmp_path: Path) -> None:
    path = job_file(server, tmp_path)
    server.stop()
    (only,) = findings(path, tmp_path).values()
    assert only.verdict is Verdict.FAIL
    assert f"{server.host} cannot be reached" in only.found
    assert "machine is up" in only.remedy


def test_a_laptop_without_torch_asks_the_head_of_a_run_by_its_name(server: Sshd, tmp_path: Path) -> None:
    path = job_file(server, tmp_path)
    prepare_run(path, load_job(path))
    path.unlink()  # the run has its own copy
    bare = (
        "import sys\n"
        "for name in 'torch transformers numba uvicorn fastapi aiohttp peft boto3'.split():\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['rlboost', 'doctor', 'far', '--json']\n"
        "from rlboost_cli.main import run\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", bare], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    told = {finding["check"]: finding for finding in said["findings"]}
    assert "were not checked" in told["job"]["found"]
    assert told["head"]["verdict"] == "ok"
    assert "`rlboost up` installs" in told["head python"]["found"]
