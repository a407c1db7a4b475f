"""The audit log: acts of operators and refused keys, with who and from where, and no text of prompts or answers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from headway.config import Audit, Budget, Engine, Key, Log, Price, Tier, write
from headway.errors import ConfigError
from headway.gateway.reload import Reload
from headway.gateway.watch.audit import AuditLog
from tests.gateway.batches import begin, line
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, DEAD, OPERATOR, Fake, Gateway, configuration, serving, until
from tests.gateway.test_request_ends import fakes

ALPHA = Key("sk-alpha-123", "alpha", name="first", budgets=(Budget("day", tokens=200),), classes=("default",))
SECRET = "zebra-in-the-prompt"  # what no log may say


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def audited(fake: Fake, tmp_path: Path) -> Iterator[tuple[Gateway, Path]]:
    path = tmp_path / "audit.jsonl"
    config = configuration(tmp_path, fake.url, keys=(ALPHA,), audit=Audit(str(path)), log=Log(access=True))
    with serving(config) as gateway:
        yield gateway, path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines() if text]


def test_acts_of_operators_are_on_the_disk_before_their_answers(audited: tuple[Gateway, Path]) -> None:
    gateway, path = audited
    answer = gateway.post(
        {"url": DEAD, "served_name": "smollm2", "api_key": "sk-of-the-engine"}, "/v1/headway/engines", headers=OPERATOR
    )
    assert answer.status_code == 202, answer.text
    (added,) = lines(path)
    id = answer.json()["data"][0]["id"]
    assert (added["act"], added["actor"], added["outcome"]) == ("POST /v1/headway/engines", "operator", 202)
    assert (added["detail"], added["source"]) == (id, "127.0.0.1")
    assert added["time"].endswith("+00:00")
    assert gateway.post(None, f"/v1/headway/engines/{id}/drain?force=true", headers=OPERATOR).status_code == 202
    assert gateway.control({"op": "state"}).status_code == 200
    assert gateway.get("/v1/headway/engines", headers=OPERATOR).status_code == 200
    drained, controlled = lines(path)[1:]
    assert drained["act"] == "POST /v1/headway/engines/{id}/drain"
    assert drained["target"] == f"/v1/headway/engines/{id}/drain?force=true"
    assert (controlled["target"], controlled["detail"]) == ("/headway/control/e0", "state")
    assert gateway.post({}, "/v1/headway/engines", headers=by("sk-guessed-key")).status_code == 401
    refused = lines(path)[-1]
    assert (refused["actor"], refused["outcome"], refused["code"]) == ("", 401, "invalid_api_key")
    assert "sk-" not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_refused_acts_are_capped_and_not_synced(audited: tuple[Gateway, Path]) -> None:
    gateway, path = audited
    for i in range(250):
        answer = gateway.post({}, f"/v1/headway/engines?x=zebra{i}", headers=by("sk-guessed-key"))
        assert answer.status_code == 401
    found = lines(path)
    assert "zebra" not in path.read_text(), "its query may hold anything"
    assert {line["target"] for line in found if line["outcome"] == 401} == {"/v1/headway/engines"}


def test_an_operator_s_acts_on_a_tenant_s_response(audited: tuple[Gateway, Path]) -> None:
    gateway, path = audited
    answer = gateway.post(gateway.chat(background=True, max_tokens=8), headers=by(ALPHA.key))
    url = f"/v1/responses/{answer.json()['id']}"
    until(lambda: gateway.newest()[0] == "done")
    assert gateway.get(url, headers=OPERATOR).status_code == 200
    assert httpx.delete(gateway.url + url, headers=OPERATOR).status_code == 200
    assert [(line["act"], line["actor"]) for line in lines(path)] == [("DELETE /v1/responses/{id}", "operator")]


def test_acts_on_stored_keys_are_in_the_audit_log_alone(
    fake: Fake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, url = tmp_path / "audit.jsonl", "/v1/headway/keys"
    caplog.set_level(logging.INFO)
    with serving(configuration(tmp_path, fake.url, server={"stored_keys": True}, audit=Audit(str(path)))) as gateway:
        made = gateway.post({"tenant": "beta"}, url, headers=OPERATOR).json()["data"][0]["id"]
        new = gateway.post({}, f"{url}/{made}/rotate", headers=OPERATOR).json()["data"][0]["id"]
        assert httpx.delete(f"{gateway.url}{url}/{new}", headers=OPERATOR).status_code == 200
    assert [(line["target"], line["detail"]) for line in lines(path)] == [
        (url, f"{made} (tenant 'beta')"),
        (f"{url}/{made}/rotate", f"{new} (tenant 'beta')"),
        (f"{url}/{new}", f"{new} (tenant 'beta')"),
    ]
    assert "API key" not in caplog.text


def test_refused_keys(audited: tuple[Gateway, Path]) -> None:
    gateway, path = audited
    assert gateway.post(gateway.chat()).status_code == 401
    assert gateway.post(gateway.chat(service_tier="batch"), headers=by(ALPHA.key)).status_code == 403
    assert gateway.post(gateway.chat(max_tokens=1000), headers=by(ALPHA.key)).status_code == 429
    assert gateway.post(gateway.chat(), headers=by(ALPHA.key)).status_code == 200
    assert [(line["outcome"], line["actor"], line.get("code"), line.get("tenant")) for line in lines(path)] == [
        (401, "", "invalid_api_key", None),
        (403, "first", "beyond_key", "alpha"),
        (429, "first", "budget_spent", "alpha"),
    ]
    assert {line["act"] for line in lines(path)} == {f"POST {CHAT}"}


def test_a_reload_is_an_act(fake: Fake, tmp_path: Path) -> None:
    path, file = tmp_path / "audit.jsonl", tmp_path / "headway.toml"
    config = configuration(tmp_path, fake.url, keys=(ALPHA,), audit=Audit(str(path)))
    file.write_text(write(config))
    with serving(config) as gateway:
        state = gateway.server._state
        assert state is not None
        reload = Reload(file, state)
        other = {"keys": (replace(ALPHA, key="sk-alpha-456"),), "prices": {"smollm2": Price(1.0, 2.0)}}
        again = replace(config, **other, classes=config.classes | {"batch": Tier(e2e_ms=9000)})
        more = replace(again, engines=(*again.engines, Engine(url=DEAD, served_name="smollm2", id="new")))
        taken = replace(again, keys=(replace(ALPHA, key="sk-operator-1"),))
        for text in (*map(write, (config, again, more, taken)), "[server\n"):
            file.write_text(text)
            gateway.do(reload.run())
        assert gateway.get("/v1/models", headers=by("sk-alpha-456")).status_code == 200, "the last ones changed nothing"
    assert {(line["act"], line["actor"]) for line in lines(path)} == {("reload", "SIGHUP")}
    assert [(line["outcome"], line.get("detail")) for line in lines(path)] == [
        ("done", "nothing has changed"),
        ("done", "classes: batch; keys: first; prices: smollm2"),
        ("done", "engines added: new"),
        ("failed", "keys.0.key"),
        ("failed", None),
    ]


def test_no_log_holds_text_of_prompts_or_answers(
    audited: tuple[Gateway, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway's log at its finest, with a line per request, the audit log and the journal."""
    gateway, path = audited
    caplog.set_level(logging.DEBUG)
    say, mine = [{"role": "user", "content": SECRET}], by(ALPHA.key)
    asked: list[dict[str, Any]] = [
        {}, {"stream": True}, {"background": True}, fakes(end="500"), {"max_tokens": 1000}, {"service_tier": "batch"},
        {"stream": True, **fakes(end="error")}, {"temperature": SECRET}, {"model": "none"}, {"messages": SECRET},
        {"messages": [{"role": SECRET, "content": SECRET}]}, {"messages": [{"role": "user", "content": {SECRET: 1}}]},
        {"tools": SECRET}, {"response_format": {"type": SECRET}}, {"stop": {"text": SECRET}},
    ]  # fmt: skip
    for fields in asked:
        gateway.post(gateway.chat(**({"messages": say} | fields)), headers=mine)
    gateway.post(None, content=f'{{"messages": {SECRET}}}', headers={"content-type": "application/json"} | mine)
    gateway.post(gateway.chat(messages=say), headers=by("sk-guessed-key"))
    begin(gateway, [line("a", messages=say)], headers=mine)
    until(lambda: all(state != "open" for state, _ in gateway.jobs().values()))
    gateway.do(gateway.inner.path.closings.retry())
    assert any(record.name == "headway.access" for record in caplog.records)
    logged = "\n".join(f"{record.getMessage()} {record.__dict__.get('request')}" for record in caplog.records)
    folder = gateway.config.journal_dir
    assert folder is not None
    until(lambda: list(folder.glob("*.sqlite*")))
    kept = b"".join(file.read_bytes() for file in folder.iterdir()) + path.read_bytes()
    for text in (SECRET, "fake fake"):
        assert text not in logged
        assert text.encode() not in kept


