"""The benchmark commands end, print their JSON contract and write their reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
OVERHEAD = {
    "gateway.added_ms.p50",
    "gateway.added_ms.p99",
    "gateway.req_per_s",
    "gateway.tokens_per_s",
    "hook.ratio",
    "hook.iteration_ratio",
    "hook.update_us",
}


def bench(*words: str) -> tuple[int, str, str]:
    argv = [sys.executable, "-m", "headway.cli", "bench", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def contract(*words: str) -> dict[str, Any]:
    status, out, err = bench(*words, "--json")
    assert status == 0, err
    result: dict[str, Any] = json.loads(out)
    assert set(result) == {"bench", "host", "rows", "seconds"}
    assert all(set(row) == {"id", "system", "setting", "paper", "ours", "unit"} for row in result["rows"])
    return result


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
    result = contract(*f"compare --quick --mix {mix} --burstiness 0.3 --rate 3 --out {out}".split())
    rows = {(row["id"], row["system"], row["setting"]): row["ours"] for row in result["rows"]}
    assert {id for id, _, _ in rows} >= COMPARE
    whole = "all, short, 3 req/s, burstiness 0.3"
    counts = {rows["requests", system, whole] for system in ("vllm-fcfs", "headway")}
    assert len(counts) == 1
    assert counts.pop() > 8
    assert rows["failed", "vllm-fcfs", whole] == rows["failed", "headway", whole] == 0
    written = {path.name for path in out.iterdir()}
    assert {"report.html", "report.json", "attainment.png", "latency.png"} <= written


def test_overhead_measures_gateway_and_hook(tmp_path: Path) -> None:
    result = contract("overhead", "--quick", "--out", str(tmp_path))
    assert {row["id"] for row in result["rows"]} >= OVERHEAD
    ratios = {row["setting"] for row in result["rows"] if row["id"] == "hook.ratio"}
    queued = {f"{running} running, 1,000 waiting" for running in (16, 64)}
    assert ratios == {"16 running", "64 running", "256 running"} | queued
    assert any("FAKE" in row["setting"] for row in result["rows"]), "a fake engine is called one"


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
    status, out, err = bench(*words)
    assert status == 2
    assert out == ""
    assert "error:" in err
    assert hint in err.replace("\n", " ")
