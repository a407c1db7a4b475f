"""What requests have in common: by name, as simulations say it, and by keys of blocks, as caches know it."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
GRAIN = 16  # tokens between two keys of a prompt; blocks of engines are multiples of it


def prompt_seed(adapter: str | None, salt: str | None) -> bytes:
    """Return the seed of a prompt's keys: KV of another adapter or cache salt is not shared."""
    return blake2b(f"{adapter or ''}\0{salt or ''}".encode(), digest_size=16).digest()


def token_keys(ids: Sequence[int], seed: bytes, before: int = 0) -> Keys:
    """Return the key of each full grain of a prompt: of all its tokens up to the grain's end.

    ids: from the beginning, or after a grain whose key is `before`. seed: as in `prompt_seed`.
    """
    tokens, keys = np.asarray(ids).astype(np.uint32), np.empty(len(ids) // GRAIN, np.int64)
    for i in range(keys.size):
        part = tokens[i * GRAIN : (i + 1) * GRAIN].tobytes()
        digest = blake2b(before.to_bytes(8, "little", signed=True) + part, digest_size=8, key=seed).digest()
        before = int.from_bytes(digest, "little", signed=True)
        keys[i] = before
    return keys


def run_number(run: Sequence[str]) -> int:
    """Return the number by which engines know an application run: above 0, below 2**48 and so exact as a float.

    run: tenant, application and run. Of two runs with one number (one pair in 10**14) the KV goes with the first end.
    """
    digest = blake2b(b"".join(blake2b(part.encode()).digest() for part in run), digest_size=6).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What an engine's prefix cache has taken in and given up.

    epoch: names the cache; a new one is empty. since, until: the report covers the changes after the first
        number up to the second.
    added, removed: keys, eight bytes each. whole: `added` is all that the cache holds, whatever was reported
        before.
    """

    epoch: str
    since: int
    until: int
    added: bytes = field(default=b"", repr=False)
    removed: bytes = field(default=b"", repr=False)
    whole: bool = False

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        packed = {name: b64encode(getattr(self, name)).decode() for name in ("added", "removed")}
        return {"epoch": self.epoch, "since": self.since, "until": self.until, "whole": self.whole} | packed

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> CacheReport:
        """Return what `plain` was made of. KeyError, TypeError or ValueError for anything else."""
        added, removed = (b64decode(told[name], validate=True) for name in ("added", "removed"))
        if len(added) % 8 or len(removed) % 8:
            raise ValueError("keys have eight bytes each")
        covers = str(told["epoch"]), int(told["since"]), int(told["until"])
        return cls(*covers, added, removed, whole=told["whole"] is True)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Which tokens a request has in common with others, so that a simulated prefix cache can find them.

    A chain is a sequence of tokens that grows: a system prompt, a conversation. Equal ids mean equal tokens,
    as far as the shorter piece goes; what follows the piece is the request's own and like nothing else.

    id: of the chain.
    tokens: length of the piece with which the prompt begins.
    answer: the prompt is nothing but this piece, and the chain goes on with the answer: what a later turn of
        a conversation begins with.
    parent: a piece of another chain with which this chain begins (the system prompt of many conversations).
        All pieces of a chain name the same one.
    """

    id: str
    tokens: int
    answer: bool = False
    parent: Prefix | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a prefix has 1 token or more, not {self.tokens}")
        if self.parent is not None and (self.parent.answer or self.parent.tokens > self.tokens):
            raise ValueError(f"{self.parent} is no beginning of {self.tokens} tokens of {self.id}")

    def fits(self, prompt_tokens: int) -> bool:
        """Tell whether a prompt of this length can begin with the piece."""
        return self.tokens == prompt_tokens if self.answer else self.tokens <= prompt_tokens
