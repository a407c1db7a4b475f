"""A Headway in parts: a gateway, a controller and an agent that only the wire connects."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway import clock
from headway.cluster.roles.leader import Leader
from headway.cluster.wire.messages import Alive, InFlight, Item, Message, Present, Standing
from headway.config import Tier
from headway.events import Arrived, Cached, Finished, Started
from headway.gateway.control.remote.control import RemoteControl, reported
from headway.prefix import CacheReport
from headway.types import Request
from tests.gateway.gateway import Fake, configuration, until
from tests.gateway.roles.parts import Parts, parts
from tests.gateway.test_request_ends import fakes


def waiting(headway: Parts, name: str) -> list[str]:
    """Return the ids of the requests that a controller knows of."""
    leader = headway.controllers[name].leader
    return [] if leader is None else list(leader.control.controller.requests)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    fake = Fake(tmp_path).start()
    yield fake
    fake.stop()


@pytest.fixture
def headway(tmp_path: Path, fake: Fake) -> Iterator[Parts]:
    with parts(configuration(tmp_path, fake.url), tmp_path) as made:
        made.controller("c1")
        made.agent("a1", "e0")
        yield made


def test_a_request_goes_from_a_gateway_to_an_agent_s_engine(headway: Parts) -> None:
    with headway.gateway("g1") as gateway:
        answer = gateway.post(gateway.chat())
        assert answer.status_code == 200, answer.text
        until(lambda: not waiting(headway, "c1"))


def test_a_stream_goes_through_and_the_controller_hears_of_its_first_token(headway: Parts) -> None:
    with headway.gateway("g1") as gateway:
        chunks = list(gateway.client().chat.completions.create(**gateway.chat(), stream=True))
        assert len(chunks) > 2
        until(lambda: not waiting(headway, "c1"))


def test_a_stream_that_loses_its_engine_is_planned_again(headway: Parts, fake: Fake) -> None:
    with headway.gateway("g1") as gateway:
        answer = gateway.post(gateway.chat(stream=True, max_tokens=16, **fakes(tokens=16, cuts=[4, 9])))
        assert answer.text.count("fake ") == 16
        assert "[DONE]" in answer.text
        assert "error" not in answer.text
        assert len(fake.last()["body"]["vllm_xargs"]["headway_said"]) == 9
        until(lambda: not waiting(headway, "c1"))


@pytest.mark.parametrize("drop", [True, False])
def test_gateways_know_what_is_cached_where_a_class_drops(tmp_path: Path, stock: Fake, drop: bool) -> None:
    config, keys = configuration(tmp_path, stock.url, classes={"strict": Tier(ttft_ms=300.0, drop=drop)}), np.arange(8)
    with parts(config, tmp_path) as headway:
        headway.controller("c1")
        headway.agent("a1", "e0")
        with headway.gateway("g1") as gateway:
            until(lambda: (leader := headway.controllers["c1"].leader) and leader.control.controller.cluster.instances)
            of_leader, of_gateway = (
                one.cluster.placement.index
                for one in (headway.controllers["c1"].leader.control.controller, gateway.controller)  # type: ignore[union-attr]
            )
            report = CacheReport("epoch", 0, 1, keys.tobytes(), whole=True)
            headway.loop.call_soon_threadsafe(headway.agents["a1"]._tell, Cached("e0", report))
            until(lambda: of_leader.tokens("e0", keys) == 128)
            assert gateway.post(gateway.chat()).status_code == 200
            assert of_gateway.tokens("e0", keys) == 128 * drop


def test_two_gateways_share_one_queue(headway: Parts) -> None:
    with headway.gateway("g1") as one, headway.gateway("g2") as other:
        for gateway in (one, other):
            assert gateway.post(gateway.chat()).status_code == 200
        until(lambda: not waiting(headway, "c1"))


def test_a_standby_takes_over_what_waits_and_what_runs(headway: Parts, fake: Fake) -> None:
    """The first controller dies with one answer held back in the engine and others behind it."""
    headway.controller("c2")
    with headway.gateway("g1") as gateway, ThreadPoolExecutor(40) as pool:
        held = [pool.submit(gateway.post, gateway.chat(**fakes(hold="h"))) for _ in range(36)]
        until(lambda: len(waiting(headway, "c1")) == 36)
        headway.kill("c1")
        until(lambda: headway.controllers["c2"].leader is not None)
        until(lambda: len(waiting(headway, "c2")) == 36)
        fake.release("h")
        assert [one.result(20).status_code for one in held] == [200] * 36
        until(lambda: not waiting(headway, "c2"))
        assert fake.last()["asked"] == 36, "none was sent twice"


def test_a_standby_learns_the_keys_of_prompts(tmp_path: Path, fake: Fake, stock: Fake) -> None:
    """They exist where several engines have the model."""
    with parts(configuration(tmp_path, fake.url, stock.url), tmp_path) as headway:
        headway.controller("c1")
        headway.controller("c2")
        headway.agent("a1", "e0", "e1")
        with headway.gateway("g1") as gateway, ThreadPoolExecutor(1) as pool:
            body = gateway.chat(messages=[{"role": "user", "content": "word " * 200}], **fakes(hold="h"))
            asked = pool.submit(gateway.post, body)
            until(lambda: waiting(headway, "c1"))
            headway.kill("c1")
            until(lambda: headway.controllers["c2"].leader is not None)
            until(lambda: waiting(headway, "c2"))
            (id,) = waiting(headway, "c2")
            leader = headway.controllers["c2"].leader
            assert leader is not None
            keys = leader.control.controller.cluster.placement.keys(id)
            assert len(keys) >= 8 * 200 // 16
            assert keys == gateway.controller.cluster.placement.keys(id)
            for engine in (fake, stock):
                engine.release("h")
            assert asked.result(20).status_code == 200


def test_a_message_with_requests_has_room_for_their_keys() -> None:
    request = Request("r", "m", 10, 10, arrival=0.0)
    held = [InFlight(request, None, False, 0.0, bytes(size)) for size in (0, 2**20, 2**19, 2**19, 0, 2**20, 0)]
    made = list(reported(held))
    assert [one for part in made for one in part] == held
    assert [sum(len(one.keys) for one in part) for part in made] == [3 * 2**19, 3 * 2**19, 0]
    assert [len(part) for part in reported(held[:1] * 1001)] == [500, 500, 1]
    assert list(reported([])) == [[]]


def test_requests_of_a_gateway_that_dies_end_in_the_controller(headway: Parts, fake: Fake) -> None:
    with headway.gateway("g1") as gateway, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gateway.post, gateway.chat(**fakes(hold="h")))
        until(lambda: waiting(headway, "c1"))
        headway.exchange.part("g1")
        until(lambda: not waiting(headway, "c1"))
        headway.exchange.mend("g1")
        until(lambda: waiting(headway, "c1"))
        fake.release("h")
        assert asked.result(20).status_code == 200


def test_without_a_connection_requests_are_refused_rather_than_lost(headway: Parts) -> None:
    with headway.gateway("g1") as gateway:
        headway.exchange.part("g1")
        answer = gateway.post(gateway.chat())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_unreachable"
        headway.exchange.mend("g1")
        assert gateway.post(gateway.chat()).status_code == 200


def test_an_agent_that_is_silent_gets_no_work_until_it_is_back(headway: Parts) -> None:
    with headway.gateway("g1") as gateway, ThreadPoolExecutor(1) as pool:
        headway.exchange.part("a1")
        until(lambda: not gateway.controller.cluster.instances)
        until(lambda: not headway.controllers["c1"].leader.control.controller.cluster.instances)
        assert gateway.get("/ready").status_code == 503
        asked = pool.submit(gateway.post, gateway.chat())
        until(lambda: waiting(headway, "c1"))
        headway.exchange.mend("a1")
        assert asked.result(20).status_code == 200


def warned(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [text for text in (record.getMessage() for record in caplog.records) if what in text]


def reports(headway: Parts, name: str) -> int:
    """Return how many reports an agent has made."""
    return headway.exchange.carried.count((name, "gateways"))


def test_an_engine_that_is_not_configured_gets_no_work_and_is_told_of_once(
    headway: Parts, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway that does not know it would send back what the controller sends there, again and again."""
    with headway.gateway("g1") as gateway:
        own = headway.config
        headway.config = replace(own, engines=own.engines * 2)
        headway.agent("a2", "e1")
        until(lambda: "a2" in headway.agents)
        headway.config = own
        until(lambda: reports(headway, "a2") > 4 and headway.agents["a2"].agents.engines["e1"].up.is_set(), 30)
        said = reports(headway, "a2")
        until(lambda: reports(headway, "a2") > said + 1, 30)
        for _ in range(4):
            assert gateway.post(gateway.chat()).status_code == 200
        leader = headway.controllers["c1"].leader
        assert leader is not None
        assert leader.control.controller.cluster.instances.keys() == {"e0"}
        told = warned(caplog, "a2 has an engine e1, which gets no work: this configuration lacks it. Give")
        assert len(told) == 2, "the gateway and the controller have told once each"


