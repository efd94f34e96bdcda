"""Captures docs/screens/*.svg: the real program, typed into a real shell on a real pseudo-terminal.

`make screens` runs it; it takes a few minutes, since a run is trained while its machines are killed. Nothing
is staged: the run is examples/quickstart.yaml with fewer steps and machines that live a little longer, and a
picture is taken once the screen shows what it is about. A machine with nothing else to do gives better ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
SCREENS = ROOT / "docs" / "screens"
STEPS = 14
WIDTH, HEIGHT = 80, 24
_FONTS = "'DejaVu Sans Mono', 'Menlo', 'Consolas', monospace"
_COLOURS = {"brown": "yellow"}  # pyte's names that rich calls otherwise


class Terminal:
    """A shell on a pseudo-terminal of its own, and what its screen shows."""

    def __init__(
        self, environment: dict[str, str], folder: Path, width: int = WIDTH, height: int = HEIGHT
    ) -> None:
        self.screen = pyte.Screen(width, height)
        self.sent = 0
        """Bytes that the programs have written so far."""
        self._stream = pyte.ByteStream(self.screen)
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)  # noqa: S606, S607
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._fd, text.encode())

    def text(self) -> str:
        """Return what the screen shows."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def wait(self, ready: Callable[[str], object], timeout_s: float) -> str:
        """Read until `ready(text of the screen)`; return that text. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while not ready(self.text()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not seen within {timeout_s:g} s; the screen shows:\n{self.text()}")
            self.read(0.2)
        return self.text()

    def read(self, for_s: float) -> None:
        """Take in what is written within `for_s` seconds, at most until nothing more comes at once."""
        if select.select([self._fd], [], [], for_s)[0]:
            with contextlib.suppress(OSError):  # the shell is gone
                data = os.read(self._fd, 65536)
                self.sent += len(data)
                self._stream.feed(data)

    def resize(self, height: int) -> None:
        """Give the terminal so many lines."""
        self.screen.resize(lines=height)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, self.screen.columns, 0, 0))

    def close(self) -> None:
        """End the shell and what runs in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGHUP)
        os.close(self._fd)
        os.waitpid(self._pid, 0)

    def svg(self, title: str, name: str) -> str:
        """Return a picture of the screen."""
        lines = [self._line(row) for row in range(self.screen.lines)]
        while lines and not lines[-1].plain.strip():
            lines.pop()
        console = Console(record=True, width=self.screen.columns, file=io.StringIO(), force_terminal=True)
        for line in lines:
            console.print(line, no_wrap=True, overflow="crop", highlight=False)
        picture = console.export_svg(title=title, unique_id=f"screen-{name}")
        picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)  # no fonts from elsewhere
        for theirs, ours in (("Fira Code, monospace", _FONTS), ("arial", "sans-serif")):
            picture = picture.replace(f"font-family: {theirs}", f"font-family: {ours}")
        return picture

    def _line(self, row: int) -> Text:
        text = Text()
        for column in range(self.screen.columns):
            sign = self.screen.buffer[row][column]
            colour = None if sign.fg == "default" else _COLOURS.get(sign.fg, sign.fg)
            if colour is not None and re.fullmatch(r"[0-9a-f]{6}", colour):
                colour = f"#{colour}"
            text.append(sign.data, Style(color=colour, bold=sign.bold, underline=sign.underscore))
        text.rstrip()
        return text


