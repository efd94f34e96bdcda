"""One run, whole: all sections, what goes on beside learning, and what the sections ask of one another."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlboost_runtime.job.algorithm import Algorithm
from rlboost_runtime.job.base import MAX_USD, Model
from rlboost_runtime.job.data import PromptData, ReasoningGym, data_sources
from rlboost_runtime.job.environment import Environment
from rlboost_runtime.job.evaluation import Evaluation, HeldOut
from rlboost_runtime.job.notify import NotifyTarget, variables_of
from rlboost_runtime.job.rollout import Rollout
from rlboost_runtime.job.scaling import Scaling
from rlboost_runtime.job.task import RewardSetting, TinyModel, reward_parts
from rlboost_runtime.job.trainer import After, Trainer

_BUCKET = r"^((s3|gs|az)://[a-z0-9]([a-z0-9._-]{{0,220}}[a-z0-9])?(/.*)?{})$"


class Weights(Model):
    """How weights reach the instances."""

    transfer: Literal["auto", "full", "delta", "lora"] = "auto"
    """auto: deltas where they cost less money and time; full: every version whole; delta: deltas wherever
    there is a base; lora: the frozen weights once, then only the adapters of `algorithm.lora`, which engines
    add themselves (with the others, merged weights are sent)."""
    max_deltas: int = Field(default=4, ge=1, le=64)
    """How many versions behind an instance may be and still receive deltas."""
    peers: bool = False
    """Instances of a zone also pull from one another, on a port that the zone's firewall must allow; those
    that cannot be reached only pull."""
    bucket: str | None = Field(default=None, pattern=_BUCKET.format(r"|file:///.*"))
    """s3://BUCKET/PREFIX, gs://... or az://...: the head also puts every version there, below the
    run's name, for instances to pull from; null: they pull from the head."""
    streams: int = Field(default=4, ge=1, le=32)
    """Parallel range requests per pull."""
    keep_in: str = Field(default="auto", pattern=r"^(auto|disk|/.+)$")
    """Where the head and the machines keep versions. auto: in main memory (/dev/shm) where there is room for
    them beside what the plan counts, else on the local NVMe of a bought machine, else on the disk; disk: on
    the disk; or the path of a folder on a fast disk, used where it is there and has room. After a reboot the
    head makes them again from the checkpoint."""
    chunk_bytes: int = Field(default=4 * 1024 * 1024, ge=65536, le=256 * 1024 * 1024)
    """Bytes per chunk, the unit of requests and checksums."""


class Budget(Model):
    """When to stop spending."""

    max_usd: float | None = Field(default=None, gt=0, le=MAX_USD)
    """The run ends once it has cost this much; null: no limit."""
    max_usd_per_hour: float | None = Field(default=None, gt=0, le=MAX_USD)
    """No machine is launched that would raise the hourly rate above this; null: no limit."""


class Wandb(Model):
    """Curves at Weights & Biases."""

    project: str
    """Project that the run belongs to."""
    entity: str | None = None
    """Team or user; null: your default entity."""
    offline: bool = False
    """Keep everything in the run's folder; `wandb sync` uploads it later."""


class Tracking(Model):
    """Where step metrics go beside `metrics.jsonl`."""

    tensorboard: bool = False
    """Event files in the run's folder, under tensorboard/."""
    wandb: Wandb | None = None
    """Weights & Biases, which `pip install 'rlboost[track]'` brings; null: off."""
    otlp: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """OpenTelemetry collector that gets a trace per step by OTLP over HTTP, such as http://HOST:4318; headers
    are those of OTEL_EXPORTER_OTLP_HEADERS (`secrets`). `rlboost[track]` brings the SDK; null: off."""


class Evidence(Model):
    """What a run keeps so that it can be audited afterwards; costs disk."""

    keep_journal: bool = False
    """Keep the token journal of trained steps."""
    count_tokens: bool = False
    """Have every engine count the tokens that it generates, beside its log."""


