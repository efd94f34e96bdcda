"""The process that holds the model of a `TransformersEngine`: `python -m ...transformers.child FD`.

Single-threaded: between decode steps it reads the parent's commands. It ends when its parent does, by
PR_SET_PDEATHSIG on Linux and by the end of its socket everywhere, and it lowers its priority so that the
agent's heartbeat comes first. A failure of a command is its answer; any other ends the process, with its
traceback in the log.
"""

from __future__ import annotations

import time

_STARTED_AT = time.monotonic()

import ctypes  # noqa: E402 - the clock starts before the imports that it measures
import gc  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

import msgspec  # noqa: E402

from rlboost_runtime.engines.base import EngineOutput, EngineSpec, greedy_continuation  # noqa: E402
from rlboost_runtime.engines.transformers import channel  # noqa: E402
from rlboost_runtime.fit.gpus import ask_driver, require_gpus  # noqa: E402

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rlboost_runtime.engines.transformers.continuous_batch import ContinuousBatch

NICENESS = 5
"""Added to the child's niceness once it is ready: an agent that cannot beat loses its work."""
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 20
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class ParentGone(Exception):
    """The parent's end of the socket is closed."""


class Channel:
    """The child's end of the socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unpacker = channel.Unpacker()

    def send(self, message: channel.ToParent) -> None:
        """Send; waits while the parent does not read. Raises `ParentGone`."""
        try:
            self._socket.sendall(channel.pack(message))
        except OSError as exc:
            raise ParentGone from exc

    def receive(self, timeout_s: float | None) -> list[channel.ToChild]:
        """Return what has arrived, waiting up to `timeout_s` (None: for ever). Raises `ParentGone`."""
        readable, _, _ = select.select([self._socket], [], [], timeout_s)
        if not readable:
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as exc:
            raise ParentGone from exc
        if not data:
            raise ParentGone
        return [channel.to_child_decoder.decode(body) for body in self._unpacker.feed(data)]


class StepPacer:
    """Keeps decode steps at least a period apart."""

    def __init__(self, steps_per_s: float | None) -> None:
        self._period_s = 0.0 if steps_per_s is None else 1.0 / steps_per_s
        self._next_at = 0.0

    def wait_s(self) -> float:
        """Seconds until the next step may begin."""
        return max(0.0, self._next_at - time.monotonic())

    def begin(self) -> None:
        """Begin a step: a late one does not make the following ones faster."""
        self._next_at = time.monotonic() + self._period_s


class Child:
    """The model, its batch, and the commands."""

    def __init__(self, link: Channel, spec: EngineSpec) -> None:
        self._link = link
        self._spec = spec
        self._model: PreTrainedModel | None = None
        self._model_config = ""
        self._batch: ContinuousBatch | None = None
        self._version: int | None = None
        self._asleep = False
        self._held = False
        self._counter = 0
        self._total = 0
        self._pace = StepPacer(spec.tokens_per_s_per_response)
        self._side_fd = None if spec.side_file is None else os.open(spec.side_file, _APPEND, 0o600)

    def serve(self) -> None:
        """Work until `Quit`. Raises `ParentGone`."""
        while True:
            for message in self._link.receive(self._max_wait_s()):
                if isinstance(message, channel.Quit):
                    return
                self._handle(message)
            if self._has_work() and self._pace.wait_s() <= 0:
                self._step()

    def _has_work(self) -> bool:
        return self._batch is not None and not self._batch.is_empty and not self._held

    def _max_wait_s(self) -> float | None:
        return self._pace.wait_s() if self._has_work() else None

    def _step(self) -> None:
        assert self._batch is not None
        assert self._version is not None
        self._pace.begin()
        output = self._batch.step(self._version)
        self._counter += 1
        self._count(output)
        self._send(output)

    def _output(self) -> EngineOutput:
        return EngineOutput(-1 if self._version is None else self._version)

    def _send(self, output: EngineOutput) -> None:
        self._link.send(
            channel.Tokens(
                output,
                counter=self._counter,
                running=0 if self._batch is None else self._batch.num_running,
                waiting=0 if self._batch is None else self._batch.num_waiting,
                kv_free_tokens=None if self._batch is None else self._batch.kv_free_tokens,
            )
        )

    def _count(self, output: EngineOutput) -> None:
        """Append to the side file before the tokens are sent."""
        if self._side_fd is None or not output.request_ids:
            return
        lines = []
        for request_id, count in zip(output.request_ids, output.counts, strict=True):
            for _ in range(count):
                self._total += 1
                lines.append(f"{request_id} 1 {self._total}\n")
        os.write(self._side_fd, "".join(lines).encode())

    # --- commands -----------------------------------------------------------------------------------------

    def _handle(self, message: channel.ToChild) -> None:
        self._counter += 1
        match message:
            case channel.Submit():
                self._submit(message)
            case channel.AbortRequests():
                self._abort(message)
            case channel.Hold(on=on):
                self._held = on
            case (
                channel.LoadWeights() | channel.ProbeRequest() | channel.DropWeights() | channel.TakeMemory()
            ):
                self._answer(message)

    def _submit(self, message: channel.Submit) -> None:
        refused = self._output()
        for request in message.requests:
            if self._batch is None or self._version is None:
                refused.end(request.request_id, "failed", "no weights are loaded")
            elif (problem := self._batch.refusal(request)) is not None:
                refused.end(request.request_id, "failed", problem)
            else:
                self._batch.add(request)
        if refused.ended:
            self._send(refused)

    def _abort(self, message: channel.AbortRequests) -> None:
        output = self._output()
        for request_id in [] if self._batch is None else self._batch.drop(message.request_ids):
            output.end(request_id, "aborted")
        if output.ended:
            self._send(output)
        self._link.send(channel.Done(message.ticket))

    def _answer(self, message: channel.IdleCommand) -> None:
        """Carry out a command that needs an idle engine; whatever it raises is its answer."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        problem = ""
        try:
            if self._batch is not None and not self._batch.is_empty:
                raise RuntimeError("the engine holds requests")
            match message:
                case channel.LoadWeights(version=version, folder=folder):
                    self._load(version, Path(folder))
                case channel.ProbeRequest(token_ids=prompt, max_new_tokens=num_new):
                    token_ids, logprobs = self._probe(prompt, num_new)
                case channel.DropWeights():
                    self._sleep()
                case channel.TakeMemory():
                    self._asleep = False
        except Exception as exc:  # noqa: BLE001 - the parent decides; an edge between processes
            problem = f"{type(exc).__name__}: {exc}"
        self._counter += 1
        kv_cache = None if self._batch is None else self._batch.kv_cache
        self._link.send(channel.Done(message.ticket, problem, token_ids, logprobs, kv_cache))

    def _load(self, version: int, folder: Path) -> None:
        """Swap the weights in place; on error nothing is served."""
        from rlboost_runtime.engines import model_folder
        from rlboost_runtime.engines.transformers import model_loading

        if self._asleep:
            raise RuntimeError("the engine sleeps")
        self._version = None
        config = model_folder.config_text(folder)
        if self._model is None or self._batch is None or config != self._model_config:
            self._batch = self._model = None
            self._model, self._batch = self._build(folder)
            self._model_config = config
            self._counter += 1
            self._link.send(channel.Alive(self._counter))
        model_loading.load_weights(self._model, folder)
        model_loading.add_adapters(self._model, folder)
        self._batch.seed((self._spec.seed * 1_000_003 + version) & (2**63 - 1))
        self._version = version

    def _build(self, folder: Path) -> tuple[PreTrainedModel, ContinuousBatch]:
        """Return a model without weights, and its batch with an empty cache."""
        import torch

        from rlboost_runtime.engines import model_folder
        from rlboost_runtime.engines.transformers import continuous_batch, model_loading

        spec = self._spec
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = model_loading.build_model(folder, getattr(torch, spec.dtype), device)
        stops = {*spec.sampling.stop_token_ids, *model_folder.stop_token_ids(folder)}
        sampling = msgspec.structs.replace(spec.sampling, stop_token_ids=tuple(sorted(stops)))
        running = spec.max_running or continuous_batch.running_in_memory(model, spec, folder)
        batch = continuous_batch.ContinuousBatch(
            model, sampling, running, spec.max_context_tokens, is_measured=spec.max_running is None
        )
        return model, batch

    def _probe(self, token_ids: list[int], num_new: int) -> tuple[list[int], list[float]]:
        if self._model is None or self._version is None:
            raise RuntimeError("no weights are loaded")
        return probe(self._model, token_ids, num_new)

    def _sleep(self) -> None:
        """Give memory back to the system, not only to the allocator."""
        import torch

        self._asleep = True
        self._batch = self._model = self._version = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
            if trim is not None:
                trim(0)


