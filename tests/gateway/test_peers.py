"""Gateways of other projects beside Headway: what is measured, on one load, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.real import overhead, peers, responses
from benchmarks.real.peers import KNOWN, Peer, chosen, fake_engine, ratio_rows, set_answers
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError, EngineError
from headway.whatif.output.results import Row

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("HEADWAY_PEERS", ROOT / ".venv-peers"))
needs_peers = pytest.mark.skipif(
    not all((PEERS / "bin" / name).exists() for name in KNOWN), reason="make peers has not installed them"
)
FIGURES = {
    "gateway.added_ms.p50",
    "gateway.added_ms.p99",
    "gateway.latency_ms.p50",
    "gateway.latency_ms.p99",
    "gateway.req_per_s",
    "gateway.req_per_s.wall",
    "gateway.tokens_per_s",
    "gateway.tokens_per_s.wall",
    "gateway.broken",
}

BURN = """if True:
    import sys, time
    while time.process_time() < 1.0:
        pass
    sys.stdin.read()
"""
TWO_CHILDREN = """if True:  # one has ended when a line is printed, the other runs until stdin ends
    import subprocess, sys
    burn = [sys.executable, "-c", sys.argv[1]]
    subprocess.run(burn, stdin=subprocess.DEVNULL)
    child = subprocess.Popen(burn)
    print(flush=True)
    child.wait()
"""


@needs_peers
def test_peers_are_measured_as_headway_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_PEERS", str(PEERS))
    for module in (overhead, responses):
        monkeypatch.setattr(module, "TOKENS", 20)
    measured, rng = overhead.OverheadFigures(peers=peers.versions(KNOWN)), np.random.default_rng(0)
    with overhead._systems(tmp_path, chosen(",".join(KNOWN))) as systems:
        assert [system.name for system in systems] == ["direct", "headway", *KNOWN]
        overhead._latency(systems, measured, 10, rng)
        overhead._throughput(systems, measured, 0.2, rng)
    figures = {
        system: {(row.id, row.setting): row.ours for row in measured.rows if row.system == system}
        for system in ("headway", *KNOWN)
    }
    assert {id for id, _ in figures["headway"]} == FIGURES
    for name in KNOWN:
        assert figures[name].keys() == figures["headway"].keys()
        rates = [value for (id, _), value in figures[name].items() if "_per_s" in id]
        assert all(value is not None and value > 0 for value in rates)
    ratios = {(row.id, row.setting): row.ours for row in ratio_rows(measured.rows)}
    assert len(ratios) == 7 * len(KNOWN)
    setting = next(setting for id, setting in figures["litellm"] if id == "gateway.req_per_s")
    quotient = figures["headway"]["gateway.req_per_s", setting] / figures["litellm"]["gateway.req_per_s", setting]  # type: ignore[operator]
    assert ratios["gateway.req_per_s.ratio", f"over litellm, {setting}"] == pytest.approx(quotient)
    found = overhead.result(measured)
    assert set(KNOWN) <= set(found.versions)
    assert "queue on disk" in found.notes[0]
    assert overhead.plot(measured).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["litellm", "headway"])
def test_what_a_peer_breaks_off_is_counted_apart(tmp_path: Path, name: str) -> None:
    with fake_engine(tmp_path, free_port()) as engine:
        set_answers(engine, 10, 0.0)
        system = Peer(name, engine.port, engine.process)
        if name == "headway":
            with pytest.raises(EngineError, match="10 tokens"):
                overhead._work(system, 2, 0.1, ["text"], {"stream": True})
        else:
            work = overhead._work(system, 2, 0.1, ["text"], {"stream": True})
            assert work.responses == 0
            assert work.broken >= 2


def test_ratios_are_of_headways_figure_over_the_peers() -> None:
    rows = [
        Row("gateway.req_per_s", "direct", "chat", 900.0, "req/s per core"),
        Row("gateway.req_per_s", "headway", "chat", 30.0, "req/s per core"),
        Row("gateway.req_per_s", "litellm", "chat", 10.0, "req/s per core"),
        Row("gateway.req_per_s", "sglang-router", "chat", 60.0, "req/s per core"),
        Row("gateway.req_per_s.wall", "headway", "chat", 30.0, "req/s"),
        Row("gateway.req_per_s.wall", "litellm", "chat", 5.0, "req/s"),
        Row("gateway.added_ms.p50", "headway", "idle", 1.0, "ms"),
        Row("gateway.added_ms.p50", "sglang-router", "idle", 0.0, "ms"),  # below the noise
    ]
    assert ratio_rows(rows) == [
        Row("gateway.req_per_s.ratio", "headway", "over litellm, chat", 3.0, "x"),
        Row("gateway.req_per_s.ratio", "headway", "over sglang-router, chat", 0.5, "x"),
        Row("gateway.added_ms.p50.ratio", "headway", "over sglang-router, idle", None, "x"),
    ]


def test_names_are_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_PEERS", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "litellm").touch()
    assert chosen(None) == ()
    assert chosen("litellm, litellm") == ("litellm",)
    with pytest.raises(ConfigError, match=r"'nginx' is not a peer.* Known: litellm, sglang-router"):
        chosen("litellm,nginx")
    with pytest.raises(ConfigError, match=r"sglang-router is not installed.*`make peers`"):
        chosen("litellm,sglang-router")
    with pytest.raises(ConfigError, match="Name some of: litellm, sglang-router"):
        chosen(" ,")


@pytest.mark.parametrize(("names", "hint"), [("nginx", "Known: litellm"), ("litellm", "`make peers`")])
def test_the_command_refuses_with_what_mends_it(tmp_path: Path, names: str, hint: str) -> None:
    argv = [sys.executable, "-m", "headway.cli", "bench", "overhead", "--quick", "--peers", names]
    env = {**os.environ, "HEADWAY_PEERS": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert hint in " ".join(done.stderr.split())


def test_the_engine_answers_as_it_is_set(tmp_path: Path) -> None:
    with fake_engine(tmp_path, free_port()) as engine:
        for tokens, delay in ((5, 0.0), (3, 0.1)):
            set_answers(engine, tokens, delay)
            body = json.dumps({"model": "smollm2", "messages": [{"content": "Say"}], "max_tokens": 200}).encode()
            url = f"http://127.0.0.1:{engine.port}/v1/chat/completions"
            began = time.perf_counter()
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == tokens
            assert time.perf_counter() - began >= tokens * delay


def test_cpu_seconds_are_those_of_all_processes() -> None:
    argv = [sys.executable, "-c", TWO_CHILDREN, BURN]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        peer, until = Peer("x", 0, psutil.Process(process.pid)), time.monotonic() + 60
        while peer.cpu() < 1.9 and time.monotonic() < until:
            time.sleep(0.05)
        own = peer.process.cpu_times()
        assert peer.cpu() >= 1.9
        assert own.user + own.system < 1.0
        process.communicate(b"")
