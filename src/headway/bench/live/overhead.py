"""What does Headway itself cost?

A real gateway stands before a FAKE engine that answers at once (`instant.py`), and the same calls go to both
by turns: what the gateway adds to each, and how many requests and tokens one core of it carries. The rows of
`hook_rows` say what the scheduler hook adds inside a real vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import tomli_w
import uvloop
from matplotlib.figure import Figure
from rich.table import Table

from headway.bench.live.fake_engine import NAME, WORD
from headway.bench.load import prompts
from headway.bench.load.metrics import Row
from headway.bench.output.page import About, Page, contract, save
from headway.bench.output.plots import png
from headway.bench.output.results import hand_over, tabulate
from headway.engines.vllm.process.launch import Child, free_port
from headway.errors import EngineError
from headway.types import Floats

DIRECT, HEADWAY = "direct", "headway"
_TOKENS = 200  # per stream
_CLIENTS, _STREAMS = 32, 64
_CHAT = f"chat, 16 tokens at once, idle {NAME}"
_TTFT = f"streamed, to the first token, idle {NAME}"
_REQUESTS = f"chat, {_CLIENTS} at once, {NAME}"
_FAST = f"{_STREAMS} streams x {_TOKENS} tokens, {NAME} as fast as it can"
_PACED = f"{_STREAMS} streams x {_TOKENS} tokens, {NAME} at 100 tokens/s each"
_TITLE = "What does Headway itself cost?"
_HEADER = ("figure", "system", "value", "unit", "setting")
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_MARK = f'"content":"{WORD}"'.encode()  # in every event with a token
_END = b"\r\n0\r\n\r\n"  # of a chunked body


def run(quick: bool, seed: int) -> tuple[list[Row], float]:
    """Measure everything; return the rows and how long it took, in seconds."""
    measured = measure(quick, seed)
    return measured.rows, measured.seconds


def main(*, quick: bool, as_json: bool, seed: int, out: Path | None, command: str) -> None:
    """Measure and print a table or one JSON object; write report.json, the plot and report.html to `out`."""
    measured = measure(quick, seed)
    if out is not None:
        write(out, measured, About(command, seed, WORKLOAD))
    hand_over(to_json(measured), lambda: table(measured), as_json=as_json, out=out)


@dataclass(slots=True)
class Measured:
    """All figures, and the milliseconds that single requests took: {setting: {system: in order}}."""

    rows: list[Row] = field(default_factory=list)
    times: dict[str, dict[str, Floats]] = field(default_factory=dict)
    seconds: float = 0.0


def measure(quick: bool, seed: int) -> Measured:
    """Start the servers, measure the gateway, then the hook."""
    began, made = time.perf_counter(), Measured()
    rng = np.random.default_rng([seed, 7])
    with tempfile.TemporaryDirectory(prefix="headway-overhead-") as folder, servers(Path(folder)) as peers:
        _latency(peers, made, 300 if quick else 3000, rng)
        _throughput(peers, made, 2.2 if quick else 20.0, rng)
    made.rows += _planning(quick)
    made.rows += _hook(quick, seed)
    made.seconds = time.perf_counter() - began
    return made


def _hook(quick: bool, seed: int) -> list[Row]:
    """Return the rows of the other half: what the scheduler hook adds inside vLLM."""
    from headway.bench.live.hook_overhead import hook_rows

    return hook_rows(quick, seed)


def _planning(quick: bool) -> list[Row]:
    """Return the rows of a gateway whose planner takes its time."""
    from headway.bench.live.planning_overhead import planning_rows

    return planning_rows(3.0 if quick else 20.0)


# ---- the servers


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that runs: where it listens, and its process."""

    name: str
    port: int
    process: Any

    def cpu(self) -> float:
        """Return the seconds of CPU that the process has used, all threads, in user and kernel mode."""
        used = self.process.cpu_times()
        return float(used.user + used.system)

    def request(self, prompt: str, **more: Any) -> bytes:
        """Return the bytes of a chat request."""
        body = {"model": "smollm2", "messages": [{"role": "user", "content": prompt}], **more}
        data = json.dumps(body).encode()
        lines = ("POST /v1/chat/completions HTTP/1.1", f"host: 127.0.0.1:{self.port}",
                 "content-type: application/json", f"content-length: {len(data)}")  # fmt: skip
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


