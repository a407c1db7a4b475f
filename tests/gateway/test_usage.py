"""Limits of a tenant's requests and tokens per minute: exact, told with the time to wait, nobody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Key
from headway.errors import RequestError
from headway.gateway.watch.usage import Usage
from tests.gateway.conftest import Serve
from tests.gateway.gateway import OPERATOR, Gateway, until

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
            usage.accepted("a", 3, now)
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
        usage.accepted("a", tokens, now)
        usage.answered("a", tokens, now)


def test_tenants_without_a_limit_cost_nothing() -> None:
    free = Key(key=B, tenant="b")
    usage = Usage([LIMITED, free])
    usage.accepted("b", 10**9, 0.0)
    assert refused(usage, free, 0.0) is None
    assert set(usage._used) == {"a"}


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


def test_metrics_tell_tenants_apart_up_to_a_number(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.gateway.watch.label_values._MOST", 1)
    with serve(keys=(LIMITED, Key(key=B, tenant="b"), Key(key="sk-gamma-1234", tenant="c"))) as gateway:
        for key in (A, B, "sk-gamma-1234"):
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
