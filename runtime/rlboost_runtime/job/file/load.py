"""Reads job files and describes their fields.

`load_job` tells every mistake of a file at once, in the order of its lines, each as
`job.yaml:14: rollout.spot.max_instance: unknown field; did you mean max_instances?`: where, which field, what
was found and what to do. A job that loads names only files, functions and data sets that are there, and fits
the machines that it buys; what it leaves to the plan (`auto`) is filled in where these are known.

Settings that are legal one by one and make no sense together.

Only what a person wrote is judged, never a default: so this works on the plain data of the file. A setting
that would be ignored is a mistake too, because whoever wrote it counts on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.fit.plan import misfits, resolved
from rlboost_runtime.fit.shape import TransformerShape, find_shape
from rlboost_runtime.job import IMPORTANCE_CAPS, WITHOUT_RATIO, Algorithm, HttpReward, Job, num_devices
from rlboost_runtime.job.file.disk import check_disk, find_model
from rlboost_runtime.job.file.places import check_places, place_hints
from rlboost_runtime.job.file.shape import field_type, sections, validate
from rlboost_runtime.job.file.tree import FieldPath, Mistake, SyntaxMistake, Tree, dotted, parse
from rlboost_runtime.job.file.vllm_args import check_vllm_args, vllm_args_hint
from rlboost_runtime.job.task import reward_parts

LORA_LEARNING_RATE = 1e-5
"""Below this, adapters learn hardly anything in a run of usual length (peers use 1e-5 to 2e-5)."""


class JobErrors(ConfigError):
    """A job file with mistakes; `problem` holds one line for each."""

    @property
    def lines(self) -> list[str]:
        """The mistakes, each as `file:line: field: what was found; what to do`."""
        return self.problem.split("\n")


def load_job(path: Path) -> Job:
    """Return the job in the YAML file `path`; a model folder is made absolute, other names stay as they are.
    Raises `JobErrors`."""
    try:
        tree = parse(_read(path))
    except SyntaxMistake as exc:
        raise _errors(path, [f"{path}:{exc.line}: {exc.problem}"]) from exc
    job, mistakes = validate(tree.data)
    mistakes = [*tree.mistakes, *mistakes, *check_sense(tree.data), *check_disk(tree.data, path.parent)]
    mistakes += check_vllm_args(tree.data)
    mistakes += [*check_reach(job), *check_places(job)] if job is not None else []
    shape = None if job is None or mistakes else _shape(job, path.parent)
    if job is not None and shape is not None:
        mistakes += [Mistake(*each) for each in misfits(job, shape)]
    if job is None or mistakes:
        raise _errors(path, _lines(path, tree, mistakes))
    return _with_absolute_model(job if shape is None else resolved(job, shape), path.parent)


def _shape(job: Job, base: Path) -> TransformerShape | None:
    try:
        return find_shape(job.model, base)
    except ConfigError:
        return None  # `doctor` and the trainer say what is wrong with it


def hints(job: Job) -> list[str]:
    """Return what is legal but may surprise, a sentence each."""
    found = []
    if isinstance(job.model, str) and not Path(job.model).is_dir():
        found.append(f"model: {job.model} is not a local folder; it is loaded from the Hugging Face Hub")
    for _, _, source in reward_parts(job.reward):
        if isinstance(source, HttpReward) and source.http.startswith("http://"):
            found.append(f"reward: {source.http} is plain HTTP: prompts are sent unencrypted")
    if job.algorithm.temperature == 0:
        found.append("algorithm.temperature: 0 makes all responses of a group the same: nothing is learnt")
    if job.algorithm.lora is not None and job.algorithm.learning_rate < LORA_LEARNING_RATE:
        found.append(
            f"algorithm.learning_rate: {job.algorithm.learning_rate:g} is little for adapters, which start"
            f" at 0; {LORA_LEARNING_RATE:g} or more is usual"
        )
    if (kl := job.algorithm.kl) is not None and kl.estimator == "k1" and not kl.is_in_reward:
        found.append("algorithm.kl: k1 in the loss has a gradient of mean 0; write in: reward, or k3")
    if job.algorithm.top_p < 1:
        found.append(
            f"algorithm.top_p: with {job.algorithm.top_p} engines sample from a part of the vocabulary, the"
            " trainer's logprobs are of all of it: probability ratios are biased"
        )
    return [*found, *_idle_gpus(job), *vllm_args_hint(job), *place_hints(job)]


def _idle_gpus(job: Job) -> list[str]:
    """Say which GPUs of a bought head the job leaves idle, or asks too much of."""
    trainer = job.trainer
    if trainer.accelerators is None:
        return []
    num, engines = num_devices(trainer.accelerators), trainer.local_engines
    found = []
    if trainer.ranks < num:
        found.append(
            f"trainer.ranks: {trainer.ranks} of {trainer.accelerators} train, the others are paid for too;"
            f" write {num}"
        )
    if engines * job.rollout.tensor_parallel > num:
        found.append(
            f"trainer.local_engines: {engines} of {job.rollout.tensor_parallel} GPUs each are more than"
            f" {trainer.accelerators} has; write at most {num // job.rollout.tensor_parallel}"
        )
    return list(dict.fromkeys(found))


class FieldDoc(NamedTuple):
    """One field of the job file; `default` is empty for sections and "required" where there is none."""

    path: str
    type: str
    default: str
    doc: str
    form: str
    """Sentence about the form of the section that has the field: some sections have several forms."""


def describe_fields() -> list[FieldDoc]:
    """Return every field that a job file may have, in the order of the models, once for each form."""
    found = []
    for path, model in sections():
        form = (model.__doc__ or "").partition("\n")[0]
        for name, field in model.model_fields.items():
            where = dotted((*path, name))
            pattern = "" if get_origin(field.annotation) is Literal else where
            found.append(FieldDoc(where, *field_type(pattern, field), field.description or "", form))
    return list(dict.fromkeys(found))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: no such job file", "write one, or start with `rlboost init`") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder", f"name the job file in it, such as {path}/job.yaml") from None
    except PermissionError as exc:
        raise ConfigError(f"{path}: may not be read", "check its permissions") from exc
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        raise _errors(path, [f"{path}:{line}: not UTF-8 text; save it as UTF-8"]) from exc


def _lines(path: Path, tree: Tree, mistakes: list[Mistake]) -> list[str]:
    """One line per mistake, by line; of a value that is no plain data nothing else is said."""
    odd = {each.path for each in tree.mistakes if each.line == tree.lines.get(each.path)}
    first: dict[tuple[FieldPath, int | None], Mistake] = {}
    for mistake in mistakes:
        inside = {mistake.path[:length] for length in range(len(mistake.path) + 1)}
        if mistake in tree.mistakes or not inside & odd:
            first.setdefault((mistake.path, mistake.line), mistake)
    placed = [(each.line or tree.line(each.path), dotted(each.path), each.problem) for each in first.values()]
    placed.sort(key=lambda item: item[0])
    return [f"{path}:{line}: {field}{': ' if field else ''}{problem}" for line, field, problem in placed]


def _errors(path: Path, lines: list[str]) -> JobErrors:
    return JobErrors("\n".join(lines), f"correct the file, then run `rlboost check {path}`")


def _with_absolute_model(job: Job, base: Path) -> Job:
    name = job.algorithm.reference
    if name not in (None, "start") and (folder := find_model(str(name), base)).is_dir():
        field = "dpo" if job.algorithm.loss == "dpo" else "kl"
        settings = job.algorithm.preference if field == "dpo" else job.algorithm.kl
        assert settings is not None
        settings = settings.model_copy(update={"reference": str(folder.resolve())})
        job = job.model_copy(update={"algorithm": job.algorithm.model_copy(update={field: settings})})
    if isinstance(job.model, str) and (folder := find_model(job.model, base)).is_dir():
        return job.model_copy(update={"model": str(folder.resolve())})
    return job


Section = dict[str, Any]  # any JSON values


def check_sense(data: Section) -> list[Mistake]:
    """Return the contradictions in `data`."""
    algorithm = data.get("algorithm", {})
    if not isinstance(algorithm, dict):
        return []
    transfer = [Mistake(("weights", "transfer"), problem) for problem in _transfer(data, algorithm)]
    checks = (_of_other_losses, _clips, _importance, _old_logprobs, _spares)
    found = [Mistake(("algorithm", name), told) for check in checks for name, told in check(algorithm)]
    return [*transfer, *found]


def check_reach(job: Job) -> list[Mistake]:
    """Return whether machines elsewhere are told no address of the head."""
    elsewhere = [offer.infra for offer in job.rollout.spot.any_of if offer.infra != "local"]
    if not elsewhere or job.trainer.is_elsewhere or job.trainer.address is not None:
        return []
    problem = (
        f"missing, though machines of {elsewhere[0]} are to reach the head, this machine; add its name or IP"
        " address, or a trainer.infra that they reach"
    )
    return [Mistake(("trainer", "address"), problem)]


def _transfer(data: Section, algorithm: Section) -> Iterator[str]:
    weights = data.get("weights")
    if isinstance(weights, dict) and weights.get("transfer") == "lora" and algorithm.get("lora") is None:
        yield "found lora, but there are no adapters without algorithm.lora; write it, or another transfer"


Finding = tuple[str, str]
"""Field of `algorithm`, and what is wrong with it."""


_OF_RATIOS = ("clip_low", "clip_high", "dual_clip", "importance_sampling", "importance_cap",
              "importance_floor", "old_logprobs")  # fmt: skip


def _of_other_losses(algorithm: Section) -> Iterator[Finding]:
    loss = algorithm.get("loss", "dapo")
    for name in ("ppo", "dpo", "rejection"):
        if algorithm.get(name) is not None and loss != name:
            yield name, f"found, but loss is {loss}; write loss: {name}, or remove it"
    if loss in WITHOUT_RATIO:
        for name in _OF_RATIOS:
            default = Algorithm.model_fields[name].default
            if algorithm.get(name, default) != default:
                yield name, f"found {algorithm[name]}, but {loss} has no probability ratio; remove it"


def _clips(algorithm: Section) -> Iterator[Finding]:
    loss = algorithm.get("loss")
    if loss in ("gspo", "cispo") and algorithm.get("dual_clip") is not None:
        yield "dual_clip", f"found {algorithm['dual_clip']}, but {loss} has no dual clip; remove it"


def _importance(algorithm: Section) -> Iterator[Finding]:
    kind = algorithm.get("importance_sampling", "token")
    cap, floor = algorithm.get("importance_cap"), algorithm.get("importance_floor")
    if kind == "none" and cap is not None:
        yield "importance_cap", f"found {cap}, but importance_sampling is none; remove one of them"
    if floor is None:
        return
    if kind != "icepop":
        yield (
            "importance_floor",
            f"found {floor}, but only icepop has a floor; remove it, or write importance_sampling: icepop",
        )
        return
    cap = IMPORTANCE_CAPS["icepop"] if cap is None else cap
    if _are_numbers(cap, floor) and floor >= cap:
        yield "importance_floor", f"found {floor}, which is not below importance_cap {cap}; lower it"


def _old_logprobs(algorithm: Section) -> Iterator[Finding]:
    written, parts = algorithm.get("old_logprobs"), algorithm.get("minibatches_per_step", 1)
    if written in ("recompute", "engine") and parts == 1:
        yield (
            "old_logprobs",
            f"found {written}, but with minibatches_per_step 1 the training pass itself gives them;"
            " remove it",
        )


def _spares(algorithm: Section) -> Iterator[Finding]:
    policy, spares = algorithm.get("zero_variance_groups", "keep"), algorithm.get("spare_prompts", 0)
    refills = algorithm.get("max_refills", 0)
    if policy != "replace" and refills != 0 and _are_numbers(refills):
        yield (
            "max_refills",
            f"found {refills}, but a step is refilled only with zero_variance_groups: replace; write that, or"
            " remove it",
        )
    if policy == "replace" and spares == 0 and refills == 0:
        prompts = algorithm.get("prompts_per_step", 128)
        some = max(1, prompts // 4) if isinstance(prompts, int) else 1
        yield (
            "zero_variance_groups",
            f"found replace, but there are no spare_prompts to take; write spare_prompts: {some},"
            " max_refills: 2, or drop",
        )
    if policy != "replace" and spares != 0 and _are_numbers(spares):
        yield (
            "spare_prompts",
            f"found {spares}, but they are used only with zero_variance_groups: replace;"
            " write that, or remove them",
        )


def _are_numbers(*values: Any) -> bool:  # any JSON values
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
