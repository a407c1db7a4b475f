"""The stream of a chat as that of a response: typed events, numbered without gaps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headway.serve.chat_stream import ChatStream, thought_of
from headway.serve.responses.translate import (
    call_item,
    end_of,
    message_item,
    reasoning_item,
    text_part,
    usage_of,
)

_DELTA = {
    "message": "response.output_text.delta", "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}  # fmt: skip


class ResponseEvents(ChatStream):
    """Translates the bytes of a chat's stream, however they are cut.

    base: the response as it is before it has begun.
    """

    def __init__(self, base: Mapping[str, Any]) -> None:
        super().__init__()
        self._response = dict(base)
        self._begun = False
        self._number = 0
        self._open: tuple[str, int] | None = None  # the item that grows: its type, the number of its call
        self._text = ""  # of that item
        self._call: tuple[Any, Any] = (None, None)  # its id and name, of a tool call
        self._calls = 0
        self._items: list[dict[str, Any]] = []
        self._end: dict[str, Any] = end_of("stop")
        self._usage: Mapping[str, Any] = {}

    def _chunk(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._begin()
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            yield from self._delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self._end = end_of(choice["finish_reason"])

    def _begin(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield self._sent("response.created", {"response": self._response})
            yield self._sent("response.in_progress", {"response": self._response})

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if thought := thought_of(delta):
            yield from self._grow("reasoning", 0, thought)
        if delta.get("content"):
            yield from self._grow("message", 0, delta["content"])
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            number = int(call.get("index", 0))
            if self._open != ("function_call", number):
                yield from self._close()
                self._call = call.get("id"), function.get("name")
            yield from self._grow("function_call", number, function.get("arguments") or "")

    def _grow(self, kind: str, number: int, text: str) -> Iterator[bytes]:
        """Add to the item that is open, or to a new one."""
        if self._open != (kind, number):
            yield from self._close()
            self._open, self._text = (kind, number), ""
            at = {"output_index": len(self._items)}
            item = self._item("in_progress")
            if kind != "function_call":
                item["content"] = []
            yield self._sent("response.output_item.added", at | {"item": item})
            if kind == "message":
                part = self._place() | {"part": text_part("")}
                yield self._sent("response.content_part.added", part)
        self._text += text
        if text:
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._sent(_DELTA[kind], self._place() | {"delta": text} | more)

    def _item(self, status: str) -> dict[str, Any]:
        """Return the open item as it is."""
        assert self._open is not None, "only an open item is asked for"
        kind, id = self._open[0], self._response["id"]
        if any(item["type"] == kind for item in self._items):  # ids differ
            id = f"{id}_{len(self._items)}"
        if kind == "message":
            return message_item(id, self._text, status)
        if kind == "reasoning":
            return reasoning_item(id, self._text, status)
        return call_item(f"{self._response['id']}_{self._calls}", *self._call, self._text, status)

    def _place(self) -> dict[str, Any]:
        """Return which part of the response the open item is."""
        assert self._open is not None, "only an open item is asked for"
        place = {"item_id": self._item("")["id"], "output_index": len(self._items)}
        return place if self._open[0] == "function_call" else place | {"content_index": 0}

    def _close(self) -> Iterator[bytes]:
        """End the item that is open."""
        if self._open is None:
            return
        kind, place, item = self._open[0], self._place(), self._item("completed")
        if kind == "message":
            yield self._sent("response.output_text.done", place | {"text": self._text, "logprobs": []})
            yield self._sent("response.content_part.done", place | {"part": text_part(self._text)})
        elif kind == "reasoning":
            yield self._sent("response.reasoning_text.done", place | {"text": self._text})
        else:
            named = {"arguments": self._text, "name": self._call[1]}
            yield self._sent("response.function_call_arguments.done", place | named)
            self._calls += 1
        yield self._sent("response.output_item.done", {"output_index": len(self._items), "item": item})
        self._items.append(item)
        self._open = None

    def _finish(self) -> Iterator[bytes]:
        yield from self._begin()
        yield from self._close()
        if not any(item["type"] != "reasoning" for item in self._items):
            self._items.append(message_item(self._response["id"], ""))
        self._response |= self._end | {"output": self._items, "usage": usage_of(self._usage)}
        yield self._sent(f"response.{self._response['status']}", {"response": self._response})

    def _fail(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._begin()
        told = {"code": "server_error", "message": str(error.get("message"))}
        self._response |= {"status": "failed", "error": told, "output": self._items}
        yield self._sent("response.failed", {"response": self._response})

    def _sent(self, kind: str, body: Mapping[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **body}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode()
