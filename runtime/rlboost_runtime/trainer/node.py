"""`python -m rlboost_runtime.trainer.node HOST:PORT RUN NUMBER NODES RANKS`: be a further node of a trainer.

HOST:PORT is the job's `trainer.node_address`, NUMBER counts from 1 (the head is 0). A node needs RLBoost and
nothing of the run: job, model and weights come from the head. Where the head's trainer dies, or its machine
vanishes without a word, this one waits for the next; it ends, with exit code 0, when the run does. Traffic
between nodes is neither authenticated nor encrypted: use a network that nobody else is on.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from rlboost_runtime import logs
from rlboost_runtime.logs import event
from rlboost_runtime.trainer.launch import Place, die_with_launcher, is_rank, run_ranks

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Between two attempts: the head's trainer needs longer to come back."""
LOOK_EVERY_S = 20.0
"""Between two looks at whether the head's machine is there."""
LOOK_S = 10.0
"""Longest wait for its answer."""
MOST_MISSED = 6
"""Looks without an answer, in a row, after which it is taken for gone."""
_MODULE = "rlboost_runtime.trainer.node"


def main(arguments: list[str]) -> int:
    """Be a node, or one of its ranks; return the exit code."""
    if is_rank():
        return _be_rank()
    try:
        address, run, *numbers = arguments
        number, nodes, ranks = map(int, numbers)
    except ValueError:
        print(f"usage: python -m {_MODULE} HOST:PORT RUN NUMBER NODES RANKS", file=sys.stderr)
        return 2
    logs.setup(f"trainer-node-{number}")
    place = Place(ranks, nodes, number, address)
    while _take_part(run, place):
        event(log, "node.head_lost", level=logging.WARNING, address=address)
        time.sleep(PAUSE_S)
    return 0


def _take_part(run: str, place: Place) -> bool:
    """Whether the run goes on without this node's ranks having been told of its end."""
    from torch.distributed import DistError

    try:
        return run_ranks(run, ["-m", _MODULE], place, ()) != 0
    except DistError as error:  # nobody was there for as long as nodes wait for one another
        event(log, "node.head_absent", level=logging.WARNING, problem=str(error).partition("\n")[0])
        return True


def _be_rank() -> int:
    from rlboost_runtime.trainer.following import be_led  # torch and transformers: only ranks need them
    from rlboost_runtime.trainer.ranks import Ranks

    die_with_launcher()
    ranks = Ranks.join()
    logs.setup(f"trainer-{ranks.rank}")
    head = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    threading.Thread(target=end_without, args=(head,), name="head-watch", daemon=True).start()
    be_led(ranks)
    ranks.leave()
    return 0


def end_without(
    head: tuple[str, int],
    *,
    look_every_s: float = LOOK_EVERY_S,
    look_s: float = LOOK_S,
    end: Callable[[int], object] = os._exit,
) -> None:
    """Call `end(1)` once `head` (host, port) has not answered `MOST_MISSED` times in a row.

    A machine that loses its power closes no connection, and a rank hears nothing while a step is rolled out.
    """
    missed = 0
    while missed < MOST_MISSED:
        time.sleep(look_every_s)
        try:
            socket.create_connection(head, timeout=look_s).close()
        except OSError as error:
            missed += 1
            event(log, "node.head_silent", level=logging.WARNING, times=missed, problem=str(error))
        else:
            missed = 0
    end(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
