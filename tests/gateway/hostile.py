"""A hostile engine: a server of raw sockets, which answers what a request names in `vllm_xargs.hostile`.

It is well by /health and has no scheduler of Headway's. Answers are whole HTTP responses, heads included, so
that they may be wrong in every way.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# An answer, spelt as no serializer does.
GOOD = (
    b'{ "choices" : [{"index": 0, "message": {"content": "\\u00e9 \\/"}, "p": 1.50}],\n'
    b'"usage": {"completion_tokens": 3}}'
)
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"fake "}}]}\n\n'
DONE = b"data: [DONE]\n\n"
MIB = 2**20
# JSON texts that are no answer: as the body of a 200, and as an event of a stream.
NO_ANSWERS = {
    "html": b"<html><h1>It works!</h1></html>",
    "NaN": b'{"choices":[{"index":0,"logprobs":NaN}]}',
    "-Infinity": b'{"choices":[],"usage":{"total_tokens":-Infinity}}',
    "1e999": b'{"choices":[{"index":0,"logprobs":{"content":[{"logprob":-1e999}]}}]}',
    "a list": b'[{"choices":[]}]',
    "a text": b'"fake"',
    "null": b"null",
    "no choices": b'{"id":"x"}',
    "choices of lists": b'{"choices":[["fake"]]}',
    "one choice": b'{"choices":{"index":0}}',
    "a list of usage": b'{"choices":[],"usage":[3]}',
    "1e30 tokens": b'{"choices":[],"usage":{"completion_tokens":1e30}}',
    "too many tokens": b'{"choices":[],"usage":{"completion_tokens":99999999999999999999}}',
    "fewer tokens than none": b'{"choices":[],"usage":{"completion_tokens":-1}}',
    "an error in words": b'{"error":"no"}',
    "deep": b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not UTF-8": b'{"choices":[{"text":"\xff\xfe"}]}',
    "half an object": b'{"choices":[',
    "deep, beside it": b'{"choices":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 empty choices": b'{"choices":[' + b"{}," * 100_000 + b"{}]}",
    "400 digits": b'{"choices":[{"index":0,"p":[0.5,-' + b"9" * 400 + b"]}]}",
    "half of a million lists": b'{"choices":[{"x":[' + b"[]," * 500_000,
    "5,000 digits": b'{"choices":[{"index":' + b"9" * 5000 + b"}]}",
}


_MANY = b'{"error":{"message":"10000 errors:' + b"\\n  stop: not a text" * 10_000 + b'","code":400}}'
# What vLLM says of its own options, and the code of what a client is told.
OPTIONS = {
    "smollm2 is not a multimodal model": "unsupported_content",
    'tool_choice=\\"required\\" requires --tool-call-parser to be set': "tools_unsupported",
}
# Errors as they should be, or too long.
ERRORS = {
    **{said: b'{"error":{"message":"%s","code":400}}' % said.encode() for said in OPTIONS},
    "many problems": _MANY,
    "a long problem": b'{"error":{"message":"not a text: ' + b"x" * 100_000 + b'","type":"T","code":400}}',
}


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json", more: bytes = b"") -> bytes:
    """Return a response with a body of known length."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    return head.encode() + more + b"\r\n" + body


