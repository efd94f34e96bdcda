"""From prompts to token ids, by way of the chat template where one is wanted.

Ids of messages are exactly those of `tokenizer.apply_chat_template`; no prompt begins with two BOS tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    def response(self, example: Example) -> list[int]:
        """Return the token ids of the example's own response, with what ends it: the template's end of the
        assistant's turn, or the tokenizer's end of text. Raises `ConfigError`."""
        where = example.where or "data"
        if not example.response:
            raise ConfigError(
                f"{where}: no response to learn",
                "set data.response_field, or final_assistant: drop where the messages end with it",
            )
        if example.messages is None and not example.chat.takes_text:
            end = self.tokenizer.eos_token_id
            ids = list(self.tokenizer.encode(example.response, add_special_tokens=False))
            return ids if end is None else [*ids, int(end)]
        before = self(example)[0]
        asked = example.messages or ({"role": "user", "content": example.text},)
        told = (*asked, {"role": "assistant", "content": example.response})
        whole = self._rendered(replace(example, messages=told), is_whole=True)
        if not whole.startswith(before):
            raise ConfigError(
                f"{where}: the chat template renders the prompt otherwise once a response follows",
                "correct data.template_args, or give a chat_template that only adds to the prompt",
            )
        return list(self.tokenizer.encode(whole[len(before) :], add_special_tokens=False))

    def _rendered(self, example: Example, *, is_whole: bool = False) -> str:
        chat = example.chat
        messages = list(example.conversation or ())
        variables: dict[str, Any] = dict(chat.args)
        goes_on = messages[-1]["role"] == "assistant" and not is_whole
        return str(
            self.tokenizer.apply_chat_template(
                messages, chat_template=chat.template, tokenize=False, continue_final_message=goes_on,
                add_generation_prompt=not goes_on and not is_whole, **variables,
            )
        )  # fmt: skip

    def _plain(self, text: str) -> list[int]:
        ids = list(self.tokenizer.encode(text))
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids  # text templated by hand
