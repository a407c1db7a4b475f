"""One connection to RabbitMQ with one channel: its queues, and the explanations of its errors.

When the channel ends, so does the connection: a leader that has lost one of its queues must not go on with
the others. Nothing is restored silently; each process on the wire reconnects and knows that it did.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import aiormq
from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage
from aiormq.exceptions import AMQPError, ChannelInvalidStateError, DeliveryError, PublishError
from pamqp.commands import Basic
from pamqp.common import FieldValue
from yarl import URL

from headway.addresses import is_url, netloc
from headway.cluster.wire.codec import WireError
from headway.errors import ConfigError

VARIABLE = "HEADWAY_RABBITMQ_URL"
MAX_BYTES = 4 << 20  # of a message; RabbitMQ 4 takes 16 MiB, earlier releases more
# Queues (for the controller, for the number of its term, for unreadable messages), then exchanges.
CONTROLLER, TERM, DEAD, DIRECT, ALL = "controller", "term", "dead", "direct", "all"
_FIRST_S, _LONGEST_S = 0.1, 5.0  # between tries to connect
_DEAD_LETTERS = 10_000  # the latest are kept
# RabbitMQ 4 drops what was delivered 20 times. Each takeover delivers the whole backlog once more.
_DELIVERIES = 2**31 - 1
_STALE_MS = 60_000  # age at which messages for the controller are dropped; senders report when one leads
_MOST = 100_000  # limit of messages for the controller
Item = TypeVar("Item")
log = logging.getLogger("headway.cluster.wire")


class RabbitLost(Exception):
    """The connection has ended; unconfirmed messages may or may not have arrived."""


class Unroutable(Exception):
    """No queue takes the message."""


@dataclass(frozen=True, slots=True)
class RabbitAddress:
    """RabbitMQ's address, and the prefix of this installation's queue names there.

    url: of a server, or of a cluster's nodes, separated by commas: any of them will do.
    timeout_s: limit for the server to connect or to confirm.
    heartbeat_s: the server ends a connection after two silent heartbeats; `?heartbeat=` in the URL takes
        precedence.
    """

    url: str
    prefix: str = "headway"
    timeout_s: float = 10.0
    heartbeat_s: int = 10

    def __repr__(self) -> str:
        return f"Address({self.place}, {self.prefix})"  # the URL may hold a password

    @property
    def place(self) -> str:
        """Return the server's address for messages, without user and password."""
        try:
            urls = [URL(url) for url in self.urls]
            places = [netloc(url.host or "", url.port or _PORTS[url.scheme]) for url in urls]
            return ", ".join(places) + (urls[0].path if urls[0].path != "/" else "")
        except (KeyError, ValueError):
            return f"the server of {VARIABLE}"

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the URL of each node."""
        return tuple(re.split(r",\s*(?=amqps?://)", self.url))

    def name(self, queue: str) -> str:
        """Return the full name of a queue or exchange."""
        return f"{self.prefix}.{queue}"

    def targets(self) -> list[URL]:
        """Return the URLs to connect to, in random order. ConfigError when one is invalid."""
        with suppress(ValueError):
            urls = [URL(url) for url in self.urls]
            if all(is_url(url, *_PORTS) for url in self.urls):
                beat = str(self.heartbeat_s)
                targets = [url.update_query(heartbeat=url.query.get("heartbeat", beat)) for url in urls]
                return random.sample(targets, len(targets))
        raise ConfigError(f"{VARIABLE} is not the URL of a RabbitMQ server.", _FORM, param=VARIABLE)


_PORTS = {"amqp": 5672, "amqps": 5671}
_FORM = (
    "Write amqp://USER:PASSWORD@HOST:PORT/VHOST, or amqps:// for TLS, with special characters as %XX; separate "
    "the URLs of a cluster's nodes by commas."
)


class RabbitConnection:
    """A connection with its channel. `lost` gets the reason as its result when either ends."""

    def __init__(self, address: RabbitAddress, connection: AbstractConnection, channel: AbstractChannel) -> None:
        self.address, self.channel, self._connection = address, channel, connection
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for part in (channel, connection):
            part.closing.add_done_callback(self._on_closed)
        channel.on_consumer_cancel_callbacks.add(lambda _: self.fail("a queue was deleted"))

    @classmethod
    async def connect(cls, address: RabbitAddress, name: str) -> RabbitConnection:
        """Connect, and create missing queues. ConfigError when that is not possible.

        name: of the connection in RabbitMQ's list. In a cluster, the first node that accepts is used.
        """
        with explained(address):
            connection = await _first(address, name)
            try:
                async with asyncio.timeout(address.timeout_s):
                    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
                    await declare(channel, address)
                    return cls(address, connection, channel)
            except BaseException:
                await _close(connection, address.timeout_s)
                raise

    def fail(self, reason: str) -> None:
        """Give up the connection."""
        if not self.lost.done():
            self.lost.set_result(reason)

    async def close(self) -> None:
        """End the connection."""
        self.fail("closed")
        await _close(self._connection, self.address.timeout_s)

    async def publish(
        self,
        body: bytes,
        key: str,
        *,
        exchange: str = "",
        mandatory: bool = True,
        id: str | None = None,
        **headers: Any,
    ) -> None:
        """Return when the server has the message on disk. RabbitLost, or Unroutable when no queue takes it.

        key: routing key; without an exchange, the full name of a queue. id: of the message.
        """
        properties = Basic.Properties(delivery_mode=2, message_id=id, headers=headers or None)
        with self._losing():
            try:
                await self.channel.basic_publish(
                    body, exchange=exchange, routing_key=key, properties=properties, mandatory=mandatory
                )
            except PublishError as error:
                raise Unroutable(key) from error

    async def ack(self, tag: int) -> None:
        """Acknowledge a delivery. Raise RabbitLost if the connection is gone."""
        with self._losing():
            await self.channel.basic_ack(tag)

    async def consume(self, queue: str, take: Callable[[DeliveredMessage], None], *, prefetch: int = 0) -> None:
        """Call `take` with each message of a queue, in order.

        prefetch: limit of unacknowledged deliveries, 0 = they need no acknowledgement.
        """

        async def callback(message: DeliveredMessage) -> None:
            take(message)

        with self._losing():
            await self.channel.basic_qos(prefetch_count=prefetch)
            await self.channel.basic_consume(queue, callback, no_ack=not prefetch)

    async def take_all(self, name: str, take: Callable[[DeliveredMessage], None], *bindings: tuple[str, str]) -> None:
        """Call `take` with each message to a process, whose queue exists while it is connected.

        bindings: (exchange, routing key). ConfigError when another process has this name.
        """
        queue = self.address.name(f"to.{name}")
        with explained(self.address):
            await self.channel.queue_declare(queue, exclusive=True, auto_delete=True)
            for exchange, key in bindings:
                await self.channel.queue_bind(queue, exchange, key)
        await self.consume(queue, take)

    async def is_unused(self, queue: str) -> bool:
        """Tell whether a queue has neither messages nor consumers."""
        with self._losing():
            found = await self.channel.queue_declare(queue, passive=True)
        return not found.message_count and not found.consumer_count

    async def next_of(self, queue: asyncio.Queue[Item]) -> Item:
        """Return the next item of a queue in this process. RabbitLost when the connection ends first."""
        if not queue.empty() and not self.lost.done():
            await asyncio.sleep(0)  # let other tasks run, however many items there are
            return queue.get_nowait()
        get = asyncio.ensure_future(queue.get())
        try:
            waiting: set[asyncio.Future[Any]] = {get, self.lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not get.done() or self.lost.done():
                get.cancel()
        if self.lost.done():
            raise RabbitLost(self.lost.result())
        return get.result()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background; if it fails, give up the connection."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(str(error))

    async def bury(self, message: DeliveredMessage, reason: str, *, acknowledges: bool) -> None:
        """Move an unreadable message to the dead letters, with the reason."""
        log.error("a message of %s goes to %s: %s", message.routing_key, DEAD, reason)
        await self.publish(message.body, self.address.name(DEAD), reason=reason, queue=message.routing_key)
        if acknowledges:
            await self.ack(tag_of(message))

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except DeliveryError as error:  # the server refused it, for example while a queue has no leader
            self.fail(str(error))
            raise RabbitLost(str(error)) from error
        except (AMQPError, ChannelInvalidStateError, OSError) as error:
            self.fail(str(error))
            raise RabbitLost(str(error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() or not self.channel.is_closed:
                raise
            self.fail("the channel was closed")  # aiormq cancels the tasks that wait for it
            raise RabbitLost("the channel was closed") from None

    def _on_closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        self.fail(str(error or "the connection has ended"))


async def _first(address: RabbitAddress, name: str) -> AbstractConnection:
    """Return a connection to the first node that accepts; if none does, raise the last one's error."""
    targets = address.targets()
    while True:
        target = targets.pop()
        try:
            properties: dict[str, FieldValue] = {"connection_name": name}
            return await _within(address.timeout_s, aiormq.connect(target, client_properties=properties))
        except (AMQPError, OSError):  # TimeoutError among them
            if not targets:
                raise


