"""What is one simulated machine? An engine in virtual time, the models it may load, the memory they wait in.

A node serves one model at a time. What it loads comes from disk (cold) or from its host memory (warm), which
keeps the models loaded before as far as they fit, the least recently used going first (QLM 5).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headway.core.engine_spec import EngineSpec, KvUse
from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.engines.simulated.two_ended import HostPoolEngine, TwoEndedEngine
from headway.errors import ConfigError
from headway.forecast.latency.online import OnlineLatency
from headway.ports import LatencyModel, Packer
from headway.recipes.recipe import Recipe
from headway.sim.workload.traffic import Workload
from headway.types import Instance, Loadable, Request


@dataclass(frozen=True, slots=True)
class Load:
    """What it takes to load a model: seconds from disk and from host memory, bytes that it fills there."""

    cold_s: float
    warm_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One simulated instance: what it is, its pace, slots, and tokens per iteration.

    copy_seconds: to move one token's KV between device and host. host_tokens: tokens of KV that the host has
    room for; None = nobody said: blocks are plain, and those that save find room for all they save.
    others: this node as it is with another model loaded; each of them, and the node itself if it is to come
    back, needs `load`. host_bytes: host memory for weights.
    request_overhead: seconds from a request's sending to where the engine can see it (HTTP, tokenisation).
    token_overhead: from the end of an iteration to the client's eyes (detokenisation, streaming).
    interruption: by which each request that is sent makes the iteration in progress longer, where those who
    receive it share the engine's cores.
    """

    instance: Instance
    latency: LatencyModel
    slots: int
    budget: int
    copy_seconds: float = 0.0
    load: Load | None = None
    others: tuple[InstanceSpec, ...] = ()
    host_bytes: int = 0
    request_overhead: float = 0.0
    token_overhead: float = 0.0
    interruption: float = 0.0
    host_tokens: int | None = None

    @property
    def delays(self) -> bool:
        """Tell whether anything lies between clients and this engine."""
        return bool(self.request_overhead or self.token_overhead or self.interruption)

    def spec(self, latency: OnlineLatency) -> EngineSpec:
        """Return what packers are told about this instance; every simulated engine keeps reservations."""
        instance = self.instance
        return EngineSpec(
            instance.max_running, self.budget, instance.block_size, instance.max_model_len, self.copy_seconds,
            self.host_tokens, two_ended=bool(self.host_tokens), reservations=True, latency=latency,
        )  # fmt: skip

    def forms(self) -> dict[str, InstanceSpec]:
        """Return this node by the model that it serves, its first one first."""
        return {form.instance.model: form for form in (self, *self.others)}

    def limit(self, model: str) -> int:
        """Return the tokens of the longest request of a model that this node can hold; 0 = not its model."""
        form = self.forms().get(model)
        return form.instance.limit if form is not None else 0


@dataclass(slots=True)
class HostMemory:
    """Weights in host memory, at most `size` bytes, the least recently used going first."""

    size: int
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def keep(self, model: str, bytes: int) -> None:
        """Hold a model as the latest used. One that is larger than the memory is not held."""
        self.held.pop(model, None)
        if bytes > self.size:
            return
        while sum(self.held.values()) + bytes > self.size:
            self.held.popitem(last=False)
        self.held[model] = bytes


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request that was taken out of an engine: tokens made, instant of the first, times it lost its KV."""

    output_tokens: int
    first: float
    evictions: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its way into an engine: tokens of its answer, forecast of them, what it had elsewhere."""

    request: Request
    output: int
    left: float
    before: Preempted | None


