"""`headway controller`: leads, or stands by until the leader is gone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack

from headway import clock
from headway.cluster.roles.leader import Leader
from headway.cluster.wire.port import Message, WireLink
from headway.config import Config
from headway.gateway import tasks
from headway.gateway.control.control import Control, Inquire
from headway.gateway.control.lengths.service import LengthService
from headway.gateway.control.planning import Execute
from headway.gateway.control.scale_command import commands
from headway.gateway.control.setup import controller_of, drops
from headway.gateway.watch.metrics import Metrics
from headway.policy.recipes.registry import find

log = logging.getLogger("headway.gateway")


class ControllerProcess:
    """A controller that leads whenever the wire lets it; each term begins with a new, empty `Leader`.

    leader: that of the current or last term, None = it has not led yet. metrics: its own.
    """

    def __init__(self, config: Config, link: WireLink, lengths: LengthService, metrics: Metrics) -> None:
        self._config, self._link, self._lengths, self.metrics = config, link, lengths, metrics
        self.leader: Leader | None = None
        self._term, self._since = 0, 0.0  # the number of its term, and the instant of its begin
        metrics.wanted.counts = self._wanted

    def _wanted(self) -> Mapping[str, int]:
        """Return how many engines models need; nothing while it does not lead, or may not have heard of all agents."""
        knows = self._link.connected and clock.now() - self._since > self._config.wire.lease_seconds
        scaling = self.leader.control.controller.scaling if self.leader is not None and knows else None
        return {} if scaling is None else scaling.current

    def state(self) -> dict[str, int]:
        """Return the number of requests that it knows, 0 while it does not lead."""
        known = 0 if self.leader is None else len(self.leader.control.controller.requests)
        return {"requests": known if self._link.connected else 0}

    async def run(self) -> None:
        """Handle messages until the link is closed."""
        async with AsyncExitStack() as stack:
            async for message in self._link.messages():
                if self.leader is None or message.epoch != self._term:
                    await stack.aclose()
                    self._term, self._since, self.leader = message.epoch, clock.now(), self._new_leader()
                    log.info("this controller leads, in term %d", self._term)
                    await self.leader.control.prepare()
                    loops = [*self.leader.loops(), *commands(self._config.scale, self._wanted)]
                    await stack.enter_async_context(tasks.running(*loops, failed=self.metrics.loop_failed))
                self._receive(self.leader, message)

    def _receive(self, leader: Leader, message: Message) -> None:
        """Handle a message; if that fails, ask the sender for a full report."""
        try:
            leader.receive(message)
        except Exception:
            log.exception("handling a message from %s failed; asking it for a full report", message.sender)
            self.metrics.loop_failed("receive")
            leader.distrust(message.sender)

    def _new_leader(self) -> Leader:
        return Leader(self._link, self._control, self._config.wire.lease_seconds, self._config.named)

    def _control(self, execute: Execute, inquire: Inquire) -> Control:
        config = self._config
        controller = controller_of(config, find(config.recipe).planner(), self._lengths.lengths)
        swaps = any(engine.models for engine in config.engines)
        return Control(controller, execute, inquire, drops=drops(config), swaps=lambda: swaps)
