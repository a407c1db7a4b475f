"""What the queue keeps of responses, so that later ones go on from it: `previous_response_id` and `conversation`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headway.errors import HeadwayError, RequestError
from headway.gateway.apis.responses.translate import base_of, response_of
from headway.gateway.in_flight import is_kept, kept_in
from headway.gateway.parsing.fields import list_in, refusal
from headway.gateway.parsing.requests import Kept
from headway.store.queue.port import Broker, Job

CONVERSATIONS = "/v1/conversations"
_NAMES = ("previous_response_id", "conversation")
_OFF = (
    'This server keeps no responses (broker.keep_responses, broker.kind = "memory"); send the earlier items in input.'
)


class Recalled(dict[str, Any]):
    """The body of a response whose input begins with earlier items.

    previous, conversation: the id by which it named them. own: the number of items that came with it.
    """

    previous: str | None = None
    conversation: str | None = None
    own: int = 0


def input_items(raw: Mapping[str, Any]) -> list[Any]:
    """Return the input of a body as items."""
    input = raw.get("input")
    if isinstance(input, str):
        return [{"type": "message", "role": "user", "content": input}]
    return list_in(input, "input")


def names_in(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the field by which a body names what it goes on from, with its id; RequestError for two."""
    names = {name: _id(name, raw[name]) for name in _NAMES if raw.get(name) is not None}
    if len(names) > 1:
        raise RequestError("A response has one past.", "Send previous_response_id or conversation.", param=_NAMES[0])
    return names


async def earlier(names: Mapping[str, str], broker: Broker | None, tenant: str, most: int) -> Job | None:
    """Return the response or conversation that a body names; as `Api.earlier`."""
    for name, id in names.items():
        if broker is None:
            raise refusal(name, _OFF)
        job = await find(broker, id, tenant, name)
        if (size := len(job.request) + len(job.result or b"")) > most:
            raise _too_long(size, most)
        return job
    return None


def recalled(raw: dict[str, Any], job: Job) -> Recalled:
    """Return a body with the items of what it names before its own."""
    own, names = input_items(raw), names_in(raw)
    rest = {name: value for name, value in raw.items() if name not in _NAMES}
    body = Recalled(rest | {"input": [*items_in(job), *own]})
    body.previous, body.conversation, body.own = names.get(_NAMES[0]), names.get(_NAMES[1]), len(own)
    return body


def kept_of(raw: dict[str, Any], *, background: bool) -> Kept | None:
    """Return what is kept of a body, None where its client does not want it."""
    conversation = raw.conversation if isinstance(raw, Recalled) else None
    if raw.get("store") is False and conversation is None:
        return None
    kept: dict[str, Any] = {"input": input_items(raw)}
    if conversation is not None and isinstance(raw, Recalled):
        kept |= {"conversation": conversation, "own": raw.own}
    if background:  # its answer is the engine's
        kept["base"] = echo_of(raw)
    return Kept(json.dumps(kept), conversation)


def echo_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an answer says of its request."""
    echo = base_of(raw, "", 0)
    if isinstance(raw, Recalled):
        echo["previous_response_id"] = raw.previous
        echo["conversation"] = None if raw.conversation is None else {"id": raw.conversation}
    return echo


async def find(broker: Broker, id: str, tenant: str, param: str) -> Job:
    """Return the job of a tenant's response or conversation that has an answer; RequestError 404, or 409 without."""
    job, conversation = await broker.get(id), param == "conversation"
    known = job is not None and job.tenant == tenant and (job.path == CONVERSATIONS) == conversation
    if job is None or not known or (not conversation and not is_kept(job)):
        raise RequestError(
            f"There is no {'conversation' if conversation else 'response that was kept,'} {id[:64]!r}.",
            "They are forgotten after some time (broker.keep_hours).",
            param=param,
            status=404,
            code="not_found",
        )
    if job.result is None:
        what = "has not ended yet" if job.state == "open" else "has failed"
        raise RequestError(f"{id[:64]} {what}.", "Go on from one that is completed.", param=param, status=409)
    return job


def items_in(job: Job) -> list[Any]:
    """Return the items of a conversation, or of a response with all before it."""
    if job.path == CONVERSATIONS:
        return list(json.loads(job.result or b"{}").get("items", ()))
    kept = kept_in(job) or {}
    return [*kept["input"], *_output(job, kept)]


def news_in(job: Job) -> tuple[str, list[Any]]:
    """Return the conversation of a response, and what is added to it: its own input and its answer."""
    kept = kept_in(job) or {}
    own = kept["input"][len(kept["input"]) - kept["own"] :]
    return kept["conversation"], [*own, *_output(job, kept)]


def _output(job: Job, kept: Mapping[str, Any]) -> list[Any]:
    answer = json.loads(job.result or b"{}")
    if job.background:
        answer = response_of(kept["base"] | {"id": job.id}, answer)
    return list(answer["output"])


def _id(name: str, value: Any) -> str:
    id = value.get("id") if isinstance(value, dict) and name == "conversation" else value
    if not isinstance(id, str):
        raise RequestError(f"{name} is not an id.", "Send the id as a string.", param=name)
    return id


def _too_long(size: int, most: int) -> HeadwayError:
    return RequestError(
        f"The conversation has {size} bytes, of {most} at most (server.max_body_kib).",
        "Begin a new one, with a summary.",
        status=413,
        code="conversation_too_long",
    )
