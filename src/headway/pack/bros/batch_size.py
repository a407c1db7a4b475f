"""How many requests should one iteration hold?

A larger batch does more at once and makes every token slower. As TCP finds its window: begin with a base,
double while every real-time request is well within its promise, fall back to the base when one is not
(BROS 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BatchSize:
    """The batch size B of BROS's Algorithm 1.

    base: B_base, 128 in the paper. most: what the engine can hold. adapts: False keeps it at the base. The
    paper does not say when to double; we do after an iteration that filled the batch, because more places
    help nobody before. size: the current B, base <= size <= most.
    """

    base: int = 128
    most: int = 256
    adapts: bool = True
    size: int = 0

    def __post_init__(self) -> None:
        self.base = min(self.base, self.most)
        self.size = self.base

    def learn(self, *, full: bool, near: bool) -> None:
        """Take note of an iteration: it filled the batch; a real-time request was near its limit."""
        if not self.adapts:
            return
        if near:
            self.size = self.base
        elif full:
            self.size = min(2 * self.size, self.most)
