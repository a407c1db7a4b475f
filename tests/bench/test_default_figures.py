"""`headway bench default`: figures of hand-made outcomes, of everybody and not of promises alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated import default_plots
from benchmarks.simulated.default_figures import (
    BOUND,
    DEFAULT,
    STOCK,
    Cell,
    Figures,
    Service,
    figures,
    most_tokens,
    recovery,
)
from benchmarks.simulated.default_rows import ALL, HELD, grid, notes, outside, places_of, rows_of
from benchmarks.simulated.grounds import GROUNDS, Ground
from headway.simulate.outcome import Outcome
from headway.simulate.workload.traffic import TrafficClass, Workload, concat, single
from headway.types import Slo
from headway.whatif.output.results import Row

TIGHT = next(ground for ground in GROUNDS if ground.name == "tight-tpot")  # 10 ms, tpot 30 ms
PLAIN = replace(TIGHT, name="plain", classes=(TrafficClass("plain"),), held=True)


def two_promised_two_not() -> Workload:
    """Return requests at 0, 1, 2 and 3 s; the first two, of weights 3 and 1, should begin within a second."""
    gold = single(np.array([0.0]), 10, 10, slo=Slo(ttft=1.0, weight=3.0))
    silver = single(np.array([1.0]), 10, 10, slo=Slo(ttft=1.0))
    return concat(gold, silver, single(np.array([2.0, 3.0]), np.array([70, 10]), 10))


def outcome() -> Outcome:
    """Return a run in which the second request begins 3 s late, and one of the streams pauses."""
    done = Outcome.of(4)
    done.first[:], done.end[:] = (0.5, 5.0, 6.0, 9.0), (2.0, 8.0, 12.0, 11.0)
    done.gap[:] = (0.1, 0.2, 1.5, 1.0)
    done.iterations, done.busy = 100, 5.0
    return done


def part(rows: slice) -> Service:
    """Return the figures of a run that had these requests only."""
    columns = ("first", "end", "instance", "evictions", "gap")
    some = Outcome(*(getattr(outcome(), name)[rows] for name in columns))
    return Service.of(two_promised_two_not().take(rows), some)


def service(**changed: float | None) -> Service:
    return replace(Service.of(two_promised_two_not(), outcome()), **changed)  # type: ignore[arg-type]


def test_everybody_counts_by_hand() -> None:
    seen = Service.of(two_promised_two_not(), outcome())
    assert seen.tardiness_p99 == pytest.approx(0.99 * 3.0), "0 and 3 s late, interpolated"
    assert seen.gap_p99 == pytest.approx(1.0 + 0.97 * 0.5)
    assert seen.silent == 25, "a gap of exactly a second is not above it"
    assert seen.unpromised_mean == 9.0
    assert seen.unpromised_p99 == pytest.approx(8.0 + 0.99 * 2.0)
    assert seen.tokens_per_s == pytest.approx(40 / 12)
    work, wait = np.array([40, 40, 100, 40]), np.array([2.0, 7.0, 10.0, 8.0])
    assert seen.weighted_wait == pytest.approx(float((work * wait).sum() / work.sum()))
    assert seen.worst_wait == 10.0
    assert seen.weighted_attainment == 75
    assert seen.iteration == 0.05
    assert seen.recovery is None


def test_what_nobody_has_has_no_figure() -> None:
    plain, kept = part(slice(2, 4)), part(slice(0, 1))
    assert (plain.tardiness_p99, plain.weighted_attainment) == (None, None)
    assert (kept.unpromised_p99, kept.unpromised_mean, kept.worst_wait) == (None, None, None)


def test_a_run_that_was_cut_off_has_no_figures() -> None:
    cut = outcome()
    cut.end[3] = np.nan
    with pytest.raises(AssertionError, match="last completion"):
        Service.of(two_promised_two_not(), cut)


def test_attainment_and_best_effort_are_those_of_the_arrivals() -> None:
    cell = Cell(replace(TIGHT, requests=1), 1.0, 0, DEFAULT)  # 60 s of arrivals
    seen = figures(cell, two_promised_two_not(), outcome())
    assert (seen.kept, seen.promised, seen.attainment) == (1, 2, 50)
    assert seen.be_tokens == pytest.approx(20 / 60)
    late = outcome()
    late.end[3] = 61.0
    assert figures(cell, two_promised_two_not(), late).be_tokens == pytest.approx(10 / 60)


def test_seeds_share_promises_and_average_the_rest() -> None:
    one, two = service(tokens_per_s=2.0), service(tokens_per_s=4.0, unpromised_p99=None)
    seen = Figures.sum([Figures(1, 2, 4.0, one), Figures(3, 8, 6.0, two)])
    assert (seen.kept, seen.promised, seen.be_tokens) == (4, 10, 5.0)
    assert seen.service is not None
    assert (seen.service.tokens_per_s, seen.service.unpromised_p99) == (3.0, one.unpromised_p99)
    assert Figures.sum([Figures(1, 2, 4.0)]).service is None


def test_recovery_begins_where_almost_all_are_served_as_if_alone() -> None:
    arrival, alone = np.arange(100, dtype=np.float64), np.full(100, 2.0)
    wait = np.where(arrival < 70, 9.0, 3.0)
    wait[75] = wait[80] = 50.0  # two of twenty may be late
    assert recovery(arrival, arrival + wait, alone, 40.0) == 30.0
    assert recovery(arrival, arrival + 3.0, alone, 40.0) == 0.0
    assert recovery(arrival, arrival + 3.1, alone, 40.0) == math.inf
    assert recovery(arrival, arrival + 3.0, alone, 90.0) == math.inf, "too few to tell"


def test_the_bound_of_tokens_follows_from_the_tightest_tpot_that_can_be_met() -> None:
    base = 0.0103016 + 7.31613e-05  # of the profile, with one answer
    assert most_tokens(TIGHT, 0.045) == pytest.approx((1 - base / 0.03) / (1 - base / 0.045))
    assert most_tokens(TIGHT, 0.025) == 1.0, "stock's iterations are shorter than the promise"
    assert most_tokens(TIGHT, base) == 1.0
    assert most_tokens(PLAIN, 0.045) == 1.0
    nobody = TrafficClass("chat", slo=Slo(tpot=0.005))
    assert most_tokens(replace(PLAIN, classes=(nobody,)), 0.045) == 1.0, "no promise forces anything"
    both = (nobody, *TIGHT.classes)
    assert most_tokens(replace(PLAIN, classes=both), 0.045) == most_tokens(TIGHT, 0.045)


def cells(ground: Ground, load: float, ours: Service, promised: int = 100) -> dict[Cell, Figures]:
    """Return a bound, ours and stock's figures at one place."""
    stock = service(iteration=0.045)
    seen = ((BOUND, 95, None), (DEFAULT, 80, ours), (STOCK, 60, stock))
    return {Cell(ground, load, 0, name): Figures(min(kept, promised), promised, 1.0, one) for name, kept, one in seen}


