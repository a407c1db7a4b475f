"""A stream that is cut anywhere and goes on elsewhere gives its client the same text, calls and numbers, once."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headway.gateway.requests.streaming import EventReader
from headway.gateway.transcript import Diverged, Transcript

DONE = b"data: [DONE]\n\n"
Delta = dict[str, Any]
ROLE: Delta = {"role": "assistant", "content": ""}


def event(created: int, choices: list[Any], **more: Any) -> bytes:
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": created, "model": "m"}
    return b"data: " + json.dumps(frame | {"choices": choices} | more, separators=(",", ":")).encode() + b"\n\n"


def chunk(delta: Delta, ids: list[int] | None, reason: str | None = None, created: int = 5, **more: Any) -> bytes:
    return event(
        created, [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "token_ids": ids, **more}]
    )


def call(index: int, **parts: Any) -> Delta:
    function = {name: parts.pop(name) for name in ("name", "arguments") if name in parts}
    return {"tool_calls": [{"index": index, **parts, "function": function}]}


# Answers by token: what each adds to the delta. {} adds nothing that can be seen.
ANSWERS: dict[str, list[Delta]] = {
    "text": [{"content": f"word{i} "} for i in range(8)],
    "characters of several tokens": [{"content": text} for text in ("a", "", "", "\U0001f600", "é", "", "世", "!")],
    "held back for a stop string": [{"content": text} for text in ("a", "b", "", "", "cSTO", "d", "e")],
    "reasoning": [{"reasoning": "hm "}, {"reasoning": "so"}, {}, {"content": "A"}, {"content": "nswer"}],
    "calls of tools": [
        {"content": "Let me see. "},
        {},
        call(0, id="call-a", type="function", name="weather"),
        call(0, arguments='{"city": '),
        call(0, arguments='"Paris"}'),
        {},
        call(1, id="call-b", type="function", name="time", arguments=""),
        call(1, arguments="{}"),
    ],
}


def merged(deltas: list[Delta]) -> Delta:
    """Return one delta for those of several tokens, as vLLM gives them when it is behind."""
    out: Delta = {}
    calls: dict[int, Delta] = {}
    for delta in deltas:
        for name, value in delta.items():
            if name != "tool_calls":
                out[name] = out.get(name, "") + value
                continue
            for one in value:
                known = calls.setdefault(one["index"], {"index": one["index"], "function": {}})
                known |= {name: part for name, part in one.items() if name != "function"}
                for part, text in one["function"].items():
                    known["function"][part] = known["function"].get(part, "") + text
    return out | ({"tool_calls": list(calls.values())} if calls else {})


def stream(deltas: list[Delta], said: int = 0, created: int = 5, suffix: str = "") -> list[bytes]:
    """Return an engine's events; the first `said` tokens come with the next one. suffix: of ids of calls."""
    groups = [deltas[: said + 1], *([delta] for delta in deltas[said + 1 :])]
    events, token = [chunk(ROLE, None, created=created)], 0
    for place, group in enumerate(groups):
        delta = json.loads(json.dumps(merged(group)))
        for one in delta.get("tool_calls", ()):
            if "id" in one:
                one["id"] += suffix
        ids = list(range(100 + token, 100 + token + len(group)))
        token += len(group)
        events.append(chunk(delta, ids, "stop" if place == len(groups) - 1 else None, created))
    usage = {"prompt_tokens": 9, "completion_tokens": token, "total_tokens": 9 + token}
    return [*events, event(created, [], usage=usage), DONE]


