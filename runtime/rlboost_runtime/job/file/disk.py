"""What a job names outside of itself: files, functions, folders and data sets must be there.

Works on the plain data, so that these mistakes are told together with those of the job's shape. Nothing of
the user's is imported or run.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import BUILT_IN_REWARDS, CHAT_TEMPLATES
from rlboost_runtime.job.data import prompt_problem
from rlboost_runtime.job.file.shape import close_match, shown
from rlboost_runtime.job.file.tree import FieldPath, Mistake, dotted
from rlboost_runtime.protocol.reward_parameters import GROUP_OFFERED, OFFERED, unknown_in_words
from rlboost_runtime.traces import load_trace

PROMPT_LINES_CHECKED = 1000
"""Lines of a prompt file that are parsed before a run: more would make a large file slow to launch."""

PROMPTS = "a JSON-lines or .parquet file"
MODEL_FOLDER = "write a folder in HF format"
TRACE_FILE = "a file of `time_ms,add|remove,node` rows"

_TYPES = {"int": int, "float": float, "str": str, "bool": bool}
_TYPE_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}

ANSWERS = (("answer",), ("reward_model", "ground_truth"), ("solution",))
"""Where a row may have the answer that `math` and `exact` compare with: ours, veRL's and TRL's."""


def check_disk(data: dict[str, Any], base: Path) -> list[Mistake]:
    """Return what is wrong with what `data` names; relative names start at `base`."""
    return [
        *_check_model(data, base),
        *_check_prompts(data, base),
        *_check_gym(data),
        *_check_reward(data, base),
        *_check_environment(data, base),
        *_check_script(data, base),
        *_check_files(data, base),
        *_check_traces(data, base),
        *_check_somebody_generates(data),
    ]


def looks_like_folder(model: str) -> bool:
    """Return True if `model` can only be meant as a folder, never as an HF id such as Qwen/Qwen3-8B."""
    return model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1


def find_model(model: str, base: Path) -> Path:
    """Return where the folder `model` would be."""
    return base / os.path.expanduser(model)  # unlike pathlib's, which raises where there is no such user


def _at(data: Any, *path: str | int) -> Any:  # any JSON value; None where the path leads nowhere
    for part in path:
        try:
            data = data[part]
        except (LookupError, TypeError):
            return None
    return data


def _check_model(data: dict[str, Any], base: Path) -> Iterator[Mistake]:
    model = _at(data, "model")
    if not isinstance(model, str):
        return
    folder = find_model(model, base)
    try:
        is_folder = folder.is_dir()
    except OSError:  # a name that no file can have, nor a model of the hub
        yield Mistake(("model",), f"found {shown(model)}, which does not exist; {MODEL_FOLDER}")
        return
    if model == "tiny" and not is_folder:
        yield Mistake(("model",), "found 'tiny', which is not a folder here; write {init: tiny}")
    elif is_folder:
        if not (folder / "config.json").is_file():
            yield Mistake(("model",), f"found folder {model} without config.json; {MODEL_FOLDER}")
    elif looks_like_folder(model) or not model.strip():
        yield Mistake(("model",), f"found {shown(model)}, which does not exist; {MODEL_FOLDER}")


def _sources(data: dict[str, Any]) -> Iterator[tuple[FieldPath, Any]]:  # any JSON value
    """Yield the sources of prompts with their paths, evaluations included."""
    for name in ("data", "evaluation"):
        found = _at(data, name)
        if isinstance(found, list):
            yield from (((name, number), one) for number, one in enumerate(found))
        elif found is not None:
            yield (name,), found


def _check_prompts(data: dict[str, Any], base: Path) -> Iterator[Mistake]:
    for path, source in _sources(data):
        yield from _check_source(path, source, base)
    source = _at(data, "data", "source")
    if not isinstance(source, str) or source.endswith(".parquet") or _file_problem(source, base, ""):
        return
    num = _num_prompts(base / source)
    for path, entry in _sources(data):
        held_out = _at(entry, "prompts")
        has_own = any(_at(entry, name) is not None for name in ("source", "dataset", "reasoning_gym"))
        if path[0] == "data" or has_own or num is None or not isinstance(held_out, int):
            continue
        if held_out >= num:
            problem = f"found {held_out}, which leaves none of the {num} in {source} to train on; write less"
            yield Mistake((*path, "prompts"), problem)


def _check_source(path: FieldPath, source: Any, base: Path) -> Iterator[Mistake]:  # any JSON value
    file, folder, template = (_at(source, key) for key in ("source", "dataset", "chat_template"))
    if isinstance(file, str):
        problem = _file_problem(file, base, PROMPTS)
        if problem is None and not file.endswith(".parquet"):
            problem = _prompt_file_problem(base / file, file, source)
        if problem:
            yield Mistake((*path, "source"), problem)
    if isinstance(folder, str) and folder.startswith("./") and not (base / folder).is_dir():
        yield Mistake(
            (*path, "dataset"), f"found {folder}, which is not a folder here; write a folder's path"
        )
    if isinstance(template, str) and template not in CHAT_TEMPLATES:
        hint = _hint(template, CHAT_TEMPLATES) or f"write {', '.join(CHAT_TEMPLATES)} or a Jinja file"
        if _file_problem(template, base, "a Jinja file"):
            yield Mistake((*path, "chat_template"), f"found {template}, which is no file here; {hint}")


def _num_prompts(path: Path) -> int | None:
    """Return how many lines a file has that are not empty; None where they are too many to be counted."""
    num = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number > PROMPT_LINES_CHECKED:
                return None
            num += bool(line.strip())
    return num


def _prompt_file_problem(path: Path, name: str, source: Any) -> str | None:  # any JSON object
    num_prompts = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if number > PROMPT_LINES_CHECKED:
                    break
                if line.strip():
                    num_prompts += 1
                    if problem := _prompt_line_problem(line, source, is_first=num_prompts == 1):
                        return f"found {name}:{number}: {problem}"
    except UnicodeDecodeError:
        return f"found {name}, which is not UTF-8 text; write a JSON-lines file"
    return None if num_prompts else f"found {name} without a single prompt; write one JSON object per line"


def _prompt_line_problem(line: str, source: Any, *, is_first: bool) -> str | None:  # any JSON object
    """Return what is wrong with a line: with it alone, where the lines before have the field."""
    try:
        row = json.loads(line)
    except ValueError:
        return "not JSON; write one JSON object per line"
    if not isinstance(row, dict):
        return f"{shown(row)}; write one JSON object per line"
    field, messages = (_at(source, key) for key in ("prompt_field", "messages_field"))
    field = field if isinstance(field, str) else "prompt"
    problem = prompt_problem(row, field, messages if isinstance(messages, str) else None)
    if problem is None:
        return None
    close = close_match(field, list(row))
    is_answer = any(close == keys[0] for keys in ANSWERS)
    is_misspelt = problem[1] == "set data.prompt_field" and close and close != field and not is_answer
    if problem[1] == "set data.prompt_field" and not is_first:
        return f"{problem[0]}; correct this line: those before it have {field}"
    return f"{problem[0]}; {f'set prompt_field: {close}' if is_misspelt else problem[1]}"


def _check_gym(data: dict[str, Any]) -> Iterator[Mistake]:
    for path, source in _sources(data):
        yield from _check_gym_source(path, source)


def _check_gym_source(path: FieldPath, source: Any) -> Iterator[Mistake]:  # any JSON value
    names, options = _at(source, "reasoning_gym"), _at(source, "config")
    if not isinstance(names, list) or importlib.util.find_spec("reasoning_gym") is None:
        return
    options = options if isinstance(options, dict) else {}
    yield from _options_of_another_type(path, names, options)
    if _sources_agree(names, options):
        return
    known = _gym_options()
    for index, name in enumerate(names):
        if isinstance(name, str) and name not in known:
            hint = _hint(name, known) or f"there are {len(known)}, such as spell_backward"
            yield Mistake((*path, "reasoning_gym", index), f"found {shown(name)}, no such data set; {hint}")
    for name in names:
        for option in set(options) - known[name] if isinstance(name, str) and name in known else ():
            hint = _hint(option, known[name]) or f"there are {', '.join(sorted(known[name]))}"
            if option in {"size", "seed"}:
                hint = f"write {dotted(path)}.{option}"
            yield Mistake((*path, "config", option), f"{name} has no such option; {hint}")


def _sources_agree(names: list[Any], options: dict[str, Any]) -> bool:
    """Return True if all names and options stand in reasoning-gym's sources: importing it takes seconds."""
    found = _gym_sources()
    return all(
        isinstance(name, str) and name in found and options.keys() <= found[name].keys() for name in names
    )


