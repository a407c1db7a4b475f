"""Makes controllers and engines from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.config import Config
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.pace import MeasuredPace
from headway.events import Event
from headway.gateway.watch.metrics import Metrics
from headway.policy.apps.prewarming import PrewarmOptions
from headway.policy.core.controller import Controller
from headway.policy.core.shares import QueueShares
from headway.ports import Lengths, Planner

Listener = Callable[[Event], None]


def controller_of(config: Config, planner: Planner, lengths: Lengths) -> Controller:
    """Return the controller; several tenants take turns, and none may fill the queue."""
    server, shares = config.server, None
    if config.several_tenants:
        planner.take_turns()
        shares = QueueShares(server.tenant_share, server.class_share)
    elif config.keys:
        shares = QueueShares()  # for keys.max_queued
    be_ready(planner, config)
    return Controller(planner, lengths, server.max_queued, shares)


def be_ready(planner: Planner, config: Config) -> None:
    """Set how readily a planner warms ahead for each class."""
    if planner.prewarming is not None:
        readiness = {name: tier.prewarm for name, tier in config.classes.items()}
        planner.prewarming.options = PrewarmOptions(readiness)


def engines_of(
    config: Config,
    log_dir: Path | None,
    listener: Listener,
    metrics: Metrics,
    only: frozenset[str] | None = None,
    on_pace: Callable[[str, MeasuredPace], None] | None = None,
) -> dict[str, VllmEngine]:
    """Return the engines by id.

    only: ids of those that are wanted, None = all. on_pace: receives their measured pace, None = none is.
    """
    named = {f"e{i}": engine for i, engine in enumerate(config.engines)}
    return {
        id: VllmEngine(
            id,
            engine,
            config.recipe,
            log_dir or config.logs_dir,
            listener,
            metrics.swapped,
            host=config.wire.host,
            on_pace=on_pace,
        )
        for id, engine in named.items()
        if only is None or id in only
    }


def drops(config: Config) -> bool:
    """Return whether some class refuses what cannot be on time."""
    return any(tier.drop for tier in config.classes.values())
