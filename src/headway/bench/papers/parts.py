"""Which parts of a paper's evaluation are run (`--only`)."""

from __future__ import annotations

from collections.abc import Sequence

from headway.errors import ConfigError


def parts(only: Sequence[str], known: Sequence[str]) -> frozenset[str]:
    """Return the named parts. ConfigError when one of them is not known."""
    for name in only:
        if name not in known:
            raise ConfigError(f"These tables have no part {name!r}.", f"Use some of {', '.join(known)}.")
    return frozenset(only)
