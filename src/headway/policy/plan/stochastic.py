"""The plan generator's stochastic program (QLM 7, equations 6 to 13), solved by HiGHS.

Binary x[g, i, j] puts group i at position j of virtual queue g (equation 6). Models follow from it, and so do
swaps: t[g, j] is 1 where the model differs from that before (equation 9, big-M); what a swap takes depends on
both models. Start and completion times add up along the queue (equation 10). The chance constraint
P(p <= 0) > Delta (equation 12) has, for normal completion times, a deterministic equivalent: the mean and z
standard deviations lie before the deadline. The standard deviation of a sum is not linear; its tangent is,
and lies above it, so that what the program holds to be safe is safe. Where not all groups can meet the
constraint, which equation 12 leaves open, the program loses as little as it can: each level of
`queue_order.LEVELS` that a group misses costs its share.

The number of binaries grows with groups x positions x instances, so this is for small problems;
`queue_order.search` optimises the same objective for any size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.policy.plan.queue_order import LATE, TARDY, WAITING, PlanProblem, QueueOrder, cost_of, order_of
from headway.types import Bools, Floats

_GAP = 1e-4


@dataclass(frozen=True, slots=True)
class Solution:
    """An order and its cost by `queue_order.cost_of`.

    proved: HiGHS proved that no other has a lower one (to 0.01 %); otherwise a limit ended the search.
    """

    order: QueueOrder
    cost: float
    proved: bool


def solve(problem: PlanProblem, start: QueueOrder, time_limit: float, nodes: int = 100_000) -> Solution:
    """Return the best order that HiGHS finds, or `start` when it finds none better.

    start: from which it begins. time_limit: seconds. nodes: of its search tree, a limit that does not depend
    on the machine.
    """
    first = Solution(start, float(cost_of(problem, start.items, start.length)), proved=False)
    if problem.size.size == 0:
        return Solution(start, first.cost, proved=True)
    program = _Program(problem)
    program.begin_at(start)
    proved = program.run(time_limit, nodes)
    found = program.order()
    if found is None:
        return first
    cost = float(cost_of(problem, found.items, found.length))
    return Solution(found, cost, proved) if cost < first.cost else Solution(start, first.cost, proved)


def _missed(late: list[Any]) -> Any:
    """Return the share of a group's requests that is late, by the levels that it misses."""
    return sum(share * missed for share, missed in zip(LATE, late, strict=True))


def _horizon(p: PlanProblem) -> float:
    """Return seconds after which every queue has drained in any order: the big M."""
    able = np.isfinite(p.share)
    swap = float(np.max(p.swap, where=np.isfinite(p.swap), initial=0.0))
    each = np.max(np.where(able, p.share + p.finish, 0.0), axis=0) + swap
    return float(
        each.sum() + p.ready.max() + float(p.z.max()) * math.sqrt(float(np.where(able, p.variance, 0.0).sum()))
    )


