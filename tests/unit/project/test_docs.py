"""What the documents say can be typed, followed and found."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from rlboost_cli.main import COMMANDS, app
from rlboost_runtime.billing.report import CostReport
from rlboost_runtime.protocol.status import Status
from rlboost_runtime.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typed_lines(page: Path) -> Iterator[str]:
    """The lines of shell blocks, without comments."""
    for block in re.findall(
        r"^```(?:sh|bash|shell)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        yield from (line.split("#")[0].strip() for line in block.splitlines() if line.split("#")[0].strip())


def test_generated_pages_are_up_to_date(generate: ModuleType) -> None:
    assert generate.outdated() == [], "run `make docs`"


def test_the_check_tells_a_page_that_is_out_of_date(
    generate: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "docs/job-file.md is out of date" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_shell_blocks_exist(page: Path) -> None:
    for line in typed_lines(page):
        if target := re.match(r"make ([a-z0-9-]+)", line):
            assert target[1] in TARGETS, line
        if command := re.match(r"(?:\S*/)?rlboost ([a-z]+)", line):
            assert command[1] in COMMANDS, line


FIRST_SCREEN = 20
"""Lines of the README that a browser shows at once, a picture among them."""


def test_the_readme_shows_two_commands_and_a_picture_at_once() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:FIRST_SCREEN]
    typed = [line.split()[:2] for line in first if line.startswith(("make ", ".venv/bin/"))]
    assert typed == [["make", "quickstart"], [".venv/bin/rlboost", "dashboard"]]
    assert any(re.match(r"!\[.{20,}\]\(docs/screens/", line) for line in first)
    assert any(line.startswith("pip install") for line in typed_lines(ROOT / "README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_and_headings_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in slugs, f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(
        r"`((?:runtime|providers|templates|rlboost_cli|examples|tests|docs|benchmarks)/[\w./-]+)`", text
    ):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_pages_hold_nothing_of_the_machine_they_were_written_on() -> None:
    for page in PAGES:
        assert not re.search(r"/(home|root|work|Users)/\w", page.read_text(encoding="utf-8")), page.name


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS = re.findall(
    r"^### (A [^\n]*, from [^\n]*)\n(.*?)(?=^##)",
    ARCHITECTURE[ARCHITECTURE.index("## Three walks") :],
    re.MULTILINE | re.DOTALL,
)
MOST_FILES_OF_A_WALK = 25


def test_there_are_three_walks() -> None:
    assert [name.partition(",")[0] for name, _ in WALKS] == ["A token", "A dollar", "A weight version"]


@pytest.mark.parametrize(("name", "text"), WALKS, ids=[name for name, _ in WALKS])
def test_a_walk_passes_few_files_and_each_exists(name: str, text: str) -> None:
    stops = re.findall(r"^(\d+)\. `([^`]+)`: .", text, re.MULTILINE)
    assert [int(number) for number, _ in stops] == list(range(1, len(stops) + 1))
    assert 15 < len(stops) <= MOST_FILES_OF_A_WALK
    files = [file for _, file in stops]
    assert len(set(files)) == len(files)
    missing = [
        f for f in files if not any((ROOT / at / f).exists() for at in ("", "runtime/rlboost_runtime"))
    ]
    assert missing == []


def test_the_page_on_json_has_every_key_of_status_and_cost() -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    status, cost = page.split("## `status RUN --json`")[1].split("## `cost RUN --json`")
    for section, struct in ((status, Status), (cost, CostReport)):
        assert [name for name in struct.__struct_fields__ if f"`{name}`" not in section] == []


def test_the_page_on_json_has_every_command_that_prints_it() -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    group: Any = get_command(app)
    names = [name for name in COMMANDS if any("--json" in each.opts for each in group.commands[name].params)]
    assert len(names) > 15
    assert [name for name in names if not re.search(rf"^\| `{name}\b[^`|]* --json`", page, re.M)] == []


def test_the_page_on_runs_has_every_place_of_a_run() -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^\| `([^`/]+)/?`", page.partition("## All files")[2], re.M))
    run = RunFolder(Path("run"))
    places = [value for name in dir(RunFolder) if isinstance(value := getattr(run, name), Path)]
    known = {path.relative_to(run.path).parts[0] for path in places if path != run.path}
    assert len(known) > 30
    assert known - names == set()
