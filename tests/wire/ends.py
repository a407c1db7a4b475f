"""Processes on the wire for tests, and a bare connection to look behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from headway.cluster.wire.connection import ALL, CONTROLLER, DEAD, DIRECT, TERM, RabbitAddress, RabbitConnection, tag_of
from headway.cluster.wire.messages import Item, Message
from headway.cluster.wire.rabbitmq import RabbitLink
from headway.events import Finished

SECONDS = 30.0  # for anything to happen


@asynccontextmanager
async def linked(address: RabbitAddress) -> AsyncIterator[RabbitConnection]:
    connection = await RabbitConnection.connect(address, "test")
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def leading(address: RabbitAddress, name: str = "c") -> AsyncIterator[RabbitLink]:
    """Yield a controller that leads."""
    async with RabbitLink.opened(address, name, "controller") as link:
        await eventually(lambda: link.connected)
        yield link


async def receive(link: RabbitLink, count: int = 1) -> list[Message]:
    """Return messages until so many items have come."""
    messages, items = list[Message](), 0
    async with asyncio.timeout(SECONDS):
        async for message in link.messages():
            messages.append(message)
            items += len(message.items)
            if items >= count:
                break
    return messages


def items(messages: list[Message]) -> list[Item]:
    return [item for message in messages for item in message.items]


def end(number: int) -> Finished:
    return Finished(f"r{number}", number)


async def eventually(true: Callable[[], Any]) -> None:
    deadline = asyncio.get_running_loop().time() + SECONDS
    while not true():
        assert asyncio.get_running_loop().time() < deadline, f"not true within {SECONDS} s"
        await asyncio.sleep(0.01)


async def dead(address: RabbitAddress) -> list[tuple[bytes, str]]:
    """Take all dead letters: bodies and reasons."""
    found = []
    async with linked(address) as connection:
        while (message := await connection.channel.basic_get(address.name(DEAD))).delivery_tag is not None:
            found.append((message.body, str((message.header.properties.headers or {})["reason"])))
            await connection.ack(tag_of(message))
    return found


async def clear(address: RabbitAddress) -> None:
    """Delete what an address has on the server."""
    async with linked(address) as connection:
        for queue in (CONTROLLER, TERM, DEAD):
            await connection.channel.queue_delete(address.name(queue))
        for exchange in (DIRECT, ALL):
            await connection.channel.exchange_delete(address.name(exchange))
