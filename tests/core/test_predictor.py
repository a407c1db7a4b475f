"""The length predictor: what it learns, its bounds, and the padding that costs least."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.forecast.lengths.padding import QUANTILE, Adaptive, Costs, Padded, PaddingTuner
from headway.policy.forecast.lengths.predictor import PLAIN, SAMPLES, Features, History, Predictor, features, fit
from headway.policy.forecast.lengths.task import TaskLengths
from headway.types import Floats, Forecast, Request
from tests.helpers.held import held

ROOM = 4096


def ask(i: int | str, task: str = "default", max_tokens: int = ROOM) -> Request:
    return Request(f"r{i}", "m", 10, max_tokens, 0.0, task=task)


def world(n: int, seed: int = 0, noise: float = 0.3) -> tuple[Features, Floats]:
    """Prompts whose meaning (4 numbers of unit length) and size decide the answer, up to noise."""
    rng = np.random.default_rng(seed)
    plain = rng.normal(3, 1, (n, PLAIN))
    meaning = rng.normal(size=(n, 4))
    meaning /= np.linalg.norm(meaning, axis=1)[:, None]
    mean = np.exp(4 + 1.5 * meaning[:, 0] + 0.3 * (plain[:, 0] - 3))
    output_tokens = np.ceil(mean * np.exp(noise * rng.normal(size=n)))
    return np.concatenate([plain, meaning], 1).astype(np.float32), output_tokens


def taught(features: Features, output_tokens: Floats, predictor: Predictor) -> Predictor:
    for i, (look, tokens) in enumerate(zip(features, output_tokens, strict=True)):
        predictor.register(f"r{i}", look)
        predictor.learn(ask(i), int(tokens))
    predictor.adopt(fit(predictor.history()))
    return predictor


def asked(predictor: Predictor, features: Features, task: str = "default") -> list[Forecast]:
    for i, look in enumerate(features):
        predictor.register(f"rt{i}", look)
    return [predictor.forecast(ask(f"t{i}", task)) for i in range(len(features))]


# ---- features


def test_features_are_sizes_and_marks_then_the_embedding() -> None:
    look = np.expm1(features("Why? def f(): return 12\nNow.", 7, np.ones(3, np.float32)))
    np.testing.assert_allclose(look[:PLAIN], [7, 28, 1, 1, 2, 2, 6, 1], rtol=1e-5)
    assert look.shape == (PLAIN + 3,)


@given(st.text(max_size=300), st.integers(0, 10**6))
def test_features_of_any_text_are_finite(text: str, tokens: int) -> None:
    look = features(text, tokens)
    assert look.shape == (PLAIN,)
    assert np.isfinite(look).all()


# ---- the model


def test_its_error_is_half_of_the_task_mean_s_where_prompts_decide_the_length() -> None:
    looks, output_tokens = world(700)
    predictor = taught(looks[:500], output_tokens[:500], Predictor())
    expected = np.array([forecast.mean for forecast in asked(predictor, looks[500:])])
    ours, task = (
        np.abs(expected - output_tokens[500:]).mean(),
        np.abs(output_tokens[:500].mean() - output_tokens[500:]).mean(),
    )
    assert ours < task / 2


@pytest.mark.parametrize("quantile", [0.25, 0.5, QUANTILE, 0.9])
def test_its_quantiles_hold_on_prompts_that_it_has_not_seen(quantile: float) -> None:
    features, output_tokens = world(1000, seed=1)
    model = fit(History(features[:500], ("a",) * 500, output_tokens[:500]))
    length = np.quantile(model.samples(features[500:], ("a",) * 500), quantile, axis=1)
    assert np.mean(output_tokens[500:] <= length) == pytest.approx(quantile, abs=0.06)


def test_uninformative_features_are_ignored() -> None:
    """Lengths independent of prompts: the error stays near that of the mean, which nothing can beat."""
    rng = np.random.default_rng(2)
    features, _ = world(600)
    output_tokens = np.ceil(rng.lognormal(4, 0.5, 600))
    model = fit(History(features[:400], ("a",) * 400, output_tokens[:400]))
    expected = model.samples(features[400:], ("a",) * 200).mean(1)
    error = np.square(expected - output_tokens[400:]).mean()
    assert error < 1.15 * np.square(output_tokens[:400].mean() - output_tokens[400:]).mean()


def test_the_task_is_told_apart_when_the_prompts_look_alike() -> None:
    features = np.tile(world(1)[0], (200, 1))
    output_tokens = np.where(np.arange(200) % 2, 300.0, 10.0)
    model = fit(History(features, tuple(("long" if m > 100 else "short") for m in output_tokens), output_tokens))
    long, short, other = model.samples(features[:3], ("long", "short", "unknown")).mean(1)
    assert long > 200
    assert short < 50
    assert short < other < long


@given(st.integers(2, 60), st.integers(0, 10**6), st.booleans(), st.booleans())
@settings(max_examples=13)
def test_forecasts_are_sorted_finite_and_at_least_one_token(n: int, seed: int, alike: bool, same: bool) -> None:
    """Also when all prompts are the same, or all lengths."""
    rng = np.random.default_rng(seed)
    features = rng.normal(0, 3, (n, PLAIN + 2)).astype(np.float32)
    features = np.tile(features[:1], (n, 1)) if alike else features
    output_tokens = np.full(n, 7.0) if same else np.ceil(rng.lognormal(3, 2, n))
    model = fit(History(features, tuple("ab"[i % 2] for i in range(n)), output_tokens))
    samples = model.samples(rng.normal(0, 9, (5, PLAIN + 2)).astype(np.float32), ("a", "b", "c", "a", "b"))
    assert samples.shape == (5, SAMPLES)
    assert np.isfinite(samples).all()
    assert (samples >= 1).all()
    assert (np.diff(samples, axis=1) >= 0).all()
    if same:
        np.testing.assert_allclose(samples, 7.0, rtol=1e-6)


def test_fitting_is_deterministic_and_leaves_the_history_as_it_was() -> None:
    features, output_tokens = world(80)
    before = features.copy()
    both = [fit(History(features, ("a",) * 80, output_tokens)).samples(features[:9], ("a",) * 9) for _ in range(2)]
    np.testing.assert_array_equal(*both)
    np.testing.assert_array_equal(features, before)


# ---- the predictor


def test_before_the_first_fit_it_uses_the_task_s_lengths() -> None:
    predictor, tasks = Predictor(least=10), TaskLengths()
    features, output_tokens = world(10)
    for i in range(10):
        predictor.register(f"r{i}", features[i])
        assert not predictor.reads(f"r{i}")
        np.testing.assert_array_equal(predictor.forecast(ask(i)).samples, tasks.forecast(ask(i)).samples)
        assert not predictor.due
        for one in (predictor, tasks):
            one.learn(ask(i), int(output_tokens[i]))
    assert predictor.due
    predictor.adopt(fit(predictor.history()))
    assert not predictor.due
    predictor.register("rx", features[0])
    assert predictor.reads("rx")
    assert not predictor.reads("ry")  # was not told
    np.testing.assert_array_equal(predictor.forecast(ask("y")).samples, tasks.forecast(ask("y")).samples)


def test_a_request_keeps_its_first_forecast_through_a_new_model() -> None:
    features, output_tokens = world(120)
    predictor = taught(features[:60], output_tokens[:60], Predictor())
    (first,) = asked(predictor, features[:1])
    predictor.adopt(fit(History(features[60:], ("default",) * 60, output_tokens[60:])))
    assert predictor.forecast(ask("t0")) is first
    predictor.forget("rt0")
    assert asked(predictor, features[:1])[0].mean != first.mean


def test_no_forecast_exceeds_max_tokens() -> None:
    looks, output_tokens = world(100)
    predictor = taught(looks, output_tokens, Predictor())
    predictor.register("rx", looks[0])
    forecast = predictor.forecast(ask("x", max_tokens=5))
    assert forecast.samples.max() <= 5
    assert forecast.samples.min() >= 1


def test_its_memory_is_bounded() -> None:
    predictor = Predictor(window=32, opened=8)
    features, _ = world(100)
    for i in range(100):
        predictor.register(f"r{i}", features[i])
        if i % 2:
            predictor.learn(ask(i), i)
    assert len(predictor.history()) == 32
    assert predictor.history().output_tokens[-1] == 99
    assert len([name for name in held(predictor) if re.fullmatch(r"r\d+", name)]) <= 8


def test_empty_answers_are_not_learned_and_end_the_request() -> None:
    predictor = taught(*world(64), Predictor())
    predictor.register("rx", world(1)[0][0])
    predictor.learn(ask("x"), 0)
    assert not predictor.reads("rx")
    assert len(predictor.history()) == 64


def test_fits_become_rarer_as_the_history_grows() -> None:
    predictor, (features, output_tokens), at = Predictor(window=600), world(600), []
    model = fit(History(features[:8], ("a",) * 8, output_tokens[:8]))
    for i in range(600):
        predictor.register(f"r{i}", features[i])
        predictor.learn(ask(i), int(output_tokens[i]))
        if predictor.due:
            at.append(i + 1)
            predictor.history()
            predictor.adopt(model)
    assert at[:3] == [64, 96, 128]
    gaps = np.diff(at)
    assert (np.diff(gaps) >= 0).all()
    assert gaps[-1] > 60


# ---- padding


@given(st.sampled_from([0.6, 0.7, 0.8, 0.9]), st.integers(0, 10**6))
@settings(max_examples=5)
def test_the_quantile_found_is_the_newsvendors_critical_ratio(ratio: float, seed: int) -> None:
    """Forecasts are true, costs linear: the cheapest quantile is under / (under + over)."""
    rng = np.random.default_rng(seed)
    tuner = PaddingTuner(Costs(over=1 - ratio, under=ratio), window=2000, margin=0.0)
    for scale in rng.uniform(50, 400, 2000):
        forecast = Forecast(np.sort(rng.gamma(2.0, scale, 64)))
        tuner.learn(forecast, int(np.ceil(rng.choice(forecast.samples))))
    assert tuner.quantile == pytest.approx(ratio, abs=0.08)


@pytest.mark.parametrize(("factor", "above"), [(1.5, True), (0.6, False)])
def test_padding_compensates_for_biased_forecasts(factor: float, above: bool) -> None:
    """Answers `factor` times as long as forecast: more padding when that is more, less when it is less."""
    rng = np.random.default_rng(3)
    tuner = PaddingTuner()
    for _ in range(600):
        forecast = Forecast(np.sort(rng.gamma(4.0, 40, 64)))
        tuner.learn(forecast, int(np.ceil(factor * rng.choice(forecast.samples))))
    assert (tuner.quantile > QUANTILE) == above
    assert tuner.quantile != QUANTILE


def test_noise_does_not_move_the_quantile() -> None:
    tuner, rng = PaddingTuner(), np.random.default_rng(4)
    moves, last = 0, tuner.quantile
    for _ in range(3000):
        forecast = Forecast(np.sort(rng.gamma(2.0, 100, 64)))
        tuner.learn(forecast, int(np.ceil(rng.choice(forecast.samples))))
        moves, last = moves + (tuner.quantile != last), tuner.quantile
    assert moves <= 6
    assert tuner.quantile == pytest.approx(QUANTILE, abs=0.08)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=60))
def test_the_sums_are_those_of_the_last_answers(answers: list[tuple[int, int]]) -> None:
    tuner = PaddingTuner(Costs(regroup=9.0), quantiles=(0.1, 0.5, 0.9), window=16)
    for length, output_tokens in answers:
        tuner.learn(Forecast(np.array([length / 2, length])), output_tokens)
    lengths = [np.ceil(np.quantile([n / 2, n], tuner._quantiles)) for n, _ in answers]
    costs = [tuner.costs.of(one, output_tokens) for one, (_, output_tokens) in zip(lengths, answers, strict=True)]
    np.testing.assert_allclose(tuner._sum, np.sum(costs[-16:], 0), atol=1e-6)


def test_costs_of_too_short_and_too_long() -> None:
    costs = Costs(over=1.0, under=3.0, regroup=10.0)
    np.testing.assert_array_equal(costs.of(np.array([8.0, 10.0, 13.0]), 10), [16.0, 0.0, 3.0])


def test_adaptive_pads_to_the_spots_share_and_teaches_it_what_was_forecast_before() -> None:
    tasks, tuner = TaskLengths(), PaddingTuner(least=1, quantiles=(0.5, 0.9), start=0.5, margin=0.0)
    lengths = Adaptive(tasks, tuner)
    for output_tokens in (10, 20, 30, 40):
        tasks.learn(ask(0), output_tokens)
    assert lengths.forecast(ask(1)).samples == Padded(tasks, 0.5).forecast(ask(1)).samples == [25]
    lengths.learn(ask(1), 500)
    assert tuner.quantile == 0.9
    assert tuner._sum[1] == pytest.approx(Costs().under * (500 - 37))  # of the four answers, not of five
    lengths.learn(ask(2), 0)
    assert tuner._count == 1
