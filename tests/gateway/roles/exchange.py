"""A wire within this process, between threads, with the rules of the real one; what it carries is copied."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headway.cluster.wire.messages import Item, Message


@dataclass(eq=False)
class LocalLink:
    """One process on the exchange; made on the event loop that takes its messages."""

    exchange: Exchange
    name: str
    controls: bool
    connected: bool = True
    connections: int = 1
    term: int = 0
    apart: float = 0.0
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    inbox: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)

    def send(self, to: str, *items: Item) -> None:
        if self.connected and (not self.controls or self.term):
            self.exchange.carry(self, to, pickle.dumps(items))

    async def messages(self) -> AsyncIterator[Message]:
        while True:
            yield await self.inbox.get()

    def take(self, sender: LocalLink, data: bytes) -> None:
        message = Message(sender.name, self.term or sender.term, pickle.loads(data), sender.apart - self.apart)
        self.loop.call_soon_threadsafe(self.inbox.put_nowait, message)


@dataclass
class Exchange:
    """All links; the controller that was there first leads, the next when it is gone."""

    links: dict[str, LocalLink] = field(default_factory=dict)
    term: int = 0
    cut: set[str] = field(default_factory=set)
    carried: list[tuple[str, str]] = field(default_factory=list)  # sender and receiver of each message

    def link(self, name: str, *, controls: bool = False) -> LocalLink:
        new = self.links[name] = LocalLink(self, name, controls)
        return new

    def leader(self) -> LocalLink | None:
        """Return the controller that leads; its term begins when it gets its first message."""
        able = [one for one in self.links.values() if one.controls and one.connected]
        if able and not able[0].term:
            self.term += 1
            able[0].term = self.term
        return able[0] if able else None

    def carry(self, sender: LocalLink, to: str, data: bytes) -> None:
        if to == "controller":
            receivers = [leader] if (leader := self.leader()) else []
        elif to == "all":
            receivers = [one for one in self.links.values() if not one.controls and one is not sender]
        elif to == "gateways":
            receivers = [one for name, one in self.links.items() if name.startswith("g")]
        else:
            receivers = [self.links[to]] if to in self.links else []
        for one in receivers:
            if one.connected:
                one.take(sender, data)
        self.carried.append((sender.name, to))

    def lose(self, name: str) -> None:
        """Take a process off the wire, as its death would."""
        link = self.links.pop(name)
        link.connected, link.term = False, 0

    def part(self, name: str) -> None:
        """Break a process's connection; `mend` gives it a new one."""
        self.links[name].connected, self.links[name].term = False, 0

    def mend(self, name: str) -> None:
        link = self.links.pop(name)
        link.connected, link.connections = True, link.connections + 1
        self.links[name] = link  # behind the others: a controller stands by now
