"""What a configuration must say of engines that are no vLLM, and of those for overflow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headway.config.engines import Engine
from headway.errors import ConfigError

_ATTACHED = ("kind", "remote_model", "overflow")
_OVERFLOW = ("overflow_classes", "overflow_tenants", "price_prompt", "price_answer", "hourly_budget")
_PLAIN = Engine()


class Around(NamedTuple):
    """The rest of a configuration: models of engines without overflow, classes with a promise, tenants of keys.

    any_tenant: there may be others.
    """

    models: frozenset[str]
    promising: frozenset[str]
    tenants: frozenset[str]
    any_tenant: bool = False


def overflow_contradictions(name: str, engine: Engine, around: Around, where: str) -> Iterator[ConfigError]:
    """Find settings of an engine by URL that exclude each other or need a missing one. name: of its table."""
    for setting in _ATTACHED if engine.url is None else ():
        if getattr(engine, setting) != getattr(_PLAIN, setting):
            problem = f"{name} in {where} has {setting}, but no url."
            yield ConfigError(problem, "Leave it out: Headway starts a vLLM there.", param=f"{name}.{setting}")
    if engine.url is not None and engine.url.rstrip("/").endswith("/v1"):
        problem = f"{name}.url in {where} ends with /v1, which Headway adds itself."
        yield ConfigError(problem, "Leave out /v1.", param=f"{name}.url")
    if engine.kind != "vllm" and (engine.adapters or engine.runner == "pooling" or engine.device is not None):
        problem = f'{name} in {where} has kind = "openai" together with adapters, device or runner = "pooling".'
        yield ConfigError(problem, "Leave those out: they are for a vLLM.", param=f"{name}.kind")
    if engine.overflow:
        yield from _terms(name, engine, around, where)
        return
    for setting in _OVERFLOW:
        if getattr(engine, setting) != getattr(_PLAIN, setting):
            problem = f"{name} in {where} has {setting}, but not overflow = true."
            yield ConfigError(problem, "Add overflow = true, or leave it out.", param=f"{name}.{setting}")


def _terms(name: str, engine: Engine, around: Around, where: str) -> Iterator[ConfigError]:
    """Find what is wrong with an overflow engine: whose requests may go there, and for how much."""
    whole = f"{name} in {where} has overflow"
    if engine.models or engine.adapters or engine.runner == "pooling":
        yield ConfigError(f"{whole} together with models, adapters or pooling.", "Leave those out.", param=name)
    if engine.name not in around.models:
        problem = f"{whole}, but no other engine serves {engine.name}, for all that may not go there."
        fix = f"Set served_name to one of {', '.join(sorted(around.models))}; its name there is remote_model."
        yield ConfigError(problem, fix, param=f"{name}.served_name")
    if not engine.overflow_classes or not around.promising.issuperset(engine.overflow_classes):
        problem = f"{whole}, but its overflow_classes are not classes with ttft_ms or e2e_ms."
        fix = f"Name those whose prompts may leave, of {', '.join(sorted(around.promising))}."
        yield ConfigError(problem, fix, param=f"{name}.overflow_classes")
    named = frozenset(engine.overflow_tenants or ())
    if (around.any_tenant or around.tenants) and not (named and (around.any_tenant or around.tenants >= named)):
        of = f", of {', '.join(sorted(around.tenants))}" if around.tenants else ""
        fix = f"Name tenants whose prompts may leave{of}."
        problem = f"{whole}, but its overflow_tenants are not tenants of [[keys]]."
        yield ConfigError(problem, fix, param=f"{name}.overflow_tenants")
    if engine.hourly_budget is None and (engine.price_prompt or engine.price_answer):
        fix = "Set it to the most that it may cost in an hour, in the unit of the prices."
        yield ConfigError(f"{whole} and prices, but no hourly_budget.", fix, param=f"{name}.hourly_budget")
