"""Packers by rank sort only as many waiting rows as may come in: their steps are those of the whole order."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.core.sorting import leading, ordered
from headway.policy.pack.ranked import Rank, Ranked, by_due, by_priority
from headway.types import Floats, Ints
from tests.core.tables import Moment, moments

# The same ranks as ones that only Python knows, which are sorted as a whole.
WHOLE: dict[Rank, Rank] = {rank: partial(rank) for rank in (by_due, by_priority)}


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans())), st.integers(0, 9))
def test_the_leading_ones_are_in_order(drawn: list[tuple[int, bool]], most: int) -> None:
    keys: Floats = np.array([[key for key, _ in drawn]], float).reshape(1, -1)
    stays = np.array([stay for _, stay in drawn], bool)
    serial: Ints = np.arange(len(drawn))[::-1].copy()
    whole = ordered(keys, serial)
    kept, others = set(np.flatnonzero(stays)), [place for place in whole if not stays[place]]
    wanted = kept.union(others[:most])
    assert leading(keys, serial, stays, most).tolist() == [place for place in whole if place in wanted]


@pytest.mark.parametrize("rank", WHOLE)
@given(moment=moments())
def test_steps_are_those_of_the_whole_order(rank: Rank, moment: Moment) -> None:
    most, budget = moment.max_running, moment.budget
    quick = Ranked(rank, most, budget).pack(moment.jobs, moment.kv_budget, 0.0)
    whole = Ranked(WHOLE[rank], most, budget).pack(moment.jobs, moment.kv_budget, 0.0)
    assert quick.order.tolist() == whole.order.tolist()
    assert quick.evict.tolist() == whole.evict.tolist()
    assert quick.tokens is not None
    assert whole.tokens is not None
    assert quick.tokens.tolist() == whole.tokens.tolist()
