"""Does an engine with two-ended blocks finish every request, with its tokens, whatever its memory is?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines.simulated.two_ended import HostPoolEngine, TwoEndedEngine
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.bros.packer import BatchSize, Bros
from headway.types import Slo

CHAT = Slo(ttft=0.4, tpot=0.2)
_NONE = Slo()


def build(
    blocks: int, host: int, *, two_ended: bool = True, places: int = 8, decode_only: bool = False
) -> HostPoolEngine:
    spec = EngineSpec(places, 64, 4, 64, 1e-4, host, two_ended=two_ended)
    packer = Bros(spec, batch_size=BatchSize(base=4))
    if not two_ended:
        return HostPoolEngine(
            packer, blocks=blocks, size=4, slots=32, budget=64, max_model_len=64, host=host, copy_seconds=1e-4
        )
    return TwoEndedEngine(
        packer,
        blocks=blocks,
        size=4,
        slots=32,
        budget=64,
        max_model_len=64,
        host=host,
        copy_seconds=1e-4,
        decode_only=decode_only,
    )


def drive(engine: HostPoolEngine, asks: list[tuple[int, int, bool, int]]) -> dict[str, int]:
    """Run until all have ended; each ask comes `after` so many iterations. Returns the tokens each made."""
    output_tokens: dict[str, int] = {}
    now, iteration = 0.0, 0
    waiting = sorted(enumerate(asks), key=lambda item: item[1][3])
    while waiting or engine.busy:
        while waiting and (waiting[0][1][3] <= iteration or not engine.busy):
            i, (prompt, output, promised, _) = waiting.pop(0)
            engine.add(f"r{i}", prompt, output, arrival=now, slo=CHAT if promised else _NONE)
        before = {row: int(engine.jobs.output_tokens[row]) for row in engine.jobs.rows().tolist()}
        ran = engine.schedule(now)
        assert ran.rows.size, "nothing runs and nothing will"
        assert np.unique(ran.rows).size == ran.rows.size
        assert (ran.tokens > 0).all()
        names = {row: engine.jobs.keys[row] for row in ran.rows.tolist()}
        if isinstance(engine, TwoEndedEngine):
            engine.check_integrity()
            assert (engine.kv.num_tokens[ran.rows] == engine.jobs.computed[ran.rows] + ran.tokens).all()
            assert (engine.kv.host_tokens[ran.rows] == 0).all(), "who runs is here"
        done = engine.complete(ran, now + 0.05)
        for row, name in names.items():
            output_tokens[str(name)] = before[row] + 1 if name in done.ids else output_tokens.get(str(name), 0)
        now, iteration = now + engine.seconds(ran, 0.05), iteration + 1
        assert iteration < 5000
    return output_tokens


@pytest.mark.parametrize(("two_ended", "decode_only"), [(True, False), (True, True), (False, False)])
@given(
    asks=st.lists(
        st.tuples(st.integers(1, 24), st.integers(1, 20), st.booleans(), st.integers(0, 30)), min_size=1, max_size=14
    ),
    blocks=st.integers(14, 40),
    host=st.sampled_from([0, 5, 40, 1000]),
)
@settings(max_examples=20)
def test_every_request_ends_with_its_tokens(
    two_ended: bool, decode_only: bool, asks: list[tuple[int, int, bool, int]], blocks: int, host: int
) -> None:
    engine = build(blocks, host, two_ended=two_ended, decode_only=decode_only)
    output_tokens = drive(engine, asks)
    assert output_tokens == {f"r{i}": output for i, (_, output, _, _) in enumerate(asks)}
    assert engine.free == blocks, "everything is free at the end"
    if isinstance(engine, TwoEndedEngine):
        engine.check_integrity()
        assert not engine.kv.host_tokens.any()


def test_a_real_time_request_that_fits_into_free_slots_costs_no_copy() -> None:
    """The same load on plain blocks copies whole requests."""
    copied = {}
    for two_ended in (True, False):
        engine = build(20, 1000, two_ended=two_ended)
        for i in range(3):
            engine.add(f"b{i}", 21, 3, arrival=0.0, slo=_NONE)
        engine.complete(engine.schedule(0.0), 0.05)
        engine.add("rt", 10, 3, arrival=0.1, slo=CHAT)
        copied[two_ended] = 0
        now = 0.1
        while engine.busy:
            ran = engine.schedule(now)
            copied[two_ended] += ran.copied
            now += 0.05
            engine.complete(ran, now)
    assert copied[True] == 0 < copied[False]


def test_copies_overlap_the_computation_or_come_before_it() -> None:
    engine = build(20, 100)
    engine.add("r0", 4, 1, arrival=0.0)
    ran = engine.schedule(0.0)
    for copied, beside, before in ((0, 0.05, 0.05), (100, 0.05, 0.06), (1000, 0.1, 0.15)):
        object.__setattr__(ran, "copied", copied)
        engine.overlap = True
        assert engine.seconds(ran, 0.05) == pytest.approx(beside)
        engine.overlap = False
        assert engine.seconds(ran, 0.05) == pytest.approx(before)
