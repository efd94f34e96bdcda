"""Machines that may vanish: where they are had, for how much, and how many.

Generation: the engines and the machines that they run on.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlboost_providers.base.traits import cloud_traits, known_clouds
from rlboost_runtime.job.base import MAX_USD, Host, Model, Seed, check_zone

Accelerators = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+(:[1-9][0-9]{0,3})?$")]
"""A device and how many of it a machine has, such as H100:8; without a number it is one."""


def num_devices(accelerators: str) -> int:
    """Return the number in `Accelerators`."""
    return int(accelerators.rpartition(":")[2]) if ":" in accelerators else 1


class Market(Model):
    """A spot market on this machine: adds capacity and takes machines away by real SIGKILLs."""

    trace: str | None = None
    """File of `time_ms,add|remove,node` rows, relative to the job file; used instead of the seed."""
    seed: Seed = 0
    """Seed of random lifetimes and absences."""
    mean_lifetime_s: float = Field(default=60.0, gt=0)
    """Mean time until a machine is preempted."""
    mean_absence_s: float = Field(default=10.0, ge=0)
    """Mean time until its capacity comes back."""
    notice_fraction: float = Field(default=0.2, ge=0, le=1)
    """Share of preemptions that are announced, spread evenly."""
    notice_s: float = Field(default=5.0, gt=0)
    """Seconds of notice before an announced preemption."""


class LocalOffer(Model):
    """Spot machines as processes on this machine."""

    infra: Literal["local"]
    """Where the machines are; local: processes on this machine."""
    accelerators: Accelerators = "cpu"
    """What a machine stands for; cpu:2 has two devices, hence two engines."""
    price_usd_per_hour: float = Field(default=0.0, ge=0, le=MAX_USD)
    """Illustrative hourly price of a machine in the cost report; nothing is billed."""
    preload: bool = False
    """Fork engines from one process that has imported torch, so that a machine boots in about a second. For
    demonstrations: machines elsewhere import torch themselves. Only for engine transformers on CPUs under
    Linux; ignored otherwise."""
    market: Market | None = None
    """A simulated market that adds and preempts machines; null: machines stay until `rlboost preempt`."""


class SshOffer(Model):
    """Machines of your own, reached by SSH: used while they can be reached."""

    infra: Literal["ssh"]
    """Where the machines are; ssh: the hosts below."""
    hosts: list[Host] = Field(min_length=1)
    """USER@HOST, USER@HOST:PORT, or a name from ~/.ssh/config; one machine each."""
    accelerators: Accelerators | None = None
    """GPU and number of them per host, such as H100:8; null: one engine for the whole host."""
    price_usd_per_hour: float = Field(default=0.0, ge=0, le=MAX_USD)
    """Hourly price of a machine in the cost report; nothing is billed."""
    jump_host: str | None = None
    """Host through which the others are reached; null: as in ~/.ssh/config."""
    identity_file: str | None = None
    """Private key; null: those of ssh-agent and ssh's defaults."""
    python: str = "python3"
    """Python on the hosts that has rlboost[run] and the engine installed."""
    folder: str = "~/.rlboost"
    """Where machines keep their files on the hosts."""

    @model_validator(mode="after")
    def _hosts_differ(self) -> Self:
        if twice := [host for host in self.hosts if self.hosts.count(host) > 1]:
            raise ValueError(f"hosts has {twice[0]} twice, but is one machine each; remove one")
        return self


DiskTier = Literal["low", "medium", "high", "ultra", "best"]
"""SkyPilot's tiers of disks."""


def throughput_problem(
    cloud: str, via: str, accelerators: str | None, mib_per_s: int | None, tier: str | None
) -> str | None:
    """Return why a disk of a machine with these GPUs in `cloud` cannot have this throughput or tier, with
    what to do; None: it can."""
    if tier is not None and via != "skypilot":
        return f"disk_tier is SkyPilot's, but via is {via}; write disk_mib_per_s"
    if mib_per_s is None:
        return None
    if via != "direct":
        return f"disk_mib_per_s is not asked for in {cloud} via {via}; write disk_tier"
    sold = cloud_traits(cloud).throughput_sold(accelerators)
    if sold is None:
        return f"disk_mib_per_s is not sold in {cloud} for machines with {accelerators}; remove it"
    if sold.included <= mib_per_s <= sold.most:
        return None
    return f"disk_mib_per_s is {mib_per_s}; {cloud} has {sold.included} to {sold.most}; write one of these"


