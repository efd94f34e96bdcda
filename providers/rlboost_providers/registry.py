"""Which providers a job's machines come from; each is loaded when a job needs it, its SDK later.

A head is bought like a machine of `rollout.spot.on_demand_floor`, except for what it runs when it boots.
"""

from __future__ import annotations

import contextlib
from operator import itemgetter

from rlboost_providers.base.accelerators import bandwidth
from rlboost_providers.base.alerts import BudgetAlerts
from rlboost_providers.base.images import ImageStore
from rlboost_providers.base.provider import Ability, CanSweep, Provider
from rlboost_providers.base.tags import owner_of
from rlboost_providers.base.traits import cloud_traits, egress_micro_usd_per_gb
from rlboost_runtime.core.base.cost_model import Prices
from rlboost_runtime.core.base.token_cost import MachineKind, Measured, usd_per_token
from rlboost_runtime.errors import ConfigError, RLBoostError
from rlboost_runtime.fit.shape import find_shape
from rlboost_runtime.job import CloudOffer, Job, LocalOffer, SshOffer, Trainer
from rlboost_runtime.money import MICRO_USD_PER_USD
from rlboost_runtime.run.folder import RunFolder, home

BYTES_PER_WEIGHT = 2
"""Of a published version: bfloat16."""


def provider_for(job: Job, run: RunFolder, owner: str | None = None) -> Provider:
    """Return the provider of the job's spot offers: one for all of them. `owner`: whose machines these are;
    None: of this home. Raises `ConfigError` where a trace, a machine type or a cloud is unusable."""
    from rlboost_providers.base.multi import MultiProvider

    providers = providers_of(job, run, owner)
    if len(providers) == 1:
        return next(iter(providers.values()))
    return MultiProvider(providers)


def head_offer(trainer: Trainer) -> CloudOffer:
    """Return the entry of `rollout.spot.any_of` that would buy the same machine as the job's head."""
    return CloudOffer(
        infra=trainer.infra,
        accelerators=str(trainer.accelerators),
        via=trainer.via,
        instance_type=trainer.instance_type,
        image=trainer.image,
        disk_gb=trainer.disk_size_gb,
        disk_mib_per_s=None if trainer.disk_mib_per_s == "auto" else trainer.disk_mib_per_s,
        disk_tier=trainer.disk_tier,
        max_price_usd_per_hour=trainer.max_price_usd_per_hour,
    )


def _node_offer(trainer: Trainer) -> CloudOffer:
    """Return what the trainer's further nodes are bought from, like the head where it is bought."""
    return head_offer(trainer) if trainer.node_offer is None else trainer.node_offer


def head_provider(job: Job, run: RunFolder | None) -> Provider:
    """Return the provider of the machine that is bought for the job's head; without a run it is only asked
    for offers. Raises `ConfigError` where the machine type is not known, or its price neither."""
    trainer = job.trainer
    offer = head_offer(trainer)
    if trainer.via == "skypilot":
        from rlboost_providers.skypilot.provider import HeadTerms, SkyPilotProvider

        return SkyPilotProvider(
            home() / "sweep" if run is None else run.path,
            [offer],
            head=HeadTerms(trainer.role, trainer.head_ports),
        )
    if offer.cloud == "aws":
        from rlboost_providers.aws.machines import head_pool
        from rlboost_providers.aws.provider import AwsProvider

        return AwsProvider([head_pool(offer, trainer)], owner_of(home()))
    from rlboost_providers.gcp.machines import head_pools
    from rlboost_providers.gcp.provider import GcpProvider

    return GcpProvider(head_pools(offer, trainer), owner_of(home()))


def head_usd_per_hour(job: Job) -> float | None:
    """Return the likely hourly price of the job's head, for plans: as the shipped table has it, or else
    SkyPilot's catalogue where that is to buy it; None where it is not known."""
    trainer = job.trainer
    if not trainer.is_bought or trainer.price_usd_per_hour:
        return trainer.price_usd_per_hour
    from rlboost_providers.base.prices import on_demand_prices

    known = on_demand_prices(head_offer(trainer))
    limit = trainer.max_price_usd_per_hour
    if not known and limit is None and trainer.via == "skypilot":
        with contextlib.suppress(RLBoostError):  # renting reports what is wrong, and the price
            offers = head_provider(job, None).offers()
            known = [offer.price_micro_usd_per_hour / MICRO_USD_PER_USD for offer in offers]
    if not known:
        return limit
    return min(known) if limit is None else min(min(known), limit)


