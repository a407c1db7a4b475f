"""Load balancers: round robin, random and least loaded.

A request is bound to one instance when it arrives and waits there, first come, first served, whatever happens
elsewhere. It is bound anew only when its instance dies or changes its model.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import Protocol

import numpy as np

from headway.policy.core.cluster import Cluster
from headway.policy.plan.dispatch import eligible, inside, sends
from headway.policy.plan.request_column import RequestColumn
from headway.ports import Planner
from headway.types import Floats, Ints, Plan


class Choice(Protocol):
    """Chooses the instance of the next request.

    names: all instances that serve its model, in the cluster's order.
    fits: those of them whose context is long enough for it; never empty.
    load: requests inside or bound, per instance.
    """

    def __call__(self, cluster: Cluster, names: list[str], fits: list[str], load: dict[str, int]) -> str: ...


class Router(Planner):
    """Binds each request to the instance that `choice` names, once."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._home = RequestColumn()

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return for each instance what is inside it and then what is bound to it, by arrival."""
        backlog = cluster.backlog
        rows = backlog.rows()
        rows = rows[np.lexsort((backlog.serial[rows], backlog.arrival[rows]))]
        self._bind(cluster, rows[~backlog.sent[rows]])
        home, lines = self._home.get(backlog, rows), {}
        for name in cluster.instances:
            there = inside(cluster, name, rows)
            bound = ~backlog.sent[rows] & (home == cluster.code(name))
            lines[name] = np.concatenate([rows[there], rows[bound]])
        return Plan(sends(lines, cluster, now))

    def _bind(self, cluster: Cluster, queued: Ints) -> None:
        """Give each queued request that has no home, or none that could serve it, a home."""
        home = self._home.get(cluster.backlog, queued)
        could = {name: eligible(cluster, name, queued) for name in cluster.instances}
        homeless = np.ones(queued.size, np.bool_)
        for name, those in could.items():
            homeless &= ~(those & (home == cluster.code(name)))
        if not homeless.any():
            return
        load = self._load(cluster, home[~homeless])
        for i in np.flatnonzero(homeless).tolist():
            row = queued[i : i + 1]
            fits = [name for name, those in could.items() if those[i]]
            if fits:
                model = cluster.instances[fits[0]].model
                names = [name for name in could if cluster.instances[name].model == model]
                name = self._choice(cluster, names, fits, load)
                self._home.put(cluster.backlog, row, cluster.code(name))
                load[name] += 1

    def _load(self, cluster: Cluster, bound: Floats) -> dict[str, int]:
        rows = cluster.backlog.rows()
        return {
            name: int(inside(cluster, name, rows).sum() + (bound == cluster.code(name)).sum())
            for name in cluster.instances
        }


class _InTurn:
    """One after another, per model; one with no room for this request is passed over."""

    def __init__(self) -> None:
        self._turn: defaultdict[str, int] = defaultdict(int)

    def __call__(self, cluster: Cluster, names: list[str], fits: list[str], load: dict[str, int]) -> str:
        model = cluster.instances[names[0]].model
        while True:
            name = names[self._turn[model] % len(names)]
            self._turn[model] += 1
            if name in fits:
                return name


def _emptiest(cluster: Cluster, names: list[str], fits: list[str], load: dict[str, int]) -> str:
    return min(fits, key=lambda name: load[name] / cluster.instances[name].max_running)


class _AtRandom:
    """Any instance that fits, drawn by a hash of a seed and a count: the same events, the same instances."""

    def __init__(self, seed: int) -> None:
        self._seed, self._drawn = seed, 0

    def __call__(self, cluster: Cluster, names: list[str], fits: list[str], load: dict[str, int]) -> str:
        self._drawn += 1
        drawn = blake2b(f"{self._seed} {self._drawn}".encode(), digest_size=8).digest()
        return fits[int.from_bytes(drawn, "big") % len(fits)]


def at_random(seed: int) -> Router:
    """Return a router that draws the instance of each request, each equally likely."""
    return Router(_AtRandom(seed))


def round_robin() -> Router:
    """Return a router that deals the requests of each model to its instances in turn."""
    return Router(_InTurn())


def least_loaded() -> Router:
    """Return a router to the instance with the fewest requests for its batch limit, the first of equals."""
    return Router(_emptiest)
