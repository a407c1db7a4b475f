"""The interface of the wire: ordered messages between any two processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from headway.cluster.wire.messages import Item

Role = Literal["gateway", "controller", "agent"]
To = str | Literal["controller", "gateways", "all"]
"""The name of a gateway or an agent, the controller that leads, all gateways, or all gateways and agents."""


@dataclass(frozen=True, slots=True)
class Message:
    """A received message, with one or several items that were sent together.

    sender: name of the process that sent it.
    epoch: term of the controller that sent it, 0 from others; in messages to a controller, its own term.
    apart: seconds by which this process's clock is ahead of the sender's, transit time included.
    number: grows by one with each message from a sender to the same receiver; a gap means a lost message.
    """

    sender: str
    epoch: int
    items: tuple[Item, ...]
    apart: float
    number: int = 0


class WireLink(Protocol):
    """A process's link to the wire.

    Messages from one process to another arrive in order, or are lost when a connection breaks in between: the
    receiver sees a gap in the numbers, and a process whose own connection broke sees that in `connections`. A
    controller gets messages only while it leads, and at most one leads.
    """

    @property
    def name(self) -> str:
        """Return the unique name of this process."""
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
        """Yield messages until the link is closed."""
        ...
