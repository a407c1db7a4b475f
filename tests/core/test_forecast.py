"""Online forecasts: output lengths per task, iteration latency as an additive law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.core.engine_spec import PromisesConfig
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.forecast.lengths.task import MOST_TASKS, GaussianLengths, TaskLengths
from headway.types import Batch, Floats, Request
from tests.helpers.held import held


def request(task: str = "chat", max_tokens: int = 1000) -> Request:
    return Request("r", "m", 10, max_tokens, 0.0, task=task)


# ---- lengths


def test_before_the_first_answer_the_prior_stands_in() -> None:
    lengths = TaskLengths(prior=256)
    assert lengths.forecast(request()).samples.tolist() == [256]
    assert lengths.forecast(request(max_tokens=16)).samples.tolist() == [16]


def test_a_task_is_forecast_from_its_own_answers_only() -> None:
    lengths = TaskLengths()
    for output_tokens in (30, 10, 20):
        lengths.learn(request("chat"), output_tokens)
    assert lengths.forecast(request("chat")).samples.tolist() == [10, 20, 30]
    assert lengths.forecast(request("code")).mean == 256


def test_only_the_last_answers_count() -> None:
    lengths = TaskLengths(window=3)
    for output_tokens in (1000, 1, 2, 3):
        lengths.learn(request(), output_tokens)
    assert lengths.forecast(request()).samples.tolist() == [1, 2, 3]


def test_an_empty_answer_is_not_learned() -> None:
    lengths = TaskLengths()
    lengths.learn(request(), 0)
    assert lengths.forecast(request()).mean == 256


@given(st.lists(st.integers(0, 2000), max_size=50), st.integers(1, 2000), st.integers(1, 20))
def test_a_forecast_is_sorted_within_limits_and_the_last_answers(answers: list[int], limit: int, window: int) -> None:
    lengths = TaskLengths(window)
    for output_tokens in answers:
        lengths.forecast(request())  # a forecast in between changes nothing
        lengths.learn(request(), output_tokens)
    seen = [output_tokens for output_tokens in answers if output_tokens][-window:] or [256]
    assert lengths.forecast(request(max_tokens=limit)).samples.tolist() == sorted(
        min(output_tokens, limit) for output_tokens in seen
    )


# ---- pace

# Seconds per iteration, decode, context token, prompt token and pair of prompt tokens.
LAW = np.array([0.004, 0.3e-3, 0.8e-6, 0.12e-3, 0.5e-7])
GPU = np.array([0.006, 1e-5, 4e-9, 1.5e-5, 1e-9])
MACHINES = pytest.mark.parametrize("law", [LAW, GPU, 10 * LAW, GPU / 20], ids=["cpu", "gpu", "slow", "fast"])


def shapes(rng: np.random.Generator, n: int) -> list[Batch]:
    """Return batches as in serving: decodes with context, a prompt chunk in every third."""
    out = []
    for _ in range(n):
        decodes = int(rng.integers(1, 33))
        prefill = int(rng.integers(16, 1024)) if rng.random() < 0.35 else 0
        before = int(rng.integers(0, 1024)) if prefill else 0
        pairs = prefill * before + prefill * prefill // 2
        out.append(Batch(decodes, decodes * int(rng.integers(50, 1500)), prefill, pairs))
    return out


def seconds(batch: Batch, law: Floats = LAW) -> float:
    shape = (1.0, batch.decodes, batch.context, batch.prefill, batch.prefill_context)
    return float(np.dot(law, shape))


def worst(latency: OnlineLatency, law: Floats = LAW, seed: int = 99) -> float:
    """Return the largest relative error over unseen batches."""
    return max(
        abs(latency.seconds(batch) / seconds(batch, law) - 1) for batch in shapes(np.random.default_rng(seed), 300)
    )


def taught(n: int, *, noise: float = 0.05, seed: int = 0, law: Floats = LAW) -> OnlineLatency:
    latency, rng = OnlineLatency(), np.random.default_rng(seed)
    for batch in shapes(rng, n):
        latency.learn(batch, seconds(batch, law) * rng.lognormal(0, noise))
    return latency


@pytest.mark.parametrize("seed", range(5))
def test_the_latency_model_learns_an_additive_law_within_5_per_cent(seed: int) -> None:
    assert worst(OnlineLatency()) > 0.5  # the prior is for another machine
    assert worst(taught(1000, seed=seed)) < 0.05


def test_the_latency_model_learns_exactly_without_noise() -> None:
    assert worst(taught(2000, noise=0.0)) < 0.001


@MACHINES
def test_the_latency_model_learns_machines_unlike_its_prior(law: Floats) -> None:
    assert worst(taught(1000, law=law), law) < 0.05


def test_a_machine_unlike_the_prior_is_roughly_known_after_tens_of_iterations() -> None:
    assert worst(taught(30, law=GPU), GPU) < 0.15


def test_one_iteration_that_hung_does_not_spoil_the_forecast() -> None:
    latency = taught(1000)
    before = worst(latency)
    latency.learn(Batch(8, 4000, 0), 30.0)
    assert worst(latency) < before + 0.1


def test_rare_hangs_move_the_forecast_no_more_than_their_share() -> None:
    latency, rng = OnlineLatency(), np.random.default_rng(1)
    for batch in shapes(rng, 2000):
        hung = rng.random() < 0.02
        latency.learn(batch, seconds(batch) * (1000 if hung else rng.lognormal(0, 0.05)))
    assert worst(latency) < 0.25  # 2 % of surprises, each counted at most threefold


def slow_of(ratios: Sequence[float]) -> float:
    """Return what iterations are held to take of their forecast after these measurements of an exact law."""
    latency = taught(500, noise=0.0)
    for batch, ratio in zip(shapes(np.random.default_rng(3), len(ratios)), ratios, strict=True):
        latency.learn(batch, latency.seconds(batch) * ratio)
    return float(latency.slow[0])


@given(noise=st.lists(st.tuples(st.floats(0.0, 1.5), st.floats(0.0, 1.0)), max_size=120), scale=st.floats(0.0, 1.0))
def test_more_noise_makes_a_margin_no_smaller_and_bounded(noise: list[tuple[float, float]], scale: float) -> None:
    loud = slow_of([1.0 + size for size, _ in noise])
    quiet = slow_of([1.0 + scale * part * size for size, part in noise])
    assert 1.0 <= quiet <= loud + 0.05 <= 2.05


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_a_hundredth_of_the_iterations_takes_longer_than_its_forecast_and_the_margin(noise: float) -> None:
    latency, rng, longer = taught(3000, noise=noise), np.random.default_rng(4), 0
    for batch in shapes(rng, 3000):
        measured = seconds(batch) * rng.lognormal(0, noise)
        longer += measured > latency.slow[0] * latency.seconds(batch)
        latency.learn(batch, measured)
    assert 0.005 < longer / 3000 < 0.015


def test_without_noise_iterations_leave_no_more_than_the_least_margin() -> None:
    assert taught(2000, noise=0.0).slow[0] < 1.0 / (1.0 - PromisesConfig().itl_margin)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_the_latency_model_recovers_when_the_machine_changes_its_speed(factor: float) -> None:
    latency, rng = taught(3000), np.random.default_rng(2)
    for batch in shapes(rng, 1500):
        latency.learn(batch, factor * seconds(batch) * rng.lognormal(0, 0.05))
    assert worst(latency, LAW * factor) < 0.15


@MACHINES
@pytest.mark.parametrize("batch", [Batch(256, 102_400, 0), Batch(1, 10, 0), Batch(16, 4800, 512, 131_072)])
def test_equal_batches_for_long_are_forecast_right_from_the_first_start(law: Floats, batch: Batch) -> None:
    """One shape does not determine five coefficients: their sum must be right, and none may diverge."""
    latency, rng = OnlineLatency(), np.random.default_rng(3)
    for _ in range(3000):
        latency.learn(batch, seconds(batch, law) * rng.lognormal(0, 0.05))
    assert abs(latency.seconds(batch) / seconds(batch, law) - 1) < 0.02


def test_hours_of_equal_batches_do_not_spoil_what_was_learned_of_others() -> None:
    """Forgetting alone would let the unexcited coefficients drift and then jump."""
    latency, rng = taught(2000), np.random.default_rng(3)
    batch, mixed = Batch(8, 8 * 400, 0), Batch(8, 3200, 512, 131_072)
    for _ in range(10_000):
        latency.learn(batch, seconds(batch) * rng.lognormal(0, 0.05))
    assert abs(latency.seconds(batch) / seconds(batch) - 1) < 0.03
    assert abs(latency.seconds(mixed) / seconds(mixed) - 1) < 0.15


BATCH = st.builds(Batch, st.integers(0, 512), st.integers(0, 10**6), st.integers(0, 8192), st.integers(0, 10**8))


@given(st.lists(st.tuples(BATCH, st.floats(0, 1e4)), max_size=40), BATCH, st.integers(1, 4096))
def test_no_measurement_makes_a_forecast_negative_or_larger_for_less_work(
    measured: list[tuple[Batch, float]], batch: Batch, tokens: int
) -> None:
    latency = OnlineLatency()
    for seen, took in measured:
        latency.learn(seen, took)
    less = Batch(batch.decodes // 2, batch.context // 2, batch.prefill // 2, batch.prefill_context // 2)
    assert 1e-4 <= latency.seconds(less) <= latency.seconds(batch) < np.inf
    alone = latency.prefill_seconds(np.array([tokens, 2.0 * tokens]))
    assert 1e-4 <= alone[0] <= alone[1]


def test_prefill_seconds_equal_those_of_a_batch_of_one_prompt() -> None:
    latency = taught(500)
    alone = latency.prefill_seconds(np.array([600.0]))[0]
    assert alone == pytest.approx(latency.seconds(Batch(0, 0, 600, 600 * 600 // 2)))


def test_a_gaussian_profile_has_the_moments_of_its_task_s_answers() -> None:
    lengths, rng = GaussianLengths(), np.random.default_rng(0)
    seen = rng.normal(200, 30, 500).round().astype(int)
    for tokens in seen.tolist():
        lengths.learn(request(task="code"), tokens)
    lengths.learn(request(task="code"), 0)
    assert lengths.profile("code") == pytest.approx((seen.mean(), seen.std()))
    drawn = [lengths.draw("code", rng) for _ in range(500)]
    assert np.mean(drawn) == pytest.approx(200, abs=6)
    assert np.std(drawn) == pytest.approx(30, abs=4)


def test_a_gaussian_forecast_is_sorted_within_bounds_and_a_guess_at_first() -> None:
    lengths = GaussianLengths(prior=50)
    first = lengths.forecast(request(task="code"))
    assert first.guess
    assert first.mean == 50
    for tokens in (10, 400) * 8:
        lengths.add("code", tokens)
    later = lengths.forecast(request(task="code", max_tokens=300))
    assert not later.guess
    assert (np.diff(later.samples) >= 0).all()
    assert (later.samples[0], later.samples[-1]) == (1.0, 300.0)


def test_with_a_generator_a_gaussian_forecast_is_one_draw() -> None:
    seeded = [GaussianLengths(draws=np.random.default_rng(seed)) for seed in (3, 3, 4)]
    for lengths in seeded:
        assert lengths.forecast(request(max_tokens=100)).samples.tolist() == [100]
        for tokens in (150, 250) * 8:
            lengths.learn(request(), tokens)
    drawn = [[lengths.forecast(request()) for _ in range(200)] for lengths in seeded]
    assert {(one.samples.size, one.guess) for some in drawn for one in some} == {(1, False)}
    values = [[one.mean for one in some] for some in drawn]
    assert values[0] == values[1] != values[2]
    assert np.mean(values[0]) == pytest.approx(200, abs=15)


@pytest.mark.parametrize("made", [TaskLengths, GaussianLengths])
def test_made_up_tasks_are_forgotten_and_those_in_use_are_not(made: type[TaskLengths] | type[GaussianLengths]) -> None:
    lengths = made()
    for i in range(5000):
        lengths.add("used", 7)
        lengths.add(f"made up {i}", 1000)
        lengths.forecast(request(f"asked {i}"))
    assert 1 < len({name for name in held(lengths) if name.startswith(("made up", "asked"))}) <= MOST_TASKS
    assert lengths.forecast(request("used")).mean == pytest.approx(7)
