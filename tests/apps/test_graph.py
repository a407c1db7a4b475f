"""Demand graphs: what they learn, forget and write to files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.policy.apps.graph import END, KEPT, LLM, Graph, Visit, from_json


def llm(unit: str, prompt: float = 10.0, output: float = 5.0, parallel: int = 1) -> Visit:
    return Visit(unit, LLM, prompt, output, parallel)


def tool(unit: str, seconds: float = 1.0) -> Visit:
    return Visit(unit, "python", seconds=seconds)


def learned(*runs: list[Visit]) -> Graph:
    graph = Graph("app")
    for run in runs:
        graph.learn(run)
    return graph


VISITS = st.one_of(
    st.builds(llm, st.sampled_from("abc"), st.floats(1, 1e5), st.floats(0, 1e4), st.integers(1, 50)),
    st.builds(tool, st.sampled_from("xyz"), st.floats(0, 1e4)),
)
RUNS = st.lists(st.lists(VISITS, max_size=8), max_size=8)


def test_a_record_tells_what_came_before_and_after() -> None:
    run = [llm("plan"), tool("search"), llm("plan", 20.0)]
    graph = learned(run)
    first, second = graph.units["plan"].records
    assert (first.ordinal, first.before, first.after) == (0, None, "search")
    assert (second.ordinal, second.before, second.after) == (1, run[1], END)
    assert second.visit == run[2]
    assert list(graph.starts) == ["plan"]
    assert graph.units["search"].backend == "python"


def test_an_empty_run_teaches_nothing() -> None:
    assert learned([]) == Graph("app")


def test_the_latest_thousand_records_are_kept() -> None:
    graph = learned(*([llm("a", float(i + 1))] for i in range(1300)))
    assert [record.visit.prompt for record in graph.units["a"].records] == list(range(301, 1301))
    assert len(graph.starts) == KEPT
    assert graph.runs == 1300


def test_branches_are_the_shares_of_what_came_next() -> None:
    graph = learned(*[[llm("a"), llm("b")]] * 6, *[[llm("a"), tool("t")]] * 3, [llm("a")])
    assert graph.units["a"].next_units == {"b": 0.6, "t": 0.3, END: 0.1}


@given(RUNS)
def test_the_shares_of_a_unit_add_up_to_one(runs: list[list[Visit]]) -> None:
    for unit in learned(*runs).units.values():
        assert sum(unit.next_units.values()) == pytest.approx(1.0)


def test_the_number_of_units_is_bounded() -> None:
    """A client may name every unit anew; those that recur stay."""
    graph = learned(*([llm("a"), llm(f"u{i}")] for i in range(1000)))
    assert len(graph.units) == 256
    assert {"a", "u999"} <= set(graph.units)
    assert from_json(json.dumps(graph.to_json()), "a file").units["a"].next_units[END] > 0.5


def test_the_ordinals_of_a_very_long_run_are_bounded() -> None:
    graph = learned([llm("a")] * 3000)
    assert graph.units["a"].records[-1].ordinal == KEPT


@given(RUNS, RUNS)
def test_a_copy_learns_on_its_own(first: list[list[Visit]], then: list[list[Visit]]) -> None:
    graph = learned(*first)
    copy = graph.copy()
    assert copy == graph
    for run in then:
        copy.learn(run)
    assert graph == learned(*first)
    assert copy == learned(*first, *then)


@given(RUNS)
def test_a_graph_by_other_names_has_the_same_records(runs: list[list[Visit]]) -> None:
    graph, names = learned(*runs), {name: name.upper() for name in "abc"}
    other = graph.renamed("other", names)
    assert (other.app, other.runs) == ("other", graph.runs)
    for name, unit in graph.units.items():
        shares = {names.get(after, after): share for after, share in unit.next_units.items()}
        assert other.units[names.get(name, name)].next_units == shares


def test_a_graph_that_has_forgotten_units_may_be_renamed() -> None:
    graph = learned(*([llm(f"u{i}"), llm("a")] for i in range(1000)))
    assert graph.renamed("other", {"a": "b"}).units["b"].records[-1].after == END


# ---- files


@settings(max_examples=20)
@given(RUNS)
def test_a_graph_is_the_same_after_it_was_written(runs: list[list[Visit]]) -> None:
    graph = learned(*runs)
    again = from_json(json.dumps(graph.to_json()), "a file")
    assert (again.app, again.runs, again.starts) == (graph.app, graph.runs, graph.starts)
    assert {name: unit.records for name, unit in again.units.items()} == {
        name: unit.records for name, unit in graph.units.items()
    }


def test_a_thousand_runs_are_some_hundred_kilobytes() -> None:
    """The paper says about 100 KB (section 4)."""
    rng = np.random.default_rng(0)
    runs = [[llm("a", float(rng.integers(2000))), tool("t", rng.exponential())] for _ in range(1000)]
    assert 10_000 < len(json.dumps(learned(*runs).to_json())) < 1_000_000


GOOD = learned([llm("a"), tool("t")]).to_json()


def changed(change: Callable[[Any], object]) -> str:
    values = json.loads(json.dumps(GOOD))
    change(values)
    return json.dumps(values)


def first(values: Any) -> Any:
    return values["units"]["a"][0]


def put(field: int, value: object) -> Callable[[Any], object]:
    return lambda values: first(values).__setitem__(field, value)


BAD = {
    "no JSON": "{",
    "a list": "[]",
    "nested without end": "[" * 100_000,
    "another version": changed(lambda values: values.update(version=2)),
    "no units": changed(lambda values: values.pop("units")),
    "units in a list": changed(lambda values: values.update(units=[1])),
    "endless runs": changed(lambda values: values.update(runs=math.inf)),
    "a start that is not there": changed(lambda values: values.update(starts=["b"])),
    "a unit without a name": changed(lambda values: values["units"].update({"": values["units"]["a"]})),
    "a short record": changed(lambda values: first(values).pop()),
    "a backend that is a number": changed(put(0, 3)),
    "a prompt that is text": changed(put(1, "long")),
    "a prompt that is not a number": changed(put(1, math.nan)),
    "a negative answer": changed(put(2, -1)),
    "an endless answer": changed(put(2, math.inf)),
    "a number beyond all floats": changed(put(2, 10**400)),
    "half a request": changed(put(3, 1.5)),
    "negative seconds": changed(put(4, -0.1)),
    "a huge ordinal": changed(put(5, 10**9)),
    "an ordinal that is text": changed(put(5, "0")),
    "a visit before that is short": changed(put(6, ["a", LLM, 1])),
    "a visit before without a name": changed(put(6, [None, LLM, 1, 1, 1, 0])),
    "an edge to nowhere": changed(put(7, "b")),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_damaged_file_is_refused_by_name_and_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError, match=r"here\.json holds no demand graph") as caught:
        from_json(text, "here.json")
    assert "headway apps export" in str(caught.value.hint)


def test_the_file_that_the_bad_ones_are_made_of_is_good() -> None:
    assert set(from_json(json.dumps(GOOD), "a file").units) == {"a", "t"}
