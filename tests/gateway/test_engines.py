"""Engines that are added, drained, removed and replaced by orders while a gateway serves, all of them FAKE."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from headway.config import Engine
from tests.gateway.conftest import Serve
from tests.gateway.gateway import DEAD, OPERATOR, WEB, Fake, Gateway, configuration, serving, until
from tests.gateway.swapping import make_model, use_fake_engines
from tests.gateway.test_request_ends import fakes

PATH = "/v1/headway/engines"


def order(gateway: Gateway, method: str, path: str = "", **more: Any) -> Any:
    """Give an operator's order; return status and body."""
    answer = WEB.request(method, f"{gateway.url}{PATH}{path}", headers=OPERATOR, **more)
    return answer.status_code, answer.json()


def states(gateway: Gateway) -> dict[str, str]:
    status, body = order(gateway, "GET")
    assert status == 200
    return {one["id"]: one["state"] for one in body["data"]}


def add(gateway: Gateway, **settings: Any) -> str:
    """Add an engine and wait until it is up; return its id."""
    status, body = order(gateway, "POST", json=settings)
    assert status == 202, body
    (one,) = body["data"]
    until(lambda: states(gateway)[one["id"]] == "up")
    return str(one["id"])


def error_of(answer: tuple[int, Any]) -> tuple[int, str]:
    status, body = answer
    assert set(body) == {"error"}, body
    return status, body["error"]["code"]


def began(gateway: Gateway) -> int:
    """Return the number of requests that have a token."""
    return sum(one.first_token is not None for one in tuple(gateway.inner.dispatcher.in_flight.values()))


def asked(engine: Fake) -> int:
    return int(engine.last()["asked"])


@dataclass
class Load:
    """Clients that ask for streams one after the other, until the block ends. broken: answers that were not whole."""

    gateway: Gateway
    done: int = 0
    broken: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        extra = {"vllm_xargs": {"fake_delay": 0.01}}
        while not self.stop.is_set():
            answer = self.gateway.post(self.gateway.chat(stream=True, **extra))
            whole = answer.text.count("fake ") == 8 and answer.text.endswith("data: [DONE]\n\n")
            if answer.status_code != 200 or not whole:
                self.broken.append(answer.text)
            self.done += 1


@contextmanager
def load(gateway: Gateway, clients: int = 6) -> Iterator[Load]:
    one = Load(gateway)
    with ThreadPoolExecutor(clients) as pool:
        for _ in range(clients):
            pool.submit(one.ask)
        try:
            yield one
        finally:
            one.stop.set()
    assert one.broken == []
    assert one.done > 0


# ---- add, drain, remove


def test_engines_come_and_go_under_load(serve: Serve, fake: Fake, others: list[Fake]) -> None:
    with serve(fake.url) as gateway, load(gateway) as clients:
        before = [asked(one) for one in others]
        ids = [add(gateway, url=one.url, max_running=4) for one in others]
        assert ids == ["e1", "e2"]
        until(lambda: all(asked(one) > number for one, number in zip(others, before, strict=True)))
        assert order(gateway, "POST", "/e1/drain")[0] == 202
        until(lambda: states(gateway) == {"e0": "up", "e1": "drained", "e2": "up"})
        drained, done = asked(others[0]), clients.done
        assert gateway.metric('headway_engine_state{instance="e1",state="drained"}') == 1
        assert order(gateway, "DELETE", "/e2")[0] == order(gateway, "DELETE", "/e1")[0] == 202
        until(lambda: states(gateway) == {"e0": "up"})
        until(lambda: clients.done > done + 20)
        assert asked(others[0]) == drained
        page = gateway.get("/metrics", headers=OPERATOR).text
        assert 'instance="e0"' in page
        assert 'instance="e1"' not in page
        assert 'instance="e2"' not in page
        assert set(gateway.controller.cluster.instances) == {"e0"}
        assert set(gateway.get("/ready", headers=OPERATOR).json()["engines"]) == {"e0"}
        assert add(gateway, url=others[0].url) == "e3", "no id is used again"


