"""Part "kills" of `headway bench soak`: a gateway is killed (SIGKILL) again and again, with faults between.

Clients go on asking all the time, and keep what they see (`soak_history.py`); at the end nothing is broken,
and each background request that was accepted is owed its one answer.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.real.peers import HEADWAY, Peer, fake_engine, gateway_argv, serving, write_config
from benchmarks.real.soak_clients import Clients, Endpoint
from benchmarks.real.soak_faults import CLOCK, FAULTS, JUMPING, SoakScene, jump
from benchmarks.real.soak_history import Verdict, check
from headway.engines.vllm.process.launch import free_port
from headway.whatif.output.results import Row

_LEASE_S = 2.0  # so that the next gateway takes over soon
_HEALTH_S = 0.5  # of engines: a hang is noticed while it lasts
_LIFE_S = (0.3, 1.2)  # of a gateway, before a fault and in it


@dataclass(frozen=True, slots=True)
class Killed:
    """The outcome. faults: how often each was among the kills."""

    kills: int
    faults: Counter[str]
    verdict: Verdict

    def rows(self) -> list[Row]:
        """Return the part's figures."""
        setting, verdict = f"{self.kills} kills", self.verdict
        return [
            Row("soak.accepted", HEADWAY, setting, float(verdict.accepted), "requests"),
            Row("soak.lost", HEADWAY, setting, float(verdict.lost), "requests"),
            Row("soak.twice", HEADWAY, setting, float(verdict.twice), "requests"),
            Row("soak.recomputed", HEADWAY, setting, float(verdict.recomputed), "computations"),
        ]


def measure(folder: Path, kills: int, seed: int, tick: Callable[[int], None]) -> Killed:
    """Kill gateways on one queue, then let the last one end what is owed; tick: called with kills."""
    rng, faults = np.random.default_rng([seed, 12]), Counter[str]()
    engine_port, port, journal = free_port(), free_port(), folder / "journal"
    jump(folder, 0.0)
    server, engines = {"max_attempts": 1000}, {"health_timeout_s": _HEALTH_S}
    write_config(folder, engine_port, port, "slack", server, engines, lease_seconds=_LEASE_S)
    clients = Clients([Endpoint(port)], seed)
    with fake_engine(folder, engine_port, "--journal", str(journal)) as engine:
        with clients.running():
            for _ in range(kills):
                name = str(rng.choice(list(FAULTS)))
                faults[name] += 1
                _life(clients, engine, folder, name, rng)
                tick(1)
        _pay(clients, folder)
    clients.history.computed.update(filter(None, journal.read_text().split("\n")))
    return Killed(kills, faults, check(clients.history))


@contextmanager
def _gateway(folder: Path, port: int) -> Iterator[Peer]:
    """Run a gateway; the origin of its clock is in the folder, so that jumps stay in here."""
    argv = gateway_argv(folder, JUMPING.format(path=str(folder / CLOCK)))
    with serving(HEADWAY, argv, port, "/ready", folder, {"TMPDIR": str(folder)}) as gateway:
        yield gateway


def _life(clients: Clients, engine: Peer, folder: Path, fault: str, rng: np.random.Generator) -> None:
    """Let a gateway live for a while, break something, and kill the gateway: in the fault, or after it."""
    with _gateway(folder, clients.endpoints[0].port) as gateway:
        clients.endpoints[0].lives += 1
        time.sleep(rng.uniform(*_LIFE_S))
        within = rng.random() < 0.5
        with FAULTS[fault](SoakScene(engine, gateway, folder, rng)):
            time.sleep(rng.uniform(*_LIFE_S))
            if within:
                _kill(clients, gateway)
        if not within:
            time.sleep(rng.uniform(*_LIFE_S))
            _kill(clients, gateway)


def _kill(clients: Clients, gateway: Peer) -> None:
    clients.endpoints[0].lives += 1
    gateway.process.send_signal(signal.SIGKILL)
    gateway.process.wait(30)


def _pay(clients: Clients, folder: Path) -> None:
    """Let a last gateway end what is owed; look at everything, and once more after it was killed, too."""
    for _ in range(2):
        with _gateway(folder, clients.endpoints[0].port) as gateway:
            asyncio.run(clients.look_at_all())
            gateway.process.send_signal(signal.SIGKILL)
            gateway.process.wait(30)
