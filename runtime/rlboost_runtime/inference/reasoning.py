"""The reasoning in a response, apart from its answer, as clients of reasoning models want it.

A model that thinks first writes its thoughts between two tags of its own, or its chat template has opened
them already. Guarantees: reasoning and answer together are the text without the tags, however it comes in
pieces; a response that never closes its thoughts is all reasoning; one that does not begin with them has
none.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Tags(NamedTuple):
    """What a model writes around its reasoning."""

    opening: str
    closing: str


_KNOWN = (Tags("<think>", "</think>"), Tags("<seed:think>", "</seed:think>"), Tags("<thought>", "</thought>"))


def tags_of(tokenizer: Any) -> Tags | None:
    """Return the tags of a tokenizer's model, None if it has no reasoning: both are tokens of it that are
    shown as text (Qwen, DeepSeek), or its chat template takes earlier reasoning away by them."""
    added = getattr(tokenizer, "added_tokens_encoder", {})
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    template = getattr(tokenizer, "chat_template", None)
    for tags in _KNOWN:
        if all(tag in added and tag not in special for tag in tags):
            return tags
        if isinstance(template, str) and tags.closing in template and not special.intersection(tags):
            return tags
    return None


class ReasoningText:
    """Divides the text of one response."""

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        """`is_open`: the prompt ends within the reasoning."""
        self._tags = tags
        self._held = ""
        self._is_before, self._is_inside = not is_open, is_open

    def add(self, text: str) -> tuple[str, str]:
        """Return what is certain of the reasoning, and of the answer."""
        text, self._held = self._held + text, ""
        if self._is_before:
            start = text.lstrip()
            if len(start) < len(self._tags.opening) and self._tags.opening.startswith(start):
                self._held = text
                return "", ""
            self._is_before = False
            if start.startswith(self._tags.opening):
                self._is_inside, text = True, start.removeprefix(self._tags.opening)
        if not self._is_inside:
            return "", text
        closing = self._tags.closing
        end = text.find(closing)
        if end >= 0:
            self._is_inside = False
            return text[:end], text[end + len(closing) :]
        end = len(text) - overlap(text, closing)
        self._held = text[end:]
        return text[:end], ""

    def finish(self) -> tuple[str, str]:
        """Return what is left once all has come."""
        held, self._held = self._held, ""
        return (held, "") if self._is_inside else ("", held)


def overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` may begin `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
