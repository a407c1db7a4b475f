"""Tokens of an OpenID Connect issuer, with real signatures: which are accepted, and what they may do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest

from headway import clock
from headway.cli.doctor import examine
from headway.config import Budget, Key, Oidc, write
from headway.errors import HeadwayError
from headway.gateway.apis.access import Sender
from headway.gateway.apis.oidc import Tokens
from headway.gateway.apis.stored_keys import FORGET_S
from headway.gateway.reload import Reload
from headway.store.queue.keys import StoredKey
from testing.servers.issuer import Issuer, private_key
from tests.gateway.conftest import Serve
from tests.gateway.gateway import OPERATOR, WEB, Fake, Gateway, configuration, serving, until
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import fakes

AUDIENCE = ("headway",)
ALPHA = "sk-alpha-123"


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with Issuer() as issuer:
        yield issuer


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, fake: Fake, issuer: Issuer) -> Iterator[Gateway]:
    settings = Oidc(issuer.url, AUDIENCE, classes_claim="scope", admin_claim="realm.roles", leeway_s=1.0)
    config = configuration(tmp_path_factory.mktemp("oidc"), fake.url, oidc=settings, keys=(Key(ALPHA, "alpha"),))
    with serving(config) as gateway:
        yield gateway


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_names_tenant_classes_and_operators(gateway: Gateway, issuer: Issuer) -> None:
    token = issuer.token(scope="default other")
    answer = gateway.post(gateway.chat(background=True, **fakes()), headers=bearer(token))
    assert answer.status_code == 202
    path = f"/v1/responses/{answer.json()['id']}"
    assert gateway.get(path, headers=bearer(ALPHA)).status_code == 200, "it is the same tenant"
    assert gateway.get(path, headers=bearer(issuer.token(scope="default", tenant="beta"))).status_code == 404
    told = error(gateway.post(gateway.chat(service_tier="batch"), headers=bearer(token)), 403)
    assert told["code"] == "beyond_key"
    assert gateway.get("/metrics", headers=bearer(token)).status_code == 401
    for roles in (["headway-admin"], "viewer headway-admin", ["viewer", "headway-admin"]):
        admin = bearer(issuer.token(realm={"roles": roles}, tenant=None))
        assert gateway.get("/metrics", headers=admin).status_code == 200
        assert error(gateway.get("/v1/models", headers=admin), 403)["code"] == "no_tenant"
    for roles in ({"headway-admin": True}, "headway-admins", ["HEADWAY-ADMIN"], True, None):
        assert gateway.get("/metrics", headers=bearer(issuer.token(realm={"roles": roles}))).status_code == 401
    assert gateway.get("/metrics", headers=OPERATOR).status_code == 200


def test_a_token_has_the_limits_of_its_tenant_s_first_key(serve: Serve, issuer: Issuer) -> None:
    first = Key(ALPHA, "alpha", ("default", "chat"), requests_per_min=3)
    settings = Oidc(issuer.url, AUDIENCE)
    with serve(oidc=settings, keys=(first, Key("sk-alpha-456", "alpha", requests_per_min=50))) as gateway:
        for key in (ALPHA, issuer.token(), issuer.token(sub="bob")):
            assert gateway.post(gateway.chat(**fakes()), headers=bearer(key)).status_code == 200
        for key in (ALPHA, issuer.token()):
            assert error(gateway.post(gateway.chat(**fakes()), headers=bearer(key)), 429)
        for _ in range(4):
            other = bearer(issuer.token(tenant="beta"))
            assert gateway.post(gateway.chat(**fakes()), headers=other).status_code == 200
    with serve(oidc=settings, keys=(first,)) as gateway:
        answer = gateway.post(gateway.chat(service_tier="batch"), headers=bearer(issuer.token()))
        assert error(answer, 403)["code"] == "beyond_key"


def test_a_token_has_the_limits_of_the_oldest_stored_key(serve: Serve, issuer: Issuer) -> None:
    with serve(oidc=Oidc(issuer.url, AUDIENCE), server={"stored_keys": True}) as gateway:
        now = clock.now()
        ends = {"default": now + 1, "chat": None, "batch": None}
        keys = [
            StoredKey(name, name.encode(), json.dumps({"tenant": "alpha", "classes": ["default", name]}), i + 1.0, end)
            for i, (name, end) in enumerate(ends.items())
        ]
        gateway.do(gateway.inner.broker.put_keys(keys[::-1], 0.0))
        token = bearer(issuer.token())

        def served(*classes: str) -> list[int]:
            chats = (gateway.chat(service_tier=name, **fakes()) for name in classes)
            return [gateway.post(chat, headers=token).status_code for chat in chats]

        until(lambda: served("chat", "batch") == [200, 403])


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_tokens_keep_the_limits_of_a_tenant_s_last_key(serve: Serve, issuer: Issuer, how: str) -> None:
    budget = {"per": "day", "tokens": 300}
    with serve(oidc=Oidc(issuer.url, AUDIENCE), server={"stored_keys": True}) as gateway:
        token, chat = bearer(issuer.token()), gateway.chat(max_tokens=300, **fakes())
        assert gateway.post(chat, headers=token).status_code == 200
        made = {"tenant": "alpha", "budgets": [budget], **({} if how == "revoked" else {"expires_s": 0.3})}
        (key,) = gateway.post(made, "/v1/headway/keys", headers=OPERATOR).json()["data"]
        if how == "revoked":
            WEB.delete(f"{gateway.url}/v1/headway/keys/{key['id']}", headers=OPERATOR).raise_for_status()
        until(lambda: gateway.get("/v1/models", headers=bearer(key["key"])).status_code == 401)
        assert error(gateway.post(chat, headers=token), 429)["code"] == "budget_spent"
        gateway.post({"tenant": "beta"}, "/v1/headway/keys", headers=OPERATOR).raise_for_status()
        assert error(gateway.post(chat, headers=token), 429)["code"] == "budget_spent", "also after another change"
        (alpha, *_) = gateway.get("/v1/headway/tenants", headers=OPERATOR).json()["data"]
        assert (alpha["keys"], [one["hard"] for one in alpha["budgets"]]) == (0, [[300.0]])
        old = StoredKey("old", b"old", json.dumps({"tenant": "gamma", "budgets": [budget]}), 1.0, 2.0)
        new = StoredKey("new", hashlib.sha256(b"hw-new").digest(), '{"tenant": "delta"}', 1.0)
        gateway.do(gateway.inner.broker.put_keys([old, new], 0.0))
        until(lambda: gateway.get("/v1/models", headers=bearer("hw-new")).status_code == 200)
        assert gateway.post(chat, headers=bearer(issuer.token(tenant="gamma"))).status_code == 200, "it is forgotten"


def test_tokens_keep_the_limits_of_a_key_that_is_removed_from_the_file(
    serve: Serve, issuer: Issuer, tmp_path: Path
) -> None:
    first = Key(ALPHA, "alpha", requests_per_min=4, budgets=(Budget("day", tokens=300),))
    keys, file = (first, Key("sk-alpha-456", "alpha"), Key("sk-beta-1234", "beta")), tmp_path / "headway.toml"
    with serve(oidc=Oidc(issuer.url, AUDIENCE), keys=keys) as gateway:
        state = gateway.server._state
        assert state is not None

        async def reread(*left: Key) -> None:
            file.write_text(write(replace(gateway.config, keys=left)))
            await Reload(file, state).run()

        def asked(max_tokens: int) -> int:
            answer = gateway.post(gateway.chat(max_tokens=max_tokens, **fakes()), headers=bearer(issuer.token()))
            return answer.status_code

        state._removed["old"] = Sender(Key("sk-old-12345", "old"), clock.now() - FORGET_S - 1.0)
        gateway.do(reread(*keys[1:]))
        assert not state._removed, "what no longer holds is forgotten"
        assert asked(300) == 200, "the first key is another one now, without limits"
        gateway.do(reread(*keys))
        for left in (keys[2:], ()):
            gateway.do(reread(*left))
            assert gateway.get("/v1/models", headers=bearer(ALPHA)).status_code == 401
            assert (asked(300), asked(1)) == (429, 200), "the budget has room for one of them"
        assert asked(1) == 429, "so has the minute"
        gateway.do(reread(Key("sk-alpha-789", "alpha")))
        assert asked(300) == 200, "those of a new key"


@pytest.mark.parametrize(
    "claims",
    [
        {"tenant": None},
        {"tenant": ""},
        {"tenant": ["a"]},
        {"tenant": "a" * 200},
        {"tenant": "a\nb"},
        {"tenant": "(other)"},
        {"scope": None},
    ],
)
def test_tokens_without_tenant_or_classes(gateway: Gateway, issuer: Issuer, claims: dict[str, Any]) -> None:
    token = issuer.token(**({"scope": "default"} | claims))
    assert error(gateway.get("/v1/models", headers=bearer(token)), 403)["code"] == "no_tenant"


def _unsigned(issuer: Issuer) -> str:
    payload = issuer.token().split(".")[1]
    head = base64.urlsafe_b64encode(b'{"alg": "none", "typ": "JWT"}').rstrip(b"=").decode()
    return f"{head}.{payload}."


def _by_the_public_key(issuer: Issuer) -> str:
    """Return a token signed with the issuer's public key as if it were a shared secret."""
    jwk = issuer.jwks()["keys"][-1]
    secret = base64.urlsafe_b64decode(jwk["n"] + "==")
    claims = {"iss": issuer.url, "aud": "headway", "tenant": "alpha", "exp": time.time() + 60}
    return jwt.encode(claims, secret, "HS256", {"kid": jwk["kid"]})


