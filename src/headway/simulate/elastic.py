"""A simulated fleet whose engines start, drain, stop and fail while requests come.

An engine costs from its start on until it has stopped: while it loads, and while it drains, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from headway.config.tables import Scale
from headway.errors import ConfigError
from headway.events import InstanceDown, InstanceUp
from headway.policy.scale.rates import STEP_S
from headway.policy.scale.scaler import Member, State, changes
from headway.simulate.event_queue import Timer
from headway.simulate.instance import InstanceSpec
from headway.simulate.loop import Loop
from headway.simulate.outcome import Outcome

Decide = Callable[[Loop, str, float, int], int]  # loop, model, now, engines up or starting -> engines wanted


def by_promises(loop: Loop, model: str, now: float, have: int) -> int:
    """Return the engines that the controller wants (`policy/scale/`)."""
    scaling = loop.controller.scaling
    assert scaling is not None
    loop.poll(now)
    return scaling.wanted(model, loop.controller.cluster, now, have)


def expanded(instances: Sequence[InstanceSpec], scale: Mapping[str, Scale]) -> list[InstanceSpec]:
    """Return the instances and, of models that scale, copies of theirs in turn up to the most that they may have.

    ConfigError for a model that no instance serves, or of which more begin than it may have.
    """
    out = list(instances)
    for model, limits in scale.items():
        kinds = [spec for spec in instances if spec.instance.model == model]
        if not kinds:
            raise ConfigError(f"[scale] has the model {model!r}, which no instance serves.", "Add an instance of it.")
        if not limits.min <= len(kinds) <= limits.max:
            raise ConfigError(
                f"{len(kinds)} instances of {model!r} are not between its min and max in [scale].",
                f"Begin with {limits.min} to {limits.max}, or change min or max.",
            )
        copies = [kinds[i % len(kinds)] for i in range(limits.max - len(kinds))]
        taken = {spec.instance.id for spec in out}
        names = (name for i in range(2 * limits.max + len(out)) if (name := f"e{i}") not in taken)
        out += [replace(spec, instance=replace(spec.instance, id=next(names))) for spec in copies]
    return out


class ElasticLoop(Loop):
    """A loop in which `scale` says of which models engines come and go.

    running: the instances that are up at the beginning. decide: asked every few seconds for each model.
    rng: for the times of failures.
    """

    def __init__(
        self,
        *args: Any,
        scale: Mapping[str, Scale],
        running: Sequence[str],
        decide: Decide,
        rng: np.random.Generator,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.scale, self._decide, self._rng = scale, decide, rng
        self.states = {name: State.UP if name in running else State.OFF for name in self.instances}
        self._since = dict.fromkeys(running, 0.0)  # of engines that cost something
        self._lives: dict[str, Timer] = {}  # failures to come
        self._starts: dict[str, Timer] = {}
        self.wanted: list[tuple[float, str, int]] = []  # what was decided when, as far as it changed something

    def open(self) -> None:
        """Bring up the engines of the beginning."""
        for name, state in self.states.items():
            self.instances[name].up = state is State.UP
            if state is State.UP:
                self._live(name, 0.0)
                self._notify(InstanceUp(self.instances[name].instance()), 0.0)
        if self.scale:
            self._future.at(STEP_S, self._look)

    def run(self, progress: Callable[[int], None] | None, until: float) -> Outcome:
        """Run as `Loop.run`, and count the engines' seconds."""
        outcome = super().run(progress, until)
        for name in tuple(self._since):
            self._stopped(name, self.now)
        return outcome

    def _look(self, now: float) -> None:
        for name, state in self.states.items():
            if state is State.DRAINING and not self.instances[name].busy:
                self.instances[name].up = False
                self._stopped(name, now)
        for model, limits in self.scale.items():
            mine = [name for name, one in self.instances.items() if one.spec.instance.model == model]
            there = [name for name in mine if self.states[name] in (State.UP, State.STARTING)]
            wanted = self._decide(self, model, now, len(there))
            wanted = min(max(wanted, limits.min), limits.max)
            if wanted != len(there):
                self.wanted.append((now, model, wanted))
            self._reach(mine, wanted, now)
        self._future.at(now + STEP_S, self._look)

    def _reach(self, names: Sequence[str], wanted: int, now: float) -> None:
        inside, since = self.controller.cluster.inside, self._since.get
        found = changes([Member(one, self.states[one], len(inside(one)), since(one, 0.0)) for one in names], wanted)
        for name in found.undrain:
            self.states[name] = State.UP
            self._notify(InstanceUp(self.instances[name].instance()), now)
        for name in found.start:
            self._since[name] = now
            self._start(name, now)
        for name in found.stop:
            if self.states[name] is State.STARTING:
                self._starts.pop(name).cancel()
                self._stopped(name, now)
            else:
                self.states[name] = State.DRAINING
                self._notify(InstanceDown(name), now)

    def _start(self, name: str, now: float) -> None:
        self.states[name] = State.STARTING
        seconds = self.instances[name].spec.start_s
        self._starts[name] = self._future.at(now + seconds, partial(self._ready, name))

    def _ready(self, name: str, now: float) -> None:
        instance = self.instances[name]
        self.states[name] = State.UP
        scaling = self.controller.scaling
        if scaling is not None and instance.spec.instance.model in scaling.scalers:
            scaling.scalers[instance.spec.instance.model].started(instance.spec.start_s)
        self._live(name, now)
        self._recover(instance, now)

    def _stopped(self, name: str, now: float) -> None:
        self.states[name] = State.OFF
        self.outcome.engine_s += now - self._since.pop(name)
        if name in self._lives:
            self._lives.pop(name).cancel()

    # ---- failures

    def _live(self, name: str, now: float) -> None:
        """Draw when an engine that has just started fails."""
        mean = self.instances[name].spec.mtbf_s
        if math.isfinite(mean):
            self._lives[name] = self._future.at(now + self._rng.exponential(mean), partial(self._die, name))

    def _die(self, name: str, now: float) -> None:
        """Fail; unless it was to stop, it starts again."""
        draining = self.states[name] is State.DRAINING
        self._fail(self.instances[name], now)
        self.outcome.failures += 1
        del self._lives[name]
        if draining:
            self._stopped(name, now)
        else:
            self._start(name, now)
