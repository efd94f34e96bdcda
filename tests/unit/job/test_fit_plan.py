"""What a job takes is refused before anything is bought, and what it leaves to the plan is filled in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlboost_templates
from rlboost_cli.main import app
from rlboost_providers.aws.machines import head_pool
from rlboost_providers.gcp.machines import head_pools
from rlboost_providers.registry import head_offer, head_usd_per_hour
from rlboost_runtime.fit.plan import GB, fit_plan, misfits, resolved
from rlboost_runtime.fit.shape import KNOWN_MODELS, find_shape
from rlboost_runtime.job import CloudOffer, Job, Trainer
from rlboost_runtime.job.file.load import JobErrors, load_job
from rlboost_runtime.job.rollout import throughput_problem

BOUGHT = ["aws", "gcp", "multi-cloud"]
SIZES = ["8B", "14B", "32B"]


def write(folder: Path, template: str, size: str, trainer: str = "", **replaced: str) -> Path:
    """A template for another size, with lines added below `trainer:`."""
    text = rlboost_templates.text(template).replace("Qwen/Qwen3-8B", f"Qwen/Qwen3-{size}")
    for old, new in replaced.items():
        text = text.replace(f"{old}: ", f"{old}: {new} # ", 1)
    text = text.replace("trainer: ", f"trainer:\n  {trainer}\n#", 1) if trainer else text
    path = folder / "job.yaml"
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("template", BOUGHT)
def test_every_template_fits_with_the_models_of_the_paper(template: str, size: str, tmp_path: Path) -> None:
    job = load_job(write(tmp_path, template, size))
    assert job.trainer.activation_checkpointing is True
    assert job.trainer.optimizer_offload is (size == "32B")
    assert job.trainer.micro_batch_tokens == (16_384 if size == "32B" else 32_768)
    assert job.trainer.disk_gb == {"8B": 500, "14B": 850, "32B": 1800}[size]
    least = {"8B": 521, "14B": 939, "32B": 2083}[size]
    most = {"aws": 1000, "gcp": 2400}[job.trainer.cloud]
    assert job.trainer.disk_mib_per_s == head_offer(job.trainer).disk_mib_per_s == min(least, most)
    plan = fit_plan(job, KNOWN_MODELS[f"Qwen/Qwen3-{size}"])
    assert plan.gpu_has is not None
    assert plan.gpu_needs < 0.95 * plan.gpu_has
    assert plan.disk < job.trainer.disk_size_gb * GB


def test_the_plan_counts_with_the_throughput_that_is_written(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, "aws", "8B", "disk_mib_per_s: 125"))
    plan = fit_plan(job, KNOWN_MODELS["Qwen/Qwen3-8B"])
    assert plan.disk_bytes_per_s == 125 * 2**20
    assert plan.publication_s > plan.version / (125 * 2**20) > 120


@pytest.mark.parametrize(
    ("template", "written", "problem"),
    [
        ("aws", "1200", "disk_mib_per_s: is 1200; aws has 125 to 1000; write one of these"),
        ("aws", "100", "disk_mib_per_s: is 100; aws has 125 to 1000; write one of these"),
        ("gcp", "3000", "disk_mib_per_s: is 3000; gcp has 140 to 2400; write one of these"),
    ],
)
def test_throughput_that_a_disk_cannot_have_is_refused(
    template: str, written: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(JobErrors, match=problem):
        load_job(write(tmp_path, template, "8B", f"disk_mib_per_s: {written}"))


@pytest.mark.parametrize(
    ("template", "written", "problem"),
    [
        ("aws", "reservation: h100s", "reservation: is h100s; write cr-0123456789abcdef0"),
        (
            "gcp",
            "reservation: H100s",
            "reservation: is H100s; write NAME or projects/PROJECT/reservations/NAME",
        ),
        ("aws", "flex_start_hours: 4", "flex_start_hours: is not asked for in aws; remove it"),
        ("aws", "price_usd_per_hour: 4", "price_usd_per_hour: is for a machine of your own"),
        (
            "gcp",
            "reservation: h100s\n  flex_start_hours: 4",
            "reservation: and flex_start_hours exclude each other; remove one",
        ),
        ("aws", "reservation: cr-0123456789abcdef0\n  via: skypilot", "reservation: is for via: direct"),
    ],
)
def test_capacity_that_a_cloud_does_not_sell_so_is_refused(
    template: str, written: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(JobErrors, match=re.escape(problem)):
        load_job(write(tmp_path, template, "8B", written))


def test_reserved_capacity_costs_what_the_job_says(tmp_path: Path) -> None:
    written = "reservation: cr-0123456789abcdef0\n  price_usd_per_hour: 31.46"
    job = load_job(write(tmp_path, "aws", "8B", written))
    assert head_usd_per_hour(job) == 31.46
    pool = head_pool(head_offer(job.trainer), job.trainer)
    assert (pool.on_demand_micro_usd_per_hour, pool.reservation) == (31_460_000, "cr-0123456789abcdef0")
    assert pool.storage_micro_usd_per_hour > 0, "its disk is billed beside it"
    (pool_there,) = head_pools(*flexible(tmp_path))
    assert (pool_there.flex_start_s, pool_there.spot) == (5400, False)


def flexible(folder: Path) -> tuple[CloudOffer, Trainer]:
    job = load_job(write(folder, "gcp", "8B", "flex_start_hours: 1.5"))
    return head_offer(job.trainer), job.trainer


REFUSED = [
    ("8B", "activation_checkpointing: false", "trainer.activation_checkpointing: found false: 14,848 tokens"),
    ("8B", "micro_batch_tokens: 900000", "trainer.micro_batch_tokens: found 900,000: 900,000 tokens"),
    ("32B", "disk_gb: 500", "trainer.disk_gb: found 500, but 1,593 GB are needed"),
    ("32B", "optimizer_offload: false", "trainer.optimizer_offload: found false"),
]


@pytest.mark.parametrize(("size", "line", "problem"), REFUSED)
@pytest.mark.parametrize("command", ["check", "plan", "doctor"])
def test_what_cannot_fit_ends_with_2_the_line_the_need_and_the_remedy(
    command: str, size: str, line: str, problem: str, tmp_path: Path
) -> None:
    path = write(tmp_path, "aws", size, line)
    number = path.read_text().splitlines().index(f"  {line}") + 1
    done = CliRunner().invoke(app, [command, str(path)])
    assert done.exit_code == 2
    assert f"{path}:{number}: {problem}" in done.stderr
    assert "write " in done.stderr.split(problem)[1]


def test_one_rank_for_32b_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "aws", "32B", ranks="1")
    with pytest.raises(JobErrors, match=r"trainer\.ranks: found 1: .* need 52\d\.\d GB .* write 8, one rank"):
        load_job(path)


def test_too_many_tokens_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    path = write(tmp_path, "aws", "8B", max_response_tokens="4000000")
    with pytest.raises(
        JobErrors, match=r"algorithm\.max_response_tokens: found 4,000,000: .* write at most "
    ) as raised:
        load_job(path)
    most = int(str(raised.value).split("write at most ")[1].split(",")[0])
    load_job(write(tmp_path, "aws", "8B", max_response_tokens=str(most)))
    with pytest.raises(JobErrors):
        load_job(write(tmp_path, "aws", "8B", max_response_tokens=str(most + 1024)))


def test_a_long_response_is_shared_among_ranks_where_that_makes_it_fit(tmp_path: Path) -> None:
    path = write(tmp_path, "aws", "8B", "context_parallel: 1", max_response_tokens="200000")
    told = r"trainer\.context_parallel: found 1: .* write (\d), ranks that share a response"
    with pytest.raises(JobErrors, match=told) as raised:
        load_job(path)
    shared = re.search(told, str(raised.value))
    assert shared is not None
    written = f"context_parallel: {shared[1]}"
    plan = fit_plan(
        load_job(write(tmp_path, "aws", "8B", written, max_response_tokens="200000")),
        KNOWN_MODELS["Qwen/Qwen3-8B"],
    )
    assert plan.gpu_has is not None
    assert plan.gpu_needs < 0.95 * plan.gpu_has


def test_what_the_model_has_not_the_parts_for_is_refused_before_anything_is_bought(tmp_path: Path) -> None:
    path = write(tmp_path, "aws", "8B", "context_parallel: 7", ranks="7")
    path.write_text(path.read_text().replace("algorithm:", "algorithm:\n  router_aux_loss_coef: 0.01", 1))
    with pytest.raises(JobErrors) as raised:
        load_job(path)
    told = str(raised.value)
    assert "algorithm.router_aux_loss_coef: found 0.01, but the model has no experts; remove it" in told
    assert "trainer.context_parallel: found 7, but the model has 32 heads of queries and 8 of keys" in told


def test_ranks_share_rows_evenly(tmp_path: Path) -> None:
    with pytest.raises(JobErrors, match=r"context_parallel: is 3, which does not divide .* 8; write 1"):
        load_job(write(tmp_path, "aws", "8B", "context_parallel: 3"))


def test_a_response_longer_than_the_models_context_is_refused(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2,
              "vocab_size": 300, "max_position_embeddings": 512}  # fmt: skip
    text = (
        "name: demo\nmodel: small\ndata: {reasoning_gym: [basic_arithmetic]}\n"
        "algorithm: {max_prompt_tokens: 96, max_response_tokens: 417}\n"
    )
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(JobErrors, match=r"yaml:4: algorithm\.max_response_tokens: .* write at most 416,"):
        load_job(tmp_path / "job.yaml")
    (tmp_path / "job.yaml").write_text(text.replace("417", "416"))
    load_job(tmp_path / "job.yaml")
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    (tmp_path / "job.yaml").write_text(text.replace("417", "1952"))
    load_job(tmp_path / "job.yaml")


def test_an_engine_without_room_for_one_response_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "aws", "32B")
    path.write_text(
        path.read_text().replace('        accelerators: "H100:8"', '        accelerators: "L4:8"', 1)
    )
    with pytest.raises(JobErrors, match=r"any_of\[0\]\.accelerators: an engine on 2 of L4:8 needs 34\.\d GB"):
        load_job(path)


def job(**trainer: object) -> Job:
    fields = {"name": "demo", "model": {"init": "tiny"}, "data": {"reasoning_gym": ["basic_arithmetic"]}}
    return Job.model_validate_json(json.dumps({**fields, "trainer": trainer}))


def test_nothing_changes_on_a_cpu() -> None:
    shape = find_shape(job().model)
    assert shape is not None
    plain = resolved(job(), shape)
    assert plain == job()
    assert not plain.trainer.checkpoints_activations
    assert not plain.trainer.offloads_optimizer
    assert plain.trainer.pass_tokens == 8192
    assert misfits(job(), shape) == []


def test_a_gpu_of_this_machine_decides_what_was_left_open() -> None:
    shape = KNOWN_MODELS["Qwen/Qwen3-0.6B"]
    roomy = resolved(job(), shape, 80 * 2**30).trainer
    assert not roomy.checkpoints_activations
    assert not roomy.offloads_optimizer
    assert roomy.micro_batch_tokens == 8192
    tight = resolved(job(activation_checkpointing=True), shape, 24 * 2**30).trainer
    assert (tight.activation_checkpointing, tight.optimizer_offload) == (True, False)
    assert misfits(job(), shape, 8 * 2**30) != []


def test_adapters_need_no_moments_for_the_frozen_weights() -> None:
    shape = KNOWN_MODELS["Qwen/Qwen3-8B"]
    base = job(ranks=1)
    adapted = base.model_copy(update={"algorithm": base.algorithm.model_validate({"lora": {"rank": 16}})})
    whole, small = (fit_plan(each, shape, 80 * 2**30) for each in (base, adapted))
    assert whole.gpu_needs > 131 * GB
    assert small.gpu_needs < 80 * GB
    assert small.checkpoint == 4 * shape.parameters + 12 * shape.adapter_parameters(16)


def test_the_hub_cache_and_folders_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
        "num_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    folder = tmp_path / "models--acme--new" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("acme/new", str(folder)):
        shape = find_shape(name)
        assert shape is not None
        assert (shape.experts, shape.active_experts, shape.intermediate, shape.head_dim) == (8, 2, 32, 16)
    assert find_shape("acme/unheard-of") is None


@pytest.mark.parametrize(
    ("place", "mib_per_s", "tier", "problem"),
    [
        (("aws", "skypilot", "H100:8"), 500, None, "write disk_tier"),
        (("aws", "direct", "H100:8"), None, "high", "write disk_mib_per_s"),
        (("gcp", "direct", "L4:1"), 500, None, "not sold in gcp for machines with L4:1"),
        (("gcp", "direct", "H100:8"), 2400, None, None),
        (("aws", "skypilot", "H100:8"), None, "high", None),
    ],
)
def test_throughput_is_for_the_clouds_own_api_and_tiers_are_for_skypilot(
    place: tuple[str, str, str], mib_per_s: int | None, tier: str | None, problem: str | None
) -> None:
    said = throughput_problem(*place, mib_per_s, tier)
    assert (said is None) if problem is None else (problem in str(said))