class Endpoint(Model):
    """An OpenAI-compatible endpoint on the head, served by the run's fleet."""

    port: int = Field(default=0, ge=0, lt=65536)
    """Port on the head; 0: a free one, kept through restarts (api_endpoint.json in the run's folder)."""
    max_requests: int = Field(default=256, ge=1, le=65536)
    """Responses under way at once; further requests get 429 with Retry-After."""
    trains: bool = True
    """false: the model is only served, without steps or rewards, until `rlboost down`; what `rlboost serve`
    does."""
    scaling: Scaling = Scaling()
    """trains: false: how the number of spot machines follows the load."""

    @model_validator(mode="after")
    def _only_a_served_fleet_scales(self) -> Self:
        if self.trains and self.scaling != Scaling():
            raise ValueError(
                "scaling is for a model that is only served, but trains is true: training decides the fleet's"
                " size; write trains: false, or remove scaling"
            )
        return self


class Dashboard(Model):
    """The run's page, served by the head itself."""

    port: int = Field(default=0, ge=0, lt=65536)
    """Port on the head; 0: a free one, kept through restarts (dashboard.json in the run's folder)."""
    host: str = "127.0.0.1"
    """Address to listen on. The head's loopback has plain HTTP, to be reached by an SSH tunnel; any other has
    HTTPS with the run's own certificate."""


Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


