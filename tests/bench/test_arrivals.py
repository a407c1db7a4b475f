"""Do requests come as often as asked, and are bad traces refused?"""

from __future__ import annotations

import gzip
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.prefix import Prefix
from headway.simulate.workload import arrivals, traces, traffic

seeds = st.integers(0, 2**32 - 1)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---- drawn


@given(st.floats(0.1, 50), st.floats(0.2, 5), st.floats(1, 200), seeds)
@settings(max_examples=66)
def test_arrivals_are_sorted_inside_and_as_many_as_asked(rate, burstiness, duration, seed):
    times = traffic.gamma(rate, burstiness, duration, rng(seed))
    assert times.dtype == np.float64
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < duration))
    # Renewal theory: variance of the count ~ n * cv^2; six deviations, and the start's transient.
    expected, cv2 = rate * duration, 1 / burstiness
    assert abs(times.size - expected) <= 6 * math.sqrt(expected * cv2) + 6 * (1 + cv2)


@given(seeds)
@settings(max_examples=10)
def test_the_same_seed_gives_the_same_arrivals(seed):
    drawn = traffic.poisson(5, 20, rng(seed))
    assert np.array_equal(drawn, traffic.poisson(5, 20, rng(seed)))
    assert np.array_equal(drawn, traffic.gamma(5, 1.0, 20, rng(seed)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_vllms(burstiness):
    gaps = np.diff(traffic.gamma(20, burstiness, 2000, rng()))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_endless_burstiness_is_a_metronome():
    assert traffic.gamma(2, math.inf, 2.4, rng()) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@given(st.floats(0.1, 20), st.floats(0.05, 5), st.floats(1, 100), seeds)
def test_bursts_keep_the_mean_rate(rate, burstiness, duration, seed):
    times = arrivals.bursty(rate, burstiness, duration, rng(seed))
    assert times.size == max(round(rate * duration), 1)
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times <= duration))
    assert np.array_equal(times, arrivals.bursty(rate, burstiness, duration, rng(seed)))


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 4.0])
def test_bursts_are_as_uneven_as_asked(burstiness):
    gaps = np.diff(arrivals.bursty(20, burstiness, 2000, rng()))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_phases_have_rates_of_their_own():
    times = arrivals.phases([50, 2, 10], 100.0, rng())
    assert np.all(np.diff(times) >= 0)
    assert np.histogram(times, [0, 100, 200, 300])[0] == pytest.approx([5000, 200, 1000], rel=0.15)
    assert arrivals.phases([], 1.0, rng()).size == 0


@pytest.mark.parametrize(
    "bad", [(0, 1, 1), (-1, 1, 1), (math.nan, 1, 1), (math.inf, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, math.inf)]
)
def test_impossible_arrivals_are_refused(bad):
    with pytest.raises(ConfigError, match="above 0"):
        traffic.gamma(*bad, rng())
    with pytest.raises(ConfigError, match="above 0"):
        arrivals.bursty(*bad, rng())


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50).map(sorted), st.floats(0.01, 1000))
def test_rescaling_keeps_the_shape(times, rate):
    times = np.array(times)
    if times[-1] - times[0] < 1e-6:
        return
    scaled = traffic.rescale(times, rate)
    assert scaled[0] == 0
    assert (times.size - 1) / scaled[-1] == pytest.approx(rate)
    assert scaled / scaled[-1] == pytest.approx((times - times[0]) / (times[-1] - times[0]), abs=1e-9)


@pytest.mark.parametrize("times", [[], [3.0], [3.0, 3.0]])
def test_one_instant_has_no_rate(times):
    with pytest.raises(ConfigError, match="no rate"):
        traffic.rescale(np.array(times), 1.0)


