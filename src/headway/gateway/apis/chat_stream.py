"""A chat's stream as another API's: what the translations of `anthropic/` and `responses/` share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_DONE = b"[DONE]"


class ChatStream(ABC):
    """Reads a chat's answer, however its bytes are cut, and writes it as another API's.

    headers: more of them, for the response.
    """

    headers: Sequence[tuple[bytes, bytes]] = ()

    def __init__(self) -> None:
        self._rest = b""
        self._over = False

    def feed(self, data: bytes) -> bytes:
        """Return the events for some bytes of the stream."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(out for event in events for out in self._event(event))

    def _event(self, event: bytes) -> Iterator[bytes]:
        data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if self._over:
            return
        if not data:
            if event.startswith(b":"):  # a comment, which keeps proxies from cutting the stream
                yield event + b"\n\n"
            return
        chunk = {} if data == _DONE else json.loads(data)
        self._over = data == _DONE or "error" in chunk
        if data == _DONE:
            yield from self._finish()
        elif "error" in chunk:
            yield from self._fail(chunk["error"])
        else:
            yield from self._chunk(chunk)

    def answer(self) -> bytes | None:
        """Return the whole answer, once it is complete, for those who go on from it; None = there is none."""
        return None

    @abstractmethod
    def whole(self, status: int, data: bytes) -> bytes:
        """Return the body for that of an answer that is not streamed, or of an error."""

    @abstractmethod
    def _chunk(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of a chunk."""

    @abstractmethod
    def _finish(self) -> Iterator[bytes]:
        """Yield the events of the end."""

    @abstractmethod
    def _fail(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of an error, which ends the stream."""


def thought_of(message: Mapping[str, Any]) -> str | None:
    """Return what a model has thought, by either name that vLLM has for it."""
    thought: str | None = message.get("reasoning") or message.get("reasoning_content")
    return thought


def cost_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field with the cost of a chat's usage (`bill.priced`), which other APIs have, too."""
    return {"cost": usage["cost"]} if "cost" in usage else {}


def complete(arguments: Sequence[str]) -> bool:
    """Return whether the parts of a tool call's arguments are complete: a whole JSON object."""
    if not arguments or not arguments[-1].endswith("}"):  # as most parts do not, and joining all takes time
        return False
    try:
        json.loads("".join(arguments))
    except ValueError:
        return False
    return True
