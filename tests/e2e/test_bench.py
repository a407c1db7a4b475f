"""The benchmark commands end, print their JSON contract and write their reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.checkout import bench_commands
from headway.errors import HeadwayError
from headway.models.variants import vary
from tests.conftest import CORE

COMPARE = {
    "attainment.chat",
    "attainment.all",
    "goodput.req_per_s",
    "throughput.tokens_per_s",
    "ttft.p99",
    "tpot.p99",
    "e2el.p99",
    "preemptions",
}

SHORT = """
[chat]
slo = "ttft:1500 tpot:150"
max_tokens = 16
[batch]
max_tokens = 24
ignore_eos = true
"""


def test_compare_runs_stock_and_headway_on_one_trace(tmp_path: Path) -> None:
    mix, out = tmp_path / "short.toml", tmp_path / "out"
    mix.write_text(SHORT)
    model = vary("smollm2", tmp_path / "few-layers", scale=0.0, layers=2)
    words = f"compare --quick --mix {mix} --burstiness 0.3 --rate 3 --out {out} --model {model} --json"
    argv = ["taskset", "--cpu-list", CORE, sys.executable, "-m", "headway.cli", "bench", *words.split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result) == {"bench", "host", "rows", "seconds"}
    assert all(set(row) == {"id", "system", "setting", "paper", "ours", "unit"} for row in result["rows"])
    rows = {(row["id"], row["system"], row["setting"]): row["ours"] for row in result["rows"]}
    assert {id for id, _, _ in rows} >= COMPARE
    whole = "all, short, 3 req/s, burstiness 0.3"
    counts = {rows["requests", system, whole] for system in ("vllm-fcfs", "headway")}
    assert len(counts) == 1
    assert counts.pop() > 8
    assert rows["failed", "vllm-fcfs", whole] == rows["failed", "headway", whole] == 0
    written = {path.name for path in out.iterdir()}
    assert {"report.html", "report.json", "attainment.png", "latency.png"} <= written


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["compare", "--systems", "vllm-fcsf"], "vllm"),
        (["compare", "--systems", ","], "Name some of"),
        (["compare", "--mix", "chat-bach"], "chat-batch"),
        (["beside", "--real", "--systems", "vllm-fcsf"], "vllm"),
        (["apps", "--systems", "hermess"], "hermes"),
        (["apps", "--slo", "batch ttft:100"], "chat"),
        (["compare", "--slo", "chat ttft:-1"], "ttft:1500"),
        (["compare", "--model", "/no/such/model", "--systems", "slack"], "model"),
        (["serve", "--url", "localhost:8000"], "http://"),
        (["serve", "--url", "http://127.0.0.1:9", "--endpoint", "chats"], "chat or completions"),
        (["serve", "--url", "http://127.0.0.1:9", "--trace", "/no/such.csv"], "trace"),
    ],
)
def test_wrong_arguments_are_answered_with_a_hint(words: list[str], hint: str) -> None:
    """What a command raises, its `main` prints with status 2 (`tests/gateway/test_cli.py`)."""
    done = CliRunner().invoke(bench_commands(), words)
    assert done.stdout == ""
    assert isinstance(done.exception, HeadwayError)
    assert hint in f"{done.exception.message} {done.exception.hint}"
