"""Request groups (QLM 4, definition 4.1 and algorithm 1): queued requests that are planned for as one.

Requests of one kind (model, SLO, input and output tokens) with deadlines near to each other form a group. A
group holds references to rows of the backlog, served first come, first served; a request leaves it when it is
sent, and a group without requests disappears. Kinds are found by k-means over recent arrivals.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from headway.policy.forecast.completion import Tokens
from headway.types import Backlog, Floats

_SEED = 0
_SPAN = 0.25  # deadlines of one group lie within this share of its SLO
_SLO_APART = 0.3  # logarithm of the ratio from which two SLOs are never of one kind
_ARRIVED, _RETURNED, _BEGUN, _LOST = "arrived", "returned", "begun", "lost"
_NO_SLO = 1e6  # seconds: how far away best effort is from every SLO, as k-means sees it


@dataclass(frozen=True, slots=True)
class Sort:
    """What requests of one kind always have in common.

    model: code in the backlog. objective: index into `OBJECTIVES`. size: of the shortest instance limit that
    holds the request, as an index.
    """

    model: int
    objective: int
    size: int


@dataclass(slots=True)
class Kind:
    """A cluster of requests alike.

    centre: log seconds of the SLO, log prompt tokens, log output tokens.
    prompt, output, square: running means of prompt tokens, output tokens and their squares (O_q, equation 3).
    """

    id: int
    sort: Sort
    centre: Floats
    prompt: float
    output: float
    square: float
    seen: int = 0

    @property
    def tokens(self) -> Tokens:
        """The tokens of its requests."""
        return Tokens(self.prompt, self.output, math.sqrt(max(self.square - self.output**2, 0.0)))

    def asked(self, prompt: float, weight: float = 0.02) -> None:
        """Note an arrival's prompt."""
        self.prompt += weight * (prompt - self.prompt)

    def answered(self, output: float) -> None:
        """Note an answer's length: a running mean that forgets after some hundred answers."""
        self.seen += 1
        weight = max(1.0 / (self.seen + 1), 0.005)
        self.output += weight * (output - self.output)
        self.square += weight * (output * output - self.square)


@dataclass(slots=True)
class Group:
    """Queued requests of one kind, served first come, first served.

    entries: (row, serial) of the backlog; those of requests that have left are dropped when they come to the
        head.
    size: requests that are still queued.
    first, last: deadlines of the oldest and of the youngest; inf = best effort.
    longest: tokens that the longest of them may need.
    instance: on whose virtual queue it stands, "" = on none yet.
    rank: its place there, lower first.
    lost: its requests are overdue. begun: answers that stream and have begun, which go on also when they are overdue.
    """

    id: int
    kind: Kind
    entries: deque[tuple[int, int]] = field(default_factory=deque)
    size: int = 0
    first: float = math.inf
    last: float = math.inf
    longest: int = 0
    instance: str = ""
    rank: float = 0.0
    lost: bool = False
    begun: bool = False

    def head(self, backlog: Backlog) -> int | None:
        """Return the row that is served next, None = the group is empty."""
        while self.entries and not waits(backlog, *self.entries[0]):
            self.entries.popleft()
        return self.entries[0][0] if self.entries else None

    def position(self, serial: int, backlog: Backlog) -> int:
        """Return how many of the group's requests go before one of them."""
        live = [other for row, other in self.entries if waits(backlog, row, other)]
        return live.index(serial)


def waits(backlog: Backlog, row: int, serial: int) -> bool:
    """Tell whether a row still belongs to the request that it was noted for, and that is queued."""
    return bool(backlog.live[row] and not backlog.sent[row] and backlog.serial[row] == serial)


