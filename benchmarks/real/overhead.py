"""`headway bench overhead`: latency and CPU time that Headway itself adds.

A real gateway runs in front of a FAKE engine that responds immediately (`fake_engine.py`). The same requests go
to both in turn, which gives the latency added by the gateway, and the requests and tokens per second of one
gateway core. Gateways of other projects (`peers.py`) serve the same requests in front of the same
engine. It also measures the check of a JWT, `hook_overhead.py` the scheduler hook inside vLLM.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jwt
import numpy as np
import uvloop
from jwt.utils import base64url_decode

from benchmarks.experiment import Result, experiment
from benchmarks.real.peers import DIRECT, HEADWAY, KNOWN, Peer, chosen, gateway, ratio_rows, servers, set_answers
from benchmarks.real.peers import versions as peer_versions
from benchmarks.real.planning_overhead import planning_rows
from benchmarks.real.responses import MARK, TOKENS, check, complete, count_response, read_response
from headway.config import Config, Oidc
from headway.errors import EngineError
from headway.gateway.apis.access import Access
from headway.gateway.apis.oidc import Tokens
from headway.store.queue.port import Charge, Job
from headway.store.queue.sqlite import SqliteBroker
from headway.types import Floats
from headway.whatif.load import prompts
from headway.whatif.output.plots import png, sheet
from headway.whatif.output.results import Ask, Row
from testing.fake_engine import NAME
from testing.servers.issuer import Issuer

_CLIENTS, _STREAMS = 32, 64
_CHAT = f"chat, 16 tokens at once, idle {NAME}"
_TTFT = f"streamed, to the first token, idle {NAME}"
_REQUESTS = f"chat, {_CLIENTS} at once, {NAME}"
_FAST = f"{_STREAMS} streams x {TOKENS} tokens, {NAME} as fast as it can"
_PACED = f"{_STREAMS} streams x {TOKENS} tokens, {NAME} at 100 tokens/s each"


@experiment("overhead", "vllm", "Overhead of gateway and scheduler hook")
def main(ask: Ask, peers: str | None = None) -> Result:
    """Run the benchmark. peers: names of gateways to compare, comma-separated."""
    return result(measure(chosen(peers), ask.quick, ask.seed))


@dataclass(slots=True)
class OverheadFigures:
    """The measured figures.

    times: {setting: {system: milliseconds of single requests, in order}}
    peers: {name: version}
    """

    rows: list[Row] = field(default_factory=list)
    times: dict[str, dict[str, Floats]] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)


def measure(names: Sequence[str], quick: bool, seed: int) -> OverheadFigures:
    """Start the servers, measure the gateway and the peers, then the hook."""
    from benchmarks.real.hook_overhead import hook_rows  # imports vLLM

    made, rng = OverheadFigures(), np.random.default_rng([seed, 7])
    if names:
        made.peers = peer_versions(names)
    with tempfile.TemporaryDirectory(prefix="headway-overhead-") as folder, _systems(Path(folder), names) as systems:
        _latency(systems, made, 300 if quick else 3000, rng)
        _throughput(systems, made, 1.5 if quick else 20.0, rng)
        made.rows += ratio_rows(made.rows)
        made.rows += dashboard_rows(systems[0], systems[1], 1.0 if quick else 15.0, seed)
    made.rows += budget_rows(1.0 if quick else 10.0)
    made.rows += planning_rows(2.0 if quick else 20.0)
    made.rows += token_rows(500 if quick else 5000)
    made.rows += hook_rows(quick, seed)
    return made


@contextmanager
def _systems(folder: Path, names: Sequence[str]) -> Iterator[Sequence[Peer]]:
    """Run the FAKE engine, and Headway and the named peers in front of it, until the block ends."""
    with ExitStack() as stack:
        direct, headway = stack.enter_context(servers(folder))
        yield direct, headway, *(stack.enter_context(gateway(name, direct, folder)) for name in names)


# ---- one request at a time


def _latency(systems: Sequence[Peer], made: OverheadFigures, count: int, rng: np.random.Generator) -> None:
    """Send each request to all servers in random order and compare the times; the first server is the engine."""
    set_answers(systems[0], 16, 0.0)
    for setting, mark, more in ((_CHAT, None, {}), (_TTFT, MARK, {"stream": True})):
        texts = prompts.generate(count + 50, (24, 48), rng)
        order = rng.permuted(np.tile(np.arange(len(systems)), (len(texts), 1)), axis=1)
        with ExitStack() as stack:
            lines = [stack.enter_context(_connect(system)) for system in systems]
            times = np.empty((len(texts), len(systems)))
            for number, text in enumerate(texts):
                for which in order[number]:
                    request = systems[which].request(text, max_tokens=16, **more)
                    times[number, which] = _ask(lines[which], request, mark)
        seen = times[50:] * 1000  # the first 50 warm up caches
        made.times[setting] = {system.name: seen[:, which] for which, system in enumerate(systems)}
        _compare(made, setting)


def _compare(made: OverheadFigures, setting: str) -> None:
    times = made.times[setting]
    for label, p in (("p50", 0.5), ("p99", 0.99)):
        for system, seen in times.items():
            if system != DIRECT:
                added = float(np.quantile(seen - times[DIRECT], p))
                made.rows.append(Row(f"gateway.added_ms.{label}", system, setting, added, "ms"))
        for system, seen in times.items():
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


def _throughput(systems: Sequence[Peer], made: OverheadFigures, seconds: float, rng: np.random.Generator) -> None:
    """Saturate each server in turn and divide its work by its processes' CPU time."""
    texts = prompts.generate(500, (24, 48), rng)
    for system in systems:
        set_answers(systems[0], 16, 0.0)
        _work(system, _CLIENTS, 0.5, texts, {"max_tokens": 16})  # warms up caches
        requests = _work(system, _CLIENTS, seconds, texts, {"max_tokens": 16})
        made.rows += _rates("gateway.req_per_s", "req/s", system.name, _REQUESTS, 1, requests)
        for setting, delay in ((_FAST, 0.0), (_PACED, 0.01)):
            set_answers(systems[0], TOKENS, delay)
            tokens = _work(system, _STREAMS, seconds, texts, {"max_tokens": TOKENS, "stream": True})
            made.rows += _rates("gateway.tokens_per_s", "tokens/s", system.name, setting, TOKENS, tokens)


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of a server.

    responses: complete responses
    broken: responses of a peer that ended with an error
    seconds: time from the first request to the last response
    cpu: CPU seconds of the server in that time
    """

    responses: int
    broken: int
    seconds: float
    cpu: float


def _rates(id: str, unit: str, system: str, setting: str, each: int, work: _Work) -> list[Row]:
    """Return the rows of a server's work. each: units per response."""
    amount = work.responses * each
    return [
        Row("gateway.broken", system, setting, work.broken, "responses"),
        Row(id, system, setting, amount / work.cpu, f"{unit} per core"),
        Row(f"{id}.wall", system, setting, amount / work.seconds, unit),
    ]


