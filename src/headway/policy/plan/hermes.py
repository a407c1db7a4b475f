"""Hermes: runs of applications by the work that they have left (Hermes 3.3).

Every request has the rank of its run, in the queue and inside the engines. Ranks change while requests wait
and run (`Rerank`). A request that belongs to no application is a run of its own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway.events import Arrived, Event
from headway.policy.apps.demand import Knowledge
from headway.policy.apps.prewarming import Prewarming, PrewarmOptions
from headway.policy.apps.run import Run
from headway.policy.apps.runs import Futures, RankOptions, Runs, prepare
from headway.policy.core.cluster import Cluster
from headway.policy.plan.dispatch import sends, virtual_queue
from headway.policy.plan.request_column import RequestColumn
from headway.policy.plan.service_costs import ServiceCosts
from headway.ports import Planner
from headway.types import Floats, Ints, Plan, Rerank, Send


class Hermes(Planner):
    """Ranks runs, and sends the requests of the lowest ranks.

    runs: the live runs.
    """

    reranks = True

    def __init__(
        self,
        options: RankOptions,
        knowledge: Knowledge | None = None,
        futures: Futures | None = None,
        prewarm: PrewarmOptions | None = None,
    ) -> None:
        prewarming = Prewarming(prewarm or PrewarmOptions())
        known = Knowledge() if knowledge is None else knowledge
        self.runs = Runs(known, options, futures, prewarming)
        self._slot = RequestColumn()
        self._costs = ServiceCosts()

    @property
    def prewarming(self) -> Prewarming:
        """What it plans to warm ahead."""
        return self.runs.prewarming

    @property
    def wake_at(self) -> float:
        """The instant of the next warm-up."""
        return self.prewarming.wake_at

    @property
    def knowledge(self) -> Knowledge:
        """The applications' graphs."""
        return self.runs.knowledge

    def rank(self, id: str) -> float:
        """Return the rank of the request's run."""
        return float(self.runs.rank[self.runs.run_of(id).slot])

    def run_rest(self, tenant: str, app: str, run: str, now: float) -> float | None:
        """Return the expected seconds of service that a live run still needs."""
        return self.runs.rest((tenant, app, run), now)

    def prepare(self) -> None:
        """Compile what ranks of runs need."""
        prepare()

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Tell the live runs what has happened."""
        runs, backlog = self.runs, cluster.backlog
        self._costs.note(event)
        match event:
            case Arrived(request):
                row = backlog.row_of[request.id]
                runs.arrived(request, float(backlog.tokens[row] - backlog.prompt[row]), now)
                self._slot.put(backlog, np.array([row]), runs.run_of(request.id).slot)
            case _:
                runs.note(event, now)

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return what belongs inside by rank, and the ranks that have changed of what is inside."""
        costs = self._costs.changed(cluster)
        if costs is not None:
            # Deadlines are a matter of the time that a run itself takes.
            deadlines = self.runs.options.rank == "slack"
            self.runs.costs = costs._replace(delay=costs.prompt) if deadlines else costs
        changed = self.runs.refresh(now)
        backlog = cluster.backlog
        rows = backlog.rows()
        ranks = self._ranks(cluster, rows)
        order = np.lexsort((backlog.serial[rows], ranks))
        ranked = np.asarray(rows[order], np.int64)
        queues = {name: virtual_queue(cluster, name, ranked) for name in cluster.instances}
        out = [self._with_rank(cluster, send) for send in sends(queues, cluster, now)]
        reranks, prewarm = self._reranks(cluster, changed), self.prewarming.due(now)
        return Plan(out, rerank=reranks, prewarm=prewarm, final=len(cluster.instances) == 1)

    def _ranks(self, cluster: Cluster, rows: Ints) -> Floats:
        slots = self._slot.get(cluster.backlog, rows)
        known = ~np.isnan(slots)
        ranks = np.full(rows.size, np.inf)
        ranks[known] = self.runs.rank[slots[known].astype(np.int64)]
        return ranks

    def _with_rank(self, cluster: Cluster, send: Send) -> Send:
        return replace(send, rank=float(self.runs.rank[self.runs.run_of(send.id).slot]))

    def _reranks(self, cluster: Cluster, changed: list[Run]) -> list[Rerank]:
        """Return the new ranks of those runs' requests that are inside engines."""
        names = {cluster.code(name): name for name in cluster.instances}
        ranks: dict[str, dict[str, float]] = {}
        backlog = cluster.backlog
        for run in changed:
            for id in sorted(run.requests):
                row = backlog.row_of[id]
                name = names.get(int(backlog.instance[row])) if backlog.sent[row] else None
                if name is not None:
                    ranks.setdefault(name, {})[id] = float(self.runs.rank[run.slot])
        return [Rerank(name, by_id) for name, by_id in ranks.items()]
