"""Change one thing in the core, the ledger, the wire or the journal, and see whether a test notices.

    pip install mutmut==3.8.1
    python -m benchmarks.mutation --folder /tmp/mutation --sample 1000 [--seed 0] [--out mutation.json]

mutmut works on a copy of the last commit in `--folder`; called again with the same folder, it continues.
A sample is drawn evenly from all mutants. Each is judged by the tests of `TESTS` that reach its function and
take at most `QUICK_S`; if they do not notice it, by those that take at most `SLOW_S`; where there is none, by
the quickest that reach it. What only other tests notice counts as a survivor. One that differs in a text
alone, such as a message or the case of SQL, is counted apart. The last line is one JSON object with the score
and the survivors.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkout import commit

MUTATED = {
    "core": ["core"],
    "ledger": ["billing/ledger", "billing/launch_records", "billing/accounts"],
    "wire": ["protocol/session", "protocol/transport"],
    "journal": ["coordinator/storage"],
}
"""The modules of each part, as the beginning of their path in rlboost_runtime."""
TESTS = tuple(
    f"tests/{name}"
    for name in (
        *("unit/core", "unit/billing", "unit/coordinator", "unit/protocol", "unit/sim", "unit/audit"),
        *("property", "integration/protocol"),
    )
)
QUICK_S, SLOW_S = 0.5, 6.0
QUICKEST = 3
"""So many tests judge a function that only slower ones reach."""
NO_MUTANT = "none*"
"""Matches no mutant: mutmut stops with an error after its preparations."""
BATCH = 200
"""Mutants for which mutmut is started at once."""
KILLED, SURVIVED, UNREACHED, TEXT = "killed", "survived", "reached by no test", "differs in a text alone"
_EXIT_CODES = {0: SURVIVED, 5: UNREACHED, 33: UNREACHED}
"""Of mutmut; any other code is a failed test, a crash or a test that never ended."""


def main() -> int:
    """Return 0; a survivor is no error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder: Path = options.folder
    if not _ready(folder).exists():
        _copy(folder)
        _prepare(folder)
        _ready(folder).touch()
    names = sorted(_verdicts(folder))
    sample = random.Random(options.seed).sample(names, min(options.sample, len(names)))
    _judge(folder, sample, options.processes)
    if not _looked_twice(folder).exists():
        survivors = [name for name in sample if _verdict(_verdicts(folder)[name]) != KILLED]
        print(f"{len(survivors)} survivors, with slower tests", flush=True)
        _judge_by(folder, SLOW_S)
        _forget(folder, survivors)
        _looked_twice(folder).touch()
    _judge(folder, sample, options.processes)
    result = {
        "commit": _commit(folder).read_text(),
        "seed": options.seed,
        "mutants": len(names),
        **_result(folder, sample),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, ensure_ascii=False))
    return 0


