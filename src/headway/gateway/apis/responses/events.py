"""The stream of a chat as that of a response: typed events, numbered without gaps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.gateway.apis.chat_stream import ChatStream, complete, thought_of
from headway.gateway.apis.responses.translate import (
    call_item,
    calls_of,
    end_of,
    input_of,
    logprobs_of,
    message_item,
    reasoning_item,
    response_of,
    text_part,
    usage_of,
)

IGNORED = "x-headway-ignored-tools"
_DELTA = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}


@dataclass(slots=True)
class _OutputItem:
    """An item of the output, with the parts of its text that have come.

    at: its place in the output. call: id and name, of a tool call. place: which part of the response it is.
    of: as in `calls_of`. logprobs: of a message's tokens.
    """

    kind: str
    id: str
    at: int
    call: tuple[Any, Any]
    of: Mapping[str, Any] | None = None
    parts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    place: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {"item_id": self.to_dict("")["id"], "output_index": self.at}
        if not self.calls:
            self.place["content_index"] = 0

    @property
    def calls(self) -> bool:
        return self.kind in ("function_call", "custom_tool_call")

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def to_dict(self, status: str) -> dict[str, Any]:
        """Return the item with the text that has come."""
        if self.kind == "message":
            return message_item(self.id, self.text, status, logprobs=self.logprobs)
        if self.kind == "reasoning":
            return reasoning_item(self.id, self.text, status)
        return call_item(self.id, *self.call, self.text, status, of=self.of)


class ResponseEvents(ChatStream):
    """Translates the bytes of a chat's stream, however they are cut.

    A chat may write several tool calls at once: each is an item that is open until its arguments are whole.

    base: the response as it is before it has begun. ignored: types of its tools that are left out, for a header.
    """

    def __init__(self, base: Mapping[str, Any], *, ignored: str = "") -> None:
        super().__init__()
        self.headers = [(IGNORED.encode(), ignored.encode())] if ignored else []
        self._response = dict(base)
        self._known = calls_of(base["tools"])
        self._begun = False
        self._number = 0
        self._items: list[_OutputItem] = []
        self._latest: dict[tuple[str, int], _OutputItem] = {}  # by type and number of the tool call
        self._end: dict[str, Any] = end_of("stop")
        self._usage: Mapping[str, Any] = {}

    def answer(self) -> bytes | None:
        complete = self._response["status"] in ("completed", "incomplete")
        return json.dumps(self._response).encode() if complete else None

    def whole(self, status: int, data: bytes) -> bytes:
        if status != 200:
            return data
        self._response = response_of(self._response, json.loads(data))
        return json.dumps(self._response).encode()

    def _chunk(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._begin()
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            yield from self._delta(choice.get("delta") or {}, logprobs_of(choice))
            if choice.get("finish_reason"):
                self._end = end_of(choice["finish_reason"])

    def _begin(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield self._sse("response.created", {"response": self._response})
            yield self._sse("response.in_progress", {"response": self._response})

    def _delta(self, delta: Mapping[str, Any], logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        if thought := thought_of(delta):
            yield from self._grow("reasoning", 0, thought)
        if delta.get("content"):
            yield from self._grow("message", 0, delta["content"], logprobs=logprobs)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            head = call.get("id"), function.get("name")
            number, text = int(call.get("index", 0)), function.get("arguments") or ""
            yield from self._grow("function_call", number, text, head)

    def _grow(
        self,
        kind: str,
        number: int,
        text: str,
        call: tuple[Any, Any] = (None, None),
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> Iterator[bytes]:
        """Add to the item that is open, or to a new one; the input of a custom tool comes once it is whole."""
        item = self._latest.get((kind, number))
        if item is None or (item.done and kind != "function_call"):
            yield from self._close()
            item = self._latest[kind, number] = self._new(kind, call)
            yield from self._open(item)
        if text and not item.done:
            item.parts.append(text)
            item.logprobs += logprobs
            more: dict[str, Any] = {"logprobs": logprobs} if kind == "message" else {}
            if item.kind != "custom_tool_call":
                yield self._sse(_DELTA[kind], item.place | {"delta": text} | more)

    def _new(self, kind: str, call: tuple[Any, Any]) -> _OutputItem:
        id, at = self._response["id"], len(self._items)
        calls = kind == "function_call"
        alike = sum(item.calls if calls else item.kind == kind for item in self._items)
        if calls:
            id = f"{id}_{alike}"
            kind = self._known.get(call[1], {"type": kind})["type"]
        elif alike:  # ids differ
            id = f"{id}_{at}"
        self._items.append(_OutputItem(kind, id, at, call, self._known.get(call[1])))
        return self._items[-1]

    def _open(self, item: _OutputItem) -> Iterator[bytes]:
        fields = item.to_dict("in_progress")
        if not item.calls:
            fields["content"] = []
        yield self._sse("response.output_item.added", {"output_index": item.at, "item": fields})
        if item.kind == "message":
            yield self._sse("response.content_part.added", item.place | {"part": text_part("")})

    def _close(self, *, end: bool = False) -> Iterator[bytes]:
        """End the items to which nothing can come once another has begun. end: end all."""
        for item in self._items:
            if item.done or not (end or not item.calls or complete(item.parts)):
                continue
            item.done, text = True, item.text
            if item.kind == "message":
                said = item.place | {"text": text, "logprobs": item.logprobs}
                yield self._sse("response.output_text.done", said)
                yield self._sse("response.content_part.done", item.place | {"part": text_part(text, item.logprobs)})
            elif item.kind == "reasoning":
                yield self._sse("response.reasoning_text.done", item.place | {"text": text})
            elif item.kind == "custom_tool_call":
                yield self._sse("response.custom_tool_call_input.delta", item.place | {"delta": input_of(text)})
                yield self._sse("response.custom_tool_call_input.done", item.place | {"input": input_of(text)})
            else:
                call = {"arguments": text, "name": item.to_dict("")["name"]}
                yield self._sse("response.function_call_arguments.done", item.place | call)
            done = {"output_index": item.at, "item": item.to_dict("completed")}
            yield self._sse("response.output_item.done", done)

    def _finish(self) -> Iterator[bytes]:
        yield from self._begin()
        yield from self._close(end=True)
        output = [item.to_dict("completed") for item in self._items]
        if not any(item.kind != "reasoning" for item in self._items):
            output.append(message_item(self._response["id"], ""))
        self._response |= self._end | {"output": output, "usage": usage_of(self._usage)}
        yield self._sse(f"response.{self._response['status']}", {"response": self._response})

    def _fail(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._begin()
        code = "rate_limit_exceeded" if error.get("type") == "rate_limit_error" else "server_error"
        details = {"code": code, "message": str(error.get("message"))}
        output = [item.to_dict("completed") for item in self._items if item.done]
        self._response |= {"status": "failed", "error": details, "output": output}
        yield self._sse("response.failed", {"response": self._response})

    def _sse(self, kind: str, body: Mapping[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **body}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode()
