"""Overflow in parts: the controller decides, a gateway's request goes there and comes back."""

from __future__ import annotations

from pathlib import Path

from headway.events import Learned
from testing.fake_paid import MODEL
from tests.gateway.gateway import Fake, configuration, until
from tests.gateway.roles.parts import parts
from tests.gateway.test_engines import order, states
from tests.gateway.test_overflow import SLOW, TIERS, Paid, ask, beside, paid, terms

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


def test_an_agent_without_its_model_gets_it_and_lets_it_go(fake: Fake, paid: Paid, tmp_path: Path) -> None:
    with parts(configuration(tmp_path, fake.url, classes=TIERS), tmp_path) as headway:
        headway.controller("c1")
        headway.agent("a0", "e0")
        headway.agent("a1", "e0")
        with headway.gateway("g1") as gateway:
            until(lambda: states(gateway) == {"e0": "up"})
            assert order(gateway, "POST", "?agent=a1", json=terms(paid))[0] == 202
            leader = until(lambda: headway.controllers["c1"].leader)
            until(lambda: "e1" in leader.control.controller.overflow.instances)
            headway.loop.call_soon_threadsafe(headway.agents["a0"]._tell, Learned("e0", SLOW))
            until(lambda: ask(gateway).json()["model"] == MODEL)
            assert order(gateway, "DELETE", "/e1")[0] == 202
            until(lambda: states(gateway) == {"e0": "up"}, 20)
            assert ask(gateway).json()["model"] == "smollm2"
            assert not gateway.controller.overflow.instances
            assert not leader.control.controller.overflow.instances
