"""Assigns each request to the instance with the most memory left, in rounds (SLO-aware 4.4, equation 20)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.types import Instance

_UTILITY = 0.9  # of the KV, the rest is lost in half-filled blocks (mu of equation 20)


class Assignment:
    """Tokens that each instance still has room for in this round.

    A request goes to the instance with the most. When even that has too few, as many requests as possible
    have been assigned, and a round begins in which all are empty again.
    """

    def __init__(self) -> None:
        self._whole: dict[str, float] = {}
        self._left: dict[str, float] = {}

    def follow(self, instances: Iterable[Instance]) -> None:
        """Bring the instances up to date; new ones are empty."""
        self._whole = {one.id: _UTILITY * one.blocks_total * one.block_size for one in instances}
        self._left = {name: min(self._left.get(name, whole), whole) for name, whole in self._whole.items()}

    def take(self, tokens: float, names: Sequence[str]) -> str:
        """Return which of these instances gets a request of so many tokens, the first of equals."""
        best = max(names, key=self._left.__getitem__)
        if self._left[best] < tokens:
            self._left.update((name, self._whole[name]) for name in names)
            best = max(names, key=self._left.__getitem__)
        self._left[best] -= tokens
        return best

    def give_back(self, tokens: float, name: str) -> None:
        """Note that a request of so many tokens has left an instance."""
        if name in self._left:
            self._left[name] = min(self._left[name] + tokens, self._whole[name])
