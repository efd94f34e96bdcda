"""How machines bought straight from EC2 come by their packages: from their head, or with their image."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloudlab.client import Lab
from cloudlab.image import cache_folder
from cloudlab.machine import GATEWAY

from tests.e2e.conftest import Cli

CACHE = cache_folder()
"""Of whoever runs the tests, before they take another home."""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800, func_only=True)]
UP_S = 900.0
"""From the wish for a machine to its agent, with a head that has to fetch everything first."""
SPOT: dict[str, Any] = {"infra": "aws/us-east-1", "accelerators": "A10G:1", "via": "direct"}


def job_with(spot: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        "algorithm": {"steps": steps},
        "trainer": {"address": GATEWAY, "allow_cpu": True, "local_engines": 0},
        "rollout": {"spot": {"min_instances": 1, "max_instances": 1, "any_of": [spot]}},
    }


@pytest.fixture
def registry_of_head(lab: Lab, cloud_cli: Cli) -> None:
    """The head is this machine: it has the lab's mirror beside the registry that pip knows, and a Python."""
    (wheels,) = CACHE.glob("wheels-*[0-9a-f]")
    listed = (wheels / "python.json").read_text().replace("file:///var/wheels", wheels.as_uri())
    downloads = cloud_cli.home / "python.json"
    downloads.write_text(listed)
    cloud_cli.environment |= {
        "UV_PYTHON_DOWNLOADS_JSON_URL": str(downloads),
        "PIP_FIND_LINKS": str(wheels),
    }


@pytest.fixture
def cut_off(lab: Lab) -> Iterator[None]:
    lab.ask("cut_off_registry", is_cut=True)
    yield
    lab.ask("cut_off_registry", is_cut=False)


def run_whole(lab: Lab, cli: Cli, name: str, job: Path) -> dict[str, float]:
    """Run the job to its end; return its machine's seconds from its request to its first token, by phase."""
    before = len(lab.machines())
    cli("launch", job, "--yes", "--detach", timeout_s=UP_S)
    deadline = time.monotonic() + UP_S
    phases: dict[str, float] = {}
    while "first_token" not in phases:
        status = cli.json("status", name)
        assert status["state"] not in ("failed", "stopped"), (status, tails(lab, before))
        phases = next((each["boot_s"] for each in status["machines"] if each["boot_s"]), phases)
        assert time.monotonic() < deadline, tails(lab, before)
        time.sleep(0.5)
    assert cli.wait_outcome(name, UP_S)["state"] == "done"
    assert len(lab.machines()) == before + 1, "one machine did it"
    return phases


def in_words(phases: dict[str, float]) -> str:
    return (
        f"{boot_s(phases):.1f} s ({', '.join(f'{name} {seconds:.1f}' for name, seconds in phases.items())})"
    )


def boot_s(phases: dict[str, float]) -> float:
    """Return the seconds to the first token that are the machine's own: without waiting for the trainer."""
    return sum(seconds for name, seconds in phases.items() if name != "wait")


def tails(lab: Lab, before: int) -> str:
    script = "tail -n 40 /run/user-data.log /opt/rlboost/*.log"
    return "\n".join(
        lab.ask("shell", id=each["id"], script=script)
        for each in lab.machines()[before:]
        if each["ended_at"] is None
    )


def test_a_machine_without_a_registry_installs_everything_from_its_head(
    lab: Lab, cloud_cli: Cli, registry_of_head: None, cut_off: None
) -> None:
    lab.ask("refuse", regions=[])
    first = run_whole(lab, cloud_cli, "far", cloud_cli.job("far", **job_with(SPOT, 2)))
    again = run_whole(lab, cloud_cli, "again", cloud_cli.job("again", **job_with(SPOT, 2)))
    print(f"first token after {in_words(first)} while the head fetched, {in_words(again)} from then on")
    kept = cloud_cli.home / "wheelhouse/lists"
    assert {path.name.rpartition("-")[0] for path in kept.iterdir()} == {"base", "machine"}
    assert all(json.loads(path.read_text()) for path in kept.iterdir())
    assert any(path.name.startswith("torch-") for path in (cloud_cli.home / "wheelhouse/files").iterdir())


def test_an_image_of_ours_boots_to_its_first_token_in_less_than_a_third_of_the_time(
    lab: Lab, laptop: Cli, tmp_path: Path
) -> None:
    """Against a machine whose packages are on its head already, so that only the installation differs."""
    changes = tmp_path / "changes.yaml"
    trainer = {"allow_cpu": True, "private_address": True, "accelerators": "A10G:1"}
    changes.write_text(json.dumps({"trainer": trainer, "rollout": {"spot": {"any_of": [SPOT]}}}))
    before = len(lab.machines())
    place = "aws/us-east-1"
    laptop("image", "build", place, "--engine", "transformers", "--with", changes, "--yes", timeout_s=UP_S)
    assert all(each["ended_at"] is not None for each in lab.machines()[before:]), "it is given back"
    (image,) = laptop.json("image", "list", place)["images"]
    assert image["is_ready"]
    cold = run_whole(lab, laptop, "cold", laptop.job("cold", **job_with(SPOT, 2)))
    without = run_whole(lab, laptop, "plain", laptop.job("plain", **job_with(SPOT, 2)))
    with_image = {**SPOT, "image": image["name"]}
    imaged = run_whole(lab, laptop, "imaged", laptop.job("imaged", **job_with(with_image, 2)))
    print(f"first token with an image after {in_words(imaged)}")
    print(f"with the packages on the head after {in_words(without)}, with none there after {in_words(cold)}")
    assert boot_s(imaged) < boot_s(without) / 3
    laptop("image", "rm", place, image["name"])
    assert laptop.json("image", "list", place)["images"] == []
