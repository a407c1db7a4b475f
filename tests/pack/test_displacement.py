"""The default recipe gives up a large request in whose place smaller ones could have been on time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.core.engine_spec import PromisesConfig
from headway.policy.core.ranks import BEYOND
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.pack.promises.displacement import give_up_large, no_losses
from headway.policy.pack.promises.outlook import LOST
from headway.policy.pack.promises.packer import outlooks_of
from headway.types import Floats
from tests.pack.keep import NONE, ROOM, answer, jobs, pace_among, packer, ran

_LARGE = {"ttft": 20.0, "tpot": 0.1, "tokens_left": 600.0}  # 240,000 tokens x tokens


def _given_up(
    losses: Floats, row: dict[str, float], now: float = 10.0, keep: PromisesConfig | None = None
) -> tuple[bool, Floats]:
    """Tell whether a row that has just come is given up; also return the losses that are remembered then."""
    chosen, table = packer(keep), jobs({"arrival": now} | row)
    chosen.losses[:] = losses
    theta, pace = OnlineLatency().theta, pace_among(table)
    outlook = outlooks_of(chosen.params, table.data, table.rows(), now, theta, pace, NONE)
    found = give_up_large(chosen.params, table.data, outlook, now, theta, pace)
    assert bool(found.size) == bool(outlook.level[0] == LOST)
    return bool(found.size), chosen.losses


def _losses(*given: tuple[float, float]) -> Floats:
    losses = no_losses()
    losses[:2, : len(given)] = np.array(given).T
    losses[2, : len(given)] = 1.0
    return losses


def test_two_smaller_ones_that_were_lost_lately_are_more_than_one_large() -> None:
    lately, before = (9.9, 1000.0), (1.0, 1000.0)
    assert not _given_up(no_losses(), _LARGE)[0]
    assert not _given_up(_losses(lately), _LARGE)[0], "one for one"
    assert _given_up(_losses(lately, lately), _LARGE)[0]
    assert not _given_up(_losses(lately, before), _LARGE)[0], "the overload is over"
    assert not _given_up(_losses(lately, (9.9, 239_500.0)), _LARGE)[0], "both together are larger"
    assert not _given_up(_losses(lately, lately), _LARGE | {"tokens_left": 10.0})[0], "it is as small"
    assert not _given_up(_losses(lately, lately), _LARGE | {"weight": 2.0})[0], "it weighs as much as both"
    assert _given_up(_losses(lately, lately, lately), _LARGE | {"weight": 2.0})[0]
    assert not _given_up(_losses(lately, lately), _LARGE | {"tpot": np.inf})[0], "its answer can give way"
    assert not _given_up(_losses(lately, lately), _LARGE, keep=PromisesConfig(displaced_share=0.0))[0]


def test_only_prompts_with_a_promise_that_hold_nothing_are_given_up() -> None:
    losses = _losses((9.9, 1000.0), (9.9, 1000.0))
    begun = answer(arrival=9.5, first=9.8, last=9.9, ttft=1.0, tpot=0.1, tokens_left=600.0)
    for row in (
        begun,
        {"tokens_left": 600.0},
        {"e2e": 600.0, "tokens_left": 600.0},
        _LARGE | {"computed": 16, "saved": 16},
    ):
        assert not _given_up(losses, row)[0]
    assert _given_up(losses, _LARGE | {"computed": 16})[0], "the prefix cache has a block of it"


@given(st.lists(st.floats(0.0, 10.0), max_size=40), st.floats(1.0, 3e5), st.floats(1.0, 2000.0))
def test_a_smaller_one_is_never_given_up_for_a_larger(times: list[float], size: float, tokens: float) -> None:
    """Of equal losses: what is given up takes as much as two of them, and so is one with a longer answer."""
    losses = _losses(*((time, size) for time in sorted(times, reverse=True))) if times else no_losses()
    if _given_up(losses, _LARGE | {"tokens_left": tokens})[0]:
        assert tokens * (100 + tokens / 2) >= 2 * size
        assert _given_up(losses, _LARGE | {"tokens_left": 1.5 * tokens + 1.0})[0]


def test_what_was_kept_and_is_lost_is_remembered_once() -> None:
    table = jobs(
        {"ttft": 1.0}, {"e2e": 1.0, "tokens_left": 20.0}, {"ttft": 0.001}, {}, {"ttft": 1.0, "urgency": BEYOND}
    )
    chosen = packer()
    for now in (0.0, 2.0, 3.0):
        chosen.pack(table, ROOM, now)
    times, sizes, _ = chosen.losses[:, chosen.losses[0] > -np.inf]
    assert times.tolist() == [2.0, 2.0], (
        "the third could never be on time, nothing is promised to the next; the last is beyond its share"
    )
    assert sorted(sizes.tolist()) == [100.5, 20.0 * 110.0], "of the first no answer was promised"


def test_what_is_given_up_is_served_in_the_time_that_is_left() -> None:
    """It is no loss itself, and it is kept again once the others' losses are past."""
    table = jobs({"arrival": 9.9, **_LARGE})
    chosen = packer()
    chosen.losses[:] = _losses((9.9, 1000.0), (9.9, 1000.0))
    assert ran(chosen.pack(table, ROOM, 10.0)).tolist() == [0], "nothing else is there"
    for now in (25.0, 40.0):
        chosen.pack(table, ROOM, now)
    assert chosen.losses[0, 0] == 40.0, "kept at 25 s, as no loss was recent, and lost then"
    assert chosen.losses[0, 1] == 9.9
