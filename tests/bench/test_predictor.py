"""The predictor's benchmark: its definitions, its two ways to ask, its refusals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.real import predictor
from benchmarks.real.predictor import DataSet, Forecasts
from headway.errors import ConfigError
from headway.gateway.control.lengths.embedding import one_thread
from headway.policy.forecast.lengths.padding import QUANTILE
from headway.policy.forecast.lengths.predictor import features
from headway.whatif.output.results import Ask


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    one_thread()


class Letters:
    """An encoder for tests: which letter a prompt begins with."""

    def __call__(self, text: str) -> Any:
        return np.eye(2, dtype=np.float32)["ab".index(text[0])]

    def many(self, texts: Any) -> Any:
        return np.array([self(text) for text in texts])


def made_up(n: int = 240) -> DataSet:
    """Prompts of one shape; those that begin with an "a" have answers of about 20 tokens, others of 200."""
    rng = np.random.default_rng(0)
    texts = tuple("ab"[i] + "x" * 20 for i in rng.integers(0, 2, n))
    output_tokens = np.array(
        [rng.integers(15, 25) if text[0] == "a" else rng.integers(150, 250) for text in texts], float
    )
    looks = np.array([features(text, 8, Letters()(text)) for text in texts])
    return DataSet("made-up", texts, tuple(predictor._request(f"m{i}", 8) for i in range(n)), looks, output_tokens)


def figures(seen: Forecasts) -> dict[str, float | None]:
    return {id: value for id, value, _ in predictor.figures(seen)}


def test_the_figures_are_what_they_say() -> None:
    expected, output_tokens = np.array([100.0, 100, 100, 100]), np.array([50.0, 95, 110, 200])
    found = figures(Forecasts(expected, np.array([50.0, 100, 150, 199]), output_tokens))
    assert found["accuracy_pct"] == 75  # 110 is within 10 % padding, 200 is not
    assert found["overpredicted_tokens_pct"] == pytest.approx(100 * (60 + 15 + 0) / 455)
    assert found["within_pct"] == 50
    assert found["covered_pct"] == 75
    assert found["unused_tokens_pct"] == pytest.approx(100 * (0 + 5 + 40) / 455)
    assert found["missing_tokens_pct"] == pytest.approx(100 * 1 / 455)
    assert found["over_pct"] == pytest.approx(100 * (0 + 5 / 100 + 40 / 150 + 0) / 4)
    assert found["under_pct"] == pytest.approx(100 * (1 / 199) / 4)
    assert found["mae_tokens"] == pytest.approx((50 + 5 + 10 + 100) / 4)


def test_the_meaning_tells_apart_what_looks_alike_and_the_baselines_cannot() -> None:
    asked = made_up()
    seen = predictor.trial(asked, Letters())  # type: ignore[arg-type]
    error = {name: figures(one)["mae_tokens"] or 0 for name, one in seen.items()}
    assert error["predictor"] < 0.4 * min(error["no-embedding"], error["task-mean"], error["constant"])
    assert error["boosted"] < 0.4 * min(error["no-embedding"], error["task-mean"])
    assert len(seen["predictor"].output_tokens) == 72, "the last three tenths"
    assert (seen["constant"].expected == 256).all()
    assert np.unique(seen["task-mean"].expected).size == 1, "nothing is learned from the rest"
    assert seen["predictor"].fit_s is not None
    assert all(one.ms is not None and one.ms > 0 for name, one in seen.items() if name != "boosted")


def test_online_nothing_is_known_before_it_was_answered() -> None:
    asked = made_up()
    seen = predictor.prequential(asked)
    changed = DataSet(asked.name, asked.texts, asked.requests, asked.features, asked.output_tokens.copy())
    changed.output_tokens[150:] = 7
    again = predictor.prequential(changed)
    for name, one in seen.items():
        np.testing.assert_array_equal(one.expected[:151], again[name].expected[:151])
        np.testing.assert_array_equal(one.padded[:151], again[name].padded[:151])
        assert len(one.output_tokens) == 240
    late = slice(100, None)
    off = {name: np.abs(one.expected - one.output_tokens)[late].mean() for name, one in seen.items()}
    assert off["predictor"] < 0.4 * off["task-mean"]
    assert seen["predictor"].share is not None


def test_the_papers_figures_stand_beside_the_predictor_on_alpaca_only() -> None:
    seen = Forecasts(np.ones(2), np.ones(2), np.ones(2), None, 0.1, 5.0)
    rows = list(predictor.rows_of({"alpaca": {"predictor": seen, "constant": seen}, "all": {"predictor": seen}}))
    assert {(row.id, row.system, row.setting): row.paper for row in rows if row.paper is not None} == {
        ("accuracy_pct", "predictor", "alpaca"): 77.5,
        ("covered_pct", "predictor", "alpaca"): 77.5,
        ("over_pct", "predictor", "alpaca"): 2.62,
        ("under_pct", "predictor", "alpaca"): 9.30,
        ("ms_per_prediction", "predictor", "alpaca"): 921.0,
    }
    assert predictor.PAPER["accuracy_pct"] == QUANTILE * 100
    assert "share" not in {row.id for row in rows}, "the static split has none"


def test_data_sets_are_read_and_shuffled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path))
    (tmp_path / "prompts").mkdir()
    rows = [
        {"prompt": text, "prompt_tokens": {"smollm2": 3}, "output_tokens": {"smollm2": n}}
        for text, n in (("a one", 5), ("b two", 0), ("a three", 9))
    ]
    with gzip.open(tmp_path / "prompts" / "alpaca.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    asked = predictor.read("alpaca", None, Letters())  # type: ignore[arg-type]
    assert asked.texts == ("a one", "a three"), "an empty answer is no answer"
    assert asked.output_tokens.tolist() == [5, 9]
    both = predictor.together([asked, made_up(20)], np.random.default_rng(0))
    assert sorted(both.output_tokens) == sorted([5, 9, *made_up(20).output_tokens])
    i = both.texts.index("a three")
    assert both.output_tokens[i] == 9
    np.testing.assert_array_equal(both.features[i], asked.features[1])
    del rows[0]["output_tokens"]
    with gzip.open(tmp_path / "prompts" / "alpaca.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match="without 'output_tokens'"):
        predictor.read("alpaca", None, Letters())  # type: ignore[arg-type]


def test_a_length_is_known_as_well_as_other_answers_to_the_prompt_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers to one prompt differ by a tenth at most, those to different prompts by a factor of 50."""
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path))
    (tmp_path / "lengths").mkdir()
    rng = np.random.default_rng(0)
    usual = np.exp(rng.uniform(np.log(10), np.log(500), 1000))
    rows = np.rint(usual[:, None] * rng.uniform(0.95, 1.05, (1000, 4)))
    rows[3, 1] = 0
    lines = [",".join(predictor._COLUMNS), *(",".join(map(str, row)) for row in rows)]
    with gzip.open(tmp_path / "lengths" / predictor.FILE, "wt") as file:
        file.write("\n".join(lines))
    found = figures(one := predictor.repeated())
    assert len(one.output_tokens) == 1000 - 1 - int(999 * 0.7)
    assert 65 < (found["covered_pct"] or 0) < 90
    assert (found["over_pct"] or 100) < 10


def test_without_lengths_of_other_answers_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        predictor.read_samples(tmp_path)
    assert "vicuna7b_t0_7" in refused.value.hint


def test_without_data_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    with pytest.raises(ConfigError, match="Set HEADWAY_DATA"):
        predictor.main(Ask(True, True))


def test_the_plot_is_a_picture() -> None:
    assert predictor.plot("made-up", predictor.trial(made_up(60), Letters())).startswith(b"\x89PNG")  # type: ignore[arg-type]
