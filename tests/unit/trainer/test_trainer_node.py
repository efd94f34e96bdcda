"""A further node of a trainer: it notices a head that vanished, and waits for one that is not there yet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.trainer import node
from rlboost_runtime.trainer import node as launch


def listening() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(30)
    return server


def test_a_head_that_answers_again_in_time_is_not_given_up() -> None:
    ended = threading.Event()
    server = listening()
    address = server.getsockname()
    watch = threading.Thread(
        target=node.end_without,
        args=(address,),
        kwargs={"check_every_s": 0.02, "timeout_s": 1.0, "end": lambda code: ended.set()},
        daemon=True,
    )
    watch.start()
    for _ in range(2 * node.MAX_MISSED):  # each is a check that was answered
        server.accept()[0].close()
    assert not ended.is_set()
    server.close()
    assert ended.wait(30)


def test_the_last_looks_in_a_row_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False] * (node.MAX_MISSED - 1) + [True] + [False] * node.MAX_MISSED)
    num_checks = 0

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        nonlocal num_checks
        num_checks += 1
        if not next(answers):
            raise TimeoutError("no answer")
        return socket.socket()

    monkeypatch.setattr(node.socket, "create_connection", connect)
    codes: list[int] = []
    node.end_without(("head", 1), check_every_s=0.0, end=codes.append)
    assert codes == [1]
    assert num_checks == 2 * node.MAX_MISSED


def test_a_head_that_is_not_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RENDEZVOUS_S", 1)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo")  # it would be set for good, and tests after this one inherit it
    with listening() as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert node._run_once("run", launch.TrainerNode(1, 2, 1, address))


def test_the_allocator_of_a_gpu_grows_its_segments_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    node.use_growing_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    node.use_growing_segments()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_the_heads_trainer_ends_without_an_error_when_the_set_of_nodes_changes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_json(run.trainer_nodes, {"joined": ["reserved-1"]})
    program = (
        "import sys, time, pathlib; from rlboost_runtime.run.folder import RunFolder;"
        "from rlboost_runtime.trainer.node import watch_nodes;"
        "watch_nodes(RunFolder(pathlib.Path(sys.argv[1]))); print('watching', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "watching\n"
        with pytest.raises(subprocess.TimeoutExpired):
            watching.wait(2)
        write_json(run.trainer_nodes, {"joined": []})
        assert watching.wait(10) == 0
