"""A paid API as overflow: who goes there, what it is sent, and what happens when it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tomli_w

from headway.config import Config, Engine, Key, Tier
from headway.events import Learned
from headway.gateway.apis.state import AppState
from headway.gateway.parsing.engine_body import EngineBody
from headway.gateway.parsing.fields import needs_vllm
from headway.gateway.reload import Reload
from headway.store.journal.reader import read
from headway.types import Request
from headway.whatif.explain import placement
from headway.whatif.journal.past import Past
from testing.fake_paid import KEY, MODEL
from tests.gateway.gateway import CLASSES, OPERATOR, WEB, Fake, Gateway, configuration, serving, until
from tests.gateway.test_engines import add, began, order, states
from tests.gateway.test_request_ends import events, hanging

SLOW = np.array([0.01, 0.0, 0.0, 5.12, 0.0])  # scaled: 10 ms per iteration, 10 ms per prompt token
TIERS = CLASSES | {"tight": Tier(ttft_ms=300.0), "other": Tier(ttft_ms=300.0)}


def words(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "word " * count}]


LONG = words(100)
Open = Callable[..., AbstractContextManager[Gateway]]


class Paid(Fake):
    """It has no /health."""

    def answers(self) -> bool:
        try:
            return bool(self.last())
        except httpx.HTTPError:
            return False

    def refuse(self, status: int, seconds: int = 0) -> None:
        assert WEB.post(f"{self.url}/refuse/{status}/{seconds}").status_code == 200


@pytest.fixture
def paid(tmp_path: Path) -> Iterator[Paid]:
    engine = Paid(tmp_path, module="testing.fake_paid").start()
    yield engine
    engine.stop()


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Fake]:
    """Return an engine whose first token is late for each class of `TIERS`."""
    engine = Fake(tmp_path, options=("--delay", "0.4")).start()
    yield engine
    engine.stop()


@pytest.fixture
def opened(fake: Fake, paid: Paid, tmp_path: Path) -> Open:
    """Return what opens a gateway with a slow engine and the paid one beside it."""

    return lambda **fields: learned(beside(tmp_path, fake.url, paid, **fields))


def terms(paid: Paid) -> dict[str, Any]:
    """Return the settings of the paid engine."""
    return {
        "served_name": "smollm2",
        "url": paid.url,
        "api_key": KEY,
        "kind": "openai",
        "remote_model": MODEL,
        "overflow": True,
        "overflow_classes": ("tight",),
        "price_prompt": 1.0,
        "price_answer": 2.0,
        "hourly_budget": 1.0,
    }


def beside(folder: Path, url: str, paid: Paid, *, keys: tuple[Key, ...] = (), **fields: Any) -> Config:
    """Return a configuration of an engine with the paid one beside it."""
    config = configuration(folder, url, classes=TIERS)
    return replace(config, engines=(*config.engines, Engine(**(terms(paid) | fields))), keys=keys)


@contextmanager
def learned(config: Config) -> Iterator[Gateway]:
    """Run a gateway that knows how slow its own engine is, and has the paid one up."""
    with serving(config) as gateway:
        until(lambda: "e1" in gateway.controller.overflow.instances)
        slow(gateway)
        yield gateway


def slow(gateway: Gateway, engine: str = "e0") -> None:
    """Let it know how slow its own engine is."""

    async def tell() -> None:
        gateway.inner.dispatcher.notify(Learned(engine, SLOW))

    gateway.do(tell())


def ask(gateway: Gateway, tier: str = "tight", **fields: Any) -> httpx.Response:
    answer = gateway.post(gateway.chat(service_tier=tier, messages=LONG, **fields), headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    return answer


def counted(gateway: Gateway) -> float:
    return gateway.metric('headway_overflow_requests_total{instance="e1"}')


def test_a_late_promise_is_answered_by_the_paid_api_without_fields_of_vllm(opened: Open, paid: Paid) -> None:
    with opened() as gateway:
        answer = ask(gateway, temperature=0).json()
        assert answer["model"] == MODEL
        body, headers = paid.last()["body"], paid.last()["headers"]
        assert body.keys() == {"model", "messages", "max_tokens", "temperature"}
        assert body["messages"] == LONG
        assert headers["authorization"] == f"Bearer {KEY}"
        assert not any(name.startswith("x-") for name in headers)
        assert counted(gateway) == 1
        cost = (answer["usage"]["prompt_tokens"] + 2 * answer["usage"]["completion_tokens"]) / 1e6
        spent = until(lambda: gateway.metric('headway_overflow_spent_total{instance="e1"}'))
        assert spent == pytest.approx(cost)
        assert gateway.controller.overflow.spent("e1", time.time()) == pytest.approx(cost)
        assert paid.last()["strange"] == [], "it is asked for nothing but OpenAI's routes"


def test_streams_are_passed_on_and_limited(opened: Open, paid: Paid) -> None:
    with opened() as gateway:
        body = gateway.chat(service_tier="tight", messages=LONG, stream=True)
        del body["max_tokens"]
        answer = gateway.post(body)
        assert answer.status_code == 200
        assert events(answer)[-1] == "[DONE]"
        assert paid.last()["body"]["stream_options"] == {"include_usage": True}
        assert paid.last()["body"]["max_tokens"] > 1000, "as was reserved for it"


@pytest.mark.parametrize(
    "fields",
    [
        {"tier": "other"},
        {"tier": "default"},
        {"tier": "batch"},
        {"top_k": 3},
        {"vllm_xargs": {"mine": 1}},
        {"logit_bias": {"17": 1.0}},
    ],
    ids=str,
)
def test_all_others_stay(opened: Open, paid: Paid, fields: dict[str, Any]) -> None:
    with opened() as gateway:
        ask(gateway, **fields)
        assert counted(gateway) == paid.last()["asked"] == 0


def test_a_request_with_time_stays(opened: Open, paid: Paid) -> None:
    with opened() as gateway:
        assert gateway.post(gateway.chat(service_tier="tight", ttft_slo_ms=60_000)).status_code == 200
        assert paid.last()["asked"] == 0


def test_only_tenants_that_are_named_leave(opened: Open, paid: Paid) -> None:
    keys = tuple(Key(f"sk-{tenant}-key", tenant) for tenant in ("acme", "private"))
    with opened(keys=keys, overflow_tenants=("acme",)) as gateway:
        for tenant, count in (("private", 0), ("acme", 1)):
            body = gateway.chat(service_tier="tight", messages=LONG)
            headers = {"authorization": f"Bearer sk-{tenant}-key"}
            assert gateway.post(body, headers=headers).status_code == 200
            assert paid.last()["asked"] == count


def test_no_more_is_spent_than_the_budget(opened: Open, paid: Paid) -> None:
    with opened(hourly_budget=0.0002) as gateway:
        for _ in range(8):
            ask(gateway)
        assert 0 < counted(gateway) == paid.last()["asked"] < 8
        assert gateway.controller.overflow.spent("e1", time.time()) <= 0.0002


def test_what_was_spent_counts_after_a_restart_and_for_another_gateway(fake: Fake, paid: Paid, tmp_path: Path) -> None:
    config = beside(tmp_path, fake.url, paid, hourly_budget=0.00021)  # 0.00015 are reserved, 0.00003 spent
    with learned(config) as gateway, learned(config) as other:
        assert ask(gateway).json()["model"] == MODEL
        until(lambda: gateway.spent() < 0.00005)
        assert ask(other).json()["model"] == MODEL
        until(lambda: gateway.spent() < 0.0001)
    with learned(config) as gateway:
        assert ask(gateway).json()["model"] == MODEL
        asked = paid.last()["asked"]
        assert ask(gateway).json()["model"] == "smollm2"
        assert paid.last()["asked"] == asked == 3
        assert gateway.controller.overflow.spent("e1", time.time()) < 0.00005, "it knows of its own alone"


def test_what_was_refused_costs_nothing_after_a_restart(fake: Fake, paid: Paid, tmp_path: Path) -> None:
    config = beside(tmp_path, fake.url, paid, hourly_budget=0.0002)  # for one
    with learned(config) as gateway:
        paid.refuse(500)
        assert ask(gateway).json()["model"] == "smollm2"
        paid.refuse(200)
    with learned(config) as gateway:
        assert ask(gateway).json()["model"] == MODEL


@pytest.mark.parametrize("status", [429, 500, 503, 401, 404])
def test_what_it_refuses_is_answered_here_and_it_is_left_alone(opened: Open, paid: Paid, status: int) -> None:
    with opened() as gateway:
        paid.refuse(status, 600)
        assert ask(gateway).json()["model"] == "smollm2"
        assert ask(gateway).json()["model"] == "smollm2"
        assert paid.last()["asked"] == counted(gateway) == 1
        assert gateway.metric('headway_requeue_seconds_count{reason="declined"}') == 1
        assert gateway.controller.overflow.spent("e1", time.time()) == 0.0
        assert gateway.newest() == ("done", None)


def test_it_is_asked_again_after_retry_after(opened: Open, paid: Paid) -> None:
    with opened() as gateway:
        paid.refuse(429, 1)
        assert ask(gateway).json()["model"] == "smollm2"
        paid.refuse(200)
        assert until(lambda: ask(gateway).json()["model"] == MODEL)


def test_a_request_that_it_finds_wrong_does_not_set_it_aside(opened: Open, paid: Paid) -> None:
    with opened() as gateway:
        paid.refuse(400)
        assert ask(gateway).json()["model"] == "smollm2"
        paid.refuse(200)
        assert ask(gateway).json()["model"] == MODEL


def test_its_death_costs_no_request_and_no_readiness(opened: Open, paid: Paid) -> None:
    with opened() as gateway:
        paid.stop()
        assert ask(gateway).json()["model"] == "smollm2"
        assert gateway.get("/ready").status_code == 200


def test_a_promise_is_taken_back_from_an_engine_at_the_last_instant(tmp_path: Path) -> None:
    """Another prompt came later, is due before it, and takes its time; the engine has answered neither."""
    busy = Fake(tmp_path, options=("--delay", "3")).start()
    paid = Paid(tmp_path, module="testing.fake_paid", options=("--delay", "0.2")).start()
    config = replace(beside(tmp_path, busy.url, paid), classes=TIERS | {"patient": Tier(ttft_ms=1400.0)})
    try:
        with learned(config) as gateway:
            ask(gateway, stream=True, max_tokens=2)  # so that it is known how fast the paid one is
            one = gateway.chat(service_tier="tight", ttft_slo_ms=1500, messages=words(20), stream=True)
            other = gateway.chat(service_tier="patient", messages=words(100), stream=True)
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(gateway.post, one)
                until(lambda: busy.last()["open"] == 1)
                with hanging(gateway, json.dumps(other).encode()):
                    assert MODEL in answer.result(10).text
            assert gateway.metric('headway_requeue_seconds_count{reason="overflow"}') == 1
            until(lambda: busy.last()["aborted"] == 2)
    finally:
        busy.stop()
        paid.stop()


def test_another_server_than_vllm_can_be_the_only_one(paid: Paid, tmp_path: Path) -> None:
    away = Engine(served_name="smollm2", url=paid.url, api_key=KEY, kind="openai", remote_model=MODEL)
    with serving(replace(configuration(tmp_path), engines=(away,))) as gateway:
        for tier in ("chat", "batch"):
            answer = gateway.post(gateway.chat(service_tier=tier, temperature=0))
            assert answer.json()["model"] == MODEL
            assert paid.last()["body"].keys() == {"model", "messages", "max_tokens", "temperature"}
        assert gateway.control({"op": "state"}).status_code == 502
        assert gateway.get("/metrics", headers=OPERATOR).status_code == 200
        assert paid.last()["strange"] == []


# ---- engines that come and go, streams that go on elsewhere


def test_it_comes_and_goes_while_the_gateway_serves(late: Fake, paid: Paid, tmp_path: Path) -> None:
    with serving(configuration(tmp_path, late.url, classes=TIERS)) as gateway:
        slow(gateway)
        wrong = terms(paid) | {"served_name": "another"}
        assert order(gateway, "POST", json=wrong)[0] == 400, "no other engine has that model"
        assert order(gateway, "POST", json=terms(paid) | {"overflow_classes": ["batch"]})[0] == 400
        one = add(gateway, **terms(paid))
        assert ask(gateway).json()["model"] == MODEL
        assert (
            order(gateway, "POST", "/roll", json={"engines": [one], "set": {"overflow_classes": ["other"]}})[0] == 202
        )
        until(lambda: gateway.inner.dispatcher.engines[one].restarts == 1 and states(gateway)[one] == "up")
        assert ask(gateway).json()["model"] == "smollm2"
        assert ask(gateway, "other").json()["model"] == MODEL
        assert order(gateway, "POST", f"/{one}/drain")[0] == 202
        until(lambda: states(gateway) == {"e0": "up", one: "drained"})
        assert ask(gateway, "other").json()["model"] == "smollm2"
        assert order(gateway, "DELETE", f"/{one}")[0] == 202
        until(lambda: states(gateway) == {"e0": "up"})
        assert f'instance="{one}"' not in gateway.get("/metrics", headers=OPERATOR).text
        assert ask(gateway, "other").json()["model"] == "smollm2"
        assert not gateway.controller.overflow.instances
        again = add(gateway, **terms(paid))
        assert ask(gateway).json()["model"] == MODEL
        assert order(gateway, "DELETE", "/e0")[0] == 202
        until(lambda: states(gateway) == {again: "up"})
        answer = gateway.post(gateway.chat(service_tier="tight"))
        assert answer.status_code in (404, 503), "alone it serves nothing"
        assert paid.last()["strange"] == []


def test_one_that_is_left_alone_keeps_no_other_model_out(late: Fake, fake: Fake, paid: Paid, tmp_path: Path) -> None:
    with serving(beside(tmp_path, late.url, paid)) as gateway:
        until(lambda: states(gateway) == {"e0": "up", "e1": "up"})
        assert order(gateway, "DELETE", "/e0")[0] == 202
        until(lambda: states(gateway) == {"e1": "up"})
        assert order(gateway, "POST", json=terms(paid))[0] == 400, "one more would be alone, too"
        add(gateway, url=fake.url, served_name="another")
        assert gateway.post(gateway.chat(model="another")).status_code == 200
        assert gateway.post(gateway.chat(service_tier="tight")).status_code == 404
        add(gateway, url=late.url)
        slow(gateway, "e3")
        assert ask(gateway).json()["model"] == MODEL


def test_what_it_has_ends_there_when_it_leaves(fake: Fake, tmp_path: Path) -> None:
    paid = Paid(tmp_path, module="testing.fake_paid", options=("--delay", "0.2")).start()
    try:
        with learned(beside(tmp_path, fake.url, paid)) as gateway, ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(ask, gateway, stream=stream, max_tokens=8) for stream in (True, False)]
            until(lambda: paid.last()["open"] == 2)
            assert order(gateway, "DELETE", "/e1")[0] == 202
            assert all(MODEL in answer.result(20).text for answer in answers)
            until(lambda: states(gateway) == {"e0": "up"})
            assert gateway.controller.overflow.places == 0
    finally:
        paid.stop()


def test_a_file_that_is_read_again_can_add_it_with_its_class(fake: Fake, paid: Paid, tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    own = {"url": fake.url, "id": "e0"}
    file.write_text(tomli_w.dumps({"engines": [own]}))
    with serving(configuration(tmp_path, fake.url)) as gateway:

        async def reload() -> Reload:
            return Reload(file, AppState(gateway.inner))

        again = gateway.do(reload())
        added = {"engines": [own, terms(paid)], "classes": {"fresh": {"ttft_ms": 300.0}}}
        added["engines"][1]["overflow_classes"] = ["fresh"]
        file.write_text(tomli_w.dumps(added))
        gateway.do(again.run())
        until(lambda: "e1" in gateway.controller.overflow.instances)
        file.write_text(tomli_w.dumps({"engines": [own]}))
        gateway.do(again.run())
        until(lambda: states(gateway) == {"e0": "up"})


def test_a_stream_that_it_has_begun_ends_with_it(fake: Fake, tmp_path: Path) -> None:
    """No other engine knows the tokens of what the client has."""
    paid = Paid(tmp_path, module="testing.fake_paid", options=("--delay", "0.3")).start()
    try:
        with learned(beside(tmp_path, fake.url, paid)) as gateway, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, gateway, stream=True)
            until(lambda: began(gateway) == 1)
            asked = fake.last()["asked"]
            paid.stop()
            assert "went away" in answer.result(20).text
            assert fake.last()["asked"] == asked
    finally:
        paid.stop()


def test_explain_says_why(opened: Open) -> None:
    with opened() as gateway:
        ask(gateway)
        gateway.newest()
        folder = gateway.config.journal_dir
    assert folder is not None
    past = Past.of(read(folder), "headway explain")
    words = placement(past.run, past.timeline(0))
    assert words.startswith("It would have been ")
    assert words.endswith(" late; sent to e1 for 2.7e-05 of its budget.")


@pytest.mark.parametrize(
    ("body", "needs"),
    [
        ({"messages": [], "temperature": 0, "service_tier": "x", "top_k": None}, False),
        ({"prompt": "text"}, False),
        ({"prompt": ["two", "texts"]}, False),
        ({"prompt": [1, 2]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"vllm_xargs": {}}, False),
        ({"vllm_xargs": {"headway_id": "forged"}}, False),
        ({"vllm_xargs": {"mine": 1}}, True),
        ({"structured_outputs": {"json": {}}}, True),
        ({"ignore_eos": True}, True),
    ],
)
def test_fields_that_need_a_vllm(body: dict[str, Any], needs: bool) -> None:
    assert needs_vllm(body, own=("service_tier",)) is needs


def test_a_body_is_fitted_to_its_server() -> None:
    body = EngineBody.of({"model": "m", "prompt": "x", "priority": 3, "vllm_xargs": {"a": 1}})
    request = Request("r", "m", 1, 77, 0.0)
    away = Engine("m", url="http://x", remote_model="large", overflow=True)
    fitted = body.fitted(away, request)
    assert json.loads(fitted.content) == {"model": "large", "prompt": "x", "priority": 3, "max_tokens": 77}
    assert fitted.xargs == body.xargs
    other = body.fitted(Engine("m", url="http://x", kind="openai"), request)
    assert json.loads(other.content) == {"model": "m", "prompt": "x"}
