"""The parts of a paper's evaluation, and which of them are run (`--only`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headway.errors import ConfigError

SettingT = TypeVar("SettingT")


@dataclass(frozen=True, slots=True)
class Experiment(Generic[SettingT]):
    """Settings that differ in one thing, and the systems that run in each of them."""

    name: str
    settings: tuple[SettingT, ...]
    systems: tuple[str, ...]


def choose(
    experiments: Sequence[Experiment[SettingT]], measured: Sequence[str], only: Sequence[str]
) -> tuple[tuple[Experiment[SettingT], ...], frozenset[str]]:
    """Return the experiments that `only` names, and all names in it; () = everything.

    measured: names of the parts beside the experiments. ConfigError for names that are of no part.
    """
    known = [*(one.name for one in experiments), *measured]
    chosen = parts(only or known, known)
    return tuple(one for one in experiments if one.name in chosen), chosen


def parts(only: Sequence[str], known: Sequence[str]) -> frozenset[str]:
    """Return the named parts. ConfigError when one of them is not known."""
    for name in only:
        if name not in known:
            raise ConfigError(f"These tables have no part {name!r}.", f"Use some of {', '.join(known)}.")
    return frozenset(only)
