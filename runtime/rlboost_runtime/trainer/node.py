"""`python -m rlboost_runtime.trainer.node HOST:PORT RUN NUMBER NODES RANKS`: be a further node of a trainer.

HOST:PORT is the job's `trainer.node_address`, NUMBER counts from 1 (the head is 0). A node needs RLBoost and
nothing of the run: job, model and weights come from the head. Where the head's trainer dies this one waits
for the next; it ends, with exit code 0, when the run does. Traffic between nodes is neither authenticated
nor encrypted: use a network that nobody else is on.
"""

from __future__ import annotations

import logging
import sys
import time

from rlboost_runtime import logs
from rlboost_runtime.logs import event
from rlboost_runtime.trainer.launch import Place, die_with_launcher, is_rank, run_ranks

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Between two attempts: the head's trainer needs longer to come back."""
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
    while run_ranks(run, ["-m", _MODULE], Place(ranks, nodes, number, address), ()):
        event(log, "node.head_lost", level=logging.WARNING, address=address)
        time.sleep(PAUSE_S)
    return 0


def _be_rank() -> int:
    from rlboost_runtime.trainer.following import be_led  # torch and transformers: only ranks need them
    from rlboost_runtime.trainer.ranks import Ranks

    die_with_launcher()
    ranks = Ranks.join()
    logs.setup(f"trainer-{ranks.rank}")
    be_led(ranks)
    ranks.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
