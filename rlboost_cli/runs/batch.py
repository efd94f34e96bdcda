"""`rlboost generate`: rows of requests through a run's endpoint, each answered once, however often it dies.

Guarantees: a row's answer is on stable storage, whole, once; a batch that is started again asks for the rows
without an answer alone, under the ids that it gave them before, so that what was generated meanwhile is not
generated again. Rows that the endpoint refuses are answered by the refusal. Standard library only.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.run.folder import RunFolder, read_json, sync_path
from rlboost_runtime.run.security import client_context

ANSWER_S = 3600.0
"""Longest wait for one answer; the connection is then made anew, under the same id."""
RETRY_S = 1.0
PATIENCE_S = 600.0
"""Longest time without any answer from the endpoint before the batch gives up; it can be started again."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the input: a body for `/v1/completions`, or with `messages` for `/v1/chat/completions`."""

    number: int
    body: dict[str, Any]
    digest: str

    @property
    def path(self) -> str:
        """The route that answers it."""
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


def read_rows(path: Path) -> list[Row]:
    """Return the rows of the input. Raises `ConfigError` that names the line."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            body = json.loads(line)
        except ValueError as problem:
            raise ConfigError(
                f"{path}:{number + 1} is no JSON: {problem}", "write an object per line"
            ) from problem
        if not isinstance(body, dict) or not ("prompt" in body or "messages" in body):
            raise ConfigError(
                f"{path}:{number + 1} has neither prompt nor messages", "write a request's body per line"
            )
        digest = hashlib.sha256(line).hexdigest()[:16]
        rows.append(Row(number, {**body, "stream": False}, digest))
    return rows


def answered(path: Path, rows: list[Row]) -> set[int]:
    """Return the rows that the output answers; a torn last line is cut off. Raises `ConfigError` if it is
    another input's."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    known = {row.number: row.digest for row in rows}
    done: set[int] = set()
    for number, line in enumerate(whole.splitlines()):
        try:
            found = json.loads(line)
            is_ours = known.get(found["row"]) == found["digest"]
        except (ValueError, KeyError, TypeError):
            is_ours = False
        if not is_ours:
            raise ConfigError(
                f"{path}:{number + 1} is no answer to a row of the input", "name another output"
            )
        done.add(found["row"])
    return done


class Batch:
    """The rows of one input that have no answer yet."""

    def __init__(self, run: RunFolder, rows: list[Row], output: Path, parallel: int) -> None:
        self._run = run
        self._done = answered(output, rows)
        self.left = [row for row in rows if row.number not in self._done]
        self._output = output
        self._parallel = parallel
        self._name = hashlib.sha256(str(output.absolute()).encode()).hexdigest()[:16]
        self._stop = threading.Event()
        self._heard_at = time.monotonic()

    def run(self, progress: Callable[[int], None]) -> int:
        """Answer what is left; return how many rows were refused. Raises `RuntimeFault` if the run is over or
        does not answer. `progress` is told the number of answers so far."""
        num_refused = 0
        with self._output.open("ab") as file, ThreadPoolExecutor(self._parallel) as pool:
            sync_path(self._output.parent)
            waiting, left = set[Future[dict[str, Any]]](), iter(self.left)
            try:
                while True:
                    for row in left:
                        waiting.add(pool.submit(self._answer, row))
                        if len(waiting) >= self._parallel:
                            break
                    if not waiting:
                        return num_refused
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    lines = [future.result() for future in done]
                    file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
                    file.flush()
                    os.fsync(file.fileno())
                    num_refused += sum("error" in line for line in lines)
                    self._done.update(line["row"] for line in lines)
                    progress(len(self._done))
            finally:
                self._stop.set()

    def _answer(self, row: Row) -> dict[str, Any]:
        while True:
            status, body, retry_s = self._ask(row)
            if status in (200, 400, 404, 413):
                key = "response" if status == 200 else "error"
                return {
                    "row": row.number,
                    "digest": row.digest,
                    key: body if status == 200 else body["error"],
                }
            if status == 401:
                raise RuntimeFault(f"{self._run.api_keys} has no key that is good", "restore its lines")
            if self._run.outcome.exists() or self._run.ending.exists():
                raise RuntimeFault(f"run {self._run.name} has ended", "start it again, then this")
            if time.monotonic() - self._heard_at > PATIENCE_S:
                raise RuntimeFault(
                    f"the endpoint of {self._run.name} has not answered for {PATIENCE_S:.0f} s",
                    f"look at rlboost status {self._run.name}, then start this again",
                )
            if self._stop.wait(retry_s):
                raise RuntimeFault("another row failed", "start this again")

    def _ask(self, row: Row) -> tuple[int, dict[str, Any], float]:
        """Return status, body and seconds to wait before the next try; status 0: no answer."""
        known = read_json(self._run.api_endpoint)
        if known is None:
            return 0, {}, RETRY_S
        context = client_context(self._run.certificate.read_text())
        place = urlsplit(str(known["url"])).netloc
        connection = http.client.HTTPSConnection(place, timeout=ANSWER_S, context=context)
        headers = {
            "Authorization": f"Bearer {self._run.api_keys.read_text().split()[0]}",
            "X-Request-ID": f"{self._name}-{row.number}-{row.digest}",
        }
        try:
            connection.request("POST", row.path, json.dumps(row.body), headers)
            answer = connection.getresponse()
            body = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, {}, RETRY_S
        finally:
            connection.close()
        if answer.status not in (429, 503):
            self._heard_at = time.monotonic()
        return answer.status, body, float(answer.headers.get("Retry-After") or RETRY_S)
