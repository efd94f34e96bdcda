"""Machines of one's own over real sshd processes: who is let in, who is refused, hosts that vanish."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
import time

import psutil
import pytest

from rlboost_providers.base.provider import LaunchRequest, MachineStatus
from rlboost_providers.ssh import provider as ssh
from rlboost_providers.ssh.connection import address_of
from rlboost_providers.ssh.provider import SshProvider
from rlboost_runtime.errors import ConfigError, CredentialsRejected, NoCapacity, Retry
from rlboost_runtime.job import SshOffer
from tests.fakes.hypervisor import AGENT, wait_until
from tests.fakes.sshd import make_home, make_key, sshd_on

pytestmark = pytest.mark.integration

RUN, OWNER = "r1", "0123456789ab"


@pytest.fixture
def home(tmp_path, monkeypatch):
    made = make_home(tmp_path / "home")
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return made


@pytest.fixture
def server(tmp_path, home):
    with sshd_on(tmp_path / "sshd", home) as made:
        yield made


@pytest.fixture
def agent(tmp_path):
    path = tmp_path / "agent"
    path.write_text(AGENT.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def make(tmp_path, agent):
    made = []

    def provider(*hosts, **more):
        folder = str(tmp_path / "disk")
        told = {"price_usd_per_hour": 0.5, "python": agent, "folder": folder, **more}
        made.append(SshProvider([SshOffer(infra="ssh", hosts=list(hosts), **told)], OWNER))
        return made[-1]

    yield provider
    for each in made:
        for owned in each.sweep():
            each.end(owned)
        each.close()


def request(provider, machine="spot-0", offer=None):
    bootstrap = {"machine": machine, "instances": [f"{machine}/0"], "token": "the run's token"}
    return LaunchRequest(RUN, machine, offer or provider.offers()[0], bootstrap)


def test_a_machine_runs_on_the_host_and_its_secrets_go_with_it(server, make, tmp_path):
    provider = make(server.host)
    launched = provider.launch(request(provider))
    assert launched.state is MachineStatus.RUNNING
    folder = tmp_path / "disk" / "ssh" / OWNER / RUN / "spot-0"
    assert (folder / "bootstrap.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((folder / "bootstrap.json").read_text())["token"] == "the run's token"
    arguments = [word for each in psutil.process_iter(["cmdline"]) for word in each.info["cmdline"] or ()]
    assert str(folder / "bootstrap.json") in arguments
    assert not any("the run's token" in word for word in arguments)
    provider.terminate(RUN, "spot-0")
    assert not (folder / "bootstrap.json").exists()
    assert (folder / "agent-0.log").exists()
    assert provider.describe(RUN)[0].state is MachineStatus.GONE


def test_a_host_whose_key_is_not_known_is_refused_with_its_fingerprint(tmp_path, home, make):
    with sshd_on(tmp_path / "stranger", home, trusted=False) as stranger:
        told = subprocess.run(
            ["ssh-keygen", "-lf", str(stranger.folder / "host_key.pub")],
            capture_output=True,
            text=True,
            check=True,
        )
        provider = make(stranger.host)
        with pytest.raises(CredentialsRejected) as refusal:
            provider.offers()
        assert told.stdout.split()[1] in refusal.value.problem
        assert f"type: ssh -p {stranger.port} 127.0.0.1" in refusal.value.remedy
        assert refusal.value.retry is Retry.NEVER
        stranger.trust()
        assert len(provider.offers()) == 1


def test_a_host_whose_key_has_changed_is_refused_loudly(tmp_path, home, make, server):
    make_key(tmp_path / "other")
    other = (tmp_path / "other.pub").read_text().split()
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {other[0]} {other[1]}\n")
    with pytest.raises(CredentialsRejected, match="has changed") as refusal:
        make(server.host).offers()
    assert "ssh-keygen -R" in refusal.value.remedy


def test_a_host_that_does_not_know_our_key_says_what_to_try(server, home, make):
    for name in ("id_ed25519", "id_ed25519.pub"):
        (home / ".ssh" / name).unlink()
    make_key(home / ".ssh" / "id_ed25519")
    with pytest.raises(CredentialsRejected, match="refused the SSH login") as refusal:
        make(server.host).offers()
    assert "ssh -o BatchMode=yes" in refusal.value.remedy
    assert refusal.value.exit_code == 6


def test_a_named_key_and_the_config_file_are_used(server, home, make, tmp_path):
    (home / ".ssh" / "id_ed25519").rename(tmp_path / "elsewhere")
    (home / ".ssh" / "id_ed25519.pub").unlink()
    with pytest.raises(CredentialsRejected):
        make(server.host).offers()
    assert len(make(server.host, identity_file=str(tmp_path / "elsewhere")).offers()) == 1
    (home / ".ssh" / "config").write_text(
        f"Host node-1\n  HostName 127.0.0.1\n  Port {server.port}\n  IdentityFile {tmp_path}/elsewhere\n"
    )
    assert [offer.zone for offer in make("node-1").offers()] == ["node-1"]


def test_a_key_in_the_agent_is_enough(server, home, make, monkeypatch, tmp_path):
    path = tmp_path / "agent.sock"
    started = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        subprocess.run(["ssh-add", "-q", str(home / ".ssh" / "id_ed25519")], check=True)
        (home / ".ssh" / "id_ed25519").unlink()
        provider = make(server.host)
        assert len(provider.offers()) == 1
        provider.close()
    finally:
        monkeypatch.delenv("SSH_AUTH_SOCK")  # paramiko leaves a socket behind where no agent listens
        started.terminate()
        started.wait()


def test_a_host_behind_a_jump_host_is_reached_through_it(server, tmp_path, home, make):
    with sshd_on(tmp_path / "behind", home) as behind:
        provider = make(behind.host, jump_host=f"{getpass.getuser()}@{server.host}")
        assert len(provider.offers()) == 1
        provider.launch(request(provider))
        server.stop()
        with pytest.raises(NoCapacity):
            make(behind.host, jump_host=server.host).offers()


def test_a_busy_host_is_not_offered_and_refuses_a_second_machine(server, make):
    provider = make(server.host)
    offer = provider.offers()[0]
    provider.launch(request(provider, offer=offer))
    assert provider.offers() == []
    with pytest.raises(NoCapacity, match="is in use by r1/spot-0"):
        provider.launch(request(provider, "spot-1", offer))


def test_a_host_that_vanishes_is_not_offered_and_its_machine_is_gone_after_a_while(
    server, make, monkeypatch, tmp_path, home
):
    with sshd_on(tmp_path / "second", home) as second:
        provider = make(server.host, second.host)
        offer = next(o for o in provider.offers() if o.zone == second.host)
        launched = provider.launch(request(provider, offer=offer))
        monkeypatch.setattr(ssh, "ABSENT_S", 3600.0)
        second.stop()
        # both servers stand on one machine: the first one still lists what runs on it
        assert [view.state for view in provider.describe(RUN)] == [MachineStatus.RUNNING]
        server.stop()
        assert [view.state for view in provider.describe(RUN)] == [MachineStatus.RUNNING]
        monkeypatch.setattr(ssh, "ABSENT_S", 0.0)
        [gone] = provider.describe(RUN)
        assert (gone.state, gone.detail) == (MachineStatus.GONE, "its host does not answer")
        assert gone.ended_at >= launched.started_at
        assert provider.describe(RUN) == [gone]
        with pytest.raises(NoCapacity, match="cannot be reached"):
            provider.offers()
    monkeypatch.undo()


def test_a_host_that_says_nothing_is_given_up_in_seconds(home, make):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(NoCapacity, match="cannot be reached"):
            make(f"127.0.0.1:{mute.getsockname()[1]}").offers()
        assert time.monotonic() - began < 25


def test_a_python_that_is_not_there_is_the_job_files_fault(server, tmp_path, home):
    provider = SshProvider(
        [SshOffer(infra="ssh", hosts=[server.host], python="/no/such/python", folder=str(tmp_path / "d"))],
        OWNER,
    )
    try:
        with pytest.raises(ConfigError, match="/no/such/python"):
            provider.launch(request(provider))
        assert provider.describe(RUN) == []
    finally:
        provider.close()


@pytest.mark.parametrize(("host", "name", "port", "user"), [
    ("me@node", "node", 22, "me"),
    ("node:2222", "node", 2222, None),
    ("me@[::1]:22", "::1", 22, "me"),
])  # fmt: skip
def test_hosts_are_written_as_for_ssh(home, host, name, port, user):
    address = address_of(host)
    assert (address.name, address.port, address.user) == (name, port, user)


def test_what_is_no_host_is_refused(home):
    with pytest.raises(ConfigError, match="is no host"):
        address_of("me@node rm")
