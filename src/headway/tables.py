"""Tables of numpy columns, which decisions read without a Python loop over the rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray


class Table:
    """Rows of numpy columns with a key each: the shape of everything that decisions read many of.

    A subclass names its columns in `COLUMNS` (name -> dtype). Freed rows are reused; `rows()` lists the
    live ones. Adding and removing is O(1), reading a column is no copy.
    """

    COLUMNS: ClassVar[dict[str, type]] = {}
    DEFAULTS: ClassVar[dict[str, float]] = {}  # of columns whose rows do not begin at zero
    DTYPE: ClassVar[np.dtype[np.void]]
    _NEW: ClassVar[dict[str, float | bool]]  # a new row, in the order of the columns

    def __init_subclass__(cls) -> None:
        cls.DTYPE = np.dtype([*cls.COLUMNS.items(), ("live", np.bool_)], align=True)
        cls._NEW = dict.fromkeys(cls.COLUMNS, 0) | cls.DEFAULTS | {"live": True}

    def __init__(self, capacity: int = 64) -> None:
        self._hold(np.zeros(capacity, self.DTYPE))
        self.keys: list[str | None] = [None] * capacity
        self.row_of: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def _hold(self, data: NDArray[np.void]) -> None:
        """Keep the rows as one array, which compiled loops take whole; columns are views of it."""
        self.data = data
        self.__dict__.update({name: data[name] for name in self.COLUMNS})  # so that reading a column is one lookup
        self.live: NDArray[np.bool_] = data["live"]

    def __len__(self) -> int:
        return len(self.row_of)

    def __contains__(self, key: object) -> bool:
        return key in self.row_of

    if TYPE_CHECKING:  # columns are attributes, which a type checker cannot see

        def __getattr__(self, name: str) -> NDArray[Any]: ...

    def add(self, key: str, **values: float | bool) -> int:
        """Add a row; columns not given are as in `DEFAULTS`, else zero. Return its index.

        A key twice is our own mistake.
        """
        assert key not in self.row_of, f"row {key} exists"
        if not self._free:
            self._grow()
        row = self._free.pop()
        values = self._NEW | values
        assert len(values) == len(self._NEW), f"no such columns: {sorted(values.keys() - self._NEW)}"
        self.data[row] = tuple(values.values())
        self.keys[row], self.row_of[key] = key, row
        return row

    def remove(self, key: str) -> None:
        """Free the row of `key`; unknown keys are ignored (a request may end twice)."""
        row = self.row_of.pop(key, None)
        if row is not None:
            self.live[row], self.keys[row] = False, None
            self._free.append(row)

    def rows(self) -> NDArray[np.int64]:
        """Return the indices of the live rows, ascending."""
        return self.live.nonzero()[0]

    def names(self, rows: Iterable[int]) -> list[str]:
        """Return the keys of rows, in their order."""
        keys = self.keys
        return [key for row in rows if (key := keys[row]) is not None]

    def copy(self) -> Self:
        """Return a table of the same rows that changes on its own."""
        other = type(self)(1)
        other._hold(self.data.copy())
        other.keys, other.row_of, other._free = list(self.keys), dict(self.row_of), list(self._free)
        return other

    def _grow(self) -> None:
        size = len(self.keys)
        self._hold(np.concatenate([self.data, np.zeros_like(self.data)]))
        self.keys += [None] * size
        self._free += range(2 * size - 1, size - 1, -1)
