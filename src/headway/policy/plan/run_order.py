"""The order of the default recipe: by what is due, promised or not; what is late comes after it.

A request without a promise is due at its soft target. One of a run counts from where its run began, and the
further behind the more service the run still needs (Hermes 3.3): a short run overtakes a long one, but none
waits for ever. Where there are several tenants, what was not promised comes after what was, in turns of its
tenants (`tenant_turns.py`).

Ranks of runs are compiled, which takes seconds and 130 MB. A host that must not stand still for that has it
done in a thread when the first run comes (`prepare`); until then requests of runs stand like those without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from headway.events import Arrived, Event, Failed, Finished, RunEnded, Started, UnitBegan, UnitEnded
from headway.policy.apps.demand import Knowledge
from headway.policy.apps.prewarming import Prewarming
from headway.policy.apps.runs import Futures, RankOptions, Runs, prepare
from headway.policy.core.cluster import Cluster
from headway.policy.core.ranks import BEST_EFFORT, BEYOND, LATE, ON_TIME
from headway.policy.plan.baselines.vtc import ANSWER_WEIGHT
from headway.policy.plan.ordered import Ordered
from headway.policy.plan.run_admission import RunAdmission
from headway.policy.plan.service_costs import ServiceCosts
from headway.policy.plan.tenant_parts import TenantParts
from headway.policy.plan.tenant_turns import TenantTurns
from headway.policy.plan.waiting import Entry
from headway.types import Backlog, Ints, Plan, Request, Send

_FIRST = 1e-6  # the least rank among best effort: packers take positive ones as such
_NEWEST = 0.05  # weight of the newest best-effort request without a run in the mean of what they need


class RunOrder(Ordered):
    """Best effort knows runs of applications, once there are any.

    ahead: as in `Ordered`.
    stretch: seconds that a second of service which a run still needs puts it behind.
    knowledge: graphs to begin with. futures: as in `Runs`.

    Attributes:
        runs: the live ones.
    """

    follows_runs = True

    def __init__(
        self,
        kind: int,
        *,
        ahead: int | None = None,
        stretch: float = 10.0,
        knowledge: Knowledge | None = None,
        futures: Futures | None = None,
    ) -> None:
        super().__init__(kind, ahead=ahead)
        self.runs = Runs(knowledge or Knowledge(), RankOptions(), futures)
        self._stretch = stretch
        self._admission = RunAdmission(self.runs, stretch)
        self.held = self._admission.held
        self._costs = ServiceCosts()
        self._stands: dict[str, float] = {}  # by id: from when it counts, or its tenant's turn
        self._plain = 0.0  # seconds of service that best effort without a run needs, mean; 0 = none came
        self._turns: TenantTurns | None = None
        self._parts: TenantParts | None = None
        self._beyond: set[str] = set()  # promises beyond their tenants' fair shares, by id
        self._early: list[Callable[[], None]] | None = None  # what the runs are told once they are compiled

    @property
    def wake_at(self) -> float:
        """The instant of the next warm-up, or at which a run may be admitted."""
        return min(self.runs.prewarming.wake_at, self._admission.wake_at)

    @property
    def knowledge(self) -> Knowledge:
        """The applications' graphs."""
        return self.runs.knowledge

    @property
    def prewarming(self) -> Prewarming:
        """What it plans to warm ahead."""
        return self.runs.prewarming

    def run_rest(self, tenant: str, app: str, run: str, now: float) -> float | None:
        """Return the expected seconds of service that a live run still needs."""
        return self.runs.rest((tenant, app, run), now)

    def take_turns(self) -> None:
        """Serve best effort in turns of its tenants, and give up promises beyond their parts first."""
        self._turns, self._parts = TenantTurns(), TenantParts()

    @property
    def thinks(self) -> bool:
        """Tell whether runs wait to be compiled."""
        return bool(self._early)

    def prepare(self) -> None:
        """Let what ranks of runs need be compiled in a thread, when the first one comes (`deliberate`)."""
        self._early = []

    def deliberate(self, cluster: Cluster, now: float) -> Callable[[], object] | None:
        """Return what compiles ranks of runs, if the first run has come."""
        return prepare if self._early else None

    def conclude(self, result: object, cluster: Cluster, now: float) -> None:
        """Tell the runs what has happened in the meantime."""
        early, self._early = self._early or [], None
        for tell in early:
            tell()

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Tell the live runs what has happened, and queue what has come."""
        self._costs.note(event)
        if isinstance(event, Arrived):
            self._arrived(event.request, cluster, now)
        elif self._early or (self._early is not None and isinstance(event, UnitBegan | UnitEnded | RunEnded)):
            self._early.append(partial(self.runs.note, event, now))
        else:
            self.runs.note(event, now)
        self._admission.note(event, now)
        super().on(event, cluster, now)
        match event:
            case Started(id) if self._turns is not None:
                self._turns.began(id)
            case Finished(id, output_tokens) if self._turns is not None:
                self._turns.ended(id, output_tokens)
            case Failed(id) if self._turns is not None:
                self._turns.ended(id, None)
        if self._parts is not None:
            self._count(self._parts, event, now)
        if self._stands and isinstance(event, Finished | Failed):
            self._stands.pop(event.id, None)

    def _count(self, parts: TenantParts, event: Event, now: float) -> None:
        match event:
            case Finished(id, output_tokens):
                parts.ended(id, output_tokens, now)
                self._beyond.discard(id)
            case Failed(id):
                parts.ended(id, None, now)
                self._beyond.discard(id)

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return what belongs inside by its place in the order, and what is to be warmed."""
        for id in self._admission.enter(cluster, now):
            self._push(cluster, cluster.backlog.row_of[id])
        plan = super().plan(cluster, now)
        if self.runs:
            self.runs.refresh(now)
        # Also those of runs that have ended are taken out, or the host would be woken for them for ever.
        prewarm = self.runs.prewarming.due(now)
        return replace(plan, prewarm=prewarm) if prewarm else plan

    def _arrived(self, request: Request, cluster: Cluster, now: float) -> None:
        backlog, runs = cluster.backlog, self.runs
        row = backlog.row_of[request.id]
        if (costs := self._costs.changed(cluster)) is not None:
            runs.costs = costs
        expected = float(backlog.tokens[row] - backlog.prompt[row])
        due = backlog.due.item(row)
        promised = due < math.inf
        if promised and self._parts is not None:
            asked = request.id, request.tenant, request.prompt_tokens, expected
            if self._parts.beyond(*asked, due, now):
                self._beyond.add(request.id)
        if request.stage is not None and self._early is not None:
            self._early.append(partial(runs.arrived, request, expected, now))
        if request.stage is None or self._early is not None:
            if not promised:
                needs = request.prompt_tokens * runs.costs.delay + expected * runs.costs.output
                self._plain += _NEWEST * (needs - self._plain) if self._plain else needs
                if self._turns is not None:
                    instant = request.arrival + (request.slo.soft or 0.0)
                    self._stands[request.id] = self._stands_at(request, expected, instant)
            return
        runs.arrived(request, expected, now)
        if promised and self._turns is not None:
            return
        runs.refresh(now)
        run = runs.run_of(request.id)
        more = float(runs.rank[run.slot]) - self._plain
        stands = self._stands[request.id] = self._stands_at(request, expected, run.began + self._stretch * more)
        if request.slo.objective == "best_effort":
            self._admission.came(request, stands, cluster)

    def _stands_at(self, request: Request, expected: float, instant: float) -> float:
        """Return where best effort of a run stands: at this instant, or that much off its tenant's turn."""
        if self._turns is None:
            return instant
        tokens = (instant - request.arrival) * ANSWER_WEIGHT / max(self.runs.costs.output, _FIRST)
        return self._turns.take(request.id, request.tenant, request.prompt_tokens, expected, tokens)

    def _entry(self, backlog: Backlog, row: int) -> Entry:
        return self._placed(backlog, super()._entry(backlog, row))

    def _entries(self, backlog: Backlog, rows: Ints) -> Iterator[Entry]:
        return (self._placed(backlog, entry) for entry in super()._entries(backlog, rows))

    def _placed(self, backlog: Backlog, entry: Entry) -> Entry:
        """Put best effort at its turn, and promises that are given up first behind the others."""
        if entry[0] != BEST_EFFORT:
            beyond = backlog.expendable[entry[4]] or (self._beyond and str(backlog.keys[entry[4]]) in self._beyond)
            return (LATE, *entry[1:]) if beyond else entry
        stands, arrival = self._stands, entry[2]
        at = stands.get(str(backlog.keys[entry[4]]), arrival) if stands else arrival
        if self._turns is not None:
            return (BEST_EFFORT, at, *entry[2:])
        return (ON_TIME, at + backlog.soft.item(entry[4]), *entry[2:])

    def _send(self, cluster: Cluster, row: int, name: str) -> Send:
        """Tell the engine where a request stands, so that the packer orders by it, too; `BEYOND` as well."""
        send, backlog = super()._send(cluster, row, name), cluster.backlog
        if send.id in self._beyond or backlog.expendable[row]:
            return replace(send, rank=BEYOND)
        if send.id not in self._stands:
            return send
        stand = self._stands[send.id]
        if self._turns is not None:
            return replace(send, rank=max(stand, _FIRST))
        arrival, due = backlog.arrival.item(row), backlog.due.item(row)
        target = due - arrival if due < math.inf else backlog.soft.item(row)
        return replace(send, soft=stand - arrival + target)
