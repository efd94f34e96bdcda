"""What agents are told comes from the job and the run's folder, and roles follow from the job."""

from __future__ import annotations

import msgspec
import pytest

from rlboost_runtime.agent.bootstrap import Bootstrap, read_bootstrap
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.deploy.bootstrap import instances_of, make_bootstrap
from rlboost_runtime.errors import NotYet
from rlboost_runtime.job import (
    CloudOffer,
    Job,
    LocalOffer,
    Lora,
    Market,
    ReasoningGym,
    Rollout,
    Spot,
    TinyModel,
    Trainer,
)
from rlboost_runtime.run.credentials import make_credential
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.run.security import create_secrets, read_token
from rlboost_runtime.supervisor.roles import roles_of


def job_with(local_engines: int = 1, market: Market | None = None) -> Job:
    return Job(
        name="told",
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
        trainer=Trainer(local_engines=local_engines),
        rollout=Rollout(spot=Spot(any_of=[LocalOffer(infra="local", market=market)])),
    )


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "told")
    folder.path.mkdir()
    create_secrets(folder)
    return folder


def test_agents_are_told_what_the_job_says(run):
    write_json(run.endpoint, {"url": "https://127.0.0.1:4711"})
    job = job_with()
    told = make_bootstrap(job, run, "spot-3", Pool.SPOT, ("spot-3/0",))
    assert (told.run, told.machine, told.pool, told.instances) == ("told", "spot-3", "spot", ("spot-3/0",))
    assert told.coordinator_url == "https://127.0.0.1:4711"
    assert told.token == make_credential(read_token(run), "spot-3")
    assert told.certificate.startswith("-----BEGIN CERTIFICATE-----")
    limit = job.algorithm.max_prompt_tokens + job.algorithm.max_response_tokens
    assert told.engine.max_context_tokens == limit
    assert told.engine.max_running is None, "auto is the default"
    as_plain_data = msgspec.to_builtins(told)
    assert msgspec.convert(as_plain_data, Bootstrap) == told


@pytest.mark.parametrize(
    ("accelerators", "tensor_parallel", "num"),
    [("H100:8", 1, 8), ("H100:8", 2, 4), ("H100:8", 8, 1), ("A10G", 1, 1), ("as it is", 1, 1), ("", 2, 1)],
)
def test_a_machine_has_an_engine_for_each_group_of_its_gpus(run, accelerators, tensor_parallel, num):
    write_json(run.endpoint, {"url": "https://127.0.0.1:4711"})
    job = job_with()
    rollout = job.rollout.model_copy(update={"tensor_parallel": tensor_parallel, "engine": "vllm"})
    job = job.model_copy(update={"rollout": rollout})
    instances = instances_of("spot-3", rollout.engines_on(accelerators))
    assert instances == tuple(f"spot-3/{i}" for i in range(num))
    assert make_bootstrap(job, run, "spot-3", Pool.SPOT, instances).engine.tensor_parallel == tensor_parallel


@pytest.mark.parametrize(("rank", "room"), [(4, 8), (32, 32), (33, 64)])
def test_engines_make_room_for_adapters_that_come_by_themselves(run, rank, room):
    write_json(run.endpoint, {"url": "https://127.0.0.1:4711"})
    job = job_with()
    job = job.model_copy(update={"algorithm": job.algorithm.model_copy(update={"lora": Lora(rank=rank)})})
    assert make_bootstrap(job, run, "spot-3", Pool.SPOT, ("spot-3/0",)).engine.vllm.max_lora_rank == 0
    job = job.model_copy(update={"weights": job.weights.model_copy(update={"transfer": "lora"})})
    bootstrap = make_bootstrap(job, run, "spot-3", Pool.SPOT, ("spot-3/0",))
    assert bootstrap.engine.vllm.max_lora_rank == room
    assert bootstrap.weight_transfer == "auto"


def test_a_further_node_of_the_trainer_reaches_the_head_in_their_own_network(run, monkeypatch):
    monkeypatch.setattr("rlboost_runtime.run.head.private_address", lambda: "10.0.0.5")
    write_json(run.endpoint, {"url": "https://127.0.0.1:7410", "public_url": "https://198.51.100.7:7410"})
    job = job_with()
    offer = CloudOffer(infra="aws/us-east-1", accelerators="H100:8", via="direct")
    job = job.model_copy(update={"trainer": Trainer(nodes=3, ranks=8, node_offer=offer)})
    told = make_bootstrap(job, run, "reserved-2-4", Pool.RESERVED, ("reserved-2-4/0",))
    assert told.trainer_node == ("10.0.0.5:7412", "told", "2", "3", "8")
    assert told.coordinator_url == "https://10.0.0.5:7410"
    assert told.weight_store == "", "the head's disk is not its own"
    for machine, pool in (("reserved-0", Pool.RESERVED), ("spot-1", Pool.SPOT)):
        assert make_bootstrap(job, run, machine, pool, (f"{machine}/0",)).trainer_node == ()


def test_a_trainer_starts_once_all_its_nodes_are_there(run):
    job = job_with()
    offer = CloudOffer(infra="aws/us-east-1", accelerators="H100:8", via="direct")
    several = job.model_copy(update={"trainer": Trainer(nodes=3, node_offer=offer)})
    write_json(run.wanted, {"train": True})

    def may_start(job: Job) -> bool:
        return next(role for role in roles_of(job, run) if role.name == "trainer").may_start()

    assert may_start(job)
    assert not may_start(several)
    write_json(run.trainer_nodes, {"joined": ["reserved-1"]})
    assert not may_start(several)
    write_json(run.trainer_nodes, {"joined": ["reserved-1", "reserved-2"]})
    assert may_start(several)


def test_nobody_is_told_anything_before_the_coordinator_listens(run):
    with pytest.raises(NotYet):
        make_bootstrap(job_with(), run, "spot-3", Pool.SPOT, ("spot-3/0",))


def test_roles_follow_from_the_job(run):
    def names(job: Job) -> list[str]:
        return [role.name for role in roles_of(job, run)]

    assert names(job_with()) == ["coordinator", "weights", "agent-reserved-0-0", "trainer"]
    assert names(job_with(local_engines=0)) == ["coordinator", "weights", "trainer"]
    assert "market" in names(job_with(market=Market()))


def test_reserved_agents_wait_for_the_coordinator_and_get_one_private_file(run):
    agents = [role for role in roles_of(job_with(local_engines=2), run) if role.machine == "reserved-0"]
    assert [agent.command[-1] for agent in agents] == ["reserved-0/0", "reserved-0/1"]
    assert not any(agent.may_start() for agent in agents)
    write_json(run.endpoint, {"url": "https://127.0.0.1:4711"})
    assert all(agent.may_start() for agent in agents)
    agents[1].prepare()
    path = run.reserved / "reserved-0" / "bootstrap.json"
    assert str(path) in agents[0].command
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_bootstrap(path).instances == ("reserved-0/0", "reserved-0/1")
    assert read_bootstrap(path).pool == "reserved"


def test_the_trainer_is_wanted_by_a_file_and_gets_on_by_steps(run):
    trainer = roles_of(job_with(), run)[-1]
    assert not trainer.may_start()
    write_json(run.wanted, {"train": False})
    assert not trainer.may_start()
    write_json(run.wanted, {"train": True})
    assert trainer.may_start()
    assert trainer.progress() == 0
    run.metrics.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert trainer.progress() == 2
