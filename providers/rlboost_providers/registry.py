"""Which providers a job's spot machines come from; each is loaded when a job needs it, its SDK later."""

from __future__ import annotations

from operator import itemgetter

from rlboost_providers.base.provider import Ability, CanSweep, Provider
from rlboost_runtime.core.base.cost_model import Prices
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import CloudOffer, Job, LocalOffer, SshOffer
from rlboost_runtime.run.folder import RunFolder, home


def provider_for(job: Job, run: RunFolder) -> Provider:
    """Return the provider of the job's spot offers: one for all of them.

    Raises `ConfigError` where a trace, a machine type or a cloud is unusable.
    """
    from rlboost_providers.base.multi import MultiProvider

    providers = providers_of(job, run)
    if len(providers) == 1:
        return next(iter(providers.values()))
    return MultiProvider(providers)


def head_provider(job: Job, run: RunFolder | None) -> Provider:
    """Return the provider of the machine that is bought for the job's head; without a run it is only asked
    for offers.

    Raises `ConfigError` where the machine type is not known, or its price neither.
    """
    from rlboost_providers.head_offers import head_pool_provider

    return head_pool_provider(job.trainer, None if run is None else run.path)


def head_usd_per_hour(job: Job) -> float | None:
    """Return what the job's head is likely to cost, for plans; None where nobody knows."""
    if not job.trainer.is_bought:
        return job.trainer.price_usd_per_hour
    from rlboost_providers.head_offers import expected_usd_per_hour as of_head

    return of_head(job.trainer)


def has_market(job: Job) -> bool:
    """Whether a market process has to run beside the job."""
    return any(offer.market is not None for offer in job.rollout.spot.local_offers)


def expected_usd_per_hour(offer: LocalOffer | SshOffer | CloudOffer) -> float | None:
    """Return what a machine of `offer` is likely to cost, for plans; None where nobody knows."""
    if not isinstance(offer, CloudOffer):
        return offer.price_usd_per_hour
    from rlboost_providers.offers import expected_usd_per_hour as of_cloud

    return of_cloud(offer)


def cheapest_offer(job: Job) -> LocalOffer | SshOffer | CloudOffer:
    """Return the offer of the job that is likely to cost least; the first where nobody knows a price."""
    prices = [(expected_usd_per_hour(offer), offer) for offer in job.rollout.spot.any_of]
    known = [(price, offer) for price, offer in prices if price is not None]
    return min(known, key=itemgetter(0), default=prices[0])[1]


def prices_of(job: Job) -> Prices:
    """Return what the job's machines are likely to cost, those of its cheapest offer; 0: nobody knows."""
    return prices_beside(job, head_usd_per_hour(job))


def prices_beside(job: Job, head: float | None) -> Prices:
    """Return the same for a head of which `head_usd_per_hour` is known already: SkyPilot takes its time."""
    offer = cheapest_offer(job)
    egress = 0.0
    if isinstance(offer, CloudOffer):
        from rlboost_providers.base.charges import egress_micro_usd_per_gb

        egress = egress_micro_usd_per_gb(offer.cloud, offer.egress_usd_per_gb) / 1e6
    return Prices(head or 0.0, expected_usd_per_hour(offer) or 0.0, egress)


def providers_of(job: Job, run: RunFolder) -> dict[str, Provider]:
    """Return the providers of the job's spot offers by name; see `provider_for`."""
    spot = job.rollout.spot
    clouds = [offer for offer in spot.any_of if isinstance(offer, CloudOffer)]
    kinds = (True, False) if spot.on_demand_floor else (True,)  # spot machines; machines on demand
    providers: dict[str, Provider] = {}
    if spot.local_offers:
        from rlboost_providers.local.provider import LocalProvider

        providers["local"] = LocalProvider(run.path, spot.local_offers, max_instances=spot.max_instances)
    if own := [offer for offer in spot.any_of if isinstance(offer, SshOffer)]:
        providers["ssh"] = _ssh(own)
    if direct := [offer for offer in clouds if offer.via == "direct"]:
        providers |= _direct(direct, kinds)
    if through := [offer for offer in clouds if offer.via == "skypilot"]:
        from rlboost_providers.skypilot import SkyPilotProvider

        providers["skypilot"] = SkyPilotProvider(run.path, through, on_demand=False in kinds)
    for name, provider in providers.items():
        require_ends(name, provider, allowed=any(offer.allow_unlisted for offer in clouds))
    return providers


def _ssh(offers: list[SshOffer]) -> Provider:
    from rlboost_providers.base.tags import owner_of
    from rlboost_providers.ssh.provider import AS_IT_IS, SshPool, SshProvider

    pools = [
        SshPool(
            tuple(offer.hosts),
            round(offer.price_usd_per_hour * 1_000_000),
            offer.jump_host,
            offer.identity_file,
            offer.python,
            offer.folder,
            offer.accelerators or AS_IT_IS,
        )
        for offer in offers
    ]
    return SshProvider(pools, owner_of(home()))


def _direct(offers: list[CloudOffer], kinds: tuple[bool, ...]) -> dict[str, Provider]:
    from rlboost_providers.base.tags import owner_of
    from rlboost_providers.offers import aws_pools, gcp_pools

    owner = owner_of(home())
    providers: dict[str, Provider] = {}
    if aws := [offer for offer in offers if offer.cloud == "aws"]:
        from rlboost_providers.aws.provider import AwsProvider

        pools = [pool for spot in kinds for pool in aws_pools(aws, spot=spot)]
        providers["aws"] = AwsProvider(pools, owner)
    if gcp := [offer for offer in offers if offer.cloud == "gcp"]:
        from rlboost_providers.gcp.provider import GcpProvider

        found = [pool for spot in kinds for pool in gcp_pools(gcp, spot=spot)]
        providers["gcp"] = GcpProvider(found, owner)
    return providers


def sweeper(cloud: str) -> CanSweep:
    """Return a provider that finds all machines of ours in `cloud`, whatever jobs there are.

    Raises `ConfigError` for a cloud that is asked through its jobs only.
    """
    from rlboost_providers.base.tags import owner_of

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


def require_ends(name: str, provider: Provider, *, allowed: bool) -> None:
    """Raise `ConfigError` for a cloud in which a forgotten machine would cost money for ever."""
    if provider.abilities & {Ability.FINDS_BY_TAG, Ability.TIME_TO_LIVE} or allowed:
        return
    raise ConfigError(
        f"{name} can neither list machines by tag nor give them a time to live: what a crash leaves there"
        " would go on costing money unseen",
        "use another cloud, or accept it by allow_unlisted: true in its entry of rollout.spot.any_of",
    )