def test_open_streams_end_where_they_are(serve: Serve, fake: Fake, others: list[Fake]) -> None:
    slow = {"stream": True, "vllm_xargs": {"fake_delay": 0.15}}
    with serve(fake.url) as gateway, ThreadPoolExecutor(16) as pool:
        aborted = fake.last()["aborted"]
        streams = [pool.submit(gateway.post, gateway.chat(**slow)) for _ in range(10)]
        whole = pool.submit(gateway.post, gateway.chat(vllm_xargs={"fake_delay": 0.15}))
        until(lambda: fake.last()["open"] == 11)
        until(lambda: began(gateway) == 10)
        add(gateway, url=others[0].url)
        assert order(gateway, "POST", "/e0/drain")[1]["data"][0]["state"] == "draining"
        assert states(gateway)["e0"] == "draining"
        number = asked(fake)
        assert gateway.post(gateway.chat()).status_code == 200
        assert {one.result().text.count("fake ") for one in streams} == {8}
        assert whole.result().json()["choices"][0]["message"]["content"].count("fake ") == 8
        until(lambda: states(gateway)["e0"] == "drained")
        assert (asked(fake), fake.last()["aborted"]) == (number, aborted), "a begun answer is not begun again"


def test_what_has_not_begun_goes_to_another_engine(serve: Serve, fake: Fake, others: list[Fake]) -> None:
    with serve(fake.url) as gateway, ThreadPoolExecutor() as pool:
        number = asked(others[1])
        held = [
            pool.submit(gateway.post, gateway.chat(stream=stream, **fakes(hold="leave"))) for stream in (True, False)
        ]
        until(lambda: fake.last()["open"] == 2)
        requests = list(gateway.inner.dispatcher.in_flight.values())
        add(gateway, url=others[1].url)
        order(gateway, "POST", "/e0/drain")
        until(lambda: states(gateway)["e0"] == "drained")
        until(lambda: asked(others[1]) == number + 2)
        others[1].release("leave")
        assert [one.result().status_code for one in held] == [200, 200]
        assert [one.attempts for one in requests] == [0, 0]
        assert gateway.metric('headway_requeue_seconds_count{reason="engine_leaves"}') == 2


def test_an_engine_that_is_removed_at_once(serve: Serve, fake: Fake, others: list[Fake]) -> None:
    with serve(fake.url) as gateway, ThreadPoolExecutor() as pool:
        stream = pool.submit(gateway.post, gateway.chat(stream=True, **fakes(delay=0.7)))
        held = pool.submit(gateway.post, gateway.chat(**fakes(hold="now")))
        until(lambda: fake.last()["open"] == 2 and began(gateway) == 1)
        assert error_of(order(gateway, "DELETE", "/e0?now=true")) == (409, "work_waiting")
        add(gateway, url=others[1].url)
        others[1].release("now")
        assert order(gateway, "DELETE", "/e0")[1]["data"][0]["state"] == "draining"
        assert states(gateway)["e0"] == "draining"
        status, body = order(gateway, "POST", "/e0/drain")
        assert (status, body["error"]["message"]) == (404, "There is no engine 'e0'. Use one of e1.")
        assert order(gateway, "DELETE", "/e0?now=true")[0] == 202
        until(lambda: states(gateway) == {"e1": "up"}, 2)
        assert held.result().status_code == 200
        assert stream.result().status_code == 200  # its end is that of a stream whose engine has died


def test_the_last_engine_that_is_removed_at_once_takes_its_requests_with_it(serve: Serve, fake: Fake) -> None:
    with serve(fake.url) as gateway, ThreadPoolExecutor() as pool:
        held = pool.submit(gateway.post, gateway.chat(**fakes(hold="last")))
        until(lambda: fake.last()["open"] == 1)
        assert order(gateway, "DELETE", "/e0?now=true&force=true")[0] == 202
        refused = held.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
        until(lambda: states(gateway) == {})
        assert not gateway.controller.requests


def test_a_client_that_leaves_while_its_request_is_taken_back(serve: Serve, fake: Fake) -> None:
    with serve(fake.url) as gateway, ThreadPoolExecutor() as pool:
        held = pool.submit(gateway.post, gateway.chat(**fakes(hold="gone")))
        until(lambda: fake.last()["open"] == 1)

        async def both() -> None:
            (one,) = gateway.inner.dispatcher.in_flight.values()
            assert one.opening is not None
            one.opening.get_loop().call_soon(one.opening.cancel)  # as a gateway that stops does
            gateway.inner.dispatcher.take_back([one])

        gateway.do(both())
        assert held.result().json()["error"]["code"] == "gateway_stopped"
        assert gateway.newest()[0] == "failed"
        assert not gateway.controller.requests


def test_a_drained_engine_comes_back(serve: Serve, fake: Fake) -> None:
    with serve(fake.url) as gateway, ThreadPoolExecutor() as pool:
        order(gateway, "POST", "/e0/drain")
        until(lambda: states(gateway) == {"e0": "drained"})
        assert gateway.get("/ready").status_code == 503
        waiting = pool.submit(gateway.post, gateway.chat())
        until(lambda: gateway.controller.queued == 1)
        assert order(gateway, "POST", "/roll", json={"engines": ["e0"], "set": {"max_running": 3}})[0] == 202
        assert waiting.result().status_code == 200
        assert gateway.controller.cluster.instances["e0"].max_running == 3


