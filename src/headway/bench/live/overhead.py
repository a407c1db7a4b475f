"""`headway bench overhead`: latency and CPU time that Headway itself adds.

A real gateway runs in front of a FAKE engine that responds at once (`fake_engine.py`), and the same requests
go to both in turn: the latency that the gateway adds, and the requests and tokens per second of one gateway
core. `hook_overhead.py` measures the scheduler hook inside vLLM.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from headway.bench.live.dashboard_cost import dashboard_rows
from headway.bench.live.fake_engine import NAME
from headway.bench.live.peers import DIRECT, HEADWAY, Peer, Peers, servers
from headway.bench.live.planning_overhead import planning_rows
from headway.bench.live.responses import MARK, TOKENS, check, complete, count_response, read_response
from headway.bench.load import prompts
from headway.bench.output.plots import png, sheet
from headway.bench.output.results import About, Grid, Report, Row, deliver
from headway.errors import EngineError
from headway.types import Floats

_CLIENTS, _STREAMS = 32, 64
_CHAT = f"chat, 16 tokens at once, idle {NAME}"
_TTFT = f"streamed, to the first token, idle {NAME}"
_REQUESTS = f"chat, {_CLIENTS} at once, {NAME}"
_FAST = f"{_STREAMS} streams x {TOKENS} tokens, {NAME} as fast as it can"
_PACED = f"{_STREAMS} streams x {TOKENS} tokens, {NAME} at 100 tokens/s each"


def main(*, quick: bool, as_json: bool, seed: int, out: Path | None) -> None:
    """Measure, print the result, and write page and plot when a folder is given."""
    measured = measure(quick, seed)
    deliver(build(measured, seed), as_json=as_json, out=out, pictures=lambda: {"overhead": plot(measured)})


@dataclass(slots=True)
class Measured:
    """All figures.

    times: {setting: {system: milliseconds of single requests, in order}}
    """

    rows: list[Row] = field(default_factory=list)
    times: dict[str, dict[str, Floats]] = field(default_factory=dict)
    seconds: float = 0.0


def measure(quick: bool, seed: int) -> Measured:
    """Start the servers, measure the gateway, then the hook."""
    from headway.bench.live.hook_overhead import hook_rows  # imports vLLM

    began, made = time.perf_counter(), Measured()
    rng = np.random.default_rng([seed, 7])
    with tempfile.TemporaryDirectory(prefix="headway-overhead-") as folder, servers(Path(folder)) as peers:
        _latency(peers, made, 300 if quick else 3000, rng)
        _throughput(peers, made, 2.2 if quick else 20.0, rng)
    made.rows += planning_rows(3.0 if quick else 20.0)
    made.rows += dashboard_rows(1.0 if quick else 15.0, seed)
    made.rows += hook_rows(quick, seed)
    made.seconds = time.perf_counter() - began
    return made


# ---- one request at a time


def _latency(peers: Peers, made: Measured, pairs: int, rng: np.random.Generator) -> None:
    """Send each request to both servers, in random order, and compare the two times."""
    for setting, mark, more in ((_CHAT, None, {}), (_TTFT, MARK, {"stream": True})):
        texts = prompts.generate(pairs + 50, (24, 48), rng)
        first = rng.integers(0, 2, len(texts))
        with ExitStack() as stack:
            lines = [stack.enter_context(_connect(peer)) for peer in peers]
            times = np.empty((len(texts), 2))
            for number, text in enumerate(texts):
                for which in (first[number], 1 - first[number]):
                    request = peers[which].request(text, max_tokens=16, **more)
                    times[number, which] = _ask(lines[which], request, mark)
        _compare(made, setting, times[50:] * 1000)  # the first 50 warm up caches


def _compare(made: Measured, setting: str, times: Floats) -> None:
    made.times[setting] = {DIRECT: times[:, 0], HEADWAY: times[:, 1]}
    added = times[:, 1] - times[:, 0]
    for label, p in (("p50", 0.5), ("p99", 0.99)):
        made.rows.append(
            Row(f"gateway.added_ms.{label}", HEADWAY, setting, float(np.quantile(added, p)), "ms")
        )
        for system, seen in made.times[setting].items():
            id = f"gateway.latency_ms.{label}"
            made.rows.append(Row(id, system, setting, float(np.quantile(seen, p)), "ms"))


@contextmanager
def _connect(peer: Peer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", peer.port), timeout=30) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield line


def _ask(line: socket.socket, request: bytes, mark: bytes | None) -> float:
    """Return the seconds until `mark` arrived (None: the whole response); read the whole response."""
    began, data, seen = time.perf_counter(), b"", None
    line.sendall(request)
    while not complete(data):
        piece = line.recv(65536)
        if not piece:
            raise EngineError("A server closed the connection in mid-response.", "Try again.")
        data += piece
        if seen is None and mark is not None and mark in data:
            seen = time.perf_counter() - began
    check(data)
    return time.perf_counter() - began if seen is None else seen


# ---- many at once


def _throughput(peers: Peers, made: Measured, seconds: float, rng: np.random.Generator) -> None:
    """Saturate each server in turn; divide its work by the CPU time of its process."""
    texts = prompts.generate(500, (24, 48), rng)
    streamed = {"max_tokens": TOKENS, "stream": True, "vllm_xargs": {"fake_tokens": TOKENS}}
    paced = {**streamed, "vllm_xargs": {"fake_tokens": TOKENS, "fake_delay": 0.01}}
    for peer in peers:
        _work(peer, _CLIENTS, 0.5, texts, {"max_tokens": 16})  # warms up caches
        requests = _work(peer, _CLIENTS, seconds, texts, {"max_tokens": 16})
        made.rows += _rates("gateway.req_per_s", "req/s", peer.name, _REQUESTS, requests.responses, requests)
        for setting, more in ((_FAST, streamed), (_PACED, paced)):
            tokens = _work(peer, _STREAMS, seconds, texts, more)
            made.rows += _rates(
                "gateway.tokens_per_s", "tokens/s", peer.name, setting, tokens.responses * TOKENS, tokens
            )


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of a server.

    responses: complete responses
    seconds: from the first request to the last response
    cpu: CPU seconds of the server meanwhile
    """

    responses: int
    seconds: float
    cpu: float


