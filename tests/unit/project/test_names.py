"""Pages and docstrings name files, modules and classes that exist."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Set
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from rlboost_cli.foreign.reading import FRAMEWORKS
from rlboost_runtime.job.file.load import describe_fields

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("rlboost_cli", "runtime", "providers", "templates", "tests", "benchmarks", "examples", "docs")
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and "__pycache__" not in path.parts
]
SOURCES = [path for path in FILES if path.suffix == ".py"]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for path in FILES if path.suffix == ".md" and path.relative_to(ROOT).parts[0] != "tests"),
]
PACKAGES = (
    *("rlboost", "rlboost_cli", "rlboost_runtime", "rlboost_providers", "rlboost_templates"),
    *("benchmarks", "tests"),
)
STARTS = ("", "runtime/", "providers/", "templates/", "runtime/rlboost_runtime/")
"""Where a path in prose may start: at the repository, or at what is on Python's path."""
ALLOWED = {
    "weights.versions",  # keys of `rlboost status --json`
    "weights.egress",
    "detail.verdicts",  # a key of a benchmark's result
    "machine.launched",  # an event
    "files.previous",  # a folder of a run
    "compute.instances.delete",  # a right in Google Cloud
    "agent.settle",  # attributes of what a docstring speaks of
    "state.step",
}
ALLOWED |= {option for each in FRAMEWORKS for option in (*each.defaults, *each.elsewhere)}
EXAMPLES = re.compile(r"\b(acme|fewest)\b")
"""What the worked examples in CONTRIBUTING would add."""
FOREIGN = {
    "ContinuousBatchProcessor",
    "GRPOTrainer",
    "MemoryBIO",
    "ProxyJump",
    "ServiceClient",
    "compute_v1",
    "np",
    "vllm",
}
"""Classes, options and packages of other projects that are named."""

DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
OURS = re.compile(r"\brlboost_(?:cli|runtime|providers|templates)(?:\.[A-Za-z_]\w*)+")
IMPORT = re.compile(r"^from (rlboost_[\w.]+) import ([\w, ]+)$", re.MULTILINE)
DATA_FILE = re.compile(
    r"\.(py|json|jsonl|yaml|csv|md|log|mark|snapshot|sqlite|svg|txt|sh|npz|pt|safetensors|weights|key|pem)$"
)


def module_of(path: Path) -> str:
    """Return the dotted name of a source file, from its package on."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    start = next((k for k, part in enumerate(parts) if part in PACKAGES), 0)
    return ".".join(part for part in parts[start:] if part != "__init__")


def defined(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that the statements of a module or a class define or import."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Assign(targets=targets):
                yield from (each.id for t in targets for each in ast.walk(t) if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.If(body=inner) | ast.Try(body=inner):
                yield from defined(inner)


def set_on_self(node: ast.ClassDef) -> set[str]:
    """Return the attributes that the methods of a class assign."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in found if isinstance(each.ctx, ast.Store)}


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
MODULES = {module_of(path): set(defined(tree.body)) for path, tree in TREES.items()}
SUFFIXES: dict[str, list[str]] = defaultdict(list)
"""Every ending of a module's dotted name, such as `core.core`, and the modules that have it."""
for _name in [*MODULES, *{name.rpartition(".")[0] for name in MODULES}]:
    for _k in range(_name.count(".") + 1):
        SUFFIXES[_name.split(".", _k)[-1]].append(_name)
CLASSES: dict[str, list[ast.ClassDef]] = defaultdict(list)
for _node in chain.from_iterable(ast.walk(tree) for tree in TREES.values()):
    if isinstance(_node, ast.ClassDef):
        CLASSES[_node.name].append(_node)
PUBLIC = set(chain.from_iterable(names for name, names in MODULES.items() if not name.startswith("tests")))
KNOWN_FILES = {path.relative_to(ROOT).as_posix() for path in FILES}
ROOMS = {part for name in MODULES for part in name.split(".")}


@cache
def job_fields() -> frozenset[str]:
    """Return every ending of every field's path in a job file, such as `engine_args.python`."""
    paths = {field.path.replace("[]", "") for field in describe_fields()}
    parents = {path.rpartition(".")[0] for path in paths}
    return frozenset(path.split(".", k)[-1] for path in paths | parents for k in range(path.count(".") + 1))