def _forged(issuer: Issuer, **header: Any) -> str:
    claims = {"iss": issuer.url, "aud": "headway", "tenant": "alpha", "exp": time.time() + 60}
    return jwt.encode(claims, private_key("RS256"), "RS256", {"kid": [*issuer.keys][-1]} | header)


def _altered(issuer: Issuer) -> str:
    head, payload, signature = issuer.token().split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "==")) | {"tenant": "beta"}
    return ".".join([head, base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode(), signature])


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (lambda issuer: issuer.token(exp=time.time() - 2), "has expired"),
        (lambda issuer: issuer.token(nbf=time.time() + 60), "is not valid yet"),
        (lambda issuer: issuer.token(aud="another"), "is for another audience"),
        (lambda issuer: issuer.token(aud=[]), "lacks one of the claims"),
        (lambda issuer: issuer.token(iss="http://127.0.0.1:1"), "is of another issuer"),
        (lambda issuer: issuer.token(iss=issuer.url + "/"), "is of another issuer"),
        (lambda issuer: issuer.token(exp=10**400), "is malformed"),
        (lambda issuer: issuer.token(exp=None), "lacks one of the claims"),
        (lambda issuer: issuer.token(iss=None), "lacks one of the claims"),
        (lambda issuer: issuer.token(aud=None), "lacks one of the claims"),
        (lambda issuer: issuer.token(headers={"kid": "unknown"}), "a key that its issuer does not publish"),
        (lambda issuer: issuer.token(headers={"crit": ["exp"]}), "is malformed"),
        (lambda issuer: issuer.token().rpartition(".")[0] + ".AAAA", "has a wrong signature"),
        (_unsigned, "an algorithm that is not accepted"),
        (_by_the_public_key, "an algorithm that is not accepted"),
        (_forged, "has a wrong signature"),
        (_altered, "has a wrong signature"),
        (lambda issuer: "a.b.c", "is malformed"),
        (lambda issuer: base64.urlsafe_b64encode(b"[" * 9000).decode() + ".e30.e30", "is malformed"),
        (lambda issuer: "..", "is malformed"),
    ],
)
def test_tokens_that_are_refused(
    gateway: Gateway, issuer: Issuer, caplog: pytest.LogCaptureFixture, token: Any, said: str
) -> None:
    text = token(issuer)
    with caplog.at_level("INFO"):
        answer = gateway.get("/v1/models", headers=bearer(text))
    told = error(answer, 401)
    assert (told["code"], said in told["message"]) == ("invalid_token", True), told
    assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert error(gateway.get("/metrics", headers=bearer(text)), 401)["message"] == told["message"]
    assert len(text) < 4 or text not in caplog.text + answer.text