def has_market(job: Job) -> bool:
    """Return True if a market process has to run beside the job."""
    return any(offer.market is not None for offer in job.rollout.spot.local_offers)


def expected_usd_per_hour(offer: LocalOffer | SshOffer | CloudOffer) -> float | None:
    """Return what a machine of `offer` is likely to cost, for plans; None where nobody knows."""
    if not isinstance(offer, CloudOffer):
        return offer.price_usd_per_hour
    from rlboost_providers.base.prices import expected_usd_per_hour as of_cloud

    return of_cloud(offer)


def cheapest_offer(job: Job) -> LocalOffer | SshOffer | CloudOffer:
    """Return the offer of the job whose tokens are likely to cost least; the first where nobody knows a
    price."""
    offers, before = job.rollout.spot.any_of, expected_before(job)
    known = [
        (usd_per_token(kind, price + storage_usd_per_hour(offer, spot=True), egress, before), offer)
        for offer in offers
        if (price := expected_usd_per_hour(offer)) is not None
        for kind in (machine_kind(job, offer.accelerators, offer.infra),)
        for egress in (egress_usd_per_gb(job, offer),)
    ]
    return min(known, key=itemgetter(0), default=(0.0, offers[0]))[1]


def machine_kind(job: Job, accelerators: str | None, place: str) -> MachineKind:
    """Return what a spot machine with `accelerators` is for the rank of offers."""
    gpus = accelerators or ""
    per_engine = job.rollout.tensor_parallel * bandwidth(gpus)
    return MachineKind(gpus.partition(":")[0], job.rollout.engines_on(accelerators), per_engine, place)


def expected_before(job: Job) -> Measured:
    """Return what is known before a run of the job has measured anything: the size of its weights, where its
    model's configuration is on this machine."""
    try:
        shape = find_shape(job.model)
    except ConfigError:  # whoever loads the model reports it
        shape = None
    return Measured(whole_bytes=0.0 if shape is None else BYTES_PER_WEIGHT * shape.parameters)


def storage_usd_per_hour(offer: LocalOffer | SshOffer | CloudOffer, *, spot: bool) -> float:
    """Return what a machine's disk and public address cost at list prices."""
    if not isinstance(offer, CloudOffer):
        return 0.0
    traits = cloud_traits(offer.cloud)
    micro_usd = traits.storage_micro_usd_per_hour(offer.disk_gb, spot=spot, mib_per_s=offer.disk_mib_per_s)
    return micro_usd / MICRO_USD_PER_USD


def prices_of(job: Job) -> Prices:
    """Return what the job's machines are likely to cost, those of its cheapest offer; 0: nobody knows."""
    return prices_beside(job, head_usd_per_hour(job))


def prices_beside(job: Job, head: float | None) -> Prices:
    """Return the same for a head of which `head_usd_per_hour` is known already: SkyPilot takes its time."""
    offer = cheapest_offer(job)
    reserved = (head or 0.0) * (1 + job.trainer.bought_nodes)
    return Prices(reserved, expected_usd_per_hour(offer) or 0.0, egress_usd_per_gb(job, offer))


def egress_usd_per_gb(job: Job, offer: LocalOffer | SshOffer | CloudOffer) -> float:
    """Return what a gigabyte of weights from the job's head to a machine of `offer` costs."""
    match offer:
        case LocalOffer():
            return 0.0
        case SshOffer():
            return egress_micro_usd_per_gb(job.trainer.place, None, None) / MICRO_USD_PER_USD
    micro_usd = egress_micro_usd_per_gb(job.trainer.place, offer.infra, offer.egress_usd_per_gb)
    return micro_usd / MICRO_USD_PER_USD


def providers_of(job: Job, run: RunFolder, owner: str | None = None) -> dict[str, Provider]:
    """Return the providers of the job's spot offers by name; see `provider_for`."""
    spot, owner = job.rollout.spot, owner or owner_of(home())
    clouds = [offer for offer in spot.any_of if isinstance(offer, CloudOffer)]
    kinds = (True, False) if spot.on_demand_floor else (True,)  # spot machines; machines on demand
    providers: dict[str, Provider] = {}
    if spot.local_offers:
        from rlboost_providers.local.provider import LocalProvider

        providers["local"] = LocalProvider(run.path, spot.local_offers, max_instances=spot.max_instances)
    if own := [offer for offer in spot.any_of if isinstance(offer, SshOffer)]:
        from rlboost_providers.ssh.provider import SshProvider

        providers["ssh"] = SshProvider(own, owner, head_place=job.trainer.place)
    direct = [offer for offer in clouds if offer.via == "direct"]
    if direct or job.trainer.bought_nodes:
        providers |= _direct(job, direct, kinds, owner)
    if through := [offer for offer in clouds if offer.via == "skypilot"]:
        from rlboost_providers.skypilot.provider import SkyPilotProvider

        providers["skypilot"] = SkyPilotProvider(
            run.path, through, on_demand=False in kinds, head_place=job.trainer.place
        )
    for name, provider in providers.items():
        require_ends(name, provider, allowed=any(offer.allow_unlisted for offer in clouds))
    return providers