class CloudOffer(Model):
    """Spot machines of a cloud."""

    infra: str = Field(pattern=rf"^({'|'.join(known_clouds())})(/[a-zA-Z0-9-]+){{0,2}}$")
    """CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE, such as aws/us-east-2."""
    accelerators: Accelerators
    """GPU and number of them per machine, such as H100:8."""
    via: Literal["skypilot", "direct"] = "skypilot"
    """skypilot: any cloud that it supports; direct: the API of aws or gcp itself, on aws with your own
    bids."""
    max_price_usd_per_hour: float | None = Field(default=None, gt=0, le=MAX_USD)
    """Highest hourly price of a machine. aws, direct: your bid, enforced by EC2; otherwise dearer machines
    are not launched. null: up to the on-demand price."""
    instance_type: str | None = None
    """The cloud's machine type, such as p5.48xlarge; null: one with these GPUs."""
    image: str | None = None
    """The cloud's machine image. direct: one with rlboost (docs/clouds.md), or null: the cloud's own, onto
    which rlboost is installed; skypilot: null is SkyPilot's default."""
    disk_gb: int = Field(default=200, ge=20, le=65_536)
    """Size of the machine's disk, in GB."""
    disk_mib_per_s: int | None = Field(default=None, ge=1)
    """Direct: throughput of the disk; aws: 125 to 1000 MiB/s, gcp with H100 or newer: 140 to 2400; null: the
    disk's own, 125 on aws."""
    disk_tier: DiskTier | None = None
    """skypilot: its tier of the disk; null: SkyPilot's own, medium."""
    egress_usd_per_gb: float | None = Field(default=None, ge=0, le=MAX_USD)
    """Price of a gigabyte from the head to such a machine; null: the list price of the head's cloud from its
    region to this one (docs/cost-report.md)."""
    allow_unlisted: bool = False
    """Accept a cloud that can neither list RLBoost's machines nor expire them: you must find what a crash
    leaves there."""

    @model_validator(mode="after")
    def _can_be_direct(self) -> Self:
        cloud, _, place = check_zone(self.infra).partition("/")
        if self.via == "direct" and (not cloud_traits(cloud).is_direct or not place):
            raise ValueError(
                f"infra {self.infra} cannot be used direct; write aws/REGION or gcp/REGION, or via: skypilot"
            )
        disk = self.disk_mib_per_s, self.disk_tier
        if problem := throughput_problem(cloud, self.via, self.accelerators, *disk):
            raise ValueError(problem)
        return self

    @property
    def cloud(self) -> str:
        """The first part of `infra`."""
        return self.infra.partition("/")[0]

    @property
    def region(self) -> str | None:
        """The second part of `infra`."""
        return [*self.infra.split("/"), None][1]

    @property
    def zone(self) -> str | None:
        """The third part of `infra`."""
        return [*self.infra.split("/"), None, None][2]

    @property
    def price_usd_per_hour(self) -> float:
        """The most that a machine may cost; 0 where nothing is said."""
        return 0.0 if self.max_price_usd_per_hour is None else self.max_price_usd_per_hour


class Spot(Model):
    """The preemptible pool."""

    any_of: list[LocalOffer | SshOffer | CloudOffer] = Field(
        default=[LocalOffer(infra="local")], min_length=1
    )
    """Offers; of those available the one whose tokens cost least is taken first."""
    min_instances: int = Field(default=0, ge=0)
    """Fewest machines while the run generates."""
    max_instances: int = Field(default=3, ge=0, le=10_000)
    """Most machines; the useful number is learned. 0: the reserved node does everything."""
    on_demand_floor: int = Field(default=0, ge=0)
    """Without spot capacity, on-demand machines from the same entries fill the fleet up to this number; at
    most min_instances. 0: spot machines only."""

    @property
    def local_offers(self) -> list[LocalOffer]:
        """Those that are processes on this machine."""
        return [offer for offer in self.any_of if isinstance(offer, LocalOffer)]

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.min_instances > self.max_instances:
            raise ValueError(
                f"min_instances {self.min_instances} exceeds max_instances {self.max_instances};"
                f" write at most {self.max_instances}, or raise max_instances"
            )
        if self.on_demand_floor > self.min_instances:
            raise ValueError(
                f"on_demand_floor {self.on_demand_floor} exceeds min_instances {self.min_instances}: more"
                f" are not always wanted; write at most {self.min_instances}, or raise min_instances"
            )
        return self


