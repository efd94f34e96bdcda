"""`rlboost traces` and `rlboost simulate` as a user types them, with the real simulator on a small job."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import rlboost_templates
from rlboost_cli.main import app
from rlboost_cli.simulation.arguments import simulation_request
from rlboost_cli.simulation.job import model_shape
from rlboost_runtime.fit.shape import shape_of_config
from rlboost_runtime.sim.presets import MODELS
from rlboost_runtime.traces import PROFILES, generate_trace, load_trace
from rlboost_runtime.traces.catalogue import KNOWN

pytestmark = pytest.mark.integration

JOB = """\
name: small
model: Qwen/Qwen3-8B
data: {reasoning_gym: [basic_arithmetic]}
algorithm: {prompts_per_step: 4, group_size: 4, max_response_tokens: 256}
trainer: {price_usd_per_hour: 40}
rollout: {spot: {max_instances: 2, any_of: [{infra: local, price_usd_per_hour: 3}]}}
"""
TRACE = "0,add,a\n0,add,b\n120000,remove,a\n180000,add,c\n360000,remove,b\n"
BAD_TRACES = {
    "never-came": "0,add,a\n1000,remove,b\n",
    "back": "0,add,a\n5000,add,b\n4000,remove,a\n",
    "column": "at_s,kind,node,price\n0,add,a,1\n",
    "negative": "# counted\n0,4\n60,-1\n",
    "empty": "",
}
MEASURES = {"tokens_per_s", "usd_per_hour", "tokens_per_usd", "steps", "preemptions", "tokens_lost"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "market.csv").write_text(TRACE)
    return tmp_path


def rlboost(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done


def simulated(*arguments: str) -> dict:
    return json.loads(rlboost("simulate", "job.yaml", "--trace", "market.csv", *arguments, "--json").stdout)


# --- simulate ----------------------------------------------------------------------------------------------


def test_all_policies_side_by_side_on_all_cores_repeat_by_seed() -> None:
    command = [sys.executable, "-m", "rlboost_cli", "simulate", "job.yaml", "--trace", "market.csv", "--json"]
    done = [
        subprocess.run(command, capture_output=True, text=True, timeout=100, check=False) for _ in range(2)
    ]
    assert done[0].returncode == 0, done[0].stderr
    data = json.loads(done[0].stdout)
    assert (data["preset"], data["trace"], data["seed"]) == ("small", "market", 0)
    assert data["window_h"] == pytest.approx(0.1)
    assert set(data["policies"]) == {"on_demand", "recompute", "polyrl", "paper", "rlboost", "oracle"}
    for measures in data["policies"].values():
        assert set(measures) >= MEASURES
        assert measures["tokens_per_s"] > 0
    base, ours = data["policies"]["on_demand"], data["policies"]["rlboost"]
    assert base["usd_per_hour"] == pytest.approx(40)
    assert 40 < ours["usd_per_hour"] < 46.001
    assert data["ratio"]["throughput"] == pytest.approx(ours["tokens_per_s"] / base["tokens_per_s"])
    assert data["ratio"]["tokens_per_usd"] == pytest.approx(ours["tokens_per_usd"] / base["tokens_per_usd"])
    assert data["basis"].startswith("simulated")
    assert done[1].stdout == done[0].stdout
    assert "prices are the job's" in done[0].stderr
    assert "simulating 6 runs" in done[0].stderr


def test_several_seeds_give_intervals_and_one_gives_none() -> None:
    several = simulated("--policy", "on_demand", "--seeds", "3")
    assert several["seeds"] == [0, 1, 2]
    measures = several["policies"]["on_demand"]
    assert measures["interval"]["tokens_per_s"] > 0
    singles = [
        simulated("--policy", "on_demand", "--seed", str(k))["policies"]["on_demand"] for k in range(3)
    ]
    assert measures["tokens_per_s"] == pytest.approx(sum(s["tokens_per_s"] for s in singles) / 3)
    assert singles[0]["interval"]["tokens_per_s"] is None
    assert several["ratio"] == {"throughput": None, "tokens_per_usd": None}


def test_the_table_is_plain_fits_80_columns_and_says_simulated() -> None:
    done = rlboost("simulate", "job.yaml", "--trace", "market.csv", "--policy", "on_demand", "--seeds", "2")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["policy", "tokens/s"]
    assert lines[1].startswith("on_demand")
    assert "±" in lines[1]
    assert any("simulated, nothing was measured: small on market" in line for line in lines)
    assert max(len(line) for line in lines) <= 80
    assert "\x1b" not in done.output


def test_a_sample_and_a_window_are_replayed_and_reported() -> None:
    data = simulated("--policy", "oracle", "--window", "0.05:0.1", "--sample", "0.5", "--seed", "3")
    assert data["window"] == {"start_h": 0.05, "end_h": pytest.approx(0.1)}
    assert data["window_h"] == pytest.approx(0.05)
    assert (data["sample"], data["seed"]) == (0.5, 3)


def test_the_trainer_takes_whole_groups_as_live_unless_told_otherwise() -> None:
    asked = {"job": None, "preset": "paper-8b", "trace": "market.csv", "window": None, "sample": 1.0}
    asked |= {"seed": 0, "seeds": None, "policies": ("paper",)}
    default, single = simulation_request(**asked), simulation_request(**asked, whole_groups=False)
    assert default.preset.assumptions.trains_whole_groups
    assert not single.preset.assumptions.trains_whole_groups
    assert "micro-batches are of whole groups, as in live runs" in simulated("--policy", "oracle")["notes"]
    assert not [
        note
        for note in simulated("--policy", "oracle", "--micro-batches", "responses")["notes"]
        if "whole groups" in note
    ]


def test_pictures_are_drawn_as_svg_and_png(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = (
        "simulate",
        "job.yaml",
        "--trace",
        "market.csv",
        "--policy",
        "rlboost",
        "--plot",
        "out/plots",
    )
    done = rlboost(*arguments)
    files = sorted(path.name for path in (folder / "out/plots").iterdir())
    names = ("cost", "machines", "throughput")
    assert files == sorted(f"{name}.{kind}" for name in names for kind in ("png", "svg"))
    for name in names:
        svg = folder / "out/plots" / f"{name}.svg"
        ElementTree.parse(svg)
        assert f"wrote {Path('out/plots') / svg.name}" in done.stderr
        assert svg.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_plot_says_what_to_install_before_it_simulates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlboost_cli.simulation.plots.find_spec", lambda _: None)
    done = rlboost("simulate", "job.yaml", "--trace", "market.csv", "--plot", "p", code=2)
    assert "pip install 'rlboost[plot]'" in done.stderr
    assert "simulating" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "neither a job file nor --preset"),
        (["job.yaml", "--preset", "paper-8b"], "both a job file and --preset"),
        (["--preset", "paper-9b"], "no preset is called `paper-9b`"),
        (["job.yaml", "--policy", "luck"], "no policy is called `luck`"),
        (["job.yaml", "--seed", "1", "--seeds", "2"], "both --seed and --seeds"),
        (["job.yaml", "--seeds", "0"], "--seeds 0 cannot be used"),
        (["job.yaml", "--sample", "1.5"], "--sample 1.5"),
        (["job.yaml", "--trace", "gone.csv"], "gone.csv: no such file"),
        (["job.yaml", "--trace", "bamboo-p3"], "has not been fetched yet"),
        (["job.yaml", "--trace", "market.csv", "--window", "1:2"], "--window 1:2 is no part of market"),
        (["job.yaml", "--trace", "market.csv", "--window", "a:b"], "--window a:b"),
        (["job.yaml", "--trace", "market.csv", "--window", "0.05"], "--window 0.05"),
        (["job.yaml", "--trace", "market.csv", "--window", "nan:0.1"], "--window nan:0.1"),
        (["gone.yaml"], "gone.yaml"),
        (["unknown-model.yaml"], "the shape of `nobody/knows` is not known"),
        (["job.yaml", "--trace", "never-came.csv"], "never-came.csv:2: `b` is removed but never came"),
        (["job.yaml", "--trace", "back.csv"], "back.csv:3: time goes back from 5 to 4 s"),
        (["job.yaml", "--trace", "column.csv"], "column.csv:1: unknown column `price`"),
        (["job.yaml", "--trace", "negative.csv"], "negative.csv:3: count -1 is negative"),
        (["job.yaml", "--trace", "empty.csv"], "empty.csv: holds no rows"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_exits_2_before_anything_long(arguments: list[str], found: str, folder: Path) -> None:
    for name, text in BAD_TRACES.items():
        (folder / f"{name}.csv").write_text(text)
    (folder / "unknown-model.yaml").write_text(JOB.replace("Qwen/Qwen3-8B", "nobody/knows"))
    done = rlboost("simulate", *arguments, code=2)
    assert found in done.stderr
    assert done.stdout == ""


def test_a_job_with_cloud_offers_is_simulated_on_their_machines(folder: Path) -> None:
    cloud = "{infra: aws/us-east-2, accelerators: 'L40S:4', egress_usd_per_gb: 0.5}"
    job = JOB.replace("{infra: local, price_usd_per_hour: 3}", cloud)
    job = job.replace("trainer: {", "trainer: {address: head.example.org, ")
    (folder / "job.yaml").write_text(job)
    half_an_hour = ["--trace", "generated-p3", "--window", "0:0.5"]  # a cloud's machine boots for minutes
    done = rlboost("simulate", "job.yaml", *half_an_hour, "--policy", "paper", "--json")
    assert "aws/us-east-2 L40S:4" in done.stderr
    found = json.loads(done.stdout)["policies"]["paper"]
    assert found["usd_per_hour"] > 40 + 2.8 * 1.5, "the offer's price from the table, and egress"
    (folder / "job.yaml").write_text(job.replace("L40S:4", "TPUv5:4"))
    done = rlboost("simulate", "job.yaml", code=2)
    assert "the speed of a TPUv5 is not known" in done.stderr


def test_a_models_shape_comes_from_its_configuration(folder: Path) -> None:
    config = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    shape, known = model_shape("Qwen3-8B", shape_of_config(config)), MODELS["Qwen3-8B"]
    assert shape.parameters == pytest.approx(known.parameters, rel=0.002)
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_size) == (36, 4096, 8, 128)
    (folder / "model").mkdir()
    (folder / "job.yaml").write_text(JOB.replace("Qwen/Qwen3-8B", "./model"))
    (folder / "model/config.json").write_text(json.dumps(config))
    assert simulated("--policy", "oracle")["policies"]["oracle"]["steps"] > 0
    (folder / "model/config.json").write_text("{}")
    assert "not the configuration" in rlboost("simulate", "job.yaml", code=2).stderr


# --- traces ------------------------------------------------------------------------------------------------


def test_traces_are_listed_with_origin_licence_and_statistics() -> None:
    data = json.loads(rlboost("traces", "list", "--json").stdout)
    assert {trace["name"] for trace in data["generated"]} == set(PROFILES)
    assert {trace["name"] for trace in data["public"]} == set(KNOWN)
    assert all(t["url"] and t["licence"] and t["removes"] > 0 and not t["fetched"] for t in data["public"])
    table = rlboost("traces").stdout
    assert "bamboo-p3" in table
    assert "MIT" in table


def test_a_trace_is_shown_in_numbers_and_as_a_picture() -> None:
    done = rlboost("traces", "show", "market.csv")
    assert "taken     2, 0 with notice" in done.stdout
    assert "█" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    data = json.loads(rlboost("traces", "show", "market.csv", "--window", "0:0.05", "--json").stdout)
    assert data["statistics"]["removes"] == 1
    assert data["capacity_steps"] == [[0, 2], [120, 1]]


def test_a_generated_trace_can_be_written_to_a_file_and_read_again(folder: Path) -> None:
    rows = rlboost("traces", "show", "generated-p3", "--seed", "5", "--csv").stdout
    (folder / "mine.csv").write_text(rows)
    assert load_trace(folder / "mine.csv") == generate_trace(PROFILES["generated-p3"], 5)
    assert "generated, seed 5" in rlboost("traces", "show", "mine.csv").stdout


def test_a_fetched_trace_is_found_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    data = TRACE.encode()
    small = replace(KNOWN["bamboo-p3"], size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(KNOWN, "bamboo-p3", small)
    assert "rlboost traces fetch bamboo-p3" in rlboost("traces", "show", "bamboo-p3", code=2).stderr
    cache = folder / "home" / "traces"
    cache.mkdir(parents=True)
    (cache / f"bamboo-p3-{small.sha256[:12]}.csv").write_bytes(data)
    assert "uclasystem/bamboo" in rlboost("traces", "show", "bamboo-p3").stdout
    assert "here already" in rlboost("traces", "fetch", "bamboo-p3").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "found"),
    [
        (["show"], 2, "needs a trace"),
        (["fetch"], 2, "needs a trace"),
        (["list", "bamboo-p3"], 2, "list takes no name"),
        (["fetch", "nothing"], 2, "no public trace is called `nothing`"),
        (["fetch", "generated-p3"], 2, "is generated"),
        (["fetch", "bamboo-p3", "--from", "file:///etc/hostname"], 2, "no web address"),
        (["fetch", "bamboo-p3", "--from", "http://127.0.0.1:1/x"], 7, "cannot be fetched"),
        (["show", "gone"], 2, "no such file"),
        (["draw"], 2, "draw"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_traces_cannot_do_is_told_with_its_exit_code(
    arguments: list[str], code: int, found: str
) -> None:
    assert found in rlboost("traces", *arguments, code=code).stderr


def test_asking_for_traces_loads_nothing_heavy() -> None:
    script = (
        "import sys; from rlboost_cli.main import run\n"
        "try: run()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "traces", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert not {"torch", "numpy", "matplotlib", "ruamel"} & loaded


@pytest.mark.parametrize("name", rlboost_templates.names())
def test_every_template_pays_in_the_simulator_or_says_first_what_it_is_for(name: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(rlboost_templates.text(name))
    policies = ["--policy", "on_demand", "--policy", "rlboost"]
    has_own_market = name in ("laptop", "quickstart")
    market = ["--window", "0:0.1"] if has_own_market else ["--trace", "generated-p3", "--window", "0:2"]
    done = rlboost("simulate", str(job), *market, *policies, "--json")
    ratios = json.loads(done.stdout)["ratio"]
    ratio = ratios["tokens_per_usd"]
    first = rlboost_templates.summary(name)
    says = first.startswith("For ") and ("notional" in first or "tokens per dollar than on demand" in first)
    assert says != (ratio > 1.2), f"{ratio:.2f}: {first}"
    assert ratio > 1.0
    for percent in re.findall(r"(\d+) % more tokens per dollar", first):
        assert 1 + int(percent) / 100 == pytest.approx(ratio, abs=0.02)
    for times in re.findall(r"([\d.]+) times as fast", first):
        assert float(times) == pytest.approx(ratios["throughput"], abs=0.05)
