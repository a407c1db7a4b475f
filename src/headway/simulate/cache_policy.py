"""A cache of fixed size in front of a slower store, and the policies of Hermes 5.4 that decide what it holds.

What is cached is known by a name and has a size: KV of a chain of tokens, a LoRA adapter. What leaves the
cache stays in the store. Time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from headway.errors import ConfigError


@dataclass(slots=True)
class Item:
    """Something in a cache.

    ready: instant from which on it can be used; later than now = it is being loaded.
    used: number of its latest use, higher = later.
    held: requests in service that use it.
    until: instant to which it is expected to be needed, by prewarming or by a run in progress.
    fetched: it was loaded before a request started that uses it, and none has used it since.
    """

    size: float
    ready: float
    used: int
    held: int = 0
    until: float = -math.inf
    fetched: bool = False


FREE, NEEDED, LOADING = range(3)  # how strongly an item is kept


class Policy(Protocol):
    """Decides what is loaded before it is used, and what stays."""

    @property
    def queue(self) -> bool:
        """Tell whether what waiting requests need is loaded while they wait."""
        ...

    def level(self, item: Item, awaited: bool, now: float) -> int:
        """Return FREE or NEEDED: what is loaded ahead displaces only what is FREE.

        awaited: it is among what the next waiting requests need.
        """
        ...


class Lru:
    """What is used is kept, the least recently used goes; nothing is loaded ahead."""

    queue = False

    def level(self, item: Item, awaited: bool, now: float) -> int:
        """Return FREE: the order of use decides."""
        return FREE


class WaitingQueue:
    """Evict and prefetch by the waiting queue (EPWQ; Hermes 2.2): what waiting requests need is loaded."""

    queue = True

    def level(self, item: Item, awaited: bool, now: float) -> int:
        """Return NEEDED for what a waiting request needs."""
        return NEEDED if awaited else FREE


class Prewarmed(WaitingQueue):
    """EPWQ, and what a demand graph expects is loaded before the request comes (Hermes 3.4)."""

    def level(self, item: Item, awaited: bool, now: float) -> int:
        """Return NEEDED for what a waiting request needs, or a run in progress is expected to.

        What is expected is displaced by no load ahead: a run's next request is often served before those
        that wait, as its rank is that of a run that has begun.
        """
        return NEEDED if awaited or item.until >= now else FREE


class Cache:
    """Names in a cache, and the store behind it, which has room for all.

    policy: decides what stays. capacity: sum of sizes. rate: seconds to load 1 of size.
    stored: sizes of everything that can be loaded.

    What is loaded ahead is loaded one after another, the next requests' first. A load begins at the first
    call of `follow` or `warm` after the one before has ended.

    Counters:
    loaded: size that was loaded ahead of a use. wasted: part of it that nothing used before it left.
    """

    def __init__(self, policy: Policy, capacity: float, rate: float) -> None:
        if not (capacity > 0 and rate >= 0 and math.isfinite(rate)):
            raise ConfigError(
                f"A cache of size {capacity:g} that loads at {rate:g} s per unit cannot be simulated.",
                "Give a size above 0, and 0 seconds or more.",
            )
        self.policy, self.capacity, self.rate = policy, capacity, rate
        self.stored: dict[str, float] = {}
        self.items: dict[str, Item] = {}
        self.loaded = self.wasted = self.size = 0.0
        self._awaited: dict[str, None] = {}  # what the next requests need, as much as fits
        self._expected: dict[str, float] = {}  # names to be loaded, and until when they are expected
        self._idle_at = -math.inf  # when the latest load ends
        self._uses = 0

    def resident(self, name: str, now: float) -> bool:
        """Tell whether a name can be used now."""
        return name in self.items and self.items[name].ready <= now

    def follow(self, queue: Iterable[str], now: float) -> None:
        """Note what waiting requests need, the next one's first; load it if the policy does."""
        if not self.policy.queue:
            return
        awaited, size = dict[str, None](), 0.0
        for name in queue:
            if name in self.stored and name not in awaited:
                size += self.stored[name]
                if size > self.capacity:
                    break
                awaited[name] = None
        self._awaited = awaited
        self._load_ahead(now)

    def warm(self, name: str, now: float, until: float) -> float:
        """Have a name ready that is expected to be needed until an instant; return the seconds of its load.

        0 = it is there, or on its way, and stays; or it cannot be loaded.
        """
        if name in self.items:
            self.items[name].until = max(self.items[name].until, until)
            return 0.0
        if name not in self.stored:
            return 0.0
        self._expected[name] = until
        self._load_ahead(now)
        return self.stored[name] * self.rate

    def take(self, name: str, now: float) -> None:
        """Hold a name that is resident, for a request that starts."""
        item = self.items[name]
        assert item.ready <= now, f"{name} is not loaded yet"
        self._touch(item)
        item.held += 1

    def release(self, name: str) -> None:
        """End a hold."""
        self.items[name].held -= 1

    def load(self, name: str, now: float) -> float | None:
        """Load a stored name at once for a request that starts; return the seconds until it is resident.

        A load that is under way goes on. None = everything else in the cache is in use.
        """
        if name not in self.items:
            if not self._make_room(self.stored[name], now, name):
                return None
            self._add(name, self.stored[name], now + self.stored[name] * self.rate)
        item = self.items[name]
        self._touch(item)
        return max(item.ready - now, 0.0)

    def put(self, name: str, size: float, now: float) -> bool:
        """Keep what was computed, in place of a shorter one of that name; tell whether there is room.

        It displaces only what is FREE; without room it is in the store alone.
        """
        self.stored[name] = size
        if name in self.items and not self.items[name].held:
            self._leave(name)
        old = self.items[name].size if name in self.items else 0.0
        if not self._make_room(size - old, now, name, NEEDED):
            return False
        if name in self.items:
            self.items[name].size = size
            self.size += size - old
        else:
            self._add(name, size, now)
        self._touch(self.items[name])
        return True

    def drop(self, name: str) -> None:
        """Forget a name: nothing will ask for it any more. It may not be held."""
        for table in (self.stored, self._awaited, self._expected):
            table.pop(name, None)
        if name in self.items:
            assert not self.items[name].held, f"{name} is in use"
            self._leave(name)

    def close(self) -> None:
        """Count what was loaded ahead and has not been used by the end."""
        self.wasted += sum(item.size for item in self.items.values() if item.fetched)

    def _load_ahead(self, now: float) -> None:
        """Begin the next load if none is under way."""
        if self._idle_at > now:
            return
        for name in [name for name, until in self._expected.items() if until < now]:
            del self._expected[name]
        for name in (*self._awaited, *self._expected):
            if name in self.items:
                self._expected.pop(name, None)
                continue
            size = self.stored[name]
            if not self._make_room(size, now, name, NEEDED):
                return
            self._idle_at = now + size * self.rate
            self._add(name, size, self._idle_at)
            item = self.items[name]
            item.fetched, item.until = True, self._expected.pop(name, -math.inf)
            self.loaded += size
            if self._idle_at > now:
                return

    def _add(self, name: str, size: float, ready: float) -> None:
        self.size += size
        self._uses += 1
        self.items[name] = Item(size, ready, self._uses)

    def _touch(self, item: Item) -> None:
        self._uses += 1
        item.used, item.fetched = self._uses, False

    def _make_room(self, size: float, now: float, name: str, below: int = LOADING + 1) -> bool:
        """Let others leave until `size` fits, the lowest levels first; only those below a level."""
        need = self.size + size - self.capacity
        if need <= 0:
            return True
        ranked = []
        for other, item in self.items.items():
            level = self.policy.level(item, other in self._awaited, now)
            level = LOADING if item.ready > now else level
            if other != name and not item.held and level < below:
                ranked.append((level, item.used, other))
        leaving, freed = [], 0.0
        for _, _, other in sorted(ranked):
            if freed >= need:
                break
            leaving.append(other)
            freed += self.items[other].size
        if freed < need:
            return False
        for other in leaving:
            self._leave(other)
        return True

    def _leave(self, name: str) -> None:
        item = self.items.pop(name)
        self.size -= item.size
        if item.fetched:
            self.wasted += item.size
