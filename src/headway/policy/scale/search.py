"""The search that `headway advise` and a running fleet share: the fewest engines that reach a share of promises."""

from __future__ import annotations

from collections.abc import Callable


def fewest(attained: Callable[[int], float], target: float, first: int, most: int) -> int | None:
    """Return the fewest engines whose attainment is at least the target; None = not even `most` engines' is.

    attained: of a number of engines; it is asked again about the same number, so it should remember.
    first: where the search begins, at least 1.
    """
    low, high = 0, min(max(first, 1), most)  # `low` engines are too few
    while attained(high) < target and high < most:
        low, high = high, min(2 * high, most)
    best = high if attained(high) >= target else None
    while best is not None and best - low > 1:
        middle = (low + best) // 2
        low, best = (low, middle) if attained(middle) >= target else (middle, best)
    return best