class _Program:
    """The mixed-integer program of one problem."""

    def __init__(self, problem: PlanProblem) -> None:
        import highspy  # 5 MB, which only fleets that swap models need

        self.p, self.h = problem, highspy.Highs()
        self._optimal = highspy.HighsModelStatus.kOptimal
        self.h.setOptionValue("output_flag", False)
        self.h.setOptionValue("threads", 1)
        self.h.setOptionValue("mip_rel_gap", _GAP)
        self.big = _horizon(problem)
        self.groups, self.instances = problem.size.size, problem.loaded.size
        self.able = self._able()
        self.late = [[self.h.addBinary() for _ in LATE] for _ in range(self.groups)]
        self.tardy = [self.h.addVariable(0.0, math.inf) for _ in range(self.groups)]
        self.starts = [self.h.addVariable(0.0, self.big) for _ in range(self.groups)]
        self.x: dict[tuple[int, int, int], Any] = {}
        for g in range(self.instances):
            for j in range(int(self.able[g].sum())):
                for i in np.flatnonzero(self.able[g]).tolist():
                    self.x[g, i, j] = self.h.addBinary()
        self.loading: Any = 0.0  # seconds of all swaps
        self._assign()
        for g in range(self.instances):
            self._queue(g)
        late = sum(
            float(n) * (_missed(self.late[i]) + TARDY * self.tardy[i] + WAITING * self.starts[i])
            for i, n in enumerate(problem.size)
        )
        self.h.minimize(late + problem.away * self.loading)

    def _able(self) -> Bools:
        p = self.p
        swap = p.swap[np.arange(p.loaded.size)[:, None], p.loaded[:, None], p.model[None, :]]
        can = np.isfinite(p.share) & (np.isfinite(swap) | (p.model[None, :] == p.loaded[:, None]))
        fixed = (p.fixed[None, :] < 0) | (p.fixed[None, :] == np.arange(p.loaded.size)[:, None])
        return np.asarray(can & fixed, np.bool_)

    def _positions(self, g: int) -> int:
        return int(self.able[g].sum())

    def _assign(self) -> None:
        """Equation 6; positions are filled from the head, so that no "empty" groups are needed."""
        for i in range(self.groups):
            places = [x for (_, group, _), x in self.x.items() if group == i]
            self.h.addConstr(sum(places) == 1)
        for g in range(self.instances):
            used = [self._at(g, j) for j in range(self._positions(g))]
            for j, here in enumerate(used):
                self.h.addConstr(sum(here.values()) <= 1)
                if j:
                    self.h.addConstr(sum(here.values()) <= sum(used[j - 1].values()))

    def _at(self, g: int, j: int) -> dict[int, Any]:
        return {i: self.x[g, i, j] for i in np.flatnonzero(self.able[g]).tolist()}

    def _queue(self, g: int) -> None:
        """Equations 7 to 10 along one queue; what is ahead counts from the last swap on."""
        p, h, big = self.p, self.h, self.big
        base: Any = float(p.ready[g])
        end: Any = float(p.ready[g])
        ahead: Any = 0.0
        variance: Any = 0.0
        for j in range(self._positions(g)):
            here = self._at(g, j)
            swapped = self._swapped(g, j, here)
            new_base, new_ahead, new_end = (h.addVariable(0.0, big) for _ in range(3))
            load = self._load(g, j, here)
            self.loading = self.loading + load
            h.addConstr(new_base >= base)
            h.addConstr(new_base >= end + load - big * (1 - swapped))
            h.addConstr(new_ahead >= ahead - big * swapped)
            room, share = _sum(p.room[g], here), _sum(p.share[g], here)
            beyond = _sum(p.share[g] - p.room[g], here)
            first, last = h.addVariable(0.0, big), h.addVariable(0.0, big)
            h.addConstr(first >= new_base)
            h.addConstr(first >= new_base + new_ahead - room)
            h.addConstr(last >= new_base)
            h.addConstr(last >= new_base + new_ahead + beyond)
            h.addConstr(new_end >= end)
            h.addConstr(new_end >= last + _sum(p.finish[g], here))
            before, variance = variance, variance + _sum(p.variance[g], here)
            for i, x in here.items():
                h.addConstr(self.starts[i] >= last - 2 * big * (1 - x))
                for level in range(len(LATE)):
                    margins = self._margin(g, before, level), self._margin(g, variance, level)
                    self._late(i, level, x, first + margins[0], float(p.first[level, g, i]))
                    self._late(i, level, x, last + margins[1], float(p.last[level, g, i]))
            base, end, ahead = new_base, new_end, new_ahead + share

    def _margin(self, g: int, variance: Any, level: int) -> Any:
        """Return z standard deviations as the tangent of the root, at the variance of half the queue."""
        p = self.p
        middle, z = float(np.where(self.able[g], p.variance[g], 0.0).sum()) / 2, float(p.z[level])
        if middle == 0 or z == 0:
            return 0.0
        return (z / (2 * math.sqrt(middle))) * variance + z * math.sqrt(middle) / 2

    def _swapped(self, g: int, j: int, here: dict[int, Any]) -> Any:
        """Return t[g, j] of equation 9: 1 where a group is here whose model is not that of the one before."""
        p, t = self.p, self.h.addBinary()
        for model in np.unique(p.model[list(here)]).tolist():
            mine = sum(x for i, x in here.items() if p.model[i] == model)
            if j == 0:
                self.h.addConstr(t >= mine if model != p.loaded[g] else t + mine <= 1)
            else:
                before = sum(x for i, x in self._at(g, j - 1).items() if p.model[i] == model)
                self.h.addConstr(t >= mine - before)
                self.h.addConstr(t + mine + before <= 2)
        return t

    def _load(self, g: int, j: int, here: dict[int, Any]) -> Any:
        """Return seconds that are at least those of the swap at a position, which the two models decide."""
        p = self.p
        if j == 0:
            return _sum(np.where(p.model == p.loaded[g], 0.0, p.swap[g, p.loaded[g], p.model]), here)
        load, before = self.h.addVariable(0.0, self.big), self._at(g, j - 1)
        for old in np.unique(p.model[list(before)]).tolist():
            was = sum(x for i, x in before.items() if p.model[i] == old)
            seconds = np.where(p.model == old, 0.0, p.swap[g, old, p.model])
            most = float(np.max(seconds[list(here)], where=np.isfinite(seconds[list(here)]), initial=0.0))
            self.h.addConstr(load >= _sum(seconds, here) - most * (1 - was))
        return load

    def _late(self, i: int, level: int, x: Any, when: Any, latest: float) -> None:
        """Equations 11 and 12, made soft, for a group that may be at this position."""
        if not math.isfinite(latest):
            return
        # A latest start in the past adds to the lateness, so the big M must cover it, too.
        big = 3 * self.big + abs(latest)
        self.h.addConstr(when - latest <= big * self.late[i][level] + big * (1 - x))
        if level == 0:
            self.h.addConstr(self.tardy[i] >= when - latest - big * (1 - x))

    def begin_at(self, order: QueueOrder) -> None:
        """Give HiGHS a place to begin at (its binaries; the rest follows)."""
        chosen = {(g, i, j) for g in range(self.instances) for j, i in enumerate(order.queue(g))}
        places = list(self.x)
        index = np.array([self.x[place].index for place in places], np.int32)
        value = np.array([float(place in chosen) for place in places])
        self.h.setSolution(len(index), index, value)

    def run(self, time_limit: float, nodes: int) -> bool:
        """Solve; tell whether the optimum was proved."""
        self.h.setOptionValue("time_limit", time_limit)
        self.h.setOptionValue("mip_max_nodes", nodes)
        self.h.run()
        return bool(self.h.getModelStatus() == self._optimal)

    def order(self) -> QueueOrder | None:
        """Return the order found, None = there is none yet."""
        values: Floats = np.array(self.h.getSolution().col_value)
        if values.size == 0 or not np.isfinite(self.h.getInfo().objective_function_value):
            return None
        queues: list[list[int]] = []
        for g in range(self.instances):
            placed = [(j, i) for (other, i, j), x in self.x.items() if other == g and values[x.index] > 0.5]
            queues.append([i for _, i in sorted(placed)])
        return order_of(queues, self.groups)


def _sum(column: Floats, here: dict[int, Any]) -> Any:
    """Return the value of a column for whichever group is at a position; 0 where none is."""
    terms = ((round(float(column[i]), 6), x) for i, x in here.items() if math.isfinite(column[i]))
    return sum(value * x for value, x in terms if value)  # HiGHS refuses coefficients near 0
