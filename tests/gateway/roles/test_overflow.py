"""Overflow in parts: the controller decides, a gateway's request goes there and comes back."""

from __future__ import annotations

from pathlib import Path

from headway.events import Learned
from testing.fake_paid import MODEL
from tests.gateway.gateway import Fake, until
from tests.gateway.roles.parts import parts
from tests.gateway.test_overflow import SLOW, Paid, ask, beside, paid

__all__ = ["paid"]  # a fixture


def test_promises_leave_and_come_back(fake: Fake, paid: Paid, tmp_path: Path) -> None:
    with parts(beside(tmp_path, fake.url, paid), tmp_path) as headway:
        headway.controller("c1")
        for number in range(2):
            headway.agent(f"a{number}", f"e{number}")
        with headway.gateway("g1") as gateway:
            leader = until(lambda: headway.controllers["c1"].leader)
            until(lambda: "e1" in leader.control.controller.overflow.instances)
            until(lambda: "e1" in gateway.controller.overflow.instances)
            headway.loop.call_soon_threadsafe(headway.agents["a0"]._tell, Learned("e0", SLOW))
            until(lambda: ask(gateway).json()["model"] == MODEL)
            paid.refuse(429, 600)
            assert ask(gateway).json()["model"] == "smollm2"
            asked = paid.last()["asked"]
            assert ask(gateway).json()["model"] == "smollm2"
            assert paid.last()["asked"] == asked
            until(lambda: not leader.control.controller.requests)
            assert gateway.controller.overflow.places == leader.control.controller.overflow.places == 0