async def _within(seconds: float, work: Coroutine[Any, Any, Item]) -> Item:
    """Return the result of some work. TimeoutError when it takes longer, even if it cannot be cancelled.

    ConnectionResetError when the connection ends inside aiormq: it then cancels the tasks that wait for it, which
    a caller must not take for its own cancellation, or raises StopAsyncIteration.
    """
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()  # no effect on a finished task
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if task.cancelled() or isinstance(task.exception(), StopAsyncIteration):
        raise ConnectionResetError("the connection ended while it was being made")
    return task.result()


async def declare(channel: AbstractChannel, address: RabbitAddress) -> None:
    """Declare the queues and exchanges that every process on the wire relies on."""
    quorum: dict[str, FieldValue] = {"x-queue-type": "quorum", "x-delivery-limit": _DELIVERIES}
    alone: dict[str, FieldValue] = {**quorum, "x-single-active-consumer": True}
    bounded: dict[str, FieldValue] = {**alone, "x-max-length": _MOST, "x-message-ttl": _STALE_MS}
    dead: dict[str, FieldValue] = {**quorum, "x-max-length": _DEAD_LETTERS}
    for name, arguments in ((CONTROLLER, bounded), (TERM, alone), (DEAD, dead)):
        await channel.queue_declare(address.name(name), durable=True, arguments=arguments)
    for name, kind in ((DIRECT, "direct"), (ALL, "fanout")):
        await channel.exchange_declare(exchange=address.name(name), exchange_type=kind, durable=True)


