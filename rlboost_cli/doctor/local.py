"""What `infra: local` needs: everything of the run, its spot machines included, is on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from rlboost_cli.doctor.findings import DoctorContext, Finding, fail, failed, ok, warn
from rlboost_cli.terminal.text import counted
from rlboost_providers.base.provider import LaunchRequest, MachineStatus
from rlboost_providers.local.provider import LocalProvider
from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.fit.memory import USABLE
from rlboost_runtime.fit.plan import fit_plan, fit_plan_here, misfits
from rlboost_runtime.fit.shape import find_shape
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.tree import dotted
from rlboost_runtime.processes import kill_tagged
from rlboost_runtime.run.create import copy_files
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.index import is_open, is_supervised

THREADS_PER_CPU = 4
"""With more threads than this per CPU steps take several times as long: everybody waits for a CPU."""
MACHINE_DEADLINE_S = 20.0
POLL_S = 0.05
STAND_IN = ["sleep", "60"]
"""What runs on the machine that is tried, in an agent's place."""


def cpus(context: DoctorContext) -> Iterator[Finding]:
    """CPUs against the threads that will want them."""
    job = context.wanted
    engines = job.trainer.local_engines + job.rollout.most_spot_engines(here=True)
    yield judge_cpus(
        len(os.sched_getaffinity(0)), job.trainer.threads + engines * job.rollout.engine_args.threads
    )


def judge_cpus(num_cpus: int, threads: int) -> Finding:
    """Judge so many CPUs for trainer and engines with `threads` threads in all."""
    found = f"{num_cpus} for {threads} threads of trainer and engines"
    if threads > THREADS_PER_CPU * num_cpus:
        return warn(
            "cpus",
            found,
            "lower rollout.spot.max_instances or rollout.engine_args.threads: they compete for the CPUs",
        )
    return ok("cpus", found)


def memory(context: DoctorContext) -> Iterator[Finding]:
    """Memory against trainer and engines."""
    job, needs = context.wanted, fit_plan_here(context.wanted)
    if needs is None:
        yield warn("memory", "not estimated: the model is not known", "see model above")
        return
    engines = job.trainer.local_engines + job.rollout.most_spot_engines(here=True)
    found = psutil.virtual_memory()
    yield judge_memory(found.total, found.available, needs.host, needs.engine, engines)


def gpu(context: DoctorContext) -> Iterator[Finding]:
    """The GPU's memory, where there is one: trainer and engines of a local run take turns on it."""
    import torch  # loaded already: the model was looked at with it

    if fit_plan_here(context.wanted) is not None and torch.cuda.is_available():
        yield judge_gpu_memory(context.wanted, torch.cuda.mem_get_info()[1], "gpu")


def judge_gpu_memory(job: Job, total: int, check: str) -> Finding:
    """Judge bytes of memory of one GPU for the trainer of a job whose model's configuration is known."""
    shape = find_shape(job.model)
    assert shape is not None
    words = "; ".join(f"{dotted(path)}: {problem}" for path, problem in misfits(job, shape, total))
    if words:
        return fail(check, words, "change the job accordingly, or use GPUs with more memory")
    plan = fit_plan(job, shape, total)
    return ok(
        check, f"{_gib(plan.gpu_needs)} of {_gib(int(USABLE * total))} computed for the trainer, per GPU"
    )


def judge_memory(total: int, available: int, trainer: int, engine: int, engines: int) -> Finding:
    """Judge bytes of this machine's memory for a trainer and so many engines, of so many bytes each."""
    wanted = trainer + engines * engine
    parts = f"trainer {_gib(trainer)} + {counted(engines, 'engine')} x {_gib(engine)}"
    words = f"about {_gib(wanted)} wanted: {parts}"
    remedy = (
        "lower rollout.spot.max_instances, rollout.engine_args.max_running, trainer.micro_batch_tokens"
        " or algorithm.max_response_tokens, or take a smaller model"
    )
    if wanted > total:
        return fail("memory", f"{words}; there is {_gib(total)}", remedy)
    if wanted > available:
        return warn(
            "memory", f"{words}; {_gib(available)} of {_gib(total)} are free", f"free memory, or {remedy}"
        )
    return ok("memory", f"{_gib(available)} free, {words}")


