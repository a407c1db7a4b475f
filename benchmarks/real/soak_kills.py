"""Part "kills" of `headway bench soak`: a gateway is killed (SIGKILL) again and again, with faults in between.

Clients send requests all the time and record the answers (`soak_history.py`). At the end nothing is broken, and
each accepted background request must have exactly one answer.
"""

from __future__ import annotations

import asyncio
import signal
import time
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

_LEASE_S = 2.0  # short, so that the next gateway takes over soon
_HEALTH_S = 0.5  # time limit of engines' health checks, short enough to notice a hang
_LIFE_S = (0.3, 1.2)  # seconds before, during and after a fault


@dataclass(frozen=True, slots=True)
class Killed:
    """The outcome."""

    kills: int
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
    """Kill gateways on one queue, then let a last one finish the work. tick: called with the new kills."""
    rng = np.random.default_rng([seed, 12])
    engine_port, port, journal = free_port(), free_port(), folder / "journal"
    jump(folder, 0.0)
    server, engines = {"max_attempts": 1000}, {"health_timeout_s": _HEALTH_S}
    write_config(folder, engine_port, port, "slack", server, engines, lease_seconds=_LEASE_S)
    clients = Clients([Endpoint(port)], seed)
    with fake_engine(folder, engine_port, "--journal", str(journal)) as engine:
        with clients.running():
            for _ in range(kills):
                _life(clients, engine, folder, str(rng.choice(list(FAULTS))), rng)
                tick(1)
        _settle(clients, folder)
    clients.history.computed.update(filter(None, journal.read_text().split("\n")))
    return Killed(kills, check(clients.history))


@contextmanager
def _gateway(folder: Path, port: int) -> Iterator[Peer]:
    """Run a gateway that reads its clock's offset from the folder, so that jumps affect nothing else."""
    argv = gateway_argv(folder, JUMPING.format(path=str(folder / CLOCK)))
    with serving(HEADWAY, argv, port, "/ready", folder, {"TMPDIR": str(folder)}) as gateway:
        yield gateway


def _life(clients: Clients, engine: Peer, folder: Path, fault: str, rng: np.random.Generator) -> None:
    """Run a gateway for a while, inject a fault, and kill the gateway during or after the fault."""
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


def _settle(clients: Clients, folder: Path) -> None:
    """Let a gateway finish all work and poll every request; kill it and repeat with another."""
    for _ in range(2):
        with _gateway(folder, clients.endpoints[0].port) as gateway:
            asyncio.run(clients.look_at_all())
            gateway.process.send_signal(signal.SIGKILL)
            gateway.process.wait(30)
