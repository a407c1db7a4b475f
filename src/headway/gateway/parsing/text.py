"""The part of a prompt that the length of its answer is forecast from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(body: Mapping[str, Any]) -> str | None:
    """Return the text that an answer's length depends on most: the user's last message, or the prompt.

    None for token ids and for images without text.
    """
    if "messages" in body:
        by_user = [message for message in body["messages"] if message.get("role") == "user"]
        content = (by_user or body["messages"])[-1].get("content")
        return " ".join(texts_in(content)) or None
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) else prompt
    return first if isinstance(first, str) and first else None


def texts_in(content: Any) -> list[str]:
    """Return the texts of a message: its content is one, or has parts, of which images have none."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [str(text) for text in texts if text is not None]
