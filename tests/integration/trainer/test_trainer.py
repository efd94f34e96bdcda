"""The trainer against a scripted coordinator over real TLS: steps, recalls, crashes, mistakes."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from rlboost_cli.runs.metrics import history_of
from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.health.glossary import GLOSSARY, described
from rlboost_runtime.health.monitor import HealthMonitor
from rlboost_runtime.job import Job, TinyModel
from rlboost_runtime.protocol.messages import (
    Checkpointed,
    DeliverGroupMessage,
    DeliverResponseMessage,
    Evaluated,
    FinishedResponse,
    GrantLeaseMessage,
    LeaseReturnedMessage,
    Message,
    RecallLeaseMessage,
    Refused,
    RunFailed,
    RunFinished,
    Sampling,
    Segment,
    StepStartedMessage,
    StepTrainedMessage,
    TrainerHello,
    TrainerWelcome,
    VersionPublishedMessage,
    encode,
    trainer_message_decoder,
)
from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.trainer.__main__ import EXIT_CANNOT_GO_ON, train
from rlboost_runtime.trainer.artifacts.output import OutputCopies
from rlboost_runtime.trainer.episodes.outcome import episode_metrics
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer
from rlboost_runtime.trainer.rollout.client import RolloutClient
from rlboost_runtime.trainer.rollout.metrics import MetricsLog
from rlboost_runtime.weights.manifest import read_manifest
from rlboost_runtime.weights.store.store import WeightStore
from tests.integration.trainer.rank_steps import stored_state

pytestmark = pytest.mark.integration

STEPS = 4
GROUPS = 4
SIZE = 4

JOB = {
    "name": "r",
    "model": {"init": "tiny", "hidden_size": 32, "num_layers": 1, "warmup": None},
    "data": {"source": "prompts.jsonl"},
    "reward": "rewards.py:score",
    "reward_timeout_s": 20.0,
    "trainer": {"checkpoint_every_steps": 1},
    "weights": {"keep_in": "disk"},
    "algorithm": {
        "group_size": SIZE, "prompts_per_step": GROUPS, "steps": STEPS, "learning_rate": 1e-3,
        "minibatches_per_step": 2, "micro_batch_responses": 4, "max_response_tokens": 6,
    },
}  # fmt: skip


class Coordinator:
    """Plays the coordinator on its own thread; made-up responses, the same ones for a step and group."""

    def __init__(self, run: RunFolder) -> None:
        self.heard: list[Message] = []
        self.on_step: Callable[[int], None] = lambda step: None
        self.on_message: Callable[[Message], None] = lambda message: None
        self.refuse_step: int | None = None
        self.quarantine: set[tuple[int, int]] = set()
        self.early_s: float | None = None
        """Each response comes so long before its group, with the lease; None: with its group."""
        self.other_early = False
        """What comes early has other tokens than what comes with the group."""
        self._run = run
        self._request: StepStartedMessage | None = None
        self._published: int | None = None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    def __enter__(self) -> "Coordinator":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def of(self, kind: type[Message]) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    async def _serve(self) -> None:
        server = await serve(self._talk, "127.0.0.1", 0, ssl=security.server_context(self._run))
        port = server.sockets[0].getsockname()[1]
        write_json(self._run.endpoint, {"url": f"https://127.0.0.1:{port}"})
        self._ready.set()
        await self._stop.wait()
        server.close()
        await server.wait_closed()

    async def _talk(self, connection: ServerConnection) -> None:
        assert connection.request.path == "/v1/trainer"
        assert security.authorised(
            connection.request.headers.get("Authorization"), security.read_token(self._run)
        )
        try:
            async for data in connection:
                message = trainer_message_decoder.decode(data)
                self.heard.append(message)
                self.on_message(message)
                for answer in self._answers(message):
                    if isinstance(answer, float):
                        await asyncio.sleep(answer)
                        continue
                    await connection.send(encode(answer))
        except ConnectionClosed:
            return

    def _singly(self) -> list[DeliverResponseMessage]:
        singles = [
            DeliverResponseMessage(group.step, group.group, place, response)
            for group in self._order
            for place, response in enumerate(group.responses)
        ]
        if not self.other_early:
            return singles
        other = np.arange(3, dtype="<i4").tobytes()
        logprobs = np.full(3, -2.0, "<f4").tobytes()
        return [
            msgspec.structs.replace(
                each, response=msgspec.structs.replace(each.response, token_ids=other, logprobs=logprobs)
            )
            for each in singles
        ]

    def _answers(self, message: Message) -> list[Message | float]:
        match message:
            case TrainerHello():
                return [TrainerWelcome(self._published)]
            case VersionPublishedMessage(version=version):
                self._published = version
            case StepStartedMessage(step=step):
                former, self._request = self._request, msgspec.structs.replace(message, keeps_lease=False)
                if former is not None and former != self._request and former.begins(self._request):
                    return [self._group(message, group) for group in range(len(message.prompts))]
                self.on_step(step)
                if step == self.refuse_step:
                    return [Refused("enough")]
                order = np.random.default_rng(step).permutation(len(message.prompts)).tolist()
                self._order = [self._group(message, group) for group in order]
                if message.keeps_lease:  # it is made by spot machines, while the one before is trained
                    return self._order
                if self.early_s is not None:
                    return [GrantLeaseMessage(step), *self._singly(), self.early_s, *self._order]
                return [self._order[0], GrantLeaseMessage(step), self._order[1], RecallLeaseMessage(step)]
            case LeaseReturnedMessage():
                return [GrantLeaseMessage(self._request.step), *self._order[2:]]
        return []

    def _group(self, request: StepStartedMessage, group: int) -> DeliverGroupMessage:
        draw = np.random.default_rng([request.step, group])
        responses = []
        for i in range(request.prompts[group].num_responses or request.group_size):
            n = int(draw.integers(1, 7))
            bad = (request.step, group) in self.quarantine and i == 0
            responses.append(
                FinishedResponse(
                    group * SIZE + i,
                    draw.integers(0, 256, n).astype("<i4").tobytes(),
                    draw.normal(-5.5, 0.1, n).astype("<f4").tobytes(),
                    (Segment("a", request.policy_version, 1), Segment("b", request.policy_version, n - 1))
                    if n > 1
                    else (Segment("a", request.policy_version, 1),),
                    "quarantined" if bad else "length" if n == 6 else "stop",
                )
            )
        return DeliverGroupMessage(request.step, group, tuple(responses))


REWARD = "def score(response, row): return (sum(map(ord, response)) % 7) / 7 + row['bonus']"


def make_run(tmp_path: Path, name: str = "r", reward: str = REWARD, **changes) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / name)
    run.files.mkdir(parents=True)
    security.create_secrets(run)
    rows = [{"prompt": f"question {i}", "bonus": i % 2} for i in range(9)]
    (run.files / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (run.files / "rewards.py").write_text(reward)
    changes["trainer"] = {**JOB["trainer"], **changes.get("trainer", {})}
    run.job_json.write_text(Job.model_validate_json(json.dumps({**JOB, **changes})).canonical_json())
    return run


@pytest.fixture(autouse=True)
def one_home(tmp_path, monkeypatch):
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))


def go(run: RunFolder) -> Path:
    state = torch.get_rng_state()
    try:
        with RolloutClient.of_run(run.path) as client:
            return train(client)
    finally:
        torch.set_rng_state(state)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def lines(run: RunFolder) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.fixture
def quiet(tmp_path) -> Path:
    """The final model of a run to which nothing happened."""
    run = make_run(tmp_path, "quiet")
    with Coordinator(run):
        return go(run)


def test_a_whole_run(tmp_path):
    run = make_run(tmp_path)
    with Coordinator(run) as coordinator:
        coordinator.quarantine = {(1, 2)}
        final = go(run)
    assert [m.version for m in coordinator.of(VersionPublishedMessage)] == [0, 1, 2, 3, 4]
    assert [(m.step, m.policy_version) for m in coordinator.of(StepStartedMessage)] == [
        (i, i) for i in range(STEPS)
    ]
    assert {m.stop_token_ids for m in coordinator.of(StepStartedMessage)} == {(257,)}
    assert len(coordinator.of(LeaseReturnedMessage)) == STEPS
    assert coordinator.of(RunFinished) == [RunFinished(str(final))]
    trained = coordinator.of(StepTrainedMessage)
    assert [m.step for m in trained] == list(range(STEPS))
    assert sorted(path.name for path in run.weights.iterdir()) == ["v000003", "v000004"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "model",
        "step-000002",
        "step-000003",
    ]
    table = lines(run)
    assert [line["step"] for line in table] == list(range(STEPS))
    assert all(np.isfinite(list(line.values())).all() for line in table)
    assert table[1]["quarantined_share"] == 1 / 16
    assert table[0]["migrated_share"] > 0.5
    assert table[0]["mismatch_kl"] > 0
    assert table[2] == trained[2].metrics
    stored, exact = (
        load_file(run.weights / "v000004" / "model.safetensors"),
        load_file(final / "model.safetensors"),
    )
    assert set(stored) == set(exact)
    assert all(torch.equal(stored[name], exact[name]) for name in stored)
    manifests = [json.loads((run.weights / v / "manifest.json").read_text()) for v in ("v000003", "v000004")]
    assert manifests[0]["content_digest"] != manifests[1]["content_digest"]
    assert manifests[0]["tied"] == [{"name": "lm_head.weight", "same_as": "model.embed_tokens.weight"}]


def test_coming_back_continues_bit_for_bit(tmp_path, quiet):
    run = make_run(tmp_path)
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 2
        with pytest.raises(RLBoostError, match="enough"):
            go(run)
        coordinator.refuse_step = None
        coordinator.heard.clear()
        final = go(run)
    assert weights(final) == weights(quiet)
    assert [line["step"] for line in lines(run)] == list(range(STEPS))
    assert [m.step for m in coordinator.of(StepTrainedMessage)] == [
        1,
        2,
        3,
    ]  # step 1's report may have been lost
    assert [m.policy_version for m in coordinator.of(StepStartedMessage)] == [
        2,
        3,
    ]  # version 2 had the same content


PPO = {"loss": "ppo", "ppo": {"learning_rate": 1e-2, "warmup_steps": 1, "gae_lambda": 0.9}}
LORA = {"lora": {"rank": 4}, "learning_rate": 0.1}
SCHEDULES = {
    "entropy_bonus": {"coef": 0.1, "final_coef": 0.0}, "learning_rate_schedule": "cosine",
    "weight_decay": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("where", "more"),
    [("loss", {}), ("reward", {}), ("loss", LORA), ("reward", PPO), ("reward", PPO | LORA)],
    ids=["loss", "reward", "lora", "ppo", "ppo-lora"],
)
def test_kl_and_schedules_continue_bit_for_bit(tmp_path, where, more):
    """The reference is the start, not what the trainer came back with."""
    changes = {**JOB["algorithm"], **SCHEDULES, "kl": {"coef": 0.1, "in": where}, **more}
    whole, run = (make_run(tmp_path, name, algorithm=changes) for name in ("whole", "r"))
    with Coordinator(whole):
        wanted = go(whole)
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 2
        with pytest.raises(RLBoostError, match="enough"):
            go(run)
        coordinator.refuse_step = None
        final = go(run)
    assert weights(final) == weights(wanted)
    table, reference = lines(run), [line["reference_kl"] for line in lines(whole)]
    assert [line["reference_kl"] for line in table] == reference
    assert reference[-1] > reference[0] >= 0
    if "ppo" in more:
        for name in ("value_loss", "value_mean", "explained_variance"):
            assert [line[name] for line in table] == [line[name] for line in lines(whole)], name
        assert table[0]["value_mean"] == 0 != table[-1]["value_mean"]
        assert [line["grad_norm"] == 0 for line in table] == [True, False, False, False]
    assert table[-1]["learning_rate"] == pytest.approx(lines(whole)[-1]["learning_rate"])


@pytest.mark.parametrize(
    "more",
    [{}, {"old_logprobs": "recompute"}, PPO],
    ids=["reference", "reference-and-old", "ppo"],
)
def test_logprobs_that_are_computed_before_groups_are_complete_train_the_same(tmp_path, more):
    algorithm = {**JOB["algorithm"], "steps": 2, "kl": {"coef": 0.1}, **more}
    whole, early, other = (
        make_run(tmp_path, name, algorithm=algorithm) for name in ("whole", "early", "other")
    )
    with Coordinator(whole) as coordinator:
        coordinator.early_s = 0.0
        coordinator._singly = list  # everything comes with its group
        wanted = load_file(go(whole) / "model.safetensors")
    with Coordinator(early) as coordinator:
        coordinator.early_s = 1.0
        found = load_file(go(early) / "model.safetensors")
        assert all(asked.wants_responses for asked in coordinator.of(StepStartedMessage))
    with Coordinator(other) as coordinator:  # as after damage of the journal: only the group counts
        coordinator.early_s, coordinator.other_early = 1.0, True
        besides = load_file(go(other) / "model.safetensors")
    assert [line["early_share"] for line in lines(whole)] == [0.0, 0.0]
    assert all(line["early_share"] > 0 for line in lines(early))
    assert [line["early_share"] for line in lines(other)] == [0.0, 0.0]
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(besides[name], tensor, rtol=1e-4, atol=1e-6)
    for name in ("loss", "grad_norm", "reference_kl", "clip_share"):
        assert [line[name] for line in lines(early)] == pytest.approx(
            [line[name] for line in lines(whole)], rel=1e-3, abs=1e-6
        )


def test_a_job_without_reference_and_old_logprobs_wants_groups_alone(tmp_path):
    run = make_run(tmp_path)
    with Coordinator(run) as coordinator:
        go(run)
    assert not any(asked.wants_responses for asked in coordinator.of(StepStartedMessage))
    assert "early_share" not in lines(run)[0]


def test_a_lost_weight_store_is_published_again_under_an_unused_number(tmp_path, quiet):
    run = make_run(tmp_path)
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 1
        with pytest.raises(RLBoostError, match="enough"):
            go(run)
        (run.weights / "v000001").rename(tmp_path / "gone")
        (tmp_path / "gone").rename(run.weights / "v000007")
        path = run.weights / "v000007" / "manifest.json"
        path.write_text((run.weights / "v000000" / "manifest.json").read_text())  # another content's
        coordinator.refuse_step = None
        coordinator.heard.clear()
        final = go(run)
    assert [m.policy_version for m in coordinator.of(StepStartedMessage)] == [8, 9, 10]
    assert weights(final) == weights(quiet)


def test_dying_between_checkpoint_and_report_loses_and_doubles_nothing(tmp_path, quiet, monkeypatch):
    run = make_run(tmp_path)

    def broken(self: MetricsLog, *lines: dict) -> None:
        raise KeyboardInterrupt

    with Coordinator(run) as coordinator:
        with monkeypatch.context() as patch:
            patch.setattr(MetricsLog, "append", broken)
            with pytest.raises(KeyboardInterrupt):
                go(run)
        assert not coordinator.of(StepTrainedMessage)
        final = go(run)
    assert [m.step for m in coordinator.of(StepTrainedMessage)] == [0, 1, 2, 3]
    assert [line["step"] for line in lines(run)] == list(range(STEPS))
    assert weights(final) == weights(quiet)


def test_a_finished_run_only_says_so_again(tmp_path):
    run = make_run(tmp_path)
    with Coordinator(run) as coordinator:
        go(run)
        coordinator.heard.clear()
        go(run)
    assert len(coordinator.of(RunFinished)) == 1
    assert not coordinator.of(StepStartedMessage)


def test_a_reward_that_always_fails_ends_the_run_and_names_itself(tmp_path):
    run = make_run(tmp_path, reward="def score(response): return {}['missing key']")
    with Coordinator(run), pytest.raises(RuntimeFault, match=r"(?s)rewards.py:score.*missing key"):
        go(run)


def test_every_report_says_whether_there_is_a_checkpoint(tmp_path):
    run = make_run(tmp_path, trainer={"checkpoint_every_steps": 3})
    with Coordinator(run) as coordinator:
        go(run)
        go(run)
    said = [(trained.step, trained.checkpointed) for trained in coordinator.of(StepTrainedMessage)]
    assert said == [(0, False), (1, False), (2, False), (3, False), (3, True)]
    assert [m.step for m in coordinator.of(Checkpointed)] == [2, 3]
    order = [type(m) for m in coordinator.heard if isinstance(m, StepTrainedMessage | Checkpointed)]
    assert order[2:6].index(Checkpointed) > 0, "a checkpoint is said after its step"


def test_checkpoints_and_model_are_copied_to_the_output(tmp_path):
    copies = tmp_path / "another disk"
    copies.mkdir()
    run = make_run(tmp_path, output=str(copies))
    with Coordinator(run) as coordinator:
        final = go(run)
        assert weights(copies / "r" / "model") == weights(final)
        newest = copies / "r" / "checkpoints" / "step-000003"
        for name in (".metadata", "__0_0.distcp", "trainer.pt"):
            assert (newest / name).read_bytes() == (run.checkpoints / newest.name / name).read_bytes()
        assert (copies / "r" / "metrics.jsonl").read_bytes() == run.metrics.read_bytes()
        (copies / "r" / "model").rename(tmp_path / "gone")
        (copies / "r" / "model").write_text("no folder any more")
        coordinator.heard.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OutputCopies.finish, "__kwdefaults__", {"within_s": 0.0, "pause_s": 0.1})
            with pytest.raises(RuntimeFault, match="the final model cannot be written"):
                go(run)
    assert not coordinator.of(RunFinished), "a run whose model has not arrived is not done"


def test_groups_without_anything_to_learn_are_replaced_by_spares(tmp_path):
    flat = "def score(response, row): return 0.5 if row['bonus'] else (sum(map(ord, response)) % 7) / 7"
    algorithm = {**JOB["algorithm"], "zero_variance_groups": "replace", "spare_prompts": 3}
    run = make_run(tmp_path, reward=flat, algorithm=algorithm)
    with Coordinator(run) as coordinator:
        go(run)
    assert {len(m.prompts) for m in coordinator.of(StepStartedMessage)} == {GROUPS + 3}
    table = lines(run)
    assert sum(line["groups_replaced"] for line in table) > 0
    for line in table:
        asked_and_good = GROUPS + 3 - line["groups_flat"]
        assert line["groups_trained"] == min(GROUPS, asked_and_good)
        assert line["groups_spare_unused"] == asked_and_good - line["groups_trained"]
        assert line["zero_variance_share"] == line["groups_flat"] / (GROUPS + 3)
        assert 0 < line["tokens_trained"] <= line["groups_trained"] * SIZE * 6


def test_a_run_that_learns_nothing_is_reported_from_its_own_metrics(tmp_path):
    run = make_run(
        tmp_path, reward="def score(response, row): return 0.0", evaluation={"every_steps": 1, "prompts": 3}
    )
    with Coordinator(run) as coordinator:
        go(run)
    trained = coordinator.of(StepTrainedMessage)
    health = HealthMonitor((message.step, message.metrics) for message in trained)
    assert "reward_zero" in [warning.code for warning in health.active]
    assert "grad_not_finite" not in [warning.code for warning in health.active]
    (final,) = coordinator.of(Evaluated)
    health.evaluated(final.step + 1, final.metrics)
    found = health.evaluations[""]
    assert (found.step, found.updates, found.values["reward_mean"], found.first["reward_mean"]) == (
        4,
        4,
        0,
        0,
    )
    history = history_of(run)
    assert history.steps == list(range(1, STEPS + 1))
    assert all(value > 0 for value in history.values("tokens_per_s"))


def test_held_out_prompts_are_answered_and_never_trained(tmp_path):
    run = make_run(tmp_path, evaluation={"every_steps": 2, "prompts": 3})
    with Coordinator(run) as coordinator:
        go(run)
    asked = coordinator.of(StepStartedMessage)
    assert [(m.step, len(m.prompts)) for m in asked] == [
        (0, GROUPS + 3), (1, GROUPS), (2, GROUPS + 3), (3, GROUPS), (STEPS, 3),
    ]  # fmt: skip
    tails = [tuple(prompt.token_ids for prompt in asked[m].prompts[-3:]) for m in (0, 2, 4)]
    assert len(set(tails)) == 1, "the same ones each time"
    assert not {p.token_ids for m in asked[:STEPS] for p in m.prompts[:GROUPS]} & set(tails[0])
    table = lines(run)
    general = {"eval_avg_at_K", "eval_pass_at_K", "reward_NAME_mean"}
    general |= {"pairs", "pairs_tied", "pairs_ordered_share", "pair_margin"}  # dpo's
    general |= {"responses_kept", "groups_without_kept"}  # of rejection
    general |= {"value_loss", "value_clip_share", "value_mean", "return_mean"}  # of ppo
    general |= {"explained_variance", "critic_grad_norm"}
    general |= {
        "prompts_resting_solved",
        "prompts_resting_unsolved",
        "prompts_passed_over",
    }  # of a curriculum
    general |= {"lag_kl", "newer_tokens_share"}  # of max_staleness
    general |= {"early_share"}  # of a reference and of old logprobs
    general |= {"router_aux_loss", "router_replay_moved_share"}  # of a mixture of experts
    general |= episode_metrics([]).keys()
    assert {described(name).name for name in set().union(*table)} == (
        GLOSSARY.keys() - {"tokens_per_s", *general} | {"eval_avg_at_4", "eval_pass_at_2", "eval_pass_at_4"}
    )
    assert [line.get("eval_updates") for line in table] == [0, None, 2, STEPS]
    assert ["eval_reward_mean" in line for line in table] == [True, False, True, True]
    evaluated_steps = [line for line in table if "eval_reward_mean" in line]
    assert all(line["eval_reward_best"] >= line["eval_reward_mean"] for line in evaluated_steps)
    assert {line["responses_scored"] for line in table} == {GROUPS * SIZE}
    plain = make_run(tmp_path, "plain")
    assert all(line["groups_trained"] == GROUPS for line in table)
    assert not plain.samples.exists()


EVALUATION = [
    {"name": "own", "source": "other.jsonl", "every_steps": 2, "samples": 6, "temperature": 0.5,
     "max_tokens": 9, "correct_from": 0.5, "reward": "other.py:score", "pass_at": [1, 3, 6]},
    {"name": "held-out", "prompts": 2, "every_steps": None, "top_p": 0.9, "correct_from": 1.0},
]  # fmt: skip


def make_evaluated_run(tmp_path: Path, name: str = "r", steps: int = STEPS) -> RunFolder:
    algorithm = {**JOB["algorithm"], "steps": steps}
    run = make_run(tmp_path, name, evaluation=EVALUATION, algorithm=algorithm)
    (run.files / "other.jsonl").write_text('{"prompt": "other 1"}\n{"prompt": "other 2"}\n')
    (run.files / "other.py").write_text("def score(response): return (sum(map(ord, response)) % 5) / 4")
    return run


def evaluated(run: RunFolder) -> list[dict]:
    return [json.loads(line) for line in run.evaluations.read_text().splitlines()]


def eval_metrics(run: RunFolder) -> list[dict]:
    return [{k: v for k, v in line.items() if k.startswith("eval_")} for line in lines(run)]


def test_avg_and_pass_at_k_equal_a_direct_computation_over_the_kept_responses(tmp_path):
    run = make_evaluated_run(tmp_path)
    with Coordinator(run) as coordinator:
        go(run)
    kept = evaluated(run)
    assert {(row["step"], row["evaluation"]) for row in kept} == {
        (0, "own"), (2, "own"), (STEPS, "own"), (0, "held-out"), (STEPS, "held-out"),
    }  # fmt: skip
    for updates, row in ((0, 0), (2, 2), (STEPS, STEPS - 1)):
        metrics = lines(run)[row]
        assert metrics["eval_updates"] == updates
        for name, ks, threshold in (("own", (1, 3, 6), 0.5), ("held-out", (2, 4), 1.0)):
            by_prompt: dict[int, list[dict]] = {}
            for each in kept:
                if (each["step"], each["evaluation"]) == (updates, name):
                    by_prompt.setdefault(each["prompt"], []).append(each)
            if not by_prompt:
                assert f"eval_{name}_reward_mean" not in metrics
                continue
            assert len(by_prompt) == 2
            assert {len(group) for group in by_prompt.values()} == {max(ks)}
            right = [[each["reward"] >= threshold for each in group] for group in by_prompt.values()]
            assert any(map(any, right))
            assert not all(map(all, right))
            rates = {f"avg_at_{max(ks)}": np.mean(right)}
            for k in ks:  # by looking at every choice of k responses
                rates[f"pass_at_{k}"] = np.mean(
                    [np.mean([any(some) for some in itertools.combinations(each, k)]) for each in right]
                )
            rows = list(itertools.chain.from_iterable(by_prompt.values()))
            rates["reward_mean"] = np.mean([each["reward"] for each in rows])
            rates["length_mean"] = np.mean([each["tokens"] for each in rows])
            rates["truncated_share"] = np.mean([each["finish_reason"] == "length" for each in rows])
            for metric, value in rates.items():
                assert metrics[f"eval_{name}_{metric}"] == pytest.approx(value), (updates, name, metric)
    first = coordinator.of(StepStartedMessage)[0]
    asked = [(p.num_responses, p.max_tokens, p.sampling) for p in first.prompts[GROUPS:]]
    assert asked == [(6, 9, Sampling(0.5))] * 2 + [(0, 0, Sampling(1.0, 0.9))] * 2
    for request, line in zip(coordinator.of(StepStartedMessage), lines(run), strict=False):
        groups = [coordinator._group(request, group) for group in range(GROUPS)]
        tokens = sum(len(r.token_ids) // 4 for group in groups for r in group.responses)
        assert line["tokens_trained"] == tokens, "none of an evaluation's"


def test_a_trainer_that_comes_back_neither_repeats_nor_loses_an_evaluation(tmp_path, monkeypatch):
    """It ends when it asks for step 1, for the final evaluation, and before it saves the final model."""
    quiet, run = (make_evaluated_run(tmp_path, name, steps=2) for name in ("quiet", "r"))
    with Coordinator(quiet):
        wanted = go(quiet)

    def die(*_: object) -> None:
        raise RLBoostError("enough", "")

    with Coordinator(run) as coordinator:
        for coordinator.refuse_step in (1, 2):
            with pytest.raises(RLBoostError, match="enough"):
                go(run)
        coordinator.refuse_step = None
        with monkeypatch.context() as patch:
            patch.setattr("rlboost_runtime.trainer.loop.checkpoint.replace_folder", die)
            with pytest.raises(RLBoostError, match="enough"):
                go(run)
        final = go(run)
    assert evaluated(run) == evaluated(quiet)
    assert eval_metrics(run) == eval_metrics(quiet)
    assert weights(final) == weights(wanted)
    asked = [message.step for message in coordinator.of(StepStartedMessage)]
    assert asked == [0, 1, 1, 2, 2], "the last process asks for nothing"
    assert [each.metrics for each in coordinator.of(Evaluated)] == [eval_metrics(quiet)[-1]] * 2


def test_named_rewards_are_in_metrics_samples_and_evaluations(tmp_path):
    named = [
        {"name": "own", "weight": 0.5, "python": "rewards.py:score"},
        {"name": "even", "weight": 2.0, "python": "rewards.py:even"},
    ]
    group = "\ndef even(responses): return [1.0 - len(r) % 2 for r in responses]"
    algorithm = {**JOB["algorithm"], "steps": 1}
    run = make_run(
        tmp_path, reward=REWARD + group, algorithm=algorithm,
        evaluation={"prompts": 2, "at_start": False, "samples": 2},
    )  # fmt: skip
    job = json.loads(run.job_json.read_text()) | {"reward": named}
    run.job_json.write_text(Job.model_validate_json(json.dumps(job)).canonical_json())
    with Coordinator(run):
        go(run)
    (line,) = lines(run)
    total = 0.5 * line["reward_own_mean"] + 2.0 * line["reward_even_mean"]
    assert 0 < line["reward_even_mean"] < 1
    assert line["reward_mean"] == pytest.approx(total)
    samples = [json.loads(each) for each in run.samples.read_text().splitlines()]
    for row in [*samples, *evaluated(run)]:
        assert row["reward"] == pytest.approx(0.5 * row["rewards"]["own"] + 2.0 * row["rewards"]["even"])
    assert "reward_even_mean" in history_of(run).chosen([])


def test_curves_and_samples_follow_a_run_that_comes_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wandb = {"project": "test", "offline": True}
    run = make_run(tmp_path, tracking={"tensorboard": True, "wandb": wandb})
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 2
        with pytest.raises(RLBoostError, match="enough"):
            go(run)
        coordinator.refuse_step = None
        go(run)
    curves = EventAccumulator(str(run.tensorboard)).Reload()
    told = [(event.step, pytest.approx(event.value)) for event in curves.Scalars("reward_mean")]
    assert told == [(int(line["step"]), line["reward_mean"]) for line in lines(run)]
    assert list(run.path.glob("wandb/offline-run-*")), "it can be sent later"
    samples = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert sorted({sample["step"] for sample in samples}) == list(range(STEPS))
    for step in range(STEPS):
        rewards = [sample["reward"] for sample in samples if sample["step"] == step]
        assert len(rewards) == 3
        assert rewards == sorted(rewards, reverse=True)
    assert samples[0]["prompt"].startswith("question ")


@pytest.mark.parametrize("loss", ["gspo", "dapo"])
def test_recomputed_old_logprobs_measure_every_token_against_the_engine(tmp_path, loss):
    algorithm = {**JOB["algorithm"], "loss": loss, "old_logprobs": "recompute", "steps": 2}
    run = make_run(tmp_path, algorithm=algorithm)
    with Coordinator(run) as coordinator:
        go(run)
    for line, trained in zip(lines(run), coordinator.of(StepTrainedMessage), strict=True):
        assert line["mismatch_tokens"] == line["tokens_trained"] == trained.tokens_trained > 0


def start(run: RunFolder) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "rlboost_runtime.trainer", str(run.path)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


@pytest.mark.timeout(300)  # two processes that import torch: a minute each on a busy machine
def test_the_process_killed_and_started_again(tmp_path, quiet):
    run = make_run(tmp_path)
    processes: list[subprocess.Popen[bytes]] = []

    def kill_once(step: int) -> None:
        if step == 2 and len(processes) == 1:
            processes[0].send_signal(signal.SIGKILL)

    with Coordinator(run) as coordinator:
        coordinator.on_step = kill_once
        for expected in (-signal.SIGKILL, 0):
            processes.append(start(run))
            _, errors = processes[-1].communicate(timeout=250)
            assert processes[-1].returncode == expected, errors.decode()
    assert weights(run.checkpoints / "model") == weights(quiet)
    assert len(coordinator.of(RunFinished)) == 1
    assert not run.processes.exists(), "which process it is, its supervisor says"


NURSERY = """
import os, sys
from rlboost_runtime.trainer.__main__ import main