def _direct(job: Job, offers: list[CloudOffer], kinds: tuple[bool, ...], owner: str) -> dict[str, Provider]:
    """Return the providers of `offers`, and of the trainer's further nodes."""
    providers: dict[str, Provider] = {}
    trainer, head = job.trainer, job.trainer.place
    node = _node_offer(trainer) if trainer.bought_nodes else None
    nodes = "" if node is None else node.cloud
    of_aws = [offer for offer in offers if offer.cloud == "aws"]
    if of_aws or nodes == "aws":
        from rlboost_providers.aws import machines as aws
        from rlboost_providers.aws.provider import AwsProvider

        aws_pools = [pool for spot in kinds for pool in aws.pools_of(of_aws, spot=spot, head=head)]
        if node is not None and nodes == "aws":
            aws_pools.append(aws.node_pool(node, trainer))
        providers["aws"] = AwsProvider(aws_pools, owner)
    of_gcp = [offer for offer in offers if offer.cloud == "gcp"]
    if of_gcp or nodes == "gcp":
        from rlboost_providers.gcp import machines as gcp
        from rlboost_providers.gcp.provider import GcpProvider

        gcp_pools = [pool for spot in kinds for pool in gcp.pools_of(of_gcp, spot=spot, head=head)]
        if node is not None and nodes == "gcp":
            gcp_pools += gcp.node_pools(node, trainer)
        providers["gcp"] = GcpProvider(gcp_pools, owner)
    return providers


def sweeper(cloud: str) -> CanSweep:
    """Return a provider that finds all machines of ours in `cloud`, whatever jobs there are. Raises
    `ConfigError` for a cloud that is asked through its jobs only."""
    if cloud == "aws":
        from rlboost_providers.aws.provider import AwsProvider

        return AwsProvider([], owner_of(home()))
    if cloud == "gcp":
        from rlboost_providers.gcp.provider import GcpProvider

        return GcpProvider([], owner_of(home()))
    if cloud == "skypilot":
        from rlboost_providers.skypilot.session import SkyPilotSweeper

        return SkyPilotSweeper(home() / "sweep")
    raise ConfigError(f"{cloud} cannot be asked for machines by their tags", "name aws, gcp or skypilot")


def image_store(infra: str) -> ImageStore:
    """Return where images of ours are kept in a cloud, as CLOUD/REGION. Raises `ConfigError`."""
    cloud, _, region = infra.partition("/")
    if cloud == "aws" and region:
        from rlboost_providers.aws.images import AwsImages

        return AwsImages(region.partition("/")[0])
    if cloud == "gcp":
        from rlboost_providers.gcp.images import GcpImages

        return GcpImages()
    raise ConfigError(f"images are not kept in {infra}", "write aws/REGION or gcp")


def budget_alerts(cloud: str, email: str | None, billing_account: str | None) -> BudgetAlerts:
    """Return the budgets of an account at a cloud. Raises `ConfigError`."""
    if cloud == "aws":
        from rlboost_providers.aws.alerts import AwsAlerts

        return AwsAlerts(email)
    if cloud == "gcp":
        if not billing_account:
            raise ConfigError(
                "Google's budgets belong to a billing account",
                "add --billing-account ID (`gcloud billing accounts list` shows it)",
            )
        from rlboost_providers.gcp.alerts import GcpAlerts

        return GcpAlerts(billing_account)
    raise ConfigError(f"{cloud} has no budget alerts that RLBoost can set", "name aws or gcp")


def require_ends(name: str, provider: Provider, *, allowed: bool) -> None:
    """Raise `ConfigError` for a cloud in which a forgotten machine would cost money for ever."""
    if provider.abilities & {Ability.FINDS_BY_TAG, Ability.TIME_TO_LIVE} or allowed:
        return
    raise ConfigError(
        f"{name} can neither list machines by tag nor give them a time to live: machines that a crash"
        " leaves there would keep costing money unnoticed",
        "use another cloud, or accept it by allow_unlisted: true in its entry of rollout.spot.any_of",
    )
