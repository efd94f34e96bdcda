"""Where in a bucket the versions of a run lie."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.deploy.bootstrap import make_bootstrap
from rlboost_runtime.job import Job, LocalOffer, ReasoningGym, Rollout, Spot, TinyModel
from rlboost_runtime.job.run import Weights
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.run.security import create_secrets
from rlboost_runtime.weights.manifest import MANIFEST, Probe
from rlboost_runtime.weights.serve import server
from rlboost_runtime.weights.serve import server as relaying
from rlboost_runtime.weights.store.store import WeightStore


def test_the_head_writes_where_machines_read_and_that_is_the_runs_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "demo")
    run.path.mkdir()
    create_secrets(run)
    write_json(run.endpoint, {"url": "https://127.0.0.1:4711"})
    job = Job(
        name="demo",
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
        rollout=Rollout(spot=Spot(any_of=[LocalOffer(infra="local")])),
        weights=Weights(bucket="s3://somewhere/weights/"),
    )
    run.job_json.write_text(job.canonical_json())
    written: list[str] = []

    class Recording(relaying.BucketUpload):
        def __init__(self, store: WeightStore, url: str) -> None:
            written.append(url)

        def run(self, stop: threading.Event) -> None:
            """Do nothing."""

    monkeypatch.setattr(relaying, "BucketUpload", Recording)
    with server._uploading(run, WeightStore(run.weights), threading.Event()):
        pass
    told = make_bootstrap(job, run, "spot-3", Pool.SPOT, ("spot-3/0",))
    assert written == [told.weight_bucket] == ["s3://somewhere/weights/demo"]


def test_two_runs_in_one_bucket_keep_their_versions(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def relayed(name: str, versions: tuple[int, ...]) -> set[str]:
        store = WeightStore(tmp_path / name)
        relay = relaying.BucketUpload(store, RunFolder(tmp_path / name).place_in(url))
        for version in versions:
            store.publish(version, write, Probe((1,), (1,), (0.0,), 1.0))
            relay.upload_newest()
        return {path.parent.name for path in (tmp_path / "bucket" / name).glob(f"v*/{MANIFEST}")}

    assert relayed("first", (98, 99, 100)) == {"v000099", "v000100"}
    assert relayed("second", (0, 1)) == {"v000000", "v000001"}
    assert len(list((tmp_path / "bucket" / "first").glob(f"v*/{MANIFEST}"))) == 2
