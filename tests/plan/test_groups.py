"""Request groups: every queued request is in one, and a group that drains leaves nothing behind."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.plan.groups import RequestGroups, centres_of
from headway.types import OBJECTIVES, Backlog


def add(
    backlog: Backlog,
    serial: int,
    *,
    slo: float = 30.0,
    arrival: float = 0.0,
    prompt: int = 50,
    output: float = 100.0,
    model: int = 0,
) -> int:
    objective = "best_effort" if math.isinf(slo) else "deadline"
    return backlog.add(
        f"r{serial}",
        arrival=arrival,
        due=arrival + slo,
        prompt=prompt,
        tokens=prompt + output,
        longest=prompt + 500,
        model=model,
        objective=OBJECTIVES.index(objective),
        serial=serial,
    )


def members(groups: RequestGroups) -> list[int]:
    return [serial for group in groups for _, serial in group.entries]


def test_requests_alike_share_a_group_and_others_do_not() -> None:
    backlog, groups = Backlog(), RequestGroups()
    first, _ = groups.add(backlog, add(backlog, 0), 0, 16)
    assert groups.add(backlog, add(backlog, 1, arrival=1.0), 0, 16)[0] is first
    assert groups.add(backlog, add(backlog, 2, model=1), 0, 16)[0] is not first
    assert groups.add(backlog, add(backlog, 3, slo=math.inf), 0, 16)[0] is not first
    assert groups.add(backlog, add(backlog, 4), 1, 16)[0] is not first, "it fits fewer instances"
    late, _ = groups.add(backlog, add(backlog, 5, arrival=20.0), 0, 16)
    assert late is not first, "its deadline is far from theirs"
    assert (first.size, first.first, first.last) == (2, 30.0, 31.0)


def test_a_group_that_outgrows_delta_batches_is_split_in_halves() -> None:
    backlog, groups = Backlog(), RequestGroups(delta=2.0)
    halves = [groups.add(backlog, add(backlog, i, arrival=i / 100), 0, 4.0)[1] for i in range(9)]
    assert [half is not None for half in halves] == [False] * 8 + [True]
    old, new = list(groups)
    assert [serial for _, serial in old.entries] == [0, 1, 2, 3, 4]
    assert [serial for _, serial in new.entries] == [5, 6, 7, 8]
    assert old.last < new.first
    assert groups.add(backlog, add(backlog, 9, arrival=0.1), 0, 4.0)[0] is new


def test_requests_that_come_back_form_a_group_of_their_own() -> None:
    backlog, groups = Backlog(), RequestGroups()
    row = add(backlog, 0)
    group, _ = groups.add(backlog, row, 0, 16)
    group.entries.popleft()
    groups.left(0)
    assert list(groups) == []
    newer, _ = groups.add(backlog, add(backlog, 1), 0, 16)
    back = groups.put_back(backlog, row, group.kind)
    assert back is not newer
    assert groups.put_back(backlog, add(backlog, 2), group.kind) is back


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 2)), max_size=120), st.data())
def test_every_queued_request_is_in_one_group(steps: list[tuple[int, bool, int]], data: st.DataObject) -> None:
    backlog, groups = Backlog(), RequestGroups(delta=1.5)
    queued: list[int] = []
    for serial, (slo, ends, model) in enumerate(steps):
        row = add(backlog, serial, slo=(5.0, 20.0, 30.0, 60.0, 300.0, math.inf)[slo], arrival=serial / 3, model=model)
        groups.add(backlog, row, 0, 4.0)
        queued.append(serial)
        if ends:
            gone = queued.pop(data.draw(st.integers(0, len(queued) - 1)))
            group = groups.of(gone)
            assert group is not None
            groups.left(gone)
            backlog.remove(f"r{gone}")
            group.head(backlog)
    live = {
        serial
        for group in groups
        for row, serial in group.entries
        if backlog.live[row] and backlog.serial[row] == serial
    }
    assert live == set(queued)
    assert sum(group.size for group in groups) == len(queued)
    for group in groups:
        assert 0 < group.size <= 1.5 * 4.0
        assert all(groups.of(serial) is group for serial in live & {one for _, one in group.entries})
    for serial in queued:
        groups.left(serial)
    assert list(groups) == []
    assert all(groups.of(serial) is None for serial in queued)


def test_kinds_are_found_from_what_has_come() -> None:
    rng, backlog, groups = np.random.default_rng(0), Backlog(), RequestGroups()
    for serial in range(200):
        short = serial % 2
        output = 20.0 if short else 800.0
        groups.add(backlog, add(backlog, serial, output=output * rng.uniform(0.8, 1.2)), 0, 1e6)
    [sort] = groups.stale()
    centres = centres_of(groups.points(sort))
    assert sorted(np.exp(centres[:, 2]).tolist()) == pytest.approx([20.0, 800.0], rel=0.1)
    groups.refit(sort, centres)
    assert groups.stale() == []
    one = groups.kind_of(backlog, add(backlog, 1000, output=22.0), 0)
    other = groups.kind_of(backlog, add(backlog, 1001, output=700.0), 0)
    assert one is not other
    one.answered(10.0)
    assert one.tokens.mean < 20.0
    assert other.tokens.mean > 600.0


def test_equal_requests_are_one_kind() -> None:
    assert len(centres_of(np.ones((50, 3)))) == 1
    assert len(centres_of(np.ones((1, 3)))) == 1