class EngineArgs(Model):
    """Options of the engine."""

    max_running: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Responses that one engine decodes at once; auto: follows from its measured KV cache."""
    tokens_per_s_per_response: float | None = Field(default=None, gt=0)
    """Slows generation down, so that a tiny model takes as long as a large one; null: full speed."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of one engine."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engine's weights."""
    python: str | None = None
    """vllm: Python in which vLLM is installed; null: RLBOOST_VLLM_PYTHON, else the venv beside the
    agent's."""
    enforce_eager: bool = False
    """vllm: compile nothing; starts minutes sooner, decodes more slowly. Always so in builds for CPUs."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """vllm: share of the GPU's memory for weights and cache; null: vLLM's own default."""
    kv_cache_mib: int | None = Field(default=None, ge=1)
    """vllm: MiB of KV cache; null: the rest of the GPU's share, or on CPUs what max_running contexts need."""
    fp8: bool = False
    """vllm: weights in fp8; needs a GPU of compute capability 8.9. Watch the mismatch with the trainer."""
    speculative: Literal["ngram", "suffix"] | None = None
    """vllm: speculative decoding from earlier text; switched off automatically while it measures slower."""


VLLM_OPTIONS = ("python", "enforce_eager", "gpu_memory_utilization", "kv_cache_mib", "fp8", "speculative")
"""Fields of `EngineArgs` that no other engine understands."""


class Rollout(Model):
    """Generation."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Inference engine on every instance; vllm runs in its own Python (docs/engines.md)."""
    tensor_parallel: int = Field(default=1, ge=1)
    """vllm: GPUs of one engine. A machine runs one engine per so many of its GPUs, each with an agent of its
    own; the reserved node runs trainer.local_engines of them."""
    engine_args: EngineArgs = EngineArgs()
    """Options of the engine."""
    vllm_args: dict[str, Any] = Field(default={})  # values of vLLM's own options
    """vllm: more options of its EngineArgs, by their names there; those that RLBoost sets are refused."""
    spot: Spot = Spot()
    """The preemptible pool."""
    seeding_initial_s: float = Field(default=10.0, ge=0)
    """First seeding window (T_init), in seconds; adapted from then on."""
    use_priors: bool = True
    """Begin with what the newest run of the same model, machines and workload measured
    (docs/concepts.md)."""

    def engines_on(self, accelerators: str | None) -> int:
        """Return how many engines a spot machine with `accelerators` runs: at least one."""
        return max(1, num_devices(accelerators or "") // self.tensor_parallel)

    def most_spot_engines(self, *, here: bool = False) -> int:
        """Return the most engines that spot machines run: all of them, or those on this very machine."""
        offers = self.spot.local_offers if here else self.spot.any_of
        per_machine = (self.engines_on(offer.accelerators) for offer in offers)
        return self.spot.max_instances * max(per_machine, default=0)

    @model_validator(mode="after")
    def _engines_fill_machines(self) -> Self:
        for offer in self.spot.any_of:
            is_counted = isinstance(offer, CloudOffer) or ":" in (offer.accelerators or "")
            if is_counted and num_devices(offer.accelerators or "") % self.tensor_parallel:
                raise ValueError(
                    f"tensor_parallel is {self.tensor_parallel}, which does not divide the devices of"
                    f" {offer.accelerators} in spot.any_of; write a number that does"
                )
        return self

    @model_validator(mode="after")
    def _options_are_the_engines(self) -> Self:
        if self.engine == "vllm":
            return self
        if self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, but the engine {self.engine} uses one device;"
                " write engine: vllm, or remove it"
            )
        if self.vllm_args:
            raise ValueError(
                f"vllm_args has options of vllm, but the engine is {self.engine};"
                " write engine: vllm, or remove them"
            )
        defaults = EngineArgs()
        for name in VLLM_OPTIONS:
            if getattr(self.engine_args, name) != getattr(defaults, name):
                raise ValueError(
                    f"engine_args has {name}, an option of vllm, but the engine is {self.engine};"
                    " write engine: vllm, or remove it"
                )
        return self
