"""Figures 1, 4, 5 and 21 of QLM, and its A.3: head-of-line blocking, KV swaps, drain times, GPU memory, scale-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.papers.qlm_tables import LATENCY_SENSITIVE, QLM, judge
from benchmarks.papers.qlm_workloads import LONGEST, QlmModel, QlmSetting
from benchmarks.papers.quoted import quoted
from benchmarks.papers.recipes import find
from headway.config.tables import Scale
from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.policy.forecast.latency import profiles
from headway.simulate.outcome import Observer
from headway.simulate.run import Simulation
from headway.simulate.workload.arrivals import diurnal, recorded
from headway.simulate.workload.traces import find as stored
from headway.simulate.workload.traffic import Workload, make
from headway.whatif.output.results import Row

_BASELINES = ("vllm", "edf-model-swap", "shepherd")
_SLO_S = (25.0, 300.0)  # range of the SLOs of figure 5
_KV_LIMIT, _KV_LOAD = 256, 3.0  # of figure 4, so that KV is short and not the batch limit
_TRACE, _FROM_S, _SECONDS, _MOST = "azure_conv_2023", 900.0, 900.0, 4  # of A.3, and the most instances
_KV_SWAP_PCT = quoted(20.0, QLM, "2.4", 104, "20%")
_HOST_GB = {
    "mistral-7b": quoted(20.0, QLM, "2.4", 104, "20 GB"),
    "vicuna-13b": quoted(220.0, QLM, "2.4", 104, "220 GB") - quoted(26.0, QLM, "2.4", 104, "26 GB"),
}


class Memory(Observer):
    """The KV in use until an instant.

    held: share of an instance's KV blocks in use x seconds, over all instances. host: the most tokens of KV that an
    instance has had in host memory.
    """

    def __init__(self, until: float) -> None:
        self.until, self.held, self.host = until, 0.0, 0

    def iteration(self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int) -> None:
        """Add an iteration; between iterations and during loads nothing is in use."""
        self.held += max(min(seconds, self.until - ran.start), 0.0) * (1 - engine.free / engine.blocks)
        self.host = max(self.host, int(engine.usage["on_host"]))


def motivation(settings: Sequence[QlmSetting], seed: int) -> Iterator[Row]:
    """Yield the rows. settings: W_A and W_B; () = no rows."""
    if not settings:
        return
    multi, single = settings
    for load in (multi.load, 3.0):
        yield from blocking(replace(multi, load=load), (QLM, "vllm-model-swap", *_BASELINES[1:]), seed)
    for load in (single.load, 3.0):
        yield from blocking(replace(single, load=load), (QLM, *_BASELINES), seed)
    for model in (QlmModel("mistral-7b", "7b", 1.0), *single.models):
        yield from _kv_swap(replace(single, models=(model,), load=_KV_LOAD, limit=_KV_LIMIT), model, seed)
    yield from drain(replace(multi, queued=1000), seed)
    yield from _scale_up(replace(single, interactive=0.5), seed)


def blocking(setting: QlmSetting, systems: tuple[str, ...], seed: int) -> Iterator[Row]:
    """Yield how long latency-sensitive requests wait for their first token, and how full the KV is (figures 1, 21).

    A request that has not ended counts until the run's end.
    """
    work, at = setting.workload(seed), setting.describe()
    urgent = np.array(work.tiers)[work.tier] == "interactive"
    for system in systems:
        fleet, memory = setting.instances(), Memory(setting.seconds)
        outcome = Simulation(find(system), fleet, work, until=setting.until).run(observer=memory)
        waits = (np.nan_to_num(outcome.first, nan=setting.until) - work.arrival)[urgent]
        yield Row("wait.latency_sensitive_s", system, at, float(waits.mean()), "s")
        yield Row("kv.used_pct", system, at, 100 * memory.held / (setting.seconds * len(fleet)), "%")


def _kv_swap(setting: QlmSetting, model: QlmModel, seed: int) -> Iterator[Row]:
    """Yield what KV swap brings against eviction alone, and the host memory that it takes (figure 4).

    bound: what KV for all requests of a batch would bring. Without KV swap no KV is in host memory.
    """
    work, at, fleet = setting.workload(seed), f"{model.name}, {setting.describe()}", setting.instances()
    enough = setting.limit * LONGEST // fleet[0].instance.block_size
    roomy = [replace(spec, instance=replace(spec.instance, blocks_total=enough)) for spec in fleet]
    served, memory = list[float](), Memory(setting.until)
    for system, instances in (("qlm-no-kv-swap", fleet), ("qlm-no-kv-swap", roomy), (QLM, fleet)):
        outcome = Simulation(find(system), instances, work, until=setting.until).run(observer=memory)
        served.append(judge(work, outcome, setting.until)["throughput.req_per_s"] or 0.0)
    evicts, most, swaps = served
    host_gb = memory.host * profiles.load(str(model.profile("a100"))).kv_bytes_per_token / 1e9
    paper = _KV_SWAP_PCT if model.size == "7b" else None
    yield Row("host_kv_gb.peak", QLM, at, host_gb, "GB", _HOST_GB[model.name])
    yield Row("throughput.kv_swap_pct", QLM, at, 100 * (swaps / evicts - 1), "%", paper)
    yield Row("throughput.kv_swap_pct.bound", QLM, at, 100 * (most / evicts - 1), "%")


def drain(setting: QlmSetting, seed: int) -> Iterator[Row]:
    """Yield the seconds until the queue of a setting is served, whose requests have SLOs at random (figure 5).

    The oracle serves one model after the other: first come, first served, with the requests in the order of models.
    """
    rng = np.random.default_rng(seed)
    work = setting.standing(rng)
    work = replace(work, e2e=rng.uniform(*_SLO_S, len(work)))
    grouped = work.take(np.argsort(work.model, kind="stable"))
    at = f"{len(work)} queued, {len(setting.models)} models, {len(setting.instances())} A100"
    runs = ((QLM, QLM, work), ("edf-model-swap", "edf-model-swap", work), ("oracle", "vllm-model-swap", grouped))
    for system, recipe, queue in runs:
        outcome = Simulation(find(recipe), setting.instances(), queue).run()
        yield Row("drain_s", system, at, float(outcome.end.max()), "s")
        yield Row("swaps", system, at, float(outcome.swaps), "swaps")


def _scale_up(setting: QlmSetting, seed: int) -> Iterator[Row]:
    """Yield what fixed and scaled fleets keep of a rising load, and their instance-hours (A.3)."""
    work, name = rising(setting, seed)
    model = setting.models[0].name
    for count, most in ((1, 1), (2, 2), (1, _MOST)):
        fleet = replace(setting, gpus=(("a100", count),)).instances()
        scale = {model: Scale(max=most)} if most > count else {}
        outcome = Simulation(find(QLM), fleet, work, until=4 * _SECONDS, scale=scale).run()
        at = f"W_B, {name}, {count}{f' to {most}' if scale else ''} A100, {setting.interactive:.0%} latency-sensitive"
        found = judge(work, outcome, 4 * _SECONDS)
        for id in ("attainment", LATENCY_SENSITIVE):
            yield Row(id, QLM, at, found[id], "%")
        yield Row("instance_hours", QLM, at, outcome.engine_s / 3600, "h")


def rising(setting: QlmSetting, seed: int) -> tuple[Workload, str]:
    """Return W_B's requests with arrivals of the Azure 2023 trace, or a generated rise without it, and their name."""
    rng = np.random.default_rng(seed)
    if stored(_TRACE):
        at, name = recorded(_TRACE, rng=rng).at - _FROM_S, "Azure 2023"
    else:
        at, name = diurnal(6.0, 1.5, 2 * _SECONDS, _SECONDS, rng), "from night to noon"
    at = at[(at >= 0) & (at < _SECONDS)]
    work = make(setting.classes(setting.models[0].name, 1.0), at, rng)
    return work.take(np.flatnonzero(work.prompt + work.output <= LONGEST)), name
