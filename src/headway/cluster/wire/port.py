"""The port to the wire: messages between processes, in order, from each to each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from headway.cluster.wire.messages import Item

Role = Literal["gateway", "controller", "agent"]
To = str | Literal["controller", "all"]
"""The name of a gateway or an agent, the controller that leads, or all gateways and agents."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it came, with one or several things that were sent together.

    sender: the name of its process.
    epoch: the term of the controller that sent it, 0 from others; of what a controller gets, its own term.
    apart: seconds by which this process's clock is ahead of the sender's, the way of the message included.
    number: grows by one with each message of a sender for the same receiver; one that is left out was lost.
    """

    sender: str
    epoch: int
    items: tuple[Item, ...]
    apart: float
    number: int = 0


class WireLink(Protocol):
    """One process on the wire.

    What one process sends to another comes in this order, or not at all when a connection breaks in between:
    the receiver sees a gap in the numbers, and a process whose own connection broke sees that in
    `connections`. A controller gets messages as long as it leads, and no other does at that time.
    """

    @property
    def name(self) -> str:
        """The name of this process; no other has it."""
        ...

    @property
    def connected(self) -> bool:
        """Tell whether messages can be sent."""
        ...

    @property
    def connections(self) -> int:
        """Return how often this process has connected so far."""
        ...

    def send(self, to: To, *items: Item) -> None:
        """Send items soon, together; without a connection they are lost."""
        ...

    def messages(self) -> AsyncIterator[Message]:
        """Yield what comes, until the link is closed."""
        ...