def _options_of_another_type(path: FieldPath, names: list[Any], options: dict[str, Any]) -> Iterator[Mistake]:
    found = _gym_sources()
    for option, value in options.items():
        wanted = {found[name].get(option, "") for name in names if isinstance(name, str) and name in found}
        for one in wanted & _TYPES.keys():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if type(value) is not _TYPES[one] and not (one == "float" and is_number):
                problem = f"found {shown(value)}; write {_TYPE_WORDS[one]}"
                yield Mistake((*path, "config", option), problem)


@functools.cache
def _gym_sources() -> dict[str, dict[str, str]]:
    """Return the data sets in reasoning-gym's sources; what may be an option of each, and its type as it is
    written there."""
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, dict[str, str]] = {}
    for path in Path(spec.origin).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'^DATASET_NAME = "(\w+)"', text, re.MULTILINE):
            fields = re.findall(r"^    (\w+): ([^=#\n]+)", text, re.MULTILINE)
            found[name] = {field: kind.strip() for field, kind in fields if field not in ("size", "seed")}
    return found


def _gym_options() -> dict[str, set[str]]:
    """Return the options of every data set; the prompts' number and seed are fields of the job."""
    from reasoning_gym.factory import DATASETS

    return {
        name: {field.name for field in dataclasses.fields(config)} - {"size", "seed"}
        for name, (_, config) in DATASETS.items()
    }