def disk(context: DoctorContext) -> Iterator[Finding]:
    """Disk against checkpoints and weight versions."""
    needs = fit_plan_here(context.wanted)
    if needs is None:
        yield warn("disk", "not estimated: the model is not known", "see model above")
        return
    place = next(folder for folder in (context.home, *context.home.parents) if folder.exists())
    yield judge_disk(shutil.disk_usage(place).free, needs.disk, str(context.home))


def judge_disk(free: int, wanted: int, place: str) -> Finding:
    """Judge free bytes in `place`."""
    words = f"{_gib(free)} free in {place}, about {_gib(wanted)} wanted"
    if free < wanted:
        return fail(
            "disk",
            words,
            "free disk space, set RLBOOST_HOME to a larger disk, or lower trainer.keep_checkpoints and"
            " rollout.spot.max_instances",
        )
    return ok("disk", words)


def ports(context: DoctorContext) -> Iterator[Finding]:
    """Check that the ports of this job's open run are still its own; a new run takes free ones."""
    job = context.wanted
    run = RunFolder.named(job.name)
    if not run.job_json.exists() or not is_open(run):
        yield judge_free_port(_free_port())
        return
    if is_supervised(run):
        yield ok("ports", f"run {run.name} is running on its own ports")
        return
    known = {"coordinator": _port(run.endpoint), "weight server": _port(run.weights_endpoint)}
    taken = [f"{port} ({name})" for name, port in known.items() if port is not None and not _can_bind(port)]
    if taken:
        yield fail(
            "ports",
            f"run {run.name} is not running and another program took its port {', '.join(taken)}",
            f"end that program (ss -ltnp shows it) and launch {run.name} again; or rlboost down {run.name}",
        )
    else:
        yield ok("ports", f"the ports of run {run.name} are free")


def judge_free_port(port: int | None) -> Finding:
    """Judge what the system gave when asked for a free port."""
    if port is None:
        return fail("ports", "no free port on 127.0.0.1", "end programs that hold many connections")
    return ok("ports", f"available, for example {port}")


def machines(context: DoctorContext) -> Iterator[Finding]:
    """Launch a machine of the local provider, see it run, end it, see it gone; traces are read on the way."""
    job = context.wanted
    if not job.rollout.spot.max_instances or not job.rollout.spot.local_offers:
        yield ok("machines", "the job has no spot machines here")
        return
    try:
        with tempfile.TemporaryDirectory(prefix="rlboost-doctor-") as folder:
            run = RunFolder(Path(folder) / job.name)
            run.files.mkdir(parents=True)
            copy_files(job, context.folder, run.files)
            try:
                seconds = _try_a_machine(run, job)
            finally:
                kill_tagged(run.path)
    except RLBoostError as error:
        yield failed("machines", error)
    else:
        yield ok("machines", f"one was launched, listed and terminated in {seconds:.1f} s")


def _try_a_machine(run: RunFolder, job: Job) -> float:
    """Return how long a machine's short life took. Raises whatever the provider raises."""
    offers = [offer.model_copy(update={"market": None}) for offer in job.rollout.spot.local_offers]
    LocalProvider(run.path, job.rollout.spot.local_offers, max_instances=1)  # reads the traces
    provider = LocalProvider(run.path, offers, max_instances=1, command=lambda path, name: STAND_IN)
    started = time.monotonic()
    request = LaunchRequest(run.name, "doctor", provider.offers()[0], bootstrap={"instances": ["doctor"]})
    provider.launch(request)
    _wait_for(provider, run.name, MachineStatus.RUNNING)
    provider.terminate(run.name, "doctor")
    _wait_for(provider, run.name, MachineStatus.GONE)
    return time.monotonic() - started


def _wait_for(provider: LocalProvider, run: str, state: MachineStatus) -> None:
    deadline = time.monotonic() + MACHINE_DEADLINE_S
    while True:
        views = [view.state for view in provider.describe(run)]
        if views == [state]:
            return
        if time.monotonic() > deadline:
            raise RuntimeFault(
                f"a machine was not {state} in {MACHINE_DEADLINE_S:g} s: {', '.join(views) or 'not listed'}",
                "check whether something on this machine kills or hides processes",
            )
        time.sleep(POLL_S)


def _port(endpoint: Path) -> int | None:
    known = read_json(endpoint)
    return None if known is None else int(str(known["url"]).rsplit(":", 1)[1])


def _can_bind(port: int) -> bool:
    """Return True if a server of ours would get the port: with SO_REUSEADDR, as it asks for it."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _free_port() -> int | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return int(listener.getsockname()[1])
    except OSError:
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
