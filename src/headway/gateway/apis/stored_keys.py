"""API keys that operators make, rotate and revoke while gateways run; they are in the queue's store.

Every gateway of a store asks twice a second for the keys that changed, and has all of them in memory: a request costs
a look-up in a dict.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headway import clock
from headway.config import Key
from headway.errors import HeadwayError, RequestError
from headway.store.queue.keys import KeyStore, StoredKey

_POLL_S = 0.5  # a change is known everywhere within a second
_FORGET_S = 30 * 86_400.0  # for which an ended key stays in the list
_KEY = TypeAdapter(Key)
log = logging.getLogger("headway.gateway.keys")


class StoredKeys:
    """The API keys in a store, as this gateway knows them. changed: is called when they are others than before."""

    def __init__(self, store: KeyStore, changed: Callable[[], None]) -> None:
        self._store, self._changed = store, changed
        self._known: dict[str, tuple[StoredKey, Key]] = {}
        self._last = 0  # number of the latest change that is known
        self._turn = asyncio.Lock()

    def usable(self) -> Iterator[tuple[StoredKey, Key]]:
        """Yield the keys that are not revoked, the oldest first, and their tenants and limits."""
        yield from sorted(self._known.values(), key=lambda one: one[0].created)

    async def refresh(self) -> None:
        """Take over what has changed in the store; errors as those of its calls."""
        async with self._turn:
            if not (changes := await self._store.keys(self._last)):
                return
            now = clock.now()
            for stored in changes:
                self._known.pop(stored.id, None)
                if state_of(stored, now) == "active" and (key := _key_of(stored)) is not None:
                    self._known[stored.id] = stored, key
            self._last = changes[-1].changed
        self._changed()

    async def run(self) -> None:
        """Follow the store; while it does not answer, the keys that are known stay valid."""
        away = False
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self.refresh()
                away = False
            except HeadwayError as error:
                if not away:
                    log.warning("changes of API keys are not known for now: %s", error.message)
                away = True

    async def listed(self) -> list[StoredKey]:
        """Return all keys of the store, also those that ended within 30 days."""
        return await self._store.keys(0)

    async def create(self, key: Key, lifetime_s: float | None) -> tuple[StoredKey, str]:
        """Store a new key with the limits of `key`; return it, and its text, which is nowhere else."""
        settings = _KEY.dump_json(key, exclude={"key"}, exclude_defaults=True).decode()
        stored, text = _new(settings, lifetime_s, secrets.token_hex(6))
        await self._put([stored])
        return stored, text

    async def rotate(self, id: str, grace_s: float) -> tuple[StoredKey, StoredKey, str]:
        """Replace a key with one that has its limits and its lifetime; return both, and the new one's text.

        The old key ends in `grace_s`. RequestError: 404 for an unknown key, 409 for one that has ended or was rotated.
        """
        old, now = await self._find(id), clock.now()
        if (state := state_of(old, now)) != "active":
            raise RequestError(f"The key {id} is {state}.", "Create a new one.", status=409, code="key_ended")
        successor = hashlib.sha256(old.id.encode()).hexdigest()[: len(old.id)]
        if any(one.id == successor for one in await self._store.keys(0)):  # its end is that of its grace
            hint = f"Rotate {successor}, which replaces it."
            raise RequestError(f"The key {id} was rotated already.", hint, status=409, code="key_rotated")
        new, text = _new(old.settings, None if old.expires is None else old.expires - old.created, successor)
        ends = min(old.expires or now + grace_s, now + grace_s)
        old = replace(old, expires=ends) if grace_s else replace(old, revoked=now)
        await self._put([new, old])
        return old, new, text

    async def revoke(self, id: str) -> StoredKey:
        """End a key; RequestError (404) for an unknown one."""
        stored = await self._find(id)
        if stored.revoked is None:
            stored = replace(stored, revoked=clock.now())
            await self._put([stored])
        return stored

    async def _find(self, id: str) -> StoredKey:
        for stored in await self._store.keys(0):
            if stored.id == id:
                return stored
        hint = "List them with `headway key list`."
        raise RequestError(f"There is no stored key {id[:64]!r}.", hint, status=404, code="key_not_found")

    async def _put(self, keys: Sequence[StoredKey]) -> None:
        await self._store.put_keys(keys, clock.now() - _FORGET_S)
        await self.refresh()


def state_of(key: StoredKey, now: float) -> str:
    """Return a key's state: active, expired or revoked."""
    if key.revoked is not None:
        return "revoked"
    return "expired" if key.expires is not None and key.expires <= now else "active"


def prefix_of(key: StoredKey) -> str:
    """Return how the text of a key begins, by which its holders can tell it."""
    return f"hw-{key.id}-"


def described(key: StoredKey, now: float) -> dict[str, Any]:
    """Return a key for operators, without what it is compared by."""
    limits: Mapping[str, Any] = json.loads(key.settings)
    state, ends = state_of(key, now), {"expires_at": key.expires, "revoked_at": key.revoked}
    return {"id": key.id, "prefix": prefix_of(key), "state": state, "created_at": key.created, **ends, **limits}


def configured(key: Key) -> dict[str, Any]:
    """Return a key of `[[keys]]` in the same form; it has no id and no times."""
    limits = _KEY.dump_python(key, mode="json", exclude={"key"}, exclude_defaults=True)
    nothing = dict.fromkeys(("id", "prefix", "created_at", "expires_at", "revoked_at"))
    return {**nothing, "state": "configured", **limits, "name": key.label}


def _new(settings: str, lifetime_s: float | None, id: str) -> tuple[StoredKey, str]:
    now = clock.now()
    expires = None if lifetime_s is None else now + lifetime_s
    blank = StoredKey(id, b"", settings, now, expires)
    text = prefix_of(blank) + secrets.token_urlsafe(32)
    return replace(blank, digest=hashlib.sha256(text.encode()).digest()), text


def _key_of(stored: StoredKey) -> Key | None:
    """Return tenant and limits of a key; None if this Headway cannot keep to them, so that it is not accepted."""
    try:
        settings = json.loads(stored.settings) | {"key": f"stored:{stored.id}"}
        named = settings | {"name": settings.get("name") or stored.id}
        return _KEY.validate_json(json.dumps(named))
    except (ValidationError, ValueError, TypeError):
        log.error("the stored key %s is not accepted: this Headway does not know its limits", stored.id)
        return None