def test_what_is_no_token_is_a_key(gateway: Gateway) -> None:
    assert error(gateway.get("/v1/models", headers=bearer("sk-unknown-1")), 401)["code"] == "invalid_api_key"
    assert gateway.get("/v1/models", headers=bearer(ALPHA)).status_code == 200
    twice = [("authorization", f"Bearer {ALPHA}"), ("authorization", "Bearer a.b.c")]
    assert gateway.get("/v1/models", headers=twice).status_code == 400


def test_a_token_in_x_api_key_is_refused(gateway: Gateway, issuer: Issuer) -> None:
    token = issuer.token(scope="default")
    for headers, status in (({"x-api-key": token}, 401), (bearer(token), 200), ({"x-api-key": token}, 401)):
        assert gateway.get("/v1/models", headers=headers).status_code == status


def test_a_remembered_token_ends_with_its_time(gateway: Gateway, issuer: Issuer) -> None:
    token = issuer.token(scope="default", exp=time.time() + 1.5)
    assert gateway.get("/v1/models", headers=bearer(token)).status_code == 200
    until(lambda: gateway.get("/v1/models", headers=bearer(token)).status_code == 401)


def test_metrics_name_few_of_many_tenants(gateway: Gateway, issuer: Issuer) -> None:
    for number in range(80):
        token = issuer.token(scope="default", tenant=f"many-{number}")
        assert gateway.post(gateway.chat(**fakes()), headers=bearer(token)).status_code == 200
    page = gateway.get("/metrics", headers=OPERATOR).text
    assert 'tenant="many-0"' in page
    assert 'tenant="(other)"' in page
    assert len(set(re.findall(r'tenant="([^"]*)"', page))) <= 65