Peers = tuple[Peer, Peer]  # direct, then Headway


@contextmanager
def servers(folder: Path, recipe: str = "slack") -> Iterator[Peers]:
    """Start the FAKE engine and a gateway before it, and stop both at the end."""
    engine, gateway = free_port(), free_port()
    config = {
        "recipe": recipe,
        "server": {"port": gateway, "max_queued": 10_000},
        "engines": [{"url": f"http://127.0.0.1:{engine}", "max_running": 256}],
        "broker": {"kind": "sqlite", "sqlite": {"path": str(folder / "queue.sqlite"), "synchronous": "full"}},
    }
    (folder / "headway.toml").write_text(tomli_w.dumps(config))
    run = "from headway.cli import main; main()"
    serve = [sys.executable, "-c", run, "serve", "--config", str(folder / "headway.toml")]
    fake = [sys.executable, "-m", "headway.bench.live.fake_engine", "--port", str(engine)]
    with ExitStack() as stack:
        direct = stack.enter_context(_serving(DIRECT, fake, engine, "/health", folder))
        yield direct, stack.enter_context(_serving(HEADWAY, serve, gateway, "/ready", folder))


@contextmanager
def _serving(name: str, argv: Sequence[str], port: int, path: str, folder: Path) -> Iterator[Peer]:
    child = Child(argv, dict(os.environ), folder / f"{name}.log")
    child.start()
    try:
        _wait(child, f"http://127.0.0.1:{port}{path}", name)
        assert child.process is not None
        yield Peer(name, port, psutil.Process(child.process.pid))
    finally:
        child.stop()