def probe(model: PreTrainedModel, token_ids: list[int], num_new: int) -> tuple[list[int], list[float]]:
    """Continue greedily by whole forward passes, without cache or batch: the plainest use of the weights."""
    import torch

    def next_logprobs(sequence: list[int]) -> torch.Tensor:
        num = len(sequence)
        ids = torch.tensor([sequence], device=model.device)
        mask = torch.ones(num, num, dtype=torch.bool, device=model.device).tril()[None, None]
        logits_V = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, -1]
        logprobs_V: torch.Tensor = logits_V.float().log_softmax(-1)
        return logprobs_V

    with torch.inference_mode():
        return greedy_continuation(next_logprobs, token_ids, num_new)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill us when the parent dies (Linux); raises `ParentGone` if it already is."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise ParentGone


def import_engine() -> None:
    """Do the slow imports now, so that the first load is quick."""
    import transformers.modeling_utils
    from transformers.utils import logging

    from rlboost_runtime.engines.transformers import continuous_batch, model_loading

    del transformers, continuous_batch, model_loading  # importing is all
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # theirs


def _import_all(threads: int) -> None:
    import_engine()
    import torch

    torch.set_num_threads(threads)


def _look_for_gpus(promised: int) -> None:
    """Raise `GpuMissing` where torch sees fewer: the driver may be older than its CUDA wants."""
    import torch

    if promised:
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        require_gpus(promised, seen, ask_driver(), torch.version.cuda or "")


def _first_message(link: Channel) -> channel.Configure:
    while not (messages := link.receive(None)):
        pass
    (config,) = messages  # the parent sends no more before `Ready`
    assert isinstance(config, channel.Configure)
    return config


def main(fd: int, *, is_forked: bool = False) -> None:
    """Serve the agent on socket `fd` until told to end or the agent is gone.

    `is_forked`: from `preloaded`, so the agent is not our parent; its end shows at the socket alone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when we end
    link = Channel(socket.socket(fileno=fd))
    try:
        config = _first_message(link)
        if not is_forked:
            die_with_parent(config.parent_pid)
        began = time.monotonic()
        _import_all(config.spec.threads)
        _look_for_gpus(config.spec.promised_gpus)
        os.nice(NICENESS)
        imports_s = round(time.monotonic() - began, 3)
        phases = {"fork": imports_s}
        if not is_forked:
            phases = {"python": round(began - _STARTED_AT, 3), "imports": imports_s}
        link.send(channel.Ready(phases))
        Child(link, config.spec).serve()
    except ParentGone:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # tearing torch down takes half a second that a stopping agent may not have
