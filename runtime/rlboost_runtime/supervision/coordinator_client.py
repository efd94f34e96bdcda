"""Asking the coordinator to end the run, over its own front door."""

from __future__ import annotations

import http.client
import json
import logging
from urllib.parse import urlsplit

from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.logs import event
from rlboost_runtime.run_folder import RunFolder, read_json
from rlboost_runtime.security import client_context, read_token

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0  # the coordinator is on this machine and only notes the wish


def ask_to_stop(run: RunFolder, problem: str, remedy: str, exit_code: int = 1) -> bool:
    """Ask the coordinator to end the run as failed; return whether it accepted. Blocks for seconds."""
    try:
        body = {"state": "failed", "problem": problem, "remedy": remedy, "exit_code": exit_code}
        return _post_stop(run, body)
    except (OSError, http.client.HTTPException, RLBoostError) as exc:
        event(log, "coordinator.unreachable", level=logging.WARNING, problem=repr(exc))
        return False


def _post_stop(run: RunFolder, body: dict[str, object]) -> bool:
    endpoint = read_json(run.endpoint)
    if endpoint is None:
        return False
    url = urlsplit(endpoint["url"])
    context = client_context(run.certificate.read_text())
    connection = http.client.HTTPSConnection(
        url.hostname or "127.0.0.1", url.port, timeout=_TIMEOUT_S, context=context
    )
    try:
        headers = {"Authorization": f"Bearer {read_token(run)}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/stop", json.dumps(body), headers)
        return 200 <= connection.getresponse().status < 300
    finally:
        connection.close()
