"""The wire in RabbitMQ: one queue for the controller that leads, one for each gateway and agent.

It carries only transient state. Gateways own the requests (and their shared PostgreSQL the background work),
agents own the engines; a process that missed a message gets everything again (`messages.WireLink`). So no message
waits in RabbitMQ for a request to end, and its queues are short.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NamedTuple

from aiormq.abc import DeliveredMessage

from headway import clock
from headway.cluster.wire.codec import Envelope, WireError, decode, encode
from headway.cluster.wire.connection import (
    ALL,
    CONTROLLER,
    DIRECT,
    MAX_BYTES,
    TERM,
    RabbitAddress,
    RabbitConnection,
    RabbitLost,
    reconnected,
    sized,
    tag_of,
)
from headway.cluster.wire.messages import Item, Message, Present, Role


class Term:
    """Elects the controller that leads, and numbers its term.

    The queue `term` holds one message, the number of the term. Its single active consumer leads: it replaces the
    message with the next number, and holds that until its connection ends. A term ends with the connection to its
    queues, so a leader that was paused cannot read on; its earlier messages are recognized by their epoch. RabbitMQ
    closes channels that hold a message for more than 30 minutes (`consumer_timeout`), so a leader renews the
    message of its term well before.
    """

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


_PREFETCH = 1000  # messages that a controller has not acknowledged yet
_BATCH = 500  # items in one message
_MOST = 200_000  # items that wait to be sent; with more, the connection is given up and everything is sent again
_HOLD_ON_S = 300.0  # well below RabbitMQ's `consumer_timeout`
_DRIFT_S = 0.001  # limit by which the estimated clock offset may grow per message
log = logging.getLogger("headway.cluster.wire")


class _Delivery(NamedTuple):
    connection: RabbitConnection
    tag: int | None
    message: Message


class RabbitLink:
    """A `messages.WireLink` over RabbitMQ, made by `opened`. name: of this process."""

    def __init__(self, address: RabbitAddress, name: str, role: Role) -> None:
        self.name, self._address, self._controls = name, address, role == "controller"
        self._names = (name, "gateways") if role == "gateway" else (name,)
        self.connected, self.connections, self.term = False, 0, 0
        self._numbers = defaultdict[str, int](int)  # of the last message, by receiver
        self._inbox: asyncio.Queue[_Delivery] = asyncio.Queue()
        self._outbox: deque[tuple[str, Item]] = deque()
        self._filled = asyncio.Event()
        self._apart: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._current: RabbitConnection

    @classmethod
    @asynccontextmanager
    async def opened(cls, address: RabbitAddress, name: str, role: Role) -> AsyncIterator[RabbitLink]:
        """Yield a link that reconnects by itself; at the end, waiting items are sent if possible.

        ConfigError when the first connection fails. A controller may still have to wait to lead.
        """
        link = cls(address, name, role)
        link._current = await link._connect()
        task = asyncio.create_task(link._run())
        try:
            yield link
        finally:
            await link._drain()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # ---- messages.WireLink

    def send(self, to: str, *items: Item) -> None:
        """Send items soon, together with others to the same receiver; without a connection they are lost."""
        if not self.connected:
            return
        self._outbox.extend((to, item) for item in items)
        self._filled.set()
        if len(self._outbox) > _MOST:
            log.error("RabbitMQ takes messages too slowly; connecting again to send everything anew")
            self._outbox.clear()
            self._current.fail("too many items waited to be sent")

    async def messages(self) -> AsyncIterator[Message]:
        """Yield messages until the link is closed."""
        while True:
            connection, tag, message = await self._inbox.get()
            if not self._controls or message.epoch == self.term:
                yield message
            if tag is not None:
                with suppress(RabbitLost):
                    await connection.ack(tag)

    # ---- connections

    async def _run(self) -> None:
        """Stay connected until cancelled."""
        try:
            while True:
                why = await self._live(self._current)
                self.connected, self.term = False, 0
                self._outbox.clear()
                self._close_later(self._current)
                self._current = await reconnected(self._connect, why, self._address.timeout_s)
        finally:
            self.connected = False
            await self._current.close()

    def _close_later(self, connection: RabbitConnection) -> None:
        """Close an ended connection in the background: on a dead network that may take long."""
        task = asyncio.create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _connect(self) -> RabbitConnection:
        connection = await RabbitConnection.connect(self._address, self.name)
        try:
            if not self._controls:
                await connection.take_all(
                    self.name,
                    partial(self._take, connection),
                    *((self._address.name(DIRECT), name) for name in self._names),
                    (self._address.name(ALL), ""),
                )
                self._set_connected()
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _live(self, connection: RabbitConnection) -> str:
        """Use a connection until it ends; return why it did."""
        work = [asyncio.create_task(self._publish(connection))]
        if self._controls:
            work.append(asyncio.create_task(self._lead(connection)))
        lost = asyncio.create_task(asyncio.wait([connection.lost]))
        try:
            await asyncio.wait([*work, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*work, lost):
                task.cancel()
            ended = await asyncio.gather(*work, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, RabbitLost):
                log.error("control over RabbitMQ has failed", exc_info=error)  # a bug; everything is sent again
        return connection.lost.result() if connection.lost.done() else "it was given up"

    async def _publish(self, connection: RabbitConnection) -> None:
        """Send waiting items until the connection ends."""
        while True:
            await self._filled.wait()
            while self._outbox:
                await self._send_next(connection)
            self._filled.clear()

    def _set_connected(self) -> None:
        self.connected, self.connections = True, self.connections + 1

    async def _lead(self, connection: RabbitConnection) -> None:
        """Wait until this controller leads, then keep its term."""
        term = Term(connection)
        await term.begin()
        self.term = term.epoch
        self._set_connected()
        queue = self._address.name(CONTROLLER)
        await connection.consume(queue, partial(self._take, connection), prefetch=_PREFETCH)
        while True:
            await asyncio.sleep(_HOLD_ON_S)
            await term.hold_on()

    async def _send_next(self, connection: RabbitConnection) -> None:
        """Send the items that are next for one receiver."""
        to, items, size = self._outbox[0][0], list[Item](), 0
        while self._outbox and self._outbox[0][0] == to and size < _BATCH:
            items.append(self._outbox.popleft()[1])
            size += len(items[-1].requests) if isinstance(items[-1], Present) else 1
        for body in self._messages(to, items):
            await self._send_message(connection, to, body)

    def _messages(self, to: str, items: Sequence[Item]) -> Iterator[bytes]:
        """Yield items as one message, or as several where one would be too large.

        A message that cannot be sent is left out, with its number, so that its receiver sees the loss.
        """
        self._numbers[to] += 1
        envelope = Envelope(self.term, self.name, self._numbers[to], clock.now(), tuple(items))
        try:
            body = encode(envelope)
            if len(body) > MAX_BYTES and len(items) > 1:
                self._numbers[to] -= 1
                middle = len(items) // 2
                yield from self._messages(to, items[:middle])
                yield from self._messages(to, items[middle:])
                return
            sized(body, f"A message for {to}")
        except WireError as error:
            log.error("%s", error)
            return
        yield body

    async def _send_message(self, connection: RabbitConnection, to: str, body: bytes) -> None:
        if to == "controller":
            await connection.publish(body, self._address.name(CONTROLLER))
        elif to == "all":
            await connection.publish(body, "", exchange=self._address.name(ALL), mandatory=False)
        else:
            await connection.publish(body, to, exchange=self._address.name(DIRECT), mandatory=False)

    async def _drain(self) -> None:
        """Give waiting items a moment to be sent."""
        for _ in range(100):
            if not (self.connected and self._filled.is_set()):
                return
            await asyncio.sleep(0.01)

    def _take(self, connection: RabbitConnection, message: DeliveredMessage) -> None:
        """Put a delivery into the inbox; one that cannot be read goes to the dead letters."""
        try:
            envelope = decode(message.body)
        except WireError as error:
            connection.begin(connection.bury(message, error.message, acknowledges=self._controls))
            return
        if envelope.sender == self.name:
            return
        received = Message(
            envelope.sender, self.term or envelope.epoch, envelope.items, self._estimate(envelope), envelope.number
        )
        self._inbox.put_nowait(_Delivery(connection, tag_of(message) if self._controls else None, received))

    def _estimate(self, envelope: Envelope) -> float:
        """Return how far this clock is ahead of the sender's: the least offset seen lately."""
        seen = clock.now() - envelope.sent
        least = self._apart.get(envelope.sender, seen)
        self._apart[envelope.sender] = min(seen, least + _DRIFT_S)
        return self._apart[envelope.sender]
