"""SLO, priority and tenant: headers, body and classes become metadata that the scheduler reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config import Key, Tier
from headway.engines.vllm.request_metadata import RequestMetadata, read_metadata
from headway.policy.core.ranks import BEYOND
from headway.policy.forecast.lengths.task import TELLING
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, CLASSES, SAY, Fake, Gateway, configuration, serving, until

SLOW = 1e6  # milliseconds


@pytest.fixture
def ask(gateway: Gateway, fake: Fake) -> Any:
    """Send a chat with fields and headers; return the body that the engine got."""

    def send(headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        answer = gateway.post(gateway.chat(**fields), headers=headers or {})
        assert answer.status_code == 200, answer.text
        return dict(fake.last()["body"])

    return send


def metadata(body: dict[str, Any]) -> RequestMetadata:
    """Read the body's metadata as the scheduler does."""
    params = SimpleNamespace(extra_args=body["vllm_xargs"], max_tokens=body["max_tokens"])
    facts = {"request_id": "vllm's", "arrival_time": -1.0}
    return read_metadata(SimpleNamespace(sampling_params=params, pooling_params=None, **facts))


@pytest.mark.parametrize("value", [0, -1.0])
def test_a_target_or_weight_that_is_not_positive_reaches_no_engine(value: float) -> None:
    """Of a client that asks an engine directly: the packer divides by these."""
    names = ("ttft", "tpot", "e2e", "itl", "weight")
    found = metadata({"vllm_xargs": {f"headway_{name}": value for name in names}, "max_tokens": 8})
    assert [getattr(found, name) for name in names] == [math.inf] * 4 + [1.0]


def slo_targets(body: dict[str, Any]) -> dict[str, float]:
    """Return the SLO that the engine was told, in milliseconds."""
    extra = body["vllm_xargs"]
    return {
        name: round(extra[f"headway_{name}"] * 1000, 6)
        for name in ("ttft", "tpot", "e2e", "itl")
        if f"headway_{name}" in extra
    }


def test_every_request_has_its_facts(ask: Any, gateway: Gateway) -> None:
    told = metadata(ask({"x-slo-ttft-ms": "1200"}, vllm_xargs={"headway_ttft": 9, "mine": 1}))
    assert told.id == list(gateway.jobs())[-1]
    assert told.ttft == 1.2, "a client cannot pass facts off as ours"
    assert told.tpot == told.e2e == float("inf")
    assert told.arrival > 1.7e9
    assert 0 < told.tokens_left <= 8, "the forecast knows max_tokens"


