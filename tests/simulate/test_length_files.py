"""Are files of lengths read as they are, and refused with their line and the mend?"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.simulate.workload import traces

HEAD = "prompt_tokens,output_tokens\n"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


def talk(*texts: str) -> dict:
    sides = ("human", "gpt") * len(texts)
    turns = [{"from": side, "value": text} for side, text in zip(sides, texts, strict=False)]
    return {"conversations": turns}


# ---- CSV and JSONL


@pytest.mark.parametrize("name", ["l.csv", "l.csv.gz"])
def test_lengths_without_times(tmp_path, name):
    read = traces.read_lengths(write(tmp_path, name, HEAD + "7,3\n8,0\n"))
    assert read.prompt_tokens.tolist() == [7, 8]
    assert read.output_tokens.tolist() == [3, 0]
    assert read.about == f"2 requests of {name}"


def test_lengths_of_a_trace_need_no_order(tmp_path):
    text = "timestamp_s,prompt_tokens,output_tokens\n5,1,2\n4,3,4\n"
    assert traces.read_lengths(write(tmp_path, "t.csv", text)).prompt_tokens.tolist() == [1, 3]
    line = '{"timestamp_ms": 1, "input_length": 7, "output_length": 3}\n'
    assert traces.read_lengths(write(tmp_path, "t.jsonl", line)).output_tokens.tolist() == [3]


def test_the_limit_cuts(tmp_path):
    file = write(tmp_path, "l.csv", HEAD + "1,2\n3,4\nx,y\n")
    assert traces.read_lengths(file, limit=2).prompt_tokens.tolist() == [1, 3]
    with pytest.raises(ConfigError, match="limit of 1 or more"):
        traces.read_lengths(file, limit=0)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("l.csv", "prompt_tokens,answer\n1,2\n", r"line 2 has no output_tokens \(it has prompt_tokens, answer\)"),
        ("l.csv", HEAD + "1,2\n3,-4\n", "line 3 has output_tokens = '-4'. Give a number of 0 or more"),
        ("l.csv", HEAD + "nan,2\n", "line 2 has prompt_tokens = 'nan'"),
        ("l.csv", HEAD + "inf,2\n", "line 2 has prompt_tokens = 'inf'"),
        ("l.csv", HEAD + "1.5,2\n", "line 2 has prompt_tokens = '1.5', which is not a number of tokens. Give a whole"),
        ("l.csv", HEAD + "1e12,2\n", "line 2 has prompt_tokens = '1e12', which is not a number of tokens"),
        ("l.csv", HEAD, r"has no rows. It needs one request per row: prompt_tokens, output_tokens\."),
        ("l.csv", "", "has no rows"),
        ("l.txt", HEAD, "not a trace by its name"),
    ],
)
def test_bad_lengths_say_where_and_what_to_do(tmp_path, name, text, said):
    with pytest.raises(ConfigError, match=said):
        traces.read_lengths(write(tmp_path, name, text))


def test_what_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no trace nothing.* lengths or arrivals folder"):
        traces.read_lengths("nothing")


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=30))
def test_what_is_written_is_read(tmp_path_factory, rows):
    text = HEAD + "".join(f"{prompt},{output}\n" for prompt, output in rows)
    read = traces.read_lengths(write(tmp_path_factory.mktemp("l"), "l.csv", text))
    assert list(zip(read.prompt_tokens.tolist(), read.output_tokens.tolist(), strict=True)) == rows


@pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="set HEADWAY_DATA to the data")
@pytest.mark.parametrize(
    ("name", "rows"), [("sharegpt_v3", 58_787), ("sharegpt_with_predictions", 40_000), ("azure_conv_2023", 19_366)]
)
def test_the_data_is_read_whole(name, rows):
    read = traces.read_lengths(name)
    assert read.prompt_tokens.size == read.output_tokens.size == rows


# ---- ShareGPT's JSON


@pytest.mark.parametrize("name", ["s.json", "s.json.gz"])
def test_conversations_are_counted_by_the_tokenizer(tmp_path, name):
    entries = [talk("one two", "three", "more", "turns"), talk("alone"), talk("a b c", "")]
    read = traces.read_lengths(write(tmp_path, name, json.dumps(entries)), count=lambda text: len(text.split()))
    assert read.prompt_tokens.tolist() == [2, 3]
    assert read.output_tokens.tolist() == [1, 0]
    assert read.about == f"2 conversations of {name}, 1 without an answer left out"


def test_without_a_tokenizer_tokens_are_estimated_and_it_is_said(tmp_path):
    file = write(tmp_path, "s.json", json.dumps([talk("12345678", "123"), talk("1", "12345")]))
    read = traces.read_lengths(file)
    assert read.prompt_tokens.tolist() == [2, 1]
    assert read.output_tokens.tolist() == [1, 2]
    assert read.about == "2 conversations of s.json, tokens estimated as characters / 4"
    assert traces.read_lengths(file, limit=1).prompt_tokens.tolist() == [2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[\n{", "line 2 is not JSON"),
        ('{"conversations": []}', "no list of conversations. It needs a list"),
        ("[]", "no conversation with an answer"),
        (json.dumps([talk("alone")]), "no conversation with an answer"),
        (json.dumps([talk("a", "b"), {"turns": []}]), "conversation 2 has no conversations: .* Correct or remove"),
        (json.dumps([talk("a", "b"), 3]), "conversation 2 has no"),
        ('[{"conversations": [{"from": "human", "value": null}, {"value": "x"}]}]', "conversation 1 has no"),
        ('[{"conversations": [{"from": "human"}, {"value": "x"}]}]', "conversation 1 has no"),
    ],
)
def test_bad_conversations_say_where(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        traces.read_lengths(write(tmp_path, "s.json", text))


def test_a_damaged_file_is_said(tmp_path):
    for content in (b"no gzip", gzip.compress(b'[{"conversations": []}]')[:-8]):
        (tmp_path / "s.json.gz").write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            traces.read_lengths(tmp_path / "s.json.gz")
