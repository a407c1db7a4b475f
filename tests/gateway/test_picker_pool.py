"""Which engines a proxy's request may go to (`Pool.restricted`)."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.errors import HeadwayError
from headway.gateway.picker.exchange import Pool
from headway.types import Request

ASKED = Request("r", "m", 10, 10, 0.0)


def engine(id: str, *, names: tuple[str, ...] = ("m",), overflow: bool = False, serves: bool = True) -> Any:
    models, config = SimpleNamespace(names=names, swaps=len(names) > 1), SimpleNamespace(overflow=overflow)
    return SimpleNamespace(id=id, models=models, config=config, serves=serves)


def pool(*engines: Any, unknown: Iterable[str] = (), restricts: bool = False) -> Pool:
    addresses = {one.id: one.id.upper() for one in engines if not one.config.overflow and one.id not in unknown}
    return Pool(cast(Any, {one.id: one for one in engines}), addresses, lambda: restricts)


def code(of: Pool, *subset: str) -> str | None:
    with pytest.raises(HeadwayError) as refused:
        of.restricted(ASKED, frozenset(subset))
    return refused.value.code


@pytest.mark.parametrize("restricts", [False, True])
def test_overflow_engines_are_left_out_whatever_the_recipe(restricts: bool) -> None:
    mine = pool(engine("a"), engine("b"), engine("paid", overflow=True), restricts=restricts)
    assert mine.restricted(ASKED, None).engines == ("a", "b")
    assert mine.restricted(ASKED, frozenset("AB")).engines == ("a", "b")
    assert pool(engine("a"), engine("b"), restricts=restricts).restricted(ASKED, None).engines == ()


@pytest.mark.parametrize("restricts", [False, True])
def test_an_engine_without_an_address_gets_no_requests_while_it_serves(restricts: bool) -> None:
    mine = pool(engine("a"), engine("b"), unknown=["b"], restricts=restricts)
    if restricts:
        assert mine.restricted(ASKED, None).engines == mine.restricted(ASKED, frozenset("A")).engines == ("a",)
    else:
        assert code(mine, "A") == "subset_unsupported", "the planner could choose b"
    starting = pool(engine("a"), engine("b", serves=False), unknown=["b"], restricts=restricts)
    assert starting.restricted(ASKED, None).engines == ()
    assert code(pool(engine("a"), unknown=["a"], restricts=restricts), "A") == "no_endpoint"


def test_a_subset_needs_a_planner_that_keeps_to_it_and_no_swaps_in_the_gateway() -> None:
    fleet = engine("a"), engine("b")
    assert pool(*fleet, restricts=True).restricted(ASKED, frozenset("A")).engines == ("a",)
    assert code(pool(*fleet), "A") == "subset_unsupported"
    assert code(pool(*fleet, engine("c", names=("n", "o")), restricts=True), "A") == "subset_unsupported"
