"""The default recipe gives up the largest requests while more arrives than the engine can serve on time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.core.engine_spec import PromisesConfig
from headway.policy.core.ranks import BEYOND
from headway.policy.forecast.latency.online import TELLING, OnlineLatency
from headway.policy.pack.promises.demand import best_limit, no_demand
from headway.policy.pack.promises.outlook import KEPT, NOT_JUDGED, TOO_LARGE
from headway.types import Floats, Jobs
from tests.pack.keep import ROOM, jobs, packer, ran

_SMALL = {"e2e": 8.0, "tokens_left": 60.0, "prompt": 40}
_LARGE = {"e2e": 20.0, "tokens_left": 600.0, "prompt": 400}
_NO_LIMIT = no_demand().shape[1] - 1  # above all sizes
_KV, _SLOTS = 14_000.0, 256.0


def _rows(*kinds: dict[str, float], now: float = 0.0) -> Jobs:
    return jobs(*({"arrival": now} | kind for kind in kinds))


def _verdicts(*kinds: dict[str, float], keep: PromisesConfig | None = None) -> list[int]:
    """Return the verdicts on these requests, all of which have just come."""
    chosen, table = packer(keep), _rows(*kinds)
    chosen.spec.latency.taught[0] = TELLING
    chosen.pack(table, ROOM, 0.0)
    return [int(table.data["verdict"][row]) for row in table.rows()]


def test_the_largest_are_given_up_while_too_many_come() -> None:
    crowd = [_SMALL] * 400 + [_LARGE] * 40
    assert _verdicts(*crowd) == [KEPT] * 400 + [TOO_LARGE] * 40
    assert _verdicts(*[_SMALL] * 5, _LARGE) == [KEPT] * 6, "there is room for all of them"
    assert TOO_LARGE not in _verdicts(*crowd, keep=PromisesConfig(limits_size=False))
    assert TOO_LARGE not in _verdicts(*[_SMALL] * 440), "none is larger than others: the selection has to choose"


def test_size_is_by_weight() -> None:
    heavy = _LARGE | {"weight": 100.0}
    assert _verdicts(*[_SMALL] * 400, *[_LARGE] * 40, heavy)[-2:] == [TOO_LARGE, KEPT]


def test_what_is_not_due_or_never_on_time_is_not_judged() -> None:
    for row in (
        {"tokens_left": 600.0, "prompt": 400},  # promised nothing
        _LARGE | {"e2e": 0.001},  # never on time
        _LARGE | {"e2e": 3000.0},  # not due for long
    ):
        assert _verdicts(row) == [NOT_JUDGED]


def test_what_is_beyond_a_fair_share_is_judged_like_others_and_costs_them_nothing() -> None:
    beyond = {"urgency": BEYOND}
    assert _verdicts(*[_SMALL] * 400, *[_LARGE] * 40, _LARGE | beyond)[-2:] == [TOO_LARGE] * 2
    assert _verdicts(*[_SMALL | beyond] * 400, *[_LARGE] * 5) == [KEPT] * 405


def test_nothing_is_judged_by_a_speed_that_is_a_guess() -> None:
    chosen, table = packer(), _rows(*[_SMALL] * 400, *[_LARGE] * 40)
    chosen.pack(table, ROOM, 0.0)
    assert {int(table.data["verdict"][row]) for row in table.rows()} == {NOT_JUDGED}


def test_kv_that_others_hold_anyway_is_not_counted() -> None:
    """Of a system prompt that takes a quarter of the KV, and that all requests have."""
    long = {"prompt": 4040, "computed": 4000, "found": 4000, "blocks": 250, "tokens_left": 60.0, "e2e": 8.0}
    crowd = [long] * 3 + [long | {"tokens_left": 120.0}] * 2
    assert _verdicts(*crowd) == [KEPT] * 3 + [TOO_LARGE] * 2
    assert _verdicts(*(row | {"shared": 250} for row in crowd)) == [KEPT] * 5


def test_a_few_requests_in_vain_haste_condemn_no_others_of_their_size() -> None:
    usual, few = {"e2e": 8.0, "tokens_left": 90.0, "prompt": 60}, [_SMALL] * 10
    haste = usual | {"e2e": 0.1, "spread": 0.7}  # on time only if the answer is far shorter than expected
    assert _verdicts(*[usual] * 60, *few) == [KEPT] * 70
    assert _verdicts(*[usual] * 60, *few, *[haste] * 3) == [KEPT] * 73


def test_what_has_begun_is_kept() -> None:
    crowd = [_SMALL] * 400 + [_LARGE] * 40
    begun = _LARGE | {"computed": 401, "output_tokens": 1, "running": True, "blocks": 30, "first": 0.0}
    cached = _LARGE | {"computed": 16}
    assert _verdicts(*crowd, begun, cached)[-2:] == [KEPT, TOO_LARGE]


def test_what_is_given_up_is_served_in_the_time_that_is_left() -> None:
    table = _rows(_LARGE | {"verdict": TOO_LARGE})
    assert ran(packer().pack(table, ROOM, 0.0)).tolist() == [0], "nothing else is there"
    table = _rows(_LARGE | {"verdict": TOO_LARGE}, *[_SMALL | {"arrival": 0.1, "verdict": KEPT}] * 8)
    assert 0 not in ran(packer().pack(table, ROOM, 0.1)), "the kept ones take all slots"


@st.composite
def _demands(draw: st.DrawFn) -> Floats:
    demand, size = no_demand(), no_demand().shape[1] - 1
    for step in draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6, unique=True)):
        count, seconds = draw(st.floats(0.1, 200.0)), 1e-4 * 2 ** (step / 8)
        answer = min(seconds / 1e-3, 2000.0)
        pace = draw(st.sampled_from((0.03, 0.1, 1.0)))
        demand[:, step] = count * np.array([1.0, seconds, answer**2, answer, 1.0 / pace, 0.01 * answer])
    demand[1, size] = 5.0
    return demand


@given(_demands(), st.floats(0.0, 1.0))
def test_the_smallest_are_kept_and_an_engine_without_bounds_keeps_all(demand: Floats, share: float) -> None:
    theta, (first, *_) = OnlineLatency().theta, np.flatnonzero(demand[0, :_NO_LIMIT] > 1e-3)
    assert best_limit(demand, theta, _KV, _SLOTS) >= first
    demand[1, :_NO_LIMIT] *= share / demand[1].sum()
    assert best_limit(demand, theta * 1e-9, np.inf, np.inf) == _NO_LIMIT
