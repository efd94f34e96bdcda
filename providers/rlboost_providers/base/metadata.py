"""Reclaims as a cloud announces them to its machines, by a metadata service on the machine's own link.

Guarantees: a request takes at most `ANSWER_S`; nothing of the machine's identity or credentials is requested
or kept. Each cloud's own reader is in the `traits` module of its folder.
"""

from __future__ import annotations

import email.utils
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

ANSWER_S = 2.0
"""Longest wait for an answer."""
URL_VARIABLE = "RLBOOST_METADATA_URL"
"""Overrides the service's own address, for tests."""
LINK_LOCAL = "http://169.254.169.254"
"""Where most clouds have the service."""
LONGEST_NOTICE_S = 600.0
"""Times further away are not believed: the machine's clock may be wrong."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """The cloud will take the machine in `seconds`; `source` is what it announced."""

    seconds: float
    source: str


class MetadataService(Protocol):
    """One cloud's service. `ask` blocks for up to a few times `ANSWER_S`."""

    def ask(self) -> Announcement | None:
        """Return what is announced. Raises anything where there is no sensible answer."""


def service_url(default: str) -> str:
    """Return where the service is: `default`, except in tests."""
    return os.environ.get(URL_VARIABLE, "").rstrip("/") or default


def get(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
    """Return the answer's text; None where there is no such thing (404)."""
    import urllib.request  # not to be loaded with the traits

    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 our own addresses
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would ask its own host
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            body: bytes = answer.read(65_536)
            return body.decode()
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise


def seconds_until(text: str, otherwise: float) -> float:
    """Return the seconds until a time, from 0 to `LONGEST_NOTICE_S`; `otherwise` where it cannot be read."""
    try:
        at = datetime.fromisoformat(text).timestamp()
    except ValueError:
        parsed = email.utils.parsedate_tz(text)
        if parsed is None:
            return otherwise
        at = email.utils.mktime_tz(parsed)
    seconds = at - time.time()
    return otherwise if abs(seconds) > LONGEST_NOTICE_S else max(0.0, seconds)