def _work(peer: Peer, clients: int, seconds: float, texts: list[str], more: dict[str, Any]) -> _Work:
    requests = [peer.request(text, **more) for text in texts]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cpu, began = peer.cpu(), time.perf_counter()
        done = runner.run(_many(peer, clients, seconds, requests, bool(more.get("stream"))))
        return _Work(done[True], done[False], time.perf_counter() - began, peer.cpu() - cpu)


async def _many(peer: Peer, clients: int, seconds: float, requests: list[bytes], streamed: bool) -> Counter[bool]:
    """Send requests from all clients without pauses; return {complete: number of responses}.

    Raise EngineError for an incomplete response, unless a peer sent it.
    """
    stop, done = time.perf_counter() + seconds, Counter[bool]()

    async def client(number: int) -> None:
        sent = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", peer.port, limit=2**22)
        try:
            while time.perf_counter() < stop:
                writer.write(requests[(number + clients * sent) % len(requests)])
                response, sent = await read_response(reader), sent + 1
                try:
                    count_response(response, streamed)
                except EngineError:
                    if peer.name not in KNOWN:
                        raise
                    done[False] += 1
                else:
                    done[True] += 1
        finally:
            writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return done


# ---- the report

WORKLOAD = (
    f"Headway's gateway (sqlite broker, synchronous = full, SmolLM2's tokenizer) in front of a {NAME}, and "
    "that engine directly. Added: gateway minus direct, for the same request to both in random order. Per "
    "core: divided by the CPU seconds of the server's processes."
)
DURABLE = (
    "Headway commits every request to its queue on disk before it sends it on; the peers keep no queue, and "
    "neither they nor Headway check keys or log requests here."
)


