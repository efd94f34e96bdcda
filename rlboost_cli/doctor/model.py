"""Whether the job's model can be had: a folder, the hub's cache, or the Hugging Face hub itself.

One request with a deadline, by the standard library; nothing is downloaded.
"""

from __future__ import annotations

import difflib
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import IO

from rlboost_cli.doctor.findings import DoctorContext, Finding, fail, ok, warn
from rlboost_runtime.fit.shape import cached_config

HUB_DEADLINE_S = 5.0


def resolves(context: DoctorContext) -> Iterator[Finding]:
    """Look for a model that is named by its id: a name that nobody knows costs no machine."""
    name = context.wanted.model
    if not isinstance(name, str) or Path(name).is_dir():
        return
    if cached_config(name) is not None:
        yield ok("model", f"{name} is in the cache of the Hugging Face hub")
        return
    status = _asked(name)
    similar = _similar_folder(name, context.folder)
    meant = f"write model: {similar} for the folder beside the job file; or " if similar else ""
    if status in (401, 403, 404):
        yield fail(
            "model",
            f"the Hugging Face hub has no {name} for this account (HTTP {status})",
            f"{meant}correct the name; for a private or gated model accept its licence, export HF_TOKEN and"
            " write secrets: [HF_TOKEN]",
        )
    elif status is None or status >= 400:
        answer = "was not reached" if status is None else f"answered HTTP {status}"
        judge = fail if similar else warn  # with such a neighbour it is a typing mistake
        yield judge(
            "model",
            f"{name} is not on this machine, and the Hugging Face hub {answer}: not checked",
            f"{meant}fetch it first (hf download {name}), or it is downloaded when the run starts",
        )
    else:
        yield ok("model", f"{name} is on the Hugging Face hub; it is downloaded when the run starts")


def _similar_folder(name: str, base: Path) -> str | None:
    """Return the name of the folder beside the job file that is most like `name`."""
    if "/" in name.removeprefix("./"):
        return None
    near = difflib.get_close_matches(name, [each.name for each in base.iterdir() if each.is_dir()], n=1)
    return near[0] if near else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection is an answer: the file is there. So the token goes to nobody else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def _asked(name: str) -> int | None:
    """Return the HTTP status of the model's config.json on the hub; None where the hub is not reached.

    Asked on a thread, because the deadline of a connection does not hold for the lookup of a host's name.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    found: list[int] = []

    def ask() -> None:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        token = os.environ.get("HF_TOKEN")
        request = urllib.request.Request(  # noqa: S310 - the hub's address is the user's own setting
            f"{endpoint}/{name}/resolve/main/config.json",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            method="HEAD",
        )
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=HUB_DEADLINE_S) as answer:
                found.append(answer.status)
        except urllib.error.HTTPError as refusal:
            found.append(200 if refusal.code < 400 else refusal.code)
        except (OSError, ValueError):
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_DEADLINE_S)
    return found[0] if found else None
