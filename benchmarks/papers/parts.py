"""The parts of a paper's evaluation: selection (`--only`) and execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rich.progress import track

from headway.errors import ConfigError

SettingT = TypeVar("SettingT")
ServedT = TypeVar("ServedT")
PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class PaperPart(Generic[SettingT]):
    """Settings that differ in one thing, and the systems that run in each of them."""

    name: str
    settings: tuple[SettingT, ...]
    systems: tuple[str, ...]


def part(plan: PlanT, only: Sequence[str], measured: Mapping[str, str]) -> PlanT:
    """Return the plan with only the named parts; () = all. Raise ConfigError for an unknown part.

    measured: parts beside `plan.experiments`, each with the field of the plan that is cleared without it
    """
    whole: Any = plan
    known = [*(one.name for one in whole.experiments), *measured]
    for name in only:
        if name not in known:
            raise ConfigError(f"These tables have no part {name!r}.", f"Use some of {', '.join(known)}.")
    if not only:
        return plan
    empty = {field: type(getattr(plan, field))() for name, field in measured.items() if name not in only}
    chosen = tuple(one for one in whole.experiments if one.name in only)
    smaller: PlanT = replace(whole, experiments=chosen, **empty)
    return smaller


def run_each(
    experiments: Sequence[PaperPart[SettingT]], serve: Callable[[str, SettingT], ServedT], *, bar: bool
) -> dict[str, list[ServedT]]:
    """Run every system in every setting of each experiment; combinations in several experiments run once."""
    jobs = {(system, one): None for e in experiments for one in e.settings for system in e.systems}
    done = {job: serve(*job) for job in track([*jobs], "simulating", disable=not bar)}
    return {e.name: [done[system, one] for one in e.settings for system in e.systems] for e in experiments}
