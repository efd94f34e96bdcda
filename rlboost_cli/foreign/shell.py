"""Options on the command lines of a shell script, read without running it.

Variables, arrays, `${NAME:-default}`, `$((sums))`, and `case` on a known value are followed; variables of the
environment count as they would for the script. What only running it would tell (`$(commands)`, variables that
an `if` sets) stays open: options that need it are listed with the reason.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_CLOSES = {"'": "'", '"': '"', "`": "`", "(": ")", "{": "}"}
_ASSIGNMENT = re.compile(r"(?:(?:export|local|readonly|declare)\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPTION = re.compile(r"[+~]{0,2}([A-Za-z_][\w/]*(?:[.@][\w/]+)*)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r".*\bopenrlhf[./]cli[./](\w+?)(?:\.py)?")
_FLAG = re.compile(r"--([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_VARIABLE = re.compile(r'"?\$\{?(\w+)\}?"?')
_AFTER_FLAGS = re.compile(r"\||&.*|;|\d?>.*|<.*")
_BEGINS, _ENDS = {"case", "if", "for", "while", "until"}, {"esac", "fi", "done"}
_SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class Open(Exception):
    """A value that only running the script would tell; the text says what it depends on."""


@dataclass(slots=True)
class ScriptOptions:
    """What a script passes to its program."""

    options: dict[str, str] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    """Options, or other words, with values that stay open, and why."""
    flags: dict[str, list[str]] = field(default_factory=dict)
    """What the script passes to a program of OpenRLHF as `--name value ...`, by name; no value: a switch."""
    program: str = ""
    """That program, such as train_ppo_ray."""


@dataclass(slots=True)
class _Block:
    """A `case`, `if` or loop around a statement."""

    word: str | None
    """What a `case` compares, None where it is not known."""
    runs: bool | None = None
    """Whether its present branch runs; None: not known."""
    is_over: bool = False


def read_script(text: str, environment: Mapping[str, str]) -> ScriptOptions:
    """Return the options on the script's command lines, later ones winning."""
    script = _Script(environment)
    for words in _statements(text):
        script.take(words)
    return script.found


