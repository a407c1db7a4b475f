"""Limits of a tenant's requests and tokens per minute: exact, told with the time to wait, nobody else's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Key
from headway.errors import RequestError
from headway.gateway.watch.usage import Usage
from tests.gateway.batches import upload
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, OPERATOR, SAY, Fake, Gateway, until
from tests.gateway.test_request_ends import fakes

A, B = "sk-alpha-123456", "sk-beta-123456"
LIMITED = Key(key=A, tenant="a", requests_per_min=5)
STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 900)), max_size=40)


def refused(usage: Usage, key: Key, now: float) -> RequestError | None:
    try:
        usage.check(key, now)
    except RequestError as error:
        return error
    return None


@given(STEPS)
def test_no_minute_has_more_requests_than_the_limit(steps: list[tuple[float, int]]) -> None:
    usage, now, accepted = Usage([LIMITED]), 1000.0, list[float]()
    for pause, _ in steps:
        now += pause
        if refused(usage, LIMITED, now) is None:
            usage.count("a", now, requests=1, tokens=3)
            accepted.append(now)
        assert sum(now - 60 < at <= now for at in accepted) <= 5


@given(STEPS)
def test_after_the_time_it_is_told_a_client_is_served(steps: list[tuple[float, int]]) -> None:
    key = Key(key=A, tenant="a", tokens_per_min=1000)
    usage, now = Usage([key]), 1000.0
    for pause, tokens in steps:
        now += pause
        error = refused(usage, key, now)
        if error is not None:
            wait = float(error.headers["retry-after"])
            assert 1 <= wait <= 61
            assert refused(usage, key, now + wait) is None
            now += wait
        usage.count("a", now, requests=1, tokens=2 * tokens)


def test_tenants_without_a_limit_cost_nothing() -> None:
    free = Key(key=B, tenant="b")
    usage = Usage([LIMITED, free])
    usage.count("b", 0.0, tokens=10**9)
    assert refused(usage, free, 0.0) is None
    assert set(usage._used) == {"a"}


def test_what_is_taken_back_leaves_nothing_behind() -> None:
    key = Key(key=A, tenant="a", tokens_per_min=1000)
    usage = Usage([key])
    usage.count("a", 0.5, tokens=1000)
    assert refused(usage, key, 5.0) is not None
    usage.count("a", 0.5, tokens=-1000)
    assert refused(usage, key, 5.0) is None
    usage.count("a", 61.0, tokens=999)
    usage.count("a", 0.5, tokens=-1000)
    usage.count("a", 61.5, tokens=1)
    assert refused(usage, key, 62.0) is not None, "what no longer counts is not taken back from what does"


def test_a_limit_that_is_taken_away_while_a_request_comes_in() -> None:
    usage = Usage([LIMITED])
    usage.adopt([Key(key=A, tenant="a")])
    assert refused(usage, LIMITED, 0.0) is None


def ask(gateway: Gateway, key: str) -> tuple[int, dict[str, str]]:
    answer = gateway.post(gateway.chat(), headers={"authorization": f"Bearer {key}"})
    return answer.status_code, dict(answer.headers)


@pytest.mark.parametrize("limit", [{"requests_per_min": 2}, {"tokens_per_min": 1}])
def test_over_http(serve: Serve, limit: dict[str, int]) -> None:
    keys = (Key(key=A, tenant="a", **limit), Key(key=B, tenant="b"))
    with serve(keys=keys) as gateway:
        served = 0
        while (seen := ask(gateway, A))[0] == 200:
            served += 1
            assert served <= 2
            until(lambda: not gateway.controller.requests)
        status, headers = seen
        what = next(iter(limit)).removesuffix("_per_min")
        assert (status, headers["x-headway-dropped-reason"]) == (429, next(iter(limit)))
        assert int(headers["retry-after"]) <= 61
        assert headers[f"x-ratelimit-limit-{what}"] == str(next(iter(limit.values())))
        assert ask(gateway, B)[0] == 200
        assert (
            'headway_dropped_total{reason="rate_limit",tenant="a"} 1.0'
            in gateway.get("/metrics", headers=OPERATOR).text
        )


def test_metrics_tell_tenants_apart_up_to_a_number(serve: Serve) -> None:
    more = [Key(key=f"sk-tenant-{i:04}", tenant=f"t{i}") for i in range(65)]
    with serve(keys=(LIMITED, *more)) as gateway:
        for key in (A, *(one.key for one in more)):
            assert ask(gateway, key)[0] == 200
        by, other = 'class="default",model="smollm2",outcome="finished",tenant=', "(other)"
        until(lambda: gateway.metric(f'headway_requests_total{{{by}"{other}"}}') == 2)
        assert gateway.metric(f'headway_requests_total{{{by}"a"}}') == 1
        assert gateway.metric('headway_tokens_total{kind="output",model="smollm2",tenant="a"}') == 8


def test_all_prompts_of_a_request_count(serve: Serve) -> None:
    key = Key(key=A, tenant="a", tokens_per_min=500)
    with serve(keys=(key,), engine={"max_running": 64}) as gateway:
        for prompt in ([[7] * 10] * 60, "one"):
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1}
            answer = gateway.post(body, "/v1/completions", headers={"authorization": f"Bearer {A}"})
            until(lambda: not gateway.controller.requests)
        assert answer.status_code == 429
        assert answer.headers["x-headway-dropped-reason"] == "tokens_per_min"


OF_A = {"authorization": f"Bearer {A}"}


@pytest.mark.parametrize(("limit", "served"), [({"requests_per_min": 5}, 5), ({"tokens_per_min": 50}, 2)])
def test_of_a_burst_no_more_are_served(serve: Serve, fake: Fake, limit: dict[str, int], served: int) -> None:
    """What comes at once is counted before the first one is stored."""
    body = {"model": "smollm2", "prompt": [7] * 40, "max_tokens": 100, **fakes(hold=f"burst {served}", tokens=100)}
    with serve(keys=(Key(key=A, tenant="a", **limit),)) as gateway, ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(gateway.post, body, "/v1/completions", headers=OF_A) for _ in range(20)]
        until(lambda: sum(one.done() for one in asked) == 20 - served)
        fake.release(f"burst {served}")
        codes = sorted(one.result().status_code for one in asked)
    assert codes == [200] * served + [429] * (20 - served)


WORK: list[tuple[str, Any, int]] = [
    (CHAT, {"model": "smollm2"}, 400),
    ("/tokenize", {"model": "smollm2", "prompt": "a"}, 200),
    ("/detokenize", {"model": "smollm2", "tokens": [7]}, 200),
    ("/v1/messages/count_tokens", {"model": "smollm2", "messages": SAY}, 200),
    ("/v1/batches", {}, 400),
    ("/v1/runs/r1/units", {"unit": "fetch", "state": "started"}, 200),
    ("/v1/runs/r1/end", {}, 404),
]


@pytest.mark.parametrize(("path", "body", "status"), WORK)
def test_what_costs_work_counts_whatever_becomes_of_it(serve: Serve, path: str, body: Any, status: int) -> None:
    with serve(keys=(Key(key=A, tenant="a", requests_per_min=2),)) as gateway:
        codes = [gateway.post(body, path, headers=OF_A).status_code for _ in range(3)]
        assert codes == [status, status, 429]
        assert gateway.get("/v1/files", headers=OF_A).status_code == 200, "questions do not count"


def test_files_count(serve: Serve) -> None:
    with serve(keys=(Key(key=A, tenant="a", requests_per_min=2),)) as gateway:
        codes = [upload(gateway, b"{}", headers=OF_A).status_code for _ in range(3)]
    assert codes == [200, 200, 429]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_tokens_count_that_only_the_engine_knew(serve: Serve, stream: bool) -> None:
    with serve(keys=(Key(key=A, tenant="a", tokens_per_min=500),)) as gateway:
        body = gateway.chat(stream=stream, **fakes(prompt=500))  # of an image, say
        assert gateway.post(body, headers=OF_A).status_code == 200
        until(lambda: gateway.inner.path.usage._used["a"]["tokens"]._sum == 500 + 8)
        assert gateway.post(body, headers=OF_A).status_code == 429


def test_tokens_count_whose_client_has_left(serve: Serve) -> None:
    with serve(keys=(Key(key=A, tenant="a", tokens_per_min=10_000),)) as gateway:
        body = gateway.chat(stream=True, max_tokens=500, **fakes(tokens=500, delay=0.02))
        with httpx.stream("POST", gateway.url + CHAT, json=body, headers=OF_A) as answer:
            events = 0
            for line in answer.iter_lines():
                events += line.startswith("data: ")
                if events >= 20:
                    break
        until(lambda: not gateway.controller.requests)
        prompt = gateway.metric('headway_tokens_total{kind="prompt",model="smollm2",tenant="a"}')
        assert 20 <= gateway.inner.path.usage._used["a"]["tokens"]._sum - prompt < 400
