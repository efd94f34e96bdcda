"""A job file as plain data that knows the line of every field.

YAML 1.2: `yes` is text, `1e-6` a number, a date is text. Duplicate keys, tags and keys that are not text are
mistakes; merge keys and aliases work, but a file that refers to itself, or unfolds beyond `MAX_NODES`, is
refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_NODES = 20_000
"""Fields and entries of one file: far above any job, far below what would eat the memory."""

FieldPath = tuple[str | int, ...]


class Mistake(NamedTuple):
    """One thing to correct: `problem` is `what was found; what to do`. `line` overrides the field's line."""

    path: FieldPath
    problem: str
    line: int | None = None


class SyntaxMistake(Exception):
    """The file cannot be read as YAML at all; `line` counts from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(line, problem)
        self.line = line
        self.problem = problem


@dataclass(slots=True)
class Tree:
    """Plain data (dict, list, str, int, float, bool, None) and where it was written."""

    data: Any  # any JSON value, or a float that JSON has not
    lines: dict[FieldPath, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def line(self, path: FieldPath) -> int:
        """Return the line of `path`, or of the nearest section around it that exists."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)


def dotted(path: FieldPath) -> str:
    """Return `path` as people write it: rollout.spot.any_of[1].infra."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def parse(text: str) -> Tree:
    """Return the content of a job file. Raises `SyntaxMistake`."""
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as exc:
        is_unclosed = "end of stream" in str(exc.problem) or "<stream end>" in str(exc.problem)
        mark = (exc.context_mark if is_unclosed else None) or exc.problem_mark or exc.context_mark
        raise SyntaxMistake(mark.line + 1 if mark else 1, _explain(exc)) from exc
    except YAMLError as exc:  # a character that YAML does not allow
        position = getattr(exc, "position", 0)
        line = text.count("\n", 0, position if isinstance(position, int) else 0) + 1
        raise SyntaxMistake(line, "found a character that YAML does not allow; remove it") from exc
    except RecursionError as exc:
        raise SyntaxMistake(1, "nested too deeply; write it flatter") from exc
    if node is None:
        raise SyntaxMistake(1, "the file is empty; write at least name, model and data")
    if not isinstance(node, MappingNode):
        problem = "found no fields; write `field: value` lines, at least name, model and data"
        raise SyntaxMistake(_line(node), problem)
    return _Builder().build(node)


def _explain(exc: MarkedYAMLError) -> str:
    problem = exc.problem or "not YAML"
    if r"'\t'" in problem:
        return "found a tab; indent with spaces"
    if "another document" in problem:
        return "found a second document (---); write one job per file"
    if "undefined alias" in problem:
        return f"{problem}; define it with & above, or put the text in quotes"
    if "mapping values" in problem:
        return "found a colon where none can be; put the value in quotes, or indent the line as its section"
    context = f" {exc.context}" if exc.context else ""
    return f"not YAML: {problem}{context}; check quotes, brackets and indentation here"


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _text(node: ScalarNode) -> str:
    """Return the text of `node`; as in JSON, two escapes may be the halves of one character. Raises
    `SyntaxMistake` for a half alone: it can be neither stored nor shown."""
    text = str(node.value)
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as exc:
        problem = f"found {text[:40]!r}, with half a character; write all of it"
        raise SyntaxMistake(_line(node), problem) from exc


class _Builder:
    """Turns the nodes of one file into data; `open_nodes` are those around the current one."""

    def __init__(self) -> None:
        self.tree = Tree(None)
        self.open_nodes: set[int] = set()
        self.num_nodes = 0

    def build(self, root: MappingNode) -> Tree:
        self.tree.lines[()] = _line(root)
        self.tree.data = self._value(root, ())
        return self.tree

    def _value(self, node: Node, path: FieldPath) -> Any:  # any JSON value
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise SyntaxMistake(
                _line(node), f"more than {MAX_NODES} entries; write fewer, or use fewer aliases"
            )
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if id(node) in self.open_nodes:
            raise SyntaxMistake(_line(node), "found an alias of the section that it is in; write it out")
        self.open_nodes.add(id(node))
        try:
            return self._mapping(node, path) if isinstance(node, MappingNode) else self._sequence(node, path)
        finally:
            self.open_nodes.remove(id(node))

    def _sequence(self, node: Node, path: FieldPath) -> list[Any]:
        self._check_tag(node, path, "seq")
        return [self._place(item, item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: MappingNode, path: FieldPath) -> dict[str, Any]:
        self._check_tag(node, path, "map")
        data: dict[str, Any] = {}
        merged: list[MappingNode] = []
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merged += self._merged(value, path)
            elif not isinstance(key, ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                found = key.value if isinstance(key, ScalarNode) else "a list or section"
                self._mistake((*path, found), f"found {found} as a field's name; write text", key)
            elif (name := _text(key)) in data:
                first = self.tree.lines[(*path, name)]
                self._mistake((*path, name), f"already given in line {first}; keep one of the two", key)
            else:
                data[name] = self._place(key, value, (*path, name))
        for source in merged:
            for key, value in source.value:
                if isinstance(key, ScalarNode) and (name := _text(key)) not in data:
                    data[name] = self._place(key, value, (*path, name))
        return data

    def _merged(self, node: Node, path: FieldPath) -> list[MappingNode]:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        if all(isinstance(source, MappingNode) for source in sources):
            return list(sources)
        self._mistake((*path, "<<"), "found << without a section to merge; write <<: *NAME", node)
        return []

    def _place(self, where: Node, value: Node, path: FieldPath) -> Any:  # any JSON value
        self.tree.lines[path] = _line(where)
        return self._value(value, path)

    def _scalar(self, node: ScalarNode, path: FieldPath) -> Any:  # any JSON scalar, or nan or inf
        kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
        text = _text(node)
        try:
            match kind:
                case "str" | "timestamp":
                    return text
                case "null":
                    return None
                case "bool":
                    return text.lower() in {"true", "yes", "on"}
                case "int":
                    return _integer(text)
                case "float":
                    return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan").lower())
        except ValueError:
            self._mistake(path, f"found {text[:40]!r}, which is no {kind}; write it without the tag", node)
            return text
        self._check_tag(node, path, "str")
        return text

    def _check_tag(self, node: Node, path: FieldPath, usual: str) -> None:
        tag = str(node.tag)
        if tag != f"tag:yaml.org,2002:{usual}":
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            self._mistake(path, f"found the tag {shown}; write the value without a tag", node)

    def _mistake(self, path: FieldPath, problem: str, node: Node) -> None:
        self.tree.mistakes.append(Mistake(path, problem, _line(node)))


def _integer(text: str) -> int:
    digits = text.replace("_", "")
    return int(digits, 0) if re.match(r"[-+]?0[xob]", digits) else int(digits)
