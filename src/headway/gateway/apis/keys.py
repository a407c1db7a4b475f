"""`/v1/headway/keys`: lists, creates, rotates and revokes the API keys in the queue's store; for operators."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from headway import clock
from headway.config import Key, key_contradictions, parse
from headway.errors import RequestError, together
from headway.gateway.apis.api import body_docs, error_docs
from headway.gateway.apis.state import AppState
from headway.gateway.apis.stored_keys import configured, described, prefix_of, state_of
from headway.gateway.offload import offload
from headway.gateway.parsing.fields import parse_as
from headway.gateway.watch.audit import DETAIL
from headway.store.queue.keys import StoredKey

PATH = "/v1/headway/keys"
_MOST = 1_000_000  # keys in a list
_BYTES = 200  # of a stored key
_MOST_S = 10 * 366 * 86_400.0  # of a lifetime: ten years
_Seconds = Annotated[float, Field(ge=0, le=_MOST_S, allow_inf_nan=False)]
log = logging.getLogger("headway.gateway.keys")
_REFUSALS = error_docs(400, 401, 403, 404, 409, 413, 415, 429, 503)


class _Search(BaseModel):
    """The keys to be listed."""

    name: str = ""
    ended: bool = True
    limit: Annotated[int, Field(ge=1, le=_MOST)] = 100

    def finds(self, *texts: str) -> bool:
        """Return whether the name is part of a key's prefix, name or tenant."""
        part = self.name.casefold()
        return any(part in text.casefold() for text in texts)


class _Lifetime(BaseModel):
    """expires_s: seconds after which a key expires; unset, never."""

    model_config = ConfigDict(extra="ignore")  # the limits of the key

    expires_s: Annotated[float, Field(gt=0, le=_MOST_S, allow_inf_nan=False)] | None = None


class _Rotation(BaseModel):
    """grace_s: seconds for which the old key stays valid."""

    model_config = ConfigDict(extra="forbid")

    grace_s: _Seconds = 0.0


def _new_key_docs() -> dict[str, Any]:
    schema = TypeAdapter(Key).json_schema()
    del schema["properties"]["key"]
    schema["properties"] |= _Lifetime.model_json_schema()["properties"]
    return body_docs(schema | {"required": ["tenant"]})


def add_key_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints of stored keys."""

    @app.get(PATH, responses=error_docs(400, 401, 403, 503))
    async def keys(request: Request) -> Response:
        """List keys with limits, never texts: configured ones, then stored ones, the newest first.

        name: part of a prefix, name or tenant. ended: false leaves out keys that have ended (listed for 30 days).
        limit: 100 by default. others: further keys that match (`found`), and keys that do not (`hidden`).
        """
        state.check_operator(request)
        return await _listed(state, parse_as(_Search, request.query_params))

    @app.post(PATH, status_code=201, responses=_REFUSALS, openapi_extra=_new_key_docs())
    async def create(request: Request) -> Response:
        """Create a key for a tenant, with the limits of `[[keys]]`; `key` in the answer is shown only now."""
        _check(state, request)
        body = await state.json(request)
        lifetime = parse_as(_Lifetime, body).expires_s
        new, text = await state.stored.create(_parsed(state, body), lifetime)
        _note(state, request, "created", new)
        return _answer([described(new, clock.now()) | {"key": text}], 201)

    rotation = body_docs(_Rotation.model_json_schema(), required=False)

    @app.post(f"{PATH}/{{id}}/rotate", status_code=201, responses=_REFUSALS, openapi_extra=rotation)
    async def rotate(id: str, request: Request) -> Response:
        """Replace a key: the answer has the new one, whose text is shown only now, then the old one."""
        _check(state, request)
        grace_s = parse_as(_Rotation, await state.json(request, b"{}")).grace_s
        old, new, text = await state.stored.rotate(id, grace_s)
        _note(state, request, f"made in place of {id}", new)
        return _answer([described(new, clock.now()) | {"key": text}, described(old, clock.now())], 201)

    @app.delete(f"{PATH}/{{id}}", responses=_REFUSALS)
    async def revoke(id: str, request: Request) -> Response:
        """End a key: within a second no gateway accepts it any more. It stays in the list for 30 days."""
        _check(state, request)
        _note(state, request, "revoked", revoked := await state.stored.revoke(id))
        return _answer([described(revoked, clock.now())])


async def _listed(state: AppState, search: _Search) -> Response:
    stored = await state.stored.listed() if (on := state.config.server.stored_keys) else []
    keys = [*state.configured.values()]
    return await offload(_BYTES * len(stored), lambda: _found(search, keys, stored, stored_keys=on))


def _found(search: _Search, keys: Sequence[Key], stored: Sequence[StoredKey], *, stored_keys: bool) -> Response:
    """Return the keys that a search finds. stored_keys: whether keys can be created."""
    now = clock.now()
    found: list[Key | StoredKey] = [key for key in keys if search.finds("", key.label, key.tenant)]
    for key in sorted(stored, key=lambda one: one.created, reverse=True):
        if search.ended or state_of(key, now) == "active":
            limits = json.loads(key.settings) if search.name else {}
            if search.finds(prefix_of(key), limits.get("name") or "", limits.get("tenant") or ""):
                found.append(key)
    shown = [configured(key) if isinstance(key, Key) else described(key, now) for key in found[: search.limit]]
    others = {"found": len(found) - len(shown), "hidden": len(keys) + len(stored) - len(found)}
    return _answer(shown, others=others, stored_keys=stored_keys)


def _check(state: AppState, request: Request) -> None:
    state.check_operator(request)
    if not state.config.server.stored_keys:
        raise RequestError(
            "This gateway accepts no stored keys.",
            "Set server.stored_keys = true, and restart it.",
            status=403,
            code="stored_keys_off",
        )


def _note(state: AppState, request: Request, act: str, key: StoredKey) -> None:
    """Leave what was done to a key for the audit log; where there is none, log it."""
    request.scope[DETAIL] = what = f"{key.id} (tenant {json.loads(key.settings)['tenant']!a})"
    if not state.gateway.audit.on:
        log.info("API key %s %s by %s", what, act, ascii(state.operator(request))[1:-1])


def _parsed(state: AppState, body: dict[str, Any]) -> Key:
    """Return tenant and limits of a body; errors as those of a configuration."""
    if "key" in body:
        raise RequestError("The text of a key cannot be chosen.", "Leave out key: it is random.", param="key")
    limits = {name: value for name, value in body.items() if name != "expires_s"}
    key = parse({"keys": [limits | {"key": "stored:new"}]}, "the body", checked=False).keys[0]
    if found := [*key_contradictions(0, key, state.config, "the body")]:
        raise together(found)
    return key


def _answer(keys: list[dict[str, Any]], status: int = 200, **more: Any) -> Response:
    return JSONResponse({"object": "list", "data": keys, **more}, status, headers={"cache-control": "no-store"})