def at(rows: list[Row], setting: str, system: str = DEFAULT) -> dict[str, float | None]:
    return {row.id: row.ours for row in rows if (row.setting, row.system) == (setting, system)}


def test_rows_are_seconds_shares_and_ratios_to_stock() -> None:
    base = service()
    assert base.unpromised_p99 is not None
    ours = service(tokens_per_s=base.tokens_per_s / 2, unpromised_p99=3 * base.unpromised_p99, worst_wait=15.0)
    rows = rows_of(cells(TIGHT, 1.0, ours), ())
    seen = at(rows, "tight-tpot, 1x")
    assert seen["tokens_per_s"] == 0.5
    assert seen["unpromised.e2el.p99"] == pytest.approx(3.0)
    assert (seen["unpromised.e2el.mean"], seen["mean_wait.weighted"], seen["worst_wait"]) == (1.0, 1.0, 1.5)
    assert (seen["gap.p99"], seen["gap.over_1s"]) == (base.gap_p99, 25)
    assert (seen["tardiness.p99"], seen["attainment.weighted"]) == (base.tardiness_p99, 75)
    assert "recovery_s" not in seen
    bound = at(rows, "tight-tpot, 1x", BOUND)["bound.tokens_per_s"]
    assert bound == pytest.approx(most_tokens(TIGHT, 0.045))
    assert at(rows, "tight-tpot, 1x", STOCK)["tokens_per_s"] == 1.0


