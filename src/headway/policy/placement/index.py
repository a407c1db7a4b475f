"""Which engine's prefix cache holds which blocks of tokens.

A block is known by a key that stands for all tokens from the beginning of the prompt to its end
(`headway/prefix.py`). An engine with Headway's plugin reports what its cache has taken in and given up. Reports
are numbered: one that comes twice or too late changes nothing, and after one that is lost the index waits for the
next report of all that is cached. Of other engines it assumes that they forget the least recently used blocks; their
answers, where they say how much of the prompt was cached, correct the number of blocks that is assumed.

Between a request's sending and the first report after its end, the index counts its prompt as held: the engine
has it by the time that another request with the same prompt is computed.

A block's beginning is never given up before its end (vLLM frees the end of a chain first), so the part of a
prompt that an engine holds is found by bisection.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headway.prefix import GRAIN, CacheReport
from headway.types import Ints


@dataclass(slots=True)
class _Cache:
    """What one engine holds.

    grains: of `GRAIN` tokens in one of its blocks. blocks_total: blocks that it has. most: those that it is assumed to
        keep; corrected so many times (`corrections`).
    held: keys of blocks, those used last at the end. expected: keys -> requests inside that compute them.
    epoch, position: up to where its reports are known; an engine that never reported has no epoch.
    """

    grains: int
    blocks_total: int
    most: int
    corrections: int = 0
    held: dict[int, None] = field(default_factory=dict)
    expected: Counter[int] = field(default_factory=Counter)
    epoch: str = ""
    position: int = 0

    def blocks(self, keys: Ints) -> int:
        """Return how many of its blocks it holds of a prompt."""
        step, held, expected, key_at = self.grains, self.held, self.expected, keys.item
        low, high = 0, keys.size // step
        if high == 0 or ((key := key_at(step - 1)) not in held and key not in expected):
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            key = key_at(middle * step - 1)
            if key in held or key in expected:
                low = middle
            else:
                high = middle - 1
        return low

    def own(self, keys: Ints) -> list[int]:
        """Return the keys of the blocks that a prompt fills here."""
        return keys[self.grains - 1 :: self.grains].tolist()  # type: ignore[no-any-return]

    def begin(self, keys: Ints) -> None:
        """Expect a prompt that was sent."""
        self.expected.update(self.own(keys))

    def end(self, keys: Ints) -> None:
        """Expect it no longer: it is in the next report, or is assumed where there are none."""
        own, expected = self.own(keys), self.expected
        for key in own:
            if (count := expected.pop(key, 1)) > 1:
                expected[key] = count - 1
        if not self.epoch:
            self._assume(own)

    def _assume(self, keys: list[int]) -> None:
        """Take in a prompt that was computed; of what is full, the blocks used least recently go."""
        for key in reversed(keys):  # vLLM gives up the end of a prompt first
            self.held.pop(key, None)
            self.held[key] = None
        self._trim()

    def _trim(self) -> None:
        while len(self.held) > self.most:
            del self.held[next(iter(self.held))]

    def correct(self, believed: int, cached: int) -> None:
        """Halve what is assumed where an engine found fewer blocks than believed, double it where it found more.

        A block more or less says nothing: the last token of a prompt is always computed.
        """
        if cached < believed - 1:
            self.most = max(len(self.held) // 2, 1)
        elif cached > believed + 1 and self.most < self.blocks_total:
            self.most = min(2 * self.most, self.blocks_total)
        else:
            return
        self.corrections += 1
        self._trim()


class _Sent(NamedTuple):
    """A prompt inside an engine. believed: blocks of it that were held. corrections: of its cache, until then."""

    name: str
    keys: Ints
    believed: int
    corrections: int


class PrefixIndex:
    """The prefix caches of all engines. O(log blocks) for a prompt and an engine.

    Memory is bounded by the engines' blocks and by the prompts inside them: about 100 bytes for a block
    (`headway bench placement --index`).
    """

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._inside: dict[str, _Sent] = {}  # by request
        self._ended: dict[str, list[Ints]] = {}  # engine -> prompts that the next report has

    def add(self, name: str, blocks: int, block_size: int) -> None:
        """Add an engine whose cache is empty; it replaces one of the same name."""
        self.forget(name)
        if block_size % GRAIN == 0:
            self._caches[name] = _Cache(block_size // GRAIN, blocks, blocks)

    def forget(self, name: str) -> None:
        """Forget an engine that is gone, and what is inside it."""
        self._caches.pop(name, None)
        self._ended.pop(name, None)
        for id in [id for id, sent in self._inside.items() if sent.name == name]:
            del self._inside[id]

    def report(self, name: str, report: CacheReport) -> None:
        """Take note of what an engine's cache has taken in and given up."""
        cache = self._caches.get(name)
        if cache is None:
            return
        if report.whole:
            cache.held = dict.fromkeys(_keys(report.added))
        elif (report.epoch, report.since) != (cache.epoch, cache.position):
            return  # a repeat, or one after a gap, which the next report of all closes
        else:
            for key in _keys(report.removed):
                cache.held.pop(key, None)
            cache.held.update(dict.fromkeys(_keys(report.added)))
        cache.epoch, cache.position = report.epoch, report.until
        for keys in self._ended.pop(name, ()):
            cache.end(keys)

    def position(self, name: str) -> tuple[str, int]:
        """Return the epoch and the number of the last report that is known."""
        cache = self._caches.get(name)
        return (cache.epoch, cache.position) if cache is not None else ("", 0)

    def sent(self, id: str, name: str, keys: Ints) -> None:
        """Take note of a prompt that an engine will compute; said twice, it counts once."""
        before = self._inside.get(id)
        if before is not None and before.name == name:
            return
        self.ended(id)
        if (cache := self._caches.get(name)) is not None:
            believed = 0 if cache.epoch else sum(key in cache.held for key in cache.own(keys))
            self._inside[id] = _Sent(name, keys, believed, cache.corrections)
            cache.begin(keys)

    def answered(self, id: str, cached: int) -> None:
        """Take note of how many tokens of a request's prompt its engine found.

        It corrects what is assumed of an engine without reports; not twice by requests that were sent before.
        """
        sent = self._inside.get(id)
        if sent is None or (cache := self._caches[sent.name]).epoch or sent.corrections != cache.corrections:
            return
        cache.correct(sent.believed, cached // (cache.grains * GRAIN))

    def ended(self, id: str) -> None:
        """Take note of a request that has left its engine; unknown ids are ignored."""
        sent = self._inside.pop(id, None)
        if sent is None:
            return
        if self._caches[sent.name].epoch:
            self._ended.setdefault(sent.name, []).append(sent.keys)
        else:
            self._caches[sent.name].end(sent.keys)

    def tokens(self, name: str, keys: Ints) -> int:
        """Return how many tokens of a prompt an engine holds."""
        cache = self._caches.get(name)
        return cache.blocks(keys) * cache.grains * GRAIN if cache is not None else 0


def _keys(packed: bytes) -> list[int]:
    return np.frombuffer(packed, np.int64).tolist()  # type: ignore[no-any-return]
