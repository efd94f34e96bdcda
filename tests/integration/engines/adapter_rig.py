"""A trainer's policy with adapters that publishes them, and a machine that pulls them over TLS."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlboost_runtime.job import Algorithm, Lora, Trainer
from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.trainer.artifacts.publisher import Publisher, VersionContent
from rlboost_runtime.trainer.learn.model_files import version_configs
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.models.tiny import make_tokenizer
from rlboost_runtime.weights.child_pipe import PullProgress, PullReport, PullRequest
from rlboost_runtime.weights.pull.pull import Deadlines, pull
from rlboost_runtime.weights.serve.catalog import StoreCatalog
from rlboost_runtime.weights.serve.http import WeightHttpServer
from rlboost_runtime.weights.store.store import WeightStore


class Trained:
    """A policy with adapters, its store, and a server of it."""

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        self.run = RunFolder(path / "run")
        security.create_secrets(self.run)
        self.policy = Policy(model, make_tokenizer())
        self.policy.set_up(Trainer(), Algorithm(lora=Lora(rank=4)))
        self.store = WeightStore(self.run.weights, chunk_bytes=65536)
        self.url = ""
        self.machine = path / "machine"

    def train(self, seed: int) -> None:
        """Move the adapters, as an optimizer would."""
        torch.manual_seed(seed)
        for name, parameter in self.policy.model.named_parameters():
            if ".lora_" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)

    def publish(self, publisher: Publisher, version: int) -> None:
        policy = self.policy
        content = VersionContent(
            lambda: policy.weights(frozen=True),
            lambda: version_configs(policy.model, "float32") | policy.adapter_files("float32"),
            lambda: policy.probe([1, 2, 3], "float32"),
            policy.tied(),
            are_frozen=True,
        )
        publisher.begin(version, content)
        publisher.ready()

    def pull(self, version: int, **more: Any) -> PullReport:
        fields: dict[str, Any] = {
            "url": self.url, "version": version, "folder": str(self.machine),
            "token": security.read_token(self.run), "certificate": self.run.certificate.read_text(),
        }  # fmt: skip
        return pull(PullRequest(**fields | more), PullProgress(), Deadlines(idle_s=5, progress_s=20))

    @contextmanager
    def serving(self) -> Iterator[None]:
        listener = socket.create_server(("127.0.0.1", 0))
        catalog = StoreCatalog(self.store, 0.2)
        context, token = security.server_context(self.run), security.read_token(self.run)
        server, stop = WeightHttpServer(listener, context, token, catalog), threading.Event()
        thread = threading.Thread(target=server.serve_until, args=(stop,))
        thread.start()
        self.url = f"https://127.0.0.1:{server.server_address[1]}"
        try:
            yield
        finally:
            stop.set()
            thread.join(10)
