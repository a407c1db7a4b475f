"""What the client of a stream has of it, so that another engine can go on where its engine was lost.

That engine gets the token ids of the answer so far, and its vLLM says the whole answer again in front of the
next token (`engines/vllm/plugin/continuations.py`). Of this the client gets what it does not have: of each
field the characters behind those that it has, however the events cut them. They must be the same characters,
which is checked by a checksum; the text itself is not kept.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any
from zlib import crc32

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from headway.errors import EngineError

# In valid JSON a quote within a string is escaped, so these are keys. vLLM writes them without spaces.
_KEY, _PROMPT = b'"token_ids":[', b'"prompt_token_ids":['
_IDS = re.compile(rb'("(?:prompt_)?token_ids": ?)\[[0-9, ]*\]')
_CREATED = re.compile(rb'"created": ?[0-9]+')
_TEXTS = ("role", "content", "reasoning", "reasoning_content", "refusal")
_Key = tuple[str | int, ...]


class Diverged(EngineError):
    """An engine has gone on with another answer than the client's."""

    def __init__(self) -> None:
        super().__init__(
            "The engine of this answer was lost, and another one did not go on with the same answer.",
            "Send the request again.",
            status=503,
            code="stream_diverged",
        )


class _Function(Struct, gc=False, forbid_unknown_fields=True):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct, gc=False, forbid_unknown_fields=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Delta(Struct, gc=False, forbid_unknown_fields=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprobs(Struct, gc=False):
    content: list[Raw] | None = None  # of a chat
    tokens: list[Raw] | None = None  # of a completion


class _Choice(Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None  # in the first event of a completion


class _Event(Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None  # in the first event of a chat


_EVENT, _NOTHING = Decoder(_Event), _Delta()


class Transcript:
    """What a client has of the stream of one answer.

    shows_ids: the client has asked for token ids.

    Attributes:
        ids: the tokens of the answer.
        complete: all of the answer has come, its finish reason included.
        given_up: its engine has given the answer up (vLLM's reason "abort").
        unable: something came that cannot be continued: its tokens are not known, or a field is not.
    """

    def __init__(self, *, shows_ids: bool) -> None:
        self.ids = array("i")
        self.complete = self.given_up = self.unable = False
        self._shows_ids = shows_ids
        self._prompt_tokens = 0
        self._has: dict[_Key, tuple[int, int]] = {}  # of each field, characters or elements, and a checksum
        self._left: dict[_Key, tuple[int, int]] = {}  # of these, what the new engine has not said again
        self._frame: dict[str, Any] = {}  # id, created and model, as the first engine gave them
        self._moved = False

    def rewind(self) -> None:
        """Expect the answer from its beginning again, from another engine."""
        self._moved, self.given_up = True, False
        self._left = {key: (size, 0) for key, (size, _) in self._has.items() if size}
        if self.ids:
            self._left["ids",] = len(self.ids), 0

    def check_end(self) -> None:
        """Raise Diverged when a stream is over and has not said again what the client has."""
        if self._left and not self.unable:
            raise Diverged

    def passed(self, event: bytes, data: bytes) -> bytes:
        """Take note of an event and return what the client gets of it; data: its JSON. Diverged.

        It is the event that the client would get of an engine that was not asked for token ids.
        """
        if self.unable:
            return self.shown(event)
        if self._left:
            data = self._cut(data)
            event = b"data: " + data + b"\n\n"
        try:
            tells = self._read(data)
        except DecodeError:
            tells = self.unable = True
        if self.unable and self._left:
            raise Diverged
        return self.shown(event) if tells else b""

    def shown(self, event: bytes) -> bytes:
        """Return an event as the client gets it, which knows of no second engine."""
        if not self._shows_ids:
            event = _without_ids(event)
        if self._moved and isinstance(created := self._frame.get("created"), int):
            event = _CREATED.sub(b'"created":%d' % created, event, count=1)
        return event

    def _read(self, data: bytes) -> bool:
        """Take note of what an event brings; return whether the client is to see it. DecodeError."""
        event = _EVENT.decode(data)
        if not self._frame:
            whole = json.loads(data)
            self._frame = {name: whole.get(name) for name in ("id", "object", "created", "model")}
        if event.prompt_token_ids:
            self._prompt_tokens = len(event.prompt_token_ids)
        tells = not event.choices
        for choice in event.choices:
            if choice.finish_reason == "abort":
                self.given_up = True
                return False
            tells |= self._note(choice)
        return tells

    def _note(self, choice: _Choice) -> bool:
        """Take note of what a choice brings; return whether the client is to see it."""
        ids = choice.token_ids
        if ids:
            self.ids.extend(ids)
        if choice.index or (ids is None and self._needs_ids(choice)):
            self.unable = True
        if choice.prompt_token_ids:
            self._prompt_tokens = len(choice.prompt_token_ids)
        if choice.text:
            self._add(("text",), choice.text)
        if choice.delta is not None:
            self._note_delta(choice.delta)
        entries = choice.logprobs and (choice.logprobs.content or choice.logprobs.tokens)
        if entries:
            self._has["logprobs",] = self._has.get(("logprobs",), (0, 0))[0] + len(entries), 0
        if choice.finish_reason is not None:
            self.complete = True
            self.check_end()
        empty = choice.delta is not None and choice.delta == _NOTHING and choice.finish_reason is None
        return not empty or bool(entries) or (self._shows_ids and bool(ids))

    def _note_delta(self, delta: _Delta) -> None:
        if delta.content:
            self._add(("content",), delta.content)
        if delta.reasoning:
            self._add(("reasoning",), delta.reasoning)
        if delta.role:
            self._add(("role",), delta.role)
        if delta.reasoning_content:
            self._add(("reasoning_content",), delta.reasoning_content)
        if delta.refusal:
            self._add(("refusal",), delta.refusal)
        for call in delta.tool_calls or ():
            self._add(("call", call.index), "")
            self._add(("call", call.index, "type"), call.type or "")
            function = call.function or _Function()
            self._add(("call", call.index, "name"), function.name or "")
            self._add(("call", call.index, "arguments"), function.arguments or "")

    def _add(self, key: _Key, text: str) -> None:
        size, checksum = self._has.get(key, (0, 0))
        self._has[key] = size + len(text), crc32(text.encode(), checksum)

    @staticmethod
    def _needs_ids(choice: _Choice) -> bool:
        """Return whether a choice is of tokens; the one with the role, of which nothing may be left, is not."""
        delta = choice.delta
        return delta is None or choice.finish_reason is not None or (delta.role is None and delta != _NOTHING)

    # ---- what is said again

    def _cut(self, data: bytes) -> bytes:
        """Return an event without what the client has."""
        event = json.loads(data)
        for choice in event["choices"]:
            if choice.get("token_ids") is not None:
                choice["token_ids"] = self._cut_ids(choice["token_ids"])
            if isinstance(delta := choice.get("delta"), dict):
                self._cut_texts(delta, _TEXTS)
                self._cut_calls(delta)
            self._cut_texts(choice, ("text",))
            if isinstance(logprobs := choice.get("logprobs"), dict):
                self._cut_logprobs(logprobs)
        return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()

    def _cut_ids(self, ids: list[int]) -> list[int]:
        left = self._left.get(("ids",), (0, 0))[0]
        place = len(self.ids) - left
        again = ids[:left]
        if again != self.ids[place : place + len(again)].tolist():
            raise Diverged
        self._drop(("ids",), len(again))
        return ids[left:]

    def _cut_texts(self, fields: dict[str, Any], names: tuple[str, ...], *prefix: str | int) -> None:
        """Cut texts; those of which nothing is left are removed, but for a completion's, which is always there."""
        for name in names:
            if (text := fields.get(name)) is None:
                continue
            fields[name] = self._cut_text((*prefix, name), text)
            if not fields[name] and name != "text":
                del fields[name]

    def _cut_text(self, key: _Key, text: str) -> str:
        left, checksum = self._left.get(key, (0, 0))
        if not left:
            return text
        again = text[:left]
        checksum = crc32(again.encode(), checksum)
        if len(again) == left and checksum != self._has[key][1]:
            raise Diverged
        self._drop(key, len(again), checksum)
        return text[left:]

    def _cut_calls(self, delta: dict[str, Any]) -> None:
        """Cut calls of tools. Of one that the client has, the id is another one now."""
        kept = []
        for call in delta.pop("tool_calls", None) or ():
            place = call["index"]
            if ("call", place) in self._has:
                call.pop("id", None)
                self._cut_texts(call, ("type",), "call", place)
                if isinstance(function := call.get("function"), dict):
                    self._cut_texts(function, ("name", "arguments"), "call", place)
            if call.get("function") or call.get("id"):
                kept.append(call)
        if kept:
            delta["tool_calls"] = kept

    def _cut_logprobs(self, logprobs: dict[str, Any]) -> None:
        left = self._left.get(("logprobs",), (0, 0))[0]
        lists = {name: value for name, value in logprobs.items() if isinstance(value, list)}
        logprobs |= {name: value[left:] for name, value in lists.items()}
        self._drop(("logprobs",), min(left, max(map(len, lists.values()), default=0)))

    def _drop(self, key: _Key, count: int, checksum: int = 0) -> None:
        """Take note that so much more of a field was said again."""
        left = self._left.get(key, (0, 0))[0] - count
        if left > 0:
            self._left[key] = left, checksum
        else:
            self._left.pop(key, None)

    # ---- an answer that lacks its end alone

    def ending(self, *, usage: bool) -> bytes:
        """Return the rest of a stream whose answer is complete. usage: its usage has not come."""
        counts = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(self.ids),
            "total_tokens": self._prompt_tokens + len(self.ids),
        }
        event = json.dumps({**self._frame, "choices": [], "usage": counts}).encode()
        return (b"data: " + event + b"\n\n" if usage else b"") + b"data: [DONE]\n\n"


def _without_ids(event: bytes) -> bytes:
    """Return an event with null instead of token ids."""
    if _PROMPT in event:
        return _IDS.sub(rb"\1null", event)
    start = event.rfind(_KEY) + len(_KEY) - 1
    return event if start < len(_KEY) else event[:start] + b"null" + event[event.index(b"]", start) + 1 :]
