"""The local spot market at work: `python -m rlboost_providers.local.market RUN_FOLDER` takes machines away.

It is the cloud, so it knows nothing of the run's other processes and goes on when they are dead: when a
machine's time is up it is killed by SIGKILL, every process of it, or warned first and killed after its
warning time whatever it does. Warnings alternate between the two ways in which clouds warn: the 1st, 3rd, ...
is a SIGTERM to the agents, the 2nd, 4th, ... a file in the machine's folder. What it does it appends to
`cloud/market.jsonl`. All its state lies in the machines' records: killed and started again it goes on.

"""

from __future__ import annotations

import argparse
import logging
import math
import time
from pathlib import Path

from rlboost_providers.local.machines import LocalMachine, LocalMachines
from rlboost_providers.local.provider import Zone, zones_of
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.logs import event, explain, setup
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.resolved import read_resolved

log = logging.getLogger(__name__)

EX_CONFIG = 78  # sysexits.h: a restart would not help

_LOOK_S = 0.25  # at most so long between two looks at the machines: new ones are launched by other processes


class SpotMarket:
    """Carries out the reclaims that are due."""

    def __init__(self, run: RunFolder, zones: dict[str, Zone]) -> None:
        self._machines = LocalMachines(run)
        self._zones = zones

    def act(self) -> float:
        """Do everything that is due now; return when something is due next (epoch seconds; may be inf)."""
        with self._machines.locked():
            records = self._machines.all()
            for record in records:
                if _due_at(record) <= time.time():
                    self._reclaim(record, self._machines.all())
            return min((_due_at(record) for record in self._machines.all()), default=math.inf)

    def _reclaim(self, record: LocalMachine, records: list[LocalMachine]) -> None:
        if record.reclaim is None:
            if not self._machines.lives(record.machine):
                self._machines.end(record, "gone")
                return
            record = self._begin(record, records)
        if record.reclaim is not None and record.reclaim.kill_at <= time.time():
            self._machines.finish_reclaim(record)
            event(log, "machine.reclaimed", machine=record.machine)

    def _begin(self, record: LocalMachine, records: list[LocalMachine]) -> LocalMachine:
        """Decide whether this reclaim is announced, record that, and announce it."""
        plan = self._zones[record.zone].plan
        assert plan is not None  # only a market's machines have a time
        earlier = [r.reclaim for r in records if r.zone == record.zone and r.reclaim is not None]
        earlier = [reclaim for reclaim in earlier if reclaim.by == "market"]
        number = len(earlier) + 1
        notice_s = plan.notice_s(number) if record.reclaim_notice_s is None else record.reclaim_notice_s
        record = self._machines.begin_reclaim(record, "market", notice_s or None, number=number)
        if notice_s:
            num_announced = sum(reclaim.notice_s is not None for reclaim in earlier) + 1
            self._machines.warn(record, by_signal=num_announced % 2 == 1)
            event(log, "machine.noticed", machine=record.machine, seconds=notice_s)
        return record


def _due_at(record: LocalMachine) -> float:
    if record.ended_at is not None or record.launched_at is None:
        return math.inf
    if record.reclaim is not None:
        return record.reclaim.kill_at
    return math.inf if record.reclaim_at is None else record.reclaim_at


def serve(run: RunFolder, zones: dict[str, Zone]) -> None:
    """Run the market until the run has ended and nothing is left to take away."""
    market = SpotMarket(run, zones)
    event(log, "market.opened", zones=sorted(zones))
    while True:
        due_at = market.act()
        if math.isinf(due_at) and run.outcome.exists():
            return
        time.sleep(max(0.0, min(_LOOK_S, due_at - time.time())))


def main() -> int:
    """Open the market of RUN_FOLDER; return the exit code."""
    parser = argparse.ArgumentParser(prog="rlboost_providers.local.market", description=main.__doc__)
    parser.add_argument("run_folder", type=Path)
    run = RunFolder(parser.parse_args().run_folder.absolute())
    setup("market")
    try:
        spot = read_resolved(run.job_json).rollout.spot
        zones = zones_of(spot.local_offers, spot.max_instances, run.files)
    except RLBoostError as error:
        explain(log, error)
        return EX_CONFIG
    serve(run, zones)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
