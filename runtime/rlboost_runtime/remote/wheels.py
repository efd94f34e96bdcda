"""Fetches the packages of a list from the run's head: run on a new machine, by its own Python.

::

    python3 wheels.py BOOTSTRAP_JSON LIST FOLDER

The head's coordinator says which files the list has, with their SHA-256; the head's weight server sends them.
Both are trusted by the run's certificate alone and given the machine's own credential. Exit codes: 0: all of
the list is in FOLDER, each file checked; 1: the head does not have it, and the caller takes the registry. The
list `base` has uv and a Python 3.11, which are unpacked into FOLDER/bin and FOLDER/python.

Standard library only, Python 3.8 or later.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import ssl
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict  # noqa: UP035 the machine's Python may be 3.8

FILLING_S = 600.0
"""Longest wait for a head that is still fetching the list itself."""
TRIES = 5
"""Attempts for a file; each continues where the former was cut off."""
STREAMS = 4
"""Files at a time."""
_TIMEOUT_S = 60.0
_PAUSE_S = 3.0
_PIECE = 1 << 20


class WheelSource:
    """The head, as the bootstrap tells of it."""

    def __init__(self, told: Dict[str, Any]) -> None:  # noqa: UP006
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # the certificate itself is the identity
        context.load_verify_locations(cadata=told["certificate"])
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        self._url, self._token = told["coordinator_url"], told["token"]

    def open(self, url: str, start: int = 0) -> Any:
        """Return the answer to a GET, from byte `start`. Raises `OSError`."""
        headers = {"Authorization": "Bearer " + self._token}
        if start:
            headers["Range"] = f"bytes={start}-"
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 its opener has https alone
        return self._opener.open(request, timeout=_TIMEOUT_S)

    def contents(self, name: str) -> Dict[str, Any]:  # noqa: UP006
        """Return what the list has, once the head has it. Raises `OSError`; `ValueError`: it never will."""
        deadline, said = time.monotonic() + FILLING_S, False
        while True:
            with self.open(f"{self._url}/v1/wheels/{name}") as answer:
                found = json.load(answer)
            if answer.status != 202:
                return dict(found)
            if time.monotonic() > deadline:
                raise ValueError(f"it was still fetching them after {FILLING_S:.0f} s")
            if not said:
                print(f"wheels: the head is fetching {name}", flush=True)
                said = True
            time.sleep(_PAUSE_S)


def fetch(head: WheelSource, url: str, path: Path, wanted: Dict[str, Any]) -> None:  # noqa: UP006
    """Put one file in its place, checked. Raises `OSError`, `ValueError`."""
    if path.exists() and digest(path) == wanted["sha256"]:
        return
    draft = path.with_name(path.name + ".part")
    for left in reversed(range(TRIES)):
        try:
            start = draft.stat().st_size if draft.exists() else 0
            if start < wanted["size"]:
                with head.open(url, start) as answer, draft.open("ab") as file:
                    shutil.copyfileobj(answer, file, _PIECE)
            if draft.stat().st_size == wanted["size"] and digest(draft) == wanted["sha256"]:
                os.replace(str(draft), str(path))
                return
            if draft.stat().st_size >= wanted["size"]:
                draft.unlink()
                raise ValueError(f"{path.name} does not have the digest that the head tells")
        except (OSError, ValueError):
            if not left:
                raise
        if left:
            time.sleep(_PAUSE_S)
    raise ValueError(f"{path.name} was cut off {TRIES} times")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(_PIECE), b""):
            found.update(piece)
    return found.hexdigest()


def unpack(folder: Path, names: Any) -> None:
    """Put uv and the Python of the list `base` into place."""
    (folder / "bin").mkdir(exist_ok=True)
    for name in names:
        if name.endswith(".tar.gz"):
            shutil.rmtree(str(folder / "python"), ignore_errors=True)
            with tarfile.open(str(folder / name)) as archive:
                archive.extractall(str(folder))  # noqa: S202 its digest came from our own head
        elif name.startswith("uv-"):
            with zipfile.ZipFile(str(folder / name)) as wheel:
                (member,) = (each for each in wheel.namelist() if each.endswith("/scripts/uv"))
                (folder / "bin" / "uv").write_bytes(wheel.read(member))
            (folder / "bin" / "uv").chmod(0o755)


def main(bootstrap: str, name: str, target: str) -> int:
    """Fetch the list; returns the exit code."""
    began, folder = time.monotonic(), Path(target)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        head = WheelSource(json.loads(Path(bootstrap).read_text()))
        told = head.contents(name)
        files = dict(told["files"])
        if any(Path(each).name != each for each in files):
            raise ValueError("a file's name is a path")
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda each: fetch(head, told["url"] + each, folder / each, files[each]), files))
        if name == "base":
            unpack(folder, files)
    except urllib.error.HTTPError as refusal:
        words = refusal.read(2000).decode(errors="replace")
        print(f"wheels: {name} is not on the head ({refusal.code}): {words}", flush=True)
        return 1
    except (OSError, ValueError, KeyError) as problem:
        print(f"wheels: {name} does not come from the head: {problem}", flush=True)
        return 1
    size = sum(each["size"] for each in files.values())
    print(
        f"wheels: {name} from the head, {len(files)} files, {size / 1e6:.0f} MB"
        f" in {time.monotonic() - began:.1f} s",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
