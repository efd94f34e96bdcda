"""The audit of an ended run, as data and as lines for a person."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlboost_cli.terminal.text import table
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.index import is_open

AUDIT_S = 600.0
"""Longest audit on a head elsewhere: it reads every token of the run."""


def audit_of(run: RunFolder) -> dict[str, Any]:
    """Return what the audit found; `clean` is True if every promise that was checked held.

    Raises `ConfigError` if the run has not ended or its job did not keep the token journal. The records of a
    head elsewhere are on that head, and are read there: raises `HeadUnreachable` and `HeadRefused`.
    """
    evidence = (read_json(run.job_json) or {}).get("evidence") or {}
    if not evidence.get("keep_journal"):
        raise ConfigError(
            f"{run.name} cannot be audited: evidence.keep_journal was not set in its job, so its tokens were"
            " dropped step by step",
            "write `evidence: {keep_journal: true, count_tokens: true}` into the job file; the next run can"
            " then be audited",
        )
    if is_open(run):
        raise ConfigError(
            f"{run.name} is still running: its last step is not complete",
            f"audit it once it has ended; rlboost down {run.name} ends it",
        )
    if run.head.exists():
        from rlboost_cli.head.connection import Head

        with Head(run) as head:
            printed = head.rlboost("audit", run.name, "--json", seconds=AUDIT_S, answers_with=(0, 1))
        return dict(json.loads(printed.out))
    return _audit_here(run)


def _audit_here(run: RunFolder) -> dict[str, Any]:
    from rlboost_runtime.audit.run import audit

    found = audit(run)
    return {
        "run": run.name,
        "clean": not found.problems,
        "problems": found.problems,
        "responses": {
            "requested": found.requested,
            "finished": found.finished,
            "cancelled": found.cancelled,
            "unfinished": found.unfinished,
        },
        "tokens": {
            "accepted": found.tokens_accepted,
            "generated": found.tokens_generated,
            "lost": None if found.tokens_generated is None else sum(found.lost.values()),
        },
        "turns": {"asked": found.requests, "trained": found.turns_trained},
        "steps": [
            {
                "step": step.step,
                "policy_version": step.policy_version,
                "responses": len(step.tokens),
                "tokens": step.num_tokens,
                "migrated": sum(len(set(names)) > 1 for names in step.instances.values()),
            }
            for step in found.steps
        ],
        "commands_digest": found.commands_digest,
    }


def audit_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the audit as a person reads it: a row per step, the sums, then the verdict."""
    columns = ("step", "policy_version", "responses", "tokens", "migrated")
    rows = [[step[name] + (name == "step") for name in columns] for step in found["steps"]]
    yield from table([name.replace("_", " ") for name in columns], rows).splitlines()
    responses, tokens = found["responses"], found["tokens"]
    counts = ", ".join(f"{number:,} {name}" for name, number in responses.items() if number)
    yield f"\nresponses  {counts or 'none'}"
    if tokens["generated"] is None:
        lost = "; the engines did not count theirs (evidence.count_tokens), so losses are not known"
    else:
        lost = f" of {tokens['generated']:,} generated; {tokens['lost']:,} lost with their instances"
    yield f"tokens     {tokens['accepted']:,} accepted{lost}"
    if found["turns"]["asked"]:
        asked, trained = found["turns"]["asked"], found["turns"]["trained"]
        yield f"requests   {asked:,} to the endpoint; {trained:,} trained as turns of episodes"
    if found["clean"]:
        yield "\nclean: every response ended once, with tokens of its step's policy version only"
    else:
        yield f"\n{len(found['problems'])} problems:"
        yield from (f"  {problem}" for problem in found["problems"])
