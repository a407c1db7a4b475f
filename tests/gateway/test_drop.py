"""A class with drop: 429 at the door, in the queue and inside an engine, as soon as it cannot be on time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from headway.config import Tier
from headway.events import Learned
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CLASSES, DEAD, SAY, Fake, Gateway, configuration, serving, until
from tests.gateway.test_request_ends import fakes, hanging

# Scaled coefficients: 10 ms per iteration, 10 ms per prompt token.
SLOW = np.array([0.01, 0.0, 0.0, 5.12, 0.0])
TIERS = CLASSES | {
    "strict": Tier(ttft_ms=300.0, drop=True),
    "roomy": Tier(ttft_ms=60_000.0, drop=True),
    "by-the-end": Tier(e2e_ms=300.0, drop=True),
    "patient": Tier(ttft_ms=300.0),
}
DROPPED = 'headway_dropped_total{reason="infeasible",tenant="default"}'
LONG = [{"role": "user", "content": "word " * 200}]


@pytest.fixture(scope="module")
def gateway(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("drop")
    with serving(configuration(folder, fake.url, classes=TIERS, engine={"max_running": 1})) as running:
        yield running


def learn(gateway: Gateway, *engines: str) -> None:
    """Let the gateway know slow engines, which the fake ones do not tell."""

    names = engines or ("e0",)
    until(lambda: set(names) <= set(gateway.controller.cluster.instances))

    async def tell() -> None:
        for name in names:
            gateway.inner.dispatcher.notify(Learned(name, SLOW))

    gateway.do(tell())


def refused(gateway: Gateway, tier: str, **fields: object) -> float:
    """Ask, check that the refusal is complete and that all is forgotten; return the seconds that it took."""
    before, began = gateway.metric(DROPPED), time.monotonic()
    answer = gateway.post(gateway.chat(service_tier=tier, **fields))
    took = time.monotonic() - began
    assert answer.status_code == 429, answer.text
    assert answer.headers["x-headway-dropped-reason"] == "infeasible"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "infeasible")
    assert " were promised" in error["message"]
    assert "a class without drop" in error["message"]
    assert gateway.metric(DROPPED) == before + 1
    return took


def at_rest(gateway: Gateway) -> None:
    until(lambda: not gateway.inner.dispatcher.in_flight and not gateway.controller.requests)
    assert gateway.controller.queued == 0


def test_what_cannot_be_on_time_is_refused_before_it_is_stored(serve: Serve, fake: Fake) -> None:
    with serve(classes=TIERS) as gateway:
        learn(gateway)
        asked, jobs = fake.last()["asked"], len(gateway.jobs())
        answer = gateway.post(gateway.chat(service_tier="strict", messages=LONG))
        assert answer.status_code == 429
        assert "retry-after" not in answer.headers, "it would be refused again"
        assert answer.headers["x-should-retry"] == "false"
        assert "The first token would take" in answer.json()["error"]["message"]
        assert "0.3 s were promised" in answer.json()["error"]["message"]
        assert (fake.last()["asked"], len(gateway.jobs())) == (asked, jobs)
        assert gateway.metric('headway_slo_attainment{class="strict",model="smollm2"}') == 0.0
        assert (
            gateway.metric('headway_requests_total{class="strict",model="smollm2",outcome="refused",tenant="default"}')
            == 1
        )
        background = gateway.post(gateway.chat(service_tier="strict", messages=LONG, background=True))
        assert background.status_code == 429
        with gateway.client(max_retries=2) as client, pytest.raises(openai.RateLimitError):
            client.chat.completions.create(
                model="smollm2",
                messages=LONG,
                service_tier="strict",  # type: ignore[call-overload]
            )
        assert gateway.metric(DROPPED) == 3, "the client did not try again"


def test_a_prompt_that_one_of_several_engines_holds_is_served(serve: Serve, stock: Fake) -> None:
    """At least 128 tokens of some 210: 0.8 s of 2.1."""
    with serve(stock.url, stock.url, classes=TIERS) as gateway:
        learn(gateway, "e0", "e1")
        slo = {"x-slo-ttft-ms": "1500"}
        known, other = (
            gateway.chat(service_tier="strict", messages=[{"role": "user", "content": word * 200}])
            for word in ("word ", "other ")
        )
        assert gateway.post(known, headers=slo).status_code == 429
        assert gateway.post(known | {"service_tier": "patient"}).status_code == 200
        assert gateway.post(known, headers=slo).status_code == 200
        assert gateway.post(other, headers=slo).status_code == 429


@pytest.mark.parametrize("tier", ["patient", "roomy", "chat", "default"])
def test_other_classes_and_what_has_time_are_served(serve: Serve, tier: str) -> None:
    with serve(classes=TIERS) as gateway:
        learn(gateway)
        assert gateway.post(gateway.chat(service_tier=tier, messages=LONG)).status_code == 200


def test_a_request_s_own_slo_goes_before_the_class_s(serve: Serve) -> None:
    with serve(classes=TIERS) as gateway:
        learn(gateway)
        body = gateway.chat(service_tier="strict", messages=LONG)
        assert gateway.post(body, headers={"x-slo-ttft-ms": "60000"}).status_code == 200
        body = gateway.chat(service_tier="roomy", messages=LONG)
        assert gateway.post(body, headers={"x-slo-ttft-ms": "100"}).status_code == 429


def test_nothing_is_refused_at_the_door_before_the_engine_has_learned(gateway: Gateway) -> None:
    assert gateway.post(gateway.chat(service_tier="strict", messages=LONG)).status_code == 200


@pytest.mark.parametrize("tier", ["strict", "by-the-end"])
def test_what_is_queued_too_long_is_refused(serve: Serve, tier: str) -> None:
    with serve(DEAD, ready=False, classes=TIERS) as gateway:
        assert 0.3 <= refused(gateway, tier) < 5
        assert 0.3 <= refused(gateway, tier, stream=True) < 5
        state, reason = gateway.newest()
        assert state == "failed"
        assert str(reason).startswith("dropped: The ")
        at_rest(gateway)


@pytest.mark.parametrize("stream", [True, False])
def test_what_waits_inside_an_engine_is_refused_and_aborted(gateway: Gateway, fake: Fake, stream: bool) -> None:
    aborted = fake.last()["aborted"]
    took = refused(gateway, "strict", stream=stream, **fakes(hold="for ever"))
    assert 0.3 <= took < 5
    until(lambda: fake.last()["aborted"] == aborted + 1)
    assert fake.last()["open"] == 0
    assert gateway.newest()[0] == "failed"
    at_rest(gateway)


def test_a_class_without_drop_waits(gateway: Gateway, fake: Fake) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(gateway.post, gateway.chat(service_tier="patient", **fakes(hold="patience")))
        time.sleep(0.6)  # twice what it was promised
        assert not slow.done()
        fake.release("patience")
        assert slow.result().status_code == 200
    at_rest(gateway)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_has_begun_is_not_dropped(gateway: Gateway, stream: bool) -> None:
    """Whether a whole answer has begun only its engine knows."""
    before = gateway.metric(DROPPED)
    fields = fakes(tokens=8, delay=0.1)
    answer = gateway.post(gateway.chat(service_tier="strict", stream=stream, **fields))
    assert answer.status_code == 200
    assert gateway.metric(DROPPED) == before
    at_rest(gateway)


def test_a_background_request_ends_as_refused(gateway: Gateway) -> None:
    body = gateway.chat(service_tier="strict", background=True, **fakes(hold="for ever, too"))
    accepted = gateway.post(body)
    assert accepted.status_code == 202
    url = f"/v1/responses/{accepted.json()['id']}"
    answer = until(lambda: (told := gateway.get(url).json())["status"] == "failed" and told)
    assert answer["error"]["code"] == "rate_limit_exceeded"
    assert answer["error"]["message"].startswith("dropped: The first token would take")
    at_rest(gateway)


def test_a_client_that_leaves_is_not_counted_as_dropped(gateway: Gateway) -> None:
    before = gateway.metric(DROPPED)
    with hanging(gateway, service_tier="roomy", **fakes(hold="gone")):
        until(lambda: gateway.controller.requests)
    at_rest(gateway)
    assert gateway.metric(DROPPED) == before
    assert gateway.controller.next_check == float("inf")


def test_an_engine_that_dies_over_a_request_that_is_late(serve: Serve, mortal: Fake) -> None:
    """It comes back to the queue, and is refused from there; once."""
    with serve(mortal.url, classes=TIERS) as gateway, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(gateway.post, gateway.chat(service_tier="strict", **fakes(hold="death")))
        until(lambda: mortal.last()["open"] == 1)
        mortal.stop()
        assert slow.result().status_code == 429
        assert gateway.metric(DROPPED) == 1
        at_rest(gateway)


@pytest.mark.parametrize("recipe", ["vllm", "edf", "vtc", "llm-d-like"])
def test_with_every_kind_of_planner(serve: Serve, fake: Fake, recipe: str) -> None:
    with serve(recipe=recipe, classes=TIERS, engine={"max_running": 1}) as gateway:
        refused(gateway, "strict", **fakes(hold=f"for ever {recipe}"))
        at_rest(gateway)
        assert gateway.post(gateway.chat(service_tier="strict")).status_code == 200


def test_many_at_once_end_once_each(gateway: Gateway, fake: Fake) -> None:
    done = [
        f'headway_requests_total{{class="strict",model="smollm2",outcome="{how}",tenant="default"}}'
        for how in ("finished", "refused", "failed", "cancelled")
    ]
    before = [gateway.metric(name) for name in done]
    with ThreadPoolExecutor(24) as pool:
        asked = [
            pool.submit(
                gateway.post,
                gateway.chat(
                    service_tier="strict",
                    stream=i % 2 == 0,
                    messages=SAY,
                    **fakes(delay=0.02 * (i % 3), **({"hold": "many"} if i % 3 == 0 else {})),
                ),
            )
            for i in range(24)
        ]
        codes = [one.result().status_code for one in asked]
    assert codes.count(429) >= 8
    assert set(codes) == {200, 429}
    after = [gateway.metric(name) - was for name, was in zip(done, before, strict=True)]
    assert after == [codes.count(200), codes.count(429), 0, 0]
    assert {state for state, _ in gateway.jobs().values()} <= {"done", "failed"}
    at_rest(gateway)
