"""What `messages.WireLink` promises, on a real RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise

import pytest
import uvloop
from yarl import URL

from headway import clock
from headway.cluster.wire.codec import Envelope, encode
from headway.cluster.wire.connection import CONTROLLER, DIRECT, MAX_BYTES, RabbitAddress, RabbitConnection
from headway.cluster.wire.rabbitmq import RabbitLink
from headway.errors import ConfigError
from headway.events import Failed, Tick
from headway.types import Send
from testing.servers.proxy import proxied
from tests.helpers import rabbitmq as server
from tests.wire.ends import dead, end, eventually, items, leading, linked, receive

COUNT = 2_000


# ---- messages


async def test_what_one_sends_comes_in_its_order_without_a_gap(address: RabbitAddress) -> None:
    async with leading(address) as leader, RabbitLink.opened(address, "a", "agent") as a:
        for number in range(COUNT):
            a.send("controller", end(number))
            if number % 100 == 0:
                a.send("all", Tick())  # which controllers do not get
            if number % 300 == 0:
                await asyncio.sleep(0)
        messages = await receive(leader, COUNT)
    assert items(messages) == [end(number) for number in range(COUNT)]
    assert [message.number for message in messages] == list(range(1, len(messages) + 1))
    senders = {(message.sender, message.epoch) for message in messages}
    assert senders == {("a", leader.term)} or leader.term == 0


async def test_commands_reach_one_and_what_is_for_all_reaches_all_others(address: RabbitAddress) -> None:
    opened = RabbitLink.opened
    async with leading(address) as leader, opened(address, "a", "agent") as a, opened(address, "b", "agent") as b:
        term = leader.term
        leader.send("a", Send("1", "e0"))
        leader.send("all", Tick())
        b.send("all", end(1))
        messages = await receive(a, 3)
        assert items([one for one in messages if one.epoch]) == [Send("1", "e0"), Tick()]
        assert items([one for one in messages if not one.epoch]) == [end(1)]
        (message,) = await receive(b)
        assert (message.items, message.epoch) == ((Tick(),), term)


async def test_what_is_for_gateways_reaches_no_agent(address: RabbitAddress) -> None:
    opened = RabbitLink.opened
    async with leading(address) as leader, opened(address, "a", "agent") as a, opened(address, "g", "gateway") as g:
        a.send("gateways", end(1))
        assert items(await receive(g)) == [end(1)]
        leader.send("all", Tick())
        assert items(await receive(a)) == items(await receive(g)) == [Tick()]


async def test_what_waits_comes_to_the_next_leader(address: RabbitAddress) -> None:
    async with RabbitLink.opened(address, "a", "agent") as a:
        a.send("controller", end(1))
        async with leading(address) as leader:
            assert items(await receive(leader)) == [end(1)]


async def test_what_was_not_taken_note_of_comes_to_the_next_leader(address: RabbitAddress) -> None:
    """A message is acknowledged when the next one is asked for."""
    async with RabbitLink.opened(address, "a", "agent") as a:
        async with leading(address) as leader:
            a.send("controller", end(1))
            await receive(leader)
        async with leading(address) as leader:
            assert items(await receive(leader)) == [end(1)]


async def test_clocks_that_are_apart_are_known(address: RabbitAddress) -> None:
    """Five minutes, and a way that takes less than a few seconds even on a slow machine."""
    async with leading(address) as leader, linked(address) as connection:
        for number in range(1, 4):
            envelope = Envelope(0, "late", number, clock.now() - 300.0, (Tick(),))
            await connection.publish(encode(envelope), address.name(CONTROLLER))
        messages = await receive(leader, 3)
    assert all(300.0 <= message.apart < 310.0 for message in messages)


# ---- leaders


async def test_one_leads_and_the_next_has_a_higher_epoch(address: RabbitAddress) -> None:
    epochs = []
    for round in range(4):
        async with leading(address, f"c{round}") as leader:
            epochs.append(leader.term)
            async with RabbitLink.opened(address, "standby", "controller") as standby:
                async with RabbitLink.opened(address, "a", "agent") as a:
                    a.send("controller", end(round))
                    async for message in leader.messages():
                        if end(round) in message.items:
                            break
                assert not standby.connected
                assert not standby.term
                leader._current.fail("cut off")  # the connection ends as by a fault
                await eventually(lambda one=standby: one.connected)
                epochs.append(standby.term)
                assert not leader.term
    assert all(one < two for one, two in pairwise(epochs)), epochs


async def test_a_controller_that_does_not_lead_says_nothing(address: RabbitAddress) -> None:
    async with AsyncExitStack() as stack:
        leader = await stack.enter_async_context(leading(address))
        other = await stack.enter_async_context(RabbitLink.opened(address, "c2", "controller"))
        a = await stack.enter_async_context(RabbitLink.opened(address, "a", "agent"))
        other.send("a", Send("1", "e0"))
        leader.send("a", Send("2", "e0"))
        assert items(await receive(a)) == [Send("2", "e0")]


# ---- what goes wrong on the way


async def test_a_process_that_was_cut_off_connects_again_and_knows(address: RabbitAddress) -> None:
    async with proxied(address.url) as (proxy, url), leading(address) as leader, AsyncExitStack() as stack:
        a = await stack.enter_async_context(RabbitLink.opened(replace(address, url=url), "a", "agent"))
        assert (a.connected, a.connections) == (True, 1)
        proxy.cut(accept=False)
        await eventually(lambda: not a.connected)
        a.send("controller", end(1))  # lost
        proxy.accepts = True
        await eventually(lambda: a.connections == 2)
        a.send("controller", end(2))
        assert items(await receive(leader)) == [end(2)]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
async def test_a_server_that_ends_connections_while_they_are_made(
    address: RabbitAddress, run: Callable[..., None]
) -> None:
    """The loops differ in what aiormq then raises: its own errors, CancelledError, StopAsyncIteration."""

    async def cut_off_again_and_again() -> None:
        opened = RabbitLink.opened
        async with proxied(address.url) as (proxy, url), opened(replace(address, url=url), "a", "agent") as a:
            for number in range(1, 4):
                proxy.cut(accept=False)
                await eventually(lambda: not a.connected)
                await asyncio.sleep(0.5)  # some attempts
                proxy.accepts = True
                await eventually(lambda number=number: a.connections == number + 1)

    await asyncio.to_thread(run, cut_off_again_and_again())


async def test_a_server_that_is_killed_comes_back_with_what_it_has_confirmed(address: RabbitAddress) -> None:
    own = server.new()
    own.start()
    try:
        address = RabbitAddress(own.url, "own")
        async with RabbitLink.opened(address, "a", "agent") as a:
            for number in range(20):
                a.send("controller", end(number))
            await eventually(lambda: not a._outbox and not a._filled.is_set())
            own.kill()
            await eventually(lambda: not a.connected)
            await asyncio.to_thread(own.start)
            async with leading(address) as leader:
                assert items(await receive(leader, 20)) == [end(number) for number in range(20)]
                await eventually(lambda: a.connected)
                leader.send("a", Send("1", "e0"))
                assert items(await receive(a)) == [Send("1", "e0")]
    finally:
        await asyncio.to_thread(own.remove)


async def test_what_cannot_be_read_goes_to_the_dead_letters_with_the_reason(address: RabbitAddress) -> None:
    async with leading(address) as leader, RabbitLink.opened(address, "a", "agent") as a, linked(address) as connection:
        await connection.publish(b"junk", address.name(CONTROLLER))
        await connection.publish(b"trash", "a", exchange=address.name(DIRECT))
        a.send("controller", end(1))
        leader.send("a", Send("1", "e0"))
        assert items(await receive(leader)) == [end(1)]
        assert items(await receive(a)) == [Send("1", "e0")]
        found = list[tuple[bytes, str]]()

        async def both() -> None:
            while len(found) < 2:
                found.extend(await dead(address))

        await asyncio.wait_for(both(), 30)
    assert sorted(body for body, _ in found) == [b"junk", b"trash"]
    assert all(reason.startswith("A message cannot be read") for _, reason in found)


async def test_what_is_too_large_is_not_sent_and_the_rest_is(
    address: RabbitAddress, caplog: pytest.LogCaptureFixture
) -> None:
    async with leading(address) as leader, RabbitLink.opened(address, "a", "agent") as a:
        a.send("controller", Failed("1", "x" * MAX_BYTES))
        await eventually(lambda: not a._outbox)
        a.send("controller", Failed("2", "x" * (MAX_BYTES - 1000)))  # many frames
        (message,) = await receive(leader)
        assert isinstance(message.items[0], Failed)
        assert message.items[0].id == "2"
        assert message.number == 2, "its receiver sees that one was lost"
    assert "a message may have at most 4,194,304 bytes" in caplog.text


async def test_what_is_too_large_together_comes_in_several_messages(address: RabbitAddress) -> None:
    sent = [Failed(str(number), "x" * (MAX_BYTES // 5)) for number in range(12)]
    async with leading(address) as leader, RabbitLink.opened(address, "a", "agent") as a:
        a.send("controller", *sent)
        messages = await receive(leader, len(sent))
    assert items(messages) == sent
    assert [message.number for message in messages] == list(range(1, len(messages) + 1))
    assert len(messages) > 2


# ---- what is wrong at the start


async def test_a_name_is_one_process(address: RabbitAddress) -> None:
    async with RabbitLink.opened(address, "a", "agent"):
        with pytest.raises(ConfigError, match="knows another process of this name"):
            async with RabbitLink.opened(address, "a", "agent"):
                pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"port": 1}, "cannot be reached"),
        ({"password": "wrong-horse"}, "refuses the user or the password"),
        ({"path": "/none"}, "does not open this vhost. Make the vhost"),
    ],
)
async def test_what_is_wrong_with_the_url_is_said(
    address: RabbitAddress, change: dict[str, object], words: str
) -> None:
    url = URL(address.url)
    for name, value in change.items():
        url = getattr(url, f"with_{name}")(value)
    with pytest.raises(ConfigError, match=words) as caught:
        await RabbitConnection.connect(replace(address, url=str(url)), "a")
    assert "horse" not in str(caught.value), "it tells no password"


async def test_of_a_cluster_any_node_will_do(address: RabbitAddress) -> None:
    gone = str(URL(address.url).with_port(1))
    async with linked(replace(address, url=f"{gone},{address.url}, {gone}")) as connection:
        assert connection.address.place.startswith("127.0.0.1:1, 127.0.0.1:")
    with pytest.raises(ConfigError, match="cannot be reached"):
        await RabbitConnection.connect(replace(address, url=f"{gone},{gone}"), "a")


async def test_a_queue_of_another_kind_is_said(address: RabbitAddress) -> None:
    async with linked(address) as connection:
        await connection.channel.queue_delete(address.name(CONTROLLER))
        await connection.channel.queue_declare(address.name(CONTROLLER), durable=False)
        with pytest.raises(ConfigError, match="inequivalent arg"):
            await RabbitConnection.connect(address, "a")
        await connection.channel.queue_delete(address.name(CONTROLLER))


@pytest.mark.parametrize("url", ["", "http://host", "amqp://", "rabbit", "amqp://host:99999", "amqp://a host"])
async def test_what_is_no_url_is_said(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a RabbitMQ server"):
        await RabbitConnection.connect(RabbitAddress(url), "a")