class Job(Model):
    """One run, as its job file says it."""

    name: Name
    """Lower-case letters, digits and dashes; also the run's name."""
    model: str | TinyModel
    """Folder in Hugging Face format, id of a model on the Hub, such as Qwen/Qwen3-8B, or {init: tiny}."""
    data: PromptData | list[PromptData]
    """Source of the prompts, or a list of sources to mix; a model that is only served needs none."""
    reward: RewardSetting = "reasoning_gym"
    """`file.py:function` relative to the job file, or built in: `reasoning_gym` uses the data sets' scorers,
    `math` compares with the row's `answer` as mathematics (math-verify), `exact` as text; or a list of
    several, each with a name and a weight."""
    environment: str | Environment | None = None
    """Rollouts of several turns: `file.py:Class` or `file.py:function` relative to the job file, or more
    about them; null: each rollout is one response."""
    reward_timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of one call of the reward function."""
    reward_processes: int | None = Field(default=None, ge=1)
    """Number of reward worker processes; null: a quarter of the cores, from 1 to 8."""
    reward_memory_mib: int | None = Field(default=None, ge=256)
    """Memory limit (address space) of one reward process, in MiB; null: half the machine's memory, at least
    4096."""
    reward_sandbox: Literal["auto", "required", "off"] = "auto"
    """Whether your reward functions run in bubblewrap's sandbox: auto, where the machine has it; required, or
    the run does not start."""
    reward_network: bool = False
    """Whether reward functions in the sandbox have a network, and the job's secrets in their environment."""
    algorithm: Algorithm = Algorithm()
    """The RL algorithm."""
    trainer: Trainer = Trainer()
    """The reserved node."""
    rollout: Rollout = Rollout()
    """Generation."""
    weights: Weights = Weights()
    """How weights reach the instances."""
    files: list[str] = Field(default=[])
    """Further files that the reward function needs, relative to the job file."""
    requirements: list[str] = Field(default=[])
    """pip requirements of the reward function on a head elsewhere, such as sympy==1.14."""
    env: dict[str, str] = Field(default={})
    """Environment variables of the processes on the head; spot machines do not get them."""
    secrets: list[str] = Field(default=[])
    """Names of further variables, such as HF_TOKEN, whose values are read from your environment at launch;
    kept beside the run's token, never in the job."""
    output: str | None = Field(default=None, pattern=_BUCKET.format(r"|file:///.*|/.*"))
    """s3://BUCKET/PREFIX, gs://..., az://..., or an absolute folder: checkpoints, the final model and what a
    new head needs to continue are copied there, under the run's name; null: they stay in the run's folder."""
    budget: Budget = Budget()
    """When to stop spending."""
    notify: list[NotifyTarget] = Field(default=[])
    """Webhooks and commands to notify, once each, when the run ends, spends its budget or needs attention."""
    after: After = After()
    """When a rented head shuts down."""
    evaluation: Evaluation | Annotated[list[Evaluation], Field(min_length=1)] | None = None
    """Prompts that are rolled out beside a step's own and never trained on, or a list of several such
    evaluations; null: none."""
    endpoint: Endpoint | None = None
    """Serve the model to OpenAI clients while the run is open; null: no endpoint."""
    dashboard: Dashboard | None = None
    """Serve the run's page on the head while the run is open; null: `rlboost dashboard` alone serves it."""
    tracking: Tracking = Tracking()
    """Where step metrics go beside `metrics.jsonl`."""
    evidence: Evidence = Evidence()
    """What is kept so that the run can be audited."""

    @model_validator(mode="before")
    @classmethod
    def _sft_needs_no_engine(cls, data: Any) -> Any:  # any JSON value
        """Fill in that nothing rolls out, where the job does not say otherwise."""
        if not isinstance(data, dict) or not isinstance(algorithm := data.get("algorithm"), dict):
            return data
        if algorithm.get("loss") != "sft":
            return data
        rollout, trainer = data.get("rollout", {}), data.get("trainer", {})
        if isinstance(rollout, dict) and isinstance(spot := rollout.get("spot", {}), dict):
            data = data | {"rollout": rollout | {"spot": {"max_instances": 0} | spot}}
        if isinstance(trainer, dict) and data.get("evaluation") is None:
            data = data | {"trainer": {"local_engines": 0} | trainer}
        return data

    @model_validator(mode="before")
    @classmethod
    def _serving_needs_no_prompts(cls, data: Any) -> Any:  # any JSON value
        """Fill in that there are none, where the model is only served."""
        endpoint = data.get("endpoint") if isinstance(data, dict) else None
        if isinstance(endpoint, dict) and endpoint.get("trains") is False:
            return {"data": [], **data}
        return data

    @property
    def only_serves(self) -> bool:
        """True if there is nothing to train: the fleet answers requests until it is ended."""
        return self.endpoint is not None and not self.endpoint.trains

    @model_validator(mode="after")
    def _there_are_prompts(self) -> Self:
        if self.data != []:
            return self
        if not self.only_serves:
            raise ValueError("data is an empty list; write at least one source of prompts")
        if isinstance(self.model, TinyModel) and self.model.warmup is not None:
            raise ValueError(
                "model.warmup learns from data, but there is none; write model: {init: tiny, warmup: null},"
                " or add data"
            )
        return self

    @model_validator(mode="after")
    def _routes_are_of_whole_rows(self) -> Self:
        if self.algorithm.router_replay is not None and self.trainer.context_parallel > 1:
            raise ValueError(
                f"algorithm.router_replay does not go with trainer.context_parallel"
                f" {self.trainer.context_parallel}; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _updates_can_be_in_flight(self) -> Self:
        if not self.algorithm.in_flight_updates:
            return self
        if self.environment is not None:
            raise ValueError(
                "algorithm.in_flight_updates is true, but the turns of an environment's episodes have one"
                " version; remove one of them"
            )
        if self.trainer.script is not None:
            raise ValueError(
                "algorithm.in_flight_updates is for RLBoost's own trainer, but trainer.script is set; remove"
                " one of them"
            )
        return self

    @model_validator(mode="after")
    def _a_curriculum_sees_rewards(self) -> Self:
        if all(each.curriculum is None for each in data_sources(self.data)):
            return self
        if self.algorithm.loss == "sft":
            raise ValueError("data has a curriculum, which goes by rewards, but loss sft has none; remove it")
        if self.trainer.script is not None:
            raise ValueError(
                "data has a curriculum, which is for RLBoost's own trainer, but trainer.script is set; remove"
                " one of them"
            )
        return self

    @model_validator(mode="after")
    def _sft_rents_nothing(self) -> Self:
        most = self.rollout.spot.max_instances
        if self.algorithm.loss == "sft" and most:
            raise ValueError(
                f"rollout.spot.max_instances is {most}, but loss sft rolls nothing out; write 0"
                " (trainer.local_engines roll out an evaluation)"
            )
        return self

    @property
    def episodes(self) -> Environment | None:
        """How episodes are played; None: rollouts have one turn."""
        found = self.environment
        return Environment(python=found) if isinstance(found, str) else found

    @model_validator(mode="after")
    def _episodes_are_trained(self) -> Self:
        if self.environment is None:
            if self.algorithm.advantage_level == "turn":
                raise ValueError(
                    "algorithm.advantage_level is turn, but there is no environment: a response has one turn;"
                    " remove it"
                )
            return self
        if self.algorithm.loss in ("sft", "dpo"):
            raise ValueError(
                f"environment is for rollouts that are trained one by one, but loss is {self.algorithm.loss};"
                " write another loss, or remove environment"
            )
        if self.algorithm.max_refills:
            raise ValueError(
                "a step of episodes cannot be refilled, but algorithm.max_refills is"
                f" {self.algorithm.max_refills}; remove it (spare_prompts go with an environment)"
            )
        if self.trainer.script is not None:
            raise ValueError(
                "environment is for RLBoost's own trainer, but trainer.script is set; remove one"
            )
        reaches_the_model = self.reward_network or self.reward_sandbox == "off"
        if isinstance(self.environment, Environment) and self.environment.command and not reaches_the_model:
            raise ValueError(
                "environment has a command, which reaches the model over the head's loopback, but the sandbox"
                " has no network; write reward_network: true"
            )
        server = None if self.episodes is None else self.episodes.openenv
        if server is not None and server.url is not None and not reaches_the_model:
            raise ValueError(
                "environment has a server elsewhere (openenv.url), but the sandbox has no network; write"
                " reward_network: true"
            )
        if self.endpoint is not None and not self.endpoint.trains:
            raise ValueError("environment is for training, but endpoint.trains is false; remove one of them")
        return self

    @property
    def is_scored(self) -> bool:
        """True if any response of the run gets a reward."""
        warms_up = isinstance(self.model, TinyModel) and self.model.warmup is not None
        return warms_up or (not self.only_serves and (self.algorithm.loss != "sft" or bool(self.evaluations)))

    @model_validator(mode="after")
    def _head_is_told_all(self) -> Self:
        if self.requirements and not self.trainer.is_elsewhere:
            raise ValueError(
                "requirements are for a head elsewhere, but trainer.infra is local: rewards run in this"
                " Python; install them here, and remove it"
            )
        if self.requirements and self.trainer.python is not None:
            raise ValueError(
                f"requirements are not installed into a Python of yours, {self.trainer.python}; install them"
                " there, and remove it"
            )
        if taken := [name for name in self.env if name.startswith("RLBOOST_")]:
            raise ValueError(f"env has {taken[0]}, which RLBoost sets for its own processes; remove it")
        if twice := [name for name in self.secrets if self.secrets.count(name) > 1]:
            raise ValueError(f"secrets has {twice[0]} twice; remove one")
        for field, names in (("env", self.env), ("secrets", self.secrets)):
            for name in names:
                if not name.isidentifier() or not name.isascii():
                    raise ValueError(f"{field} has {name!r}, no name of a variable; write one like HF_TOKEN")
        if broken := [name for name, value in self.env.items() if "\0" in value]:
            raise ValueError(f"env has {broken[0]} with a NUL, which ends every value; remove it")
        if twice := [name for name in self.secrets if name in self.env]:
            raise ValueError(f"secrets has {twice[0]}, and so has env; remove one of them")
        for target in self.notify:
            for name in variables_of(target):
                if name not in self.secrets and name not in self.env:
                    raise ValueError(
                        f"notify has ${{{name}}}, which neither secrets nor env has; write secrets: [{name}]"
                    )
        return self

    @property
    def evaluations(self) -> list[Evaluation]:
        """All evaluations; none: []."""
        found = self.evaluation
        return found if isinstance(found, list) else [] if found is None else [found]

    @property
    def held_out(self) -> HeldOut | None:
        """The evaluation on prompts of the training data."""
        return next((each for each in self.evaluations if isinstance(each, HeldOut)), None)

    @property
    def max_context_tokens(self) -> int:
        """Tokens of the longest prompt and the longest response that an engine is asked for."""
        longest = max((each.max_tokens or 0 for each in self.evaluations), default=0)
        return self.algorithm.max_prompt_tokens + max(self.algorithm.max_response_tokens, longest)

    @property
    def rewards(self) -> list[RewardSetting]:
        """All rewards that the job names: its own, then those of sources and evaluations."""
        sources = [*data_sources(self.data), *self.evaluations]
        return [self.reward, *(each.reward for each in sources if each.reward is not None)]

    @model_validator(mode="after")
    def _rewards_can_be_told_apart(self) -> Self:
        for reward in self.rewards:
            names = [name for name, _, _ in reward_parts(reward)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"reward has {twice[0]} twice; give each a name of its own")
        return self

    @model_validator(mode="after")
    def _evaluations_can_be_told_apart(self) -> Self:
        names = [each.name for each in self.evaluations]
        if len(names) > 1 and None in names:
            raise ValueError("evaluation has several entries, one of them without a name; add name: NAME")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"evaluation has {twice[0]} twice; each needs a name of its own")
        if sum(isinstance(each, HeldOut) for each in self.evaluations) > 1:
            raise ValueError(
                "evaluation holds prompts of the training data out twice; give all entries but one a source,"
                " dataset or reasoning_gym"
            )
        for each in self.evaluations:
            most, has = max(each.pass_at or [0]), each.samples or self.algorithm.group_size
            if most > has:
                raise ValueError(f"evaluation asks for pass@{most} of {has} samples; write samples: {most}")
            greedy = (each.temperature if each.temperature is not None else self.algorithm.temperature) == 0
            if self.algorithm.temperature == 0 and not greedy and self.rollout.engine == "transformers":
                raise ValueError(
                    f"evaluation samples at temperature {each.temperature}, which engines that train greedily"
                    " (algorithm.temperature 0) cannot; remove it, or write rollout.engine: vllm"
                )
        return self

    @model_validator(mode="after")
    def _some_prompts_are_trained_on(self) -> Self:
        data, held_out = self.data, self.held_out
        if held_out is not None and isinstance(data, ReasoningGym) and held_out.prompts >= data.size:
            raise ValueError(
                f"evaluation.prompts is {held_out.prompts}, which leaves none of data.size {data.size} to"
                f" train on; write at most {data.size - 1}"
            )
        return self

    @model_validator(mode="after")
    def _results_outlive_their_head(self) -> Self:
        after = self.after
        if not self.trainer.is_bought:
            if after != After():
                raise ValueError(
                    f"after is for a head that is bought in a cloud, but trainer.infra is"
                    f" {self.trainer.infra}: that machine stays as it is; remove it"
                )
            return self
        is_kept = self.output is not None and not self.output.startswith(("/", "file:"))
        if not is_kept and after.done == "down" and "idle_minutes" not in after.model_fields_set:
            raise ValueError(
                f"output is {self.output or 'missing'}, and the head ends itself after the run, with the"
                " model on its disk; write output: s3://BUCKET/PREFIX; or leave time to fetch it with"
                " rlboost down: after: {idle_minutes: 240}; or keep the head: after: {done: stay}"
            )
        return self

    def canonical_json(self) -> str:
        """Return the resolved job as JSON: equal text means the same job."""
        return self.model_dump_json(indent=1)
