"""docs/python.md, cell by cell in a real Jupyter kernel: `import rlboost` from launch to down."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.e2e import browser
from tests.e2e.e2e_rig import PATIENCE, Cli
from tests.e2e.test_dashboard import check_page, dashboard

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
CELLS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
COMPARE = "document.querySelector('a[href=\"/compare\"]')"
CELL_S = 120.0 * PATIENCE


@pytest.fixture
def kernel(cli: Cli, tmp_path: Path) -> Iterator[Any]:
    """A client of a kernel whose working directory is empty."""
    folder = tmp_path / "notebook"
    folder.mkdir()
    manager = KernelManager()
    manager.start_kernel(env=cli.environment, cwd=str(folder))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60 * PATIENCE)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(client: Any, code: str) -> tuple[str, list[tuple[str, str]]]:
    """Return what a cell printed, and what it displayed: kind of message and HTML. Fails on an error."""
    printed, shown, deadline = "", [], time.monotonic() + CELL_S
    asked = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        assert kind != "error", "\n".join(content["traceback"])
        if kind == "stream" and content["name"] == "stdout":
            printed += content["text"]
        elif "data" in content:
            shown.append((kind, content["data"].get("text/html", "")))
        elif kind == "status" and content["execution_state"] == "idle":
            return printed, shown


def test_the_page_on_python_runs_as_written_in_a_notebook(cli: Cli, kernel: Any) -> None:
    launch, follow, tables, bill, fork, failure = CELLS
    run_cell(kernel, launch)
    printed, shown = run_cell(kernel, follow)
    assert printed.splitlines()[-1] == "done"
    assert shown[0][0] == "display_data"
    assert len(shown) > 2, "the view was painted once and then updated"
    assert {kind for kind, _ in shown[1:]} == {"update_display_data"}
    assert "from-python" in shown[-1][1]
    status, cost = cli.json("status", "from-python"), cli.json("cost", "from-python")
    printed, _ = run_cell(kernel, tables)
    assert printed.startswith(f"step 3 of 3, mean reward {status['reward_mean']:.3f}\n")
    assert "reward_mean  length_mean" in printed
    printed, _ = run_cell(kernel, bill)
    assert printed.startswith(f"${cost['total_usd']:.2f} for {cost['tokens_trained']:,} tokens\n")
    printed, _ = run_cell(kernel, fork)
    assert printed == "done ['from-python@2']\n"
    check_fork(cli)
    printed, _ = run_cell(kernel, failure)
    assert "did you mean from-python?" in printed
    _, shown = run_cell(kernel, "run")
    assert "3/3" in shown[0][1]
    cli.assert_gone("from-python")


def check_fork(cli: Cli) -> None:
    """It trained step 3 alone, from the parent's weights, and only that is on its bill."""
    assert cli.json("status", "larger-groups")["step"] == 3
    assert [row["step"] for row in cli.json("cost", "larger-groups")["steps"]] == [2]
    parent, fork = cli.json("metrics", "from-python"), cli.json("metrics", "larger-groups")
    assert fork["steps"] == [1, 2, 3]
    rewards = [found["metrics"]["reward_mean"]["values"] for found in (parent, fork)]
    assert rewards[0][:2] == rewards[1][:2], "the curve goes on from the parent's"
    found = cli.json("compare", "from-python", "larger-groups")
    assert found["changed"] == {"algorithm.group_size": {"from-python": 4, "larger-groups": 8}}
    assert [column["ancestors"] for column in found["runs"]] == [[], ["from-python@2"]]
    assert "forked from | from-python@2" in cli("report", "larger-groups", "--md").stdout
    with dashboard(cli) as address, browser.page() as page:
        page.open(address)
        page.wait(f"!!{COMPARE}", PATIENCE * 5)
        page.evaluate(f"{COMPARE}.click()")
        page.wait("document.querySelectorAll('input[type=checkbox]').length == 2", PATIENCE * 5)
        page.evaluate("document.querySelectorAll('input[type=checkbox]').forEach(each => each.click())")
        page.wait(
            "document.body.innerText.includes('larger-groups continues from from-python@2')", PATIENCE * 5
        )
        check_page(page, address.partition("/?")[0])
        assert "algorithm.group_size" in page.text()
        assert len(page.evaluate("[...document.querySelectorAll('canvas')].map(each => each.width)")) == 1
        page.picture(cli.home / "compare.png", 1300, 1000)
    cli.assert_gone("larger-groups")
