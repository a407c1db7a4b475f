"""A gateway without a controller and without engines of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headway.cluster.wire.messages import Gone
from headway.cluster.wire.port import WireLink
from headway.config import Config
from headway.gateway import tasks
from headway.gateway.control.dispatcher import Dispatcher
from headway.gateway.control.remote.control import RemoteControl
from headway.gateway.control.remote.fleet import RemoteFleet
from headway.gateway.watch.metrics import Metrics
from headway.policy.apps.account import RunAccount
from headway.policy.core.controller import Controller


@dataclass(frozen=True, slots=True)
class RemoteGateway:
    """The gateway's side, with what it knows of controller and engines from the wire."""

    control: RemoteControl
    fleet: RemoteFleet
    dispatcher: Dispatcher
    metrics: Metrics
    link: WireLink

    @classmethod
    def of(cls, config: Config, controller: Controller, metrics: Metrics, link: WireLink) -> RemoteGateway:
        """Connect requests in flight with the wire. controller: plans nothing, and admits requests."""
        control = RemoteControl(controller, link)
        fleet = RemoteFleet(control, config.named, config.wire.lease_seconds)
        runs = RunAccount(config.apps.run_timeout_s)
        dispatcher = Dispatcher(control, fleet.engines, runs, metrics)
        control.execute, fleet.dispatcher = dispatcher.execute, dispatcher
        return cls(control, fleet, dispatcher, metrics, link)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen to the wire until the block ends."""
        loops: list[tasks.Loop] = [self._listen, self.control.live, self.fleet.expire, *self.dispatcher.loops()]
        async with self.fleet.running():
            try:
                async with tasks.running(*loops, failed=self.metrics.loop_failed):
                    yield
            finally:
                await self.dispatcher.warmups.close()
                self.link.send("controller", Gone())

    async def _listen(self) -> None:
        async for message in self.link.messages():
            if message.epoch:
                self.control.receive(message)
            else:
                self.fleet.receive(message)