def test_an_engine_that_another_agent_has_is_told_of_once(headway: Parts, caplog: pytest.LogCaptureFixture) -> None:
    with headway.gateway("g1") as gateway:
        headway.agent("a2", "e0")
        until(lambda: reports(headway, "a2") > 4, 30)
        assert gateway.post(gateway.chat()).status_code == 200
        assert len(warned(caplog, "a2 has an engine e0, which gets no work: a1 runs it, too. Start")) == 1
        headway.kill("a1")
        until(lambda: headway.controllers["c1"].leader._agent_of.get("e0") == "a2", 30)  # type: ignore[union-attr]


def knows(leader: Leader, name: str) -> bool:
    """Tell whether a controller has been told what a gateway has."""
    return name in leader._gateways and leader._gateways[name].known


def test_a_request_is_the_gateway_s_that_has_it_since_later(headway: Parts) -> None:
    """One that was slow to notice that its background request was taken over changes nothing any more."""
    until(lambda: headway.controllers)
    link = headway.exchange.links["c1"]
    request = Request("r1", "other", 10, 10, arrival=clock.now())
    early, late = (InFlight(request, None, False, clock.now() + s) for s in (0.0, 60.0))

    def receive(sender: str, *items: Item) -> None:
        headway.loop.call_soon_threadsafe(link.inbox.put_nowait, Message(sender, 1, items, 0.0))

    link.term = 1
    receive("x", Present((early,), True))
    until(lambda: waiting(headway, "c1") == ["r1"])
    leader = headway.controllers["c1"].leader
    assert leader is not None
    receive("y", Present((), True), Arrived(request))
    until(lambda: leader._owner["r1"] == "y")
    assert leader._gateways["x"].ids == set()
    receive("x", Started("r1"), Finished("r1", 3))
    receive("x", Present((early,), True), Alive((), 0))
    receive("y", Alive((), 1))
    until(lambda: link.inbox.empty())
    assert waiting(headway, "c1") == ["r1"]
    assert leader._owner["r1"] == "y"
    receive("x", Present((late,), True))
    until(lambda: leader._owner["r1"] == "x")
    assert knows(leader, "y")
    receive("y", Alive((), 1))
    until(lambda: not knows(leader, "y"))  # it is asked what it has
    receive("y", Present((early,), True))
    until(lambda: knows(leader, "y"))
    receive("x", Finished("r1", 3))
    until(lambda: not waiting(headway, "c1"))


