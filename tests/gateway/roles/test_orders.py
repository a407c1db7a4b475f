"""Engines of agents that are added, drained, replaced and removed by orders at a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gateway.gateway import DEAD, Fake, configuration, until
from tests.gateway.roles.parts import Parts, parts
from tests.gateway.test_engines import asked, began, error_of, load, order, states
from tests.gateway.test_request_ends import fakes


@pytest.fixture
def engines(fake: Fake, others: list[Fake]) -> list[Fake]:
    return [fake, *others]


@pytest.fixture
def headway(tmp_path: Path, engines: list[Fake]) -> Iterator[Parts]:
    """A controller and two agents, each with an engine."""
    with parts(configuration(tmp_path, engines[0].url, engines[1].url), tmp_path) as made:
        made.controller("c1")
        made.agent("a1", "e0")
        made.agent("a2", "e1")
        yield made


def test_engines_of_agents_come_and_go_under_load(headway: Parts, engines: list[Fake]) -> None:
    with headway.gateway("g1") as gateway, headway.gateway("g2") as other:
        until(lambda: states(gateway) == states(other) == {"e0": "up", "e1": "up"})
        with load(gateway), load(other):
            status, body = order(gateway, "POST", json={"url": engines[2].url})
            assert error_of((status, body)) == (400, "agent_unknown")
            before = asked(engines[2])
            assert order(gateway, "POST", "?agent=a1", json={"url": engines[2].url, "max_running": 4})[0] == 202
            until(lambda: states(gateway) == states(other) == {"e0": "up", "e1": "up", "e2": "up"})
            until(lambda: asked(engines[2]) > before)
            assert order(other, "POST", "/e2/drain")[0] == 202
            until(lambda: states(gateway)["e2"] == states(other)["e2"] == "drained")
            rolled = order(gateway, "POST", "/roll", json={"set": {"max_running": 7}})
            assert rolled[0] == 202
            until(lambda: states(gateway) == {"e0": "up", "e1": "up", "e2": "up"}, 20)
            sizes = lambda: [one.max_running for one in other.controller.cluster.instances.values()]  # noqa: E731
            until(lambda: sizes() == [7, 7, 7], 20)
            assert order(gateway, "DELETE", "/e2")[0] == order(gateway, "DELETE", "/e0")[0] == 202
            until(lambda: states(gateway) == states(other) == {"e1": "up"}, 20)
        assert 'instance="e2"' not in gateway.get("/metrics", headers={"authorization": "Bearer sk-operator-1"}).text


def test_engines_that_no_agent_has_had_hold_up_no_roll(tmp_path: Path, engines: list[Fake]) -> None:
    with parts(configuration(tmp_path, *(one.url for one in engines)), tmp_path) as made:
        made.controller("c1")
        made.agent("a1", "e0")
        made.agent("a2", "e1")
        with made.gateway("g1") as gateway:
            until(lambda: states(gateway) == {"e0": "up", "e1": "up", "e2": "starting"})
            assert order(gateway, "POST", "/roll", json={"set": {"max_running": 7}})[0] == 202
            sizes = lambda: [one.max_running for one in gateway.controller.cluster.instances.values()]  # noqa: E731
            until(lambda: sizes() == [7, 7], 20)


def test_what_has_not_begun_goes_to_another_agent(headway: Parts, engines: list[Fake]) -> None:
    with headway.gateway("g1") as gateway, ThreadPoolExecutor() as pool:
        until(lambda: states(gateway) == {"e0": "up", "e1": "up"})
        order(gateway, "POST", "/e1/drain")
        until(lambda: states(gateway)["e1"] == "drained")
        stream = pool.submit(gateway.post, gateway.chat(stream=True, **fakes(delay=0.4)))
        held = pool.submit(gateway.post, gateway.chat(**fakes(hold="apart")))
        until(lambda: engines[0].last()["open"] == 2 and began(gateway) == 1)
        order(gateway, "POST", "/roll", json={"engines": ["e1"]})
        until(lambda: states(gateway) == {"e0": "up", "e1": "up"})
        number = asked(engines[1])
        assert order(gateway, "DELETE", "/e0")[0] == 202
        until(lambda: asked(engines[1]) == number + 1)
        engines[1].release("apart")
        assert held.result().status_code == 200
        assert stream.result().text.count("fake ") == 8
        until(lambda: states(gateway) == {"e1": "up"})


def test_an_engine_that_still_drains_takes_work_again_without_a_start(headway: Parts, engines: list[Fake]) -> None:
    with headway.gateway("g1") as gateway, ThreadPoolExecutor() as pool:
        order(gateway, "POST", "/e1/drain")
        until(lambda: states(gateway) == {"e0": "up", "e1": "drained"})
        stream = pool.submit(gateway.post, gateway.chat(stream=True, **fakes(delay=0.4)))
        until(lambda: began(gateway) == 1)
        order(gateway, "POST", "/e0/drain")
        until(lambda: states(gateway)["e0"] == "draining")
        order(gateway, "POST", "/roll", json={"engines": ["e0"]})
        until(lambda: states(gateway)["e0"] == "up")
        assert gateway.post(gateway.chat()).status_code == 200
        assert order(gateway, "GET")[1]["data"][0]["restarts"] == 0
        assert stream.result().text.count("fake ") == 8


def test_orders_that_an_agent_refuses(headway: Parts, engines: list[Fake]) -> None:
    with headway.gateway("g1") as gateway, ThreadPoolExecutor() as pool:
        until(lambda: states(gateway) == {"e0": "up", "e1": "up"})
        status, body = order(gateway, "POST", "?agent=a1", json={"kv_gib": 100_000})
        assert status == 400
        assert "not enough memory" in body["error"]["message"]
        assert error_of(order(gateway, "DELETE", "/e7")) == (404, "engine_not_found")
        assert error_of(order(gateway, "POST", "?agent=a9", json={"url": DEAD})) == (400, "agent_unknown")
        order(gateway, "DELETE", "/e0")
        order(gateway, "POST", "/e1/drain")
        until(lambda: states(gateway) == {"e1": "drained"})
        waiting = pool.submit(gateway.post, gateway.chat())
        until(lambda: gateway.inner.dispatcher.in_flight)
        assert error_of(order(gateway, "DELETE", "/e1")) == (409, "work_waiting")
        assert order(gateway, "DELETE", "/e1?force=true")[0] == 202
        assert waiting.result().json()["error"]["code"] == "model_unavailable"
        until(lambda: states(gateway) == {})