def _copy(folder: Path) -> None:
    """Write the last commit into `folder`, with the runtime where mutmut looks for a package: in src/."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / "commit.tar"
    subprocess.run(["git", "archive", "-o", packed.absolute(), "HEAD"], check=True)
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    packed.unlink()
    _commit(folder).write_text(commit())
    others = [path.name for path in folder.iterdir() if path.name not in ("runtime", "tests")]
    (folder / "runtime").rename(folder / "src")
    pyproject = folder / "pyproject.toml"
    only = [f"src/rlboost_runtime/{path}*" for paths in MUTATED.values() for path in paths]
    settings = {
        "source_paths": ["src"],
        "only_mutate": only,
        "also_copy": sorted(others),
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-o", "timeout=300"],
        "pytest_add_cli_args_test_selection": list(TESTS),
    }
    text = pyproject.read_text().replace('pythonpath = [".", "runtime"', 'pythonpath = [".", "src"')
    text += "\n[tool.mutmut]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    pyproject.write_text(text)


def _prepare(folder: Path) -> None:
    """Let mutmut make the mutants and see which tests reach which function; leave out the slow tests."""
    print("making the mutants; running the tests once", flush=True)
    _mutmut(folder, "run", "--max-children", "1", NO_MUTANT)
    stats = json.loads(_stats(folder).read_text())
    _reached(folder).write_text(json.dumps(stats["tests_by_mangled_function_name"]))
    _judge_by(folder, QUICK_S)


def _judge_by(folder: Path, most_s: float) -> None:
    """Judge from now on by tests that take at most so long; where none does, by the quickest."""
    stats = json.loads(_stats(folder).read_text())
    seconds = stats["duration_by_test"]
    reached = json.loads(_reached(folder).read_text())
    for name, tests in reached.items():
        quick = [test for test in tests if seconds.get(test, 0.0) <= most_s]
        reached[name] = quick or sorted(tests, key=lambda test: seconds.get(test, 0.0))[:QUICKEST]
    _stats(folder).write_text(json.dumps(stats | {"tests_by_mangled_function_name": reached}))


def _judge(folder: Path, sample: list[str], processes: int) -> None:
    """Let mutmut run the mutants of the sample that have no verdict."""
    began = time.monotonic()
    while left := [name for name in sample if _verdicts(folder)[name] is None]:
        done, seconds = len(sample) - len(left), time.monotonic() - began
        print(f"{done} of {len(sample)} mutants, {seconds:.0f} s", flush=True)
        _mutmut(folder, "run", "--max-children", str(processes), *left[:BATCH])
        if all(_verdicts(folder)[name] is None for name in left[:BATCH]):
            raise SystemExit(f"mutmut judged none of its mutants; see {_log(folder)}")


def _forget(folder: Path, names: list[str]) -> None:
    """Take the verdicts of these mutants back."""
    for path in _metas(folder):
        meta = json.loads(path.read_text())
        codes = meta["exit_code_by_key"]
        meta["exit_code_by_key"] = codes | dict.fromkeys(codes.keys() & set(names))
        path.write_text(json.dumps(meta))


def _mutmut(folder: Path, *arguments: str) -> None:
    with _log(folder).open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "mutmut", *arguments], cwd=folder, stdout=log, stderr=log, check=False
        )


def _ready(folder: Path) -> Path:
    """Return the file that says that copy, mutants and reached tests are there."""
    return folder / "ready"


def _looked_twice(folder: Path) -> Path:
    """Return the file that says that survivors are being judged by slower tests."""
    return folder / "looked_twice"


def _commit(folder: Path) -> Path:
    """Return the file that names the commit whose mutants are there."""
    return folder / "commit"


def _reached(folder: Path) -> Path:
    """Return the file of all tests that reach a function."""
    return folder / "reached.json"


def _stats(folder: Path) -> Path:
    """Return the file from which mutmut takes the tests that judge a function."""
    return folder / "mutants" / "mutmut-stats.json"


def _log(folder: Path) -> Path:
    return folder / "mutmut.log"


def _metas(folder: Path) -> list[Path]:
    """Return mutmut's files of verdicts."""
    return sorted(folder.glob("mutants/src/**/*.meta"))


def _verdicts(folder: Path) -> dict[str, int | None]:
    """Return mutmut's exit code of each mutant; None before it was run."""
    verdicts: dict[str, int | None] = {}
    for path in _metas(folder):
        verdicts |= json.loads(path.read_text())["exit_code_by_key"]
    return verdicts


def _result(folder: Path, sample: list[str]) -> dict[str, Any]:
    verdicts = {name: _verdict(_verdicts(folder)[name]) for name in sample}
    survivors = {name: _diff(folder, name) for name in sample if verdicts[name] != KILLED}
    for name, diff in survivors.items():
        if is_text_alone(diff):
            verdicts[name] = TEXT
    parts = {part: counts([verdicts[name] for name in sample if _part(name) == part]) for part in MUTATED}
    return {
        **counts(list(verdicts.values())),
        "parts": parts,
        "survivors": {name: [verdicts[name], *diff] for name, diff in survivors.items()},
    }


def counts(found: list[str]) -> dict[str, Any]:
    """Return how many of each verdict, and the share killed of those that differ in more than a text, with
    half the width of its 95 % interval."""
    killed, num = found.count(KILLED), len(found) - found.count(TEXT)
    score = killed / num if num else 0.0
    half = 1.96 * math.sqrt(score * (1 - score) / num) if num else 0.0
    return {
        "sample": len(found),
        "killed": killed,
        "survived": found.count(SURVIVED),
        "unreached": found.count(UNREACHED),
        "text_alone": found.count(TEXT),
        "score": round(score, 3),
        "score_95": round(half, 3),
    }


def is_text_alone(diff: list[str]) -> bool:
    """Return True if the lines that are taken away and put in their place differ within quotes alone."""
    without = [(line[0], re.sub(r"\"[^\"]*\"|'[^']*'", "", line[1:])) for line in diff]
    return [code for sign, code in without if sign == "-"] == [code for sign, code in without if sign == "+"]


def _verdict(exit_code: int | None) -> str:
    return _EXIT_CODES.get(exit_code if exit_code is not None else 33, KILLED)


def _part(name: str) -> str:
    path = name.removeprefix("rlboost_runtime.").replace(".", "/")
    return next(part for part, paths in MUTATED.items() if any(path.startswith(start) for start in paths))


def _diff(folder: Path, name: str) -> list[str]:
    """Return the lines that the mutant takes away and puts in their place."""
    shown = subprocess.run(
        [sys.executable, "-m", "mutmut", "show", name],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [
        line for line in shown.stdout.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    return [line[0] + " " + line[1:].strip() for line in lines]


if __name__ == "__main__":
    sys.exit(main())
