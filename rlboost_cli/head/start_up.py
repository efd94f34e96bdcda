"""What a head that is bought runs at its first boot, and the keys by which it and its owner know one another.

Both keys are made here, for this run alone, and lie in the run's folder (mode 600). The host's travels in the
start-up script, which whoever may describe the machine in its cloud can read: they could pass for the head,
not sign in to it.

What a machine said while it booted, where nobody could ask it, for the error that tells so.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from rlboost_providers.base.provider import Provider
from rlboost_providers.base.tags import head_of
from rlboost_providers.base.traits import cloud_traits
from rlboost_runtime.coordinator.fleet.provider_calls import keep_console
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder, write_atomically
from rlboost_templates import shipped

ACCOUNT = "rlboost"
"""Who everything belongs to there."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """An Ed25519 key as OpenSSH writes it."""

    path: Path
    """Where the private one lies."""
    private: str
    public: str
    """One line: ssh-ed25519 AAAA..."""


def own_key(run: RunFolder) -> KeyPair:
    """Return the key that the run's owner signs in with, made at the first call."""
    return _key(run.path / "secrets" / "head_sign_in")


def host_key(run: RunFolder) -> KeyPair:
    """Return the key that the machine is known by, made at the first call."""
    return _key(run.path / "secrets" / "head_host")


def head_script(run: RunFolder, job: Job) -> str:
    """Return the start-up script of the machine."""
    text = shipped("startup/head.sh")
    host = host_key(run)
    values = {
        "@ACCOUNT@": ACCOUNT,
        "@WATCH@": _packed(resources.files("rlboost_runtime.remote").joinpath("watch.py").read_bytes()),
        "@LOCAL_NVME@": shipped("deploy/local_nvme.sh").rstrip(),
        "@SETTINGS@": json.dumps(watch_settings(job)),
        "@OWNER_KEY@": own_key(run).public,
        "@HOST_KEY@": host.private.rstrip("\n"),
        "@HOST_KEY_PUBLIC@": host.public,
    }
    for name, value in values.items():
        text = text.replace(name, value, 1)
    return text


def watch_settings(job: Job) -> dict[str, object]:
    """Return when the machine is to end itself, as `watch` reads it."""
    folder = job.trainer.folder.replace("~", f"/home/{ACCOUNT}", 1)
    is_direct = job.trainer.via == "direct"
    deletion = cloud_traits(job.trainer.cloud).self_deletion if is_direct else None
    return {
        "folder": folder,
        "cloud": job.trainer.cloud if is_direct else job.trainer.via,
        "deletion": None if deletion is None else asdict(deletion),
        "idle_s": job.after.idle_minutes * 60,
        "max_s": None if job.after.max_hours is None else job.after.max_hours * 3600,
        "done": job.after.done,
        "failed": job.after.failed,
        "ends_itself": job.trainer.ends_itself,
    }


def _packed(program: bytes) -> str:
    return base64.encodebytes(gzip.compress(program, mtime=0)).decode().rstrip()


def _key(path: Path) -> KeyPair:
    from cryptography.hazmat.primitives import serialization as ssh
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        made = Ed25519PrivateKey.generate()
        plain = ssh.NoEncryption()
        write_atomically(path, made.private_bytes(ssh.Encoding.PEM, ssh.PrivateFormat.OpenSSH, plain))
    text = path.read_bytes()
    public = ssh.load_ssh_private_key(text, None).public_key()
    line = public.public_bytes(ssh.Encoding.OpenSSH, ssh.PublicFormat.OpenSSH).decode()
    os.chmod(path, 0o600)
    return KeyPair(path, text.decode(), line)


_SHOWN_LINES = 15
_LONGEST_LINE = 200


def last_words(provider: Provider, run: RunFolder, machine: str) -> str:
    """Return the end of the machine's console, to be put behind an error; all of it lies in the run's logs
    then. Empty where its cloud shows none. Raises nothing."""
    found = keep_console(provider, head_of(run.name), machine, run.logs / "machines" / machine)
    if found is None:
        return ""
    if found.refusal:
        return f"; its console cannot be read: {found.refusal}"
    if not found.lines:
        return "; its console is empty yet"
    shown = "\n".join(f"  {line[:_LONGEST_LINE]}" for line in found.lines[-_SHOWN_LINES:])
    return f"; its console ({found.log}) ends with:\n{shown}"