def test_while_the_issuer_is_away(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with Issuer() as issuer, serve(oidc=Oidc(issuer.url, AUDIENCE, refresh_s=0.1)) as gateway:
        assert gateway.get("/v1/models", headers=bearer(issuer.token())).status_code == 200
        issuer.status = 500
        until(lambda: "are not read" in caplog.text)
        assert gateway.get("/v1/models", headers=bearer(issuer.token())).status_code == 200, "its keys are known"
        issuer.status = 200
        old = issuer.token()
        assert gateway.get("/v1/models", headers=bearer(old)).status_code == 200
        issuer.rotate(keep=False)
        until(lambda: gateway.get("/v1/models", headers=bearer(old)).status_code == 401)
        assert gateway.get("/v1/models", headers=bearer(issuer.token())).status_code == 200


def test_before_the_issuer_has_answered(serve: Serve, tmp_path: Path) -> None:
    with Issuer() as issuer:
        issuer.status = 500
        with serve(oidc=Oidc(issuer.url, AUDIENCE), keys=(Key(ALPHA, "alpha"),)) as gateway:
            answer = gateway.get("/v1/models", headers=bearer(issuer.token()))
            assert error(answer, 503)["code"] == "issuer_unavailable"
            assert "answers 500" in gateway.get("/ready", headers=OPERATOR).json()["issuer"]
            found = {one.what: one for one in examine(written(gateway, tmp_path))}
            assert (found["issuer"].state, "answers 500" in found["issuer"].found) == ("bad", True)
            assert gateway.get("/v1/models", headers=bearer(ALPHA)).status_code == 200
            issuer.status = 200
            until(lambda: gateway.get("/v1/models", headers=bearer(issuer.token())).status_code == 200)
            assert gateway.get("/ready", headers=OPERATOR).json()["issuer"] is None
            found = {one.what: one for one in examine(written(gateway, tmp_path))}
            assert found["issuer"].state == "good"


def written(gateway: Gateway, folder: Path) -> Path:
    file = folder / "headway.toml"
    file.write_text(write(gateway.config))
    return file


# ---- the check itself


def tokens_of(issuer: Issuer, *, most: int = 100, again_s: float = 10.0, **more: Any) -> Tokens:
    return Tokens(Oidc(issuer.url, AUDIENCE, **more), str.encode, most=most, again_s=again_s)


async def test_a_new_key_is_looked_for_once_in_a_while() -> None:
    with Issuer() as issuer:
        patient, quick = tokens_of(issuer), tokens_of(issuer, again_s=0.0)
        await patient.check(issuer.token())
        await quick.check(issuer.token())
        issuer.rotate()
        refused = await asyncio.gather(*(patient.check(issuer.token()) for _ in range(5)), return_exceptions=True)
        assert all("does not publish" in str(error) for error in refused)
        assert issuer.asked == 2, "it has just been asked"
        assert (await quick.check(issuer.token())).key is not None
        assert issuer.asked == 3


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "ES384", "EdDSA"])
async def test_algorithms(algorithm: str) -> None:
    with Issuer(algorithm=algorithm) as issuer:
        sender = await tokens_of(issuer, algorithms=(algorithm,)).check(issuer.token())
        assert sender.key is not None
        assert sender.key.tenant == "alpha"
        other = "ES256" if algorithm != "ES256" else "RS256"
        with pytest.raises(HeadwayError, match="not accepted"):
            await tokens_of(issuer, algorithms=(other,)).check(issuer.token())


@pytest.mark.parametrize("subject", ["", "a\nb", "\x7f"])
async def test_a_subject_that_cannot_be_shown(subject: str) -> None:
    with Issuer(algorithm="EdDSA") as issuer:
        names = [(await tokens_of(issuer).check(issuer.token(sub=one))).key for one in (subject, "operator")]
        assert [one and one.label for one in names] == ["token:?", "token:operator"]


async def test_the_tokens_of_any_number_of_tenants_take_bounded_memory() -> None:
    with Issuer(algorithm="EdDSA") as issuer:
        tokens = tokens_of(issuer, most=10)
        senders = [await tokens.check(issuer.token(tenant=f"t{i}")) for i in range(25)]
        assert [sender.key.tenant for sender in senders if sender.key] == [f"t{i}" for i in range(25)]
        assert len(tokens.verified) == 10


async def test_one_key_needs_no_id_and_several_do() -> None:
    with Issuer() as issuer:
        tokens = tokens_of(issuer)
        claims = {"iss": issuer.url, "aud": "headway", "tenant": "alpha", "exp": clock.now() + 60}
        _, key = next(iter(issuer.keys.values()))
        token = jwt.encode(claims, key, "RS256")
        assert isinstance(await tokens.check(token), Sender)
        issuer.rotate()
        with pytest.raises(HeadwayError, match="does not publish"):
            await tokens_of(issuer).check(token)
