"""What the default packer looks at: everything that can be on time or holds KV, and both ends of the rest."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.core.engine_spec import PromisesConfig
from headway.policy.core.ranks import BEYOND
from headway.policy.pack.promises.outlook import due_order, in_sight, is_overdue
from headway.types import Jobs

NOW = 100.0


@given(st.integers(0, 60), st.integers(1, 10), st.integers(0, 999))
def test_only_the_middle_of_what_is_overdue_is_left_out(count: int, seen: int, seed: int) -> None:
    jobs = crowd(count, seed)
    rows = jobs.rows()
    kept = in_sight(PromisesConfig(overdue_seen=seen), jobs.data, rows, NOW)
    late = [row for row in rows.tolist() if is_overdue(jobs.data, row, NOW)]
    late.sort(key=lambda row: (due_order(jobs.data, row), jobs.serial[row]))
    left_out = set(late[seen : max(len(late) - seen, seen)])
    assert sorted(kept.tolist()) == sorted(set(rows.tolist()) - left_out)


def test_what_holds_kv_is_held_or_is_ranked_from_outside_is_always_seen() -> None:
    jobs = Jobs(8)
    alike = {"arrival": 0.0, "ttft": 1.0, "tpot": math.inf, "e2e": math.inf, "prompt": 9}
    others = ({"running": True}, {"computed": 4}, {"held": True}, {"resumable": True}, {"urgency": -1.0})
    assert is_overdue(jobs.data, jobs.add("plain", **alike, serial=1), NOW)
    assert is_overdue(jobs.data, jobs.add("beyond", **alike, serial=2, urgency=BEYOND), NOW)
    assert is_overdue(jobs.data, jobs.add("on host", **alike, serial=3, computed=4, saved=4), NOW)
    for serial, more in enumerate(others, 4):
        assert not is_overdue(jobs.data, jobs.add(str(more), **alike, serial=serial, **more), NOW)


def crowd(count: int, seed: int) -> Jobs:
    """Return requests of all kinds, of which many are overdue at `NOW`."""
    rng, jobs = np.random.default_rng(seed), Jobs(8)
    for i in range(count):
        output_tokens = int(rng.integers(0, 3)) * 10
        jobs.add(
            str(i),
            arrival=float(rng.integers(0, 100)),
            ttft=float(rng.choice([1.0, 50.0, math.inf])),
            tpot=float(rng.choice([0.1, math.inf])),
            e2e=float(rng.choice([5.0, math.inf])),
            soft=float(rng.choice([0.0, 20.0])),
            first=50.0 if output_tokens else 0.0,
            prompt=20,
            output_tokens=output_tokens,
            computed=int(rng.choice([0, 0, 20])),
            tokens_left=30.0,
            running=bool(rng.integers(0, 2)),
            urgency=float(rng.choice([0.0, 0.0, BEYOND, 2.0])),
            serial=i,
        )
    return jobs