def test_the_spread_of_a_forecast_is_told_once_there_are_answers(serve: Serve, fake: Fake) -> None:
    told = []
    with serve() as gateway:
        for _ in range(TELLING + 1):
            assert gateway.post(gateway.chat()).status_code == 200
            told.append(metadata(fake.last()["body"]).spread)
    assert told == [1.0] * TELLING + [0.0], "all answers had the same length"


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({}, {}, {}),
        ({"x-slo-ttft-ms": "250"}, {}, {"ttft": 250}),
        (
            {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "50.5", "x-slo-e2e-ms": "1e3"},
            {},
            {"ttft": 250, "tpot": 50.5, "e2e": 1000},
        ),
        ({"x-llm-d-slo-ttft-ms": "300", "x-llm-d-slo-tpot-ms": "30"}, {}, {"ttft": 300, "tpot": 30}),
        ({"x-slo-ttft-ms": "1", "x-llm-d-slo-ttft-ms": "2"}, {}, {"ttft": 1}),
        ({}, {"ttft_slo_ms": 400, "tpot_slo_ms": 40.5, "ttlt_slo_ms": 4000}, {"ttft": 400, "tpot": 40.5, "e2e": 4000}),
        ({}, {"service_tier": "chat"}, {"ttft": 1500, "tpot": 150}),
        ({"x-llm-d-inference-objective": "chat"}, {}, {"ttft": 1500, "tpot": 150}),
        ({"x-llm-d-inference-objective": "chat"}, {"service_tier": "batch"}, {"ttft": 1500, "tpot": 150}),
        ({}, {"service_tier": "chat", "ttft_slo_ms": 9}, {"ttft": 9, "tpot": 150}),
        ({"x-slo-tpot-ms": "3"}, {"service_tier": "chat", "tpot_slo_ms": 4, "ttft_slo_ms": 9}, {"ttft": 9, "tpot": 3}),
        ({}, {"service_tier": "default"}, {}),
        ({}, {"service_tier": "auto"}, {}),
        ({}, {"service_tier": "priority"}, {"ttft": 1500, "tpot": 150}),
        ({}, {"service_tier": "flex"}, {}),
        ({}, {"service_tier": "scale"}, {}),
    ],
)
def test_headers_before_body_before_class(ask: Any, headers: Any, fields: Any, expected: Any) -> None:
    assert slo_targets(ask(headers, **fields)) == expected


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({"x-slo-itl-ms": "50"}, {}, {"tpot": 50, "itl": 50}),
        ({"x-slo-itl-ms": "50", "x-slo-tpot-ms": "30"}, {}, {"tpot": 30, "itl": 50}),
        ({}, {"itl_slo_ms": 70, "ttft_slo_ms": 9}, {"ttft": 9, "tpot": 70, "itl": 70}),
        ({}, {"service_tier": "smooth"}, {"tpot": 80, "itl": 80}),
        ({"x-slo-itl-ms": "50"}, {"service_tier": "smooth"}, {"tpot": 50, "itl": 50}),
    ],
)
def test_a_bound_on_gaps_is_one_on_their_mean_and_promised_to_streams_alone(
    serve: Serve, fake: Fake, headers: Any, fields: Any, expected: Any
) -> None:
    with serve(classes=CLASSES | {"smooth": Tier(itl_ms=80.0)}) as gateway:
        gateway.post(gateway.chat(stream=True, **fields), headers=headers)
        assert slo_targets(fake.last()["body"]) == expected
        gateway.post(gateway.chat(**fields), headers=headers)
        assert "itl" not in slo_targets(fake.last()["body"])


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({}, {}, 0),
        ({}, {"priority": -3}, -3),
        ({"x-vllm-priority": "4"}, {"priority": -3}, 4),
        ({}, {"service_tier": "batch"}, 10),
        ({}, {"service_tier": "flex"}, 10),
        ({}, {"service_tier": "batch", "priority": 2}, 2),
        ({"x-vllm-priority": "-1"}, {"service_tier": "batch", "priority": 2}, -1),
    ],
)
def test_priority(ask: Any, headers: dict[str, str], fields: dict[str, Any], expected: int) -> None:
    assert ask(headers, **fields)["priority"] == expected


def test_a_class_of_one_s_own_and_the_default_class(serve: Serve, fake: Fake) -> None:
    classes = CLASSES | {"gold": Tier(ttft_ms=10.0, priority=-5), "default": Tier(e2e_ms=SLOW)}
    with serve(classes=classes) as gateway:
        gateway.post(gateway.chat(service_tier="gold"))
        assert slo_targets(fake.last()["body"]) == {"ttft": 10}
        assert fake.last()["body"]["priority"] == -5
        gateway.post(gateway.chat())
        assert slo_targets(fake.last()["body"]) == {"e2e": SLOW}
        # They are counted once the client has its answer.
        until(lambda: gateway.metric('headway_slo_attainment{class="default",model="smollm2"}') == 1.0)
        until(lambda: gateway.metric('headway_slo_owed_total{class="gold",model="smollm2",tenant="default"}') == 1.0)


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({}, {}, (1.0, 0.0)),
        ({}, {"service_tier": "flex"}, (1.0, 600.0)),
        ({}, {"service_tier": "batch"}, (1.0, 600.0)),
        ({}, {"service_tier": "soon"}, (1.0, 2.5)),
        ({"x-slo-tpot-ms": "80"}, {"service_tier": "soon"}, (1.0, 2.5)),
        ({"x-slo-ttft-ms": "80"}, {"service_tier": "soon"}, (1.0, 0.0)),
        ({}, {"service_tier": "gold"}, (4.0, 0.0)),
        ({"x-slo-ttft-ms": "9"}, {"service_tier": "gold"}, (4.0, 0.0)),
        ({}, {"service_tier": "gold", "ttlt_slo_ms": 900}, (4.0, 0.0)),
    ],
)
def test_a_request_has_the_weight_of_its_class_and_its_soft_target_unless_it_has_its_own(
    weighted: Gateway, fake: Fake, headers: dict[str, str], fields: dict[str, Any], expected: Any
) -> None:
    assert weighted.post(weighted.chat(**fields), headers=headers).status_code == 200
    told = metadata(fake.last()["body"])
    assert (told.weight, told.soft) == expected


