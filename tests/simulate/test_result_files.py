"""Traces by other names, and results of load generators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.simulate.workload import result_files, traces


def test_azure_s_own_names_and_dates(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:05.9799600,110,27\n"
    )
    trace = traces.read(path)
    assert trace.at.tolist() == pytest.approx([0.0, 2.0])
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([4808, 110], [10, 27])
    assert trace.tiers == ()


def test_plain_names_with_classes(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("arrival,input,output,class\n1,10,5,chat\n2.5,20,6,code\n")
    trace = traces.read(path)
    assert trace.at.tolist() == [0.0, 1.5]
    assert trace.tiers == ("chat", "code")
    path.write_text("arrival,input,output,class\n1,10,5,chat\n2.5,20,6,\n")
    with pytest.raises(ConfigError, match="some rows only"):
        traces.read(path)


def test_mooncake_s_own_names(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 1000, "input_length": 7, "output_length": 2, "hash_ids": [1]}\n'
        '{"timestamp": 4000, "input_length": 8, "output_length": 3, "hash_ids": []}\n'
    )
    assert traces.read(path).at.tolist() == [0.0, 3.0]


def test_results_of_vllm_bench_serve(tmp_path: Path) -> None:
    path = tmp_path / "vllm.json"
    data = {"start_times": [12.0, 10.0, 11.0], "input_lens": [5, 6, 7], "output_lens": [3, 4, 0]}
    path.write_text(json.dumps(data))
    trace = result_files.read(path)
    assert trace.at.tolist() == [0.0, 2.0], "the one that failed is left out"
    assert trace.prompt_tokens.tolist() == [6, 5]
    path.write_text(json.dumps({"request_rate": 3}))
    with pytest.raises(ConfigError, match="start_times") as caught:
        result_files.read(path)
    assert "--save-detailed" in caught.value.hint


def test_results_of_guidellm(tmp_path: Path) -> None:
    path = tmp_path / "guide.json"
    one = {"request_start_time": 5.0, "prompt_tokens": 10, "output_tokens": 4}
    two = {"request_start_time": 6.5, "prompt_tokens": 11, "output_tokens": None}
    three = {"request_start_time": 7.5, "prompt_tokens": 12, "output_tokens": 9}
    runs = [{"requests": {"successful": part}} for part in ([one], [one, two, three])]
    path.write_text(json.dumps({"benchmarks": runs}))
    trace = result_files.read(path)
    assert trace.at.tolist() == [0.0, 2.5]
    path.write_text(json.dumps({"benchmarks": []}))
    with pytest.raises(ConfigError, match="guidellm"):
        result_files.read(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        result_files.read(path)


def test_other_files_are_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("timestamp_s,prompt_tokens,output_tokens\n5,7,3\n9,1,5\n")
    assert result_files.read(path).at.tolist() == [0.0, 4.0]
    with pytest.raises(ConfigError, match="There is no trace"):
        result_files.read(tmp_path / "none.json")