print("ready", flush=True)
for run in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = main([run.strip()])
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    """Starts real trainer processes without importing torch for each of them."""

    def __enter__(self) -> "Nursery":
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def bear(self, run: RunFolder) -> int:
        """Start a trainer and return its process id."""
        self._process.stdin.write(f"{run.path}\n")
        self._process.stdin.flush()
        return int(self._read())

    def ending(self) -> int:
        """Wait for the trainer's end and return its exit code; negative for a signal."""
        return int(self._read())

    def _read(self) -> str:
        return self._process.stdout.readline().strip()


class Killer:
    """Kills the trainer some milliseconds after a message of its life, both drawn at random."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._timers: list[threading.Timer] = []
        self._left: int | None = None
        self.pid = 0

    def arm(self) -> None:
        self._left = int(self._draw.integers(1, 12))

    def heard(self, message: Message) -> None:
        if self._left is None or not self.pid:
            return
        self._left -= 1
        if self._left == 0 or isinstance(message, RunFinished):
            self._left = None
            delay_s = float(self._draw.uniform(0, 0.05))
            self._timers.append(threading.Timer(delay_s, os.kill, (self.pid, signal.SIGKILL)))
            self._timers[-1].start()

    def join(self) -> None:
        for timer in self._timers:
            timer.join()


def last_state(run: RunFolder, steps: int) -> dict:
    folder = run.checkpoints / f"step-{steps - 1:06d}"
    return {**stored_state(folder), **flat(torch.load(folder / "trainer.pt", weights_only=True))}


def flat(value: object, name: str = "") -> dict:
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in flat(each, f"{name}/{key}").items()}
    return {name: value if isinstance(value, torch.Tensor) else torch.tensor(value)}


PPO_WITH_ALL = PPO | LORA | SCHEDULES | {"kl": {"coef": 0.1, "in": "reward"}}


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kills", "more"),
    [(20, {}), pytest.param(6, PPO_WITH_ALL, marks=pytest.mark.soak)],
    ids=["twenty", "ppo-lora"],
)
def test_kills_at_random_moments_leave_no_trace(tmp_path, kills, more):
    steps = 4 + kills
    algorithm = {**JOB["algorithm"], **more, "steps": steps}
    changes = {"algorithm": algorithm, "trainer": {"keep_checkpoints": 3}}
    undisturbed = make_run(tmp_path, "undisturbed", **changes)
    with Coordinator(undisturbed):
        go(undisturbed)

    run, killer, endings = make_run(tmp_path, **changes), Killer(8), []
    with Coordinator(run) as coordinator, Nursery() as nursery:
        coordinator.on_message = killer.heard
        for _ in range(kills):
            killer.arm()
            killer.pid = nursery.bear(run)
            endings.append(nursery.ending())
            killer.join()
        killer.pid = 0
        nursery.bear(run)
        assert nursery.ending() == 0
    assert endings == [-signal.SIGKILL] * kills

    found, wanted = last_state(run, steps), last_state(undisturbed, steps)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert weights(run.checkpoints / "model") == weights(undisturbed.checkpoints / "model")
    assert [line["step"] for line in lines(run)] == list(range(steps))
    same = ["step", "reward_mean", "loss", "tokens_trained", "grad_norm", "entropy", "learning_rate"]
    if "ppo" in more:
        same += ["value_loss", "value_mean", "explained_variance", "critic_grad_norm", "reference_kl"]
        assert "critic/exp_avg.value_head" in wanted
    told = zip(lines(run), lines(undisturbed), strict=True)
    assert all(mine[name] == theirs[name] for mine, theirs in told for name in same)
    kept = ["model", *(f"step-{step:06d}" for step in range(steps - 3, steps))]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == kept
    asked = [m.step for m in coordinator.of(StepStartedMessage)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(asked)), "a step was skipped"
    assert {m.step for m in coordinator.of(StepTrainedMessage)} == set(range(steps))


@pytest.mark.parametrize("publish_s", [0.0, 1.0])
def test_the_next_step_is_asked_for_while_this_one_is_trained(tmp_path, monkeypatch, publish_s):
    """However long a publication takes, nothing else is asked for, and under no other version."""
    publish = WeightStore.publish

    def slowly(*arguments, **options):
        time.sleep(publish_s)
        return publish(*arguments, **options)

    monkeypatch.setattr(WeightStore, "publish", slowly)
    algorithm = {**JOB["algorithm"], "max_staleness": 1}
    run = make_run(tmp_path, algorithm=algorithm)
    with Coordinator(run) as coordinator:
        go(run)
    asked = coordinator.of(StepStartedMessage)
    assert [m.step for m in asked] == list(range(STEPS))
    assert [m.policy_version for m in asked] == [0, 0, 1, 2], "each under what was published by then"
    order = [
        (type(m), m.step) for m in coordinator.heard if isinstance(m, StepStartedMessage | StepTrainedMessage)
    ]
    for step in range(1, STEPS):
        assert order.index((StepStartedMessage, step)) < order.index((StepTrainedMessage, step - 1))
    assert [line["staleness"] for line in lines(run)] == [0, 1, 1, 1]
    first, *stale = lines(run)
    assert first["mismatch_kl"] >= 0
    assert first["lag_tokens"] == 0
    assert all("mismatch_kl" not in line and line["lag_kl"] >= 0 for line in stale)
    assert all(line["lag_tokens"] > 0 == line["mismatch_tokens"] for line in stale)
    assert all(line["tokens_trained"] > 0 for line in lines(run))


def test_adapters_alone_are_published_also_after_a_resume(tmp_path):
    algorithm = {**JOB["algorithm"], "steps": 2, "lora": {"rank": 4}, "learning_rate": 0.05}
    run = make_run(tmp_path, algorithm=algorithm, weights={"transfer": "lora"})
    store = WeightStore(run.weights)
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 1
        with pytest.raises(RLBoostError, match="enough"):
            go(run)
        first, second = (read_manifest(store.path(version)) for version in (0, 1))
        coordinator.refuse_step = None
        go(run)
    assert [m.version for m in coordinator.of(VersionPublishedMessage)] == [0, 1, 2], (
        "the same weights keep their number"
    )
    third = read_manifest(store.path(2))
    files = [{file.name: file for file in each.files} for each in (first, second, third)]
    assert len({each["model.safetensors"] for each in files}) == 1, "the frozen weights stay what they are"
    assert len({each["adapter.weights"] for each in files}) == 3
    assert (store.path(1) / "adapter.json").exists()


def test_a_trainer_that_was_ahead_comes_back_to_the_same_weights(tmp_path):
    algorithm = {**JOB["algorithm"], "max_staleness": 1}
    undisturbed = make_run(tmp_path, "undisturbed", algorithm=algorithm)
    with Coordinator(undisturbed):
        wanted = weights(go(undisturbed))
    run = make_run(tmp_path, algorithm=algorithm)
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 3  # step 1 is trained then, step 2 has arrived
        with pytest.raises(RLBoostError, match="enough"):
            go(run)
        coordinator.refuse_step = None
        coordinator.heard.clear()
        found = weights(go(run))
    assert found == wanted
    again = [(m.step, m.policy_version) for m in coordinator.of(StepStartedMessage)]
    assert again[0] in {(2, 1), (3, 2)}, "what was ahead is asked for again under the version that it had"
    assert [line["step"] for line in lines(run)] == list(range(STEPS))


def test_a_killed_trainer_goes_on_with_the_prompts_that_its_curriculum_chose(tmp_path):
    """Prompts with a bonus are always solved, those without one never."""
    data = {"source": "prompts.jsonl", "curriculum": {"visits": 1, "skip": "solved", "rest_epochs": 3}}

    def asked(coordinator: Coordinator) -> dict[int, list[bytes]]:
        return {m.step: [p.token_ids for p in m.prompts] for m in coordinator.of(StepStartedMessage)}

    undisturbed = make_run(tmp_path, "undisturbed", data=data)
    with Coordinator(undisturbed) as coordinator:
        wanted, wanted_prompts = weights(go(undisturbed)), asked(coordinator)
    assert lines(undisturbed)[-1]["prompts_passed_over"] > 0
    assert (
        lines(undisturbed)[-1]["prompts_resting_solved"]
        > 0
        == lines(undisturbed)[-1]["prompts_resting_unsolved"]
    )
    run = make_run(tmp_path, data=data)
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 3
        with pytest.raises(RLBoostError, match="enough"):
            go(run)
        coordinator.refuse_step = None
        found = weights(go(run))
        assert asked(coordinator) == wanted_prompts
    assert found == wanted


EQUAL_WITHOUT_BONUS = """
def score(response, row):
    return (sum(map(ord, response)) % 7) / 7 if row['bonus'] else 0.5
