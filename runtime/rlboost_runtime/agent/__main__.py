"""`python -m rlboost_runtime.agent BOOTSTRAP_FILE INSTANCE`: the agent of one engine of a machine.

The folder of the bootstrap file is the machine's working folder. Exit codes: see `service`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from rlboost_runtime import logs
from rlboost_runtime.agent.bootstrap import read_bootstrap
from rlboost_runtime.agent.notice import watch_sigterm
from rlboost_runtime.agent.service import Agent, ExitCode, system_seams
from rlboost_runtime.errors import ConfigError, GpuMissing

log = logging.getLogger(__name__)


async def _serve(bootstrap_file: Path, instance: str) -> int:
    terminated = asyncio.Event()
    watch_sigterm(terminated)
    bootstrap = read_bootstrap(bootstrap_file)
    folder = bootstrap_file.parent
    agent = Agent(bootstrap, instance, folder, system_seams(bootstrap, instance, folder))
    return await agent.run(terminated)


def main() -> int:
    """Run the agent; returns the exit code."""
    if len(sys.argv) != 3:
        sys.stderr.write("usage: python -m rlboost_runtime.agent BOOTSTRAP_FILE INSTANCE\n")
        return 2
    logs.setup("agent")
    try:
        return asyncio.run(_serve(Path(sys.argv[1]).absolute(), sys.argv[2]))
    except GpuMissing as exc:
        logs.explain(log, exc)
        return ExitCode.GPU_MISSING
    except ConfigError as exc:
        logs.event(log, "agent.unfit", level=logging.ERROR, problem=exc.problem, remedy=exc.remedy)
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
