"""Measure one GRPO step on the same batch: our trainer against TRL's `GRPOTrainer`, generation excluded.

Both do forward, backward, clip and AdamW in float32 with one thread, on the same model and the same 32
responses, each in a process of its own; pairs are interleaved. TRL gets the number of rows per forward pass
with which it is fastest here; we get as many tokens per pass as those rows have with their padding, so that
nobody has more memory for activations. What counts is the ratio of CPU seconds within a pair, since the
machine may be shared. Both sides' losses and gradient norms must agree, else the comparison is void.

    python -m benchmarks.trainer [--pairs 9]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

import torch
import transformers

from benchmarks.trainer.sides import GROUP_SIZE, GROUPS, make_batch

TARGET = 1.0
ROWS = (4, 8, 16, 32)
"""What TRL may choose from."""
GOODBYE_S = 60.0
AGREEMENT = 1e-3


class Side:
    """A process that does steps on demand."""

    def __init__(self, side: str, size: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.trainer.sides", side, str(size)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._process.communicate(timeout=GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def step(self) -> dict[str, float]:
        """Do one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:  # JSON values
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended with {self._process.wait()}; run it alone to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def fastest_rows() -> tuple[int, dict[str, float]]:
    """Return the rows per pass with which TRL is fastest, and CPU seconds of each choice."""
    seconds = {}
    for rows in ROWS:
        with Side("trl", rows) as side:
            side.step()
            seconds[rows] = min(side.step()["cpu_s"] for _ in range(2))
        progress(f"TRL with {rows} rows per pass: {seconds[rows]:.2f} CPU s")
    best = min(seconds, key=lambda rows: seconds[rows])
    return best, {str(rows): round(each, 3) for rows, each in seconds.items()}


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    batch = make_batch()
    rows, choices = fastest_rows()
    width = max(len(s.prompt_ids) for s in batch) + max(len(s.token_ids) for s in batch)
    load = os.getloadavg()[0]
    pairs = []
    with Side("ours", rows * width) as mine, Side("trl", rows) as theirs:
        first = mine.step(), theirs.step()  # warm up, and the same starting point for the check
        for number in range(arguments.pairs):
            ordered = (mine, theirs) if number % 2 == 0 else (theirs, mine)
            found = {side: side.step() for side in ordered}
            pairs.append((found[mine], found[theirs]))
            progress(f"pair {number}: ours {found[mine]['cpu_s']:.2f} s, TRL {found[theirs]['cpu_s']:.2f} s")
    agree = all(abs(first[0][name] / first[1][name] - 1) < AGREEMENT for name in ("loss", "grad_norm"))
    ratios = sorted(theirs["cpu_s"] / mine["cpu_s"] for mine, theirs in pairs)
    value = statistics.median(ratios)
    peak_mine, peak_theirs = (pairs[-1][i]["peak_bytes"] for i in range(2))
    result = {
        "name": "trainer",
        "value": round(value, 3),
        "unit": "x of TRL's speed",
        "target": TARGET,
        "pass": value >= TARGET and agree,
        "detail": {
            "what": "one GRPO step (dapo), forward + backward + clip + AdamW, float32, 1 thread, CPU",
            "ratio_min_max": [round(ratios[0], 3), round(ratios[-1], 3)],
            "ours_cpu_s": round(statistics.median(mine["cpu_s"] for mine, _ in pairs), 3),
            "trl_cpu_s": round(statistics.median(theirs["cpu_s"] for _, theirs in pairs), 3),
            "ours_peak_mib": round(peak_mine / 2**20),
            "trl_peak_mib": round(peak_theirs / 2**20),
            "gradients_agree": agree,
            "first_step": {"ours": first[0], "trl": first[1]},
            "responses": GROUPS * GROUP_SIZE,
            "tokens": sum(len(s.prompt_ids) + len(s.token_ids) for s in batch),
            "tokens_padded": len(batch) * width,
            "trl_rows_per_pass": rows,
            "trl_cpu_s_by_rows": choices,
            "ours_tokens_per_pass": rows * width,
            "pairs": len(pairs),
            "load_at_start": round(load, 1),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