def has_member(name: str, member: str, seen: frozenset[str] = frozenset()) -> bool:
    """Return True if one of our classes called `name` has `member`, or may inherit it from elsewhere."""
    for node in CLASSES[name]:
        if member in {*defined(node.body), *set_on_self(node)}:
            return True
        bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        if any(base not in CLASSES for base in bases - {"Protocol", "Generic", "StrEnum", "Exception"}):
            return True
        if any(has_member(base, member, seen | {name}) for base in (bases & set(CLASSES)) - seen - {name}):
            return True
    return False


def resolves(name: str) -> bool:
    """Return True if a dotted name ends in a module of ours, or in a name that one defines."""
    if name in SUFFIXES:
        return True
    outer, _, inner = name.rpartition(".")
    if any(inner in MODULES.get(module, ()) for module in SUFFIXES.get(outer, ())):
        return True
    module, _, cls = outer.rpartition(".")
    return cls in CLASSES and has_member(cls, inner) and (not module or resolves(outer))


def stale_name(name: str, variables: Set[str]) -> bool:
    """Return True for a dotted name that leads nowhere; `variables` are the names its own file may use."""
    first = name.partition(".")[0]
    if name in ALLOWED or first in FOREIGN | sys.stdlib_module_names or DATA_FILE.search(name):
        return False
    if name in job_fields() or (first in variables and first not in ROOMS and first not in CLASSES):
        return False
    return not resolves(name)


def stale_path(name: str, folder: Path) -> bool:
    """Return True for a path of a source file, or of anything in the repository, that is not there."""
    if not PATH.fullmatch(name) or not (name.endswith(".py") or name.partition("/")[0] in FOLDERS):
        return False
    if "/" not in name and not name.endswith(".py"):
        return False
    if any((start / name).exists() for start in (folder, *(ROOT / each for each in STARTS))):
        return False
    return not any(f"/{known}".endswith(f"/{name}") for known in KNOWN_FILES)


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def stale_in(text: str, folder: Path, variables: Set[str] = frozenset()) -> set[str]:
    """Return what `text` names in backticks, or by one of our packages, that does not exist."""
    text = "\n".join(line for line in text.splitlines() if not EXAMPLES.search(line))
    names = quoted(text)
    found = {name for name in names if stale_path(name, folder)}
    found |= {name for name in names if DOTTED.fullmatch(name) and stale_name(name, variables)}
    return found | {name for name in OURS.findall(text) if not DATA_FILE.search(name) and not resolves(name)}


def variables_of(tree: ast.AST) -> set[str]:
    """Return the identifiers that a source file uses."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name.partition(".")[0])
    return found


def docstrings(tree: ast.Module) -> Iterator[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    yield from filter(None, (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert stale_in(text, page.parent) == set()
    for module, names in IMPORT.findall(text):
        assert [name for name in names.split(", ") if not resolves(f"{module}.{name}")] == []
    classes = {name for name in quoted(text) if re.fullmatch(r"[A-Z][a-z]\w+", name)}
    assert classes - FOREIGN - PUBLIC == set()


def test_docstrings_name_what_exists() -> None:
    found = []
    for path, tree in TREES.items():
        variables = variables_of(tree)
        named = {name for text in docstrings(tree) for name in stale_in(text, path.parent, variables)}
        found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(named)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "`core.windows.predicted`",
        "see `Core.chek`",
        "`trainer/looop.py`",
        "`docs/nothing.md`",
        "rlboost_runtime.core.nothing",
        "`nobody.py`",
    ],
)
def test_a_stale_name_is_found(text: str) -> None:
    assert stale_in(text, ROOT)


@pytest.mark.parametrize(
    "text",
    [
        "`core.window.predicted`",
        "`Core.check`",
        "`trainer/loop.py`",
        "`weights.transfer`",
        "`np.zeros`",
        "`ending.json`",
    ],
)
def test_names_of_today_are_not(text: str) -> None:
    assert not stale_in(text, ROOT)
