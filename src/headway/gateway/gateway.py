"""The gateway: everything behind the HTTP endpoints, open as long as `serving` runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headway import clock
from headway.cluster.backends.port import Backend
from headway.cluster.backends.registry import opened
from headway.cluster.wire.messages import WireLink
from headway.config import Broker as BrokerSettings
from headway.config import Config
from headway.gateway import tasks
from headway.gateway.budget import ByteBudget
from headway.gateway.control.autoscale import Autoscaler, commands
from headway.gateway.control.dispatcher import Dispatcher
from headway.gateway.control.fleet import Fleet, GatewayWork
from headway.gateway.control.graph_files import keep_graphs
from headway.gateway.control.lengths.service import LengthService, open_lengths
from headway.gateway.control.own_fleet import OwnFleet
from headway.gateway.control.prefixes import PrefixBook, PrefixWarmer
from headway.gateway.control.prewarm import AdapterWarmer, BackendWarmer
from headway.gateway.control.remote.control import NoPlanner
from headway.gateway.control.remote.fleet import RemoteGateway, RemoteOrders
from headway.gateway.control.targets import Paces, measures
from headway.gateway.control.wiring import LocalGateway, be_ready, controller_of, engine_maker
from headway.gateway.parsing.tokens import TokenCounter
from headway.gateway.preflight import preflight
from headway.gateway.requests.background import BackgroundWork, Recovery, forget_old_jobs
from headway.gateway.requests.path import RequestPath
from headway.gateway.watch.audit import AuditLog
from headway.gateway.watch.ends import Observers
from headway.gateway.watch.journal import JournalKeeper
from headway.gateway.watch.late import LateRequests
from headway.gateway.watch.metrics import Metrics
from headway.gateway.watch.tracing import RequestTracing
from headway.gateway.watch.usage import Usage
from headway.policy.recipes.registry import find
from headway.ports import Lengths
from headway.store.batches.opening import opened as opened_batches
from headway.store.batches.port import BatchStore
from headway.store.queue import open_broker
from headway.store.queue.port import Broker


@dataclass(slots=True)
class Gateway:
    """An open gateway.

    config: as it was started with; classes and keys as they were read last.
    counters: model name -> what counts its prompts' tokens.
    bodies: the memory that bodies may take.
    batches: files and batches; None = no queue on disk would run them.
    paces: of its engines, as far as they were measured.
    late: the requests that missed their SLO by most.
    backends: those outside the LLM, by name.
    fleet: changes the engines.
    prefixes: what prompts of a unit have in common; None = the recipe plans no warm-ups.
    audit: what operators did, and which keys were refused.
    """

    config: Config
    metrics: Metrics
    lengths: LengthService
    counters: Mapping[str, TokenCounter]
    broker: Broker
    dispatcher: Dispatcher
    path: RequestPath
    background: BackgroundWork
    bodies: ByteBudget
    backends: Mapping[str, Backend]
    prefixes: PrefixBook | None
    batches: BatchStore | None
    paces: Paces
    late: LateRequests
    fleet: Fleet
    audit: AuditLog

    def adopt(self, config: Config) -> None:
        """Take over classes, keys and prices of a configuration."""
        self.config = config
        self.path.prices = config.prices
        self.path.usage.adopt(config.keys)
        self.metrics.targets(config.classes)
        be_ready(self.dispatcher.control.controller.planner, config)


@asynccontextmanager
async def serving(
    config: Config, *, log_dir: Path | None = None, link: WireLink | None = None
) -> AsyncIterator[Gateway]:
    """Open a gateway: tokenizers, length predictor, broker, backends, engines; then recover jobs.

    At the end background tasks stop first, then the engines, so that nothing is answered any more; foreground
    requests that are still open fail; the broker closes last. HeadwayError when something cannot be opened.

    link: to a controller and to agents in other processes, None = all is in this one.
    """
    recipe, metrics, paces = find(config.recipe), Metrics(), Paces()
    counters = await _counters(config)
    async with (
        _open_observers(config, metrics) as watch,
        open_lengths(recipe, config.predictor, metrics, config.history) as lengths,
        _open_broker(config.broker) as broker,
        opened(config.backends, config.tenant_share) as backends,
        opened_batches(config) as batches,
    ):
        wired = _wire(config, lengths.lengths, metrics, log_dir, link, paces)
        fleet = _fleet(config, wired, metrics, counters, paces, watch.journal)
        dispatcher, knowledge = wired.dispatcher, wired.control.controller.planner.knowledge
        prefixes = _add_warmers(dispatcher, backends, config)
        observers = Observers((metrics, watch.usage, watch.journal, watch.late, watch.tracing))
        path = RequestPath(config, dispatcher, broker, lengths, watch.usage, watch.tracing, observers)
        background = BackgroundWork(path, dispatcher)
        recovery = Recovery(broker, path.closings, background, dispatcher.in_flight, counters, config)
        forget = partial(forget_old_jobs, broker, config.broker)
        loops: list[tasks.Loop] = [recovery.run, forget, path.closings.run, metrics.history.run, watch.journal.run]
        loops += _autoscalers(config, wired, fleet, metrics)
        try:
            async with keep_graphs(knowledge, config.apps_dir), wired.running(), fleet, background.running():
                await recovery.renew()
                async with tasks.running(*loops, failed=metrics.loop_failed):
                    yield Gateway(
                        config, metrics, lengths, counters, broker, dispatcher, path, background,
                        _bodies(config), backends, prefixes, batches, paces, watch.late, fleet, watch.audit,
                    )  # fmt: skip
        finally:
            await path.close()


@dataclass(frozen=True, slots=True)
class _Watch:
    """The observers of requests, beside the metrics, and the audit log."""

    usage: Usage
    journal: JournalKeeper
    late: LateRequests
    tracing: RequestTracing
    audit: AuditLog


@asynccontextmanager
async def _open_observers(config: Config, metrics: Metrics) -> AsyncIterator[_Watch]:
    """Open the observers; at the end write what they have noted."""
    audit = AuditLog(config.audit.path, metrics.registry)
    journal = JournalKeeper(config.journal_dir, config.journal, metrics.registry)
    late = LateRequests(metrics.history.pair)
    watch = _Watch(Usage(config.keys), journal, late, RequestTracing(config.tracing), audit)
    try:
        yield watch
    finally:
        await audit.close()
        await journal.close()
        await asyncio.to_thread(watch.tracing.close)


async def _counters(config: Config) -> dict[str, TokenCounter]:
    models = {name: model for engine in config.fleet for name, model in engine.served.items()}
    return {name: await TokenCounter.load(model) for name, model in models.items()}


def _wire(
    config: Config, lengths: Lengths, metrics: Metrics, log_dir: Path | None, link: WireLink | None, paces: Paces
) -> LocalGateway | RemoteGateway:
    planner = find(config.recipe).planner()
    if link is not None:
        waits = controller_of(replace(config, scale={}), NoPlanner(planner), lengths)  # the controller elsewhere scales
        return RemoteGateway.of(config, waits, metrics, link)
    controller = controller_of(config, planner, lengths)
    add = paces.add if measures(config) else None
    return LocalGateway.of(
        config, controller, metrics, lambda listener: engine_maker(config, log_dir, listener, metrics, add)
    )


def _fleet(
    config: Config,
    wired: LocalGateway | RemoteGateway,
    metrics: Metrics,
    counters: dict[str, TokenCounter],
    paces: Paces,
    journal: JournalKeeper,
) -> Fleet:
    """Return what changes the engines, of this process or of agents; the journal follows those of this process."""
    work, check = GatewayWork(wired.dispatcher), partial(preflight, reads_keys=False)
    if isinstance(wired, RemoteGateway):
        return RemoteOrders(config, wired.fleet, wired.link, work, check, metrics, counters)
    wired.agents.beside = (partial(journal.follow, config.recipe),)
    return OwnFleet(config, wired.agents, wired.make, work, check, metrics, counters=counters, paces=paces)


def _autoscalers(
    config: Config, wired: LocalGateway | RemoteGateway, fleet: Fleet, metrics: Metrics
) -> list[tasks.Loop]:
    """Return what acts on the numbers of engines that models need, which become metrics."""
    scaling = wired.control.controller.scaling
    if scaling is None or isinstance(wired, RemoteGateway):
        return []
    metrics.wanted.counts = lambda: scaling.current
    loops = commands(config.scale, metrics.wanted.counts)
    if not (models := [model for model, one in config.scale.items() if one.starts_engines]):
        return loops
    autoscaler = Autoscaler(fleet, scaling, models)
    wired.control.have = autoscaler.have
    return [*loops, autoscaler.run]


def _bodies(config: Config) -> ByteBudget:
    return ByteBudget(config.server.max_queued_mib * 2**20, config.tenant_share)


def _add_warmers(dispatcher: Dispatcher, backends: Mapping[str, Backend], config: Config) -> PrefixBook | None:
    """Add what carries out warm-ups; return where it learns prefixes, if the planner plans any."""
    warmers = dispatcher.warmups.warmers
    warmers["backend"], warmers["adapter"] = BackendWarmer(backends), AdapterWarmer(dispatcher.engines)
    if find(config.recipe).planner().knowledge is None:
        return None
    prefixes = PrefixBook()
    warmers["prefix"] = PrefixWarmer(dispatcher.engines, prefixes)
    return prefixes


@asynccontextmanager
async def _open_broker(settings: BrokerSettings) -> AsyncIterator[Broker]:
    """Open the broker and begin its lease, which ends when it closes: others can take open jobs at once."""
    broker = open_broker(settings)
    try:
        await broker.renew(clock.now() + settings.lease_seconds)
        yield broker
    finally:
        await broker.close()
