"""The rooms of docs/architecture.md: who may import whom, how large a room is, what a name means."""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    "rlboost": ROOT / "runtime" / "rlboost",
    "rlboost_cli": ROOT / "rlboost_cli",
    "rlboost_runtime": ROOT / "runtime" / "rlboost_runtime",
    "rlboost_providers": ROOT / "providers" / "rlboost_providers",
    "rlboost_templates": ROOT / "templates" / "rlboost_templates",
}
ROLES = {"coordinator", "agent", "engines", "weights", "trainer", "sim"}
CONTRACTS = {"rlboost_runtime.agent.bootstrap", "rlboost_runtime.engines.base"}
"""Modules inside a role that say what others may count on."""
MAY_KNOW = {
    "agent": {"engines", "weights"},
    "coordinator": set[str](),
    "engines": set[str](),
    "sim": set[str](),
    "trainer": {"weights"},
    "weights": set[str](),
}
"""Which role may use which other: nobody knows the agent or the coordinator."""
NO_TORCH = (
    *("agent", "billing", "coordinator", "core", "errors", "health", "job", "protocol", "run", "seams"),
    *("fit", "sim"),
)
TORCH = {"torch", "transformers", "safetensors", "vllm"}


def module_name(path: Path, package: str) -> str:
    relative = path.relative_to(PACKAGES[package]).with_suffix("")
    parts = [part for part in relative.parts if part != "__init__"]
    return ".".join([package, *parts])


