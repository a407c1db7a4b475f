"""What happens next in a run? Time moves from event to event.

Arrivals in order, and a heap of `(time, rank, serial)` for the ends of iterations, loads and plans, so that
equal inputs give equal runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headway.core.cluster import Cluster
from headway.core.controller import Controller
from headway.engines.simulated.engine import Ran
from headway.errors import ConfigError, HeadwayError
from headway.sim.instance import Preempted, SimulatedInstance, Submission
from headway.sim.observer import Observer
from headway.sim.outcome import Outcome
from headway.types import (
    Arrived,
    Command,
    Event,
    Failed,
    Finished,
    InstanceDown,
    InstanceUp,
    Reject,
    Returned,
    Send,
    Swap,
    Swapped,
    Tick,
    Warm,
    Warmed,
)

if TYPE_CHECKING:
    from headway.sim.run import Simulation

CHUNK = 2048  # arrivals between two reports of progress
_PATIENCE = 3600  # ticks without anything happening, after which what waits will wait for ever


class Loop:
    """One run's state: the fleet's hosts, the controller, and what is to happen when."""

    def __init__(self, simulation: Simulation, observer: Observer | None) -> None:
        self.workload, self.outcome = simulation.workload, Outcome.of(len(simulation.workload))
        self.observer = observer
        recipe = simulation.recipe
        planner = recipe.planner()
        self.controller = Controller(
            planner, simulation.lengths, simulation.max_queued, Cluster(pull=planner.pull)
        )
        self.hosts = {node.instance.id: SimulatedInstance(node, recipe) for node in simulation.nodes}
        self._codes = {name: i for i, name in enumerate(self.hosts)}
        self._plan_seconds, self._tick = simulation.plan_seconds, simulation.tick
        self._heap: list[tuple[float, int, int, str, str]] = []
        self._late: dict[int, Callable[[float], None]] = {}  # what overheads delay, by its serial
        self._serial = itertools.count()
        self._inbox: deque[Event] = deque()
        self._taken: dict[str, Preempted] = {}
        self._coming: list[Command] | None = None  # what the planner has decided and not said yet
        self._again = False
        self._running = 0  # iterations under way
        self._ends = {
            "iteration": self._iteration_ends, "loaded": self._loaded, "warmed": self._warmed,
            "down": self._down, "up": self._stands_up, "decided": self._decided,
            "late": self._happens,
        }  # fmt: skip
        for failure in simulation.failures:
            self._at(failure.at, "down", failure.instance)
            if math.isfinite(failure.seconds):
                self._at(failure.at + failure.seconds, "up", failure.instance)

    def go(self, progress: Callable[[int], None] | None, until: float) -> None:
        for host in self.hosts.values():
            self._tell(InstanceUp(host.instance()), 0.0)
        arrivals = self.workload.arrival.tolist()
        i, size, now, idle = 0, len(arrivals), 0.0, 0
        while now < until and (i < size or self.controller.requests):
            coming = min(arrivals[i] if i < size else math.inf, self._heap[0][0] if self._heap else math.inf)
            if self.controller.queued and not self._running and coming > now + self._tick:
                now, idle = now + self._tick, idle + 1
                self._wait(now, idle, last=math.isinf(coming))
            elif self._heap and (i == size or self._heap[0][0] <= arrivals[i]):
                now, _, serial, kind, name = heapq.heappop(self._heap)
                self._ends[kind](name, serial, now)
                idle = 0
            else:
                assert i < size, "requests are under way and nothing moves them"
                now = arrivals[i]
                self._tell(Arrived(self.workload.request(i)), now)
                i += 1
                if progress is not None and i % CHUNK == 0:
                    progress(i)
        if progress is not None:
            progress(size)

    # ---- the core

    def _tell(self, event: Event, now: float) -> None:
        """Tell the core an event, and all that follows from it at this instant, one after another."""
        self._inbox.append(event)
        self._drain(now)

    def _drain(self, now: float) -> None:
        while self._inbox:
            if self.controller.note(self._inbox.popleft(), now):
                self._decide(now)

    def _decide(self, now: float) -> None:
        """Let the planner run, if it is not running; what it says is heard when its time is over."""
        if self._coming is not None:
            self._again = True
            return
        works = self.controller.queued and self.controller.cluster.instances
        seconds = self._charge() if works else 0.0
        commands = self.controller.decide(now)
        if seconds == 0:
            self._obey(commands, now)
            return
        self._coming = commands
        self.outcome.planning += seconds
        self._at(now + seconds, "decided")

    def _charge(self) -> float:
        seconds = self._plan_seconds(self.controller.queued)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigError(f"A plan cannot take {seconds} s.", "Let plan_seconds give 0 or more.")
        return seconds

    def _decided(self, _: str, serial: int, now: float) -> None:
        """What the planner said is done, and it thinks about what has happened meanwhile."""
        commands, self._coming = self._coming or [], None
        again, self._again = self._again, False
        self._obey(commands, now)
        if again:
            self._decide(now)
        self._drain(now)

    def _obey(self, commands: list[Command], now: float) -> None:
        for command in commands:
            match command:
                case Send():
                    self._hand_over(command, now)
                case Swap(name, model):
                    self._swap(name, model, now)
                case Warm(name, model):
                    self._at(now + self.hosts[name].warm_seconds(model), "warmed", name, model)
                case Reject(id):
                    self._taken.pop(id, None)
                    self.outcome.shed += 1

    def _wait(self, now: float, idle: int, *, last: bool) -> None:
        """Nothing happens for a while: only time can change what the planner says."""
        if last and idle > _PATIENCE:
            raise HeadwayError(
                f"{self.controller.queued} requests wait at {now:.0f} s and the planner sends them nowhere.",
                "Let an instance come back, or use a recipe that swaps models.",
            )
        self._tell(Tick(), now)

    def _at(self, when: float, kind: str, name: str = "", model: str = "") -> None:
        serial = next(self._serial)
        heapq.heappush(self._heap, (when, 0, serial, kind, name))
        if name:
            self.hosts[name].pending[kind] = serial
            if model:
                self.hosts[name].coming[kind] = model

    def _after(self, delay: float, now: float, happens: Callable[[float], None]) -> None:
        """Let something happen after an overhead; without one, at once."""
        if delay == 0:
            happens(now)
            return
        serial = next(self._serial)
        self._late[serial] = happens
        heapq.heappush(self._heap, (now + delay, 0, serial, "late", ""))

    def _happens(self, _: str, serial: int, now: float) -> None:
        self._late.pop(serial)(now)
        self._drain(now)

    # ---- iterations

    def _hand_over(self, send: Send, now: float) -> None:
        host = self.hosts[send.instance]
        if host.running is not None:
            host.stolen += host.node.interruption
        self._after(host.node.request_overhead, now, partial(self._send, send))

    def _send(self, send: Send, now: float) -> None:
        host, request = self.hosts[send.instance], self.controller.requests[send.id]
        index = int(send.id[1:])
        output = int(self.workload.output[index])
        if not host.takes(request.model):  # it died or was told to swap while the planner was thinking
            self._inbox.append(Returned(send.id))
            return
        if not host.holds(request.prompt_tokens, output):
            self.outcome.failed += 1
            self._inbox.append(Failed(send.id, "too_long"))
            return
        self.outcome.node[index] = self._codes[send.instance]
        left = self.controller.lengths.forecast(request).mean
        if self.observer is not None:
            self.observer.sent(index, self._codes[send.instance], now)
        host.give(Submission(request, output, left, self._taken.pop(send.id, None)))
        if host.running is None:
            self._begin(send.instance, host, now)

    def _begin(self, name: str, host: SimulatedInstance, now: float) -> None:
        """Start the next iteration if there is anything to compute, with all who have come by now."""
        for id, row in host.take_in():
            if self.observer is not None:
                self.observer.entered(int(id[1:]), self._codes[name], row)
        ran = host.engine.schedule(now)
        if not ran.rows.size:
            self._note(name, host, ran, 0.0)
            return
        batch = host.engine.batch(ran)
        execution = host.form.latency.seconds(batch)
        host.learned.learn(batch, execution)
        seconds = host.engine.seconds(ran, execution)
        host.running = ran
        self._running += 1
        self._note(name, host, ran, seconds)
        self.outcome.iterations += 1
        self.outcome.busy += seconds
        self.outcome.preempted += ran.preempted
        self.outcome.paused += ran.paused.size
        self._at(now + seconds, "iteration", name)

    def _note(self, name: str, host: SimulatedInstance, ran: Ran, seconds: float) -> None:
        if self.observer is not None:
            self.observer.iteration(self._codes[name], host.engine, ran, seconds, self.controller.queued)

    def _iteration_ends(self, name: str, serial: int, now: float) -> None:
        host = self.hosts[name]
        if host.running is None or host.pending["iteration"] != serial:
            return  # the instance died in the middle of it
        if host.stolen:
            later, host.stolen = now + host.stolen, 0.0
            self.outcome.busy += later - now
            self._at(later, "iteration", name)
            return
        done = host.engine.complete(host.running, now)
        host.running = None
        self._running -= 1
        # An engine does not wait for the gateway: what the ends make room for comes one iteration later.
        if host.busy and not host.leaving:
            self._begin(name, host, now)
        for id, first, evictions in zip(done.ids, done.first.tolist(), done.evictions.tolist(), strict=True):
            index = int(id[1:])
            assert math.isnan(self.outcome.end[index]), f"{id} is answered twice"
            late = host.node.token_overhead
            self.outcome.first[index], self.outcome.end[index] = first + late, now + late
            self.outcome.evictions[index] = evictions
            self._after(late, now, partial(self._tell, Finished(id, int(self.workload.output[index]))))
        if host.leaving:
            self._leave(name, host, now)
            self._drain(now)

    # ---- models and failures

    def _swap(self, name: str, model: str, now: float) -> None:
        """Stop taking work; the iteration under way ends first, for no engine stops in the middle of one."""
        host = self.hosts[name]
        host.leaving = model
        host.pending.pop("warmed", None)  # the load has the disk for itself
        if host.running is None:
            self._leave(name, host, now)

    def _leave(self, name: str, host: SimulatedInstance, now: float) -> None:
        """Take back what is not finished, its KV lost, and begin to load."""
        model, host.leaving, host.loading = host.leaving, "", True
        self.outcome.swaps += 1
        self._at(now + host.load_seconds(model), "loaded", name, model)
        self._give_back(host.take_all(keep=True), now)

    def _give_back(self, taken: dict[str, Preempted], now: float) -> None:
        self._taken |= taken
        if self.observer is not None:
            for id in taken:
                self.observer.returned(int(id[1:]), now)
        self._inbox.extend(Returned(id, was.output_tokens) for id, was in taken.items())

    def _loaded(self, name: str, serial: int, now: float) -> None:
        host = self.hosts[name]
        if host.pending.get("loaded") == serial:
            host.serve(host.coming["loaded"])
            self._tell(Swapped(host.instance()), now)

    def _warmed(self, name: str, serial: int, now: float) -> None:
        host = self.hosts[name]
        if host.pending.get("warmed") == serial:
            host.warm(host.coming["warmed"])
            self._tell(Warmed(host.instance()), now)

    def _down(self, name: str, serial: int, now: float) -> None:
        """It dies: what it ran comes back and begins anew, a load or a warm-up is void."""
        host = self.hosts[name]
        if not host.up:
            return
        for kind in ("iteration", "loaded", "warmed"):
            host.pending.pop(kind, None)
        self._running -= host.running is not None
        taken = host.take_all(keep=False)
        host.up, host.leaving, host.loading = False, "", False
        self._coming = self._without(name)
        self._tell(InstanceDown(name), now)
        self._give_back(taken, now)
        self._drain(now)

    def _without(self, name: str) -> list[Command] | None:
        """Return what the planner is about to say, less the swaps of an instance that has died meanwhile."""
        if self._coming is None:
            return None
        return [c for c in self._coming if not (isinstance(c, Swap | Warm) and c.instance == name)]

    def _stands_up(self, name: str, serial: int, now: float) -> None:
        host = self.hosts[name]
        if not host.up:
            host.up = True
            host.serve(host.form.instance.model)
            self._tell(InstanceUp(host.instance()), now)
