"""Elects the controller that leads, and numbers its term.

The queue `term` holds one message, the number of the term. Its single active consumer leads: it replaces the
message with the next number, and holds that until its connection ends. A term ends with the connection to its
queues, so a leader that was paused cannot read on; its earlier messages are recognized by their epoch. RabbitMQ
closes channels that hold a message for more than 30 minutes (`consumer_timeout`), so a leader renews the
message of its term well before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets

from aiormq.abc import DeliveredMessage

from headway.cluster.wire.connection import TERM, RabbitConnection, tag_of

log = logging.getLogger("headway.cluster.wire")


class Term:
    """The message with the number of the term; its holder leads."""

    def __init__(self, link: RabbitConnection) -> None:
        self._link, self._queue = link, link.address.name(TERM)
        self._claims = (f"{secrets.token_hex(8)}.{number}" for number in itertools.count())
        self._claim, self.epoch = "", 0
        self._tag: int | None = None
        self._messages: asyncio.Queue[DeliveredMessage] = asyncio.Queue()

    async def begin(self) -> None:
        """Wait until this controller leads. RabbitLost when the connection ends first."""
        # A message is replaced before it is acknowledged, so a queue without consumers and messages has never
        # had one. A second message would do no harm.
        if await self._link.is_unused(self._queue):
            await self._link.publish(b"0", self._queue)
        await self._link.consume(self._queue, self._messages.put_nowait, prefetch=1)
        while not await self._advance():
            pass

    async def hold_on(self) -> None:
        """Replace the message with a fresh one."""
        await self._put(self.epoch)
        while not await self._advance():
            pass

    async def _advance(self) -> bool:
        """Take the next message; return whether it is the latest claim of this controller.

        A claim is higher than all numbers seen before; all other messages in the queue are taken first.
        """
        if self._tag is not None:
            await self._link.ack(self._tag)
        message = await self._link.next_of(self._messages)
        self._tag = tag_of(message)
        if message.header.properties.message_id == self._claim:
            return True
        seen = _number(message)
        if not self._claim or seen >= self.epoch:
            await self._put(seen + 1)
        return False

    async def _put(self, epoch: int) -> None:
        claim = next(self._claims)
        await self._link.publish(str(epoch).encode(), self._queue, id=claim)
        self._claim, self.epoch = claim, epoch


def _number(message: DeliveredMessage) -> int:
    try:
        return int(message.body)
    except ValueError:
        log.error("a message of %s is not a number: %r", message.routing_key, message.body[:80])
        return 0