PATHS = {
    module_name(path, package): path
    for package, folder in PACKAGES.items()
    for path in sorted(folder.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}


def imported(tree: ast.AST) -> set[str]:
    """Every module that `tree` imports, also for types only; `from a import b` counts as a and a.b."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = {name: imported(tree) for name, tree in TREES.items()}
NAMES = sorted(MODULES)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def ours(name: str) -> list[str]:
    """The modules of ours that module `name` imports."""
    return sorted(each for each in MODULES[name] if each in MODULES)


def role_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "rlboost_runtime" and len(parts) > 1 and parts[1] in ROLES else None


def shown(edges: Iterator[tuple[str, str]]) -> list[str]:
    return sorted({f"{name} imports {each}" for name, each in edges})


def edges(*packages: str) -> Iterator[tuple[str, str]]:
    """Every import of ours by a module within `packages`; a package that only holds others does not count."""
    for name in NAMES:
        if any(within(name, package) for package in packages):
            yield from ((name, each) for each in ours(name) if each not in BARE)


BARE = {f"rlboost_runtime.{role}" for role in ROLES} | {"rlboost_runtime"}
"""`from a.b import c` also names package a.b, and says nothing by that."""


def knows_role(edge: tuple[str, str]) -> bool:
    return role_of(edge[1]) is not None and edge[1] not in CONTRACTS


def test_the_walk_finds_every_package_and_every_kind_of_import() -> None:
    assert {name.split(".")[0] for name in NAMES} == set(PACKAGES)
    assert imported(ast.parse("def f():\n    import a.b\n    from c import d")) == {"a.b", "c", "c.d"}
    assert ("rlboost_runtime.trainer.data.prompts", "rlboost_runtime.job") in edges("rlboost_runtime.trainer")


def test_core_uses_the_standard_library_and_itself_only_and_has_no_effects() -> None:
    effects = {"asyncio", "socket", "time", "os", "subprocess", "threading", "logging", "pathlib", "secrets"}
    allowed = sys.stdlib_module_names - effects
    core = [name for name in NAMES if within(name, "rlboost_runtime.core")]
    used = ((name, each) for name in core for each in MODULES[name])
    wrong = (
        e for e in used if e[1].split(".")[0] not in allowed and not within(e[1], "rlboost_runtime.core")
    )
    assert shown(e for e in wrong if e[1] != "rlboost_runtime") == []


def test_roles_know_each_other_only_where_the_table_says_so() -> None:
    between = (
        e for e in edges(*BARE - {"rlboost_runtime"}) if knows_role(e) and role_of(e[0]) != role_of(e[1])
    )
    assert shown(e for e in between if role_of(e[1]) not in MAY_KNOW[str(role_of(e[0]))]) == []


def test_what_roles_share_knows_no_role() -> None:
    shared = (e for e in edges("rlboost_runtime") if role_of(e[0]) is None)
    starts_roles = ("rlboost_runtime.supervisor.supervisor",)
    reads_what_roles_left = ("rlboost_runtime.audit",)
    known = (*starts_roles, *reads_what_roles_left)
    assert shown(e for e in shared if knows_role(e) and not any(within(e[0], each) for each in known)) == []


def test_only_the_command_line_knows_the_audit() -> None:
    audit = "rlboost_runtime.audit"
    users = [(name, each) for name in NAMES for each in ours(name) if within(each, audit)]
    assert shown(e for e in users if not within(e[0], audit) and not within(e[0], "rlboost_cli")) == []


def test_the_runtime_knows_neither_the_cli_nor_a_cloud() -> None:
    outward = (e for e in edges("rlboost_runtime") if not within(e[1], "rlboost_runtime"))
    seams = ("rlboost_providers.base", "rlboost_providers.registry")
    assert shown(e for e in outward if not any(within(e[1], seam) for seam in seams)) == []


def test_nothing_of_ours_uses_the_python_package() -> None:
    assert any(within(name, "rlboost") for name in NAMES)
    users = [name for name in NAMES if not within(name, "rlboost")]
    assert shown((name, each) for name in users for each in MODULES[name] if within(each, "rlboost")) == []


def test_providers_know_contracts_but_no_role_and_no_command() -> None:
    wrong = (e for e in edges("rlboost_providers") if knows_role(e) or within(e[1], "rlboost_cli"))
    assert shown(wrong) == []


def test_light_processes_never_import_torch() -> None:
    light = [name for name in NAMES if any(within(name, f"rlboost_runtime.{each}") for each in NO_TORCH)]
    assert len(light) > 10
    used = ((name, each) for name in light for each in MODULES[name])
    assert shown(e for e in used if e[1].split(".")[0] in TORCH) == []


def test_everything_of_ours_that_is_imported_is_there() -> None:
    prefixes = tuple(f"{package}." for package in PACKAGES)
    used = ((name, each) for name in NAMES for each in MODULES[name] if each.startswith(prefixes))
    assert shown(e for e in used if e[1] not in MODULES and e[1].rpartition(".")[0] not in MODULES) == []


# --- rooms -------------------------------------------------------------------------------------------------

MOST_MODULES = 15
"""A room with more is split (CONTRIBUTING)."""


def room_of(name: str) -> str:
    """The folder that holds module `name`; a package's `__init__` stands for its own folder."""
    return name if PATHS[name].name == "__init__.py" else name.rpartition(".")[0]


def imports_of(name: str) -> set[str]:
    """The modules of ours that `name` imports; `from a import b` counts as a.b where that is a module."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in PATHS else str(node.module))
    return {each for each in found if each in PATHS} - {name}


def test_no_folder_holds_too_many_modules() -> None:
    folders = [*PACKAGES.values(), ROOT / "benchmarks", ROOT / "docs"]
    held = Counter(path.parent for folder in folders for path in folder.rglob("*.py"))
    sizes = {str(folder.relative_to(ROOT)): n for folder, n in held.items()}
    assert {folder: n for folder, n in sizes.items() if n > MOST_MODULES} == {}


def test_modules_do_not_import_in_a_circle() -> None:
    list(TopologicalSorter({name: imports_of(name) for name in NAMES}).static_order())


def test_rooms_do_not_import_in_a_circle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for name in NAMES:
        graph[room_of(name)] |= {room_of(each) for each in imports_of(name)} - {room_of(name)}
    list(TopologicalSorter(graph).static_order())


def test_every_room_says_what_it_is_for() -> None:
    silent = [name for name, path in PATHS.items() if path.name == "__init__.py"]
    assert [name for name in silent if not ast.get_docstring(TREES[name])] == []


def test_public_class_names_are_unique() -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}


# --- clouds ------------------------------------------------------------------------------------------------

CLOUDS = {"aws", "gcp", "azure", "google", "amazon", "runpod", "lambda", "vast", "nebius", "kubernetes"}
CLOUDS |= {"ec2", "gce", "k8s"}
MAY_NAME_CLOUDS = (
    "rlboost_providers.registry",
    "rlboost_templates",
    *(f"rlboost_providers.{folder}" for folder in ("aws", "gcp", "skypilot")),
)


def _body_of(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)  # a lambda's is an expression
    return body if isinstance(body, list) else []


def strings_of(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every string of the code; docstrings are not strings of the code."""
    documented = {
        id(each.value) for node in ast.walk(tree) for each in _body_of(node) if isinstance(each, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node


def test_a_cloud_is_named_in_its_own_folder_only() -> None:
    outside = [name for name in NAMES if not any(within(name, place) for place in MAY_NAME_CLOUDS)]
    named = (
        f"{name}:{text.lineno} {text.value}"
        for name in outside
        for text in strings_of(TREES[name])
        if text.value.lower() in CLOUDS
    )
    assert list(named) == []
    assert any(text.value == "aws" for text in strings_of(TREES["rlboost_providers.aws.traits"]))
