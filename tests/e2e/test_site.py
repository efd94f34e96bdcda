"""The site of the docs, built as `make docs` does and opened from a disk: search, no request elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import browser
from tests.e2e.e2e_rig import PATIENCE

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)"


def test_the_site_opens_from_a_disk_and_its_search_works_without_a_network(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "-q", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=60 * PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, ""), "no page is left out, no link is broken"
    with browser.page() as page:
        page.open(f"file://{tmp_path}/docs/python-api.html")
        page.wait("document.body?.innerText.includes('StillOpen')", 10 * PATIENCE)
        assert "its checkpoints stay" in page.text(), "docstrings are on the page"
        page.wait("document.readyState === 'complete'", 20 * PATIENCE)  # what is typed before is lost
        page.evaluate("document.querySelector('.md-search__input').focus()")
        page.type("staleness")
        page.wait(f"{FOUND}.length > 2", 20 * PATIENCE)
        assert any("metrics.html" in link for link in page.evaluate(FOUND))
        assert all(url.startswith(("file://", "data:", "blob:", "about:")) for url in page.requested)
        assert page.problems == []
