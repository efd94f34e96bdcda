"""The reserved node: whose machine it is, how the policy is trained there, and what becomes of it."""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlboost_providers.base.traits import cloud_traits, known_clouds
from rlboost_runtime.job.base import MAX_USD, Host, Model, check_zone
from rlboost_runtime.job.rollout import CloudOffer, DiskTier, num_devices, throughput_problem

OWN_MACHINE = ("hosts", "jump_host", "identity_file", "price_usd_per_hour", "location")
"""Fields of `Trainer` that tell of a machine of the user's own."""
BOUGHT_MACHINE = (
    *("via", "instance_type", "image", "disk_gb", "disk_mib_per_s", "disk_tier", "max_price_usd_per_hour"),
    *("role", "private_address", "allow_unended", "ssh_from"),
    *("reservation", "flex_start_hours", "max_wait_minutes"),
)
"""Fields of `Trainer` that tell of a machine that is bought for it."""
HEAD_ELSEWHERE = ("hosts", "jump_host", "identity_file", "python", "folder", *BOUGHT_MACHINE)
"""Fields of `Trainer` that say where a head elsewhere is."""
HEAD_PORTS = (7410, 7411)
"""Control port and bytes port of a head that is bought: below the range from which Linux takes free ports."""
NODE_PORT = 7412
"""Where the nodes of a trainer meet on a head that is bought, on its private address only."""
_HEAD_CLOUDS = tuple(name for name, traits in known_clouds().items() if traits.can_host_head)


