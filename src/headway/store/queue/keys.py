"""API keys that operators make while gateways run: their record, and the part of a store that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.errors import HeadwayError


@dataclass(frozen=True, slots=True)
class StoredKey:
    """An API key as it is stored: its digest, never the key itself.

    digest: SHA-256 of the key, which is random enough (256 bits) to need no salt.
    settings: tenant and limits, the fields of `[[keys]]` without `key`, as JSON.
    created, expires, revoked: instants in seconds since the epoch; None = never.
    changed: number of its latest change; the store counts them.
    """

    id: str
    digest: bytes
    settings: str
    created: float
    expires: float | None = None
    revoked: float | None = None
    changed: int = 0


class KeyStore(Protocol):
    """The API keys of a store that several gateways may share."""

    async def keys(self, after: int) -> list[StoredKey]:
        """Return the keys whose latest change came after that one, in the order of their changes; 0 = all keys."""

    async def put_keys(self, keys: Sequence[StoredKey], forget: float) -> None:
        """Store new keys, and take over `expires` and `revoked` of known ones, all or none; a revocation stays.

        They survive a crash when this returns. forget: keys that expired or were revoked before it are deleted.
        Raises HeadwayError (409) when another key is stored under the same id; then nothing is stored.
        """


def known_key(id: str) -> HeadwayError:
    """Return the error of a new key whose id another key has (status 409)."""
    return HeadwayError(f"A key {id!r} is stored already.", "Create another one.", status=409)
