"""From prompts to token ids, by way of the chat template where one is wanted.

Ids of messages are exactly those of `tokenizer.apply_chat_template`; no prompt begins with two BOS tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.trainer.data.reading import Example

_NOT_AS_MEANT = (jinja2.TemplateError, ValueError, TypeError, KeyError, IndexError)


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Encodes examples with one tokenizer."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, example: Example) -> tuple[str, list[int]]:
        """Return what the model reads, as text and as token ids. Raises `ConfigError`."""
        chat = example.chat
        if example.messages is None and not chat.takes_text:
            return example.text, self._plain(example.text)
        where = example.where or "data"
        if chat.is_off:
            raise ConfigError(
                f"{where}: messages, but chat_template is none", "write chat_template: auto, or a file"
            )
        if chat.template is None and self.tokenizer.chat_template is None:
            raise ConfigError(
                f"{where}: a chat template is needed, and the model's tokenizer has none",
                "write data.chat_template: FILE.jinja, or take an instruct model",
            )
        try:
            text = self._rendered(example)
        except _NOT_AS_MEANT as exc:
            raise ConfigError(
                f"{where}: the chat template refuses the messages: {exc}",
                "correct the row, or data.system_prompt, template_args or chat_template",
            ) from exc
        return text, list(self.tokenizer.encode(text, add_special_tokens=False))

    def _rendered(self, example: Example) -> str:
        chat = example.chat
        messages = list(example.messages or ({"role": "user", "content": example.text},))
        if chat.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": chat.system_prompt})
        variables: dict[str, Any] = dict(chat.args)
        goes_on = messages[-1]["role"] == "assistant"
        return str(
            self.tokenizer.apply_chat_template(
                messages, chat_template=chat.template, tokenize=False, add_generation_prompt=not goes_on,
                continue_final_message=goes_on, **variables,
            )
        )  # fmt: skip

    def _plain(self, text: str) -> list[int]:
        ids = list(self.tokenizer.encode(text))
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids  # text templated by hand
