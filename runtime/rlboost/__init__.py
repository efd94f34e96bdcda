"""RLBoost from Python: launch runs, follow them, and read what they did, in scripts and notebooks.

Enter at `launch`, `runs` and `Run`; docs/python.md shows them at work. Thin: each call is what a command of
`rlboost` does, on the same runs, so that a run can be launched here and watched in a terminal. Failures are
the errors below, with what is wrong in `problem` and what to do in `remedy`. Nothing of ours imports this
package.
"""

from __future__ import annotations

from rlboost.api import Run, StillOpen, launch, runs
from rlboost_cli.views.live import Outcome
from rlboost_runtime.billing.report import CostReport
from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    NotFound,
    ProviderError,
    QuotaExceeded,
    RLBoostError,
    RuntimeFault,
)
from rlboost_runtime.protocol.status import Status

__all__ = [
    "ConfigError",
    "CostReport",
    "CredentialsRejected",
    "NoCapacity",
    "NotFound",
    "Outcome",
    "ProviderError",
    "QuotaExceeded",
    "RLBoostError",
    "Run",
    "RuntimeFault",
    "Status",
    "StillOpen",
    "launch",
    "runs",
]