# ---- the file


async def flushed(audit: AuditLog, *acts: str) -> None:
    for act in acts:
        audit.note(act, "operator", "", 200)
    await audit.flush(sync=True)


async def test_a_file_that_is_renamed_is_left(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path), CollectorRegistry())
    await flushed(audit, "a")
    path.rename(tmp_path / "audit.1")
    await flushed(audit, "b")
    await audit.close()
    assert [line["act"] for line in lines(tmp_path / "audit.1")] == ["a"]
    assert [line["act"] for line in lines(path)] == ["b"]


async def test_two_gateways_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    pair = [AuditLog(str(path), CollectorRegistry()) for _ in range(2)]
    await asyncio.gather(*(flushed(one, *(f"{i} {j}" for j in range(200))) for i, one in enumerate(pair)))
    for one in pair:
        await one.close()
    assert len(lines(path)) == 400


async def test_what_the_disk_refuses_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    path = folder / "audit.jsonl"
    audit = AuditLog(str(path), CollectorRegistry())
    path.unlink()
    folder.rmdir()
    await flushed(audit, "a")
    assert "cannot be written" in caplog.text
    folder.mkdir()
    await flushed(audit, "b")
    await audit.close()
    assert [line["act"] for line in lines(path)] == ["a", "b"]


async def test_a_flood_of_refusals_becomes_a_count(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path), CollectorRegistry())
    listed = 0
    for _ in range(1000):
        if audit.lists_refusal():
            listed += 1
            audit.note("POST /", "", "", 401)
    await audit.close()
    found = lines(path)
    counted = sum(line["count"] for line in found if line["act"] == "refusals")
    assert listed < 1000
    assert listed + counted == 1000
    assert sum(line["act"] == "POST /" for line in found) == listed


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The audit log cannot use"):
        AuditLog(str(tmp_path / "none" / "audit.jsonl"), CollectorRegistry())


def test_without_a_path_there_is_none(serve: Serve) -> None:
    with serve(keys=(ALPHA,)) as gateway:
        assert not gateway.inner.audit.on
        assert gateway.post(gateway.chat()).status_code == 401