def seen(data: bytes) -> dict[str, Any]:
    """Return what a client has of a stream: each field whole, and what must be there once."""
    out: dict[str, Any] = {"roles": 0, "ends": [], "usage": [], "calls": {}, "frames": set(), "ids": []}
    for text in data.decode().split("\n\n"):
        if text in ("", "data: [DONE]"):
            out["done"] = text != "" or out.get("done")
            continue
        body = json.loads(text.removeprefix("data: "))
        out["frames"].add((body["id"], body["created"], body["model"]))
        if "usage" in body:
            out["usage"].append(body["usage"])
        for choice in body["choices"]:
            delta = choice["delta"]
            out["roles"] += "role" in delta
            out["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            out["ids"] += choice["token_ids"] or []
            for name in ("content", "reasoning"):
                out[name] = out.get(name, "") + delta.get(name, "")
            for one in delta.get("tool_calls", ()):
                known = out["calls"].setdefault(one["index"], {"ids": [], "name": "", "arguments": ""})
                known["ids"] += [one["id"]] if "id" in one else []
                for part in ("name", "arguments"):
                    known[part] += one["function"].get(part, "")
    return out


def through(streams: list[list[bytes]], *, shows_ids: bool = False) -> bytes:
    """Return what a client gets of streams that follow each other."""
    transcript = Transcript(shows_ids=shows_ids)
    reader, out = EventReader(True, transcript), b""
    for place, events in enumerate(streams):
        if place:
            transcript.rewind()
            reader.restart()
        out += b"".join(map(reader.feed, events))
        assert reader.fault is None
    assert reader.complete
    return out


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("shows_ids", [False, True])
def test_a_client_sees_one_stream(name: str, shows_ids: bool) -> None:
    deltas = ANSWERS[name]
    whole = seen(through([stream(deltas)], shows_ids=shows_ids))
    assert whole["roles"] == 1
    assert whole["ids"] == (list(range(100, 100 + len(deltas))) if shows_ids else [])
    for first in range(len(deltas)):
        for second in range(first, len(deltas)):
            streams = [
                stream(deltas)[: first + 1],
                stream(deltas, first, 6, "-2")[: 1 + second - first],  # none of it, where both are one
                stream(deltas, second, 7, "-3"),
            ]
            moved = seen(through(streams, shows_ids=shows_ids))
            for one in moved["calls"].values():
                assert len(one["ids"]) == 1
                one["ids"][0] = one["ids"][0].partition("-2")[0].partition("-3")[0]
            assert moved == whole, (first, second)


def test_a_stream_is_as_one_that_was_not_asked_for_ids() -> None:
    deltas = ANSWERS["reasoning"]
    prompt = [1, 2, 3]
    plain = [chunk(ROLE, None), *(chunk(delta, None) for delta in deltas if delta), DONE]
    first = event(5, [{"index": 0, "delta": ROLE, "logprobs": None, "finish_reason": None, "token_ids": None}])
    assert first == plain[0]
    asked = [first.replace(b'"choices"', b'"prompt_token_ids":%s,"choices"' % json.dumps(prompt).encode())]
    asked += [chunk(delta, [i]) for i, delta in enumerate(deltas)]
    got = through([[*asked, DONE]])
    assert got == b"".join(plain).replace(b'"choices"', b'"prompt_token_ids":null,"choices"', 1)


def test_log_probabilities_come_once() -> None:
    def said(token: int, count: int, reason: str | None = None) -> bytes:
        ids = list(range(token, token + count))
        content = [{"token": str(id), "logprob": -0.5, "top_logprobs": []} for id in ids]
        return chunk({"content": "x" * count}, ids, reason, logprobs={"content": content})

    first = [chunk(ROLE, None), said(0, 1), said(1, 2)]
    got = through([first, [chunk(ROLE, None), said(0, 4), said(4, 1, "length"), DONE]])
    bodies = [json.loads(text[6:]) for text in got.split(b"\n\n") if text[6:].startswith(b"{")]
    entries = [one["token"] for body in bodies for one in (body["choices"][0]["logprobs"] or {}).get("content", ())]
    assert entries == ["0", "1", "2", "3", "4"]


def test_log_probabilities_of_a_completion_come_once() -> None:
    def said(token: int, count: int, reason: str | None = None) -> bytes:
        ids = list(range(token, token + count))
        lists: dict[str, Any] = {"tokens": list(map(str, ids)), "token_logprobs": [-0.5] * count}
        lists |= {"text_offset": ids, "top_logprobs": [None] * count}
        choice = {"index": 0, "text": "x" * count, "logprobs": lists, "finish_reason": reason, "token_ids": ids}
        return event(5, [choice])

    got = through([[said(0, 2)], [said(0, 4), said(4, 1, "length"), DONE]])
    choices = [json.loads(text[6:])["choices"][0] for text in got.split(b"\n\n") if text[6:].startswith(b"{")]
    assert "".join(one["text"] for one in choices) == "xxxxx"
    for name, of in (("tokens", str), ("text_offset", int), ("token_logprobs", lambda _: -0.5)):
        assert [value for one in choices for value in one["logprobs"][name]] == [of(i) for i in range(5)]


@pytest.mark.parametrize(
    "again",
    [
        [chunk(ROLE, None), chunk({"content": "abX"}, [1, 2, 3])],
        [chunk(ROLE, None), chunk({"content": "abc"}, [1, 9, 3])],
        [chunk(ROLE, None), chunk({"content": "a"}, [1, 2, 3], "stop")],
        [chunk(ROLE, None), chunk({"reasoning": "abc"}, [1, 2, 3], "stop")],
        [chunk(ROLE, None), chunk({"content": "abc"}, None)],
        [chunk(ROLE, None), DONE],
    ],
    ids=["text", "ids", "shorter", "another field", "no ids", "nothing"],
)
def test_another_answer_is_no_continuation(again: list[bytes]) -> None:
    first = [chunk(ROLE, None), chunk({"content": "ab"}, [1]), chunk({"content": "c"}, [2])]
    with pytest.raises(Diverged):
        through([first, [*again, chunk({"content": "d"}, [4], "stop"), DONE]])


@pytest.mark.parametrize(
    "odd",
    [
        chunk({"content": "a"}, None),
        chunk({"content": "a", "audio": {}}, [1]),
        event(5, [{"index": 1, "delta": {"content": "a"}, "finish_reason": None, "token_ids": [1]}]),
    ],
    ids=["no ids", "a field that is not known", "a second choice"],
)
def test_what_cannot_be_continued_is_passed_on(odd: bytes) -> None:
    transcript = Transcript(shows_ids=True)
    assert EventReader(True, transcript).feed(chunk(ROLE, None) + odd) == chunk(ROLE, None) + odd
    assert transcript.unable


@pytest.mark.parametrize("lost", [1, 2])
def test_the_rest_of_a_complete_answer_is_written_here(lost: int) -> None:
    """Its usage comes once, and with its price."""
    deltas = ANSWERS["text"]
    whole, transcript = stream(deltas), Transcript(shows_ids=False)
    whole[0] = whole[0].replace(b'"choices"', b'"prompt_token_ids":[1,2,3,4,5,6,7,8,9],"choices"')
    reader = EventReader(True, transcript, lambda reader: 1e-6 * reader.tokens)
    out = b"".join(map(reader.feed, whole[:-lost]))
    assert transcript.complete
    out += reader.end(transcript)
    assert out.count(b'"cost":') == 1
    assert seen(re.sub(rb',"cost":[^}]*', b"", out)) == seen(through([whole]))


def test_usage_that_was_not_asked_for_is_not_written() -> None:
    transcript = Transcript(shows_ids=False)
    reader = EventReader(False, transcript)
    for event in stream(ANSWERS["text"])[:-2]:
        reader.feed(event)
    assert reader.end(transcript) == DONE


def test_without_usage_the_known_tokens_are_counted() -> None:
    transcript = Transcript(shows_ids=False)
    reader = EventReader(False, transcript)
    reader.feed(chunk(ROLE, None) + chunk({"content": "a b c"}, [1, 2, 3]))
    assert reader.tokens == 3
    transcript.unable = True
    assert reader.tokens == 2