def _check_reward(data: dict[str, Any], base: Path) -> Iterator[Mistake]:
    scores_itself = _at(data, "trainer", "script") is not None
    if (scores_itself or _only_imitates(data)) and _at(data, "reward") is None:
        return
    for path, source in _sources(data):
        if (own := _at(source, "reward")) is not None:
            yield from _check_one_reward((*path, "reward"), own, [source], base)
    reward = _at(data, "reward") if isinstance(data, dict) and "reward" in data else "reasoning_gym"
    scored = [source for _, source in _sources(data) if _at(source, "reward") is None]
    if scored:
        yield from _check_one_reward(("reward",), reward, scored, base)


def _check_one_reward(path: FieldPath, reward: Any, sources: list[Any], base: Path) -> Iterator[Mistake]:
    if isinstance(reward, list):
        for number, one in enumerate(reward):
            yield from _check_one_reward((*path, number), one, sources, base)
    elif isinstance(reward, dict) and "python" in reward:
        yield from _check_one_reward((*path, "python"), reward["python"], sources, base)
    elif isinstance(reward, dict):
        url = reward.get("http")
        if isinstance(url, str) and not _is_http_url(url):
            yield Mistake((*path, "http"), f"found {shown(url)}; write a URL such as https://HOST/score")
        elif isinstance(url, str) and urlsplit(url).password:
            problem = "found a URL with a password, which everyone can read; name its variable: key_variable"
            yield Mistake((*path, "http"), problem)
    elif isinstance(reward, str) and (wrong := _reward_problem(reward, sources, base)):
        yield Mistake(path, wrong)


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(re.match(r"https?://\S+$", url) and parts.hostname) and parts.port != 0
    except ValueError:  # of an address in brackets, or a port
        return False