def result(found: OverheadFigures) -> Result:
    """Return the findings."""
    notes = [DURABLE] if found.peers else []
    return Result(found.rows, WORKLOAD, lambda: {"overhead": plot(found)}, notes=notes, versions=found.peers)


def plot(measured: OverheadFigures) -> bytes:
    """Return a PNG of the latency added to single requests and of the throughput per core."""
    figure, (left, *right) = sheet(1, 4, 10, 3.6, widths=(2, 1, 1, 1))
    edge = 0.0
    for setting, seen in measured.times.items():
        for system in [name for name in seen if name != DIRECT]:
            added = np.sort(seen[system] - seen[DIRECT])
            label = f"{system}, {setting.split(',')[0]}"
            left.step(added, np.arange(1, added.size + 1) / added.size * 100, label=label)
            edge = max(edge, float(np.quantile(added, 0.995)))
    left.set(ylim=(0, 102), xlabel="added, ms", ylabel="requests, %")
    if measured.peers:
        left.set(xscale="log", xlim=(0.05, edge))
    else:
        left.set(xlim=(0, edge))
    left.set_title(f"added to a request (idle {NAME})", fontsize=9)
    left.legend(fontsize=8, loc="lower right")
    for axes, setting in zip(right, (_REQUESTS, _FAST, _PACED), strict=True):
        rows = [row for row in measured.rows if row.setting == setting and row.unit.endswith("per core")]
        bars = axes.bar([row.system for row in rows], [row.ours or 0.0 for row in rows], color="#0072B2")
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
        axes.tick_params(axis="x", labelsize=6 if measured.peers else 8)
        axes.margins(y=0.12)
        axes.set_yticks([])
        axes.set_title("\n".join([rows[0].unit, *setting.split(", ")]).replace(NAME, "FAKE engine"), fontsize=7)
    return png(figure)


_AT_ONCE = 32
_KINDS: dict[str, Sequence[Charge]] = {
    "without budgets": (),
    "with two budgets": tuple(Charge(f"budget of t: {of}", 1000.0, 1e15, 1.0, 0.0) for of in ("tokens", "cost")),
}


def budget_rows(seconds: float) -> list[Row]:
    """Return the time of a request in a SQLite queue, from put to stored end, both kinds in turn.

    cpu_us: of the whole process. All requests are of one tenant, and each call shares its commit with others.
    """
    with TemporaryDirectory(prefix="headway-budget-") as folder:
        times = asyncio.run(_rounds(Path(folder), seconds))
    setting = f"sqlite, synchronous = full, {_AT_ONCE} at once, {{}}"
    return [
        Row(f"budget.{what}_us", "headway", setting.format(kind), 1e6 * float(np.median(seen[:, i])), "us")
        for kind, seen in times.items()
        for i, what in enumerate(("wall", "cpu"))
    ]


async def _rounds(folder: Path, seconds: float) -> dict[str, np.ndarray]:
    """Return (wall, CPU) seconds of a request by kind, a row for each round."""
    broker = SqliteBroker(str(folder / "queue.sqlite"), "bench")
    await broker.renew(1e12)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    stop, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < stop or not number:
        for kind, charges in _KINDS.items():
            began = time.perf_counter(), time.process_time()
            await asyncio.gather(*(_request(broker, f"{number + i}", charges) for i in range(_AT_ONCE)))
            ended = time.perf_counter(), time.process_time()
            times[kind].append(((ended[0] - began[0]) / _AT_ONCE, (ended[1] - began[1]) / _AT_ONCE))
            number += _AT_ONCE
    await broker.close()
    return {kind: np.array(rows) for kind, rows in times.items()}


async def _request(broker: SqliteBroker, id: str, charges: Sequence[Charge]) -> None:
    await broker.put(Job(id, "t", "/v1/chat/completions", b"x" * 500, "{}", 1.0), charges)
    await broker.done(id, None, 2.0, {charge.account: 900.0 for charge in charges})


