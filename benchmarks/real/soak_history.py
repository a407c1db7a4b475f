"""The history that clients record while gateways are killed again and again, and the verdict on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

OPEN = ("queued",)  # states of an unfinished background request
End = tuple[str, str]  # the state, and the answer or error as it was sent


@dataclass(slots=True)
class SoakHistory:
    """The clients' observations.

    looks: id of each accepted (202) background request -> the distinct results of polling it, in order;
        ("unknown", "") is a 404
    whole: foreground requests that got an answer or an error
    told: foreground requests that got an error
    silent: foreground requests whose connection ended without an answer while the gateway was alive
    doubled: foreground requests whose answer had more tokens or ends than a single answer
    computed: id -> number of times that an engine received it
    streams: id of each long stream -> what became of it (`soak_clients.judged`), and its error
    """

    looks: dict[str, list[End]] = field(default_factory=dict)
    whole: int = 0
    told: int = 0
    silent: int = 0
    doubled: int = 0
    computed: Counter[str] = field(default_factory=Counter)
    streams: dict[str, tuple[str, str]] = field(default_factory=dict)

    def saw(self, id: str, state: str, answer: str) -> None:
        """Record the result of polling a background request, unless it equals the previous one."""
        looks = self.looks[id]
        if not looks or looks[-1] != (state, answer):
            looks.append((state, answer))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of requests, and the ids of lost and twice answered background requests.

    accepted: accepted background requests, and foreground requests with an answer or a lost one
    lost: background requests that did not complete, and foreground requests without an answer
    twice: background requests that changed after their end, and foreground requests with doubled answers
    recomputed: computations beyond the first of each request
    """

    accepted: int
    lost: int
    twice: int
    recomputed: int
    lost_ids: tuple[str, ...]
    twice_ids: tuple[str, ...]


def check(history: SoakHistory) -> Verdict:
    """Return the requests that were lost and those that were answered twice."""
    lost = tuple(id for id, looks in history.looks.items() if not looks or looks[-1][0] != "completed")
    twice = tuple(id for id, looks in history.looks.items() if _more_than_one_end(looks))
    return Verdict(
        accepted=len(history.looks) + history.whole + history.silent,
        lost=len(lost) + history.silent,
        twice=len(twice) + history.doubled,
        recomputed=sum(history.computed.values()) - len(history.computed),
        lost_ids=lost,
        twice_ids=twice,
    )


def _more_than_one_end(looks: Iterable[End]) -> bool:
    """Return True if the request changed after its end."""
    seen = list(looks)
    first = next((i for i, (state, _) in enumerate(seen) if state not in OPEN), len(seen))
    return len(seen) > first + 1