class RequestGroups:
    """All request groups.

    delta: a group is split when it is larger than this many batches (QLM 4, 8.3).
    window: arrivals that kinds are found from.
    """

    def __init__(self, delta: float = 4.0, window: int = 2048) -> None:
        self.delta = delta
        self.groups: dict[int, Group] = {}
        self._of: dict[int, int] = {}  # serial of a queued request -> its group
        self._kinds: dict[Sort, list[Kind]] = {}
        # (id of a kind, which of its requests) -> the group that these join: those that arrive, come back, are overdue
        self._joins: dict[tuple[int, str], int] = {}
        self._recent: dict[Sort, deque[tuple[float, float, float]]] = {}
        self._fitted: dict[Sort, int] = {}
        self._arrived: dict[Sort, int] = {}
        self._window = window
        self._ids = itertools.count()
        self._kind_ids = itertools.count()

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

    # ---- requests

    def add(self, backlog: Backlog, row: int, size: int, batch: float) -> tuple[Group, Group | None]:
        """Put a queued row into the nearest group; return it, and the second half when it was split.

        size: see `Sort`. batch: mean batch size of the instances that serve its model.
        """
        kind = self.kind_of(backlog, row, size)
        due = float(backlog.due[row])
        group = self.groups.get(self._joins.get((kind.id, _ARRIVED), -1))
        if group is None or not _near(group, due, float(backlog.arrival[row])):
            group = self._new(kind, due)
        self._join(group, backlog, row, due)
        return group, self._split(group, backlog) if group.size > self.delta * batch else None

    def put_back(self, backlog: Backlog, row: int, kind: Kind, *, begun: bool = False) -> Group:
        """Put a request that was sent and has come back into a group of such requests. begun: as in `Group`."""
        due = float(backlog.due[row])
        key = kind.id, _BEGUN if begun else _RETURNED
        group = self.groups.get(self._joins.get(key, -1))
        if group is None or not _near(group, due, float(backlog.arrival[row])):
            group = self._new(kind, due, opens=False)
            group.begun, self._joins[key] = begun, group.id
        self._join(group, backlog, row, due)
        return group

    def give_up(self, group: Group, backlog: Backlog) -> Group:
        """Move a group's head, which is overdue, to the group of such requests of its kind there; return that."""
        (row, serial), key = group.entries.popleft(), (group.kind.id, f"{_LOST} {group.instance}")
        self.left(serial)
        lost = self.groups.get(self._joins.get(key, -1))
        if lost is None or lost.instance != group.instance:
            lost = self._new(group.kind, float(backlog.due[row]), opens=False)
            lost.lost, self._joins[key] = True, lost.id
        self._join(lost, backlog, row, float(backlog.due[row]))
        self.refresh(group, backlog)
        return lost

    def of(self, serial: int) -> Group | None:
        """Return the group of a queued request, None = it is in none."""
        return self.groups.get(self._of.get(serial, -1))

    def left(self, serial: int) -> Group | None:
        """Note that a request is not queued any more; return its group, if it was in one.

        The group is forgotten with its last request.
        """
        group = self.groups.get(self._of.pop(serial, -1))
        if group is not None:
            group.size -= 1
            if group.size == 0:
                self.forget(group)
        return group

    def forget(self, group: Group) -> None:
        """Forget a group."""
        del self.groups[group.id]
        for key in [key for key, id in self._joins.items() if id == group.id]:
            del self._joins[key]

    def refresh(self, group: Group, backlog: Backlog) -> None:
        """Bring a group's first deadline up to date with its head."""
        row = group.head(backlog)
        if row is not None:
            group.first = float(backlog.due[row])

    def _new(self, kind: Kind, due: float, opens: bool = True) -> Group:
        group = Group(next(self._ids), kind, first=due, last=due)
        self.groups[group.id] = group
        if opens:
            self._joins[kind.id, _ARRIVED] = group.id
        return group

    def _join(self, group: Group, backlog: Backlog, row: int, due: float) -> None:
        serial = int(backlog.serial[row])
        group.entries.append((row, serial))
        group.size += 1
        group.first, group.last = min(group.first, due), max(group.last, due)
        group.longest = max(group.longest, int(backlog.longest[row]))
        self._of[serial] = group.id

    def _split(self, group: Group, backlog: Backlog) -> Group:
        """Move the younger half of a group into a new one, which arrivals join from now on."""
        live = [entry for entry in group.entries if waits(backlog, *entry)]
        half = (len(live) + 1) // 2
        other = self._new(group.kind, float(backlog.due[live[half][0]]))
        for row, _ in live[half:]:
            self._join(other, backlog, row, float(backlog.due[row]))
        group.entries = deque(live[:half])
        group.size = half
        group.last = float(max(backlog.due[row] for row, _ in live[:half]))
        return other

    # ---- kinds

    def kind_of(self, backlog: Backlog, row: int, size: int) -> Kind:
        """Return the nearest kind of a request; a new sort of request opens one."""
        sort = Sort(int(backlog.model[row]), int(backlog.objective[row]), size)
        prompt = float(backlog.prompt[row])
        output = max(float(backlog.tokens[row]) - prompt, 1.0)
        slo = float(backlog.due[row] - backlog.arrival[row])
        point = (math.log(min(slo, _NO_SLO)), math.log(max(prompt, 1.0)), math.log(output))
        self._recent.setdefault(sort, deque(maxlen=self._window)).append(point)
        self._arrived[sort] = self._arrived.get(sort, 0) + 1
        kinds = self._kinds.setdefault(sort, [])
        near = [one for one in kinds if abs(one.centre[0] - point[0]) <= _SLO_APART]
        if not near:
            near = [self._kind(sort, np.array(point))]
            kinds += near
        kind = min(near, key=lambda one: _distance(one.centre, point))
        kind.asked(prompt)
        return kind

    def stale(self) -> list[Sort]:
        """Return the sorts of request of which twice as many have arrived as kinds were found from."""
        return [sort for sort, n in self._arrived.items() if n >= max(2 * self._fitted.get(sort, 0), 64)]

    def points(self, sort: Sort) -> Floats:
        """Return the recent arrivals of a sort as k-means sees them: (n, 3)."""
        return np.array(self._recent[sort])

    def refit(self, sort: Sort, centres: Floats) -> None:
        """Replace the kinds of a sort by clusters with these centres; queued groups keep the kind they have.

        A new kind takes over what the nearest old one has learned about its answers.
        """
        self._fitted[sort] = self._arrived[sort]
        old, new = self._kinds[sort], []
        for centre in centres:
            nearest = min(old, key=lambda one: _distance(one.centre, centre))
            kind = self._kind(sort, centre)
            if _distance(nearest.centre, centre) < 1.0:
                kind.output, kind.square, kind.seen = nearest.output, nearest.square, min(nearest.seen, 32)
            new.append(kind)
        gone = {kind.id for kind in old}
        self._joins = {key: id for key, id in self._joins.items() if key[0] not in gone}
        self._kinds[sort] = new

    def _kind(self, sort: Sort, centre: Floats) -> Kind:
        prompt, output = math.exp(centre[1]), math.exp(centre[2])
        # Until answers have been seen, lengths are taken to vary as much as those of an exponential.
        return Kind(next(self._kind_ids), sort, centre, prompt, output, 2.0 * output * output)


