"""The choices in which `bros` differs from the paper's text (BROS 4.2, 5.2), one at a time, SIMULATED."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from benchmarks.papers.recipes import find
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.bros.packer import BatchSize, Bros
from headway.policy.recipes.recipe import Recipe

OURS, TEXT = "bros", "bros-paper"
# The options of `Bros` in which the two differ, grouped where they belong together.
CHOICES: dict[str, tuple[str, ...]] = {
    "time from the last token": ("from_last",),
    "fixed bound": ("fixed_bound",),
    "early return": ("returns_early",),
    "replaces at once": ("replaces_long", "spare", "crowded"),
    "most empty blocks": ("most_empty",),
    "whole prompts": ("parts_below",),
}
SYSTEMS = (OURS, TEXT, *(f"{OURS}, {name}" for name in CHOICES), *(f"{TEXT}, not {name}" for name in CHOICES))


def system(name: str) -> Recipe:
    """Return the recipe with this name, which may be one of `SYSTEMS`."""
    base, _, choice = name.partition(", ")
    if not choice:
        return find(name)
    other = TEXT if base == OURS else OURS
    return replace(find(base), packer=_packer(base, other, CHOICES[choice.removeprefix("not ")]))


def _packer(base: str, other: str, options: tuple[str, ...]) -> Callable[[EngineSpec], Bros]:
    """Return a factory of a recipe's packer in which these options are taken from another recipe's."""

    def packer(spec: EngineSpec) -> Bros:
        mine, theirs = (_options(name, spec) for name in (base, other))
        return Bros(**mine | {option: theirs[option] for option in options})

    return packer


def _options(name: str, spec: EngineSpec) -> dict[str, Any]:
    packer = find(name).packer(spec)
    assert isinstance(packer, Bros)
    options = {field.name: getattr(packer, field.name) for field in fields(packer) if field.name[0] != "_"}
    size: BatchSize = options["batch_size"]
    return options | {"batch_size": replace(size, size=0)}
