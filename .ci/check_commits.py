"""Checks the subjects of commits: imperative, capitalised, at most 72 characters, without a full stop.

    python .ci/check_commits.py [BASE]

Commits up to BASE are exempt. A clone without BASE (a shallow one) is not checked, which is reported.
"""

from __future__ import annotations

import re
import subprocess
import sys

BASE = "14388ed"
"""The last commit before this rule."""
MOST_CHARACTERS = 72
"""What `git log --oneline` shows whole in a terminal of 80 columns."""
OTHER_FORMS = re.compile(r"\w*(ing|(?<!e)ed|(?<!s)s)")
VERBS = {"Bring", "Embed", "Focus", "Ping", "Shed", "String", "Swing"}
"""Imperatives that end as other forms do."""
NO_VERBS = frozenset(
    {"A", "An", "For", "If", "In", "It", "No", "Now", "On", "That", "The", "This", "What", "When"}
)


def fault(subject: str) -> str | None:
    """Return what is wrong with a commit's subject, or None."""
    if len(subject) > MOST_CHARACTERS:
        return f"has {len(subject)} characters; write at most {MOST_CHARACTERS}, the rest goes into the body"
    if subject.endswith("."):
        return "ends with a full stop; leave it out"
    first = subject.partition(" ")[0]
    if not re.fullmatch(r"[A-Z][a-z]*", first) or first in NO_VERBS:
        return f"starts with {first!r}; start with a capitalised verb in the imperative, such as 'Add'"
    if OTHER_FORMS.fullmatch(first) and first not in VERBS:
        return f"starts with {first!r}; write the imperative: 'Add', not 'Added', 'Adds' or 'Adding'"
    return None


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git here and return its result, whatever its exit code."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)  # noqa: S607


def main(arguments: list[str]) -> int:
    """Check the commits after the base, name each fault on stderr; return the exit code."""
    base = arguments[0] if arguments else BASE
    if git("merge-base", "--is-ancestor", base, "HEAD").returncode:
        print(f"commit subjects: not checked, this clone does not have commit {base} (is it shallow?)")
        return 0
    log = git("log", "--no-merges", "--format=%h %s", f"{base}..HEAD").stdout.splitlines()
    faults = [f"{line}\n  {found}" for line in log if (found := fault(line.partition(" ")[2]))]
    if faults:
        print("commit subjects:", *faults, sep="\n", file=sys.stderr)
        return 1
    print(f"commit subjects: {len(log)} checked since {base}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