def test_recovery_that_never_came_is_no_number() -> None:
    runs = (rows_of(cells(TIGHT, 1.0, service(recovery=seconds)), ()) for seconds in (math.inf, 7.0))
    never, soon = (at(rows, "tight-tpot, 1x") for rows in runs)
    assert (never["recovery_s"], soon["recovery_s"]) == (None, 7.0)


def test_a_wrong_forecast_is_beside_the_same_stock() -> None:
    found = cells(TIGHT, 1.3, service())
    wrong = replace(next(cell for cell in found if cell.system == DEFAULT), length_error=2.0)
    rows = rows_of(found | {wrong: Figures(1, 2, 0.0, service())}, ())
    assert at(rows, wrong.setting)["tokens_per_s"] == 1.0


def test_the_sums_count_what_is_outside_and_name_it() -> None:
    base = service()
    slow = service(tokens_per_s=0.5 * base.tokens_per_s, weighted_wait=4 * base.weighted_wait)
    found = cells(TIGHT, 0.7, slow) | cells(TIGHT, 1.3, service(silent=0.0))
    rows, places = rows_of(found, ()), places_of(found)
    names = outside(rows, places)
    assert names == {
        "tokens_per_s": ["tight-tpot, 0.7x"],
        "mean_wait.weighted": ["tight-tpot, 0.7x"],
        "unpromised.e2el.p99": [],
        "gap.over_1s": ["tight-tpot, 0.7x"],
    }
    seen = at(rows, ALL)
    assert (seen["outside.tokens_per_s"], seen["outside.unpromised.e2el.p99"]) == (1, 0)
    assert (seen["tokens_per_s.mean"], seen["tokens_per_s.least"]) == (0.75, 0.5)
    assert (seen["mean_wait.weighted.mean"], seen["mean_wait.weighted.most"]) == (2.5, 4.0)
    assert seen["gap.over_1s.mean"] == 12.5
    said = [note for note in notes(rows, places) if note.startswith("tokens_per_s ")]
    assert said[0].endswith("in 1 of 2 cells: tight-tpot, 0.7x.")


@pytest.mark.parametrize(("load", "times", "is_out"), [(0.7, 1.3, 1), (0.9, 1.3, 0), (1.0, 2.1, 1), (1.3, 9.0, 0)])
def test_what_best_effort_may_pay_depends_on_the_load(load: float, times: float, is_out: int) -> None:
    base = service().unpromised_p99
    assert base is not None
    found = cells(TIGHT, load, service(unpromised_p99=times * base))
    assert at(rows_of(found, ()), ALL)["outside.unpromised.e2el.p99"] == is_out


def test_held_grounds_are_summed_up_apart_even_where_nothing_is_promised() -> None:
    own, held = cells(TIGHT, 1.0, service()), cells(PLAIN, 1.0, service(silent=0.0), promised=0)
    rows = rows_of(own | held, ())
    assert (at(rows, ALL)["cells"], at(rows, ALL)["gap.over_1s.mean"]) == (1, 25)
    assert "cells" not in at(rows, HELD)
    assert at(rows, HELD)["gap.over_1s.mean"] == 0
    assert "attainment.promised" not in at(rows, "plain, 1x")
    assert {place.group for place in places_of(own | held)} == {ALL, HELD}
    table = grid(rows, ())
    assert {len(line) for line in table.cells()} == {len(table.header)}
    for make in (default_plots.matrix, default_plots.measures, default_plots.spread):
        assert (make(rows) or b"").startswith(b"\x89PNG")
    assert default_plots.measures([]) is None
    assert default_plots.spread([]) is None
