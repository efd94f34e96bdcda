"""What each machine was to be bought as, copied to the job's `output` before it is launched.

OUTPUT/RUN/cloud/bought.json, for the case that the head is lost with its disk: `rlboost down` on the laptop
then knows, and bills, also what was launched after it last looked. A copy that fails is said and holds
nothing up: clouds whose machines are neither listed by tag nor end by themselves are refused beforehand.
"""

from __future__ import annotations

import datetime
import logging
from typing import TYPE_CHECKING, Any

from rlboost_runtime.job import Job
from rlboost_runtime.logs import event
from rlboost_runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

PUT_S = 10.0
"""Longest time that a launch waits for its copy."""
_NAME = "cloud/bought.json"


class IntentCopy:
    """Copies `cloud/bought.json` of one run. Any thread may call."""

    def __init__(self, run: RunFolder, output: str | None) -> None:
        self._run = run
        self._output = output

    @classmethod
    def of(cls, run: RunFolder, job: Job) -> IntentCopy:
        """Return that of `run`; it does nothing where the job has no `output`."""
        return cls(run, job.output)

    def put(self) -> bool:
        """Copy it as it is now; return whether it is there. Blocks for at most `PUT_S`."""
        if self._output is None:
            return False
        import obstore
        from obstore import exceptions

        try:
            obstore.put(self._bucket(), _NAME, self._run.path / _NAME)
        except (exceptions.BaseError, OSError, ValueError) as problem:
            told = str(problem).partition("\n")[0]
            event(log, "intent.not_copied", level=logging.WARNING, output=self._output, problem=told)
            return False
        return True

    def read(self) -> bytes | None:
        """Return the copy; None where there is none, or it cannot be read from here."""
        if self._output is None:
            return None
        try:
            import obstore
            from obstore import exceptions
        except ImportError:  # a laptop that never read a bucket
            return None
        try:
            return bytes(obstore.get(self._bucket(), _NAME).bytes())
        except (exceptions.BaseError, OSError, ValueError):
            return None

    def _bucket(self) -> ObjectStore:
        from obstore.store import from_url

        assert self._output is not None
        place = f"file://{self._output}" if self._output.startswith("/") else self._output
        url = f"{place.rstrip('/')}/{self._run.name}"
        if url.startswith("file:"):
            return from_url(url, mkdir=True)
        seconds = datetime.timedelta(seconds=PUT_S)
        options: Any = {"timeout": seconds, "connect_timeout": seconds, "allow_http": True}
        retries: Any = {"max_retries": 1, "retry_timeout": seconds}
        return from_url(url, client_options=options, retry_config=retries)
