"""Sorting and heaps by several columns of keys, compiled: the order of everything that is ranked.

keys has a row per column, shape (columns, n), the first decides; of equals the lower serial, which is unique.
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled
from headway.types import Bools, Floats, Ints


@compiled
def ordered(keys: Floats, serial: Ints) -> Ints:
    """Return the permutation that sorts by keys[0], then keys[1], ..., then serial (unique)."""
    return sort(keys, serial, np.arange(serial.size))


@compiled
def leading(keys: Floats, serial: Ints, stays: Bools, most: int) -> Ints:
    """Return `ordered` without those that neither stay nor are among the first `most` of the others.

    Of a thousand that wait few come in: to find those takes a fraction of the time that sorting takes.
    """
    order, heap, size, waiting = np.empty(serial.size, np.int64), np.empty(serial.size, np.int64), 0, 0
    for i in range(serial.size):
        if stays[i]:
            order[size], size = i, size + 1
        else:
            waiting = push(keys, serial, heap, waiting, i)
    for _ in range(min(most, waiting)):
        order[size], size = heap[0], size + 1
        waiting = pop(keys, serial, heap, waiting)
    return sort(keys, serial, order[:size])


@compiled
def sort(keys: Floats, serial: Ints, order: Ints) -> Ints:
    """Return these indices in order; `order` is used up.

    A natural merge sort: what was in order stays so, and an order of the last iteration is nearly sorted.
    """
    n = order.size
    spare, ends = np.empty(n, np.int64), np.empty(n + 1, np.int64)
    runs = 0
    for i in range(1, n + 1):
        if i == n or before(keys, serial, order[i], order[i - 1]):
            ends[runs] = i
            runs += 1
    while runs > 1:
        start, merged = 0, 0
        for pair in range(0, runs, 2):
            middle = ends[pair]
            end = ends[min(pair + 1, runs - 1)]
            _merge(keys, serial, order, spare, start, middle, end)
            ends[merged] = end
            start, merged = end, merged + 1
        order, spare, runs = spare, order, merged
    return order


@compiled
def before(keys: Floats, serial: Ints, a: int, b: int) -> bool:
    """Tell whether a goes before b."""
    for k in range(keys.shape[0]):
        if keys[k, a] != keys[k, b]:
            return bool(keys[k, a] < keys[k, b])
    return bool(serial[a] < serial[b])


@compiled
def _merge(keys: Floats, serial: Ints, order: Ints, out: Ints, start: int, middle: int, end: int) -> None:
    a, b = start, middle
    for i in range(start, end):
        if a < middle and (b >= end or not before(keys, serial, order[b], order[a])):
            out[i], a = order[a], a + 1
        else:
            out[i], b = order[b], b + 1


@compiled
def push(keys: Floats, serial: Ints, heap: Ints, size: int, i: int) -> int:
    """Add i to the first `size` places of a heap, the first in order on top; return the new size."""
    at = size
    while at > 0 and before(keys, serial, i, heap[(at - 1) // 2]):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = i
    return size + 1


@compiled
def pop(keys: Floats, serial: Ints, heap: Ints, size: int) -> int:
    """Remove heap[0], the first in order, from a heap of `size`; return the new size."""
    size -= 1
    moved, at = heap[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        child += child + 1 < size and before(keys, serial, heap[child + 1], heap[child])
        if not before(keys, serial, heap[child], moved):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moved
    return size
