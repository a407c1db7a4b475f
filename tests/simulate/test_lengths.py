"""Are the made lengths those of the data they stand for?"""

from __future__ import annotations

import csv
import gzip
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.simulate.workload import lengths, traces

N = 200_000
seeds = st.integers(0, 2**32 - 1)
sources = st.sampled_from(lengths.names())


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks, as Spearman's rho takes them where values are equal."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


# ---- against the data

needs_data = pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="set HEADWAY_DATA to the data")


def recorded(name: str, *columns: str) -> list[np.ndarray]:
    with gzip.open(Path(os.environ["HEADWAY_DATA"], "lengths", f"{name}.csv.gz"), "rt") as text:
        rows = list(csv.DictReader(text))
    return [np.array([int(row[column]) for row in rows]) for column in columns]


def sharegpt() -> list[np.ndarray]:
    prompt, output = recorded("sharegpt_v3", "prompt_tokens", "output_tokens")
    kept = (prompt >= 4) & (output >= 4) & (prompt <= 1024) & (prompt + output <= 2048)
    return [prompt[kept], output[kept]]


def chunks() -> np.ndarray:
    """BookCorpus in chunks of 2048 tokens: the whole ones and each book's rest."""
    (words,) = recorded("bookcorpus_books", "word_count")
    tokens = np.maximum(np.rint(words[words > 0] * 4 / 3), 1).astype(int)
    rest = tokens % 2048
    return np.concatenate([np.full((tokens // 2048).sum(), 2048), rest[rest > 0]])


DATA = {
    "sharegpt": sharegpt,
    "sharegpt-multiround": lambda: recorded("sharegpt_8k_multiround", "prompt_tokens", "output_tokens"),
    "arxiv": lambda: recorded("arxiv_summarization", "prompt_tokens", "output_tokens"),
    "alpaca": lambda: recorded("alpaca_2k", "prompt_tokens_llama2", "output_tokens_llama2"),
    "lmsys": lambda: [None, *recorded("lmsys_vicuna13b_outputs_with_predictions", "output_tokens")],
    "bookcorpus": lambda: [chunks(), None],
}
ROWS = {"sharegpt": 52_157, "sharegpt-multiround": 30_731, "arxiv": 28_257, "alpaca": 2_000, "lmsys": 85_482}


@needs_data
@pytest.mark.parametrize("name", DATA)
def test_made_lengths_have_the_statistics_of_the_data(name):
    for drawn, real in zip(lengths.draw(name, N, rng()), DATA[name](), strict=True):
        if real is None:
            continue
        assert drawn.mean() == pytest.approx(real.mean(), rel=0.015)
        assert drawn.std() == pytest.approx(real.std(), rel=0.04)
        shares = [0.5, 0.9, 0.99]
        assert np.quantile(drawn, shares) == pytest.approx(np.quantile(real, shares), rel=0.02, abs=1)
        assert drawn.min() >= real.min()
        assert drawn.max() <= real.max()


@needs_data
@pytest.mark.parametrize("name", ["sharegpt", "sharegpt-multiround", "arxiv", "alpaca"])
def test_prompt_and_answer_are_tied_as_in_the_data(name):
    assert spearman(*lengths.draw(name, N, rng())) == pytest.approx(spearman(*DATA[name]()), abs=0.01)


@needs_data
@pytest.mark.parametrize("name", ROWS)
def test_the_rows_that_are_named_are_there(name):
    assert DATA[name]()[-1].size == ROWS[name]
    assert f"{ROWS[name]:,} rows" in lengths.SOURCES[name].about


# ---- against the published tables, without the data


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("sharegpt", (110.58, 186.94), (328.26, 236.74)),
        ("sharegpt-multiround", (2340.03, 2088.85), (438.71, 265.64)),
        ("lmsys", (90.50, 148.52), (176.77, 145.92)),
        ("alpaca", (19.56, 13.96), (65.90, 66.00)),
        ("arxiv", (2588.08, 944.75), (291.43, 530.54)),
        ("bookcorpus", (2027.09, 167.57), (681.2, 250.0)),
        ("bros-best-effort", (768.0, 148.1), (80.0, 28.0)),
    ],
)
def test_mean_and_deviation_are_those_named(name, prompt, output):
    for drawn, (mean, std) in zip(lengths.draw(name, N, rng()), (prompt, output), strict=True):
        assert drawn.mean() == pytest.approx(mean, rel=0.02)
        assert drawn.std() == pytest.approx(std, rel=0.04)


def test_bros_best_effort_is_uniform():
    prompt, output = lengths.draw("bros-best-effort", N, rng())
    assert (prompt.min(), prompt.max(), output.min(), output.max()) == (512, 1024, 32, 128)
    counts = np.bincount(output)[32:]
    assert np.all(np.abs(counts - N / 97) < 6 * math.sqrt(N / 97))


# ---- properties


@given(sources, st.integers(0, 300), seeds)
@settings(max_examples=20)
def test_every_draw_is_a_pair_of_positive_columns_within_the_table(name, n, seed):
    source = lengths.SOURCES[name]
    ends = np.array([0.0, 1.0])
    for drawn, side in zip(lengths.draw(name, n, rng(seed)), (source.prompt, source.output), strict=True):
        low, high = side.at(ends)
        assert drawn.dtype == np.int64
        assert drawn.shape == (n,)
        assert np.all((drawn >= max(1, round(low))) & (drawn <= round(high)))


@given(sources, seeds)
@settings(max_examples=10)
def test_the_same_seed_gives_the_same_lengths(name, seed):
    once, again = (lengths.draw(name, 50, rng(seed)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("rho", [-0.9, -0.24, 0.0, 0.15, 0.7, 1.0])
def test_the_copula_has_the_rank_correlation_asked_and_uniform_sides(rho):
    sides = lengths.tied(rho, 50_000, rng())
    assert spearman(*sides) == pytest.approx(rho, abs=0.02)
    for side in sides:
        counts = np.histogram(side, 20, (0, 1))[0]
        assert np.all(np.abs(counts - 2500) < 6 * math.sqrt(2500))


@given(sources, st.lists(st.floats(0, 1), min_size=2, max_size=20).map(sorted))
def test_a_larger_share_is_never_a_shorter_length(name, shares):
    source = lengths.SOURCES[name]
    assert np.all(np.diff(source.prompt.at(np.array(shares))) >= 0)
    assert np.all(np.diff(source.output.at(np.array(shares))) >= 0)


@pytest.mark.parametrize("name", lengths.names())
def test_every_table_ascends_from_share_0_to_1(name):
    source = lengths.SOURCES[name]
    for side in (source.prompt, source.output):
        if isinstance(side, lengths.Quantiles):
            assert len(side.tokens) == len(side.shares)
            assert list(side.tokens) == sorted(side.tokens)
            assert list(side.shares) == sorted(set(side.shares))
            assert (side.shares[0], side.shares[-1]) == (0, 1)


@given(st.floats(4, 1024))
def test_a_share_is_the_inverse_of_its_length(tokens):
    table = lengths.SHAREGPT_PROMPTS
    assert table.at(table.share(np.array([tokens]))) == pytest.approx([tokens])


# ---- files


def test_rows_of_a_file_stay_together(tmp_path):
    file = tmp_path / "l.csv"
    file.write_text("prompt_tokens,output_tokens\n10,1\n20,2\n30,0\n0,4\n")
    prompt, output = lengths.draw(file, 1000, rng())
    # An empty answer has an end token, an empty prompt a first one.
    assert set(zip(prompt.tolist(), output.tolist(), strict=True)) == {(10, 1), (20, 2), (30, 1), (1, 4)}
    assert traces.read_lengths(file).about == "4 requests of l.csv"


def test_a_name_is_looked_up_in_the_data(tmp_path, monkeypatch):
    for folder in ("lengths", "arrivals"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lengths" / "mine.csv").write_text("prompt_tokens,output_tokens\n7,3\n")
    head = "timestamp_s,prompt_tokens,output_tokens\n"
    (tmp_path / "arrivals" / "timed.csv").write_text(head + "0,8,4\n")
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path))
    assert [column.tolist() for column in lengths.draw("mine", 2, rng())] == [[7, 7], [3, 3]]
    assert [column.tolist() for column in lengths.draw("timed", 1, rng())] == [[8], [4]]


@pytest.mark.parametrize("word", ["sharegbt", "./nowhere.csv"])
def test_an_unknown_source_names_what_there_is(word, monkeypatch):
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"Did you mean .*sharegpt, .*arxiv"):
        lengths.draw(word, 1, rng())


def test_fewer_than_no_requests_are_refused():
    with pytest.raises(ConfigError, match="0 or more"):
        lengths.draw("alpaca", -1, rng())