_RATE, _LINES = 1000.0, 64  # requests/s, connections
_ROUNDS = 3
_SETTING = f"{_RATE:g} chats/s, {NAME}"


def dashboard_rows(engine: Peer, gateway: Peer, seconds: float, seed: int) -> list[Row]:
    """Return the CPU time of a gateway per request without and with a viewer, and the difference.

    seconds: length of each of six stretches, alternately without and with a viewer.
    """
    texts = prompts.generate(500, (24, 48), np.random.default_rng([seed, 11]))
    set_answers(engine, 16, 0.0)
    requests = [gateway.request(text, max_tokens=16) for text in texts]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_stretch(gateway, requests, min(seconds, 2.0), viewer=False))
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(_ROUNDS):
            for viewer, each in found.items():
                each.append(runner.run(_stretch(gateway, requests, seconds, viewer=viewer)))
    without, beside = (float(np.median(found[viewer])) for viewer in (False, True))
    return [
        Row("dashboard.us_per_request", HEADWAY, f"no viewer, {_SETTING}", without * 1e6, "us"),
        Row("dashboard.us_per_request", HEADWAY, f"a viewer, {_SETTING}", beside * 1e6, "us"),
        Row("dashboard.core_pct", HEADWAY, _SETTING, 100 * (beside - without) * _RATE, "% of a core"),
    ]


async def _stretch(gateway: Peer, requests: list[bytes], seconds: float, *, viewer: bool) -> float:
    """Send requests at `_RATE` and return the gateway's CPU seconds per request."""
    watching = asyncio.create_task(_watch(gateway.port)) if viewer else None
    cpu, began = gateway.cpu(), time.perf_counter()
    counts = await asyncio.gather(
        *(_line(gateway.port, requests, began + number / _RATE, began + seconds) for number in range(_LINES))
    )
    used = gateway.cpu() - cpu
    if watching is not None:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return used / max(sum(counts), 1)


async def _line(port: int, requests: list[bytes], first: float, end: float) -> int:
    """Send a request every `_LINES / _RATE` seconds on one connection; a late request is sent at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent, due = 0, first
    try:
        while max(due, time.perf_counter()) < end:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            writer.write(requests[sent % len(requests)])
            count_response(await read_response(reader), streamed=False)
            sent, due = sent + 1, due + _LINES / _RATE
    finally:
        writer.close()
    return sent


async def _watch(port: int) -> None:
    """Follow the dashboard until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /headway/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        while await reader.read(2**16):
            continue
    finally:
        writer.close()


_ALGORITHMS = Oidc().algorithms


def token_rows(count: int) -> list[Row]:
    """Measure the check of `count` tokens, one per tenant: the first, the second, and of the signature alone."""
    return [row for algorithm in _ALGORITHMS for row in asyncio.run(_rows(algorithm, count))]


async def _rows(algorithm: str, count: int) -> list[Row]:
    with Issuer(algorithm=algorithm) as issuer:
        tokens = Tokens(Oidc(issuer.url, ("headway",)), Access(Config()).digest)
        await tokens.check(issuer.token())  # reads the issuer's keys
        texts = [issuer.token(tenant=f"tenant-{number}") for number in range(count)]
        times = {"first time": await _times(tokens, texts), "known token": await _times(tokens, texts)}
        times["signature alone"] = _signature_times(jwt.PyJWK(issuer.jwks()["keys"][0]), texts)
    return [
        Row(f"jwt.check_us.{label}", "headway", f"{algorithm}, {when}", float(np.quantile(seen, p)), "us")
        for when, seen in times.items()
        for label, p in (("p50", 0.5), ("p99", 0.99))
    ]


def _signature_times(key: jwt.PyJWK, texts: list[str]) -> list[float]:
    times = []
    for text in texts:
        signed, _, signature = text.encode().rpartition(b".")
        decoded = base64url_decode(signature)
        began = time.perf_counter()
        assert key.Algorithm.verify(signed, key.key, decoded)
        times.append((time.perf_counter() - began) * 1e6)
    return times


async def _times(tokens: Tokens, texts: list[str]) -> list[float]:
    times = []
    for text in texts:
        began = time.perf_counter()
        await tokens.check(text)
        times.append((time.perf_counter() - began) * 1e6)
    return times
