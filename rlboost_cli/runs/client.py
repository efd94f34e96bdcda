"""The CLI's side of the coordinator's three requests: status, preempt, stop.

Trusts the run's own certificate and nothing else, sends the run's bearer token, and returns or raises by a
total deadline, whatever the other side does. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from rlboost_cli.terminal.errors import full_disk
from rlboost_runtime.errors import NotFound, ProtocolError, ProviderError, RLBoostError, RuntimeFault
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.security import client_context, read_token

PREEMPT_S = 30.0
"""Longest wait until a machine is taken: some clouds answer late."""
_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class NotAnswering(RuntimeFault):
    """The coordinator cannot be reached: it is not running, restarting or stuck."""


def get_status(run: RunFolder, timeout_s: float = 2.0) -> dict[str, Any]:
    """Return the live status. Raises `NotAnswering`."""
    return _request(run, "GET", "/v1/status", None, timeout_s)


def preempt(run: RunFolder, instance: str, notice_s: float | None) -> None:
    """Take `instance` away: at once, or `notice_s` seconds after a notice. Raises `NotFound` and
    `NotAnswering`."""
    _request(run, "POST", "/v1/preempt", {"instance": instance, "notice_s": notice_s}, PREEMPT_S)


def stop(run: RunFolder, timeout_s: float = 5.0) -> None:
    """Ask the coordinator to end the run; it goes on ending after this returned. Raises `NotAnswering`."""
    _request(run, "POST", "/v1/stop", stopped_outcome(run), timeout_s)


def stopped_outcome(run: RunFolder) -> dict[str, Any]:
    """Return the outcome of a run that a person ended: state, problem and remedy."""
    endpoint = (read_json(run.job_json) or {}).get("endpoint") or {}
    only_serves = endpoint.get("trains") is False
    remedy = (
        f"rlboost serve {run.name} --resume serves it again"
        if only_serves
        else f"rlboost launch {run.name} --resume continues it from its last checkpoint"
    )
    return {"state": "stopped", "problem": "ended by `rlboost down`", "remedy": remedy}


def _request(run: RunFolder, method: str, path: str, body: object, timeout_s: float) -> dict[str, Any]:
    try:
        status, answer = _exchange(run, method, path, body, time.monotonic() + timeout_s)
    except (OSError, http.client.HTTPException) as exc:  # TimeoutError and ssl.SSLError are OSErrors
        raise _not_answering(run, str(exc) or type(exc).__name__) from exc
    try:
        value = json.loads(answer)
    except ValueError as exc:
        raise ProtocolError(
            f"the coordinator of {run.name} answered {status} with something that is not JSON",
            f"check what listens at the address in {run.endpoint}",
        ) from exc
    if status >= 400 or not isinstance(value, dict):
        raise _refusal(run, status, value)
    return value


def _exchange(run: RunFolder, method: str, path: str, body: object, deadline: float) -> tuple[int, bytes]:
    endpoint = read_json(run.endpoint)
    if endpoint is None:
        raise ConnectionError("it is not listening yet")
    url = urlsplit(str(endpoint["url"]))
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=_left(deadline))
    try:
        connection.connect()
        plain: socket.socket = connection.sock
        plain.settimeout(_left(deadline))
        context = client_context(run.certificate.read_text())
        connection.sock = context.wrap_socket(plain, server_hostname=url.hostname)
        headers = {"Authorization": f"Bearer {read_token(run)}", "Content-Type": "application/json"}
        connection.sock.settimeout(_left(deadline))
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        connection.sock.settimeout(_left(deadline))
        sock = connection.sock  # a response that closes the connection takes it from there
        response = connection.getresponse()
        return response.status, _read(response, sock, deadline)
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, sock: ssl.SSLSocket, deadline: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size <= _MAX_ANSWER_BYTES:
        if sock.fileno() >= 0:
            sock.settimeout(_left(deadline))
        part = response.read1(65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise ConnectionError(f"the answer is longer than {_MAX_ANSWER_BYTES} bytes")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _not_answering(run: RunFolder, why: str) -> NotAnswering:
    if full := full_disk(run.path):
        return NotAnswering(
            f"{full}: {run.name} waits", "make room there: the run then continues, and nothing is lost"
        )
    return NotAnswering(
        f"the coordinator of {run.name} is not answering: {why}",
        f"rlboost launch {run.name} starts it again; rlboost logs {run.name} coordinator shows its log",
    )


def _refusal(run: RunFolder, status: int, value: object) -> RLBoostError:
    detail = value.get("detail") if isinstance(value, dict) else None
    if isinstance(detail, dict):
        problem, remedy = str(detail.get("problem", "")), str(detail.get("remedy", ""))
    else:
        problem, remedy = f"the coordinator of {run.name} answered {status}: {detail or value}", ""
    kind = {404: NotFound, 503: ProviderError}.get(status, ProtocolError)
    return kind(problem, remedy or f"rlboost status {run.name} shows what there is")
