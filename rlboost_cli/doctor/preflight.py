"""The part of `rlboost doctor` that `launch` does before anything is bought or started.

A second or two: the data is read, the reward scores one row, engine, secrets and the tracker's key are looked
for, and the hub is asked for the model's name. Nothing that imports torch, asks a cloud or starts a machine.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rlboost_cli.doctor import head, model
from rlboost_cli.doctor.findings import DoctorContext, Finding, Verdict, fail, failed, ok, warn
from rlboost_runtime.errors import ConfigError, RLBoostError
from rlboost_runtime.job import PromptFile, data_sources
from rlboost_runtime.run.engine_python import find_engine_python
from rlboost_runtime.trainer.tracking import require_packages

_BUCKET = "my-bucket/"
_WANDB_HOST = "api.wandb.ai"


def require_launchable(context: DoctorContext, say: Callable[[str], None]) -> None:
    """Make the cheap checks; say what is doubtful. Raises `ConfigError` with all that failed."""
    failures = []
    for finding in _findings(context):
        if finding.verdict is Verdict.FAIL:
            failures.append(finding)
        elif finding.verdict is Verdict.WARN:
            say(f"note: {finding.check}: {finding.found}; {finding.remedy}")
    if not failures:
        return
    error = ConfigError(
        "; ".join(f"{each.check}: {each.found}" for each in failures),
        f"{'; '.join(each.remedy for each in failures)}; nothing was started (--no-doctor skips the checks)",
    )
    error.exit_code = min(each.exit_code for each in failures)
    raise error


def _findings(context: DoctorContext) -> Iterator[Finding]:
    job = context.wanted
    is_here = not job.trainer.is_elsewhere
    yield from head.secrets(context)
    yield from engine(context)
    yield from tracker(context)
    yield from output(context)
    yield from model.resolves(context)
    are_files = all(isinstance(source, PromptFile) for source in data_sources(job.data))
    if is_here or (importlib.util.find_spec("aiohttp") is not None and are_files):
        from rlboost_cli.doctor import job as of_job

        if is_here:  # elsewhere it may need packages and hosts that only the head has
            yield from of_job.reward(context)
            yield from of_job.sandbox(context)
        else:
            yield from of_job.data(context)


def engine(context: DoctorContext) -> Iterator[Finding]:
    """Look for vLLM's Python where engines run on this machine."""
    job = context.wanted
    engines = job.trainer.local_engines + job.rollout.most_spot_engines(here=True)
    if job.rollout.engine != "vllm" or job.trainer.is_elsewhere or not engines:
        return
    try:
        found = find_engine_python(job.rollout.engine_args.python)
    except RLBoostError as error:
        yield failed("engine", error)
    else:
        yield ok("engine", f"vLLM {found.version} in {found.path}")


def tracker(context: DoctorContext) -> Iterator[Finding]:
    """Look for the packages that `tracking` needs, and for the key of Weights & Biases."""
    job = context.wanted
    wanted = job.tracking.wandb
    if not job.trainer.is_elsewhere:  # a head elsewhere installs them
        try:
            require_packages(job)
        except ConfigError as error:
            yield failed("tracker", error)
            return
    if job.tracking.tensorboard:
        yield ok("tracker", "TensorBoard is installed")
    if wanted is None:
        return
    if wanted.offline or os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        yield ok("tracker", "offline: kept in the run's folder")
    elif job.trainer.is_elsewhere and "WANDB_API_KEY" not in {*job.secrets, *job.env}:
        yield warn("tracker", "the head has no W&B key", "write secrets: [WANDB_API_KEY]")
    elif not job.trainer.is_elsewhere and not _has_key():
        remedy = "set WANDB_API_KEY, type `wandb login`, or write tracking.wandb.offline: true"
        yield fail("tracker", "this machine has no W&B key", remedy)
    else:
        yield ok("tracker", "W&B has a key")


def output(context: DoctorContext) -> Iterator[Finding]:
    """Look for the bucket that the templates name, which is nobody's."""
    job = context.wanted
    fields = {"output": job.output, "weights.bucket": job.weights.bucket}
    left = [name for name, url in fields.items() if url and url.partition("://")[2].startswith(_BUCKET)]
    if left:
        named = f"{' and '.join(left)} still {'name' if left[1:] else 'names'} the template's my-bucket"
        yield fail("bucket", named, "write the name of a bucket of your own")


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        places = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return bool({_WANDB_HOST, os.environ.get("WANDB_BASE_URL", "").partition("//")[2]} & places.keys())
