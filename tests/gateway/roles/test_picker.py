"""The endpoint picker of a gateway whose controller and agents are elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headway.config import Picker
from headway.engines.vllm.process.launch import free_port
from tests.gateway.ext_proc import connected, whole
from tests.gateway.gateway import Fake, configuration, until
from tests.gateway.roles.parts import parts


async def test_a_subset_reaches_the_controller(tmp_path: Path, others: list[Fake]) -> None:
    port = free_port()
    addresses = [fake.url.removeprefix("http://") for fake in others]
    config = configuration(tmp_path, *(fake.url for fake in others), picker=Picker(port))
    with parts(config, tmp_path) as headway:
        headway.controller("c1")
        headway.agent("a1", "e0", "e1")
        with headway.gateway("g1") as gateway:
            await asyncio.to_thread(until, gateway.all_up)
            async with connected(port) as channel:
                for address in addresses * 2:
                    call = await channel.asked(subset=[address])
                    assert (await call.forwarded()).address == address
                    await call.answer(whole())
                    await call.answered()
            leader = headway.controllers["c1"].leader
            assert leader is not None
            await asyncio.to_thread(until, lambda: not leader.control.controller.requests)
