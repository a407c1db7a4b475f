"""API keys that operators make, rotate and revoke while gateways run, and the `headway key` commands."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.config import Broker, Key, Postgres, write
from headway.gateway.watch.ends import Refused
from headway.store.queue.keys import StoredKey
from tests.gateway.conftest import Serve
from tests.gateway.gateway import OPERATOR, Fake, Gateway, configuration, serving, until
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import fakes
from tests.helpers import postgres

KEYS = "/v1/headway/keys"
STORED = {"stored_keys": True}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, fake: Fake) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("keys")
    with serving(configuration(folder, fake.url, server=STORED, keys=(Key("sk-alpha-123", "alpha"),))) as gateway:
        yield gateway


def order(gateway: Gateway, method: str, path: str = "", **more: Any) -> list[dict[str, Any]]:
    answer = httpx.request(method, f"{gateway.url}{KEYS}{path}", headers=OPERATOR, timeout=15, **more)
    assert answer.status_code in (200, 201), answer.text
    return list(answer.json()["data"])


def create(gateway: Gateway, **body: Any) -> dict[str, Any]:
    (key,) = order(gateway, "POST", json={"tenant": "beta"} | body)
    return key


def status(gateway: Gateway, key: str) -> int:
    return gateway.get("/v1/models", headers={"x-api-key": key}).status_code


def test_a_key_is_made_and_ends_while_the_gateway_runs(gateway: Gateway) -> None:
    made = create(gateway, max_queued=7, classes=["default"])
    assert made["key"].startswith(made["prefix"])
    assert len(made["key"]) > len(made["prefix"]) + 40
    assert status(gateway, made["key"]) == status(gateway, "sk-alpha-123") == 200
    bearer = {"authorization": f"Bearer {made['key']}"}
    assert gateway.post(gateway.chat(**fakes()), headers=bearer).status_code == 200
    told = error(gateway.post(gateway.chat(service_tier="batch"), headers=bearer), 403)
    assert told["code"] == "beyond_key"
    (listed,) = [one for one in order(gateway, "GET") if one["id"] == made["id"]]
    assert listed == {name: value for name, value in made.items() if name != "key"}
    assert (listed["tenant"], listed["max_queued"], listed["state"]) == ("beta", 7, "active")
    assert status(gateway, made["key"] + "x") == status(gateway, made["prefix"]) == 401
    assert order(gateway, "DELETE", f"/{made['id']}")[0]["state"] == "revoked"
    assert status(gateway, made["key"]) == 401
    assert order(gateway, "DELETE", f"/{made['id']}")[0]["state"] == "revoked"


def test_its_text_is_nowhere(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        made = create(gateway, tenant="gamma")
        order(gateway, "DELETE", f"/{made['id']}")
        status(gateway, made["key"])
    for act in ("created", "revoked"):
        assert f"API key {made['id']} (tenant 'gamma') {act} by operator" in caplog.text
    secret = made["key"].removeprefix(made["prefix"])
    assert secret not in caplog.text
    assert secret not in json.dumps(order(gateway, "GET"))
    path = Path(str(gateway.config.broker.sqlite.path))
    for file in path.parent.glob("queue*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()


def test_a_rotated_key_stays_for_its_grace(gateway: Gateway) -> None:
    made = create(gateway, requests_per_min=50, expires_s=1000)
    new, old = order(gateway, "POST", f"/{made['id']}/rotate", json={"grace_s": 600})
    assert (new["tenant"], new["requests_per_min"], new["id"] != old["id"]) == ("beta", 50, True)
    assert new["expires_at"] - new["created_at"] == pytest.approx(1000)
    assert old["expires_at"] < made["expires_at"]
    assert status(gateway, made["key"]) == status(gateway, new["key"]) == 200
    newest, old = order(gateway, "POST", f"/{new['id']}/rotate")
    assert (old["state"], status(gateway, new["key"]), status(gateway, newest["key"])) == ("revoked", 401, 200)
    answer = gateway.post({}, f"{KEYS}/{new['id']}/rotate", headers=OPERATOR)
    assert error(answer, 409)["code"] == "key_ended"


def test_a_key_is_rotated_once(gateway: Gateway) -> None:
    made = create(gateway)
    new, _ = order(gateway, "POST", f"/{made['id']}/rotate", json={"grace_s": 600})
    assert new["expires_at"] is None
    said = error(gateway.post({}, f"{KEYS}/{made['id']}/rotate", headers=OPERATOR), 409)
    assert (said["code"], new["id"] in said["message"]) == ("key_rotated", True)


def test_a_key_expires(gateway: Gateway) -> None:
    made = create(gateway, expires_s=0.4)
    assert status(gateway, made["key"]) == 200
    until(lambda: status(gateway, made["key"]) == 401)
    (listed,) = [one for one in order(gateway, "GET") if one["id"] == made["id"]]
    assert listed["state"] == "expired"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "(other)"}, "stands for many tenants"),
        ({"tenant": "a", "key": "sk-chosen-123"}, "cannot be chosen"),
        ({"tenant": "a", "classes": ["gold"]}, "unknown class 'gold'"),
        ({"tenant": "a", "budgets": [{"per": "day"}]}, "needs either tokens or a cost"),
        ({"tenant": "a", "budgets": [{"per": "day", "tokens": 1, "cost": 1}]}, "needs either tokens or a cost"),
        ({"tenant": "a", "budgets": [{"per": "day", "cost": 1}]}, "has no price"),
        ({"tenant": "a", "name": "operator"}, "another name"),
        ({"tenant": "a", "name": "token:bob"}, "another name"),
        ({"tenant": "a", "max_queued": 0}, "max_queued"),
        ({"tenant": "a", "unknown": 1}, "Unknown key"),
        ({"tenant": "a", "expires_s": 0}, "expires_s"),
        ({"tenant": "a", "expires_s": 1e12}, "expires_s"),
    ],
)
def test_bodies_that_make_no_key(gateway: Gateway, body: dict[str, Any], said: str) -> None:
    assert said in error(gateway.post(body, KEYS, headers=OPERATOR), 400)["message"]


def test_they_are_the_operator_s(gateway: Gateway, serve: Serve) -> None:
    made = create(gateway)
    for headers in ({}, {"x-api-key": made["key"]}, {"x-api-key": "sk-alpha-123"}):
        assert gateway.get(KEYS, headers=headers).status_code == 401
        assert gateway.post({"tenant": "a"}, KEYS, headers=headers).status_code == 401
    assert gateway.post({}, f"{KEYS}/none/rotate", headers=OPERATOR).status_code == 404
    with serve() as other:
        assert error(other.post({"tenant": "a"}, KEYS, headers=OPERATOR), 403)["code"] == "stored_keys_off"


def test_without_a_key_a_gateway_with_stored_keys_is_closed(serve: Serve) -> None:
    with serve(server=STORED) as gateway:
        assert gateway.get("/v1/models").status_code == 401
        assert status(gateway, create(gateway)["key"]) == 200


@pytest.fixture(params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest) -> Broker | None:
    if request.param == "sqlite":
        return None
    address = postgres.fresh()
    return Broker(kind="postgres", postgres=Postgres(address.url, address.schema))


@pytest.mark.usefixtures("own_state")
def test_every_gateway_of_the_store_knows_within_a_second(tmp_path: Path, fake: Fake, broker: Broker | None) -> None:
    config = configuration(tmp_path, fake.url, broker=broker, server=STORED)
    with serving(config) as one, serving(replace(config)) as other:
        made = create(one)
        until(lambda: status(other, made["key"]) == 200, 5)
        order(other, "DELETE", f"/{made['id']}")
        until(lambda: status(one, made["key"]) == 401, 5)
        lasting = create(one)
    with serving(config) as again:
        assert (status(again, lasting["key"]), status(again, made["key"])) == (200, 401)


def test_a_thousand_keys_and_a_hundred_thousand_tenants(serve: Serve) -> None:
    with serve(server=STORED) as gateway:
        texts = [f"hw-{number:012}-{'x' * 43}" for number in range(1000)]
        keys = [
            StoredKey(f"{number:012}", hashlib.sha256(text.encode()).digest(), f'{{"tenant": "t{number}"}}', 1.0)
            for number, text in enumerate(texts)
        ]
        gateway.do(gateway.inner.broker.put_keys(keys, 0.0))
        until(lambda: status(gateway, texts[-1]) == 200)
        assert all(status(gateway, text) == 200 for text in texts[::100])
        for number in range(100_000):
            gateway.inner.metrics.refused(Refused("rate_limit", f"t{number}"))
        page = gateway.get("/metrics", headers=OPERATOR).text
        assert len(set(re.findall(r'tenant="([^"]*)"', page))) == 65
        assert 'headway_dropped_total{reason="rate_limit",tenant="(other)"} 99936.0' in page


def test_a_key_with_limits_of_a_newer_headway_is_not_accepted(tmp_path: Path, fake: Fake) -> None:
    config = configuration(tmp_path, fake.url, server=STORED)
    with serving(config) as gateway:
        made = create(gateway)
    with closing(sqlite3.connect(str(config.broker.sqlite.path))) as db, db:
        db.execute("""UPDATE keys SET settings = '{"tenant": "beta", "moon_phase": 1}'""")
    with serving(config) as gateway:
        assert status(gateway, made["key"]) == 401
        order(gateway, "DELETE", f"/{made['id']}")


def test_the_commands(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text(write(gateway.config))

    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["key", words[0], "-c", str(file), *words[1:]], env={"COLUMNS": "40"})
        assert result.exit_code == 0, result.output
        return result.stdout

    text = run("create", "delta", "--set", "max_queued=3", "--set", 'classes=["batch"]', "--days", "1").strip()
    assert status(gateway, text) == 200
    (made,) = [one for one in json.loads(run("list", "--json")) if one["tenant"] == "delta"]
    assert (made["max_queued"], made["classes"], text.startswith(made["prefix"])) == (3, ["batch"], True)
    assert made["expires_at"] - made["created_at"] == 86_400
    table = run("list")
    assert "delta" in table
    assert made["id"] in table, "whole, however narrow the terminal is"
    assert text not in table
    (new, _) = json.loads(run("rotate", made["id"], "--json"))
    assert (status(gateway, text), status(gateway, new["key"])) == (401, 200)
    assert "is revoked" in run("revoke", new["key"]), "only its id is sent"
    assert status(gateway, new["key"]) == 401