def test_an_engine_that_still_drains_takes_work_again_without_a_start(serve: Serve, fake: Fake) -> None:
    slow = {"stream": True, "vllm_xargs": {"fake_delay": 0.2}}
    with serve(fake.url) as gateway, ThreadPoolExecutor() as pool:
        stream = pool.submit(gateway.post, gateway.chat(**slow))
        until(lambda: began(gateway) == 1)
        order(gateway, "POST", "/e0/drain")
        assert states(gateway) == {"e0": "draining"}
        assert order(gateway, "POST", "/roll", json={"engines": ["e0"]})[0] == 202
        until(lambda: states(gateway) == {"e0": "up"})
        assert gateway.post(gateway.chat()).status_code == 200
        assert order(gateway, "GET")[1]["data"][0]["restarts"] == 0
        assert stream.result().text.count("fake ") == 8
        order(gateway, "POST", "/e0/drain")
        until(lambda: states(gateway) == {"e0": "drained"})


# ---- what is refused


def test_the_last_engine_of_a_model_with_work(serve: Serve, fake: Fake) -> None:
    with serve(fake.url) as gateway, ThreadPoolExecutor() as pool:
        order(gateway, "POST", "/e0/drain")
        until(lambda: states(gateway) == {"e0": "drained"})
        waiting = pool.submit(gateway.post, gateway.chat())
        until(lambda: gateway.controller.queued == 1)
        assert error_of(order(gateway, "DELETE", "/e0")) == (409, "work_waiting")
        assert error_of(order(gateway, "POST", "/e0/drain")) == (409, "work_waiting")
        assert states(gateway) == {"e0": "drained"}
        assert order(gateway, "DELETE", "/e0?force=true")[0] == 202
        refused = waiting.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
        until(lambda: states(gateway) == {})
        unknown = gateway.post(gateway.chat())
        assert error_of((unknown.status_code, unknown.json())) == (404, "model_not_found")
        assert unknown.json()["error"]["message"].endswith("No engine is left; add one.")
        assert gateway.get("/v1/models").json()["data"] == []
        assert gateway.get("/ready").status_code == 503
        add(gateway, url=fake.url, model="smollm2")
        assert gateway.post(gateway.chat()).status_code == 200


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_running": 0}, "engines.0.max_running"),
        ({"max_runing": 4}, "max_running"),
        ({"kv_gib": 100_000}, "There is not enough memory for e1 (memory: "),
        ({"cores": "999"}, "core 999"),
        ({"url": DEAD, "model": "org/other", "served_name": "smollm2"}, "Engines of the same name differ"),
        ({"tool_parser": "nonsense"}, "tool parser"),
    ],
)
def test_settings_that_cannot_be_served(gateway: Gateway, settings: dict[str, Any], said: str) -> None:
    before = states(gateway)
    status, body = order(gateway, "POST", json=settings)
    assert status == 400
    assert said in body["error"]["message"]
    assert states(gateway) == before


def test_orders_that_are_refused(gateway: Gateway, fake: Fake) -> None:
    assert error_of(order(gateway, "POST", json={"url": fake.url, "id": "e0"})) == (409, "engine_exists")
    assert error_of(order(gateway, "DELETE", "/e7")) == (404, "engine_not_found")
    assert error_of(order(gateway, "POST", "/e7/drain")) == (404, "engine_not_found")
    assert error_of(order(gateway, "POST", "/roll", json={"engines": ["e0", "e7"]})) == (404, "engine_not_found")
    assert order(gateway, "POST", "/roll", json={"set": {"count": 2}})[0] == 400
    assert order(gateway, "POST", "/roll", json={"set": {"max_running": "many"}})[0] == 400
    assert order(gateway, "DELETE", "/e0?now=perhaps")[0] == 400
    for method, path in (("GET", ""), ("POST", ""), ("POST", "/roll"), ("POST", "/e0/drain"), ("DELETE", "/e0")):
        assert WEB.request(method, f"{gateway.url}{PATH}{path}").status_code == 401
    assert states(gateway) == {"e0": "up"}


