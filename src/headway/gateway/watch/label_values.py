"""A bounded number of values for a metric's label."""

from __future__ import annotations

from headway.config.keys import OTHER

_MOST = 64


class FewValues:
    """Keeps the first 64 values; all others become `(other)`."""

    def __init__(self) -> None:
        self._known = set[str]()

    def of(self, value: str) -> str:
        """Return what stands for a value."""
        if value not in self._known and len(self._known) >= _MOST:
            return OTHER
        self._known.add(value)
        return value