class SimulatedInstance:
    """A node at work. Its driver (`run.py`) says when things begin and end; nothing here knows the time.

    running: the iteration that it is in. stolen: seconds that interruptions have added to it. leaving: the
    model that it will load as soon as this iteration ends. pending: serial of the end that is expected of
    each kind; an end with another serial is void. coming: the model that a load or a warm-up brings.
    """

    def __init__(self, node: InstanceSpec, recipe: Recipe) -> None:
        self.node, self._recipe = node, recipe
        self.forms = node.forms()
        self.memory = HostMemory(node.host_bytes)
        self.pending: dict[str, int] = {}
        self.coming: dict[str, str] = {}
        self.up, self.leaving = True, ""
        self.serve(node.instance.model)

    def serve(self, model: str) -> None:
        """Stand there anew with this model loaded and nothing in it."""
        self.form = self.forms[model]
        self.leaving, self.loading = "", False
        self._remember(model)
        self._empty()

    def _empty(self) -> None:
        self.learned = OnlineLatency()
        self.engine = engine(self._recipe.packer(self.form.spec(self.learned)), self.form)
        self.door: list[Submission] = []
        self.running: Ran | None = None
        self.stolen = 0.0

    def takes(self, model: str) -> bool:
        """Tell whether a request of this model may be handed in now."""
        return self.up and not self.loading and not self.leaving and self.form.instance.model == model

    def holds(self, prompt: int, output: int) -> bool:
        """Tell whether a request of this size can be computed here at all."""
        return prompt + output <= self.form.instance.limit

    def instance(self) -> Instance:
        """Return what the core is told about this node as it is now."""
        others = tuple(
            _loadable(form) for model, form in self.forms.items() if model != self.form.instance.model
        )
        latency, warm = self.form.latency.seconds, tuple(self.memory.held)
        return replace(self.form.instance, loadable=others, warm=warm, latency=latency)

    @property
    def busy(self) -> bool:
        """Tell whether anybody is inside or at the door."""
        return self.engine.busy or bool(self.door)

    def give(self, given: Submission) -> None:
        """Put a request before the engine's door: it looks there between two iterations, as vLLM does."""
        self.door.append(given)

    def take_in(self) -> list[tuple[str, int]]:
        """Let in who is at the door; return their ids and rows."""
        came = [(given.request.id, self._add(given)) for given in self.door]
        self.door.clear()
        return came

    def _add(self, given: Submission) -> int:
        """Return a request's row; one taken out elsewhere goes on after the tokens it has made."""
        request, left, before = given.request, given.left, given.before
        row = self.engine.add(
            request.id, request.prompt_tokens, given.output, arrival=request.arrival, slo=request.slo,
            priority=request.priority,
            tokens_left=left if before is None else max(left - before.output_tokens, 1.0),
        )  # fmt: skip
        if before is not None:
            jobs = self.engine.jobs
            jobs.output_tokens[row], jobs.evictions[row] = before.output_tokens, before.evictions
            if before.output_tokens:
                jobs.first[row] = before.first
        return row

    def take_all(self, *, keep: bool) -> dict[str, Preempted]:
        """Empty the engine. keep: what was made counts on (its KV is lost and recomputed), else nothing."""
        self.take_in()
        jobs = self.engine.jobs
        rows = jobs.rows()
        rows = rows[np.argsort(jobs.serial[rows])]
        columns = zip(jobs.output_tokens[rows].tolist(), jobs.first[rows].tolist(),
                      (jobs.evictions[rows] + (jobs.computed[rows] > 0)).tolist(), strict=True)  # fmt: skip
        taken = [
            Preempted(output_tokens if keep else 0, first, evictions)
            for output_tokens, first, evictions in columns
        ]
        out = dict(zip(jobs.names(rows), taken, strict=True))
        self._empty()
        return out

    def load_seconds(self, model: str) -> float:
        """Return the seconds until this node serves a model from now."""
        load = _load(self.forms[model])
        return load.warm_s if model in self.memory.held else load.cold_s

    def warm_seconds(self, model: str) -> float:
        """Return the seconds that bring a model's weights from disk into host memory."""
        load = _load(self.forms[model])
        return 0.0 if model in self.memory.held else max(load.cold_s - load.warm_s, 0.0)

    def warm(self, model: str) -> None:
        """The weights have come into host memory."""
        self._remember(model)

    def _remember(self, model: str) -> None:
        load = self.forms[model].load
        if load is not None:
            self.memory.keep(model, load.bytes)