class _Script:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self.found = ScriptOptions()
        self._environment = environment
        self._values: dict[str, str | list[str] | Open] = {}
        self._blocks: list[_Block] = []

    def take(self, words: list[str]) -> None:
        """Follow one statement."""
        block = self._blocks[-1] if self._blocks else None
        while words and words[0] in ("then", "do", "else", "elif", "!", "{"):
            words = words[1:]
        if not words:
            return
        if words[-1] == ")" and block is not None:
            self._enter_branch(block, [word for word in words[:-1] if word not in ("|", "in", "(")])
        elif words[0] == ";;" and block is not None:
            block.is_over, block.runs = block.is_over or block.runs is True, False
        elif words[0] in _BEGINS:
            self._blocks.append(_Block(self._word_of_case(words)))
        elif words[0] in _ENDS:
            self._blocks = self._blocks[:-1]
        elif all(each.runs is not False for each in self._blocks):
            self._run(words)

    def _word_of_case(self, words: list[str]) -> str | None:
        try:
            return " ".join(self.expand(words[1])) if words[0] == "case" else None
        except Open:
            return None

    @staticmethod
    def _enter_branch(block: _Block, patterns: list[str]) -> None:
        if block.word is None:
            block.runs = None
        else:
            word = block.word
            block.runs = not block.is_over and any(
                fnmatch.fnmatchcase(word, each.strip("\"'")) for each in patterns
            )

    def _run(self, words: list[str]) -> None:
        is_sure = all(block.runs for block in self._blocks)
        if words[0] in ("export", "local", "readonly", "declare"):
            words = words[1:]
        while words and (found := _ASSIGNMENT.fullmatch(words[0])):
            self._assign(found[1], found[3], is_more=bool(found[2]), is_sure=is_sure)
            words = words[1:]
        for number, word in enumerate(words):
            if found := _PROGRAM.fullmatch(word.strip("\"'")):
                self.found.program = found[1]
                self._take_flags(words[number + 1 :], is_sure=is_sure)
                return
        for word in words:
            self._take_option(word, is_sure=is_sure)

    def _take_flags(self, words: list[str], *, is_sure: bool) -> None:
        """Take `--name value ...`, up to where the command ends."""
        name = ""
        for word in self._spliced(words):
            if _AFTER_FLAGS.fullmatch(word):
                return
            raw: str | None = word
            if flag := _FLAG.fullmatch(word):
                name, raw = flag[1], flag[2]
                self.found.flags[name] = []
                self.found.open.pop(name, None)
            if not name or raw is None:
                continue
            try:
                if not is_sure:
                    raise Open("a condition of the script")
                self.found.flags[name] += self.expand(raw)
            except Open as problem:
                self.found.open[name] = str(problem)

    def _spliced(self, words: list[str]) -> Iterator[str]:
        """Yield words, those of arrays and of variables that hold options in their places."""
        for word in words:
            array, variable = _ARRAY.fullmatch(word), _VARIABLE.fullmatch(word)
            found = array or variable
            value = "" if found is None else self._values.get(found[1], "")
            if isinstance(value, Open):
                if array is not None:
                    self.found.open[word.strip('"')] = str(value)
                else:
                    yield word
            elif array is not None and isinstance(value, list):
                yield from self._spliced(value)
            elif isinstance(value, str) and value.lstrip().startswith("--"):
                yield from (each for statement in _statements(value) for each in statement)
            else:
                yield word

    def _assign(self, name: str, raw: str, *, is_more: bool, is_sure: bool) -> None:
        value: str | list[str] | Open
        try:
            if not is_sure:
                raise Open(f"{name}, which the script sets under a condition")
            if raw.startswith("("):
                before = self._values.get(name, []) if is_more else []
                words = [word for words in _statements(raw[1:-1]) for word in words]
                value = [*(before if isinstance(before, list) else []), *words]
            else:
                value = " ".join(self.expand(raw))
        except Open as problem:
            value = problem
        self._values[name] = value

    def _take_option(self, word: str, *, is_sure: bool) -> None:
        array = _ARRAY.fullmatch(word)
        if array is not None:
            value = self._values.get(array[1], [])
            if isinstance(value, Open):
                self.found.open[word.strip('"')] = str(value)
            for each in value if isinstance(value, list) else []:
                self._take_option(each, is_sure=is_sure)
            return
        found = _OPTION.fullmatch(word.strip("\"'") if word[:1] in "\"'" else word)
        if found is None or not is_sure:
            return
        self.found.open.pop(found[1], None)
        try:
            raw = word if word[:1] not in "\"'" else word[1:-1]
            self.found.options[found[1]] = " ".join(self.expand(raw.partition("=")[2]))
        except Open as problem:
            self.found.open[found[1]] = str(problem)

    # --- values ---------------------------------------------------------------------------------------------

    def expand(self, raw: str) -> list[str]:
        """Return the words that `raw` stands for. Raises `Open`."""
        text = ""
        at = 0
        while at < len(raw):
            part, at = _part(raw, at)
            text += self._expand_part(part)
        return [text]

    def _expand_part(self, part: str) -> str:
        if part.startswith("'") and len(part) > 1:
            return part[1:-1]
        if part.startswith('"') and len(part) > 1:
            return self.expand(part[1:-1].replace("'", "\\'"))[0]
        if part.startswith("$(("):
            return str(self._sum(part[3:-2]))
        if part.startswith(("$(", "`")):
            raise Open("a command that the script runs")
        if part.startswith("${"):
            return self._braced(part[2:-1])
        if part.startswith("$") and len(part) > 1:
            return self._look_up(part[1:])
        return part[1:] if part.startswith("\\") else part

    def _braced(self, inside: str) -> str:
        found = re.fullmatch(r"(\w+|[@*#?])(?:(:?[-=])(.*))?", inside, re.DOTALL)
        if found is None:
            raise Open(f"${{{inside}}}")
        name, kind, otherwise = found[1], found[2], found[3]
        if kind is None:
            return self._look_up(name)
        value = self._values.get(name, self._environment.get(name))
        if value is None or (value == "" and kind.startswith(":")):
            return self.expand(otherwise)[0]
        return self._look_up(name)

    def _look_up(self, name: str) -> str:
        value = self._values.get(name, self._environment.get(name, ""))
        if isinstance(value, Open):
            raise Open(str(value))
        return " ".join(value) if isinstance(value, list) else value

    def _sum(self, text: str) -> int:
        text = " ".join(self.expand(re.sub(r"(?<![\w$\{])([A-Za-z_]\w*)", r"$\1", text)))
        try:
            return _evaluate(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, KeyError, ZeroDivisionError, TypeError, ValueError):
            raise Open(f"the sum {text.strip()}") from None


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.BinOp(left=left, op=kind, right=right):
            return int(_SUMS[type(kind)](_evaluate(left), _evaluate(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case _:
            raise ValueError(node)


# --- words --------------------------------------------------------------------------------------------------


def _part(raw: str, at: int) -> tuple[str, int]:
    """Return the quoted text, expansion or character at `at`, and where the next begins."""
    if raw[at] == "\\" and at + 1 < len(raw):
        return raw[at : at + 2], at + 2
    if raw[at] in "'\"`":
        end = _closing(raw, at)
    elif raw.startswith(("$(", "${"), at):
        end = _closing(raw, at + 1)
    elif found := re.compile(r"\$(\w+|[@*#?])").match(raw, at):
        end = found.end()
    else:
        end = at + 1
    return raw[at:end], end


def _closing(raw: str, at: int) -> int:
    """Return the place behind what closes the quote or bracket at `at`; the end where nothing does."""
    stack = [_CLOSES[raw[at]]]
    at += 1
    while at < len(raw) and stack:
        char, top = raw[at], stack[-1]
        if char == "\\" and top != "'":
            at += 1
        elif char == top:
            stack.pop()
        elif top == "'" or (top == '"' and not raw.startswith(("$(", "${"), at - 1)):
            pass
        elif char in _CLOSES:
            stack.append(_CLOSES[char])
        at += 1
    return min(at, len(raw))


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the words of each statement as they are written; a branch of a `case` ends with a word `)`."""
    words: list[str] = []
    word, at = "", 0
    text = text.replace("\\\r\n", " ").replace("\\\n", " ") + "\n"
    while at < len(text):
        char = text[at]
        if char == "(" or char in "'\"`" or text.startswith(("$(", "${", "\\"), at):
            end = _closing(text, at) if char == "(" else _part(text, at)[1]
            word, at = word + text[at:end], end
            continue
        if char == "#" and not word:
            at = text.index("\n", at)
            continue
        if char not in " \t\r\n;)|":
            word, at = word + char, at + 1
            continue
        words, word = [*words, *([word] if word else [])], ""
        if char == "|":
            words.append("|")
        elif char in "\n;)" and not (char == "\n" and words and words[-1] == "|"):
            yield [*words, ")"] if char == ")" else words
            words = []
            if text.startswith(";;", at):
                yield [";;"]
                at += 1
        at += 1
