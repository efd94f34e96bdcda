"""A simulation for a person: how far it is, and how the policies compare."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlboost_cli.simulation.runs import BASELINE, OURS, Comparison, Done, Estimate
from rlboost_cli.terminal import output
from rlboost_cli.terminal.text import counted, usd
from rlboost_runtime.sim import SimResult

_EVERY_S = 2.0  # a line so often where there is no terminal


@contextmanager
def progress(num_runs: int) -> Iterator[Done]:
    """Show how many of `num_runs` simulations are done: a bar on a terminal, else lines now and then."""
    if sys.stderr.isatty():
        with _bar(num_runs) as done:
            yield done
        return
    output.progress(f"simulating {counted(num_runs, 'run')}")
    num_done, last_said = 0, time.monotonic()

    def say(result: SimResult) -> None:
        nonlocal num_done, last_said
        num_done += 1
        if time.monotonic() - last_said >= _EVERY_S:
            last_said = time.monotonic()
            output.progress(f"simulated {num_done} of {num_runs}: {result.policy}, seed {result.seed}")

    yield say


def print_comparison(found: Comparison) -> None:
    """Print a line per policy, and what it rests on."""
    output.table(
        ("policy", "tokens/s", "$/M tokens", "speed", "tokens/$", "steps", "kills", "lost M"),
        [_row(found, policy) for policy in found.results],
    )
    wanted, seeds = found.wanted, found.seeds
    share = "" if wanted.sample == 1 else f", {wanted.sample:.0%} of its nodes"
    end_h = wanted.start_h + found.hours
    output.show(f"\nsimulated, nothing was measured: {wanted.preset.name} on {wanted.whole.name}{share},")
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    output.show(f"hours {wanted.start_h:.2f} to {end_h:.2f}, {which}")
    output.show(textwrap.fill(f"trace: {wanted.trace_source}", 79, subsequent_indent="  "))
    output.show("lost M: million tokens generated again because a machine was lost")
    if BASELINE in found.results:
        output.show(f"speed and tokens/$ are in multiples of {BASELINE}")
    if len(seeds) > 1:
        output.show("± half of the 95 % interval of the mean over seeds (Student's t)")
    for line in _verdict(found):
        output.show(line)


def _row(found: Comparison, policy: str) -> tuple[object, ...]:
    per_usd = found.measure(policy, "tokens_per_usd")
    million = Estimate(1e6 / per_usd.mean, _relative(per_usd, 1e6 / per_usd.mean)) if per_usd.mean else None
    return (
        policy,
        found.measure(policy, "tokens_per_s").text(),
        None if million is None else million.text(2 if million.mean < 100 else 0),
        _multiple(found.ratio("tokens_per_s", policy)),
        _multiple(found.ratio("tokens_per_usd", policy)),
        *(_mean(found.measure(policy, name)) for name in ("steps", "preemptions")),
        f"{found.measure(policy, 'tokens_lost').mean / 1e6:.3f}",
    )


def _relative(of: Estimate, scale: float) -> float | None:
    return None if of.half_width is None else of.half_width / of.mean * scale


def _multiple(ratio: Estimate | None) -> str | None:
    return None if ratio is None else ratio.text(2)


def _mean(found: Estimate) -> str:
    return f"{found.mean:,.0f}" if found.half_width is None else f"{found.mean:,.1f}"


def _verdict(found: Comparison) -> list[str]:
    speed, per_usd = found.ratio("tokens_per_s", OURS), found.ratio("tokens_per_usd", OURS)
    if speed is None or per_usd is None:
        return []
    pays = "spot pays here" if per_usd.mean > 1 else "spot does not pay here"
    lines = ["", f"{OURS}: {speed.text(2)} x the tokens/s, {per_usd.text(2)} x the tokens/$: {pays}"]
    alone = found.on_demand()
    if alone is not None:
        million, hour = usd(alone.usd_per_million_tokens), usd(alone.usd_per_hour)
        lines.append(f"on demand only (simulated): {million} per million tokens at {hour} per hour")
    return lines


@contextmanager
def _bar(num_runs: int) -> Iterator[Done]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("simulating", total=num_runs)
        yield lambda _result: bar.advance(task)