def test_an_engine_that_is_never_ready_fails_and_can_be_removed(serve: Serve, fake: Fake) -> None:
    with serve(fake.url) as gateway:
        order(gateway, "POST", json={"url": DEAD, "start_timeout_s": 0.3, "id": "late.1"})
        until(lambda: states(gateway) == {"e0": "up", "late.1": "failed"})
        told = order(gateway, "GET")[1]["data"][1]
        assert f"did not answer at {DEAD} within 0.3 s" in told["error"]
        assert gateway.get("/ready").status_code == 200
        assert gateway.post(gateway.chat()).status_code == 200
        order(gateway, "DELETE", "/late.1")
        until(lambda: states(gateway) == {"e0": "up"})


# ---- roll


def test_engines_are_replaced_one_after_the_other_under_load(serve: Serve, fake: Fake, others: list[Fake]) -> None:
    with serve(fake.url, *(one.url for one in others)) as gateway, load(gateway):
        until(gateway.all_up)
        least, engines = Counter[int](), dict(gateway.inner.dispatcher.engines)
        status, body = order(gateway, "POST", "/roll", json={"set": {"max_running": 5}})
        assert (status, len(body["data"])) == (202, 3)

        def replaced() -> bool:
            least[len(gateway.controller.cluster.instances)] += 1
            return [one.max_running for one in gateway.controller.cluster.instances.values()] == [5, 5, 5]

        until(replaced, 20)
        assert min(least) >= 2
        assert states(gateway) == {"e0": "up", "e1": "up", "e2": "up"}
        assert not {*map(id, engines.values())} & {*map(id, gateway.inner.dispatcher.engines.values())}


def test_engines_get_an_adapter_one_after_the_other(serve: Serve, fake: Fake, others: list[Fake]) -> None:
    with serve(fake.url, others[0].url) as gateway, load(gateway):
        names = lambda: [one["id"] for one in gateway.get("/v1/models").json()["data"]]  # noqa: E731
        status, body = order(gateway, "POST", "/roll", json={"engines": ["e0"], "set": {"adapters": {"terse": "/a"}}})
        assert (status, "Not all engines" in body["error"]["message"]) == (400, True)
        assert order(gateway, "POST", "/roll", json={"set": {"adapters": {"terse": "/a"}}})[0] == 202
        until(lambda: names() == ["smollm2", "terse"], 20)
        assert gateway.post(gateway.chat(model="terse")).status_code == 200


def test_a_roll_ends_at_an_engine_that_does_not_come_up(serve: Serve, fake: Fake, others: list[Fake]) -> None:
    with serve(fake.url, others[0].url) as gateway:
        until(gateway.all_up)
        order(gateway, "POST", "/roll", json={"set": {"url": DEAD, "start_timeout_s": 0.3}})
        until(lambda: states(gateway) == {"e0": "failed", "e1": "up"})
        until(lambda: not any(one["to_roll"] for one in order(gateway, "GET")[1]["data"]))
        assert gateway.post(gateway.chat()).status_code == 200
        order(gateway, "POST", "/roll", json={"engines": ["e0"], "set": {"url": fake.url, "start_timeout_s": 60.0}})
        until(lambda: states(gateway) == {"e0": "up", "e1": "up"})


def test_drained_engines_take_work_again_while_a_roll_is_under_way(
    serve: Serve, fake: Fake, others: list[Fake]
) -> None:
    """One that still drains, and one that has stopped; the roll waits for the stream in its first engine."""
    slow = {"stream": True, "vllm_xargs": {"fake_delay": 0.8}}
    with serve(fake.url, *(one.url for one in others)) as gateway, ThreadPoolExecutor() as pool:
        until(gateway.all_up)
        order(gateway, "POST", "/e2/drain")
        until(lambda: states(gateway)["e2"] == "drained")
        streams = [pool.submit(gateway.post, gateway.chat(**slow)) for _ in range(2)]
        until(lambda: began(gateway) == 2)
        order(gateway, "POST", "/roll", json={"engines": ["e0"], "set": {"max_running": 3}})
        order(gateway, "POST", "/e1/drain")
        until(lambda: states(gateway) == {"e0": "draining", "e1": "draining", "e2": "drained"})
        assert order(gateway, "POST", "/roll", json={"engines": ["e1", "e2"]})[0] == 202
        until(lambda: states(gateway) == {"e0": "draining", "e1": "up", "e2": "up"})
        assert {one.result().text.count("fake ") for one in streams} == {8}
        until(lambda: states(gateway)["e0"] == "up")
        assert [one["restarts"] for one in order(gateway, "GET")[1]["data"]] == [1, 0, 1]
        assert gateway.controller.cluster.instances["e0"].max_running == 3


