"""Types of the decision core: tables behave like a dict of rows; SLOs, forecasts and instances."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from headway.policy.pack.kernels import due_of as due
from headway.tables import Table
from headway.types import Forecast, Instance, Jobs, Request, Slo

SECONDS = st.floats(0.001, 1e6)
COUNT = st.integers(-99, 99)


class Sample(Table):
    COLUMNS: ClassVar[dict[str, type]] = {"weight": float, "count": int, "flag": bool}


class TableMachine(RuleBasedStateMachine):
    """Any sequence of adds and removes leaves the table equal to a dict."""

    keys = Bundle("keys")

    @initialize(capacity=st.integers(1, 4))
    def begin(self, capacity: int) -> None:
        self.serial, self.most = 0, capacity
        self.table = Sample(capacity)
        self.model: dict[str, tuple[float, int, bool]] = {}
        self.rows: dict[str, int] = {}

    @rule(target=keys, weight=st.floats(allow_nan=False), count=COUNT, flag=st.booleans())
    def add(self, weight: float, count: int, flag: bool) -> str:
        self.serial += 1
        key = str(self.serial)
        self.rows[key] = self.table.add(key, weight=weight, count=count, flag=flag)
        self.model[key] = (weight, count, flag)
        return key

    @rule(target=keys)
    def add_bare(self) -> str:
        """Columns not given are zero, in a reused row too."""
        self.serial += 1
        key = str(self.serial)
        self.rows[key] = self.table.add(key)
        self.model[key] = (0.0, 0, False)
        return key

    @rule(key=consumes(keys))
    def remove(self, key: str) -> None:
        for _ in range(2):  # a request may end twice
            self.table.remove(key)
        self.model.pop(key)
        self.rows.pop(key)

    @rule(key=keys, count=COUNT)
    def write(self, key: str, count: int) -> None:
        """A column is a view: writing to it changes the row."""
        self.table.count[self.rows[key]] = count
        weight, _, flag = self.model[key]
        self.model[key] = (weight, count, flag)

    @invariant()
    def the_table_is_the_dict(self) -> None:
        table = self.table
        assert len(table) == len(self.model)
        assert table.row_of == self.rows
        assert table.rows().tolist() == sorted(self.rows.values())
        assert sorted(table.names(table.rows())) == sorted(self.model)
        for key, values in self.model.items():
            row = table.row_of[key]
            assert key in table
            assert (table.weight[row], table.count[row], table.flag[row]) == values

    @invariant()
    def rows_are_reused(self) -> None:
        """It grows by doubling, and stays below twice what was needed at once."""
        self.most = max(self.most, len(self.model))
        assert self.table.live.size == len(self.table.keys) == self.table.weight.size
        assert self.table.live.size < 2 * self.most or self.most == self.table.live.size


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=33, stateful_step_count=40)


def test_a_table_reuses_rows_instead_of_growing() -> None:
    table = Sample(2)
    for i in range(100):
        table.add(str(i))
        table.remove(str(i))
    assert table.live.size == 2


def test_names_come_in_the_order_of_the_rows_asked_for() -> None:
    table = Sample(2)
    a, b, c = table.add("a"), table.add("b"), table.add("c")
    assert table.names([c, a, b]) == ["c", "a", "b"]
    table.remove("a")
    assert table.names([c, a, b]) == ["c", "b"]


def test_a_duplicate_key_and_an_unknown_column_raise() -> None:
    table = Sample()
    table.add("a")
    with pytest.raises(AssertionError, match="row a exists"):
        table.add("a")
    with pytest.raises(AssertionError, match=r"no such columns: \['wait'\]"):
        table.add("b", wait=1)
    with pytest.raises(AttributeError, match="wait"):
        _ = table.wait


def test_a_table_can_be_copied_and_pickled() -> None:
    table = Sample()
    table.add("a", count=3)
    for twin in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        twin.count[twin.row_of["a"]] = 4
        twin.add("b")
        assert (table.count[0], len(table)) == (3, 1)


# ---- Slo


@pytest.mark.parametrize("name", ["ttft", "tpot", "e2e", "itl"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_an_slo_target_is_a_positive_number_of_seconds(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds, not {value}"):
        Slo(**{name: value})


@pytest.mark.parametrize(
    ("slo", "objective"),
    [
        (Slo(), "best_effort"),
        (Slo(e2e=1), "deadline"),
        (Slo(ttft=1), "interactive"),
        (Slo(tpot=1), "interactive"),
        (Slo(itl=1), "interactive"),
        (Slo(ttft=1, e2e=1), "interactive"),
    ],
)
def test_the_objective_follows_from_the_slo(slo: Slo, objective: str) -> None:
    assert slo.objective == objective


@given(arrival=SECONDS, ttft=st.none() | SECONDS, e2e=st.none() | SECONDS)
def test_due_is_the_first_token_or_the_answer_whichever_is_owed_first(
    arrival: float, ttft: float | None, e2e: float | None
) -> None:
    due = Slo(ttft=ttft, tpot=1.0, e2e=e2e).due(arrival)
    if ttft is None and e2e is None:
        assert due == math.inf
    else:
        assert due == arrival + min(ttft or math.inf, e2e or math.inf)


@given(limits=st.tuples(*[st.none() | SECONDS] * 4), seen=st.tuples(*[SECONDS] * 4))
def test_an_slo_is_met_when_every_target_is(
    limits: tuple[float | None, ...], seen: tuple[float, float, float, float]
) -> None:
    broken = [limit is not None and s > limit for limit, s in zip(limits, seen, strict=True)]
    assert Slo(*limits[:3], itl=limits[3]).met(*seen) is not any(broken)


def test_an_slo_is_met_at_its_exact_limit() -> None:
    assert Slo(1.0, 0.1, 5.0, itl=0.5).met(1.0, 0.1, 5.0, 0.5)


def test_no_gap_above_an_itl_means_no_mean_above_it() -> None:
    assert (Slo(tpot=0.1, itl=0.5).per_token, Slo(itl=0.5).per_token, Slo(ttft=1.0).per_token) == (0.1, 0.5, None)


@given(first=st.floats(0.1, 20), pace=st.floats(0.01, 1), tokens=st.integers(2, 50))
def test_a_line_is_met_when_the_last_token_comes_in_time(first: float, pace: float, tokens: int) -> None:
    slo, e2e = Slo(ttft=5.0, tpot=0.1, line=True), first + pace * (tokens - 1)
    due = 5.0 + 0.1 * (tokens - 1)
    assume(abs(e2e - due) > 1e-6)
    assert slo.met(first, pace, e2e, pace) is (first <= 5.0 and e2e < due)


@pytest.mark.parametrize("targets", [{"ttft": 1.0}, {"tpot": 1.0}])
def test_a_line_needs_a_start_and_a_pace(targets: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="line needs both"):
        Slo(**targets, line=True)  # type: ignore[arg-type]


# ---- when a row's next token is due


def due_of(**values: Any) -> float:
    jobs = Jobs()
    promises = {"ttft": math.inf, "tpot": math.inf, "e2e": math.inf, "arrival": 100.0}
    row = jobs.add("a", **{**promises, **values})
    return due(jobs.data, row)


def test_the_first_token_is_due_ttft_after_arrival() -> None:
    assert due_of(ttft=2.0, tpot=0.1) == 102.0


def test_later_tokens_are_due_tpot_apart_counted_from_the_first() -> None:
    """Early tokens count: an answer ahead of its TPOT can wait."""
    assert due_of(ttft=2.0, tpot=0.1, first=101.0, output_tokens=1) == pytest.approx(101.1)
    assert due_of(ttft=2.0, tpot=0.1, first=101.0, output_tokens=30) == pytest.approx(104.0)


def test_nothing_is_due_later_than_the_whole_answer() -> None:
    assert due_of(ttft=2.0, e2e=1.0) == 101.0
    assert due_of(tpot=0.1, first=101.0, output_tokens=30, e2e=3.0) == 103.0


def test_without_an_slo_nothing_is_due() -> None:
    assert due_of() == math.inf
    assert due_of(first=101.0, output_tokens=3) == math.inf
    assert due_of(ttft=1.0, first=101.0, output_tokens=3) == math.inf


# ---- Forecast

SAMPLES = st.lists(st.integers(1, 5000), min_size=1, max_size=40).map(lambda v: np.sort(np.array(v, float)))


@given(SAMPLES, st.floats(0, 1))
def test_a_quantile_is_not_exceeded_with_its_probability(samples: Any, p: float) -> None:
    value = Forecast(samples).quantile(p)
    assert samples[0] <= value <= samples[-1]
    assert np.count_nonzero(samples > value + 1e-9) <= math.ceil((1 - p) * samples.size)


def test_mean_and_spread_are_those_of_the_samples() -> None:
    forecast = Forecast(np.array([2.0, 4.0, 6.0]))
    assert forecast.mean == 4.0
    assert forecast.std == pytest.approx(math.sqrt(8 / 3))
    assert forecast.spread == pytest.approx(math.sqrt(8 / 3) / 4)
    assert Forecast(np.array([7.0, 7.0])).spread == 0.0
    assert Forecast(np.array([7.0, 7.0]), guess=True).spread == 1.0, "too few to tell"


def test_the_dispatch_window_is_the_batch_and_the_lead() -> None:
    assert Instance("e0", "m", 4, 100, 16, 2048).window == 6
    assert Instance("e0", "m", 4, 100, 16, 2048, lead=0).window == 4


def test_the_pace_of_several_answers_is_that_of_each() -> None:
    alone, four = Request("a", "m", 3, 9, 0.0), Request("b", "m", 3, 9, 0.0, places=4)
    assert (alone.tpot(1.0, 3.0, 5), four.tpot(1.0, 3.0, 20)) == (0.5, 0.5)
    assert (alone.tpot(1.0, 3.0, 1), four.tpot(1.0, 3.0, 4)) == (0.0, 0.0)
