"""Seconds from the end of a training step until an engine on another folder serves the new weights."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from benchmarks.checkout import REPOSITORY
from rlboost_runtime.engines.base import EngineSpec
from rlboost_runtime.engines.transformers.engine import TransformersEngine
from rlboost_runtime.job import TinyModel
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run import in_memory, security
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.trainer.artifacts.publisher import Publisher, VersionContent
from rlboost_runtime.trainer.learn.model_files import (
    find_tied,
    greedy_probe,
    next_logprobs,
    stop_token_ids,
    version_configs,
)
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer
from rlboost_runtime.weights.child_pipe import PullProgress, PullRequest
from rlboost_runtime.weights.manifest import probe_matches, read_manifest
from rlboost_runtime.weights.pull.pull import pull
from rlboost_runtime.weights.store.placing import VersionPlacing
from rlboost_runtime.weights.store.store import WeightStore

MODEL = TinyModel(init="tiny", hidden_size=1024, num_layers=13)
"""123 M parameters: 500 MB in float32."""
DTYPE = "float32"


@contextmanager
def _server(run: RunFolder) -> Iterator[str]:
    command = [sys.executable, "-m", "rlboost_runtime.weights.serve.server", str(run.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.DEVNULL)
    try:
        while (endpoint := read_json(run.weights_endpoint)) is None:
            time.sleep(0.05)
        yield str(endpoint["url"])
    finally:
        child.terminate()
        child.wait()


def publish_to_served(disk: Path, keep_in: str, num: int) -> dict[str, list[float]]:
    """Publish `num` versions and more, with run and receiver on `disk`; return the seconds of each but the
    first. The receiver pulls over TLS, its engine loads the version and proves it by the probe."""
    run, receiver = RunFolder(disk / f"run-{keep_in}"), disk / f"machine-{keep_in}"
    run.path.mkdir()
    security.create_secrets(run)
    model, tokenizer = make_model(MODEL, 64), make_tokenizer()
    store = WeightStore(run.weights)
    placing = VersionPlacing(run.weights, keep_in, store.keep + 1, retire=store.retire)
    published: list[float] = []
    stops = stop_token_ids(model, tokenizer)
    tied = find_tied(model)
    names = {entry.name for entry in tied}
    content = VersionContent(
        lambda: [(name, each) for name, each in model.state_dict().items() if name not in names],
        lambda: version_configs(model, DTYPE),
        lambda: greedy_probe(
            lambda ids: next_logprobs(model, ids), tokenizer.encode("The probe"), stops, DTYPE
        ),
        tied,
    )
    spec = EngineSpec("transformers", Sampling(), 256, 1, DTYPE, 1, log=disk / "engine.log")
    times: list[float] = []
    try:
        with (
            _server(run) as url,
            Publisher(
                store, DTYPE, lambda done: published.append(time.monotonic()), placing.prepare
            ) as publisher,
        ):
            request = PullRequest(
                url, -1, str(receiver), security.read_token(run), run.certificate.read_text(), keep_in=keep_in
            )
            asyncio.run(_serve(publisher, content, model, request, spec, num, times))
        kept_in = str(in_memory.root_of(run.weights) or "disk")
    finally:
        in_memory.free(run.weights)
        in_memory.free(receiver)
    assert kept_in == ("disk" if keep_in == "disk" else "/dev/shm"), kept_in
    return {"publish_to_served_s": times[1:]}


async def _serve(
    publisher: Publisher,
    content: VersionContent,
    model: torch.nn.Module,
    request: PullRequest,
    spec: EngineSpec,
    num: int,
    times: list[float],
) -> None:

    engine = TransformersEngine(spec)
    try:
        await engine.start(300.0)
        for version in range(num + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data += 1e-4 * torch.randn_like(parameter)
            began = time.monotonic()
            publisher.begin(version, content)
            await asyncio.to_thread(publisher.ready)
            asked = msgspec.structs.replace(request, version=version)
            report = await asyncio.to_thread(pull, asked, PullProgress())
            await engine.load(version, report.path)
            manifest = read_manifest(report.path)
            found = await engine.greedy(list(manifest.probe.token_ids), len(manifest.probe.next_token_ids))
            problem = probe_matches(manifest, *found)
            assert problem is None, problem
            times.append(round(time.monotonic() - began, 3))
    finally:
        await engine.stop()
