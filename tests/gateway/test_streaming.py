"""Streaming passes the same bytes on whatever chunks they come in, and usage only when it was asked for."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.gateway.requests.streaming import EventReader

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


USAGE = event(choices=[], usage={"completion_tokens": 2, "prompt_tokens": 9})
# Texts that look like what the reader looks for.
TRICKS = ["a", 'x"choices":[]y', "[DONE]", "data: [DONE]\n\n", '\n\ndata: {"error": 1}\n\n', "é世"]


def feed(reader: EventReader, data: bytes, cuts: list[int]) -> bytes:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return b"".join(reader.feed(data[a:b]) for a, b in pairwise(edges))


@given(
    st.lists(st.sampled_from(TRICKS) | st.text(max_size=20), max_size=8),
    st.lists(st.integers(0, 900), max_size=12),
    st.booleans(),
)
def test_pieces_do_not_matter(texts: list[str], cuts: list[int], wanted: bool) -> None:
    tokens = b"".join(token(text) for text in texts)
    reader = EventReader(wanted)
    passed = feed(reader, tokens + USAGE + DONE, cuts)
    assert passed == tokens + (USAGE if wanted else b"") + DONE
    assert reader.complete
    assert not reader.broken
    assert reader.tokens == 2, "the engine's count, whatever came"
    assert (reader.buffered, reader.fault) == (0, None)


@given(st.integers(0, 400))
def test_a_stream_that_is_cut_anywhere_is_not_complete(cut: int) -> None:
    data = token("a") + token("b") + USAGE + DONE
    reader = EventReader(True)
    reader.feed(data[: min(cut, len(data) - 1)])
    assert not reader.complete


@pytest.mark.parametrize("error", [event(error={"message": "x"}), b'data: {"error": {"message": "x"}}\n\n'])
def test_an_error_is_passed_on_and_is_no_end(error: bytes) -> None:
    reader = EventReader(False)
    assert reader.feed(token("a") + error + DONE) == token("a") + error + DONE
    assert reader.broken
    assert reader.closed
    assert not reader.complete


def test_without_usage_events_are_counted() -> None:
    reader = EventReader(False)
    reader.feed(token("a") + token("b"))
    assert reader.tokens == 2


def test_a_usage_event_without_a_count_is_passed_on() -> None:
    odd = event(choices=[], usage=None)
    assert EventReader(False).feed(odd) == odd


@pytest.mark.parametrize("details", [None, {"cached_tokens": None}, {"cached_tokens": 7}])
def test_tokens_that_the_engine_had_cached(details: dict[str, int | None] | None) -> None:
    reader = EventReader(False)
    reader.feed(event(choices=[], usage={"completion_tokens": 2, "prompt_tokens": 9, "prompt_tokens_details": details}))
    assert reader.cached_tokens == (details or {}).get("cached_tokens")