@pytest.fixture(scope="module")
def weighted(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with classes that have a weight, and a soft target."""
    more = {"gold": Tier(ttft_ms=10.0, weight=4.0), "soon": Tier(soft_ttft_ms=2500.0)}
    with serving(configuration(tmp_path_factory.mktemp("weighted"), fake.url, classes=CLASSES | more)) as one:
        yield one


def test_what_a_class_with_a_share_can_spare_is_given_up_first_and_metrics_have_its_share(
    serve: Serve, fake: Fake
) -> None:
    more = {"gold": Tier(ttft_ms=SLOW, share=0.9985), "slow": Tier(e2e_ms=0.001, share=0.9)}
    with serve(classes=CLASSES | more) as one:
        one.post(one.chat(service_tier="gold"))
        assert metadata(fake.last()["body"]).urgency == BEYOND, "of 1,000 requests one may be late"
        one.post(one.chat(service_tier="slow"))
        assert one.metric('headway_slo_share{class="gold",share="promised"}') == 0.9985
        until(lambda: one.metric('headway_slo_share{class="gold",share="kept"}') == 1.0)
        until(lambda: one.metric('headway_slo_owed_total{class="slow",model="smollm2",tenant="default"}') == 1.0)
        assert 'headway_slo_share{class="slow",share="kept"} 0.0' in one.get("/metrics").text
        assert 'headway_slo_share{class="chat"' not in one.get("/metrics").text


@pytest.mark.parametrize(
    ("headers", "stage"),
    [
        ({}, None),
        ({"x-headway-app": "rag", "x-headway-run": "r1", "x-headway-unit": "rank"}, ("rag", "r1", "rank")),
        ({"x-headway-app": "rag"}, ("rag", "", "call")),
        ({"x-session-id": "s1"}, ("session", "s1", "call")),
        ({"x-claude-code-session-id": "c1"}, ("session", "c1", "call")),
        ({"x-session-affinity": "a1"}, ("session", "a1", "call")),
        ({"x-headway-run": "r1", "x-session-id": "s1"}, ("session", "r1", "call")),
        ({"x-opencode-session": "o1"}, ("session", "o1", "call")),
        ({"session-id": "x1"}, ("session", "x1", "call")),
        ({"session_id": "x2"}, ("session", "x2", "call")),
        ({"x-litellm-session-id": "l1"}, ("session", "l1", "call")),
        ({"x-headway-run": "", "x-session-id": ""}, None),
        ({"x-session-id": "s" * 300}, ("session", f"sha256:{sha256(b's' * 300).hexdigest()}", "call")),
    ],
)
def test_sessions_are_runs(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, headers: Any, stage: Any) -> None:
    request = arrived(gateway, monkeypatch, headers)
    found = request.stage and (request.stage.app, request.stage.run, request.stage.unit)
    assert found == stage


def test_the_task_is_the_class_unless_it_is_named(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    assert arrived(gateway, monkeypatch, {}).task == "default"
    assert arrived(gateway, monkeypatch, {"x-llm-d-inference-objective": "batch"}).task == "batch"
    assert arrived(gateway, monkeypatch, {"x-headway-task": "summary"}).task == "summary"


def test_the_prompt_is_counted_with_the_model_s_tokenizer(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(prompt: Any) -> int:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1}
        return int(arrived(gateway, monkeypatch, {}, body, "/v1/completions").prompt_tokens)

    assert tokens("one two three four") == 4
    assert tokens([1, 2, 3]) == 3
    assert tokens([[1, 2], [1, 2, 3, 4, 5]]) == 7, "all count"
    assert tokens(["one two", "one two three"]) == 5
    assert tokens("word " * 2000) == 2000 + 1, "long prompts too, off the event loop"
    whole = arrived(gateway, monkeypatch, {}, gateway.chat(messages=[{"role": "user", "content": "Hi"}]))
    assert 10 < whole.prompt_tokens < 60, "the chat template counts"


@pytest.mark.parametrize(
    ("path", "fields", "places", "prompt", "context"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3], "n": 3}, 3, 3, 3),
        ("/v1/completions", {"prompt": [[1, 2, 3], [4]], "n": 3}, 6, 4, 3),
        ("/v1/completions", {"prompt": ["one two", "one"], "best_of": 4, "n": 2}, 8, 3, 2),
        (CHAT, {"messages": SAY, "n": 5}, 5, None, None),
    ],
)
def test_a_request_has_a_place_for_each_prompt_and_choice(
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: Any,
    places: int,
    prompt: int | None,
    context: int | None,
) -> None:
    request = arrived(gateway, monkeypatch, {}, {"model": "smollm2", "max_tokens": 2} | fields, path)
    assert request.places == places
    if prompt is not None:
        assert (request.prompt_tokens, request.context) == (prompt, context)


def arrived(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], body: Any = None, path: str = CHAT
) -> Any:
    """Send a request and return the `Request` that the core was told of."""
    seen: list[Any] = []
    on = gateway.controller._add
    with monkeypatch.context() as patch:
        patch.setattr(type(gateway.controller), "_add", lambda self, *given: (seen.append(given[0]), on(*given)))
        answer = gateway.post(body or gateway.chat(), path, headers=headers)
    assert answer.status_code == 200, answer.text
    return seen[0]


# ---- keys and tenants


def test_keys_and_tenants(serve: Serve) -> None:
    keys = (Key("sk-alpha-123", "alpha"), Key("sk-beta-4567", "beta"))
    with serve(keys=keys) as gateway:
        for headers in (
            {},
            {"authorization": "Bearer nonsense"},
            {"authorization": "Basic sk-alpha-123"},
            {"authorization": "Bearer"},
        ):
            for path in ("/v1/models", "/v1/responses/x"):
                refused = gateway.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
            assert gateway.post(gateway.chat(), headers=headers).status_code == 401
            assert gateway.post({"op": "state"}, "/headway/control/e0", headers=headers).status_code == 401
        alpha, beta = ({"authorization": f"Bearer {key.key}"} for key in keys)
        assert gateway.get("/v1/models", headers=alpha).status_code == 200
        accepted = gateway.post(gateway.chat(background=True), headers=alpha).json()
        path = f"/v1/responses/{accepted['id']}"
        assert gateway.get(path, headers=alpha).status_code == 200
        other, unknown = gateway.get(path, headers=beta), gateway.get("/v1/responses/hw-0", headers=beta)
        assert other.status_code == unknown.status_code == 404
        assert gateway.post(None, f"{path}/cancel", headers=beta).status_code == 404
        with gateway.client(api_key="sk-beta-4567") as client:
            assert client.models.list().data[0].id == "smollm2"
        for open_to_all in ("/health", "/ready"):
            assert gateway.get(open_to_all).status_code == 200


# ---- what a promise is called


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("x-slo-ttft", "x-slo-ttft-ms"),
        ("x-slo-e2e", "x-slo-e2e-ms"),
        ("X-SLO-TPOT-S", "x-slo-tpot-ms"),
        ("x-llmd-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
        ("slo-run-ms", "x-slo-run-ms"),
    ],
)
def test_misspelt_headers_are_no_best_effort(gateway: Gateway, name: str, near: str) -> None:
    refused = gateway.post(gateway.chat(), headers={name: "100"})
    assert refused.status_code == 400
    assert f"Did you mean {near!r}" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["ttft_slo", "slo_ttft_ms", "tpot_slo_s"])
def test_misspelt_fields_are_no_best_effort(gateway: Gateway, name: str) -> None:
    refused = gateway.post(gateway.chat(**{name: 100}))
    assert refused.status_code == 400
    assert "slo_ms" in refused.json()["error"]["message"]
    assert gateway.post(gateway.chat(slogan="slow")).status_code == 200


def test_an_answer_tells_its_class_and_its_promise(gateway: Gateway) -> None:
    for stream in (False, True):
        body = gateway.chat(service_tier="chat", ttlt_slo_ms=9000, stream=stream)
        told = gateway.post(body, headers={"x-slo-ttft-ms": "700"}).headers
        assert told["x-headway-class"] == "chat"
        assert (told["x-headway-slo-ttft-ms"], told["x-headway-slo-tpot-ms"]) == ("700", "150")
        assert told["x-headway-slo-e2e-ms"] == "9000"
    plain = gateway.post(gateway.chat()).headers
    assert plain["x-headway-class"] == "default"
    assert not any(name.startswith("x-headway-slo") for name in plain)
