"""Latency measurement: scenarios that fit the engine, laws fitted back, overheads between iterations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.forecast.latency.laws import Additive, Shapes, Stepped
from headway.policy.forecast.latency.measurement import (
    PROMPT_OUTPUT,
    Limits,
    Samples,
    Seen,
    bias,
    design,
    disturbed,
    fit_all,
    interruptions,
    overheads,
    scaled,
)
from headway.types import Floats

LAW = Stepped(0.017, 8e-4, 1.2e-6, 3e-4, 2e-7, 6e-3)
Rows = list[list[float | None]]


def rows(count: int, rng: np.random.Generator, law: Stepped | Additive = LAW, noise: float = 0.0) -> Rows:
    """Iterations of an engine that follows a law: runs of answers, now and then a prompt among them."""
    output_tokens: Rows = []
    now = 1000.0
    for _ in range(count):
        decodes, prefill = int(rng.integers(1, 17)), int(rng.integers(0, 2) * rng.integers(10, 1500))
        for _ in range(4):
            shape = (decodes, decodes * int(rng.integers(50, 900)), prefill, prefill * prefill // 2)
            seconds = float(law.seconds(Shapes(*np.array(shape, float)[:, None]))[0])
            seconds *= float(rng.lognormal(0, noise))
            output_tokens.append([now, seconds - 1e-3, seconds, *map(float, shape)])
            now, prefill = now + seconds, 0
    return output_tokens


@given(st.integers(1, 64), st.integers(64, 60_000), st.integers(64, 4096), st.booleans(), st.integers(0, 99))
def test_every_scenario_fits_the_engine(running: int, kv: int, longest: int, quick: bool, seed: int) -> None:
    limits = Limits(running, kv, longest)
    for scene in design(limits, np.random.default_rng(seed), quick=quick):
        assert len(scene.answers) <= running
        assert all(p >= 1 and p + out <= longest for p, out in scene.answers)
        assert all(1 <= p <= min(longest, kv) - PROMPT_OUTPUT for p in scene.prompts)
        held = sum(p + out for p, out in scene.answers)
        assert held <= max(kv - longest, 0), "a prompt of any length fits beside the decodes"


def test_the_grid_has_every_batch_size_and_the_seed_decides_the_order() -> None:
    limits = Limits(16, 46_000, 2048)
    one, two = (design(limits, np.random.default_rng(1)) for _ in range(2))
    assert one == two
    assert one != design(limits, np.random.default_rng(2))
    ladder = [scene for scene in one if len(scene.answers) == 16]
    assert len({output for _, output in ladder[0].answers}) == 5, "16, 8, 4, 2, 1 answers in turn"
    assert any(scene.prompts and not scene.answers for scene in one)
    assert any(scene.prompts and scene.answers for scene in one)
    quick = design(limits, np.random.default_rng(1), quick=True)
    assert sum(scene.tokens for scene in quick) < sum(scene.tokens for scene in one) / 3


def test_answers_alone_are_pooled_and_prompts_stand_for_themselves() -> None:
    same = [[float(i), 0.01, 0.02 + 0.001 * i, 4.0, 400.0 + 4 * i, 0.0, 0.0] for i in range(6)]
    prompt = [6.0, 0.05, 0.06, 4.0, 424.0, 100.0, 5000.0]
    open_end = [7.0, None, None, 4.0, 430.0, 0.0, 0.0]
    found = Samples.of([*same, prompt, [*prompt], open_end])
    assert [batch.prefill for batch in found.batches] == [0, 100, 100]
    assert found.batches[0].context == 410
    assert found.seconds[0] == pytest.approx(0.0225)
    assert Samples.of([*same], "seconds").seconds[0] == pytest.approx(0.01)


def test_the_law_of_the_engine_is_found_and_the_sum_is_right() -> None:
    output_tokens = rows(300, np.random.default_rng(0), noise=0.1)
    fits = fit_all(Samples.of(output_tokens))
    assert fits.best == "stepped"
    assert fits.errors["stepped"]["all"].mean < 0.09
    assert abs(bias(fits.laws["stepped"], output_tokens)) < 0.01
    law = fits.laws["stepped"]
    assert isinstance(law, Stepped)
    assert law.step == pytest.approx(LAW.step, rel=0.4)
    assert law.base == pytest.approx(LAW.base, rel=0.1)


def test_noisy_iterations_are_fitted_in_the_mean() -> None:
    """Answers alone scatter, prompts do not: each kind must come out right on its own."""
    rng = np.random.default_rng(0)
    output_tokens = rows(600, rng)
    for row in output_tokens:
        if not row[5]:
            row[2] = (row[2] or 0) * float(rng.lognormal(0, 0.3))
    law = fit_all(Samples.of(output_tokens)).laws["stepped"]
    assert abs(bias(law, [row for row in output_tokens if not row[5]])) < 0.015
    assert abs(bias(law, [row for row in output_tokens if row[5]])) < 0.015


def test_a_disturbed_period_is_left_out() -> None:
    output_tokens = rows(300, np.random.default_rng(0), noise=0.05)
    clean = fit_all(Samples.of(output_tokens))
    for row in output_tokens[400:500]:
        row[2] = 1.5 * (row[2] or 0)
    noisy = fit_all(Samples.of(output_tokens))
    assert clean.disturbed == 0
    assert noisy.disturbed > 20
    assert abs(bias(noisy.laws["stepped"], output_tokens[:400])) < 0.02
    length = sum(float(row[2] or 0) for row in output_tokens[400:500])
    assert disturbed(noisy.laws["stepped"], output_tokens) == pytest.approx(length, rel=0.2)
    assert disturbed(noisy.laws["stepped"], output_tokens[:400]) == 0.0


def test_single_slow_iterations_are_kept() -> None:
    rng = np.random.default_rng(0)
    output_tokens = rows(300, rng, noise=0.05)
    for i in rng.integers(0, len(output_tokens), 60):
        output_tokens[i][2] = 2 * (output_tokens[i][2] or 0)
    assert fit_all(Samples.of(output_tokens)).disturbed == 0


def test_scaled_and_bias() -> None:
    output_tokens = rows(20, np.random.default_rng(3))
    assert bias(LAW, output_tokens) == pytest.approx(0.0, abs=1e-9)
    assert bias(scaled(LAW, 1.1), output_tokens) == pytest.approx(0.1)
    total = sum(float(row[2] or 0) for row in output_tokens)
    assert bias(LAW, output_tokens, more=0.05 * total) == pytest.approx(0.05)


def busy(delays: Floats, rng: np.random.Generator) -> tuple[Rows, list[Seen]]:
    """An engine that is always busy; each request can be had `delay` after it was sent."""
    output_tokens = rows(200, rng)
    starts = np.array([row[0] for row in output_tokens], float)
    sent = rng.uniform(starts[0], starts[-40], delays.size)
    entered = starts[np.searchsorted(starts, sent + delays)]
    first = entered + 0.05
    return output_tokens, [Seen(*map(float, s)) for s in zip(sent, entered, first, first + 0.004, strict=True)]


@pytest.mark.parametrize("delay", [0.002, 0.011])
def test_overheads_of_a_busy_engine_are_found_although_it_looks_only_between_iterations(delay: float) -> None:
    output_tokens, seen = busy(np.full(80, delay), np.random.default_rng(4))
    request, token = overheads(seen, output_tokens)
    assert request == pytest.approx(delay, abs=2e-3)
    assert token == pytest.approx(0.004, abs=1e-6)


def test_overheads_of_an_idle_engine_are_what_they_seem() -> None:
    seen = [Seen(t, t + 0.006, t + 0.05, t + 0.053) for t in np.arange(10.0, 20.0)]
    output_tokens: Rows = [[s.entered, 0.04, 0.044, 0.0, 0.0, 30.0, 450.0] for s in seen]
    assert overheads(seen, output_tokens) == pytest.approx((0.006, 0.003), abs=1e-6)


def test_what_requests_take_from_iterations_is_told_from_the_iterations() -> None:
    rng = np.random.default_rng(5)
    output_tokens = rows(300, rng, noise=0.05)
    arrivals = [rng.uniform(output_tokens[0][0] or 0, output_tokens[-1][0] or 0, 150), np.array([1e9])]
    clean = [list(row) for row in output_tokens]
    starts = np.array([row[0] for row in output_tokens])
    for at in arrivals[0]:
        row = output_tokens[int(np.searchsorted(starts, at, "right")) - 1]
        row[2] = (row[2] or 0) + 0.006
    (chat, other), shorter = interruptions(output_tokens, arrivals)
    assert chat == pytest.approx(0.006, abs=0.0015)
    assert other == 0.0
    total = sum(float(row[2] or 0) for row in clean)
    assert sum(float(row[2] or 0) for row in shorter) == pytest.approx(total, rel=0.01)