def test_spreading_fills_the_steps():
    times = np.repeat([0.0, 3.0, 6.0], 10)
    spread = traffic.spread(times, rng())
    assert np.all(np.diff(spread) > 0)
    assert np.array_equal(spread // 3 * 3, times)
    assert np.array_equal(traffic.spread(times[:10], rng()), times[:10])


# ---- recorded

CSV = "timestamp_s,prompt_tokens,output_tokens\n10.5,7,3\n10.5,8,4\n12,9,5\n"
JSONL = (
    '{"timestamp_ms": 3000, "input_length": 7, "output_length": 3, "hash_ids": [1]}\n\n'
    '{"timestamp_ms": 4500, "input_length": 8, "output_length": 4}\n'
)


def write(folder, name: str, text: str):
    file = folder / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_an_azure_trace(tmp_path, name):
    trace = traces.read(write(tmp_path, name, CSV))
    assert list(trace.at) == [0.0, 0.0, 1.5]
    assert list(trace.prompt_tokens) == [7, 8, 9]
    assert list(trace.output_tokens) == [3, 4, 5]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_mooncake_trace(tmp_path, name):
    trace = traces.read(write(tmp_path, name, JSONL))
    assert list(trace.at) == [0.0, 1.5]
    assert list(trace.prompt_tokens) == [7, 8]
    assert trace.prefixes == (Prefix("block 0", 7), None)


def test_the_limit_cuts(tmp_path):
    file = write(tmp_path, "t.csv", CSV + "nonsense")
    assert list(traces.arrivals(file, limit=2)) == [0.0, 0.0]
    with pytest.raises(ConfigError, match="limit of 1 or more"):
        traces.arrivals(file, limit=0)


def hashed(tokens: int, hashes: str) -> str:
    return f'{{"timestamp": 0, "input_length": {tokens}, "output_length": 1, "hash_ids": {hashes}}}\n'


HEAD = "timestamp_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "time,prompt_tokens,output_tokens\n1,2,3\n", "line 2 has no timestamp_s .* Name that column"),
        ("t.csv", HEAD + "1,2,3\n2,3\n", "line 3 has no output_tokens"),
        ("t.csv", HEAD + "1,-2,3\n", "line 2 has prompt_tokens = '-2'. Give a number"),
        ("t.csv", HEAD + "nan,2,3\n", "line 2 has timestamp_s = 'nan'"),
        ("t.csv", HEAD + "1,2,3\n1,2,x\n", "line 3 has output_tokens = 'x'"),
        ("t.csv", HEAD + "5,2,3\n4,2,3\n", r"line 3 is earlier \(4\) .* Sort the file by timestamp_s"),
        ("t.csv", "arrival,input,output\n5,2,3\n4,2,3\n", "Sort the file by arrival"),
        ("t.csv", "arrival,input,output\n5,2.5,3\n", "line 2 has input = '2.5', which is not a number"),
        ("t.jsonl", '{"timestamp": "x", "input_length": 1, "output_length": 1}\n', "line 1 has timestamp = 'x'"),
        ("t.jsonl", '{"timestamp": 1}\n', r"no input_length \(it has timestamp\)"),
        ("t.csv", HEAD, "has no rows"),
        ("t.csv", "", "has no rows"),
        ("t.jsonl", "\n", "has no rows"),
        ("t.jsonl", '{"timestamp_ms": 1}\n', "line 1 has no input_length"),
        ("t.jsonl", JSONL + "{", "line 4 is not a JSON object"),
        ("t.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("t.jsonl", '{"timestamp_ms": NaN, "input_length": 1, "output_length": 1}\n', "line 1 has timestamp_ms"),
        ("t.jsonl", '{"timestamp_ms": [], "input_length": 1, "output_length": 1}\n', "line 1 has timestamp_ms"),
        ("t.txt", CSV, "not a trace by its name"),
        (
            "t.jsonl",
            hashed(1024, "[1]"),
            "line 1 has 1 hash_ids for a prompt of 1,024 tokens. Give 2, one per 512 tokens",
        ),
        ("t.jsonl", hashed(1024, "[1, 2, 3]"), "line 1 has 3 hash_ids"),
        ("t.jsonl", hashed(1024, "[1, 2.5]"), "line 1 has hash_ids that are not a list of integers"),
        ("t.jsonl", hashed(512, '"1"'), "line 1 has hash_ids that are not a list of integers"),
        ("t.jsonl", hashed(1024, "[1, 2]") + hashed(1024, "[3, 2]"), "stand for a block and all blocks before it"),
    ],
)
def test_a_bad_trace_says_where_and_what_to_do(tmp_path, name, text, said):
    with pytest.raises(ConfigError, match=said):
        traces.read(write(tmp_path, name, text))


def test_a_damaged_file_is_said(tmp_path):
    file = tmp_path / "t.csv.gz"
    for content in (b"no gzip", gzip.compress(CSV.encode())[:-8]):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            traces.read(file)
    (tmp_path / "u.csv").write_bytes(HEAD.encode() + b"\xff\xfe,1,2\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        traces.read(tmp_path / "u.csv")


def test_a_name_is_looked_up_in_the_data(tmp_path, monkeypatch):
    (tmp_path / "arrivals").mkdir()
    write(tmp_path / "arrivals", "mine.csv.gz", CSV)
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path))
    assert traces.arrivals("mine").size == 3
    with pytest.raises(ConfigError, match="no trace other"):
        traces.arrivals("other")
    monkeypatch.delenv("HEADWAY_DATA")
    with pytest.raises(ConfigError, match="set HEADWAY_DATA"):
        traces.arrivals("mine")
