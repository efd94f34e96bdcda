"""Who is told when something happens to a run: a webhook or a command of the user's."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from rlboost_runtime.job.base import Model

NotifyKind = Literal["done", "failed", "budget", "preemption_storm", "stuck", "health"]
NOTIFY_KINDS: tuple[NotifyKind, ...] = ("done", "failed", "budget", "preemption_storm", "stuck", "health")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""How a webhook's URL names a variable of `secrets` or `env`."""


class WebhookTarget(Model):
    """A URL that gets a POST of {"text": ...}, as Slack's incoming webhooks take it."""

    webhook: str = Field(pattern=r"^(https?://|\$\{[A-Za-z_][A-Za-z0-9_]*\})[^\s]*$")
    """URL that gets {"text": ...} by POST, as Slack and Mattermost take it. It is a secret as a rule: write
    ${SLACK_URL}, and SLACK_URL in `secrets`."""
    on: list[NotifyKind] = Field(default=list(NOTIFY_KINDS), min_length=1)
    """What to report: done, failed, budget (50, 80 and 100 % of budget.max_usd), preemption_storm, stuck, and
    health for every other warning."""


class CommandTarget(Model):
    """A program on the head."""

    command: Annotated[list[str], Field(min_length=1)]
    """Program and arguments, started on the head in the folder of the run's `files`, without a shell. The
    text is on its standard input, and in RLBOOST_NOTIFY_TEXT; the kind in RLBOOST_NOTIFY_KIND."""
    on: list[NotifyKind] = Field(default=list(NOTIFY_KINDS), min_length=1)
    """What to report: done, failed, budget (50, 80 and 100 % of budget.max_usd), preemption_storm, stuck, and
    health for every other warning."""


NotifyTarget = WebhookTarget | CommandTarget


def variables_of(target: NotifyTarget) -> list[str]:
    """Return the names of the variables in a webhook's URL."""
    return VARIABLE.findall(target.webhook) if isinstance(target, WebhookTarget) else []