@contextlib.contextmanager
def newcomer() -> Iterator[tuple[Terminal, Path]]:
    """Yield a terminal of somebody who has just installed rlboost, and their folder of jobs."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        jobs = home / "jobs"
        jobs.mkdir()
        environment = {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "PS1": "$ ",
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "BASH_SILENCE_DEPRECATION_WARNING": "1",
        }
        terminal = Terminal(environment, jobs)
        try:
            terminal.wait(lambda text: text.endswith("$"), 10)
            yield terminal, jobs
        finally:
            terminal.close()
            end_runs(environment)


def end_runs(environment: dict[str, str]) -> None:
    """End whatever a picture that did not come about has left running."""
    for run in Path(environment["HOME"]).glob(".rlboost/runs/*"):
        if not (run / "outcome.json").exists():
            down = ["rlboost", "down", run.name, "--yes"]
            subprocess.run(down, env=environment, check=True, stdin=subprocess.DEVNULL, timeout=120)


def quickstart(folder: Path, **changes: str) -> None:
    """Write quickstart.yaml with fewer steps."""
    text = (ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8")
    shorter = {"steps: 30": f"steps: {STEPS}", "mean_lifetime_s: 50": "mean_lifetime_s: 60"}
    for old, new in {**shorter, **changes}.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "quickstart.yaml").write_text(text, encoding="utf-8")


def run_screens(terminal: Terminal, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, title) whenever the screen of a run shows what it is to show."""
    quickstart(folder)
    terminal.type("rlboost launch quickstart.yaml\n")
    terminal.wait(lambda text: "warming up" in text and "reward" in text and "joined" in text, 300)
    settle(terminal)
    yield "provisioning", "rlboost launch quickstart.yaml"
    terminal.wait(survived, 900)
    yield "preemption", "rlboost launch quickstart.yaml"
    terminal.type("\x03")
    terminal.wait(lambda text: "stops it" in text and text.endswith("$"), 20)
    yield "detached", "Ctrl-C"
    command(terminal, "rlboost launch quickstart", "rlboost cost quickstart", 900)
    yield "end", "rlboost launch quickstart"
    terminal.resize(2 * HEIGHT)
    command(terminal, "rlboost cost quickstart", "note:", 30)
    yield "cost", "rlboost cost quickstart"


def survived(text: str) -> bool:
    """Whether a live view shows a migration; early in the run also a fleet at work and rewards."""
    step = re.search(r"^step +(\d+)/", text, re.MULTILINE)
    num_serving = len(re.findall(r"^(?:spot|reserved)\S+ .*\bready\b", text, re.MULTILINE))
    has_rewards = re.search(r"^reward .*\S{2}$", text, re.MULTILINE) is not None
    is_good = num_serving >= 2 and has_rewards
    return "migrated to" in text and step is not None and (is_good or int(step[1]) >= STEPS // 2)


def error_screens(terminal: Terminal, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, title) for three mistakes that everybody makes once."""
    quickstart(folder, **{"group_size: 8": "group_sise: 8", "max_instances: 2": "max_instances: two"})
    command(terminal, "rlboost launch quickstart.yaml", "did you mean", 30)
    yield "error-job-file", "a typing mistake in the job file"

    quickstart(
        folder,
        **{"name: quickstart": "name: own-reward", "reward: reasoning_gym": "reward: rewards.py:score"},
    )
    (folder / "rewards.py").write_text(
        "def score(prompt, response, row):\n    return float(response == row['anwser'])\n"
    )
    command(terminal, "rlboost launch quickstart.yaml", "hint:", 400)
    yield "error-reward", "a reward function that raises"

    quickstart(folder)
    command(terminal, "rlboost launch quickstart.yaml --detach", "stops it", 120)
    quickstart(folder, **{"learning_rate: 5.0e-4": "learning_rate: 1.0e-4"})
    command(terminal, "rlboost launch quickstart.yaml", "hint:", 30)
    yield "error-other-job", "another job under the name of an open run"
    terminal.type("rlboost down quickstart --yes\n")
    terminal.wait(lambda text: "nothing of quickstart is still" in text and text.endswith("$"), 120)


def settle(terminal: Terminal) -> None:
    """Let the screen go on for a moment, so that it is not taken right at a change."""
    until = time.monotonic() + 3
    while time.monotonic() < until:
        terminal.read(0.2)


def command(terminal: Terminal, line: str, answer: str, timeout_s: float) -> None:
    """Type a command at the top of the screen and wait until it has answered and ended."""
    terminal.type("clear\n")
    terminal.wait(lambda text: text == "$", 10)
    terminal.type(f"{line}\n")
    terminal.wait(lambda text: answer in text and text.endswith("$"), timeout_s)


def main() -> int:
    """Write all pictures; return the exit code."""
    if shutil.which("bash") is None:
        print("bash is needed: the screens are typed into a real shell", file=sys.stderr)
        return 1
    SCREENS.mkdir(exist_ok=True)
    for part in (run_screens, error_screens):
        with newcomer() as (terminal, folder):
            for name, title in part(terminal, folder):
                (SCREENS / f"{name}.svg").write_text(terminal.svg(title, name), encoding="utf-8")
                print(f"docs/screens/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
