"""The stream of a chat as that of a message: typed events, a content block at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headway.serve.anthropic.translate import error_body, stop_of
from headway.serve.chat_stream import ChatStream, thought_of


class MessageEvents(ChatStream):
    """Translates the bytes of a chat's stream, however they are cut.

    id: of the request. model: its name. input_tokens: of its prompt.
    """

    def __init__(self, id: str, model: str, input_tokens: int) -> None:
        super().__init__()
        self._head: dict[str, Any] = {
            "id": id, "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": input_tokens, "output_tokens": 0},
        }  # fmt: skip
        self._begun = self._calls = False
        self._index = -1  # of the block that is open
        self._open: tuple[str, int] | None = None  # its type, and the number of its tool call
        self._reason: tuple[str, str | None] = ("end_turn", None)
        self._usage = dict(self._head["usage"])

    def _fail(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        code = error.get("code")  # vLLM's is the status; Headway's is a word, of what went wrong here
        yield _sent("error", error_body(code if isinstance(code, int) else 500, str(error.get("message"))))

    def _chunk(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._begin()
        if usage := chunk.get("usage"):
            self._usage = {
                "input_tokens": usage.get("prompt_tokens", 0),
                "output_tokens": usage.get("completion_tokens", 0),
            }
        for choice in chunk.get("choices") or ():
            yield from self._delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self._reason = stop_of(choice, self._calls)

    def _begin(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield _sent("message_start", {"message": self._head})

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if thought := thought_of(delta):
            yield from self._block("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""})
            yield self._part({"type": "thinking_delta", "thinking": thought})
        if delta.get("content"):
            yield from self._block("text", 0, {"type": "text", "text": ""})
            yield self._part({"type": "text_delta", "text": delta["content"]})
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            self._calls = True
            begin = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
            yield from self._block("tool_use", int(call.get("index", 0)), begin)
            if function.get("arguments"):
                yield self._part({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _block(self, kind: str, number: int, begin: Mapping[str, Any]) -> Iterator[bytes]:
        """Begin a block unless it is the one that is open."""
        if self._open == (kind, number):
            return
        yield from self._close()
        self._open, self._index = (kind, number), self._index + 1
        yield _sent("content_block_start", {"index": self._index, "content_block": begin})

    def _part(self, delta: Mapping[str, Any]) -> bytes:
        return _sent("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield _sent("content_block_stop", {"index": self._index})

    def _finish(self) -> Iterator[bytes]:
        yield from self._begin()
        yield from self._close()
        reason, word = self._reason
        told = {"delta": {"stop_reason": reason, "stop_sequence": word}}
        yield _sent("message_delta", told | {"usage": self._usage})
        yield _sent("message_stop", {})


def _sent(kind: str, body: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n".encode()
