"""When to look at which request again; O(log n) for each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headway.policy.core.least import Least


@dataclass(slots=True)
class Checks:
    """Requests by the instant at which they are to be looked at."""

    _checks: Least[str] = field(default_factory=Least, init=False)

    def __contains__(self, id: str) -> bool:
        return id in self._checks

    @property
    def next_check(self) -> float:
        """The first instant at which a request is to be looked at, inf = none."""
        return self._checks.at

    def watch(self, id: str, last: float) -> None:
        """Look at a request right after the instant `last`, and not before; inf = never."""
        if not math.isinf(last):
            self._checks.put(id, math.nextafter(last, math.inf), id)  # at `last` itself it can still start

    def discard(self, id: str) -> None:
        """Forget a request, because it has a token or its end; unknown ids are ignored."""
        self._checks.drop(id)

    def due(self, now: float) -> list[str]:
        """Return the requests to look at by now, earliest first, and forget them."""
        found = []
        while self._checks.at <= now:
            found.append(self._checks.first()[1])
            self._checks.drop(found[-1])
        return found