def _reward_problem(reward: str, sources: list[Any], base: Path) -> str | None:
    files = [file for source in sources if isinstance(file := _at(source, "source"), str)]
    if reward == "reasoning_gym":
        for file in files:
            if _first_lacks(base / file, "metadata", "source_dataset"):
                return (
                    f"reasoning_gym cannot score {file}, whose lines name no data set; write FILE.py:FUNCTION"
                )
        return None
    if reward in {"math", "exact"}:
        for file in files:
            if all(_first_lacks(base / file, *keys) for keys in ANSWERS):
                return f"{reward} compares with the field answer, which {file} lacks; add it to every line"
        return None
    if ":" not in reward and not reward.endswith(".py"):
        close = difflib.get_close_matches(reward, BUILT_IN_REWARDS, n=1)
        known = ", ".join(BUILT_IN_REWARDS)
        hint = f"did you mean {close[0]}?" if close else f"write FILE.py:FUNCTION or one of {known}"
        return f"found {shown(reward)}; {hint}"
    return _python_problem(reward, base, "FUNCTION", ("rewards", "score")) or _parameter_problem(reward, base)


def _check_environment(data: dict[str, Any], base: Path) -> Iterator[Mistake]:
    environment = _at(data, "environment")
    path: FieldPath = ("environment",)
    if isinstance(environment, dict):
        path, environment = (*path, "python"), environment.get("python")
    if isinstance(environment, str) and (
        problem := _python_problem(environment, base, "NAME", ("env", "Env"), with_classes=True)
    ):
        yield Mistake(path, problem)


def _python_problem(
    name: str, base: Path, kind: str, example: tuple[str, str], *, with_classes: bool = False
) -> str | None:
    """Return what is wrong with FILE.py:KIND; `example` stands in for a missing part."""
    file, colon, function = name.rpartition(":")
    if not colon:
        file, function = name, ""
    if not file.endswith(".py"):
        wanted = f"{file or example[0]}.py:{function or example[1]}"
        return f"found {shown(name)}; write FILE.py:{kind}, such as {wanted}"
    return _file_problem(file, base, "a Python file") or _function_problem(
        base / file, file, function, with_classes=with_classes
    )


def _parameter_problem(reward: str, base: Path) -> str | None:
    """Return which parameters of FILE.py:FUNCTION a reward does not get. Functions that the file does not
    define itself, or changes by a decorator, are the run's to judge."""
    file, _, function = reward.rpartition(":")
    for node in ast.parse((base / file).read_bytes()).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != function:
            continue
        if node.decorator_list:
            return None
        all_of = node.args
        positional = [*all_of.posonlyargs, *all_of.args]
        without = positional[: len(positional) - len(all_of.defaults)]
        without += [a for a, d in zip(all_of.kwonlyargs, all_of.kw_defaults, strict=True) if d is None]
        is_group = any(each.arg == "responses" for each in (*positional, *all_of.kwonlyargs))
        offered = GROUP_OFFERED if is_group else OFFERED
        only_by_place = {each.arg for each in all_of.posonlyargs}
        unknown = [each.arg for each in without if each.arg not in offered or each.arg in only_by_place]
        if unknown:
            words = unknown_in_words(unknown, offered)
            return f"found {file}:{node.lineno}: {function} {words}; correct it"
    return None


def _first_lacks(prompts: Path, *keys: str) -> bool:
    """Return True if the first line of a file of prompts is readable but has no such field."""
    try:
        with prompts.open(encoding="utf-8") as file:
            first = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError):
        return False  # said elsewhere
    return isinstance(first, dict) and _at(first, *keys) is None


