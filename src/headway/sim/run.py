"""What if? A workload meets a recipe and a fleet in virtual time.

The same controller, planner and packers as in the server; only the clients, the network and the GPU are
replaced. Time moves from event to event: arrivals in order, and a heap of `(time, rank, serial)` for the ends
of iterations, so that equal inputs give equal runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.controller import Controller
from headway.engines.simulated import Ran, SimulatedEngine
from headway.forecast.lengths import TaskLengths
from headway.forecast.pace import OnlinePace
from headway.ports import Lengths, Pace
from headway.recipes import Recipe
from headway.sim import fast
from headway.sim.recorder import Recorder
from headway.sim.workload import Workload
from headway.types import Arrived, Command, Event, Finished, Floats, Instance, InstanceUp, Ints, Send

_CHUNK = 2048  # arrivals between two reports of progress


@dataclass(frozen=True, slots=True)
class Node:
    """One simulated instance: what it is, its pace, slots, and tokens per iteration.

    copy_seconds: to move one token's KV between device and host; the iteration waits for its copies.
    """

    instance: Instance
    pace: Pace
    slots: int
    budget: int
    copy_seconds: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What became of each request of the workload, by its index; instants are NaN for what never came.

    first, end: instants of the first token and of the end. node: index of its instance. evictions: per
    request. iterations, busy: of all instances together, count and seconds.
    """

    first: Floats
    end: Floats
    node: Ints
    evictions: Ints
    iterations: int = 0
    busy: float = 0.0
    preempted: int = 0
    paused: int = 0

    @classmethod
    def of(cls, size: int) -> Outcome:
        """Return the outcome of `size` requests that nothing has happened to."""
        never = np.full(size, np.nan)
        return cls(never, never.copy(), np.full(size, -1), np.zeros(size, np.int64))


@dataclass(slots=True)
class _Host:
    """A simulated engine with the iteration it is in."""

    node: Node
    engine: SimulatedEngine
    learned: OnlinePace
    running: Ran | None = None


@dataclass(slots=True)
class Simulation:
    """One run. `lengths` forecasts outputs as in the server (default: learned per task while it runs).

    fast: run as one compiled loop when every part of it can (`fast.py`); the outcome is the same.
    """

    recipe: Recipe
    nodes: Sequence[Node]
    workload: Workload
    lengths: Lengths = field(default_factory=TaskLengths)
    max_queued: int = 1_000_000
    fast: bool = True

    def run(self, progress: Callable[[int], None] | None = None, recorder: Recorder | None = None) -> Outcome:
        """Run to the end of the last request.

        progress is told how many have arrived, recorder every iteration (it costs nothing when absent; with
        it the run is not one compiled loop).
        """
        if self.fast and recorder is None and (outcome := self._compiled(progress)) is not None:
            return outcome
        controller = Controller(self.recipe.planner(), self.lengths, self.max_queued)
        hosts = {node.instance.id: self._host(node) for node in self.nodes}
        run = _Run(self.workload, controller, hosts, Outcome.of(self.workload.arrival.size), recorder)
        run.go(progress)
        return run.outcome

    def _compiled(self, progress: Callable[[int], None] | None) -> Outcome | None:
        """Run as one compiled loop; None when this run has a part that is known to Python only."""
        if len(self.nodes) != 1 or type(self.lengths) is not TaskLengths:
            return None
        world = fast.world(self.recipe, self.nodes[0], self.workload, self.lengths)
        if world is None:
            return None
        size = len(self.workload)
        for stop in range(min(_CHUNK, size), size + _CHUNK, _CHUNK):
            fast.advance(world, min(stop, size))
            if progress is not None:
                progress(min(stop, size))
        node = np.where(world.jobs["serial"] > 0, 0, -1)
        counts = world.counts
        return Outcome(
            world.first, world.end, node, world.jobs["evictions"].copy(), int(counts[fast.ITERATIONS]),
            float(world.clock[fast.BUSY]), int(counts[fast.PREEMPTED]), int(counts[fast.PAUSED]),
        )  # fmt: skip

    def _host(self, node: Node) -> _Host:
        instance, learned = node.instance, OnlinePace()
        engine = SimulatedEngine(
            self.recipe.packer(instance.max_running, node.budget, learned),
            blocks=instance.blocks_total, size=instance.block_size, slots=node.slots,
            budget=node.budget, max_model_len=instance.max_model_len,
        )  # fmt: skip
        return _Host(node, engine, learned)


