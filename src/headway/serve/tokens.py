"""How many tokens does a prompt have? Counted with the model's own tokenizer, before anything is queued."""

from __future__ import annotations

import asyncio
from typing import Any

from headway.errors import ConfigError
from headway.model import resolve
from headway.serve.asking import ChatBody, CompletionBody

_INLINE = 8192  # characters; longer prompts are counted off the event loop


class TokenCounter:
    """Counts with one model's tokenizer, loaded once by `load` (seconds)."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._tokenizer: Any = None

    async def load(self) -> None:
        """Load the tokenizer; ConfigError when the model has none."""
        self._tokenizer = await asyncio.to_thread(self._load)

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        path = resolve(self._model)
        try:
            return AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The tokenizer of {self._model!r} cannot be loaded: {str(error)[:300]}.",
                "Headway counts prompts with it; give a complete model directory or a reachable hub id.",
            ) from error

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
            return self._length(prompt)
        if isinstance(prompt[0], int):
            return len(prompt)
        return max(self._length(one) if isinstance(one, str) else len(one) for one in prompt)

    def _length(self, text: str) -> int:
        return len(self._tokenizer(text, verbose=False)["input_ids"])

    def _count_chat(self, body: ChatBody) -> int:
        messages = [{**m.model_dump(), "content": _text(m.content)} for m in body.messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=body.tools, add_generation_prompt=True, tokenize=False
            )
        except Exception:  # the template may raise anything; the engine judges it, and answers the client
            text = "\n".join(message["content"] for message in messages)
        return self._length(text)


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return a message's text; parts that are not text have no tokens that we could count."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _size(body: ChatBody | CompletionBody) -> int:
    if isinstance(body, ChatBody):
        return sum(len(_text(message.content)) for message in body.messages)
    return len(body.prompt) if isinstance(body.prompt, str) else sum(len(str(one)) for one in body.prompt)
