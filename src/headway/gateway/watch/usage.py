"""Usage of tenants in the last minute, checked against the limits of their keys (`[[keys]]`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from headway.config import Key
from headway.errors import RequestError
from headway.gateway.watch.ends import Ended, Observer

_WINDOW = 60  # seconds
_LIMITS = {"requests": "requests_per_min", "tokens": "tokens_per_min"}


class Usage(Observer):
    """Requests and tokens of each tenant with a limit, by the second of the last minute.

    A request counts when it arrives, its prompt as soon as it is read, and when it ends the tokens of its
    answer, of which nothing is assumed, and those of its prompt that only the engine knew (of images). So a
    tenant may be over its limit by one prompt and by the answers that are open then, and is refused until the
    minute has room again.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._used: dict[str, dict[str, _Window]] = {}
        self.adopt(keys)

    def adopt(self, keys: Iterable[Key]) -> None:
        """Take over keys; what their tenants have used in the last minute still counts."""
        limited = {key.tenant for key in keys if key.requests_per_min or key.tokens_per_min}
        known = self._used
        self._used = {tenant: known.get(tenant) or {what: _Window() for what in _LIMITS} for tenant in limited}

    def count(self, tenant: str, now: float, *, requests: int = 0, tokens: int = 0) -> None:
        """Count requests or tokens; a negative number takes back what was counted at that instant."""
        if tenant in self._used:
            self._used[tenant]["requests"].add(requests, now)
            self._used[tenant]["tokens"].add(tokens, now)

    def ended(self, end: Ended) -> None:
        """Count the tokens of an answer, and of its prompt those that were not counted."""
        one = end.in_flight
        more = max(one.prompt_tokens - one.request.prompt_tokens, 0)
        self.count(one.request.tenant, end.at, tokens=end.output_tokens + more)

    def used(self, tenant: str, now: float) -> dict[str, int]:
        """Return the requests and tokens of a tenant in the last minute; {} for one without a limit."""
        return {what: window.sum(now) for what, window in self._used.get(tenant, {}).items()}

    def check(self, key: Key, now: float, *, counted: bool = False) -> None:
        """Raise RequestError (429) while the last minute has no room for another request of this key.

        counted: the request itself counts already, and only its tokens do not.
        """
        used = self._used.get(key.tenant)
        if used is None:  # the limit was taken away while the request came in
            return
        for what, setting in _LIMITS.items():
            most: int | None = getattr(key, setting)
            if most is None or (counted and what == "requests"):
                continue
            window = used[what]
            if window.sum(now) >= most:
                raise _refusal(what, setting, most, window.until(most, now))


class _Window:
    """Amounts of the last minute, one for each second that has any."""

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()  # [second, amount]
        self._sum = 0

    def add(self, amount: int, now: float) -> None:
        second = math.floor(now)
        if amount < 0:
            for slot in self._slots:
                if slot[0] == second:
                    slot[1] += amount
                    self._sum += amount
            return
        self._drop(now)
        if not self._slots or self._slots[-1][0] < second:
            self._slots.append([second, 0])
        self._slots[-1][1] += amount
        self._sum += amount

    def sum(self, now: float) -> int:
        self._drop(now)
        return self._sum

    def until(self, most: int, now: float) -> float:
        """Return the seconds until less than `most` is left, if nothing is added."""
        left = self.sum(now)
        for second, amount in self._slots:
            left -= amount
            if left < most:
                return second + _WINDOW + 1 - now
        return 0.0

    def _drop(self, now: float) -> None:
        """Drop the slots whose last instant is a minute ago."""
        while self._slots and self._slots[0][0] + 1 + _WINDOW <= now:
            self._sum -= self._slots.popleft()[1]


def _refusal(what: str, setting: str, most: int, seconds: float) -> RequestError:
    wait = f"{max(math.ceil(seconds), 1)}"
    return RequestError(
        f"This tenant has used its {most:,} {what} of this minute (keys.{setting}).",
        f"Try again in {wait} s, or ask the operator for more.",
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={
            "retry-after": wait,
            "x-headway-dropped-reason": setting,
            f"x-ratelimit-limit-{what}": str(most),
            f"x-ratelimit-remaining-{what}": "0",
            f"x-ratelimit-reset-{what}": f"{wait}s",
        },
    )
