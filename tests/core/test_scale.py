"""How many engines a model wants: forecasts, the replay, and the properties of the number."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import Scale
from headway.policy.core.cluster import Cluster
from headway.policy.scale.outlook import EngineSize, Traffic, kept
from headway.policy.scale.rates import STEP_S, Arrivals, Rates
from headway.policy.scale.scaler import Queue, Scaler, Scaling, _Curves, fewest
from headway.types import Request, Slo

# An engine of about 1.5 such requests per second: seconds by `OnlineLatency`'s scaled coefficients.
ENGINE = EngineSize(np.array([0.032, 0.0027, 0.0008, 0.09, 0.002]), 2048, 256, 400_000)
SLO = Slo(ttft=3.0, tpot=0.1)
NOTHING, BUSY = Queue(np.empty(0), np.empty(0)), Queue(np.empty(0), np.empty(0), 1)


def request(at: float, prompt: int = 1200, slo: Slo = SLO) -> Request:
    return Request(f"r{at}", "m", prompt, 400, at, slo)


def load(scaler: Scaler, times: np.ndarray, have: int = 2, every: float = STEP_S) -> list[int]:
    """Feed arrivals that are answered at once, and return the numbers wanted meanwhile, which are carried out."""
    wanted, i = [], 0
    rng = np.random.default_rng(1)
    for now in np.arange(every, times[-1], every).tolist():
        while i < times.size and times[i] <= now:
            scaler.came(float(times[i]))
            scaler.ended(request(float(times[i])), int(rng.integers(200, 2400)), int(rng.integers(20, 400)))
            i += 1
        have = scaler.wanted(now, have, ENGINE, BUSY)
        wanted.append(have)
    return wanted


def even(rate: float, seconds: float) -> np.ndarray:
    return np.arange(0.01, seconds, 1 / rate)


def poisson(rate: float, seconds: float, seed: int = 0) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, round(rate * seconds)))


# ---- the forecast


def test_a_steady_rate_is_forecast_with_little_doubt() -> None:
    rates = Rates()
    for at in poisson(5, 1800).tolist():
        rates.arrived(at)
        rates.expect(60, 60)
    found = rates.expect(60, 60)
    assert found.known
    assert found.rate == pytest.approx(5, rel=0.2)
    assert np.all((found.ratios > 0.6) & (found.ratios < 1.6))


def test_a_jump_is_followed_within_half_a_minute() -> None:
    rates = Rates()
    for at in [*even(1, 900).tolist(), *(900 + even(4, 30)).tolist()]:
        rates.arrived(at)
    rates.advance(930.0)
    assert rates.expect(60, 60).rate > 3


def test_a_trend_goes_on() -> None:
    rates = Rates()
    for at in (1000 * np.sqrt(np.linspace(0.001, 1, 2500))).tolist():  # the rate at t is t / 200
        rates.arrived(at)
    assert rates.expect(60, 60).rate == pytest.approx(5.45, rel=0.15)


def test_the_time_of_day_is_known_on_the_second_day() -> None:
    day = 3600.0
    rates = Rates(day)
    for start in (0.0, day):
        for low, high, rate in ((0.0, 1800.0, 1.0), (1800.0, 3600.0, 5.0)):
            for at in even(rate, high - low).tolist():
                if start + low + at < 1.5 * day - 60:
                    rates.arrived(start + low + at)
    rates.advance(1.5 * day - 60)
    assert rates.expect(120, 60).rate > 1.5, "the level alone says 1"


def test_a_day_is_believed_as_far_ahead_as_it_was_right() -> None:
    """Its noise in single steps, where the level is a better forecast, does not matter five minutes ahead."""
    day, rng = 1800.0, np.random.default_rng(0)
    rates, at = Rates(day), 0.0
    rates.expect(300, 300)
    while at < 2.4 * day:
        at += rng.exponential(1 / 4)
        if rng.random() < 0.5 - 0.4 * np.cos(2 * np.pi * at / day):
            rates.arrived(at)
    middle = at + 450
    assert rates.expect(300, 300).rate == pytest.approx(2 - 1.6 * np.cos(2 * np.pi * middle / day), rel=0.25)
    assert rates.expect(0, 5).rate > 2.5, "now it is much more"


def test_an_error_that_was_seen_once_has_no_frequency() -> None:
    rates = Rates()
    for at in [*even(1, 600).tolist(), *(600 + even(4, 600)).tolist()]:
        rates.arrived(at)
        rates.expect(60, 60)
    assert rates.expect(60, 60).ratios.max() < 2


# ---- the replay


def sample(n: int = 200, slo: tuple[float, float, float] = (3.0, 0.1, math.inf)) -> Traffic:
    rng = np.random.default_rng(0)
    columns = [rng.integers(200, 2400, n), rng.integers(20, 400, n), *(np.full(n, limit) for limit in slo)]
    return Traffic(rng.exponential(1.0, n), np.stack(columns, 1).astype(float))


def test_an_idle_engine_keeps_all_and_none_keeps_nothing() -> None:
    assert kept(sample(), ENGINE, 1, 0.2) == 1
    assert kept(sample(), ENGINE, 0, 1.0) == 0


def test_without_promises_nothing_is_lost() -> None:
    assert kept(sample(slo=(math.inf, math.inf, math.inf)), ENGINE, 0, 1.0) == 1


def test_work_that_is_due_in_hours_is_lost_where_its_queue_grows() -> None:
    assert kept(sample(slo=(math.inf, math.inf, 1e5)), EngineSize(ENGINE.theta, 2048, 4, 400_000), 1, 20.0) < 0.5


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.floats(0.1, 20), st.integers(2, 300), st.integers(1, 64), st.integers(3000, 100_000))
def test_every_replay_ends_with_a_share(engines: int, speed: float, n: int, slots: int, kv: int) -> None:
    assert 0 <= kept(sample(n), EngineSize(ENGINE.theta, 512, slots, kv), engines, speed) <= 1


def test_the_search_finds_the_fewest() -> None:
    for first in (1, 3, 9):
        assert fewest(lambda n: n / 10, 0.55, first, 10) == 6
    assert fewest(lambda n: n / 100, 0.55, 1, 10) is None


# ---- the number


@pytest.mark.parametrize(("share", "engines"), [(0.99, 5), (0.95, 3), (0.999, 7)])
def test_the_last_promises_may_cost_more_than_they_are_worth(share: float, engines: int) -> None:
    """The sixth engine would add a fifth to five, and save 0.15 points of the one that may be lost."""
    kept_by = {1: 0.5, 2: 0.9, 3: 0.97, 4: 0.985, 5: 0.9898, 6: 0.9913, 7: 0.9935}
    curves = _Curves(sample(), ENGINE, 1.0, 1000.0, {(count, 0): share for count, share in kept_by.items()})
    assert curves.needed(Arrivals(1.0, np.ones(1), True), 0.0, 2, 7, share) == engines


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2), st.integers(2, 6), st.lists(st.floats(0.05, 12), min_size=1, max_size=4), st.integers(0, 9))
def test_it_is_never_below_min_or_above_max(least: int, most: int, rates: list[float], have: int) -> None:
    scaler = Scaler(Scale(max=most, min=least, start_s=20.0))
    times = np.concatenate([60.0 * i + even(rate, 60.0) for i, rate in enumerate(rates)])
    assert all(least <= count <= most for count in load(scaler, times, have))


def test_more_load_never_wants_fewer_engines() -> None:
    counts = [load(Scaler(Scale(max=12, start_s=30.0)), even(rate, 400.0))[-1] for rate in (0.5, 1.0, 2.0, 4.0, 8.0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("rate", [0.7, 2.0, 4.5])
def test_a_constant_load_does_not_make_it_flap(rate: float) -> None:
    wanted = load(Scaler(Scale(max=12)), poisson(rate, 2700.0))[180:]  # after a quarter of an hour
    rises, falls = ([i for i, (a, b) in enumerate(pairwise(wanted)) if sign * (b - a) > 0] for sign in (1, -1))
    assert len(rises) + len(falls) <= 10, wanted
    assert all((fall - rise) * STEP_S >= 60 for rise in rises for fall in falls if fall > rise), "a start is paid for"
    assert max(wanted) - min(wanted) <= 1, wanted


def test_it_rises_at_once_and_falls_when_that_pays() -> None:
    times = np.concatenate([even(1.0, 600.0), 600 + even(6.0, 300.0), 900 + even(1.0, 900.0)])
    wanted = load(Scaler(Scale(max=12)), times)
    low, high, after = wanted[int(590 / STEP_S)], max(wanted), wanted[-1]
    assert high > low
    assert wanted[int(630 / STEP_S)] > low, "within half a minute"
    assert after <= low + 1
    assert wanted[int(905 / STEP_S)] > after, "not at the first silence"


def test_a_queue_with_a_deadline_wants_engines_in_time() -> None:
    scaler = Scaler(Scale(max=12))
    load(scaler, even(1.0, 400.0))
    backlog = Queue(np.full(9000, 1500.0), np.full(9000, 400.0 + 600.0), 3)
    later = Queue(np.full(9000, 1500.0), np.full(9000, 400.0 + 86_400.0), 3)
    assert scaler.wanted(400.0, 2, ENGINE, backlog) > scaler.wanted(400.0, 2, ENGINE, later)


def test_to_zero_and_back() -> None:
    scaler = Scaler(Scale(max=3, min=0, share=0.9, start_s=30.0))
    for at in even(1.0, 100.0).tolist():
        scaler.came(at)
        scaler.ended(request(at), 500, 100)
    assert scaler.wanted(101.0, 1, ENGINE, BUSY) == 1, "a request is inside"
    assert scaler.wanted(110.0, 1, ENGINE, NOTHING) == 1, "a start costs more than ten seconds of an engine"
    assert scaler.wanted(131.0, 1, ENGINE, NOTHING) == 0
    assert scaler.wanted(900.0, 0, ENGINE, NOTHING) == 0
    scaler.came(1000.0)
    assert scaler.wanted(1000.0, 0, ENGINE, Queue(np.array([600.0]), np.array([1003.0]))) == 1


@pytest.mark.parametrize("arrivals", [[], [40.0]])
@pytest.mark.parametrize("engine", [None, ENGINE])
def test_to_min_where_nothing_is_known_because_nothing_comes(arrivals: list[float], engine: EngineSize | None) -> None:
    """After a silence as long as a start, and the wait before an engine stops."""
    scaler, have, falls = Scaler(Scale(max=4, min=1, start_s=30.0)), 3, list[float]()
    for now in np.arange(0.0, 200.0, STEP_S).tolist():
        for at in arrivals:
            if at == now:
                scaler.came(at)
        before, have = have, scaler.wanted(now, have, engine, NOTHING)
        falls += [now] * (have < before)
    assert have == 1
    assert falls == [max(arrivals, default=0.0) + 60.0]


def test_it_is_not_zero_where_silences_would_cost_too_many_promises() -> None:
    scaler = Scaler(Scale(max=3, min=0, share=0.9, start_s=30.0))
    for at in np.arange(0, 4000, 40.0).tolist():  # each request comes after a silence longer than a start
        scaler.came(at)
        scaler.ended(request(at), 500, 100)
    assert scaler.wanted(3995.0, 1, ENGINE, NOTHING) == 1
    assert scaler.wanted(4020.0, 1, ENGINE, NOTHING) == 0, "as long as this it was never silent"


def test_without_a_share_of_its_own_it_is_that_of_the_classes() -> None:
    scaler = Scaler(Scale(max=3))
    assert scaler.share == 0.99
    for i in range(60):
        slo = replace(SLO, share=0.9) if i % 3 else Slo() if i % 2 else SLO
        scaler.ended(request(float(i), slo=slo), 500, 100)
    assert scaler.share == pytest.approx((40 * 0.9 + 10 * 0.99) / 50), "what has no promise does not count"
    scaler.limits = replace(scaler.limits, share=0.95)
    assert scaler.share == 0.95


def test_engines_that_are_all_lost_are_wanted_again() -> None:
    scaling = Scaling({"m": Scale(max=8)})
    assert scaling.wanted("m", Cluster(), 0.0, 0) == 1
    assert scaling.wanted("m", Cluster(), 5.0, 4) == 4
    assert scaling.wanted("m", Cluster(), 10.0, 0) == 4


def test_starts_are_learned() -> None:
    scaler = Scaler(Scale(max=3))
    assert scaler.start_s == 60
    for seconds in (20.0, 35.0, 25.0):
        scaler.started(seconds)
    assert scaler.start_s == 35
