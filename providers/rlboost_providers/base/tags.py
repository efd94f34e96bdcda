"""How a machine in a cloud says whose it is, so that it is found again from the cloud alone.

Three tags (labels, on Google Cloud): the run, the machine's id in it, and the owner. Run names repeat between
people who share an account; owners do not. An owner is one `RLBOOST_HOME`, by a random id that it was given.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from rlboost_runtime.errors import ConfigError

RUN = "rlboost-run"
MACHINE = "rlboost-machine"
OWNER = "rlboost-owner"

_HEAD = "_head"
_LONGEST_LABEL = 63
_OWNER = re.compile(r"[0-9a-f]{12}")


def owner_of(home: Path) -> str:
    """Return the id of `home` (an `RLBOOST_HOME`): 12 hexadecimal digits, made at the first call.

    Two first calls at once agree. A file that holds something else is replaced.
    """
    path = home / "owner"
    for _ in range(2):
        try:
            found = path.read_text(encoding="ascii").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            found = ""
        if _OWNER.fullmatch(found):
            return found
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = home / f"owner.{secrets.token_hex(6)}"
        draft.write_text(secrets.token_hex(6), encoding="ascii")
        try:
            if found:
                os.replace(draft, path)
            else:
                os.link(draft, path)  # fails where somebody was faster: theirs holds
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
    return path.read_text(encoding="ascii").strip()


def head_of(run: str) -> str:
    """Return what a bought head says where machines of a fleet name their run.

    No run is called so: whoever lists or ends the fleet of a run, its own head being one of them, never meets
    the head. Raises `ConfigError` where the run's name is too long for a label then.
    """
    name = f"{run}{_HEAD}"
    if len(name) > _LONGEST_LABEL:
        longest = _LONGEST_LABEL - len(_HEAD)
        raise ConfigError(
            f"{run} is too long a name for a run whose head is bought: it may have {longest} letters, as they"
            " go into a cloud's label",
            "give the job a shorter name",
        )
    return name


def run_of(told: str) -> str:
    """Return the run of a machine, its head or of its fleet, that says `told`."""
    return told.removesuffix(_HEAD)


def tags(run: str, machine: str, owner: str) -> dict[str, str]:
    """Return what every machine carries."""
    return {RUN: run, MACHINE: machine, OWNER: owner}


def client_token(run: str, machine: str, owner: str) -> str:
    """Return the token by which a cloud knows a repeated launch: 32 hexadecimal digits."""
    return hashlib.blake2b(f"{owner}/{run}/{machine}".encode(), digest_size=16).hexdigest()


def machine_name(run: str, machine: str, owner: str, *, longest: int = 63) -> str:
    """Return a name of at most `longest` lower-case letters, digits and dashes that no other machine has.

    It begins as a person would name it; where that is cut short, the token's digits keep it apart.
    """
    digits = client_token(run, machine, owner)[:10]
    told = re.sub(r"[^a-z0-9-]+", "-", f"rlboost-{run}-{machine}".lower())
    return f"{told[: longest - len(digits) - 1].rstrip('-')}-{digits}"
