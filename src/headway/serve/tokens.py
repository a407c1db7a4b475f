"""Reads the tokens of a prompt with the model's own tokenizer, before the request is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.models.resolve import resolve
from headway.serve.request_parsing import ChatBody, CompletionBody

_INLINE = 8192  # characters; longer prompts are counted off the event loop
Encode = Callable[[str, bool], Sized]
# Fields of a body by which the engine makes other tokens of the same messages, or keeps their KV apart.
_OWN_WAY = frozenset(
    ("add_generation_prompt", "add_special_tokens", "cache_salt", "chat_template", "chat_template_kwargs",
     "continue_final_message", "documents", "prompt_embeds", "truncate_prompt_tokens")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the tokenizer reads it.

    tokens: their number, of the longest one when there are several.
    """

    tokens: int
    _encoding: Sized | None = None

    @property
    def ids(self) -> Sequence[int] | None:
        """The tokens that the engine computes; None = the engine alone knows them, or there are several."""
        encoding: Any = self._encoding
        ids: Sequence[int] | None = getattr(encoding, "ids", encoding)  # the Rust tokenizer's, or a list
        return ids


class TokenCounter:
    """Counts with one model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode: Encode = _encode(tokenizer)

    @classmethod
    async def load(cls, model: str) -> TokenCounter:
        """Load a model's tokenizer (seconds); ConfigError when the model has none."""
        return cls(await asyncio.to_thread(load_tokenizer, model))

    async def read(self, body: ChatBody | CompletionBody) -> Prompt:
        """Return the prompt's tokens."""
        size = _size(body)
        if size <= _INLINE:
            return self._read(body)
        return await asyncio.to_thread(self._read, body)

    def _read(self, body: ChatBody | CompletionBody) -> Prompt:
        encoding = self._read_chat(body) if isinstance(body, ChatBody) else self._read_text(body)
        if isinstance(encoding, int):
            return Prompt(encoding)
        alike = _OWN_WAY.isdisjoint(body.model_extra or ())
        return Prompt(len(encoding), encoding if alike else None)

    def _read_text(self, body: CompletionBody) -> Sized | int:
        prompt = body.prompt
        if isinstance(prompt, str):
            return self._encode(prompt, True)
        if isinstance(prompt[0], int):
            return prompt
        return max(len(self._encode(one, True)) if isinstance(one, str) else len(one) for one in prompt)

    def _read_chat(self, body: ChatBody) -> Sized | int:
        messages = [{**m.model_dump(), "content": _text(m.content)} for m in body.messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=body.tools, add_generation_prompt=True, tokenize=False
            )
        except Exception:  # a template may raise anything; the engine's own error reaches the client
            return len(self._encode("\n".join(message["content"] for message in messages), False))
        encoding = self._encode(text, False)  # the template has added the special tokens
        return encoding if all(_is_text(message.content) for message in body.messages) else len(encoding)


def load_tokenizer(model: str) -> Any:
    """Return a model's tokenizer from transformers; ConfigError when the model has none."""
    path = resolve(model)
    try:
        if Path(path, "tokenizer.json").is_file():  # complete in itself; AutoTokenizer would import torch
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The tokenizer of {model!r} cannot be loaded: {str(error)[:300]}.",
            "Headway counts prompts with it; give a complete model directory or a reachable hub id.",
        ) from error


def _encode(tokenizer: Any) -> Encode:
    """Return a function that reads a text's tokens, with or without the special ones around it.

    It calls the Rust tokenizer directly where there is one: transformers' wrapper takes twice the time, and
    sets truncation before each call, which is not safe in two threads.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text, special: tokenizer.encode(text, add_special_tokens=special)
    backend.no_truncation()
    backend.no_padding()
    return lambda text, special: backend.encode(text, add_special_tokens=special)


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return a message's text; other parts (images) count as nothing."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _is_text(content: str | list[dict[str, Any]] | None) -> bool:
    return not isinstance(content, list) or all(part.get("type") == "text" for part in content)


def _size(body: ChatBody | CompletionBody) -> int:
    if isinstance(body, ChatBody):
        return sum(len(_text(message.content)) for message in body.messages)
    if isinstance(body.prompt, str):
        return len(body.prompt)
    return sum(len(one) for one in body.prompt if isinstance(one, str))  # token ids need no counting