@contextmanager
def explained(address: RabbitAddress) -> Iterator[None]:
    """Turn errors of connecting into a ConfigError that names the fix and never quotes a password."""
    place = address.place
    try:
        yield
    except TimeoutError:
        fix = "Check whether it is overloaded, or correct the address."
        raise ConfigError(f"RabbitMQ ({place}) does not answer.", fix, param=VARIABLE) from None
    except (aiormq.exceptions.AuthenticationError, aiormq.exceptions.ProbableAuthenticationError):
        fix = f"Correct user and password in {VARIABLE}, or create the user with rabbitmqctl add_user."
        raise ConfigError(f"RabbitMQ ({place}) refuses the user or the password.", fix, param=VARIABLE) from None
    except aiormq.exceptions.ChannelPreconditionFailed as error:
        fix = "Delete that queue or exchange, or give this installation another prefix."
        raise ConfigError(f"RabbitMQ ({place}): {_text(error)}.", fix, param=VARIABLE) from None
    except aiormq.exceptions.InvalidFrameError:  # it closes the connection where it should open the vhost
        fix = "Make the vhost (rabbitmqctl add_vhost) and let the user configure, write and read there."
        raise ConfigError(f"RabbitMQ ({place}) does not open this vhost.", fix, param=VARIABLE) from None
    except aiormq.exceptions.ChannelLockedResource:
        fix = "Give each agent a unique name, or wait until the last process of this name has ended."
        raise ConfigError(f"RabbitMQ ({place}) knows another process of this name.", fix) from None
    except (aiormq.exceptions.ConnectionNotAllowed, aiormq.exceptions.ChannelAccessRefused) as error:
        fix = "Make the vhost (rabbitmqctl add_vhost) and let the user configure, write and read there."
        raise ConfigError(f"RabbitMQ ({place}): {_text(error)}.", fix, param=VARIABLE) from None
    except (AMQPError, ChannelInvalidStateError, OSError) as error:
        fix = f"Start it, or correct {VARIABLE}."
        raise ConfigError(f"RabbitMQ ({place}) cannot be reached: {_text(error)}.", fix, param=VARIABLE) from None


def _text(error: Exception) -> str:
    return (str(error.args[-1]) if error.args else str(error)).rstrip(".") or type(error).__name__


async def _close(connection: AbstractConnection, timeout_s: float) -> None:
    with suppress(Exception):  # the connection is over in any case
        await _within(timeout_s, connection.close())


def tag_of(message: DeliveredMessage) -> int:
    """Return the tag by which a delivery is acknowledged."""
    assert message.delivery_tag is not None
    return message.delivery_tag


def sized(data: bytes, what: str) -> bytes:
    """Return `data` unchanged. WireError when it is too large for a message."""
    if len(data) > MAX_BYTES:
        raise WireError(
            f"{what} of {len(data):,} bytes cannot be sent: a message may have at most {MAX_BYTES:,} bytes.",
            "Send less at once.",
        )
    return data


def pauses() -> Iterator[float]:
    """Yield seconds to wait between attempts to connect: exponential backoff with jitter."""
    for power in itertools.count():
        yield min(_FIRST_S * 2 ** min(power, 16), _LONGEST_S) * random.uniform(0.5, 1.0)


async def reconnected(
    connect: Callable[[], Coroutine[Any, Any, RabbitConnection]], why: str, seconds: float
) -> RabbitConnection:
    """Return a new connection, however long that takes.

    why: reason for the end of the last one, for the log. seconds: limit of one attempt as a whole.
    """
    log.warning("the connection to RabbitMQ has ended (%s); connecting again", why)
    last = ""
    for pause in pauses():
        await asyncio.sleep(pause)
        try:
            link = await _within(seconds, connect())
        except Exception as error:  # any error: without a connection, this process is useless
            if str(error) != last:
                known = isinstance(error, (ConfigError, RabbitLost, OSError))
                log.warning("%s", error, exc_info=None if known else error)
            last = str(error)
        else:
            log.warning("connected to RabbitMQ (%s) again", link.address.place)
            return link
    raise AssertionError("pauses do not end")
