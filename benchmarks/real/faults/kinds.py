"""The kinds of faults, as context managers that break a part and restore it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from benchmarks.real.soak_clients import Endpoint
from testing.servers import rabbitmq
from testing.servers.parts import ClusterPart, HeadwayCluster
from testing.servers.proxy import Proxy

SHORTEST_S = 0.2  # shortest pause or cut


@dataclass(frozen=True, slots=True)
class FaultScene:
    """The cluster that faults are injected into.

    endpoints: the gateways' endpoints, in their order. rng: chooses the part and the duration. longest_s: longest
    pause or cut.
    """

    cluster: HeadwayCluster
    endpoints: list[Endpoint]
    rng: np.random.Generator
    longest_s: float

    def of(self, parts: list[ClusterPart]) -> ClusterPart:
        return parts[int(self.rng.integers(len(parts)))]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in progress. target: the name of the affected part."""

    target: str


class Pausable(Protocol):
    """A process, or the processes of a server."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


Named = tuple[str, Pausable]
Kind = Callable[[FaultScene], AbstractContextManager[Fault]]


def _hold(scene: FaultScene) -> None:
    """Sleep for a random time while the fault lasts."""
    time.sleep(float(scene.rng.uniform(SHORTEST_S, scene.longest_s)))


# ---- deaths: the part is restarted at once, as by its supervisor


def _killed(which: Callable[[FaultScene], ClusterPart]) -> Kind:
    @contextmanager
    def kind(scene: FaultScene) -> Iterator[Fault]:
        part = which(scene)
        endpoint = _endpoint(scene, part)
        if endpoint is not None:
            endpoint.lives += 1
        part.kill()
        yield Fault(part.name)
        part.start()

    return kind


@contextmanager
def _node_killed(scene: FaultScene) -> Iterator[Fault]:
    name, node = _node(scene)
    node.kill()
    yield Fault(name)
    node.start()


@contextmanager
def _database_restarted(scene: FaultScene) -> Iterator[Fault]:
    scene.cluster.database.stop(signal.SIGQUIT)
    yield Fault("postgresql")
    scene.cluster.database.start()


@contextmanager
def _disk_full(scene: FaultScene) -> Iterator[Fault]:
    scene.cluster.database.fill_disk()
    _hold(scene)
    yield Fault("postgresql")
    scene.cluster.database.free_disk()


# ---- pauses


def _paused(which: Callable[[FaultScene], Named]) -> Kind:
    @contextmanager
    def kind(scene: FaultScene) -> Iterator[Fault]:
        name, stopped = which(scene)
        stopped.pause()
        _hold(scene)
        yield Fault(name)
        stopped.resume()

    return kind


# ---- partitions


def _cut(which: Callable[[FaultScene], ClusterPart], wires: Callable[[ClusterPart], list[Proxy]]) -> Kind:
    """Reset all connections and refuse new ones."""

    @contextmanager
    def kind(scene: FaultScene) -> Iterator[Fault]:
        part = which(scene)
        for proxy in wires(part):
            scene.cluster.wires.call(partial(proxy.cut, accept=False))
        _hold(scene)
        yield Fault(part.name)
        for proxy in wires(part):
            scene.cluster.wires.call(partial(setattr, proxy, "accepts", True))

    return kind


def _stalled(which: Callable[[FaultScene], ClusterPart], wires: Callable[[ClusterPart], list[Proxy]]) -> Kind:
    """Stall all connections without an error; the data arrive late, at the end of the fault."""

    @contextmanager
    def kind(scene: FaultScene) -> Iterator[Fault]:
        part = which(scene)
        for proxy in wires(part):
            scene.cluster.wires.call(proxy.stall)
        _hold(scene)
        yield Fault(part.name)
        for proxy in wires(part):
            scene.cluster.wires.call(proxy.resume)

    return kind


def _gateway(scene: FaultScene) -> ClusterPart:
    return scene.of(scene.cluster.gateways)


def _leader(scene: FaultScene) -> ClusterPart:
    return scene.cluster.leader()


def _agent(scene: FaultScene) -> ClusterPart:
    return scene.of(scene.cluster.agents)


def _engine(scene: FaultScene) -> ClusterPart:
    return scene.of(scene.cluster.engines)


def _node(scene: FaultScene) -> tuple[str, rabbitmq.RabbitServer]:
    number = int(scene.rng.integers(len(scene.cluster.rabbit.nodes)))
    return f"rabbitmq-{number}", scene.cluster.rabbit.nodes[number]


def _postgresql(scene: FaultScene) -> Named:
    return "postgresql", scene.cluster.database


def _named(which: Callable[[FaultScene], ClusterPart]) -> Callable[[FaultScene], Named]:
    def named(scene: FaultScene) -> Named:
        part = which(scene)
        return part.name, part

    return named


def _endpoint(scene: FaultScene, part: ClusterPart) -> Endpoint | None:
    """Return the endpoint of a gateway; None for other parts."""
    return next((one for one in scene.endpoints if one.port == part.port), None)


def _wires(part: ClusterPart) -> list[Proxy]:
    return part.wires


def _database(part: ClusterPart) -> list[Proxy]:
    return part.database


KINDS: dict[str, Kind] = {
    "gateway killed": _killed(_gateway),
    "controller killed": _killed(_leader),
    "agent killed": _killed(_agent),
    "engine killed": _killed(_engine),
    "RabbitMQ node killed": _node_killed,
    "PostgreSQL restarted": _database_restarted,
    "PostgreSQL's disk full": _disk_full,
    "gateway paused": _paused(_named(_gateway)),
    "controller paused": _paused(_named(_leader)),
    "agent paused": _paused(_named(_agent)),
    "engine paused": _paused(_named(_engine)),
    "RabbitMQ node paused": _paused(_node),
    "PostgreSQL paused": _paused(_postgresql),
    "gateway cut off from RabbitMQ": _cut(_gateway, _wires),
    "controller cut off from RabbitMQ": _cut(_leader, _wires),
    "agent cut off from RabbitMQ": _cut(_agent, _wires),
    "gateway cut off from PostgreSQL": _cut(_gateway, _database),
    "gateway's wire to RabbitMQ silent": _stalled(_gateway, _wires),
    "controller's wire to RabbitMQ silent": _stalled(_leader, _wires),
    "agent's wire to RabbitMQ silent": _stalled(_agent, _wires),
    "gateway's wire to PostgreSQL silent": _stalled(_gateway, _database),
}
