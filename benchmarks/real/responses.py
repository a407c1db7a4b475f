"""Low-overhead reading and checking of responses from a raw connection, for load clients."""

from __future__ import annotations

import asyncio
import re

from headway.errors import EngineError
from testing.fake_engine import WORD

TOKENS = 200  # tokens per stream
MARK = f'"content":"{WORD}"'.encode()  # in every event with a token
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_END = b"\r\n0\r\n\r\n"  # the end of a chunked body


def complete(data: bytes) -> bool:
    """Return True if the data hold a response's head and its whole body."""
    head, found, body = data.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return bool(found) and (len(body) >= int(length[1]) if length else data.endswith(_END))


def check(data: bytes) -> None:
    """Raise EngineError unless the response's status is 200."""
    if not data.startswith(b"HTTP/1.1 200 "):
        raise EngineError(f"A server refused: {data[:300]!r}.", "This is a bug in the benchmark or the gateway.")


async def read_response(reader: asyncio.StreamReader) -> bytes:
    """Return head and body of the next response on a connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return head + (await reader.readexactly(int(length[1])) if length else await reader.readuntil(_END))


def count_response(data: bytes, streamed: bool) -> None:
    """Raise EngineError unless the response is complete, so that errors do not count as throughput."""
    check(data)
    if streamed and data.count(MARK) != TOKENS:
        tokens = _without_chunks(data).count(MARK)  # a proxy may cut an event in two
        if tokens != TOKENS:
            raise EngineError(f"A stream had {tokens} tokens, not {TOKENS}.", "This is a bug.")


def _without_chunks(data: bytes) -> bytes:
    """Return the decoded body of a chunked response."""
    rest, pieces = data.partition(b"\r\n\r\n")[2], []
    while rest:
        length, _, rest = rest.partition(b"\r\n")
        size = int(length.split(b";")[0], 16)
        pieces.append(rest[:size])
        rest = rest[size + 2 :] if size else b""
    return b"".join(pieces)