"""


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_step_asks_for_prompts_until_it_is_full(tmp_path, evaluates):
    """Half of the groups are flat. The bound holds, and a killed trainer goes on bit for bit."""
    algorithm = {**JOB["algorithm"], "zero_variance_groups": "replace", "max_refills": 3}
    more = {"evaluation": {"source": "prompts.jsonl", "every_steps": 1, "prompts": 2}} if evaluates else {}

    def asked(coordinator: Coordinator) -> dict[int, list[bytes]]:
        return {m.step: [p.token_ids for p in m.prompts] for m in coordinator.of(StepStartedMessage)}

    def made(name: str) -> RunFolder:
        return make_run(tmp_path, name, EQUAL_WITHOUT_BONUS, algorithm=algorithm, **more)

    undisturbed = made("undisturbed")
    with Coordinator(undisturbed) as coordinator:
        wanted, wanted_prompts = weights(go(undisturbed)), asked(coordinator)
    found = lines(undisturbed)
    assert [line["groups_trained"] for line in found] == [GROUPS] * STEPS
    assert sum(line["refills"] for line in found) >= STEPS - 1
    assert all(line["groups_replaced"] > 0 for line in found if line["refills"])
    assert max(line["refills"] for line in found) <= 3
    run = made("r")
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 2
        with pytest.raises(RLBoostError, match="enough"):
            go(run)
        coordinator.refuse_step = None
        assert weights(go(run)) == wanted
        assert asked(coordinator) == wanted_prompts


def test_a_step_that_no_refill_fills_is_trained_with_fewer_groups(tmp_path):
    algorithm = {**JOB["algorithm"], "steps": 1, "zero_variance_groups": "replace", "max_refills": 2}
    run = make_run(tmp_path, reward="def score(): return 1.0", algorithm=algorithm)
    with Coordinator(run) as coordinator:
        go(run)
    assert [len(m.prompts) for m in coordinator.of(StepStartedMessage)] == [GROUPS, 2 * GROUPS, 3 * GROUPS]
    (line,) = lines(run)
    assert (line["groups_trained"], line["refills"], line["minibatches_empty"]) == (0, 2, 2)


def by_ranks(run: RunFolder, num: int, within_s: float) -> int:
    """Train with real processes, `num` ranks; return the exit code."""
    whole = run.job_json.read_text()
    job = json.loads(whole)
    run.job_json.write_text(json.dumps(job | {"trainer": job["trainer"] | {"ranks": num}}))
    process = start(run)
    try:
        _, errors = process.communicate(timeout=within_s)
    finally:
        process.kill()
        process.communicate()
        run.job_json.write_text(whole)
    assert process.returncode in (0, EXIT_CANNOT_GO_ON), errors.decode()
    return process.returncode


@pytest.mark.timeout(300)
def test_two_ranks_train_and_one_goes_on_from_their_checkpoint(tmp_path, quiet):
    run = make_run(tmp_path)
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 2
        assert by_ranks(run, 2, within_s=250) == EXIT_CANNOT_GO_ON  # as one rank's would be
        assert [m.step for m in coordinator.of(StepTrainedMessage)] == [0, 1]
        coordinator.refuse_step = None
        final = go(run)
    assert [line["step"] for line in lines(run)] == list(range(STEPS))
    found, wanted = (load_file(folder / "model.safetensors") for folder in (final, quiet))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert (tensor - wanted[name]).norm() <= 1e-3 * wanted[name].norm(), name


def other_model(folder: Path) -> str:
    """A model of other widths that only `transformers` can read, as a reward model's body is."""
    tiny = TinyModel(init="tiny", hidden_size=64, num_layers=2, seed=5)
    make_model(tiny, 64).model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("critic", "more"),
    [("start", {}), pytest.param("folder", {"lora": {"rank": 4}}, marks=pytest.mark.soak)],
    ids=["start", "sent-lora"],
)
def test_ranks_load_a_critic_anew_and_from_a_checkpoint_of_fewer(tmp_path, critic, more):
    """Two ranks begin, one goes on, two end it: as one alone."""
    begins_as = {} if critic == "start" else {"critic": other_model(tmp_path / "other")}
    algorithm = {
        **JOB["algorithm"], **PPO, "ppo": PPO["ppo"] | begins_as, **more,
        "kl": {"coef": 0.1, "estimator": "k1", "in": "reward"},
    }  # fmt: skip
    alone, run = (make_run(tmp_path, name, algorithm=algorithm) for name in ("alone", "r"))
    with Coordinator(alone):
        wanted = load_file(go(alone) / "model.safetensors")
    with Coordinator(run) as coordinator:
        coordinator.refuse_step = 1
        assert by_ranks(run, 2, within_s=120) == EXIT_CANNOT_GO_ON
        coordinator.refuse_step = 2
        with pytest.raises(RLBoostError, match="enough"):
            go(run)
        coordinator.refuse_step = None
        assert by_ranks(run, 2, within_s=120) == 0
    for name in ("value_loss", "value_mean", "explained_variance", "critic_grad_norm", "reference_kl"):
        found, one = ([line[name] for line in lines(each)] for each in (run, alone))
        assert found == pytest.approx(one, rel=1e-3, abs=1e-5), name
    assert lines(run)[0]["value_mean"] == 0 != lines(run)[-1]["value_mean"]
    found = load_file(run.checkpoints / "model" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert (tensor - wanted[name]).norm() <= 1e-3 * wanted[name].norm(), name


def test_a_persons_mistake_ends_with_78_and_is_said(tmp_path):
    run = make_run(tmp_path, reward="def score(completion): return 1")
    with Coordinator(run) as coordinator:
        process = start(run)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 78, errors.decode()
    (failed,) = coordinator.of(RunFailed)
    assert "takes completion, but" in failed.problem
    explained = [json.loads(line) for line in errors.splitlines() if b"process.failed" in line]
    assert explained[-1]["remedy"] == failed.remedy