class _Run:
    """The loop's state."""

    def __init__(
        self, workload: Workload, controller: Controller, hosts: dict[str, _Host], outcome: Outcome,
        recorder: Recorder | None,
    ) -> None:  # fmt: skip
        self.workload, self.controller, self.hosts, self.outcome = workload, controller, hosts, outcome
        self.recorder = recorder
        self.ends: list[tuple[float, int, int, str]] = []
        self._serial = itertools.count()
        self._codes = {name: i for i, name in enumerate(hosts)}

    def go(self, progress: Callable[[int], None] | None) -> None:
        for host in self.hosts.values():
            self._tell(InstanceUp(host.node.instance), 0.0)
        arrivals = self.workload.arrival.tolist()
        i, size = 0, len(arrivals)
        while i < size or self.ends:
            if self.ends and (i == size or self.ends[0][0] <= arrivals[i]):
                now, _, _, name = heapq.heappop(self.ends)
                self._iteration_ends(name, now)
                continue
            self._tell(Arrived(self.workload.request(i)), arrivals[i])
            i += 1
            if progress is not None and i % _CHUNK == 0:
                progress(i)
        if progress is not None:
            progress(size)

    def _tell(self, event: Event, now: float) -> None:
        self._obey(self.controller.on(event, now), now)

    def _obey(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Send):
                self._send(command, now)

    def _send(self, send: Send, now: float) -> None:
        host, request = self.hosts[send.instance], self.controller.requests[send.id]
        index = int(send.id[1:])
        self.outcome.node[index] = self._codes[send.instance]
        row = host.engine.add(
            send.id, request.prompt_tokens, int(self.workload.output[index]), arrival=request.arrival,
            slo=request.slo, priority=request.priority, left=self.controller.lengths.forecast(request).mean,
        )  # fmt: skip
        if self.recorder is not None:
            self.recorder.sent(index, self._codes[send.instance], row, now)
        if host.running is None:
            self._begin(send.instance, host, now)

    def _begin(self, name: str, host: _Host, now: float) -> None:
        """Start the next iteration if there is anything to compute."""
        ran = host.engine.schedule(now)
        if not ran.rows.size:
            self._note(name, host, ran, 0.0)
            return
        batch = host.engine.batch(ran)
        seconds = host.node.pace.seconds(batch)
        host.learned.learn(batch, seconds)
        if ran.copied:
            seconds += ran.copied * host.node.copy_seconds
        host.running = ran
        self._note(name, host, ran, seconds)
        self.outcome.iterations += 1
        self.outcome.busy += seconds
        self.outcome.preempted += ran.preempted
        self.outcome.paused += ran.paused.size
        heapq.heappush(self.ends, (now + seconds, 0, next(self._serial), name))

    def _note(self, name: str, host: _Host, ran: Ran, seconds: float) -> None:
        if self.recorder is not None:
            self.recorder.iteration(self._codes[name], host.engine, ran, seconds, self.controller.queued)

    def _iteration_ends(self, name: str, now: float) -> None:
        host = self.hosts[name]
        assert host.running is not None
        done = host.engine.complete(host.running, now)
        host.running = None
        # An engine does not wait for the gateway: what the ends make room for comes one iteration later.
        if host.engine.busy:
            self._begin(name, host, now)
        for id, first, evictions in zip(done.ids, done.first.tolist(), done.evictions.tolist(), strict=True):
            index = int(id[1:])
            self.outcome.first[index], self.outcome.end[index] = first, now
            self.outcome.evictions[index] = evictions
            self._tell(Finished(id, int(self.workload.output[index])), now)
