"""The page of a run in a real browser: live from `rlboost dashboard`, and frozen by `rlboost report`."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.health.glossary import GLOSSARY
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder, write_json
from tests.e2e import browser
from tests.e2e.e2e_rig import PATIENCE, Cli

pytestmark = pytest.mark.e2e

HOSTILE = "</script><img src=x onerror=\"document.title='broken in'\">"
TILES = (
    "Object.fromEntries([...document.querySelectorAll('.tile')]"
    ".map(tile => [tile.children[0].innerText, tile.children[1].innerText]))"
)
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
AXE = Path(__file__).parents[2] / "build" / "axe" / "package" / "axe.min.js"
VIOLATIONS = (
    "axe.run().then(found => found.violations.map("
    "one => [one.id, one.impact, one.nodes.map(node => node.html.slice(0, 120))]))"
)
CONTROLS = (
    "[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex=\"0\"]')]"
    ".filter(e => !e.disabled && e.checkVisibility())"
)
UNNAMED = (
    "[...document.querySelectorAll('button, input, select, svg[role=img], [role=region]')]"
    ".filter(e => !(e.innerText || e.getAttribute('aria-label') || e.closest('label')?.innerText)).length"
)


@contextmanager
def dashboard(cli: Cli, *arguments: str) -> Iterator[str]:
    """Serve; yields the address with the key."""
    process = cli.start("dashboard", *arguments, "--port", "0", "--no-open")
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def test_the_page_on_the_head_survives_kills_of_itself_and_of_the_coordinator(cli: Cli) -> None:
    job = cli.job("served", algorithm={"steps": 5}, dashboard={})
    launched = cli.start("launch", job, "--yes")
    cli.wait("served", lambda status: status["step"] >= 1, 120)
    address = cli("dashboard", "served", "--link").stdout.strip()
    run = cli.run_folder("served")
    with browser.page() as page:
        page.open(address)
        page.wait("!!document.querySelector('.tile')", PATIENCE * 5)
        assert "key=" not in page.evaluate("location.href")
        kill(run, "dashboard")
        step = cli.wait("served", lambda status: status["step"] >= 2, 120)["step"]
        page.wait(f"parseInt({TILES}['Step']) >= {step}", PATIENCE * 10)
        kill(run, "coordinator")
        step = cli.wait("served", lambda status: status["step"] >= 3, 120)["step"]
        page.wait(f"parseInt({TILES}['Step']) >= {step}", PATIENCE * 10)
        assert page.evaluate("location.href").startswith(address.partition("?")[0])
    launched.communicate(timeout=PATIENCE * 120)
    assert launched.returncode == 0


def test_the_pages_are_accessible_and_used_without_a_mouse(cli: Cli) -> None:
    """By axe-core, with every rule of WCAG 2.2 AA and its best practices, in both themes and two widths."""
    cli("launch", cli.job("face", algorithm={"steps": 2}), "--yes")
    cli("launch", cli.job("other", algorithm={"steps": 2}), "--yes")
    cli("report", "face", "-o", report := cli.home / "face.html")
    with dashboard(cli) as address, browser.page() as page:
        host, _, key = address.partition("?")
        pages = {
            "": "!!document.querySelector('table')",
            "runs/face/": "!!document.querySelector('.tile')",
            "compare": "!!document.querySelector('input')",
        }
        found: dict[tuple[str, int, bool], Any] = {}
        shown = [(f"{host}{path}?{key}", ready) for path, ready in pages.items()]
        for url, ready in [*shown, (f"file://{report}", pages["runs/face/"])]:
            for width in (1440, 390):
                for is_dark in (False, True):
                    page.open(url)
                    page.wait(ready, PATIENCE * 5)
                    page.show(width, 1400, is_dark=is_dark)
                    page.evaluate(AXE.read_text())
                    if violated := page.run(VIOLATIONS):
                        found[url.partition("?")[0], width, is_dark] = violated
    assert not found
    use_without_a_mouse(cli)


def use_without_a_mouse(cli: Cli) -> None:
    with dashboard(cli, "face") as address, browser.page() as page:
        page.open(address)
        page.wait("!!document.querySelector('.tile')", PATIENCE * 5)
        wanted = page.evaluate(f"{CONTROLS}.length")
        seen = set()
        for _ in range(wanted + 5):
            page.press("Tab")
            seen.add(page.evaluate(f"{CONTROLS}.indexOf(document.activeElement)"))
        missed = [page.evaluate(f"{CONTROLS}[{i}].outerHTML") for i in range(wanted) if i not in seen]
        assert missed == [], "Tab reaches every control"
        assert wanted > 5
        page.evaluate("document.querySelector('summary').focus()")
        page.press("Enter")
        assert page.evaluate("document.querySelector('details').open")


def test_a_long_run_opens_at_once_and_stays_small(cli: Cli) -> None:
    """500 steps, 200 machines and 100,000 samples."""
    long_run(cli.run_folder("long"))
    with dashboard(cli, "long") as address, browser.page() as page:
        page.open(address)
        assert page.wait("!!document.querySelector('.tile')", 3 * PATIENCE) < 3 * PATIENCE
        page.wait("document.querySelectorAll('.sample').length > 0", 3 * PATIENCE)
        page.evaluate("document.querySelector('input[type=search]').focus()")
        page.call("Input.insertText", text="prompt 77777 ")
        page.wait("document.body.innerText.includes('response 77777')", 3 * PATIENCE)
        assert page.problems == []
        page.call("HeapProfiler.collectGarbage")
        assert page.call("Runtime.getHeapUsage")["usedSize"] < 100e6


def long_run(run: RunFolder) -> None:
    """Write the folder of such a run, which is done."""
    run.logs.mkdir(parents=True)
    fields = {"name": "long", "model": {"init": "tiny"}, "data": {"source": "p"}}
    run.job_json.write_text(Job.model_validate(fields).canonical_json())
    status = {"run": "long", "state": "done", "step": 500, "started_at": 1000.0, "at": 51_000.0}
    write_json(run.status, status)
    write_json(run.outcome, {"state": "done"})
    names = [name for name in GLOSSARY if name != "step"]
    with run.metrics.open("w") as file:
        for step in range(500):
            row = {"step": step} | {name: step % 7 + n for n, name in enumerate(names)}
            file.write(json.dumps(row) + "\n")
    with run.samples.open("w") as file:
        for n in range(100_000):
            sample = {
                "step": n // 200,
                "prompt": f"prompt {n} " + "p" * 200,
                "response": f"response {n} " + "r" * 400,
            }
            file.write(json.dumps(sample | {"reward": 0.5, "tokens": 100, "finish_reason": "stop"}) + "\n")
    with closing(Ledger(run.ledger)) as ledger:
        for n in range(200):
            at = 1000.0 + 200 * n
            ledger.intend(MachineRecord(f"spot-{n}", "aws", "us-east-1a", "H100:8", 20_000_000, "job", at))
            ledger.launched(f"spot-{n}", at)
            ledger.ended(f"spot-{n}", at + 3600.0, "preempted")
            ledger.note(at, "launched", f"spot-{n} launched")


def kill(run: RunFolder, role: str) -> None:
    """End a process of the run by SIGKILL."""
    psutil.Process(json.loads((run.processes / f"{role}.json").read_bytes())["pid"]).kill()


def check_page(page: browser.Page, host: str) -> None:
    assert page.problems == []
    assert all(url.startswith((host, "data:")) for url in page.requested), page.requested
    assert page.evaluate(UNNAMED) == 0, "every control and picture has a name for screen readers"


def test_the_page_follows_a_run_and_ends_with_its_figures(cli: Cli, tmp_path: Path) -> None:
    job = cli.job("face", algorithm={"steps": 5})
    launched = cli.start("launch", job, "--yes")
    cli.wait("face", lambda status: status["step"] >= 1, 120)
    with dashboard(cli, "face") as address, browser.page() as page:
        page.open(address)
        page.wait("!!document.querySelector('.tile')", PATIENCE * 5)
        assert page.evaluate(PAINTED) < PATIENCE * 1000
        assert "key=" not in page.evaluate("location.href"), "the key does not stay in the address"
        step = cli.wait("face", lambda status: status["step"] >= 2, 120)["step"]
        page.wait(f"parseInt({TILES}['Step']) >= {step}", PATIENCE * 2)
        launched.communicate(timeout=PATIENCE * 120)
        page.wait("document.querySelector('.state').innerText == 'done'", PATIENCE * 2)
        check_page(page, address.partition("/runs")[0])
        check_figures(cli, page.evaluate(TILES), page.text())
        page.wait("document.body.innerText.includes('as in the job file')", PATIENCE * 20)
        page.evaluate("document.querySelector('summary').click()")
        assert page.evaluate("document.querySelectorAll('details tbody tr').length") == len(
            cli.json("cost", "face")["machines"]
        )
        page.picture(tmp_path / "page.png", 1440, 1400)
        page.picture(tmp_path / "narrow.png", 390, 1400, is_dark=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "a phone scrolls down only"
    frozen_report(cli, tmp_path)


def check_figures(cli: Cli, tiles: dict[str, str], text: str) -> None:
    status, cost = cli.json("status", "face"), cli.json("cost", "face")
    assert tiles["Step"] == f"{status['step']} / {status['steps']}"
    assert tiles["Spent"] == f"${cost['total_usd']:.2f}"
    assert tiles["Responses"] == f"{status['responses']['finished']:,}"
    assert tiles["Tokens"] == f"{status['tokens']['trained']:,}"
    assert float(tiles["Mean reward"]) == pytest.approx(status["reward_mean"], rel=0.01)
    assert f"policy version {status['policy_version']}" in text


def frozen_report(cli: Cli, tmp_path: Path) -> None:
    """With the server gone: a file that says the same, and shows hostile text as text."""
    run = cli.run_folder("face")
    with run.samples.open("a") as file:
        file.write(
            json.dumps({"step": 4, "prompt": HOSTILE, "response": HOSTILE, "reward": 0, "tokens": 1}) + "\n"
        )
    path = tmp_path / "face.html"
    cli("report", "face", "-o", path)
    with browser.page() as page:
        page.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        page.open(f"file://{path}")
        page.wait("!!document.querySelector('.tile')", PATIENCE * 5)
        check_page(page, "file://")
        check_figures(cli, page.evaluate(TILES), page.text())
        assert HOSTILE in page.text()
        assert page.evaluate("document.title").startswith("face: done")
        page.evaluate("document.querySelector('input[type=search]').focus()")
        page.call("Input.insertText", text="no such text")
        page.wait("document.body.innerText.includes('0 found')", PATIENCE * 2)
    long_report(path)


def long_report(path: Path) -> None:
    """Open 500 steps, 200 machines and 600 samples, made up from the rows of the report."""
    found = re.search(r'id="data">(.*?)</script>', path.read_text())
    assert found is not None
    data = json.loads(found[1])
    values, steps, machine = data["metrics"]["values"], data["cost"]["steps"], data["cost"]["machines"][-1]
    data["metrics"]["steps"] = list(range(1, 501))
    data["metrics"]["values"] = {
        name: [n % 7 + (row[0] or 0) for n in range(500)] for name, row in values.items()
    }
    data["cost"]["steps"] = [steps[0] | {"step": n} for n in range(500)]
    data["cost"]["machines"] = [machine | {"id": f"spot-{n}"} for n in range(200)]
    data["samples"] = [data["samples"][0] | {"step": n} for n in range(600)]
    long = path.read_text().replace(found[1], json.dumps(data).replace("<", "\\u003c"))
    path.write_text(long)
    with browser.page() as page:
        page.open(f"file://{path}")
        assert page.wait("!!document.querySelector('.tile')", 3 * PATIENCE) < 3 * PATIENCE
        assert page.problems == []
        page.call("HeapProfiler.collectGarbage")
        assert page.call("Runtime.getHeapUsage")["usedSize"] < 100e6