def _near(group: Group, due: float, arrival: float) -> bool:
    """Tell whether a deadline is near enough to those of a group."""
    if math.isinf(due) or math.isinf(group.first):
        return math.isinf(due) and math.isinf(group.first)
    return abs(due - group.first) <= _SPAN * max(due - arrival, 1e-3)


def _distance(one: Floats, other: Iterable[float]) -> float:
    return math.fsum((a - b) ** 2 for a, b in zip(one.tolist(), other, strict=True))


def centres_of(points: Floats, most: int = 4, enough: float = 0.3) -> Floats:
    """Return the centres of the fewest clusters that leave `enough` of the variance (k-means).

    points: (n, features). The SLO counts twice as much as the lengths: it decides about the plan.
    """
    from sklearn.cluster import KMeans  # takes a second to import, and most processes never need it
    from threadpoolctl import threadpool_limits

    weights = np.array([2.0, 1.0, 1.0])
    scaled = points * weights
    whole = float(((scaled - scaled.mean(axis=0)) ** 2).sum())
    centres = scaled.mean(axis=0, keepdims=True)
    distinct = len(np.unique(scaled, axis=0))
    for k in range(2, min(most, distinct) + 1):
        if whole / max(len(points), 1) < 0.05:  # all alike: within about a quarter of each other
            break
        with threadpool_limits(1):  # one core: this runs beside requests
            fit = KMeans(k, n_init=2, random_state=_SEED).fit(scaled)
        centres = fit.cluster_centers_
        if fit.inertia_ <= enough * whole:
            break
    return np.asarray(centres / weights, float)
