"""The rows of figure 13 of Hermes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers import hermes_caches
from benchmarks.papers.hermes_caches import POLICIES, CacheCase, Cached, cases, rows


def result(system: str, case: CacheCase, hits: int, act: float) -> Cached:
    return Cached(system, case, np.array([act]), 100, hits, 1000, 10 * hits, 50.0, 20.0)


def test_hermes_is_set_against_the_others_in_the_papers_cases_only() -> None:
    some = cases(quick=False)
    hits = {"lru": 40, "epwq": 50, "hermes": 60}
    results = [result(system, case, hits[system], 100 - hits[system]) for case in some for system in POLICIES]
    slow = next(case for case in some if "slow" in case.setting.name)
    results = [one for one in results if one.case != slow]
    results += [result(system, slow, 1, 1e6) for system in POLICIES]
    found = {(row.id, row.system, row.setting): row for row in rows(results)}
    gain = found["kv.hit.gain_pct", "hermes", "kv, at most, against lru"]
    assert gain.ours == pytest.approx(50.0)
    assert gain.paper == 111.0
    assert found["kv.hit.gain_pct.bound", "hermes", "kv, at most, against lru"].ours == pytest.approx(150.0)
    less = found["act.mean.reduction_pct", "hermes", "kv, against epwq"]
    assert less.ours == pytest.approx(20.0)
    assert less.paper == 6.0
    lora = found["lora.hit.gain_pct", "hermes", "lora, at most, against epwq"]
    assert lora.ours == pytest.approx(20.0)
    assert lora.paper == 21.1
    assert found["kv.waste_pct", "epwq", "KV 8 GiB"].ours == pytest.approx(40.0)
    assert found["kv.tokens_hit_pct", "lru", "KV 8 GiB"].ours == pytest.approx(40.0)


def test_one_kind_of_cache_alone_has_its_rows() -> None:
    some = [case for case in cases(quick=True) if case.kind == "kv"]
    found = rows([result(system, case, 40, 1.0) for case in some for system in POLICIES])
    assert {row.id.partition(".")[0] for row in found} == {"kv", "act"}


def test_every_case_runs_with_every_policy_and_the_first_one_without() -> None:
    served = list[tuple[str, str, int]]()

    def serve(system: str, case: CacheCase, seed: int) -> Cached:
        served.append((system, case.setting.name, seed))
        return result(system, case, 1, 1.0)

    some = cases(quick=True)
    results = hermes_caches.run(some, range(2), bar=False, serve=serve)
    assert len(served) == 20
    assert [one.requests for one in results] == [200] * 10
    assert {(system, name) for system, name, _ in served} >= {("no-cache", "KV 8 GiB"), ("hermes", "LoRA")}
