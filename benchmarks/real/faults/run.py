"""One run: a series of faults under load, recorded one by one, and the verdict on the clients' history."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from benchmarks.real.faults.kinds import KINDS, FaultScene
from benchmarks.real.soak_clients import Clients, Endpoint, Verdict, check, probe
from headway.errors import ConfigError
from testing.servers.parts import ClusterPart, ClusterShape, HeadwayCluster, clusters

PATIENCE_S = 60.0  # time limit for a recovery
_BETWEEN_S = (0.1, 0.5)  # from a recovery to the next fault
_PAUSE_S = 0.4  # between two requests of a client: a light load
_READERS = 12  # clients of long streams


@dataclass(frozen=True, slots=True)
class FaultSizes:
    """The number of faults and of RabbitMQ nodes, and the longest pause or cut in seconds."""

    faults: int
    nodes: int
    longest_s: float


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """A fault that has happened.

    at: seconds since the start of the run. lasted: seconds until the part was resumed or restarted.
    recovered: seconds from then until every gateway was ready and had answered a new request; None = not
    within `PATIENCE_S`.
    """

    number: int
    kind: str
    target: str
    at: float
    lasted: float
    recovered: float | None

    def line(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True, slots=True)
class FaultsOutcome:
    """The faults of a run, and the verdict on the clients' requests.

    told: requests answered with an error. refused: requests refused with 429 or 503, to be sent again.
    nodes: RabbitMQ nodes. streams: how many long streams were whole, broken, lost, twice or with a gateway that is
    gone. moved: those that several engines have computed. broken: errors by id.
    """

    records: tuple[FaultRecord, ...]
    verdict: Verdict
    told: int
    refused: int
    nodes: int
    streams: Counter[str]
    moved: int
    broken: dict[str, str]


def drawn(count: int, only: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Return kinds of faults in random order, equally often. Raise ConfigError for an unknown kind."""
    if unknown := [name for name in only if name not in KINDS]:
        raise ConfigError(f"There is no fault {unknown[0]!r}.", f"Use some of: {', '.join(KINDS)}.", param="only")
    kinds = list(only or KINDS)
    rounds = -(-count // len(kinds))
    return [kinds[i] for _ in range(rounds) for i in rng.permutation(len(kinds))][:count]


def measure(
    folder: Path, sizes: FaultSizes, seed: int, tick: Callable[[str], None], journal: IO[str], only: Sequence[str] = ()
) -> FaultsOutcome:
    """Inject faults under load, then wait until all accepted requests have ended.

    tick: called before each fault. journal: receives each fault as it ends, so that an interrupted run leaves
    its findings.
    """
    rng = np.random.default_rng([seed, 17])
    kinds = drawn(sizes.faults, only, rng)
    with clusters(folder, ClusterShape(sizes.nodes, proxies=True)) as cluster:
        endpoints = [Endpoint(part.port, lives=1) for part in cluster.gateways]
        clients, scene, records = (
            Clients(endpoints, seed, pause=_PAUSE_S, readers=_READERS),
            FaultScene(cluster, endpoints, rng, sizes.longest_s),
            list[FaultRecord](),
        )
        began = time.monotonic()
        with clients.running():
            _recovery(cluster.gateways, endpoints)
            for number, kind in enumerate(kinds):
                tick(kind)
                records.append(_strike(scene, number, kind, began))
                journal.write(records[-1].line())
                journal.flush()
                time.sleep(float(rng.uniform(*_BETWEEN_S)))
        _settle(cluster, clients)
        computed = Counter(cluster.computed())
    history = clients.history
    history.computed.update({id: count for id, count in computed.items() if id in history.looks})
    return FaultsOutcome(
        tuple(records),
        check(history),
        history.told,
        clients.refused,
        sizes.nodes,
        streams=Counter(kind for kind, _ in history.streams.values()),
        moved=sum(computed[id] > 1 for id in history.streams),
        broken={id: error for id, (kind, error) in history.streams.items() if kind == "broken"},
    )


def _strike(scene: FaultScene, number: int, kind: str, began: float) -> FaultRecord:
    at = time.monotonic()
    with KINDS[kind](scene) as fault:
        pass
    undone = time.monotonic()
    recovered = _recovery(scene.cluster.gateways, scene.endpoints)
    return FaultRecord(number, kind, fault.target, at - began, undone - at, recovered)


def _recovery(gateways: Sequence[ClusterPart], endpoints: Sequence[Endpoint]) -> float | None:
    """Return the seconds until every gateway is ready and answers a new request; None = it took too long."""
    began = time.monotonic()

    async def well(part: ClusterPart, endpoint: Endpoint) -> None:
        while not (await asyncio.to_thread(part.ready) and await probe(part.port)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        endpoint.lives += not endpoint.lives_now

    async def all_well() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*map(well, gateways, endpoints))

    try:
        asyncio.run(all_well())
    except TimeoutError:
        return None
    return time.monotonic() - began


def _settle(cluster: HeadwayCluster, clients: Clients) -> None:
    """Wait until all parts are ready and every gateway reports all accepted requests as ended."""
    cluster.wait()
    asyncio.run(clients.look_at_all())