def test_a_drain_and_its_end_call_off_a_roll(serve: Serve, fake: Fake) -> None:
    slow = {"stream": True, "vllm_xargs": {"fake_delay": 0.3}}
    with serve(fake.url) as gateway, ThreadPoolExecutor() as pool:
        stream = pool.submit(gateway.post, gateway.chat(**slow))
        until(lambda: began(gateway) == 1)
        order(gateway, "POST", "/roll", json={"set": {"max_running": 3}})
        until(lambda: states(gateway)["e0"] == "draining")
        order(gateway, "POST", "/e0/drain")
        order(gateway, "POST", "/roll", json={"engines": ["e0"]})
        until(lambda: states(gateway)["e0"] == "up")
        assert stream.result().text.count("fake ") == 8
        assert gateway.post(gateway.chat()).status_code == 200
        (one,) = order(gateway, "GET")[1]["data"]
        assert (one["state"], one["restarts"]) == ("up", 0)


def test_an_engine_that_is_slow_to_stop_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands still is killed after ten seconds."""
    use_fake_engines(monkeypatch)
    path = str(make_model(tmp_path, "a"))
    with serving(replace(configuration(tmp_path), engines=(Engine(path),) * 3)) as gateway:
        until(lambda: states(gateway) == {"e0": "up", "e1": "up", "e2": "up"}, 30)
        child = gateway.inner.dispatcher.engines["e0"].child
        assert child
        assert child.process
        child.signal(signal.SIGSTOP)
        order(gateway, "POST", "/e0/drain")
        order(gateway, "POST", "/e1/drain")
        order(gateway, "POST", "/e2/drain")
        until(lambda: states(gateway) == {"e0": "draining", "e1": "drained", "e2": "drained"}, 8)
        assert order(gateway, "POST", "/roll", json={"engines": ["e0"]})[0] == 202
        until(lambda: states(gateway)["e0"] == "up", 40)
        assert gateway.post(gateway.chat(model="a")).status_code == 200
        assert child.process.poll() is not None, "that one was stopped, and another one started"


# ---- any orders in any sequence


class Orders(RuleBasedStateMachine):
    """Orders in any sequence; the gateway has the engines that were ordered, and answers whenever one is there."""

    gateway: Gateway
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[str, str] = {}
        self.settle()
        for id in states(self.gateway):
            order(self.gateway, "DELETE", f"/{id}?now=true&force=true")
        until(lambda: states(self.gateway) == {})

    def settle(self) -> None:
        until(lambda: not {"starting", "draining"} & {*states(self.gateway).values()} and not self.rolling())

    def rolling(self) -> bool:
        return any(one["to_roll"] or one["leaving"] == "roll" for one in order(self.gateway, "GET")[1]["data"])

    @rule(count=st.integers(1, 2))
    def add(self, count: int) -> None:
        for _ in range(count):
            status, body = order(self.gateway, "POST", json={"url": self.url, "max_running": 4})
            assert status == 202
            self.there[body["data"][0]["id"]] = "up"

    @precondition(lambda self: self.there)
    @rule(data=st.data(), wait=st.booleans())
    def roll(self, data: st.DataObject, wait: bool) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.there)), min_size=1, unique=True))
        body = {"engines": ids, "set": {"max_running": data.draw(st.integers(2, 5))}}
        assert order(self.gateway, "POST", "/roll", json=body)[0] == 202
        self.there |= dict.fromkeys(ids, "up")
        if wait:
            self.settle()

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.there)))
        assert order(self.gateway, "POST", f"/{id}/drain")[0] == 202
        self.there[id] = "drained"

    @precondition(lambda self: self.there)
    @rule(data=st.data(), now=st.booleans())
    def remove(self, data: st.DataObject, now: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.there)))
        assert order(self.gateway, "DELETE", f"/{id}?now={str(now).lower()}")[0] == 202
        del self.there[id]

    @precondition(lambda self: "up" in self.there.values())
    @rule()
    def ask(self) -> None:
        answer = self.gateway.post(self.gateway.chat(stream=True))
        assert answer.text.count("fake ") == 8

    @rule()
    def look(self) -> None:
        self.settle()
        until(lambda: states(self.gateway) == self.there)
        up = {id for id, state in self.there.items() if state == "up"}
        controller = self.gateway.controller
        assert set(controller.cluster.instances) == up
        assert set(controller.cluster.placement._loads) == up
        assert set(self.gateway.inner.dispatcher.engines) == set(self.there)
        assert not controller.requests

    def teardown(self) -> None:
        self.look()


def test_orders_in_any_sequence(serve: Serve, fake: Fake) -> None:
    with serve(fake.url) as running:

        class OfThis(Orders):
            gateway, url = running, fake.url

        few = settings(max_examples=12, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck))
        run_state_machine_as_test(OfThis, settings=few)  # type: ignore[no-untyped-call]
