"""CPU cost of the dashboard on a busy gateway, with and without a viewer."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import numpy as np
import uvloop

from benchmarks.real.peers import HEADWAY, Peer, set_answers
from benchmarks.real.responses import count_response, read_response
from headway.whatif.load import prompts
from headway.whatif.output.results import Row
from testing.fake_engine import NAME

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