def _rates(id: str, unit: str, system: str, setting: str, amount: int, work: _Work) -> list[Row]:
    return [
        Row(id, system, setting, amount / work.cpu, f"{unit} per core"),
        Row(f"{id}.wall", system, setting, amount / work.seconds, unit),
    ]


def _work(peer: Peer, clients: int, seconds: float, texts: list[str], more: dict[str, Any]) -> _Work:
    requests = [peer.request(text, **more) for text in texts]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cpu, began = peer.cpu(), time.perf_counter()
        responses = runner.run(_many(peer, clients, seconds, requests, bool(more.get("stream"))))
        return _Work(responses, time.perf_counter() - began, peer.cpu() - cpu)


async def _many(peer: Peer, clients: int, seconds: float, requests: list[bytes], streamed: bool) -> int:
    """Let each client send its next request as soon as it has a response; return the number of responses."""
    stop = time.perf_counter() + seconds

    async def client(number: int) -> int:
        responses = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", peer.port, limit=2**22)
        try:
            while time.perf_counter() < stop:
                writer.write(requests[(number + clients * responses) % len(requests)])
                count_response(await read_response(reader), streamed)
                responses += 1
        finally:
            writer.close()
        return responses

    return sum(await asyncio.gather(*(client(number) for number in range(clients))))


# ---- the report

WORKLOAD = (
    f"Headway's gateway (sqlite broker, synchronous = full, SmolLM2's tokenizer) in front of a {NAME}, and "
    "that engine directly. Added: gateway minus direct, for the same request to both in random order. Per "
    "core: divided by the CPU seconds of the server's process."
)


def build(measured: Measured, seed: int) -> Report:
    """Return the report with a line per figure."""
    lines = [[row.id, row.system, _show(row.ours), row.unit, row.setting] for row in measured.rows]
    return Report(
        "overhead", "vllm", "Overhead of gateway and scheduler hook", measured.rows, measured.seconds,
        About(WORKLOAD, seed), Grid(("figure", "system", "value", "unit", "setting"), [lines], ("value",)),
    )  # fmt: skip


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def plot(measured: Measured) -> bytes:
    """Return a PNG of the latency added to single requests, and of the throughput per core."""
    figure, (left, *right) = sheet(1, 4, 10, 3.6, widths=(2, 1, 1, 1))
    for setting, seen in measured.times.items():
        added = np.sort(seen[HEADWAY] - seen[DIRECT])
        left.step(added, np.arange(1, added.size + 1) / added.size * 100, label=setting.split(",")[0])
    edge = max(float(np.quantile(seen[HEADWAY] - seen[DIRECT], 0.995)) for seen in measured.times.values())
    left.set(xlim=(0, edge), ylim=(0, 102), xlabel="added, ms", ylabel="requests, %")
    left.set_title(f"added to a request (idle {NAME})", fontsize=9)
    left.legend(fontsize=8, loc="lower right")
    for axes, setting in zip(right, (_REQUESTS, _FAST, _PACED), strict=True):
        rows = [row for row in measured.rows if row.setting == setting and row.unit.endswith("per core")]
        bars = axes.bar([row.system for row in rows], [row.ours or 0.0 for row in rows], color="#0072B2")
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
        axes.margins(y=0.12)
        axes.set_yticks([])
        axes.set_title(
            "\n".join([rows[0].unit, *setting.split(", ")]).replace(NAME, "FAKE engine"), fontsize=7
        )
    return png(figure)
