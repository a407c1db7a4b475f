"""Expands an `[[engines]]` table with `count` into that many engines, each with its own GPUs, cores and port."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, filterfalse

from headway.config.engines import Engine
from headway.errors import ConfigError


def numbers(text: str) -> list[int]:
    """Return the numbers of a list such as "0-3,8"; ValueError if malformed."""
    ranges = [part.strip().partition("-") for part in text.split(",")]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def expanded(engines: Sequence[Engine], beside: Iterable[Engine] = ()) -> tuple[Engine, ...]:
    """Return one entry per engine (`count` 1), with the first GPUs that no other engine has.

    beside: engines that keep theirs. ConfigError when its cores cannot be divided evenly, or a setting fits only one
    engine.
    """
    taken = {card for i, engine in enumerate([*engines, *beside]) for card in _listed(i, "cards", engine.cards)}
    free = filterfalse(taken.__contains__, count())
    return tuple(_with_cards(one, free) for i, engine in enumerate(engines) for one in _copies(i, engine))


def _copies(number: int, engine: Engine) -> Iterator[Engine]:
    if engine.count == 1:
        yield engine
        return
    where, cores = f"engines.{number}", _listed(number, "cores", engine.cores)
    if engine.cards is not None or engine.url is not None:
        name = "cards" if engine.url is None else "url"
        problem = f"{where} has count = {engine.count}, but its {name} can belong to one engine only."
        fix = "Give the number of GPUs per engine (gpus = 1)." if engine.url is None else "Write a table for each."
        raise ConfigError(problem, fix, param=f"{where}.count")
    share = len(cores) // engine.count
    if engine.cores is not None and share * engine.count != len(cores):
        problem = f"{where} has {len(cores)} cores for {engine.count} engines."
        raise ConfigError(problem, "Give a number of cores that is a multiple of count.", param=f"{where}.cores")
    for k in range(engine.count):
        own = ",".join(map(str, cores[k * share : (k + 1) * share]))
        id, port = engine.id and f"{engine.id}-{k}", engine.port and engine.port + k
        yield replace(engine, count=1, id=id, cores=own or None, port=port)


def _with_cards(engine: Engine, free: Iterator[int]) -> Engine:
    if engine.gpus is None or engine.cards is not None:
        return engine
    return replace(engine, cards=",".join(str(next(free)) for _ in range(engine.gpus)))


def _listed(number: int, name: str, text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return numbers(text)
    except ValueError:
        where, fix = f"engines.{number}.{name}", 'Write numbers and ranges, as in "0-3,8".'
        raise ConfigError(f"{where} is {text!r}, which is not a list of numbers.", fix, param=where) from None
