"""What clients saw of their requests while a gateway was killed again and again, and the verdict on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

OPEN = ("queued",)  # states of a background request that are no end
End = tuple[str, str]  # the state, and the answer or error as it was sent


@dataclass(slots=True)
class SoakHistory:
    """All that clients saw, in order.

    looks: id of each background request that was accepted (202) -> what each look at it has shown, in order;
        ("unknown", "") is a 404
    whole: requests that were answered while their clients waited, told of an error included
    told: of these, those that were told of an error
    silent: of such requests, those whose connection ended without an answer while the gateway lived
    doubled: of such requests, those whose answer had more tokens or ends than one answer has
    computed: id -> how often the engine was asked to compute it
    """

    looks: dict[str, list[End]] = field(default_factory=dict)
    whole: int = 0
    told: int = 0
    silent: int = 0
    doubled: int = 0
    computed: Counter[str] = field(default_factory=Counter)

    def saw(self, id: str, state: str, answer: str) -> None:
        """Note a look at a background request, unless the look before it has shown the same."""
        looks = self.looks[id]
        if not looks or looks[-1] != (state, answer):
            looks.append((state, answer))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ids of background requests, and counts.

    accepted: background requests, and those that were answered or were owed an answer
    lost: background requests whose last look shows no completed answer, and requests without any answer
    twice: background requests with two different ends, or an end that was not the end; doubled answers
    recomputed: computations beyond the first of each request
    """

    accepted: int
    lost: int
    twice: int
    recomputed: int
    lost_ids: tuple[str, ...]
    twice_ids: tuple[str, ...]


def check(history: SoakHistory) -> Verdict:
    """Decide what was lost, and what was answered twice."""
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
    """Tell whether anything else was seen after an end."""
    seen = list(looks)
    first = next((i for i, (state, _) in enumerate(seen) if state not in OPEN), len(seen))
    return len(seen) > first + 1