def repeated(part: bytes, size: int) -> Iterator[bytes]:
    """Yield a part again and again until there is as much as said."""
    for _ in range(size // len(part)):
        yield part


def stream(*parts: bytes, kind: str = "text/event-stream") -> Iterable[bytes]:
    """Return a stream of events that ends with the connection."""
    return (f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode(), *parts)


def _huge(head: bytes, part: bytes, size: int) -> Callable[[], Iterator[bytes]]:
    def answer() -> Iterator[bytes]:
        yield head
        yield from repeated(part, size)

    return answer


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
# Whole responses, to any request, of which none is an answer.
RESPONSES: dict[str, Callable[[], Iterable[bytes]]] = {
    "a page": lambda: [whole(b"<h1>It works!</h1>", kind="text/html")],
    "a page of an error": lambda: [whole(b"<h1>Bad gateway</h1>", "502 Bad Gateway", "text/html")],
    "no body": lambda: [whole(b"")],
    "another error": lambda: [whole(b'{"detail":"Not Found"}', "404 Not Found")],
    "an error of another key": lambda: [whole(b'{"error":{"message":"key?"}}', "401 Unauthorized")],
    "an answer as an error": lambda: [whole(GOOD, "400 Bad Request")],
    "an error as an answer": lambda: [whole(b'{"error":{"message":"x"}}')],
    "a redirect": lambda: [whole(GOOD, "307 Temporary Redirect", more=b"location: /v1/stolen\r\n")],
    "no content": lambda: [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "status 799": lambda: [whole(GOOD, "799 Odd")],
    "a header beyond ASCII": lambda: [whole(GOOD, more="x-engine: Grüße\r\n".encode())],
    "a kind beyond ASCII": lambda: [whole(GOOD, kind="application/jsön")],
    "no HTTP": lambda: [b"220 smtp.example.org ESMTP\r\n\r\n"],
    "no header": lambda: [_HEAD + b"nonsense\r\n\r\n" + GOOD],
    "two lengths": lambda: [_HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}\n"],
    "a bad chunk": lambda: [_HEAD + b"transfer-encoding: chunked\r\n\r\n", b"zz\r\nnonsense"],
    "an endless header": _huge(_HEAD + b"x: ", b"y" * 2**16, 60 * MIB),
    "compressed": lambda: [whole(b"\x1f\x8b\x08\x00", more=b"content-encoding: gzip\r\n")],
    "300 MB, as said": _huge(_HEAD + b"content-length: 300000000\r\n\r\n", b" " * 2**16, 300_000_000),
    "300 MB": _huge(_HEAD + b"connection: close\r\n\r\n", b" " * 2**16, 300_000_000),
    "300 MB of an error": _huge(b"HTTP/1.1 500 Oops\r\nconnection: close\r\n\r\n", b" " * 2**16, 300_000_000),
}
_EVENTS = {name: b"data: " + text + b"\n\n" for name, text in NO_ANSWERS.items()}
# What a stream goes on with, none of which is an event.
STREAMS: dict[str, Callable[[], Iterable[bytes]]] = {
    **{name: (lambda event=event: [event]) for name, event in _EVENTS.items()},  # type: ignore[misc]
    "a line of no event": lambda: [b"<html>\n<h1>It works!</h1>\n\n"],
    "60 MB without an end": lambda: repeated(b"data: " + b"x" * 2**16, 60_000_000),
    "60 MB of lines": lambda: repeated(b"data: x\n" * 2**13, 60_000_000),
}


class Hostile(socketserver.ThreadingTCPServer):
    """The server.

    sent: bytes of the answer that was given last. asked: paths of the requests, /health aside.
    thawed: not set while nothing but /health is answered.
    seen: set when the client has the first token of a stream whose next chunk is bad.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(self, *, scheduler: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheduler = scheduler
        self.sent, self.asked = 0, list[str]()
        self.thawed, self.seen = threading.Event(), threading.Event()
        self.thawed.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[Hostile]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.thawed.set()
            self.seen.set()
            self.shutdown()
            thread.join()
            self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A gateway that has had enough closes the connection."""

    def answer(self, path: str, body: bytes) -> Iterable[bytes]:
        """Return the parts of a response."""
        if path == "/health":
            return [whole(b"")]
        self.asked.append(path)
        self.thawed.wait()
        if path == "/headway/control" and self.scheduler:
            return [whole(b'{"block_size": 16, "blocks_total": 1000}')]
        if not path.startswith("/v1/"):
            return [whole(b'{"detail":"Not Found"}', "404 Not Found")]
        asked = json.loads(body)
        name = (asked.get("vllm_xargs") or {}).get("hostile", "good")
        if name == "busy":
            more = f"retry-after: {asked['vllm_xargs']['after']}\r\n".encode()
            return [whole(b'{"error":{"message":"busy"}}', "503 Service Unavailable", more=more)]
        if name == "a bad chunk later":
            return self._bad_chunk_later()
        return generated(name, bool(asked.get("stream")))

    def _bad_chunk_later(self) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        yield b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN)
        self.seen.wait()
        yield b"zz\r\nnonsense"


def generated(name: str, streams: bool) -> Iterable[bytes]:
    """Return the response to a request that asks for it by name; "late NAME" comes after a token."""
    if name in RESPONSES:
        return RESPONSES[name]()
    if name in ERRORS:
        return [whole(ERRORS[name], "400 Bad Request")]
    if name == "good":
        return stream(TOKEN, DONE) if streams else [whole(GOOD)]
    if not streams:
        return [whole(NO_ANSWERS[name])]
    late, name = name.startswith("late "), name.removeprefix("late ")
    return stream(*([TOKEN] if late else []), *STREAMS[name]())


class _Handler(socketserver.StreamRequestHandler):
    server: Hostile

    def handle(self) -> None:
        """Answer one request and close the connection."""
        path, length = self.rfile.readline().split()[1].decode(), 0
        while (line := self.rfile.readline().strip().lower()) != b"":
            name, _, value = line.partition(b":")
            length = int(value) if name == b"content-length" else length
        parts = self.server.answer(path, self.rfile.read(length))
        if path.startswith("/v1/"):
            self.server.sent = 0
        for part in parts:
            self.wfile.write(part)
            if path.startswith("/v1/"):
                self.server.sent += len(part)
