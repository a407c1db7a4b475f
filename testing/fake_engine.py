"""A FAKE engine: vLLM's HTTP API without a model, to measure and test the software in front of an engine.

It responds like vLLM's API server, immediately and with the same word for each token, so that all measured
time is the gateway's or the client's. Every response is marked as fake; its figures do not describe an engine.

A request controls its response through `vllm_xargs`, a test through `FakeEngine.script`; `_Ask` lists the
options. `GET /last` returns the last request and counts; `POST /release/NAME` releases the responses held
under that name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import uvicorn
from starlette.types import Receive, Scope, Send

from headway.gateway.http.garbage import spare_old_objects
from testing.fake_pooling import pooled_answer
from testing.nonsense import NONSENSE, send_nonsense

NAME = "FAKE instant engine"
WORD = "fake "  # the content of every chunk after the first; clients count tokens by it
_BLOCKS, _BLOCK = 100_000, 16
FIRST_ID, _ID = 1000, b"[-1]"  # the id of an answer's first token; what stands for a token's id
_CALL = re.compile(r"FAKE CALL (\w+) (\{.*\}) END")
_SAY = re.compile(r"FAKE SAY (.+?) END")
_COUNTERS = {"steps": 0, "step_seconds": 0.0, "pauses": 0, "evictions": 0}
_METRICS = f"""# HELP vllm:num_preemptions_total Cumulative number of preemptions ({NAME}).
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="fake"}} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig ({NAME}).
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{_BLOCK}",engine="0",num_gpu_blocks="{_BLOCKS}"}} 1.0
# HELP process_open_fds Of this process.
# TYPE process_open_fds gauge
process_open_fds 9.0
"""


@dataclass(frozen=True, slots=True)
class _Ask:
    """One request and the response that it asks for.

    tokens, delay: `fake_tokens` and `fake_delay` (seconds per token), which override the engine's
    prompt: `fake_prompt`, the prompt tokens reported in usage
    stops: its end is that of a model, not that of its limit, as in the answer to a chat with tools
    call: a tool call, that the last message asks for if it is a user's: `FAKE CALL name {"argument": 1} END`
    word: the text of each token; of the only one if the last message asks for it: `FAKE SAY text END`
    hold: `fake_hold`, a name; nothing is sent until that name is released
    cuts: `fake_cuts`; the connection breaks after so many tokens, at the first of these numbers that is above
        those said before
    said: `headway_said`, the token ids of an answer that goes on; said again with the next token
    ids: `return_token_ids`
    pings: `fake_pings`, the number of comments, 0.1 s apart, before the first event and before the last
    end: `fake_end`, how the response ends:
        "400", "429", "500": refused with this status; "html": 502 with a page instead of JSON
        "error": vLLM's error event, "garbage": an event that is not JSON, "cut": a broken connection,
        "short": no [DONE]; each after half of the tokens
        a name in `nonsense.py`: an invalid response
        "no usage": complete, but without usage
        "other": as usual, but an answer that goes on is another one
        "abort": given up after half of the tokens
        "silent": one token without text, "empty": no tokens
    """

    chat: bool
    stream: bool
    usage: bool
    choices: int
    tokens: int
    delay: float
    prompt: int
    hold: str
    cuts: Sequence[int]
    said: Sequence[int]
    ids: bool
    pings: int
    end: str
    model: str
    chunk_tokens: int
    split: bool
    pooled: dict[str, Any] | None
    call: dict[str, Any] | None
    word: str
    stops: bool

    @property
    def shown(self) -> int:
        """Return the number of tokens sent before the end."""
        if self.end in ("silent", "empty"):
            return 0
        return self.tokens if self.end in ("stop", "no usage", "other") else self.tokens // 2

    @property
    def cut(self) -> int:
        """Return the number of tokens after which the connection breaks, 0 = never."""
        return next((cut for cut in self.cuts if cut > len(self.said)), 0)


@dataclass(slots=True)
class FakeEngine:
    """The ASGI app.

    tokens, delay, wait: tokens per response, seconds per token, and extra seconds before the first token
    chunk_tokens: tokens that usage counts for each chunk
    split: send each event in two HTTP chunks, with a comment before it
    barrier: responses begin when this number of requests is open at once; 0 = immediately
    script: returns `end` for a prompt without `fake_end`
    on_request: called with path, body and headers of each request
    metrics: content of /metrics; None = 404
    continues: it goes on with answers that another engine began
    fatal: request fields that the engine reports as able to crash it
    counters: counters of the control route
    cache: what its control route reports of a prefix cache, None = it has none; `POST /cache` sets it
    open, most_open: open requests now, and the maximum so far
    asked, aborted: requests received, and aborted by the client
    ended: application runs that it was told have ended
    tokens_of: for each open request, 1 if its answer has begun, else 0
    """

    tokens: int = 16
    delay: float = 0.0
    wait: float = 0.0
    chunk_tokens: int = 1
    split: bool = False
    barrier: int = 0
    script: Callable[[str], str] = lambda prompt: "stop"
    on_request: Callable[[dict[str, Any]], None] = lambda request: None
    metrics: str | None = _METRICS
    continues: bool = True
    fatal: Sequence[str] = ()
    counters: dict[str, float] = field(default_factory=lambda: dict(_COUNTERS))
    cache: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    open: int = 0
    most_open: int = 0
    asked: int = 0
    ended: list[int] = field(default_factory=list)
    aborted: int = 0
    tokens_of: dict[str, int] = field(default_factory=dict)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"].strip("/").split("/"):
            case [*_, "completions" | "embeddings" | "score" | "rerank" | "pooling" | "classify"]:
                await self._generate(scope, receive, send)
            case [*_, "transcriptions" | "translations"]:
                await self._write_down(scope, receive, send)
            case ["health"]:
                await _say(send, 200, b"")
            case ["metrics"]:
                status = 200 if self.metrics is not None else 404
                await _say(send, status, (self.metrics or "").encode(), b"text/plain; version=0.0.4")
            case ["last"]:
                await _json(send, 200, self._seen())
            case ["release", name]:
                self.released[name].set()
                await _say(send, 200, b"")
            case ["cache"]:
                self.cache = json.loads(await _body(receive))
                await _say(send, 200, b"")
            case ["v1", "models"]:
                card = {"id": "smollm2", "object": "model", "created": 0, "owned_by": NAME}
                await _json(send, 200, {"object": "list", "data": [card]})
            case ["headway", "control"]:
                await self._control(json.loads(await _body(receive)), send)
            case _:
                await _json(send, 404, {"detail": "Not Found"})

    def _seen(self) -> dict[str, Any]:
        counts = {"asked": self.asked, "open": self.open, "aborted": self.aborted, "ended": self.ended}
        return {"fake": NAME, **counts, **(self.last or {})}

    async def _control(self, message: dict[str, Any], send: Send) -> None:
        if message.get("op") == "cache":
            await _json(send, 200, {"cache": self.cache})
            return
        self.ended += message.get("runs", ())
        if message.get("op") not in ("state", "urgency", "pause", "resume", "end"):
            await _json(send, 400, {"error": f"unknown op {message.get('op')!r} ({NAME})"})
            return
        state = {
            "recipe": NAME,
            "running": self.open,
            "waiting": 0,
            "counters": self.counters,
            "jobs": self._jobs(message),
            "log": [],
            "latency": None,
            "blocks_free": _BLOCKS,
            "blocks_total": _BLOCKS,
            "block_size": _BLOCK,
            "continues": self.continues,
            "fatal": self.fatal,
            "prefix_caching": self.cache is not None,
        }
        await _json(send, 200, state)

    def _jobs(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the open requests that the message's `ids` name; without `ids`, none."""
        wanted = message.get("ids", ())
        tokens = {id: count for id, count in self.tokens_of.items() if id in wanted}
        return [{"id": id, "computed": 0, "output_tokens": count} for id, count in tokens.items()]

    # ---- generation

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads(await _body(receive))
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.last = {"path": scope["path"], "body": body, "headers": headers}
        self.on_request(self.last)
        self.asked += 1
        ask = self._ask(scope["path"], body)
        id = str((body.get("vllm_xargs") or {}).get("headway_id", self.asked))
        self.tokens_of[id] = 0
        gone = asyncio.ensure_future(receive())  # the only place where uvicorn reports a disconnect
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open >= self.barrier:
            self.reached.set()
        try:
            if ask.hold:
                await _either(self.released[ask.hold].wait(), gone)
            if self.barrier:
                await _either(self.reached.wait(), gone)
            await _rest(self.wait, gone)
            if not gone.done():
                self.tokens_of[id] = 1
                await self._answer(ask, gone, send)
        finally:
            self.open -= 1
            self.tokens_of.pop(id, None)
            self.aborted += gone.done()
            gone.cancel()

    async def _write_down(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a form with speech; `last` has it as a text."""
        form, headers = await _body(receive), {name.decode(): value.decode() for name, value in scope["headers"]}
        self.last = {"path": scope["path"], "body": form.decode("latin-1"), "headers": headers}
        self.asked += 1
        ask = self._ask("chat/completions", {"stream": b'name="stream"\r\n\r\ntrue' in form})
        gone = asyncio.ensure_future(receive())
        try:
            if ask.stream:
                await _stream(ask, gone, send)
            else:
                await _json(send, 200, {"text": WORD * ask.shown, "usage": {"type": "duration", "seconds": 1}})
        finally:
            gone.cancel()

    def _ask(self, path: str, body: dict[str, Any]) -> _Ask:
        extra = body.get("vllm_xargs") or {}
        tokens = int(extra.get("fake_tokens", self.tokens))
        limit = int(body.get("max_completion_tokens") or body.get("max_tokens") or tokens)
        text = _SAY.search(_last_message(body))
        return _Ask(
            chat=path.endswith("chat/completions"),
            stream=bool(body.get("stream")),
            usage=bool((body.get("stream_options") or {}).get("include_usage")),
            choices=int(body.get("n") or 1),
            tokens=min(tokens, limit) if text is None else 1,
            delay=float(extra.get("fake_delay", self.delay)),
            prompt=int(extra.get("fake_prompt", 11)),
            hold=str(extra.get("fake_hold", "")),
            cuts=extra.get("fake_cuts", ()),
            said=extra.get("headway_said", ()),
            ids=bool(body.get("return_token_ids")),
            pings=int(extra.get("fake_pings", 0)),
            end=str(extra.get("fake_end") or self.script(_prompt(body)) or "stop"),
            chunk_tokens=self.chunk_tokens,
            split=self.split,
            model=body.get("model", ""),
            pooled=pooled_answer(path, body),
            call=_call(body),
            word=WORD if text is None else text[1],
            stops=bool(body.get("tools")),
        )

    async def _answer(self, ask: _Ask, gone: asyncio.Future[Any], send: Send) -> None:
        if ask.end in ("400", "429", "500"):
            await _json(send, int(ask.end), _error(int(ask.end)))
        elif ask.end in NONSENSE:
            await send_nonsense(ask.end, send)
        elif ask.end == "html":
            await _say(send, 502, b"<h1>bad gateway</h1>", b"text/html")
        elif ask.pooled is not None:
            await _json(send, 200, ask.pooled)
        elif ask.stream:
            await _stream(ask, gone, send)
        else:
            await _rest(ask.delay * ask.shown, gone)
            if ask.end == "cut":
                await _start(send, 200, b"application/json", 1000)
                raise ConnectionAbortedError(f"{NAME}: asked to")  # uvicorn closes the connection
            if not gone.done():
                await _json(send, 200, _whole(ask))


async def _stream(ask: _Ask, gone: asyncio.Future[Any], send: Send) -> None:
    """Send each event in its own HTTP chunk, as vLLM does (in two with `split`)."""
    await _start(send, 200, b"text/event-stream; charset=utf-8")
    first, chunk, last = _chunks(ask)
    await _ping(ask, gone, send)
    if ask.call is not None:
        for delta, reason in (({"role": "assistant"}, None), ({"tool_calls": [ask.call]}, None), ({}, "tool_calls")):
            await _part(send, _of_choices(ask, delta, reason), ask.split)
        usage = [_event(ask, [], usage=_usage(ask))] if ask.usage else []
        for event in (*usage, b"data: [DONE]\n\n"):
            await _part(send, event, ask.split)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    if ask.chat:
        await _part(send, first, ask.split)
    for token in range(len(ask.said), ask.shown):
        await _rest(ask.delay, gone)
        if gone.done():
            return
        again = token == len(ask.said) > 0
        await _part(send, _said_again(ask) if again else chunk.replace(_ID, b"[%d]" % (FIRST_ID + token)), ask.split)
        if token + 1 == ask.cut:
            raise ConnectionAbortedError(f"{NAME}: asked to")
    if ask.end == "cut":
        raise ConnectionAbortedError(f"{NAME}: asked to")
    await _ping(ask, gone, send)
    for event in _ending(ask, last):
        await _part(send, event, ask.split)
    with suppress(RuntimeError):  # the client has just left
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _ping(ask: _Ask, gone: asyncio.Future[Any], send: Send) -> None:
    for _ in range(ask.pings):
        await _part(send, b": ping\n\n", ask.split)
        await _rest(0.1, gone)


def _ending(ask: _Ask, last: bytes) -> Iterator[bytes]:
    if ask.end == "short":
        return
    if ask.end == "error":
        yield b"data: " + json.dumps(_error(500)).encode() + b"\n\n"
    elif ask.end == "garbage":
        yield b"data: {not json\n\n"
    else:
        if ask.end != "empty":
            yield last
        if ask.usage and ask.end != "no usage":
            yield _event(ask, [], usage=_usage(ask))
    yield b"data: [DONE]\n\n"


def _chunks(ask: _Ask) -> tuple[bytes, bytes, bytes]:
    """Return three events: the role, one token per choice, and the finish reason."""
    reason = "abort" if ask.end == "abort" else "stop" if ask.stops else "length"
    role = _of_choices(ask, {"role": "assistant", "content": ""}, None)
    chunk = _of_choices(ask, {"content": ask.word}, None, token_ids=[-1])
    return role, chunk, _of_choices(ask, {}, reason, token_ids=[])


def _of_choices(ask: _Ask, delta: dict[str, Any], reason: str | None, **more: Any) -> bytes:
    content: dict[str, Any] = {"delta": delta} if ask.chat else {"text": delta.get("content", "")}
    one = {**content, "logprobs": None, "finish_reason": reason, **(more if ask.ids else {})}
    return b"".join(_event(ask, [{"index": index, **one}]) for index in range(ask.choices))


def _said_again(ask: _Ask) -> bytes:
    """Return the first event of an answer that goes on: all that was said, and the next token."""
    word, tokens = "other " if ask.end == "other" else WORD, len(ask.said) + 1
    return _of_choices(ask, {"content": word * tokens}, None, token_ids=[*ask.said, FIRST_ID + tokens - 1])


def _event(ask: _Ask, choices: list[Any], **more: Any) -> bytes:
    kind = "chat.completion.chunk" if ask.chat else "text_completion"
    return b"data: " + _compact({**_frame(ask, kind), "choices": choices, **more}) + b"\n\n"


def _whole(ask: _Ask) -> dict[str, Any]:
    text = ask.word * ask.shown
    content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text}
    one = {**content, "logprobs": None, "finish_reason": "stop" if ask.stops else "length"}
    if ask.call is not None:
        message = {"role": "assistant", "content": None, "tool_calls": [ask.call]}
        one = {"message": message, "logprobs": None, "finish_reason": "tool_calls"}
    choices = [{"index": index, **one} for index in range(ask.choices)]
    kind = "chat.completion" if ask.chat else "text_completion"
    return {**_frame(ask, kind), "choices": choices, "usage": _usage(ask)}


def _frame(ask: _Ask, kind: str) -> dict[str, Any]:
    name = "chatcmpl-fake" if ask.chat else "cmpl-fake"
    return {"id": name, "object": kind, "created": int(time.time()), "model": ask.model, "system_fingerprint": NAME}


def _usage(ask: _Ask) -> dict[str, int]:
    output_tokens = 1 if ask.end == "silent" else ask.shown * ask.choices * ask.chunk_tokens
    return {"prompt_tokens": ask.prompt, "completion_tokens": output_tokens, "total_tokens": ask.prompt + output_tokens}


def _error(status: int) -> dict[str, Any]:
    return {"error": {"message": f"{NAME}: asked to fail", "type": "FakeError", "param": None, "code": status}}


# ---- ASGI


def _prompt(body: dict[str, Any]) -> str:
    if "messages" in body:
        return str(body["messages"][0].get("content"))
    return str(body.get("prompt", ""))


def _last_message(body: dict[str, Any]) -> str:
    """Return the content of the last message if it is a user's, else ""."""
    message = (body.get("messages") or [{}])[-1]
    return str(message.get("content")) if message.get("role") == "user" else ""


def _call(body: dict[str, Any]) -> dict[str, Any] | None:
    found = _CALL.search(_last_message(body))
    if found is None:
        return None
    function = {"name": found[1], "arguments": found[2]}
    return {"index": 0, "id": "call_fake", "type": "function", "function": function}


async def _rest(seconds: float, gone: asyncio.Future[Any]) -> None:
    """Sleep until the time is up or the client disconnects; 0 seconds still flushes written bytes."""
    if seconds > 0:
        await asyncio.wait({gone}, timeout=seconds)
    else:
        await asyncio.sleep(0)


async def _either(work: Coroutine[Any, Any, Any], gone: asyncio.Future[Any]) -> None:
    """Wait until the work is done or the client disconnects."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _json(send: Send, status: int, data: Any) -> None:
    await _say(send, status, _compact(data))


def _compact(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


async def _say(send: Send, status: int, body: bytes, kind: bytes = b"application/json") -> None:
    await _start(send, status, kind, len(body))
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _start(send: Send, status: int, kind: bytes, length: int | None = None) -> None:
    headers = [(b"content-type", kind), (b"x-fake-engine", NAME.encode())]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _part(send: Send, data: bytes, split: bool = False) -> None:
    parts = (b": a comment\r\n\r\n" + data[:9], data[9:]) if split else (data,)
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})


def _note(journal: TextIO, request: dict[str, Any]) -> None:
    extra = request["body"].get("vllm_xargs") or {}
    journal.write(f"{extra.get('headway_id', '')}\n")


def main(kind: type[FakeEngine] = FakeEngine) -> None:
    """Serve on 127.0.0.1 until a signal."""
    parser = argparse.ArgumentParser(prog="python -m testing.fake_engine", description=f"A {NAME}.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=16, help="tokens per response")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds per token")
    parser.add_argument("--fatal", nargs="*", default=[], help="request fields that it reports as able to crash it")
    parser.add_argument("--journal", type=Path, help="file to which the id of each Headway request is appended")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    app = kind(options.tokens, options.delay, fatal=options.fatal)
    if options.journal is not None:
        app.on_request = partial(_note, options.journal.open("a", buffering=1))
    spare_old_objects()  # with thousands of open responses a full collection would delay them all
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=options.port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
    )


if __name__ == "__main__":
    main()
