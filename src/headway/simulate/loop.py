"""The readable simulation loop: arrivals in order, and an `EventQueue` for everything that ends later.

The loop drives the server's own `Controller` and one `SimulatedInstance` per engine. `compiled_loop.py`
computes the same outcome for the runs of which it knows every part, `compiled_fleet.py` the iterations of engines
between two events outside them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headway.engines.simulated.caching import CachingEngine
from headway.engines.simulated.engine import Ran
from headway.engines.simulated.prefix_blocks import shared_keys
from headway.errors import HeadwayError
from headway.events import (
    Arrived,
    Cached,
    Event,
    Failed,
    Finished,
    InstanceDown,
    InstanceUp,
    Learned,
    Returned,
    RunEnded,
    Started,
    Swapped,
    Tick,
    Warmed,
)
from headway.policy.apps.run import Key, place_of
from headway.policy.core.controller import Controller
from headway.prefix import run_number
from headway.simulate.event_queue import Callback, EventQueue
from headway.simulate.instance import Preempted, SimulatedInstance, Submission
from headway.simulate.outcome import Failure, Observer, Outcome
from headway.simulate.planning_time import PlanningTime
from headway.simulate.workload.traffic import Workload
from headway.stages import Prewarm
from headway.types import Command, Recall, Reject, Request, Rerank, Send, Swap, Warm

if TYPE_CHECKING:
    from headway.simulate.compiled_fleet import CompiledFleet

CHUNK = 2048  # arrivals between two reports of progress
_LOOK = 0.5  # seconds between two looks at the engines' prefix caches, as in the gateway
_POLL = 1.0  # seconds between two looks at what engines have learned, as in the gateway
_PATIENCE = 3600  # ticks without any event after which the queued requests are given up
_LAST = 1 << 62  # behind all that is scheduled at one instant


class Loop:
    """The state of one run.

    controller: the server's slow loop.
    instances: the simulated engines by id.
    ends: runs of applications end with their last request, as where clients say so; otherwise never.
    compiled: the same engines, where their iterations run in compiled loops.
    outcome: what became of the requests so far. now: the instant at which the run ended.
    """

    def __init__(
        self,
        workload: Workload,
        controller: Controller,
        instances: Sequence[SimulatedInstance],
        *,
        plan_seconds: Callable[[int], float],
        tick: float,
        failures: Sequence[Failure] = (),
        observer: Observer | None = None,
        ends: bool = False,
        compiled: CompiledFleet | None = None,
    ) -> None:
        self.compiled = compiled
        self.workload, self.outcome = workload, Outcome.of(len(workload))
        self.controller, self.observer = controller, observer
        self.instances = {instance.id: instance for instance in instances}
        self._numbers = {name: number for number, name in enumerate(self.instances)}
        self._arrivals: list[float] = workload.arrival.tolist()
        self._tick = tick
        self._future = EventQueue(None if compiled is None else compiled.totals["serial"])
        self._planning = PlanningTime(controller, plan_seconds, self._future, self._execute)
        self._inbox: deque[Event] = deque()  # events that the controller has not been told yet
        self._preempted: dict[str, Preempted] = {}
        self._running, self.now = 0, 0.0  # iterations in progress, without compiled ones
        self._settled = 0.0  # the instant at which compiled engines are
        others = any(one.spec.token_overhead or one.spec.instance.overflow is not None for one in instances)
        self._plain = not (others or controller.planner.reranks or any(workload.runs))
        self._check_at = math.inf  # when the controller is asked next for what is overdue
        self._caches = len(self.instances) > 1 and any(one.spec.prefix_caching for one in instances)
        self._run_left = Counter(workload.run.tolist() if ends else ())  # requests to end, by code of their run
        self._tells_starts = len(self.instances) > 1 or bool((workload.share < 1).any())
        self._looked = -math.inf
        self._polled = -math.inf  # when it was last told what the engines have learned
        for failure in failures:
            self._future.at(failure.at, partial(self._fail, self.instances[failure.instance]))
            if math.isfinite(failure.seconds):
                recover = partial(self._recover, self.instances[failure.instance])
                self._future.at(failure.at + failure.seconds, recover)

    def run(self, progress: Callable[[int], None] | None, until: float) -> Outcome:
        """Run until every request has ended, at most to the instant `until`."""
        self.open()
        arrivals = self._arrivals
        i, size, now, idle = 0, len(arrivals), 0.0, 0
        while now < until and (i < size or self.controller.requests or self._more):
            arrival = arrivals[i] if i < size else math.inf
            if self.compiled is not None and self._advance(self.compiled, arrival, until):
                now, idle = self._settled, 0
                continue
            upcoming = min(arrival, self._future.next_time)
            if self.controller.queued and not self._runs and upcoming > now + self._tick:
                now, idle = now + self._tick, idle + 1
                self._wait(now, idle, last=math.isinf(upcoming))
            elif self._future and self._future.next_time <= arrival:
                now, idle = self._future.run_next(), 0
                if self._inbox:
                    self._drain(now)
            else:
                assert i < size, "requests are in progress and no event is scheduled"
                now = arrival
                self._arrive(self.workload.request(i), now)
                i += 1
                if progress is not None and i % CHUNK == 0:
                    progress(i)
        if progress is not None:
            progress(size)
        self.outcome.planning, self.now = self._planning.spent, now
        if self.compiled is not None:
            self.compiled.count(self.outcome)
        return self.outcome

    def _advance(self, compiled: CompiledFleet, arrival: float, until: float) -> bool:
        """Run compiled iterations up to the next event outside the engines, or to news that the planner may act on.

        While nothing is queued, first tokens and ends change nothing before that event, unless the planner does more
        than to send. Returns whether there was any iteration.
        """
        calm = self._plain and not self.controller.queued and not self.controller.planner.thinks
        news = compiled.advance(min((arrival, _LAST), self._future.head), until, eager=not calm)
        if news is None:
            return False
        self._settled = compiled.now
        for at, number, id, end in news:
            if end is not None:
                self.outcome.gap[self.workload.row_of(id)] = end.gap
                self._end_request(id, end.first, end.evictions, compiled.instances[number].spec.token_overhead, at)
            elif self._tells_starts:
                self.controller.note(Started(id), at)
        return True

    def _attend(self, instance: SimulatedInstance) -> None:
        """Let a compiled iteration in progress end here, because something waits for its end."""
        if self.compiled is not None and (taken := self.compiled.take(self._numbers[instance.id])) is not None:
            end, serial, instance.running = taken
            self._running += 1
            instance.timers["iteration"] = self._future.at(end, partial(self._end_iteration, instance), serial)

    @property
    def _runs(self) -> bool:
        """Tell whether an iteration is in progress."""
        return self._running > 0 or (self.compiled is not None and self.compiled.runs)

    def open(self) -> None:
        """Bring up the engines."""
        for instance in self.instances.values():
            self._notify(InstanceUp(instance.instance()), 0.0)

    @property
    def _more(self) -> bool:
        """Tell whether requests will arrive that are in no list of arrivals."""
        return False

    # ---- the controller

    def _notify(self, event: Event, now: float) -> None:
        """Tell the controller an event, and everything that follows from it at this instant."""
        self._inbox.append(event)
        self._drain(now)

    def _drain(self, now: float) -> None:
        while self._inbox:
            if self.controller.note(self._inbox.popleft(), now):
                self._planning.decide(now)
        self._set_check()

    def _execute(self, commands: Sequence[Command], now: float) -> None:
        assert not commands or now >= self._settled, "engines have gone on without these commands"
        for command in commands:
            match command:
                case Send(id, name):
                    self._send(command, self.instances[name], now)
                case Recall(id, name):
                    self._attend(self.instances[name])
                    self.instances[name].recalled.append(id)
                    if self.instances[name].running is None:
                        self._take_back(self.instances[name], now)
                case Rerank(name, ranks):
                    # It takes the way of a request, so it never overtakes one that was sent before it.
                    delay = self.instances[name].spec.request_overhead
                    self._after(delay, now, partial(self._rerank, self.instances[name], ranks))
                case Swap(name, model):
                    self._swap(self.instances[name], model, now)
                case Warm(name, model):
                    self._warm(self.instances[name], model, now)
                case Prewarm():
                    self._prewarm(command, now)
                case Reject(id, reason):
                    self._preempted.pop(id, None)
                    self.outcome.infeasible += reason == "infeasible"
                    self.outcome.shed += reason != "infeasible"
                    self._went(id, now)
        self._set_check()

    def _prewarm(self, command: Prewarm, now: float) -> None:
        """Warm a resource; requests that belong to no run need none."""

    def _wait(self, now: float, idle: int, *, last: bool) -> None:
        """Let a tick pass: no event is near, so only time can change what the planner commands."""
        if last and idle > _PATIENCE:
            raise HeadwayError(
                f"{self.controller.queued} requests wait at {now:.0f} s and the planner sends them nowhere.",
                "Let an instance come back, or use a recipe that swaps models.",
            )
        self._notify(Tick(), now)

    def _after(self, delay: float, now: float, callback: Callback) -> None:
        """Run a callback after an overhead; without one, at once."""
        if delay == 0:
            callback(now)
        else:
            self._future.at(now + delay, callback)

    # ---- iterations

    def _send(self, send: Send, instance: SimulatedInstance, now: float) -> None:
        """Hand a request to an instance, which sees it after the request overhead."""
        if instance.running is not None:
            instance.interruption_s += instance.spec.interruption
        self._after(instance.spec.request_overhead, now, partial(self._submit, send, instance))

    def _submit(self, send: Send, instance: SimulatedInstance, now: float) -> None:
        id = send.id
        if id not in self.controller.requests:
            return  # it was refused on its way
        request, row = self.controller.requests[id], self.workload.row_of(id)
        output = int(self.workload.output[row])
        if not instance.takes(request.model):  # it failed or began to swap while the planner was running
            self._inbox.append(Returned(id))
        elif not instance.holds(request.prompt_tokens, output):
            self.outcome.failed += 1
            self._inbox.append(Failed(id, "too_long", missed=True))
            self._went(id, now)
        else:
            self.outcome.instance[row] = self._numbers[instance.id]
            forecast = self.controller.lengths.forecast(request)
            if self.observer is not None:
                self.observer.sent(row, self._numbers[instance.id], now, send.found)
            preempted = self._preempted.pop(id, None)
            told = forecast.mean, forecast.spread, send.rank, send.soft
            instance.submit(Submission(request, output, *told, preempted))
            inside = self.compiled is not None and self.compiled.admit(self._numbers[instance.id])
            if instance.running is None and not inside:
                self._begin(instance, now)

    def _rerank(self, instance: SimulatedInstance, ranks: Mapping[str, float], now: float) -> None:
        instance.rerank(ranks)

    def _begin(self, instance: SimulatedInstance, now: float) -> None:
        """Start the next iteration, with every request submitted by now, if there is work."""
        if self.compiled is not None:
            self.compiled.begin(self._numbers[instance.id], now)
            return
        for id, row in instance.admit():
            if self.observer is not None:
                self.observer.entered(self.workload.row_of(id), self._numbers[instance.id], row)
        ran = instance.engine.schedule(now)
        if not ran.rows.size:
            self._observe(instance, ran, 0.0)
            return
        batch = instance.engine.batch(ran)
        execution = instance.variant.latency.seconds(batch)
        instance.learned.learn(batch, execution * instance.spec.latency_error)
        seconds = instance.engine.seconds(ran, execution)
        instance.running = ran
        self._running += 1
        self._observe(instance, ran, seconds)
        self.outcome.iterations += 1
        self.outcome.busy += seconds
        self.outcome.preempted += ran.preempted
        self.outcome.queried += ran.queried
        self.outcome.hits += ran.hits
        self.outcome.paused += ran.paused.size
        self._set_timer(instance, "iteration", now + seconds, partial(self._end_iteration, instance))

    def _observe(self, instance: SimulatedInstance, ran: Ran, seconds: float) -> None:
        if self.observer is not None:
            number, queued = self._numbers[instance.id], self.controller.queued
            self.observer.iteration(number, instance.engine, ran, seconds, queued)

    def _end_iteration(self, instance: SimulatedInstance, now: float) -> None:
        assert instance.running is not None
        if instance.interruption_s:
            later, instance.interruption_s = now + instance.interruption_s, 0.0
            self.outcome.busy += later - now
            self._set_timer(instance, "iteration", later, partial(self._end_iteration, instance))
            return
        done = instance.engine.complete(instance.running, now)
        self._started(instance, instance.running, now)
        instance.running = None
        self._running -= 1
        refused = self._answer(instance, now)
        self._take_back(instance, now)
        # An engine does not wait for the gateway: what takes the freed room comes one iteration later.
        if instance.busy and not instance.leaving:
            self._begin(instance, now)
        columns = done.first.tolist(), done.evictions.tolist(), done.gap.tolist()
        for id, first, evictions, gap in zip(done.ids, *columns, strict=True):
            self.outcome.gap[self.workload.row_of(id)] = gap
            self._end_request(id, first, evictions, instance.spec.token_overhead, now)
        if refused:
            self._planning.decide(now)
        if instance.leaving:
            self._unload(instance, now)

    def _started(self, instance: SimulatedInstance, ran: Ran, now: float) -> None:
        """Tell of first tokens that are out; where there is one engine, only planners of application runs mind."""
        if not self._tells_starts:
            return
        jobs = instance.engine.jobs
        for id in jobs.names(ran.rows[jobs.first[ran.rows] == now]):
            self.controller.note(Started(id), now)

    def _end_request(self, id: str, first: float, evictions: int, overhead: float, now: float) -> None:
        row = self.workload.row_of(id)
        assert math.isnan(self.outcome.end[row]), f"{id} is answered twice"
        self.outcome.first[row], self.outcome.end[row] = first + overhead, now + overhead
        self.outcome.evictions[row] = evictions
        output = int(self.workload.output[row])
        self._after(overhead, now, partial(self._notify, Finished(id, output, met=self._met(row))))
        self._after(overhead, now, partial(self._went, id))

    def _went(self, id: str, now: float) -> None:
        """Let a run end with its last request."""
        row = self.workload.row_of(id)
        run = self.workload.run.item(row)
        if run not in self._run_left:
            return
        self._run_left[run] -= 1
        if not self._run_left[run] and (request := self.workload.request(row)).stage is not None:
            self._future.at(now, partial(self._end_run, place_of(request)[0]))

    def _end_run(self, run: Key, now: float) -> None:
        """Tell controller and engines that a run has ended."""
        self._notify(RunEnded(*run), now)
        for instance in self.instances.values():
            if isinstance(instance.engine, CachingEngine):
                instance.engine.end_run(run_number(run))

    def _met(self, row: int) -> bool:
        """Tell whether a request that has ended was on time; what promises no share is not asked about."""
        if self.workload.share[row] == 1.0:
            return True
        request, outcome = self.workload.request(row), self.outcome
        ttft, e2e = outcome.first[row] - request.arrival, outcome.end[row] - request.arrival
        tpot = request.tpot(ttft, e2e, int(self.workload.output[row]))
        return request.slo.met(ttft, tpot, e2e, outcome.gap[row])

    # ---- requests that are refused rather than served late

    def _arrive(self, request: Request, now: float) -> None:
        self._look_at_caches(now)
        keys = shared_keys(request.prefix).tobytes() if self._caches else b""
        if request.drop:
            self.poll(now)
            reject = self.controller.infeasible(request, now, keys)
            if reject is not None:
                self._execute([reject], now)
                return
        self._notify(Arrived(request, keys), now)

    def _look_at_caches(self, now: float) -> None:
        """Tell the controller what the engines' caches have taken in, at most once in a while."""
        if now < self._looked + _LOOK or not self._caches:
            return
        self._looked = now
        for name in self.controller.cluster.instances:
            if isinstance(engine := self.instances[name].engine, CachingEngine):
                self.controller.note(Cached(name, engine.report()), now)

    def poll(self, now: float) -> None:
        """Tell the controller what the engines have learned, at most once in a while."""
        if now < self._polled + _POLL:
            return
        self._polled = now
        for name in self.controller.cluster.instances:
            instance = self.instances[name]
            if instance.learned.telling:
                theta = instance.learned.theta.copy()
                self.controller.note(Learned(name, theta, instance.engine.longest), now)

    def _set_check(self) -> None:
        """Let time stop where the controller wants to look at what is overdue."""
        check = self.controller.next_check
        if check < self._check_at:
            self._check_at = check
            self._future.at(check, self._check)

    def _check(self, now: float) -> None:
        """Refuse what cannot be on time any more: inside engines, when their iterations end."""
        self._check_at = math.inf
        self.poll(now)
        overdue = self.controller.overdue(now)
        self._execute(overdue.rejects, now)
        refused = bool(overdue.rejects)
        for name, ids in overdue.inside.items():
            instance = self.instances[name]
            self._attend(instance)
            instance.asked += ids
            if instance.running is None:
                refused |= self._answer(instance, now)
        if refused or min(self.controller.planner.wake_at, self.controller.overflow.next_check) <= now:
            self._planning.decide(now)
        self._set_check()

    def _answer(self, instance: SimulatedInstance, now: float) -> bool:
        """Tell the controller how far an instance is with what it was asked; tell whether any was refused."""
        if not instance.asked:
            return False
        ids, instance.asked = instance.asked, []
        rejects = self.controller.refuse(instance.id, instance.progress(ids), now)
        for reject in rejects:
            instance.drop(reject.id)
            if self.observer is not None:
                self.observer.returned(self.workload.row_of(reject.id), now)
        self._execute(rejects, now)
        return bool(rejects)

    def _take_back(self, instance: SimulatedInstance, now: float) -> None:
        """Take back what the controller recalled and has no token yet."""
        ids, instance.recalled = instance.recalled, []
        waiting = [id for id, done in instance.progress(ids).items() if not done.output_tokens]
        for id in waiting:
            instance.drop(id)
            if self.observer is not None:
                self.observer.returned(self.workload.row_of(id), now)
        self._inbox.extend(map(Returned, waiting))

    # ---- models and failures

    def _set_timer(self, instance: SimulatedInstance, kind: str, when: float, callback: Callback) -> None:
        """Schedule the end of an instance's iteration, load or warm-up in place of an earlier one's."""
        self._cancel(instance, kind)
        instance.timers[kind] = self._future.at(when, callback)

    def _cancel(self, instance: SimulatedInstance, kind: str) -> None:
        timer = instance.timers.pop(kind, None)
        if timer is not None:
            timer.cancel()

    def _warm(self, instance: SimulatedInstance, model: str, now: float) -> None:
        end = partial(self._end_warm_up, instance, model)
        self._set_timer(instance, "warm-up", now + instance.warm_seconds(model), end)

    def _swap(self, instance: SimulatedInstance, model: str, now: float) -> None:
        """Stop taking work; the iteration in progress ends first, since no engine stops in the middle."""
        self._attend(instance)
        instance.leaving = model
        self._cancel(instance, "warm-up")  # the load has the disk for itself
        if instance.running is None:
            self._unload(instance, now)

    def _unload(self, instance: SimulatedInstance, now: float) -> None:
        """Take back the unfinished requests, whose KV is lost, and begin to load."""
        self._attend(instance)
        if instance.running is not None:  # what was sent together with the swap began at this instant
            self._cancel(instance, "iteration")
            self._running -= 1
        model, instance.leaving, instance.loading = instance.leaving, "", True
        self.outcome.swaps += 1
        alike = next(one.in_place_of for one in instance.instance().loadable if one.model == model)
        self.outcome.restarts += instance.variant.instance.model not in alike
        end = partial(self._end_load, instance, model)
        self._set_timer(instance, "load", now + instance.load_seconds(model), end)
        self._return(instance.take_all(keep=True), now)

    def _return(self, preempted: dict[str, Preempted], now: float) -> None:
        self._preempted |= preempted
        if self.observer is not None:
            for id in preempted:
                self.observer.returned(self.workload.row_of(id), now)
        self._inbox.extend(Returned(id, request.output_tokens) for id, request in preempted.items())

    def _end_load(self, instance: SimulatedInstance, model: str, now: float) -> None:
        instance.serve(model)
        self._notify(Swapped(instance.instance()), now)

    def _end_warm_up(self, instance: SimulatedInstance, model: str, now: float) -> None:
        instance.warm(model)
        self._notify(Warmed(instance.instance()), now)

    def _fail(self, instance: SimulatedInstance, now: float) -> None:
        """Kill an instance: its requests come back and begin anew; a load or a warm-up is void."""
        if not instance.up:
            return
        self._attend(instance)
        for kind in tuple(instance.timers):
            self._cancel(instance, kind)
        self._running -= instance.running is not None
        preempted = instance.take_all(keep=False)
        instance.up, instance.leaving, instance.loading = False, "", False
        self._planning.drop(instance.id)
        self._notify(InstanceDown(instance.id), now)
        self._return(preempted, now)

    def _recover(self, instance: SimulatedInstance, now: float) -> None:
        if not instance.up:
            instance.up = True
            instance.serve(instance.variant.instance.model)
            self._notify(InstanceUp(instance.instance()), now)
