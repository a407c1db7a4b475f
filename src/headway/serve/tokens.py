"""Counts the tokens of a prompt with the model's own tokenizer, before the request is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.models.resolve import resolve
from headway.serve.request_parsing import ChatBody, CompletionBody

_INLINE = 8192  # characters; longer prompts are counted off the event loop
Length = Callable[[str, bool], int]


class TokenCounter:
    """Counts with one model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._length: Length = _length(tokenizer)

    @classmethod
    async def load(cls, model: str) -> TokenCounter:
        """Load a model's tokenizer (seconds); ConfigError when the model has none."""
        return cls(await asyncio.to_thread(load_tokenizer, model))

    async def count(self, body: ChatBody | CompletionBody) -> int:
        """Return the tokens of the prompt, of the longest one when there are several."""
        size = _size(body)
        if size <= _INLINE:
            return self._count(body)
        return await asyncio.to_thread(self._count, body)

    def _count(self, body: ChatBody | CompletionBody) -> int:
        if isinstance(body, ChatBody):
            return self._count_chat(body)
        prompt = body.prompt
        if isinstance(prompt, str):
            return self._length(prompt, True)
        if isinstance(prompt[0], int):
            return len(prompt)
        return max(self._length(one, True) if isinstance(one, str) else len(one) for one in prompt)

    def _count_chat(self, body: ChatBody) -> int:
        messages = [{**m.model_dump(), "content": _text(m.content)} for m in body.messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=body.tools, add_generation_prompt=True, tokenize=False
            )
        except Exception:  # a template may raise anything; the engine's own error reaches the client
            text = "\n".join(message["content"] for message in messages)
        return self._length(text, False)  # the template has added the special tokens


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


def _length(tokenizer: Any) -> Length:
    """Return a function that counts a text's tokens, with or without the special ones around it.

    It calls the Rust tokenizer directly where there is one: transformers' wrapper takes twice the time, and
    sets truncation before each call, which is not safe in two threads.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text, special: len(tokenizer.encode(text, add_special_tokens=special))
    backend.no_truncation()
    backend.no_padding()
    return lambda text, special: len(backend.encode(text, add_special_tokens=special))


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return a message's text; other parts (images) count as nothing."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _size(body: ChatBody | CompletionBody) -> int:
    if isinstance(body, ChatBody):
        return sum(len(_text(message.content)) for message in body.messages)
    if isinstance(body.prompt, str):
        return len(body.prompt)
    return sum(len(one) for one in body.prompt if isinstance(one, str))  # token ids need no counting
