"""Engines that answer nonsense: a 502 in OpenAI's shape, or the last event of a stream; all else goes on."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engines.vllm.process.answers import Answer, read_answer
from headway.engines.vllm.process.connection import MalformedAnswer
from headway.errors import EngineError
from headway.gateway.budget import AnswerBudget
from headway.gateway.requests.streaming import EventReader
from tests.gateway.gateway import Gateway, configuration, serving
from tests.gateway.hostile import DONE, ERRORS, GOOD, MIB, NO_ANSWERS, OPTIONS, RESPONSES, STREAMS, TOKEN, Hostile
from tests.gateway.test_background import begin, finished
from tests.gateway.test_request_ends import events, hanging

MOST = 2 * MIB  # of an answer
SLACK = 24 * MIB  # what sockets, buffers and pieces may hold beside it


@pytest.fixture(scope="module")
def hostile() -> Iterator[Hostile]:
    with Hostile().running() as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(hostile: Hostile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("untrusted")
    with serving(configuration(folder, hostile.url, server={"max_answer_mib": MOST // MIB})) as running:
        yield running


def asks(name: str) -> dict[str, Any]:
    return {"vllm_xargs": {"hostile": name}}


def ended(gateway: Gateway) -> None:
    """Check that the newest request is closed as failed, nothing is left of it, and others go on."""
    state, why = gateway.newest()
    assert (state, str(why).split(":")[0]) == ("failed", "invalid_answer")
    assert gateway.controller.requests == {}
    assert gateway.post(gateway.chat()).content == GOOD
    assert gateway.get("/ready").status_code == 200


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 502, answer.text[:300]
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "invalid_answer")
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", RESPONSES)
def test_what_is_no_response_is_a_502(gateway: Gateway, hostile: Hostile, name: str, stream: bool) -> None:
    refused(gateway.post(gateway.chat(stream=stream, **asks(name))))
    assert hostile.sent < MOST + SLACK, "the rest was not read"
    ended(gateway)


def test_a_key_that_the_engine_refuses_is_not_the_client_s(gateway: Gateway) -> None:
    assert "api_key of its [[engines]]" in refused(gateway.post(gateway.chat(**asks("an error of another key"))))


@pytest.mark.parametrize(("after", "told"), [("7", "7"), ("soon", None), ("9" * 99, None)])
def test_when_to_try_again_is_passed_on(gateway: Gateway, after: str, told: str | None) -> None:
    answer = gateway.post(gateway.chat(vllm_xargs={"hostile": "busy", "after": after}))
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, told)


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_is_a_502(gateway: Gateway, name: str) -> None:
    assert "e0 sent an invalid answer" in refused(gateway.post(gateway.chat(**asks(name))))
    ended(gateway)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_error_about_vllm_s_options_is_told_in_our_words(gateway: Gateway, name: str, stream: bool) -> None:
    answer = gateway.post(gateway.chat(stream=stream, **asks(name)))
    assert answer.status_code == 400
    said = answer.json()["error"]
    assert (said["type"], said["code"]) == ("invalid_request_error", OPTIONS[name])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [name for name in ERRORS if name not in OPTIONS])
def test_of_a_long_error_the_beginning_is_told(gateway: Gateway, name: str, stream: bool) -> None:
    answer = gateway.post(gateway.chat(stream=stream, **asks(name)))
    assert answer.status_code == 400
    said = answer.json()["error"]
    assert len(answer.content) < 1000
    assert said["code"] == 400
    first, *others = said["message"].split("\n")
    if name == "many problems":
        assert (first, others[0]) == ("10000 errors:", "  stop: not a text")
        assert others[-1] == "... and 9,991 more lines"
    else:
        assert first.endswith("xxx...")


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_no_event_is_a_502(gateway: Gateway, hostile: Hostile, name: str) -> None:
    refused(gateway.post(gateway.chat(stream=True, **asks(name))))
    assert hostile.sent < MOST + SLACK
    ended(gateway)


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_no_event_ends_a_stream_that_has_begun(gateway: Gateway, name: str) -> None:
    answer = gateway.post(gateway.chat(stream=True, **asks(f"late {name}")))
    assert answer.status_code == 200
    *_, error, done = events(answer)
    assert error["error"]["code"] == "invalid_answer"
    assert done == "[DONE]"
    ended(gateway)


def test_a_bad_chunk_ends_a_stream(gateway: Gateway, hostile: Hostile) -> None:
    """Its reader waits for the next bytes, which are not HTTP."""
    with hanging(gateway, stream=True, **asks("a bad chunk later")) as line:
        answer = b""
        while b"fake " not in answer:
            answer += line.recv(65536)
        hostile.seen.set()
        while b"[DONE]" not in answer:
            answer += line.recv(65536)
    assert b'"code": "invalid_answer"' in answer
    ended(gateway)


@pytest.mark.parametrize("name", ["a redirect", "NaN", "300 MB", "no HTTP"])
def test_in_background_it_is_failed(gateway: Gateway, name: str) -> None:
    seen = finished(gateway, begin(gateway, **asks(name)))
    assert seen["status"] == "failed"
    assert seen["error"]["message"].startswith("invalid_answer: ")
    ended(gateway)


def test_a_redirect_is_not_followed(gateway: Gateway, hostile: Hostile) -> None:
    refused(gateway.post(gateway.chat(**asks("a redirect"))))
    assert "/v1/stolen" not in hostile.asked


def test_a_stored_answer_is_returned_byte_for_byte(gateway: Gateway) -> None:
    id = begin(gateway)
    seen = finished(gateway, id)
    assert seen["response"]["usage"] == {"completion_tokens": 3}
    assert GOOD in gateway.get(f"/v1/responses/{id}").content


# ---- reading


@given(st.binary(max_size=40) | st.sampled_from([GOOD, *NO_ANSWERS.values()]), st.binary(max_size=3))
def test_any_bytes_are_an_answer_or_none(data: bytes, more: bytes) -> None:
    try:
        answer = read_answer(data + more)
    except ValueError:
        pass
    else:
        assert answer.failed or answer.output_tokens is None or answer.output_tokens >= 0


@given(st.lists(st.sampled_from([b"data: x", b"\n", b"\r\n", b": ", TOKEN, DONE, b"{}", b"id: 1\n"]), max_size=9))
def test_any_stream_is_events_or_none(parts: list[bytes]) -> None:
    reader, passed = EventReader(True), b""
    for part in parts:
        passed += b"" if reader.fault else reader.feed(part)
    assert b"".join(parts).startswith(passed)


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_a_long_text_is_read_as_a_short_one(name: str) -> None:
    blanks = b" " * 2**16
    assert read_answer(GOOD + blanks).output_tokens == 3
    with pytest.raises(ValueError, match=r"\w"):
        read_answer(NO_ANSWERS[name] + blanks)


def long(part: bytes, size: int = 4 * MIB) -> bytes:
    """Return a valid answer of this size that is made of one part."""
    return b'{"choices":[{"index":0,"x":[' + part * (size // len(part)) + b'null]}],"x":"' + b'\\n"}'


@pytest.mark.parametrize(
    "part", [b"[],", b"99999,", b"-0.5,", b'"ab",', b"[" * 50 + b"{}" + b"]" * 50 + b",", b'"\xf0\x9f\x98\x80",']
)
def test_what_an_answer_holds_takes_no_memory(part: bytes) -> None:
    data = long(part)
    tracemalloc.start()
    try:
        assert read_answer(data) == Answer()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MIB, "its own bytes aside"


@given(st.from_regex(r"-?(0|[1-9][0-9]{0,400})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,5})?", fullmatch=True))
def test_a_number_is_refused_if_it_is_beyond_a_double(number: str) -> None:
    data = b'{"choices":[],"text":"1e999 \\" 1e999","x":' + number.encode() + b"}"
    if math.isinf(float(number)):
        with pytest.raises(ValueError, match="beyond the range of numbers"):
            read_answer(data)
    else:
        assert read_answer(data) == Answer()


@pytest.mark.parametrize("number", [b"1e999", b"-1E+400", b"9" * 310])
@pytest.mark.parametrize("back", [1, 2, 3, 4, 63, 64, 65, 200, 309, 310, 311])
def test_a_number_is_found_wherever_it_is(number: bytes, back: int) -> None:
    """Long answers are looked at piece by piece, of 64 KiB each."""
    head = b'{"choices":[],"x":'
    blanks = b" " * (2**16 - len(head) - back)
    with pytest.raises(ValueError, match="beyond the range of numbers"):
        read_answer(head + blanks + number + b" " * 2**16 + b"}")


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from("ab"), _VALUES), _VALUES, st.booleans())
def test_all_that_is_json_may_be_in_an_answer(choice: Any, more: Any, ascii: bool) -> None:
    data = json.dumps({"x": more, "choices": [choice]}, ensure_ascii=ascii).encode()
    assert read_answer(data) == Answer()


def test_an_event_in_many_pieces_is_whole() -> None:
    reader = EventReader(False)
    event = b'data: {"choices":[{"text":"' + b"x" * 3000 + b'"}]}\n\n'
    pieces = [reader.feed(event[i : i + 1]) for i in range(len(event))]
    assert [piece for piece in pieces if piece] == [event]
    assert (reader.buffered, reader.tokens) == (0, 1)


def test_comments_and_other_fields_are_passed_on() -> None:
    reader = EventReader(False)
    event = b': ping\r\n\r\nevent: token\nid: 7\ndata: {"choices":\ndata: []}\n\n'
    assert reader.feed(event + b": bye\n\n" + DONE + TOKEN) == event + b": bye\n\n" + DONE
    assert reader.complete
    assert reader.tokens == 1


def test_large_answers_share_a_limit() -> None:
    budget = AnswerBudget(MOST)
    large = [budget.of("e0") for _ in range(5)]
    for one in large[:4]:
        one.hold(MOST)
    small, last = budget.of("e0"), large[4]
    small.hold(10_000)
    with pytest.raises(EngineError, match="no memory for another") as full:
        last.hold(MOST)
    assert full.value.status == 503
    with pytest.raises(MalformedAnswer):
        small.hold(MOST + 1)
    for one in (*large, small):
        one.close()
        one.close()
    assert budget.used == 0
