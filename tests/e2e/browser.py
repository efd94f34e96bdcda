"""Headless Chromium, driven over its DevTools protocol: what a page shows, logs and requests."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = "chromium"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-port=0", "--remote-allow-origins=*"),
)
START_S = 60.0


class Page:
    """One page: `problems` are its console errors, exceptions and refused requests; `requested` all URLs."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._num_calls = 0
        self.problems: list[str] = []
        self.requested: list[str] = []
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; what happened meanwhile is noted."""
        self._num_calls += 1
        self._connection.send(json.dumps({"id": self._num_calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=START_S))
            if message.get("id") == self._num_calls:
                assert "error" not in message, message
                return message["result"]
            self._note(message["method"], message["params"])

    def open(self, url: str) -> None:
        """Go to a URL; returns before it is loaded."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def run(self, expression: str) -> Any:
        """Return the JSON value that a promise comes to."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def show(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Give the page a size and a theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        time.sleep(0.3)  # charts are drawn anew

    def press(self, key: str) -> None:
        """Press a key, such as Tab or Enter."""
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13}[key]
            self.call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )  # fmt: skip

    def type(self, text: str) -> None:
        """Type into the focused field, key by key: some pages listen to keys alone."""
        for letter in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=letter, text=letter)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=letter)

    def wait(self, expression: str, timeout_s: float) -> float:
        """Wait until the expression is true; return the seconds that it took."""
        started = time.monotonic()
        while not self.evaluate(expression):
            assert time.monotonic() - started < timeout_s, f"not true: {expression}\n{self.problems}"
            time.sleep(0.05)
        return time.monotonic() - started

    def text(self) -> str:
        """Return what a reader sees."""
        return str(self.evaluate("document.body.innerText"))

    def picture(self, path: Path, width: int, height: int, *, is_dark: bool = False) -> None:
        """Write a PNG of the page's first `height` pixels."""
        self.show(width, height, is_dark=is_dark)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.problems.append(parameters["entry"]["text"])


@contextmanager
def page() -> Iterator[Page]:
    """Start a browser of its own; it ends with the block. Needs Debian's package chromium."""
    assert shutil.which(PROGRAM), "chromium is not installed: make chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_debugger(Path(folder)), max_size=None) as connection:
                yield Page(connection)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _debugger(folder: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            port = (folder / "DevToolsActivePort").read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                found = [each for each in json.load(answer) if each["type"] == "page"]
            if found:
                return str(found[0]["webSocketDebuggerUrl"])
        except (OSError, IndexError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"chromium did not start in {START_S} s")