def engine(packer: Packer, node: InstanceSpec) -> SimulatedEngine:
    """Return the engine of a node: with a host pool where there is one and the packer uses it."""
    instance, use = node.instance, packer.kv
    common: dict[str, Any] = {
        "blocks": instance.blocks_total, "size": instance.block_size, "slots": node.slots,
        "budget": node.budget, "max_model_len": instance.max_model_len, "copy_seconds": node.copy_seconds,
    }  # fmt: skip
    host = node.host_tokens if pools(use, node) else None
    if host is None:
        return SimulatedEngine(packer, **common)
    kind = TwoEndedEngine if use.two_ended else HostPoolEngine
    return kind(packer, host=host, overlap=use.overlaps_copies, **common)


def pools(use: KvUse, node: InstanceSpec) -> bool:
    """Tell whether a packer's saves are held against this node's host pool.

    Those of a packer that reserves find room for all, as do those on a node that states no limit.
    """
    return use.saves and not use.reserves and node.host_tokens is not None


def words(recipe: Recipe, node: InstanceSpec) -> str:
    """Say how a recipe is simulated on a node, where that is not plain blocks and learned lengths."""
    parts, use = [], recipe.packer(node.spec(OnlineLatency())).kv
    if use != KvUse():
        kind, room = "two-ended" if use.two_ended else "plain", "unbounded" if use.saves else "no"
        room = f"{node.host_tokens:,} tokens of" if pools(use, node) else room
        parts.append(f"{kind} KV blocks, {room} host room")
    if recipe.lengths != "learned":
        parts.append("true lengths" if recipe.lengths == "oracle" else "learned lengths, padded")
    return ", ".join(parts)


def check(nodes: Sequence[InstanceSpec]) -> None:
    """Refuse nodes that cannot be simulated: none, two of one name, swaps without a load time."""
    if not nodes:
        raise ConfigError("There is no instance to simulate.", "Give at least one.")
    names = [node.instance.id for node in nodes]
    if len(set(names)) < len(names):
        raise ConfigError(f"Two instances have one name: {', '.join(sorted(names))}.", "Rename one.")
    for node in nodes:
        for form in node.forms().values() if node.others else ():
            _load(form)


def check_fleet(nodes: Sequence[InstanceSpec], workload: Workload, *, swaps: bool = True) -> None:
    """Refuse a fleet of which some request can never be served. ConfigError names it and the mend.

    swaps: the planner swaps models; otherwise what an instance could load and does not serve is of no use.
    """
    longest = workload.prompt + workload.output
    for code in np.unique(workload.model).tolist():
        name, rows = workload.models[code], np.flatnonzero(workload.model == code)
        able = [node for node in nodes if swaps or node.instance.model == name]
        limit = max((node.limit(name) for node in able), default=0)
        if not limit:
            raise _nobody(nodes, name, rows.size, swaps)
        worst = int(rows[np.argmax(longest[rows])])
        if longest[worst] > limit:
            raise ConfigError(
                f"Request {worst} has {longest[worst]} tokens; no instance of {name!r} holds over {limit}.",
                "Raise max_model_len and kv_tokens, or leave out requests so long.",
            )


def _nobody(nodes: Sequence[InstanceSpec], model: str, requests: int, swaps: bool) -> ConfigError:
    """Return the error for a model that no instance will ever serve."""
    if not swaps and any(node.limit(model) for node in nodes):
        return ConfigError(
            f"{requests} requests ask for {model!r}, which instances can load, but this recipe never swaps.",
            "Use a recipe that swaps models, such as shepherd, or add an instance that serves it.",
        )
    have = sorted({name for node in nodes for name in node.forms()})
    return ConfigError(
        f"{requests} requests ask for the model {model!r}, which no instance serves or can load.",
        f"The fleet has {', '.join(have)}: add an instance of {model!r}, or let one load it.",
    )


def _load(form: InstanceSpec) -> Load:
    if form.load is None:
        raise ConfigError(
            f"{form.instance.id} may swap models, but nobody knows how long {form.instance.model} loads.",
            "Give its latency profile load_cold_s and load_warm_s, or let this node serve one model.",
        )
    return form.load


def _loadable(form: InstanceSpec) -> Loadable:
    load = _load(form)
    return Loadable(form.instance.model, load.cold_s, load.warm_s, form.instance.limit, form.latency.seconds)