class Trainer(Model):
    """The reserved node."""

    infra: str = Field(
        default="local", pattern=rf"^(local|ssh|({'|'.join(_HEAD_CLOUDS)})(/[a-z0-9-]+){{0,2}})$"
    )
    """Where it is; local: this machine; ssh: the host below; aws/REGION, gcp/REGION or gcp/REGION/ZONE: a
    machine bought there on demand that ends itself; via skypilot also CLOUD alone, azure, lambda and nebius.
    Everything is copied to a head elsewhere (docs/head.md), so this machine may be off while the run
    continues."""
    hosts: list[Host] = Field(default=[], max_length=1)
    """ssh: the machine, as USER@HOST, USER@HOST:PORT, or a name from ~/.ssh/config."""
    jump_host: str | None = None
    """ssh: host through which it is reached; null: as in ~/.ssh/config."""
    identity_file: str | None = None
    """ssh: private key; null: those of ssh-agent and ssh's defaults."""
    python: str | None = None
    """Elsewhere: Python there in which rlboost[train] is installed; null: RLBoost installs itself, with its
    own Python 3.11."""
    folder: str = "~/.rlboost"
    """Elsewhere: folder there for everything."""
    via: Literal["direct", "skypilot"] = "direct"
    """Bought: direct: through the API of aws or gcp itself; skypilot: in any of its clouds."""
    accelerators: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+(:[1-9][0-9]{0,3})?$")
    """GPU and number of them, such as H100:8. Bought: what to buy; local, ssh: what the machine must have, or
    null: no requirement."""
    instance_type: str | None = None
    """Bought: the cloud's machine type, such as p5.48xlarge; null: one with these GPUs."""
    image: str | None = None
    """Bought: the cloud's machine image; null: the cloud's default with the GPU's driver."""
    disk_gb: Literal["auto"] | Annotated[int, Field(ge=20, le=65_536)] = "auto"
    """Bought: disk size in GB, for weight versions, checkpoints and the token journal; auto: what model and
    keep_checkpoints need, or 500 if the model's configuration is unknown here."""
    disk_mib_per_s: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Direct: throughput of its disk; aws: 125 to 1000 MiB/s, gcp with H100 or newer: 140 to 2400; auto:
    enough to write a weight version within 30 s and a checkpoint within 5 minutes, up to the disk's most."""
    disk_tier: DiskTier | None = None
    """Bought via skypilot: SkyPilot's tier of its disk; null: SkyPilot's own, medium."""
    max_price_usd_per_hour: float | None = Field(default=None, gt=0, le=MAX_USD)
    """Bought: highest hourly price; dearer machines are not launched. null: the on-demand price."""
    reservation: str | None = Field(default=None, pattern=r"^[A-Za-z0-9/_.-]+$")
    """Bought, direct: capacity that you have reserved. aws: the cr-... of a Capacity Block or of an On-Demand
    Capacity Reservation; gcp: the reservation's name, or projects/PROJECT/reservations/NAME of another
    project; null: none."""
    flex_start_hours: float | None = Field(default=None, ge=1 / 6, le=168)
    """gcp, direct: buy by flex-start, for at most so many hours, after which Google deletes the machine;
    null: on demand, for as long as it is needed."""
    max_wait_minutes: float = Field(default=0.0, ge=0)
    """Bought: how long a launch tries again while there is no capacity; 0: it ends at once."""
    role: str | None = None
    """Bought: the head's IAM instance profile (aws) or service account (gcp), which launches spot machines;
    null: none, only the keys that `secrets` names."""
    private_address: bool = False
    """Bought: reach it at its private address, from within the cloud's network (a VPN); false: at its public
    one."""
    allow_unended: bool = False
    """Bought via skypilot: accept a cloud in which a head cannot end itself (azure, lambda, nebius): after
    its run it costs money until you end it."""
    allow_cpu: bool = False
    """For trials: continue on CPUs if a machine was bought with GPUs but detects none; false: trainer and
    engines stop with an error."""
    price_usd_per_hour: float = Field(default=0.0, ge=0, le=MAX_USD)
    """Hourly price of the machine in the cost report: `local` and `ssh` have no price list. With
    `reservation`: what an hour of it costs you; 0: the on-demand price."""
    address: str | None = Field(default=None, pattern=r"^[A-Za-z0-9.-]+$")
    """Name or IP address at which spot machines elsewhere reach this machine, on `control_port` and
    `bytes_port`; null: ssh: the host's own; local: only this machine is served."""
    control_port: int | None = Field(default=None, ge=1024, le=65_535)
    """TCP port of the head for agents that dial the coordinator; null: 7410 on a head that is bought, else a
    free one."""
    bytes_port: int | None = Field(default=None, ge=1024, le=65_535)
    """TCP port of the head for agents that fetch weights; null: 7411 on a head that is bought, else a free
    one."""
    ssh_from: list[str] = Field(default=["0.0.0.0/0"])
    """aws, direct: networks (CIDR, IPv4 or IPv6) that may open SSH to a head that is bought."""
    location: str | None = Field(default=None, pattern=rf"^({'|'.join(known_clouds())})/[^/\s]+(/[^/\s]+)?$")
    """local, ssh: the cloud that the machine is in, as CLOUD/REGION, such as aws/us-east-2, which bills
    egress of weights; null: in no cloud."""
    script: str | None = None
    """A trainer of your own: a Python file that uses the fleet (docs/own-trainer.md) and decides which fields
    of `algorithm` and `reward` have an effect."""
    local_engines: int = Field(default=1, ge=0)
    """Engines on the trainer's own GPUs that roll out during the seeding window."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer."""
    ranks: int = Field(default=1, ge=1)
    """Processes of a node over which the policy is sharded (FSDP2), one per GPU; started by torchrun."""
    context_parallel: int = Field(default=1, ge=1, le=64)
    """Ranks that share one packed row, for long responses: each has a part of its positions, and of
    attention's heads (DeepSpeed-Ulysses). Must divide the number of ranks, nodes x ranks, and the model's
    heads."""
    nodes: int = Field(default=1, ge=1)
    """Machines over which it is sharded, the head is the first. A head that is bought (aws, gcp; direct) buys
    the others, like itself and in its own zone. On machines of your own you start
    rlboost_runtime.trainer.node on the others, or say in node_offer what to buy."""
    node_offer: CloudOffer | None = None
    """local: what the other nodes are bought from, on demand, for a head of your own in the same private
    network: an entry as of rollout.spot.any_of, via direct; null: you start them."""
    node_address: str | None = Field(default=None, pattern=r"^[^\s:]+:[0-9]+$")
    """`HOST:PORT` of a head of your own for the other nodes. Traffic there is not encrypted: use a private
    network."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the trainer's arithmetic; auto: bfloat16 on GPUs, float32 on CPUs. Weights, summed
    gradients and optimizer state stay float32."""
    micro_batch_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Most tokens of one forward and backward pass: responses are packed up to this; a longer one goes alone.
    auto: 8192, or up to 32768 where the GPU has room."""
    activation_checkpointing: Literal["auto"] | bool = "auto"
    """Keep only the layers' inputs and recompute the rest: less memory, about a third more arithmetic. auto:
    only where GPU memory requires it."""
    optimizer_offload: Literal["auto"] | bool = "auto"
    """Keep the optimizer's state in main memory between its steps; auto: only where GPU memory requires it,
    or where it saves activation checkpointing."""
    checkpoint_every_steps: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Steps from one checkpoint to the next; a restarted trainer repeats the steps since the last. auto: as
    often as the disk keeps up and training stands still for at most 2% of the time."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept on disk."""

    @property
    def checkpoints_activations(self) -> bool:
        """`activation_checkpointing`; what is left to the plan is off."""
        return self.activation_checkpointing is True

    @property
    def offloads_optimizer(self) -> bool:
        """`optimizer_offload`; what is left to the plan is off."""
        return self.optimizer_offload is True

    @property
    def pass_tokens(self) -> int:
        """`micro_batch_tokens`; what is left to the plan is 8192."""
        return 8192 if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def disk_size_gb(self) -> int:
        """`disk_gb`; what is left to the plan is 500."""
        return 500 if self.disk_gb == "auto" else self.disk_gb

    @property
    def is_elsewhere(self) -> bool:
        """True if the head is another machine than the one on which the user types."""
        return self.infra != "local"

    @property
    def is_bought(self) -> bool:
        """True if the head is a machine that is bought for the run."""
        return self.infra not in ("local", "ssh")

    @property
    def head_ports(self) -> tuple[int, int]:
        """Control port and bytes port; 0: any that is free."""
        control, served = HEAD_PORTS if self.is_bought else (0, 0)
        return self.control_port or control, self.bytes_port or served

    @property
    def bought_nodes(self) -> int:
        """Machines beside the head that are bought to train with it."""
        return self.nodes - 1 if self.is_bought or self.node_offer is not None else 0

    @property
    def cloud(self) -> str:
        """The first part of `infra`: where a head that is bought is."""
        return self.infra.partition("/")[0]

    @property
    def place(self) -> str | None:
        """Where the head is, as CLOUD/REGION[/ZONE]; None: in no cloud."""
        return self.infra if self.is_bought else self.location

    @property
    def ends_itself(self) -> bool:
        """True if a head that is bought ends, as `after` says, also while nobody's machine is on."""
        return self.is_bought and (self.via == "direct" or cloud_traits(self.cloud).head_ends_itself)

    @model_validator(mode="after")
    def _ranks_share_evenly(self) -> Self:
        if self.nodes * self.ranks % self.context_parallel:
            raise ValueError(
                f"context_parallel is {self.context_parallel}, which does not divide the number of ranks,"
                f" {self.nodes * self.ranks};"
                f" write {math.gcd(self.context_parallel, self.nodes * self.ranks)}"
            )
        return self

    @model_validator(mode="after")
    def _place_is_told(self) -> Self:
        if self.infra == "ssh" and self.nodes > 1:
            raise ValueError(
                f"nodes is {self.nodes}, but a head by ssh is one machine; write 1, or start RLBoost on the"
                " head itself, with infra: local"
            )
        if self.location is not None:
            check_zone(self.location)
        if self.head_ports[0] == self.head_ports[1] != 0:
            raise ValueError(f"control_port and bytes_port are both {self.head_ports[0]}; write two ports")
        for network in self.ssh_from:
            try:
                ipaddress.ip_network(network)
            except ValueError as problem:
                raise ValueError(f"ssh_from: {problem}; write a network such as 203.0.113.7/32") from None
        if self.is_bought:
            written = None if self.disk_mib_per_s == "auto" else self.disk_mib_per_s
            if self.accelerators is None:
                raise ValueError(
                    f'accelerators is missing, but infra is {self.infra}; add accelerators: "H100:8"'
                )
            if wrong := throughput_problem(self.cloud, self.via, self.accelerators, written, self.disk_tier):
                raise ValueError(wrong)
            if self.ranks > num_devices(self.accelerators):
                raise ValueError(
                    f"ranks is {self.ranks}, one per GPU, but {self.accelerators} has"
                    f" {num_devices(self.accelerators)}; write at most that"
                )
            reserved = () if self.reservation is None else ("price_usd_per_hour",)
            self._refuse(
                tuple(name for name in OWN_MACHINE if name not in reserved), "a machine of your own", "ssh"
            )
            self._check_seller()
            self._check_capacity()
            if self.node_offer is not None:
                raise ValueError(
                    f"node_offer is for infra: local, but infra is {self.infra}, whose nodes are like the"
                    " head; remove it"
                )
            self._check_nodes(self.via)
        elif self.is_elsewhere:
            if not self.hosts:
                raise ValueError(f"hosts is missing, but infra is {self.infra}; add hosts: [ME@MACHINE]")
            self._refuse(BOUGHT_MACHINE, "a head that is bought", "aws/REGION")
        else:
            sold = () if self.node_offer is None else ("reservation", "flex_start_hours")
            self._refuse(
                tuple(name for name in BOUGHT_MACHINE if name not in sold),
                "a head that is bought",
                "aws/REGION",
            )
            self._refuse(
                tuple(name for name in HEAD_ELSEWHERE if name not in sold), "a head elsewhere", "ssh"
            )
            if self.node_offer is not None:
                if self.nodes == 1:
                    raise ValueError(
                        "node_offer is for nodes beside the head, but nodes is 1; write nodes: 2"
                    )
                self._check_nodes(self.node_offer.via)
        return self

    def _check_seller(self) -> None:
        check_zone(self.infra)
        traits = cloud_traits(self.cloud)
        if self.via == "direct":
            parts = len(self.infra.split("/"))
            if not traits.is_direct or not 2 <= parts <= (3 if traits.head_may_name_zone else 2):
                raise ValueError(
                    f"infra {self.infra} cannot be bought direct; write aws/REGION or gcp/REGION,"
                    " or via: skypilot"
                )
            if self.allow_unended:
                raise ValueError("allow_unended is for via: skypilot, but via is direct; remove it")
            return
        if self.role is not None and not traits.skypilot_takes_role:
            raise ValueError(
                f"role is {self.role}, but SkyPilot gives machines of {self.cloud} a role of its own;"
                " remove it"
            )
        if not self.ends_itself and not self.allow_unended:
            ends_itself = (name for name, each in known_clouds().items() if each.head_ends_itself)
            raise ValueError(
                f"infra {self.infra} is a cloud in which a head cannot end itself without your account's key,"
                " which stays on your machine: while that is off it costs until you end it; write"
                f" {' or '.join(ends_itself)}, or allow_unended: true"
            )

    def _check_capacity(self) -> None:
        asked = "reservation" if self.reservation is not None else "flex_start_hours"
        if self.reservation is None and self.flex_start_hours is None:
            return
        if self.via != "direct":
            raise ValueError(
                f"{asked} is for via: direct; SkyPilot takes reservations from specific_reservations in"
                " ~/.sky/config.yaml, so remove it here"
            )
        if self.reservation is not None and self.flex_start_hours is not None:
            raise ValueError("reservation and flex_start_hours exclude each other; remove one")
        traits = cloud_traits(self.cloud)
        if self.reservation is not None and not re.fullmatch(traits.reservation_pattern, self.reservation):
            raise ValueError(
                f"reservation is {self.reservation}; write {traits.reservation_example}, as {self.cloud}"
                " names it"
            )
        if self.flex_start_hours is not None and not traits.has_flex_start:
            raise ValueError(f"flex_start_hours is not asked for in {self.cloud}; remove it")

    def _check_nodes(self, via: str) -> None:
        if self.node_address is not None:
            raise ValueError(
                "node_address is for nodes that you start; those that are bought find the head: remove it"
            )
        if self.nodes > 1 and via != "direct":
            raise ValueError(
                f"nodes is {self.nodes}, which are bought via: direct only: SkyPilot puts each cluster where"
                " it finds capacity, not beside the head"
            )
        if self.nodes > 1 and self.local_engines == 0:
            raise ValueError(
                f"nodes is {self.nodes}, but local_engines is 0: a node's engines are how the head knows"
                " that it lives; write at least 1"
            )

    def _refuse(self, names: tuple[str, ...], what_for: str, infra: str) -> None:
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(
                    f"{name} is for {what_for}, but infra is {self.infra}; write infra: {infra}, or remove it"
                )

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> Self:
        is_told = self.node_address is not None or self.node_offer is not None
        if self.infra == "local" and self.nodes > 1 and not is_told:
            raise ValueError(
                f"nodes is {self.nodes}, but there is no node_address; write HOST:PORT of the head"
            )
        return self


class After(Model):
    """When a rented head shuts down; it does so itself, also while no other machine is on."""

    done: Literal["down", "stay"] = "down"
    """down: it ends itself as soon as everything of the run is at `output` or was fetched, else after
    idle_minutes. stay: it stays, and costs money, until `rlboost down`."""
    failed: Literal["down", "stay"] = "down"
    """The same for a run that failed or was stopped; results not fetched within idle_minutes are lost."""
    idle_minutes: float = Field(default=15.0, gt=0)
    """It ends itself after this time without a running run and without commands: after the run, after a
    crash, and after an `up` without a `launch`."""
    max_hours: float | None = Field(default=None, gt=0)
    """It ends itself, and with it the run and its machines, this long after its first boot, whatever runs
    there; null: no limit. The coordinator enforces `budget`; this limit holds even if it hangs."""
