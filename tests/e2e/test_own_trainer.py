"""The TRL example as a user runs it: TRL trains, our agents generate, one of them is killed meanwhile."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from safetensors.numpy import load_file

from rlboost_runtime.audit.run import audit

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl"
STEPS = 5


def shortened(home: Path) -> Path:
    """Copy the example: few steps, slow enough for a kill to land in one, kills only by hand."""
    folder = home / "trl"
    shutil.copytree(EXAMPLE, folder)
    path = folder / "job.yaml"
    fields = YAML(typ="safe").load(path)
    fields["algorithm"] |= {"steps": STEPS}
    fields["rollout"]["engine_args"]["tokens_per_s_per_response"] = 8
    fields["rollout"]["spot"]["any_of"][0].pop("market")
    fields["weights"] = {"keep_in": "disk"}  # where they are still to be seen after the end
    fields["evidence"] = {"keep_journal": True, "count_tokens": True}
    with path.open("w") as file:
        YAML().dump(fields, file)
    return path


def test_trl_trains_on_our_fleet_through_a_kill(cli: Any) -> None:
    attached = cli.start("launch", shortened(cli.home), "--yes")
    serving = cli.wait(
        "trl",
        lambda s: s["step"] >= 1 and any(i["pool"] == "spot" and i["in_flight"] for i in s["instances"]),
        timeout_s=200,
    )
    (spot,) = [i["id"] for i in serving["instances"] if i["pool"] == "spot"]
    (agent,) = [p for p in cli.processes("trl", "rlboost_runtime.agent") if spot in " ".join(p.cmdline())]
    agent.send_signal(signal.SIGKILL)
    out, err = attached.communicate(timeout=450)
    assert attached.returncode == 0, f"{out}\n{err}\n{cli.tails()}"

    run = cli.run_folder("trl")
    status = cli.json("status", "trl")
    assert (status["state"], status["step"]) == ("done", STEPS)
    assert status["preemptions"]["silent"] + status["preemptions"]["reset"] >= 1
    found = audit(run)
    assert found.problems == []
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    journalled = [sum(len(tokens) // 4 for tokens in step.tokens.values()) for step in found.steps]
    assert [line["tokens_trained"] for line in lines] == journalled, "TRL was given what the journal holds"
    assert any(line["grad_norm"] > 0 for line in lines)
    versions = [load_file(run.weights / name / "model.safetensors") for name in sorted(
        path.name for path in run.weights.glob("v*")
    )]  # fmt: skip
    assert len(versions) >= 2
    assert any((versions[0][name] != versions[-1][name]).any() for name in versions[0])
    assert (run.checkpoints / "model" / "model.safetensors").is_file()
    cli.assert_gone("trl")
