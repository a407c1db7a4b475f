"""The head of an answer goes out with the first bytes of its body, and is never kept for good."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.gateway.http.protocol import HeadWithBody


class Written(asyncio.Transport):
    """A transport that notes each call that writes, and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[bytes]()

    def write(self, data: Any) -> None:
        self.calls.append(bytes(data))

    def writelines(self, parts: Iterable[Any]) -> None:
        self.calls.append(b"".join(parts))

    def close(self) -> None:
        self.calls.append(b"closed")


@pytest.fixture
def cycle() -> Any:
    written = Written()
    cycle = SimpleNamespace(transport=written, written=written)
    cycle.transport = HeadWithBody(cast(Any, cycle))
    return cycle


def test_both_are_one_call_and_the_rest_goes_out_by_itself(cycle: Any) -> None:
    written = cycle.written
    for data in (b"head ", b"first", b"second"):
        cycle.transport.write(data)
    assert written.calls == [b"head first", b"second"]
    assert cycle.transport is written


def test_a_body_of_no_bytes_sends_the_head(cycle: Any) -> None:
    written = cycle.written
    cycle.transport.write(b"head")
    cycle.transport.write(b"")
    assert written.calls == [b"head"]


@pytest.mark.parametrize(("sent", "calls"), [([], [b"closed"]), ([b"head"], [b"head", b"closed"])])
def test_the_end_of_the_gateway_keeps_no_head(cycle: Any, sent: list[bytes], calls: list[bytes]) -> None:
    written = cycle.written
    for data in sent:
        cycle.transport.write(data)
    cycle.transport.close()
    assert written.calls == calls
