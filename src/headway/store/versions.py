"""Versions of stores: each store says which one it has, and goes forward step by step, never back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """The versions of the tables of one store. The store itself has the number of its own.

    To change tables, append a step, and never touch those before it. Gateways of the version before go on with an
    upgraded store until they end. A step therefore only adds: tables, indexes, and columns that may be NULL or have a
    default. It takes a moment, however much is stored, as those gateways wait for it.

    param: the setting that names the store.
    made, script: the version that `script` makes in an empty store.
    steps: SQL by version; `steps[v]` leads from v to v + 1. Statements end in a semicolon and a line feed.
    """

    param: str
    made: int
    script: str
    steps: Mapping[int, str]

    @property
    def latest(self) -> int:
        """Return the version that this Headway uses."""
        return max([self.made, *(version + 1 for version in self.steps)])

    def scripts(self, found: int | None, place: str) -> list[str]:
        """Return the SQL that brings a store to the latest version, in order.

        found: its version, None = it is empty. place: its name in errors.
        Raises ConfigError when no step leads from that version to the latest.
        """
        if found is not None and found > self.latest:
            raise ConfigError(
                f"{place} has schema version {found}; this Headway knows {self.latest}: a newer one has used it.",
                "Use that Headway or a newer one, or restore the backup that was made before the upgrade "
                "(docs/upgrade.md).",
                param=self.param,
            )
        at, first = (self.made, [self.script]) if found is None else (found, [])
        if not all(version in self.steps for version in range(at, self.latest)):
            raise ConfigError(
                f"{place} has schema version {found}, from which this Headway cannot upgrade it.",
                "Use the Headway that made it, or give this one a new store.",
                param=self.param,
            )
        return [*first, *(self.steps[version] for version in range(at, self.latest))]

    def at_start(self, found: int | None, place: str) -> str:
        """Return in words what a start finds and does; arguments and errors as `scripts`."""
        steps = self.scripts(found, place)
        if found is None:
            return "its tables are made at the start"
        return f"schema version {found}" + (f", upgraded to {self.latest} at the start" if steps else "")