def test_a_report_has_the_engines_that_a_returned_request_may_go_to(headway: Parts) -> None:
    until(lambda: headway.controllers and headway.controllers["c1"].leader)
    leader, link = headway.controllers["c1"].leader, headway.exchange.links["c1"]
    assert leader is not None
    until(lambda: "e0" in leader.control.controller.cluster.instances, 30)
    sent = InFlight(Request("r1", "smollm2", 10, 10, arrival=clock.now()), "e0", False, clock.now())
    returned = replace(sent, request=replace(sent.request, engines=("e1",)), instance=None)
    for one in (sent, returned):
        items = (Present((one,), True),)
        headway.loop.call_soon_threadsafe(link.inbox.put_nowait, Message("x", link.term, items, 0.0))
        until(lambda is_sent=one is sent: (leader._code("r1") is not None) == is_sent and waiting(headway, "c1"))  # type: ignore[misc]
    assert leader.control.controller.requests["r1"].engines == ("e1",)


def test_what_cannot_be_taken_note_of_is_asked_for_again(headway: Parts) -> None:
    with headway.gateway("g1") as gateway:
        leader = headway.controllers["c1"].leader
        assert leader is not None
        link = headway.exchange.links["c1"]
        nonsense = Message("g1", link.term, (Arrived("nonsense"),), 0.0)  # type: ignore[arg-type]
        headway.loop.call_soon_threadsafe(link.inbox.put_nowait, nonsense)
        until(lambda: link.inbox.empty())
        assert gateway.post(gateway.chat()).status_code == 200
        until(lambda: knows(leader, "g1"))


def test_an_old_controller_that_comes_back_is_not_obeyed(headway: Parts) -> None:
    headway.controller("c2")
    with headway.gateway("g1") as gateway:
        headway.exchange.part("c1")
        until(lambda: headway.controllers["c2"].leader is not None)
        control = gateway.inner.dispatcher.control
        assert isinstance(control, RemoteControl)
        until(lambda: control.leader.epoch == 2)
        before = control.leader.heard
        gateway.loop.call_soon_threadsafe(control.receive, Message("c1", 1, (Standing(frozenset(), {}),), 0.0))
        headway.exchange.mend("c1")
        assert gateway.post(gateway.chat()).status_code == 200
        assert control.leader.epoch == 2
        assert control.leader.heard > before
