"""What the core is told of the fleet: machines of the job, in engines."""

from __future__ import annotations

from rlboost_runtime.coordinator.tunables import core_config
from rlboost_runtime.job import Budget, CloudOffer, Job, ReasoningGym, Rollout, Spot, TinyModel


def job_on(*offers: CloudOffer, tensor_parallel: int = 1, budget: float | None = None) -> Job:
    return Job(
        name="told",
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
        rollout=Rollout(
            engine="vllm", tensor_parallel=tensor_parallel, spot=Spot(max_instances=4, any_of=list(offers))
        ),
        budget=Budget(max_usd_per_hour=budget),
    )


EIGHT = CloudOffer(infra="aws/us-east-2", accelerators="H100:8", max_price_usd_per_hour=20.0)
ONE = CloudOffer(infra="aws/us-east-2", accelerators="H100:1", max_price_usd_per_hour=3.0)


def test_a_bound_on_machines_is_a_bound_on_their_engines() -> None:
    config = core_config(job_on(EIGHT, tensor_parallel=2))
    assert (config.instances_per_machine, config.max_spot_instances) == (4, 16)


def test_money_bounds_machines_not_engines() -> None:
    config = core_config(job_on(EIGHT, budget=45.0))
    assert (config.instances_per_machine, config.max_spot_instances) == (8, 16)


def test_prices_that_the_job_does_not_state_bound_no_machines() -> None:
    unstated = EIGHT.model_copy(update={"max_price_usd_per_hour": None})  # some $11.56 on the market
    for offers in ([unstated], [EIGHT, unstated]):
        config = core_config(job_on(*offers, budget=5.0))
        assert config.max_spot_instances == 32, "what is sold for less than expected can be bought"


def test_of_unlike_machines_the_one_with_the_cheapest_tokens_counts() -> None:
    config = core_config(job_on(EIGHT, ONE))
    assert (config.instances_per_machine, config.max_spot_instances) == (8, 32), "1.4 each, or up to 3"
    config = core_config(job_on(EIGHT, ONE.model_copy(update={"max_price_usd_per_hour": 1.0})))
    assert (config.instances_per_machine, config.max_spot_instances) == (1, 4)


def test_machines_that_fetch_vllm_may_take_longer_to_dial_in() -> None:
    brings = job_on(ONE)
    args = brings.rollout.engine_args.model_copy(update={"python": "/opt/vllm/bin/python"})
    has = brings.model_copy(update={"rollout": brings.rollout.model_copy(update={"engine_args": args})})
    assert core_config(brings).boot_deadline_s == 2 * core_config(has).boot_deadline_s