def _function_problem(path: Path, file: str, function: str, *, with_classes: bool) -> str | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, *((ast.ClassDef,) if with_classes else ()))
    what = "class or function" if with_classes else "function"
    try:
        module = ast.parse(path.read_bytes(), filename=file)
    except (SyntaxError, ValueError) as exc:
        line = getattr(exc, "lineno", None) or 1
        return f"found {file}:{line}: not Python: {getattr(exc, 'msg', exc)}; correct it"
    names = list(_defined(module.body))
    if function in names or "*" in names:
        return None
    functions = [node.name for node in module.body if isinstance(node, kinds)]
    found = f"found {file}:{function}" if function else f"found {file} without a {what}"
    if function:
        found += f", but {file} has no {what} {function}"
    hint = _hint(function, functions) if function else None
    if hint is None:
        each = " or ".join(f"{file}:{name}" for name in functions if not name.startswith("_"))
        hint = f"write {each}" if each else f"define one in {file}"
    return f"{found}; {hint}"


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's statements bind, also under `if`, `try` and `with`."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If() | ast.Try() | ast.With():
                yield from _defined(node.body)
                yield from _defined(getattr(node, "orelse", []))
                for handler in getattr(node, "handlers", []):
                    yield from _defined(handler.body)


def _check_script(data: dict[str, Any], base: Path) -> Iterator[Mistake]:
    script = _at(data, "trainer", "script")
    if isinstance(script, str) and (problem := _file_problem(script, base, "a Python file")):
        yield Mistake(("trainer", "script"), problem)


def _check_files(data: dict[str, Any], base: Path) -> Iterator[Mistake]:
    files = _at(data, "files")
    for index, name in enumerate(files if isinstance(files, list) else []):
        if isinstance(name, str) and (problem := _file_problem(name, base, "a file")):
            yield Mistake(("files", index), problem)


def _check_traces(data: dict[str, Any], base: Path) -> Iterator[Mistake]:
    offers = _at(data, "rollout", "spot", "any_of")
    for index in range(len(offers) if isinstance(offers, list) else 0):
        path = ("rollout", "spot", "any_of", index, "market", "trace")
        trace = _at(data, *path)
        if isinstance(trace, str) and (problem := _trace_problem(trace, base)):
            yield Mistake(path, problem)


def _trace_problem(name: str, base: Path) -> str | None:
    if problem := _file_problem(name, base, TRACE_FILE):
        return problem
    try:
        load_trace(base / name)
    except ConfigError as bad:
        return f"{bad.problem}; {bad.remedy}"
    return None


def _only_imitates(data: dict[str, Any]) -> bool:
    return _at(data, "algorithm", "loss") == "sft" and _at(data, "evaluation") is None


def _check_somebody_generates(data: dict[str, Any]) -> Iterator[Mistake]:
    if _only_imitates(data):
        return
    engines = _at(data, "trainer", "local_engines")
    machines = _at(data, "rollout", "spot", "max_instances")
    if machines is None and _at(data, "algorithm", "loss") == "sft":
        machines = 0
    if engines == 0 and machines == 0:
        problem = "0 reserved engines + 0 rollout.spot.max_instances = no engine generates; raise one of them"
        yield Mistake(("trainer", "local_engines"), problem)


def _file_problem(name: str, base: Path, wanted: str) -> str | None:
    """Return why `name` cannot be copied to the run's folder under its own name; None if it can."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or name.startswith("~"):
        told = f"found {shown(name)}, which is not below the job file's folder; put it there"
        return f"{told}, or write dataset: FOLDER, which is read in place" if wanted == PROMPTS else told
    path = base / name  # os.path, as pathlib raises where no file can have such a name
    if os.path.isfile(path):
        return None if path.stat().st_size else f"found {name}, which is empty; write {wanted}"
    if os.path.isdir(path):
        return f"found {shown(name)}, which is a folder; write {wanted}"
    folder = path.parent
    near = [each.name for each in folder.iterdir() if each.is_file()] if os.path.isdir(folder) else []
    close = difflib.get_close_matches(path.name, near, n=1, cutoff=0.7)
    hint = f"did you mean {(pure.parent / close[0]).as_posix()}?" if close else f"write {wanted}"
    return f"found {shown(name)}, which does not exist; {hint}"


def _hint(word: str, known: Iterable[str]) -> str | None:
    close = close_match(word, sorted(known))
    return f"did you mean {close}?" if close else None
