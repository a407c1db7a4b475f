"""Is a workload what its classes say, column by column?"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.simulate.workload import lengths, traces, traffic
from headway.simulate.workload.traffic import TrafficClass, Workload
from headway.stages import Stage
from headway.types import Request, Slo

seeds = st.integers(0, 2**32 - 1)
COLUMNS = [entry.name for entry in fields(Workload) if not entry.type.startswith("tuple")]
CHAT = TrafficClass("chat", 3, Slo(ttft=1.5, tpot=0.15), priority=-1, model="small", tenants=("a", "b"))
BATCH = TrafficClass("batch", 1, Slo(e2e=60), priority=5, lengths="arxiv", model="large", slo_scale=2)
IDLE = TrafficClass("idle", 1, lengths="bros-best-effort", model="small", max_tokens=100)
CLASSES = (CHAT, BATCH, IDLE)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def same(one: Workload, other: Workload) -> bool:
    names = (one.tiers, one.models, one.tenants) == (other.tiers, other.models, other.tenants)
    return names and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)


def output_tokens(n: int = 1000, seed: int = 0) -> Workload:
    return traffic.make(CLASSES, np.arange(n) / 10, rng(seed))


def requests(some: Workload) -> list[Request]:
    """All requests by their facts, without the ids that their rows give them."""
    return [replace(some.request(i), id="") for i in range(len(some))]


# ---- arrivals


@given(st.floats(0.5, 20), st.floats(1, 2), st.floats(5, 50), seeds)
@settings(max_examples=20)
def test_diurnal_arrivals_are_sorted_inside_and_as_many_as_asked(rate, peak, period, seed):
    duration = 4 * period
    times = traffic.diurnal(rate, peak, period, duration, rng(seed))
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < duration))
    expected = rate * duration
    assert abs(times.size - expected) <= 6 * math.sqrt(expected) + 6
    assert np.array_equal(times, traffic.diurnal(rate, peak, period, duration, rng(seed)))


def test_the_day_is_busy_and_the_night_is_not():
    rate, peak, period = 100.0, 1.8, 100.0
    phase = traffic.diurnal(rate, peak, period, 100 * period, rng()) % period
    seen = np.histogram(phase, 20, (0, period))[0]
    edges = np.linspace(0, period, 21)
    swing = (peak - 1) * period / (2 * np.pi) * np.sin(2 * np.pi * edges / period)
    expected = 100 * rate * np.diff(edges - swing)
    assert np.all(np.abs(seen - expected) < 6 * np.sqrt(expected))


@pytest.mark.parametrize(
    "bad", [(0, 1.5, 9, 9), (1, 0.9, 9, 9), (1, 2.1, 9, 9), (1, math.nan, 9, 9), (1, 1.5, 0, 9), (1, 1.5, 9, 0)]
)
def test_an_impossible_day_is_refused(bad):
    with pytest.raises(ConfigError, match=r"above 0|from 1 to 2"):
        traffic.diurnal(*bad, rng())


def test_a_burst_is_one_instant():
    assert traffic.burst(3).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="1 or more"):
        traffic.burst(0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("timestamp_s,prompt_tokens,output_tokens\n5,7,3\n5,8,0\n9,0,5\n")
    return path


def test_a_trace_is_brought_to_a_rate_and_spread(file):
    assert traffic.recorded(file).at.tolist() == [0, 0, 4]
    assert traffic.recorded(file, limit=2).prompt_tokens.tolist() == [7, 8]
    assert traffic.recorded(file, rate=1).at.tolist() == [0, 0, 2]
    spread = traffic.recorded(file, rng=rng()).at
    assert len(set(spread)) == 3
    assert np.all(np.diff(spread) > 0)


# ---- make


def test_the_classes_are_what_they_say():
    some = output_tokens(5000)
    assert (some.tiers, some.models) == (("chat", "batch", "idle"), ("small", "large"))
    assert np.array_equal(some.arrival, np.arange(5000) / 10)
    shares = np.bincount(some.tier) / 5000
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.03)
    chat, batch, idle = (some.take(some.tier == code) for code in range(3))
    assert {tuple(limits) for limits in zip(chat.ttft, chat.tpot, chat.e2e, strict=True)} == {(1.5, 0.15, math.inf)}
    assert set(batch.e2e) == {120.0}  # 60 s scaled by 2
    assert np.all(np.isinf(idle.e2e))
    assert (set(chat.priority), set(batch.priority), set(idle.priority)) == ({-1}, {5}, {0})
    assert idle.output.max() == 100
    assert set(idle.max_tokens) == {100}
    assert set(chat.max_tokens) == {chat.output.max()}
    assert np.bincount(chat.tenant) / len(chat) == pytest.approx([0.5, 0.5], abs=0.05)


def test_a_request_is_its_row():
    some = output_tokens()
    i = int(np.flatnonzero(some.tier == 0)[7])
    assert some.request(i) == Request(
        f"r{i}",
        "small",
        int(some.prompt[i]),
        int(some.max_tokens[i]),
        float(some.arrival[i]),
        Slo(1.5, 0.15),
        -1,
        tenant=some.tenants[some.tenant[i]],
        task="chat",
        tier="chat",
    )
    assert some.request(int(np.flatnonzero(some.tier == 2)[0])).slo == Slo()
    assert some.request(-1).id == "r999"
    with pytest.raises(IndexError):
        some.request(1000)


@given(seeds, st.integers(0, 200))
@settings(max_examples=10)
def test_the_same_seed_gives_the_same_columns(seed, n):
    assert same(output_tokens(n, seed), output_tokens(n, seed))


@given(seeds)
@settings(max_examples=5)
def test_another_seed_gives_others(seed):
    assert not same(output_tokens(200, seed), output_tokens(200, seed + 1))


def test_a_burst_is_not_sorted_by_class():
    some = traffic.make(CLASSES, traffic.burst(1000), rng())
    assert np.count_nonzero(np.diff(some.tier)) > 300


def test_one_tier_on_two_models():
    twice = [TrafficClass("chat", model=name) for name in ("x", "y")]
    some = traffic.make(twice, traffic.burst(100), rng())
    assert (some.tiers, some.models) == (("chat",), ("x", "y"))
    assert set(some.model) == {0, 1}


def test_a_trace_keeps_its_own_lengths(file):
    some = traffic.make([TrafficClass("c", lengths=None)], traces.read(file), rng())
    assert some.arrival.tolist() == [0, 0, 4]
    assert some.prompt.tolist() == [7, 8, 1]  # an empty prompt has a first token,
    assert some.output.tolist() == [3, 1, 5]  # an empty answer an end token


def test_lengths_can_be_read_before(file):
    some = traffic.make([TrafficClass("c", lengths=traces.read_lengths(file))], traffic.burst(50), rng())
    assert set(some.prompt) == {7, 8, 1}


@pytest.mark.parametrize("name", lengths.names())
def test_every_built_in_source_makes_a_workload(name):
    assert len(traffic.make([TrafficClass("c", lengths=name)], traffic.poisson(10, 20, rng()), rng())) > 100


@pytest.mark.parametrize(
    ("classes", "times", "said"),
    [
        ([], [0.0], "at least one class"),
        (CLASSES, [0.0, 2.0, 1.0], r"Arrival 2 is earlier \(1 s\) than the one before it \(2 s\). Sort"),
        (CLASSES, [0.0, math.nan], "Request 1 has arrival nan. It must be 0 s or later"),
        (CLASSES, [-1.0, 0.0], "Request 0 has arrival -1.0"),
        ([TrafficClass("c", lengths=None)], [0.0], "Class c has no lengths, and no trace"),
        ([TrafficClass("c", lengths="alpaka")], [0.0], "Did you mean alpaca"),
    ],
)
def test_what_cannot_be_made_is_said(classes, times, said):
    with pytest.raises(ConfigError, match=said):
        traffic.make(classes, np.array(times), rng())


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"share": 0}, "share of class c is 0"),
        ({"share": math.inf}, "share of class c is inf"),
        ({"slo_scale": -1}, "slo_scale of class c is -1"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"tenants": ()}, "no tenants"),
    ],
)
def test_an_impossible_class_is_refused(bad, said):
    with pytest.raises(ConfigError, match=said):
        TrafficClass("c", **bad)


# ---- the columns


def test_one_class_from_columns():
    some = traffic.single(np.array([0.0, 1.0]), np.array([3, 4]), 5, slo=Slo(e2e=9), tier="t", tenant="u")
    assert some.output.tolist() == some.max_tokens.tolist() == [5, 5]
    assert some.request(1) == Request("r1", "default", 4, 5, 1.0, Slo(e2e=9), tenant="u", task="t", tier="t")
    assert len(traffic.single(np.empty(0), 1, 1)) == 0


@given(seeds, st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=10)
def test_joining_keeps_every_request(seed, n, m):
    one = output_tokens(n, seed)
    other = traffic.single(np.arange(m) / 7, 10, 20, slo=Slo(tpot=1), tier="batch", model="new", tenant="z")
    both = traffic.concat(one, other)
    assert requests(both) == requests(one) + requests(other)
    assert both.models[-1] == "new"
    assert both.tiers == one.tiers
    ordered = both.sorted()
    assert np.all(np.diff(ordered.arrival) >= 0)
    assert sorted(map(repr, requests(ordered))) == sorted(map(repr, requests(both)))
    assert same(both.take(slice(0, n)), replace(one, models=both.models, tenants=both.tenants))


def test_joining_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least one"):
        traffic.concat()


def test_a_piece_of_time():
    piece = output_tokens().between(2, 3)
    assert piece.arrival.tolist() == pytest.approx(np.arange(20, 30) / 10)
    assert piece.request(0).id == "r0"


def test_columns_cannot_be_written():
    some, times = output_tokens(10), np.arange(3.0)
    for name in COLUMNS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(some, name)[0] = 1
    traffic.single(times, 1, 1)
    times[0] = 0.5  # the caller's own array stays his


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("prompt", [1, 0, 1], "Request 1 has prompt 0. It must be 1 token or more"),
        ("output", [1, 1, -2], "Request 2 has output -2. It must be 1 token or more"),
        ("output", [1, 10, 1], "Request 1 has max_tokens 9. It must be at least its output"),
        ("output", [1.0, 2.0, 3.0], "Column output holds float64. Give whole numbers"),
        ("arrival", [0, math.inf, 1], "Request 1 has arrival inf"),
        ("ttft", [1, 1, 0], "Request 2 has ttft 0.0. It must be seconds above 0, or inf for none"),
        ("e2e", [math.nan, 1, 1], "Request 0 has e2e nan"),
        ("tier", [0, 1, 0], "Request 1 has tier 1. It must be a code below 1, one of tiers"),
        ("model", [-1, 0, 0], "Request 0 has model -1"),
        ("priority", [1, 2], r"Column priority has shape \(2,\)"),
        ("prompt", [[1, 2, 3]], r"Column prompt has shape \(1, 3\)"),
    ],
)
def test_bad_columns_name_the_request(column, values, said):
    good = traffic.single(np.arange(3.0), 9, 9)
    with pytest.raises(ConfigError, match=said):
        replace(good, **{column: np.array(values)})


# ---- ids and application runs


def test_ids_name_rows_and_travel_with_them():
    some = replace(output_tokens(4), ids=("d", "r0", "b", "a"))
    assert [some.request(i).id for i in range(4)] == ["d", "r0", "b", "a"]
    assert [some.row_of(id) for id in ("a", "r0")] == [3, 1]
    turned = some.take(np.array([3, 1]))
    assert (turned.ids, turned.row_of("r0")) == (("a", "r0"), 1)
    assert traffic.concat(output_tokens(1), turned.take([0])).ids == ("r0", "a")
    with pytest.raises(KeyError):
        turned.row_of("r7")
    for bad in (("a", "b"), ("a", "a", "b", "c")):
        with pytest.raises(ConfigError, match=r"4 requests have [23] different ids"):
            replace(some, ids=bad)


def test_runs_take_the_requests_of_their_class_in_turn():
    crew = TrafficClass("crew", requests_per_run=3, concurrent_runs=2)
    some = traffic.make([crew], np.arange(9.0), rng())
    stages = [some.request(i).stage for i in range(9)]
    assert stages[:3] == [Stage("crew", "0.0", "step0"), Stage("crew", "0.1", "step0"), Stage("crew", "0.0", "step1")]
    assert [stage.run[2:] for stage in stages] == list("010101232")
    assert [stage.unit[4:] for stage in stages] == list("001122001")


def test_only_classes_with_runs_have_stages_and_their_runs_are_different():
    twice = [TrafficClass("crew", model=name, requests_per_run=2) for name in ("x", "y")]
    some = traffic.make([*twice, CHAT], np.arange(300.0), rng())
    stages = [some.request(i).stage for i in range(300)]
    assert {stage is None for stage, tier in zip(stages, some.tier, strict=True) if some.tiers[tier] == "chat"} == {
        True
    }
    assert {stage is None for stage, tier in zip(stages, some.tier, strict=True) if some.tiers[tier] == "crew"} == {
        False
    }
    models = {}
    for stage, model in zip(stages, some.model, strict=True):
        if stage is not None:
            models.setdefault(stage.run, set()).add(int(model))
    assert all(len(mine) == 1 for mine in models.values())


@pytest.mark.parametrize("bad", [{"requests_per_run": 0}, {"concurrent_runs": 0}])
def test_runs_of_nothing_are_refused(bad):
    with pytest.raises(ConfigError, match="Class c has runs of no requests"):
        TrafficClass("c", **bad)
