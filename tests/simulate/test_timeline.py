"""A story covers every moment of its request once, and names the others as they were."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.simulate.record.recorder import OUTSIDE, Recorder
from headway.simulate.record.run_folder import Header, Machine, Run
from headway.simulate.record.timeline import OUT, Reader
from headway.simulate.run import Failure, Outcome, Simulation
from tests.helpers.recorded import ALL, Spy, fleet, mixed, record


@given(st.sampled_from(sorted(ALL)), st.integers(0, 10_000), st.integers(1, 2), st.integers(128, 600))
@settings(max_examples=5)
def test_the_seconds_of_every_request_add_up(recipe: str, seed: int, count: int, blocks: int) -> None:
    run = record(recipe, seed, count, blocks, duration=4.0)
    reader = Reader(run)
    for request in range(len(run.workload)):
        story = reader.timeline(request)
        assert story.finished
        latency = float(run.outcome.end[request] - run.workload.arrival[request])
        assert math.fsum(story.seconds().values()) == pytest.approx(latency, abs=1e-9)
        before, after = story.seconds(end=story.first), story.seconds(start=story.first)
        assert sum(before.values()) + sum(after.values()) == pytest.approx(latency, abs=1e-9)
        assert story.spans[0].start == run.workload.arrival[request]
        assert story.spans[-1].end == run.outcome.end[request]
        for one, two in zip(story.spans, story.spans[1:], strict=False):
            assert one.end == two.start
            assert (one.state, one.instance) != (two.state, two.instance)
        assert all(span.seconds > 0 for span in story.spans)
        assert not set(after) & {"prefill", "waiting", OUT}
        assert 0 <= story.crowded <= story.seconds().get("running", 0.0) + 1e-9


def test_who_computed_meanwhile_is_who_the_engine_says() -> None:
    """Counted anew, one iteration at a time, from what the engine itself said."""
    spy = Spy()
    run = record("slack", 11, 2, 130, spy)
    reader, lines, checked = Reader(run), run.recording.iterations, 0
    tiers = np.array(run.workload.tiers)[run.workload.tier]
    for request in range(0, len(run.workload), 3):
        for span in reader.timeline(request).spans:
            if span.state in (OUT, "running"):
                assert span.state == OUT or not span.behind
                continue
            tokens: dict[str, int] = {}
            for number, (instance, _, ran, _, _) in enumerate(spy.said):
                start, end = lines["start"][number], lines["start"][number] + lines["seconds"][number]
                if instance != span.instance or start >= span.end or end <= span.start:
                    continue
                for other in ran.keys() - {request}:
                    count = ran[other]
                    tokens[tiers[other]] = tokens.get(tiers[other], 0) + count
            assert {share.tier: share.tokens for share in span.behind} == tokens
            checked += 1
    assert checked > 30


def test_who_was_sent_before_it() -> None:
    run = record("priority", 2, blocks=200, rate=20.0)
    reader, moves, work = Reader(run), run.recording.moves, run.workload
    place = {int(row["request"]): number for number, row in enumerate(moves)}
    overtaken = 0
    for request in range(len(work)):
        span = reader.timeline(request).spans[0]
        if span.state != OUT:
            assert moves["time"][place[request]] == work.arrival[request]
            continue
        before = moves[: place[request]]
        mine = before["request"][before["time"] >= work.arrival[request]]
        assert sum(share.requests for share in span.behind) == mine.size
        assert sum(share.tokens for share in span.behind) == (work.prompt + work.output)[mine].sum()
        overtaken += sum(share.later for share in span.behind)
    assert overtaken > 20  # batch waits behind chat that came later


def test_who_took_the_memory_gained_it() -> None:
    run = record("edf", 5, blocks=150)
    reader, found = Reader(run), 0
    for request in np.flatnonzero(run.outcome.evictions).tolist():
        lost = [span for span in reader.timeline(request).spans if span.state in ("evicted", "saved")]
        assert len(lost) == run.outcome.evictions[request]
        for span in lost:
            assert request not in {taker.request for taker in span.takers}
            found += any(taker.blocks > 0 for taker in span.takers)
    assert found > 0.9 * run.outcome.evictions.sum()


def test_a_request_that_never_ended() -> None:
    run = record("vllm", 1)
    cut = Outcome(*(column.copy() for column in (run.outcome.first, run.outcome.end)), *_rest(run.outcome))
    cut.end[:] = cut.first[:] = np.nan
    story = Reader(replace(run, outcome=cut)).timeline(3)
    assert not story.finished
    assert sum(story.seconds().values()) == pytest.approx(story.end - story.arrival)


def _rest(outcome: Outcome) -> tuple[object, ...]:
    return (outcome.instance, outcome.evictions, outcome.gap)


def test_a_request_that_came_back_and_went_elsewhere() -> None:
    """Pulled from one instance and sent to another: outside again in between."""
    run = record("vllm", 6, 2)
    request = int(np.argmax(run.outcome.end - run.outcome.first))
    other = 1 - int(run.outcome.instance[request])
    end = float(run.outcome.end[request])
    moves = np.array([(end + 1, request, OUTSIDE, 0), (end + 3, request, other, 32)], run.recording.moves.dtype)
    moves = np.concatenate([run.recording.moves, moves])
    run.outcome.end[request] = end + 4
    moves = moves[np.argsort(moves["time"], kind="stable")]
    story = Reader(Run(run.header, run.workload, run.outcome, replace(run.recording, moves=moves))).timeline(request)
    *_, back, again = story.spans
    assert (back.state, back.start, back.end) == (OUT, end + 1, end + 3)
    assert (again.state, again.instance, again.end) == ("waiting", other, end + 4)
    assert story.found == 32
    assert sum(story.seconds().values()) == pytest.approx(story.end - story.arrival)


def test_moves_back_are_recorded() -> None:
    recorder = Recorder()
    recorder.sent(4, 0, 1.0, 32)
    recorder.returned(4, 2.0)
    assert recorder.recording().moves.tolist() == [(1.0, 4, 0, 32), (2.0, 4, OUTSIDE, 0)]


def test_a_failure_sends_requests_back_and_their_seconds_still_add_up() -> None:
    nodes, workload, recorder = fleet(2), mixed(3), Recorder()
    failures = [Failure("e0", 2.0, 1.5), Failure("e1", 5.0, 1.0)]
    outcome = Simulation(ALL["edf"], nodes, workload, failures=failures).run(observer=recorder)
    header = Header("edf", tuple(map(Machine.of, nodes)), 3, "", "")
    reader, back = Reader(Run(header, workload, outcome, recorder.recording())), 0
    for request in range(len(workload)):
        story = reader.timeline(request)
        latency = float(outcome.end[request] - workload.arrival[request])
        assert math.fsum(story.seconds().values()) == pytest.approx(latency, abs=1e-9)
        states = [span.state for span in story.spans]
        back += OUT in states[1:]
    assert back >= 3  # the others were sent on at once