def _wait(child: Child, url: str, name: str, patience: float = 60.0) -> None:
    """Wait until a GET is answered with 200; EngineError when the server dies or takes too long."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if not child.alive:
            raise child.died(name)
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise EngineError(f"{name} did not answer at {url} in time. {child.tail()}", "Is the machine very busy?")


# ---- one request at a time


def _latency(peers: Peers, made: Measured, pairs: int, rng: np.random.Generator) -> None:
    """Send each request to both servers, in random order, and compare the two times."""
    for setting, mark, more in ((_CHAT, None, {}), (_TTFT, _MARK, {"stream": True})):
        texts = prompts.generate(pairs + 50, (24, 48), rng)
        first = rng.integers(0, 2, len(texts))
        with ExitStack() as stack:
            lines = [stack.enter_context(_connect(peer)) for peer in peers]
            times = np.empty((len(texts), 2))
            for number, text in enumerate(texts):
                for which in (first[number], 1 - first[number]):
                    request = peers[which].request(text, max_tokens=16, **more)
                    times[number, which] = _ask(lines[which], request, mark)
        _compare(made, setting, times[50:] * 1000)  # the first ones warm caches up


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
    """Return the seconds until `mark` came, or with None the whole answer, which is read in any case."""
    began, data, seen = time.perf_counter(), b"", None
    line.sendall(request)
    while not _complete(data):
        piece = line.recv(65536)
        if not piece:
            raise EngineError("A server hung up in the middle of an answer.", "Try again.")
        data += piece
        if seen is None and mark is not None and mark in data:
            seen = time.perf_counter() - began
    _check(data)
    return time.perf_counter() - began if seen is None else seen


def _complete(data: bytes) -> bool:
    head, found, body = data.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return bool(found) and (len(body) >= int(length[1]) if length else data.endswith(_END))


def _check(data: bytes) -> None:
    if not data.startswith(b"HTTP/1.1 200 "):
        raise EngineError(f"A server refused: {data[:300]!r}.", "This is a bug of the benchmark or the door.")


# ---- many at once


def _throughput(peers: Peers, made: Measured, seconds: float, rng: np.random.Generator) -> None:
    """Keep each server busy in turn; divide what it did by the CPU time that its process used."""
    texts = prompts.generate(500, (24, 48), rng)
    streamed = {"max_tokens": _TOKENS, "stream": True, "vllm_xargs": {"fake_tokens": _TOKENS}}
    paced = {**streamed, "vllm_xargs": {"fake_tokens": _TOKENS, "fake_delay": 0.01}}
    for peer in peers:
        _work(peer, _CLIENTS, 0.5, texts, {"max_tokens": 16})  # warms caches up
        requests = _work(peer, _CLIENTS, seconds, texts, {"max_tokens": 16})
        made.rows += _rates("gateway.req_per_s", "req/s", peer.name, _REQUESTS, requests.answers, requests)
        for setting, more in ((_FAST, streamed), (_PACED, paced)):
            tokens = _work(peer, _STREAMS, seconds, texts, more)
            made.rows += _rates(
                "gateway.tokens_per_s", "tokens/s", peer.name, setting, tokens.answers * _TOKENS, tokens
            )


@dataclass(frozen=True, slots=True)
class _Work:
    """answers: complete ones. seconds: from the first request to the last answer. cpu: used meanwhile."""

    answers: int
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
        answers = runner.run(_many(peer, clients, seconds, requests, bool(more.get("stream"))))
        return _Work(answers, time.perf_counter() - began, peer.cpu() - cpu)


async def _many(peer: Peer, clients: int, seconds: float, requests: list[bytes], streamed: bool) -> int:
    """Let each client ask again as soon as it is answered; return the answers when all have stopped."""
    stop = time.perf_counter() + seconds

    async def client(number: int) -> int:
        answers = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", peer.port, limit=2**22)
        try:
            while time.perf_counter() < stop:
                writer.write(requests[(number + clients * answers) % len(requests)])
                _count(await _read(reader), streamed)
                answers += 1
        finally:
            writer.close()
        return answers

    return sum(await asyncio.gather(*(client(number) for number in range(clients))))


async def _read(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return head + (await reader.readexactly(int(length[1])) if length else await reader.readuntil(_END))


def _count(data: bytes, streamed: bool) -> None:
    """Every answer must be whole, or the rates would be those of errors."""
    _check(data)
    if streamed and data.count(_MARK) != _TOKENS:
        raise EngineError(f"A stream had {data.count(_MARK)} tokens, not {_TOKENS}.", "This is a bug.")


# ---- how people read it

WORKLOAD = (
    f"Headway's gateway (sqlite broker, synchronous = full, SmolLM2's tokenizer) before a {NAME}, and that "
    "engine directly. Added: gateway minus direct, of the same request to both in random order. Per core: "
    "divided by the CPU seconds that the server's process used."
)


def to_json(measured: Measured) -> dict[str, Any]:
    """Return the figures by the JSON contract (`page.contract`)."""
    return contract(measured.rows, bench="overhead", host="vllm", seconds=measured.seconds)


def table(measured: Measured) -> Table:
    """Return a rich table with a line per figure."""
    return tabulate(_TITLE, _HEADER, [_lines(measured)], caption=WORKLOAD, numbers=("value",))


def _lines(measured: Measured) -> list[list[str]]:
    return [[row.id, row.system, _show(row.ours), row.unit, row.setting] for row in measured.rows]


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def write(folder: Path, measured: Measured, about: About) -> list[Path]:
    """Write report.json, overhead.png and report.html into a folder; return what was written."""
    pictures = {"overhead": plot(measured)}
    page = Page(_TITLE, _HEADER, _lines(measured), pictures)
    return save(folder, to_json(measured), page, about)


def plot(measured: Measured) -> bytes:
    """Return a PNG: how much is added to single requests, and what a core carries."""
    figure = Figure(figsize=(10, 3.6), dpi=120, layout="constrained")
    left, *right = figure.subplots(1, 4, width_ratios=(2, 1, 1, 1))
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
