"""One tenant's flood leaves room for the others; keys claim no more than they may; secrets are not told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headway.config import Config, Engine, Key, Server, write
from headway.errors import ConfigError
from headway.gateway.budget import ByteBudget
from headway.gateway.preflight import preflight
from headway.gateway.reload import Reload
from tests.gateway.conftest import Serve
from tests.gateway.gateway import DEAD, OPERATOR, Fake, Gateway, configuration, serving, until
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import fakes

ALPHA, BETA = Key("sk-alpha-123", "alpha"), Key("sk-beta-1234", "beta")
TWO = (ALPHA, BETA)


def by(key: Key) -> dict[str, str]:
    return {"authorization": f"Bearer {key.key}"}


def background(gateway: Gateway, key: Key, **fields: Any) -> httpx.Response:
    return gateway.post(gateway.chat(background=True, **fields), headers=by(key))


def test_a_flood_is_refused_and_others_are_not(serve: Serve) -> None:
    with serve(DEAD, ready=False, keys=TWO, server={"max_queued": 20, "class_share": 1.0}) as gateway:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: background(gateway, ALPHA), range(60)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) == 60 - 10, "half of the queue"
        said = error(refused[0], 429)
        assert said["code"] == "tenant_queue_full"
        assert "server.tenant_share" in said["message"]
        assert "Wait for some of their answers" in said["message"]
        assert refused[0].headers["x-headway-dropped-reason"] == "tenant_queue_full"
        assert 1 <= int(refused[0].headers["retry-after"]) <= 60
        assert [background(gateway, BETA).status_code for _ in range(4)] == [202] * 4
        assert gateway.metric('headway_dropped_total{reason="tenant_queue_full",tenant="alpha"}') == 50


def test_a_flood_of_one_class_leaves_room_for_the_tenant_s_others(serve: Serve) -> None:
    with serve(DEAD, ready=False, keys=TWO, server={"max_queued": 16, "class_share": 0.5}) as gateway:
        answers = [background(gateway, ALPHA, service_tier="batch") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [202] * 4 + [429] * 2
        said = error(answers[-1], 429)["message"]
        assert "in the class batch" in said
        assert "server.class_share" in said
        assert background(gateway, ALPHA, service_tier="chat").status_code == 202


def test_a_flood_is_refused_before_its_bodies_are_read(serve: Serve) -> None:
    with serve(DEAD, ready=False, keys=TWO, server={"max_queued": 2}) as gateway:
        assert background(gateway, ALPHA).status_code == 202
        head = {"content-type": "application/json"} | by(ALPHA)
        answer = gateway.post(None, content=b"this is never parsed", headers=head)
        assert error(answer, 429)["code"] == "tenant_queue_full"
        assert gateway.inner.bodies.used == 0


def test_one_tenant_has_the_whole_queue(serve: Serve) -> None:
    keys = ALPHA, Key("sk-alpha-456", "alpha")
    with serve(DEAD, ready=False, keys=keys, server={"max_queued": 4}) as gateway:
        answers = [background(gateway, ALPHA) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [202] * 4 + [429]
        assert error(answers[-1], 429)["code"] == "queue_full"


def test_a_key_s_own_limit_of_the_queue(serve: Serve) -> None:
    key = Key("sk-alpha-123", "alpha", max_queued=2)
    with serve(DEAD, ready=False, keys=(key,)) as gateway:
        answers = [background(gateway, key) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202] * 2 + [429]
        assert "keys.max_queued" in error(answers[-1], 429)["message"]


def test_requests_that_ended_make_room(serve: Serve, fake: Fake) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        options = {"engine": {"max_running": 1}, "recipe": "vllm", "server": {"max_queued": 4}}
        gateway = stack.enter_context(serve(keys=TWO, **options))
        stack.callback(fake.release, "tenants")
        core = gateway.controller
        window = core.cluster.instances["e0"].window
        held = gateway.chat(**fakes(hold="tenants"))
        slow = []
        for i in range(window + 2):
            slow.append(pool.submit(gateway.post, held, headers=by(ALPHA)))
            until(lambda count=i + 1: len(core.requests) == count)
        assert gateway.post(gateway.chat(), headers=by(ALPHA)).status_code == 429
        fake.release("tenants")
        assert [answer.result().status_code for answer in slow] == [200] * (window + 2)
        assert gateway.post(gateway.chat(), headers=by(ALPHA)).status_code == 200


def test_bodies_of_one_tenant_leave_memory_for_others() -> None:
    budget = ByteBudget(100, share=0.5)
    first, second, other = (budget.hold() for _ in range(3))
    first.tenant = second.tenant = "alpha"
    other.tenant = "beta"
    first.add(60)  # one body is always within its share
    with pytest.raises(Exception, match=r"server\.tenant_share") as caught:
        second.add(1)
    assert caught.value.code == "tenant_queue_full"  # type: ignore[attr-defined]
    other.add(30)
    first.close()
    second.add(35)
    assert budget.used == 65


# ---- claims

LIMITED = Key(
    "sk-limited-1", "gamma", classes=("default", "batch"), ttft_ms=500.0, tpot_ms=50.0, e2e_ms=5000.0, priority=5
)


@pytest.fixture(scope="module")
def limited(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    config = configuration(tmp_path_factory.mktemp("limited"), fake.url, keys=(LIMITED, BETA))
    with serving(config) as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "headers", "setting"),
    [
        ({"service_tier": "chat"}, {}, "keys.classes"),
        ({"service_tier": "priority"}, {}, "keys.classes"),
        ({"ttft_slo_ms": 499}, {}, "keys.ttft_ms"),
        ({}, {"x-slo-ttft-ms": "1"}, "keys.ttft_ms"),
        ({"tpot_slo_ms": 49.9}, {}, "keys.tpot_ms"),
        ({"ttlt_slo_ms": 4999}, {}, "keys.e2e_ms"),
        ({"headway": {"run": "r", "slo_run_ms": 100}}, {}, "keys.e2e_ms"),
        ({"priority": 4}, {}, "keys.priority"),
        ({}, {"x-vllm-priority": "-7"}, "keys.priority"),
    ],
)
def test_a_claim_beyond_the_key_is_refused(
    limited: Gateway, fields: dict[str, Any], headers: dict[str, str], setting: str
) -> None:
    said = error(limited.post(limited.chat(**fields), headers=by(LIMITED) | headers), 403)
    assert (said["code"], said["type"]) == ("beyond_key", "permission_error")
    assert f"({setting})" in said["message"]
    assert "or ask the operator" in said["message"]
    assert LIMITED.key not in said["message"]
    assert limited.post(limited.chat(**fields), headers=by(BETA) | headers).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [{}, {"service_tier": "batch"}, {"ttft_slo_ms": 500, "tpot_slo_ms": 50, "ttlt_slo_ms": 5000}, {"priority": 5}],
)
def test_a_claim_within_the_key_is_served(limited: Gateway, fields: dict[str, Any]) -> None:
    assert limited.post(limited.chat(**fields), headers=by(LIMITED)).status_code == 200


def test_openai_s_client_sees_what_it_knows(limited: Gateway) -> None:
    client = limited.client(api_key=LIMITED.key)
    with pytest.raises(openai.PermissionDeniedError, match="may not use the class 'chat'"):
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "hi"}], service_tier="chat"
        )  # type: ignore[call-overload]


# ---- where keys come from


def test_keys_from_the_environment_and_files(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("ALPHA_KEY", "sk-from-the-environment")
    (tmp_path / "beta").write_text("sk-from-a-file\n", "utf-8-sig")
    (tmp_path / "operator").write_text("sk-from-another-file")
    keys = Key("env:ALPHA_KEY", "alpha"), Key(f"file:{tmp_path / 'beta'}", "beta")
    with serve(keys=keys, server={"operator_key": f"file:{tmp_path / 'operator'}"}) as gateway:
        for text in ("sk-from-the-environment", "sk-from-a-file"):
            headers = {"authorization": f"Bearer {text}"}
            assert gateway.post(gateway.chat(), headers=headers).status_code == 200
        operator = {"authorization": "Bearer sk-from-another-file"}
        assert gateway.control({"op": "state"}, headers=operator).status_code == 200
        for wrong in ("env:ALPHA_KEY", f"file:{tmp_path / 'beta'}", "sk-from", "\xe9"):
            given = {b"authorization": b"Bearer " + wrong.encode("latin-1")}
            error(gateway.post(gateway.chat(), headers=given), 401)
    assert "sk-from" not in caplog.text


def test_a_key_s_header_that_comes_twice_is_refused(serve: Serve) -> None:
    with serve(keys=TWO) as gateway:
        for name, scheme in (("authorization", "Bearer "), ("x-api-key", "")):
            for texts in ((ALPHA.key, "sk-wrong"), ("sk-wrong", ALPHA.key), (ALPHA.key, ALPHA.key)):
                headers = [(name, scheme + text) for text in texts]
                said = error(gateway.post(gateway.chat(), headers=headers), 400)
                assert said["param"] == name
                assert "more than once" in error(gateway.get("/v1/models", headers=headers), 400)["message"]


def test_with_keys_the_documentation_needs_one(serve: Serve) -> None:
    with serve(keys=TWO) as gateway:
        for path in ("/docs", "/openapi.json"):
            assert error(gateway.get(path), 401)["code"] == "invalid_api_key"
            for headers in (by(ALPHA), OPERATOR):
                assert gateway.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ((Key("env:NOT_SET_ANYWHERE", "a"),), "environment variable NOT_SET_ANYWHERE"),
        ((Key("file:/no/such/file", "a"),), "file /no/such/file"),
        ((ALPHA, Key(ALPHA.key, "b")), "the same as an earlier one"),
        ((Key("sk-schl\xfcssel", "a"),), r"keys\.0\.key holds no usable secret"),
        ((ALPHA, Key("env:OPERATOR", "b")), r"keys\.1\.key is the same as server\.operator_key"),
    ],
)
def test_a_key_that_cannot_be_one_is_refused_at_the_start(
    keys: tuple[Key, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPERATOR", "sk-operator-1")
    config = Config(engines=(Engine(url=DEAD),), keys=keys, server=Server(operator_key="sk-operator-1"))
    with pytest.raises(ConfigError, match=why) as caught:
        preflight(config)
    assert ALPHA.key not in str(caught.value)


def test_a_reload_compares_keys_with_the_operator_s_key_in_force(fake: Fake, tmp_path: Path) -> None:
    """The gateway reads that once; the file may have gone, or have another secret by now."""
    secret, file = tmp_path / "operator", tmp_path / "headway.toml"
    secret.write_text("sk-operator-1")
    config = configuration(tmp_path, fake.url, keys=(ALPHA,), server={"operator_key": f"file:{secret}"})
    file.write_text(write(config))
    (engine,) = config.engines
    more, most = (tuple(replace(engine, url=DEAD, id=id) for id in ids) for ids in (["a"], ["a", "b"]))
    other = replace(config, keys=(replace(ALPHA, key="sk-alpha-456"),), engines=(engine, *more))
    taken = replace(config, keys=(replace(ALPHA, key="sk-operator-1"),), engines=(engine, *most))
    with serving(config) as gateway:
        state = gateway.server._state
        assert state is not None
        reload = Reload(file, state)
        secret.unlink()
        for new in (other, taken):
            file.write_text(write(new))
            gateway.do(reload.run())
        assert gateway.get("/v1/models", headers={"authorization": "Bearer sk-alpha-456"}).status_code == 200
        assert [*gateway.inner.dispatcher.engines] == ["e0", "a"], "the second one changed nothing"


@pytest.mark.parametrize("text", ["short", "two\nlines-of-it", "\xe9\xe9\xe9\xe9\xe9\xe9\xe9\xe9"])
def test_a_file_without_a_usable_key_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    config = Config(engines=(Engine(url=DEAD),), server=Server(operator_key=f"file:{tmp_path / 'key'}"))
    with pytest.raises(ConfigError, match=r"server\.operator_key holds no usable secret") as caught:
        preflight(config)
    assert text not in str(caught.value)
