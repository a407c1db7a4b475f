"""When warming must begin to be of use with the probability that is wanted (Equation 3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.apps.prewarming import trigger
from headway.types import Floats

N = 20_000


def effectiveness(share: float, starts: float, warm_s: float, seed: int = 1) -> float:
    """Return how often, in a simulation, warming that begins after `starts` seconds is ready and used."""
    rng = np.random.default_rng(seed)
    ends, used = drawn(rng), rng.random(N) < share
    return float(((ends >= starts + warm_s) & used).mean())


def drawn(rng: np.random.Generator) -> Floats:
    return 3 + rng.gamma(4.0, 1.5, N)


@pytest.mark.parametrize("share", [1.0, 0.7])
@pytest.mark.parametrize("k", [0.3, 0.5, 0.65])
@pytest.mark.parametrize("warm_s", [0.1, 2.0])
def test_warming_is_of_use_as_often_as_is_wanted(share: float, k: float, warm_s: float) -> None:
    ends = drawn(np.random.default_rng(0))
    after = trigger(share, ends, warm_s, k)
    assert after is not None
    assert effectiveness(share, after, warm_s) == pytest.approx(k, abs=0.015)


ENDS = st.lists(st.floats(0, 1e3), min_size=1, max_size=50).map(np.array)
SHARES = st.floats(0.01, 1.0)


@given(SHARES, ENDS, st.floats(0, 1e3), SHARES)
def test_it_is_the_latest_start_that_is_effective_enough(share: float, ends: Floats, warm_s: float, k: float) -> None:
    after = trigger(share, ends, warm_s, k)
    if share < k:
        assert after is None
        return
    assert after is not None
    later = np.sort(ends)[np.sort(ends) > after + warm_s]
    if after > 0:
        assert share * (ends >= after + warm_s - 1e-9).mean() >= k - 1e-6
    if later.size:
        assert share * (ends >= later[0]).mean() <= k + 1e-6 or later[0] - warm_s - after < 1e-9


@given(SHARES, ENDS, st.floats(0, 1e3), SHARES, SHARES)
def test_a_smaller_k_is_never_earlier(share: float, ends: Floats, warm_s: float, one: float, two: float) -> None:
    """It wants less certainty: of two that are triggered, the more certain one begins first."""
    small, large = (trigger(share, ends, warm_s, k) for k in sorted((one, two)))
    assert large is None or small is not None
    assert large is None or small is None or small >= large


@given(SHARES, ENDS, st.floats(0, 1e3), SHARES)
def test_a_warm_up_that_takes_longer_begins_earlier(share: float, ends: Floats, warm_s: float, k: float) -> None:
    short, long = trigger(share, ends, warm_s, k), trigger(share, ends, warm_s + 1, k)
    assert (short is None) == (long is None)
    assert short is None or long is None or max(short - 1, 0) == pytest.approx(long)


def test_without_a_notion_of_the_end_nothing_is_warmed() -> None:
    assert trigger(1.0, np.empty(0), 1.0, 0.5) is None


def test_what_is_late_already_begins_at_once() -> None:
    assert trigger(1.0, np.array([1.0, 2.0]), 5.0, 0.5) == 0.0


def test_certainty_is_to_be_ready_by_the_earliest_end() -> None:
    assert trigger(1.0, np.array([4.0, 2.0, 9.0]), 0.5, 1.0) == 1.5
    assert trigger(0.5, np.array([4.0, 2.0, 9.0]), 0.5, 0.5) == 1.5
