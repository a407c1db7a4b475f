"""Tokens (JWT) of an OpenID Connect issuer: their signatures and claims, and the issuer's public keys.

A token is checked when it comes first, and remembered by its digest until it expires: later requests cost a look-up.
All tokens are forgotten whenever the issuer's keys change.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

import aiohttp
import jwt
from starlette.types import ASGIApp, Receive, Scope, Send

from headway import clock
from headway.addresses import is_secure_url
from headway.config import Key
from headway.config.keys import OTHER, TOKEN_PREFIX, is_label
from headway.config.tables import Oidc
from headway.errors import HeadwayError, RequestError
from headway.gateway.apis.access import TOKEN_ERROR, Sender

_TIMEOUT = aiohttp.ClientTimeout(total=5)
_MOST_BYTES, _MOST_KEYS = 2**20, 100  # of an issuer's answer
_LONGEST = 100  # characters of a subject, of which a key's name is made
_PUBLIC = ("RSA", "EC", "OKP")
_BROKEN = (jwt.PyJWTError, RecursionError, OverflowError)  # all that a token can cause
_REASONS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "has expired"),
    (jwt.ImmatureSignatureError, "is not valid yet"),
    (jwt.InvalidAudienceError, "is for another audience"),
    (jwt.InvalidIssuerError, "is of another issuer"),
    (jwt.InvalidSignatureError, "has a wrong signature"),
    (jwt.MissingRequiredClaimError, "lacks one of the claims exp, iss and aud"),
)
log = logging.getLogger("headway.gateway.oidc")


class Tokens:
    """Checks the tokens of one issuer.

    digest: of a token, by which it is remembered. most: tokens that are remembered; the oldest are forgotten first.
    again_s: least time between two looks at the issuer's keys for tokens with an unknown one.
    verified: senders by the digests of their tokens; those that ended may still be there.
    problem: why the issuer's keys were not read when they were looked at last, None = they were.
    """

    def __init__(
        self, settings: Oidc, digest: Callable[[str], bytes], *, most: int = 65_536, again_s: float = 10.0
    ) -> None:
        self._settings, self._digest, self._most, self._again_s = settings, digest, most, again_s
        self.verified: dict[bytes, Sender] = {}
        self._jwks: Mapping[str | None, Mapping[str, Any]] = {}  # public keys by `kid`
        self._ready: dict[str, jwt.PyJWK] = {}  # those in use, by the first part of the tokens that they sign
        self._jwt = jwt.PyJWT({"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True})
        self._turn, self._looked = asyncio.Lock(), -math.inf
        self.problem: str | None = None

    async def run(self) -> None:
        """Look at the issuer's keys now and then; sooner while there are none."""
        while True:
            await self.look()
            await asyncio.sleep(self._settings.refresh_s if self._jwks else 1.0)

    async def check(self, token: str) -> Sender:
        """Return the sender of a token, and remember it. RequestError: 401 if it is not valid.

        HeadwayError (503) while no key of the issuer is known.
        """
        digest = self._digest(token)
        found = self.verified.get(digest)
        if found is not None and found.until > clock.now():
            return found
        head = token.partition(".")[0]
        key = self._ready.get(head) or await self._key_of(token)
        try:
            sender = self._sender(self._claims(token, key))
        except OverflowError as error:  # of a time too large for a float
            raise _refusal(error) from None
        if len(self._ready) < _MOST_KEYS:  # only for a head that was signed
            self._ready[head] = key
        while len(self.verified) >= self._most:
            del self.verified[next(iter(self.verified))]
        self.verified[digest] = sender
        return sender

    async def _key_of(self, token: str) -> jwt.PyJWK:
        """Return the key that a token names, after another look at the issuer's if it is unknown; errors as `check`."""
        try:
            header = jwt.get_unverified_header(token)
        except _BROKEN as error:
            raise _refusal(error) from None
        kid, algorithm = header.get("kid"), header.get("alg")
        if algorithm not in self._settings.algorithms:
            accepted = ", ".join(self._settings.algorithms)
            raise _invalid("is signed with an algorithm that is not accepted", f"Accepted are {accepted}.")
        if (jwk := self._named(kid)) is None:
            await self._look_again()
            if (jwk := self._named(kid)) is None:
                raise self._unknown_key()
        with suppress(jwt.PyJWTError):
            if jwk.get("alg", algorithm) == algorithm:
                return jwt.PyJWK(dict(jwk), algorithm)
        raise _invalid("is signed with another algorithm than its key is for")

    def _named(self, kid: str | None) -> Mapping[str, Any] | None:
        """Return the public key with an id, None = it is unknown; without an id, the only one that there is."""
        return next(iter(self._jwks.values())) if kid is None and len(self._jwks) == 1 else self._jwks.get(kid)

    def _claims(self, token: str, key: jwt.PyJWK) -> Mapping[str, Any]:
        """Return the claims of a token whose signature, issuer, audience and times are right; else 401."""
        settings = self._settings
        accepted, leeway = [key.algorithm_name], settings.leeway_s
        try:
            return self._jwt.decode(
                token, key, accepted, audience=settings.audience, issuer=settings.issuer, leeway=leeway
            )
        except _BROKEN as error:
            raise _refusal(error) from None

    def _sender(self, claims: Mapping[str, Any]) -> Sender:
        settings, key = self._settings, None
        subject = str(claims.get("sub", "?"))[:_LONGEST]
        subject = subject if subject and subject.isprintable() else "?"
        tenant, until = claim(claims, settings.tenant_claim), float(claims["exp"]) + settings.leeway_s
        classes = None if settings.classes_claim is None else _words(claim(claims, settings.classes_claim))
        if _is_tenant(tenant) and classes != ():
            key = Key(key="token:of an issuer", tenant=tenant, classes=classes, name=f"{TOKEN_PREFIX}{subject}")
        admin = settings.admin_claim is not None and settings.admin_value in _words(claim(claims, settings.admin_claim))
        operator = f"{TOKEN_PREFIX}{subject}" if admin else None
        return Sender(key, until, operator, token=True)

    # ---- the issuer's keys

    def _unknown_key(self) -> HeadwayError:
        if self._jwks:
            return _invalid("is signed with a key that its issuer does not publish")
        return HeadwayError(
            "Tokens cannot be checked, because the issuer's public keys are not known yet.",
            "Send the request again, or an API key.",
            status=503,
            kind="server_error",
            code="issuer_unavailable",
            headers={"retry-after": "2"},
        )

    async def _look_again(self) -> None:
        """Look at the issuer's keys, unless this was done a moment ago."""
        async with self._turn:
            if time.monotonic() - self._looked >= self._again_s:
                await self._fetch()

    async def look(self) -> None:
        """Look at the issuer's keys now."""
        async with self._turn:
            await self._fetch()

    async def _fetch(self) -> None:
        """Take over the issuer's keys; if it does not answer as one does, the known ones stay."""
        self._looked = time.monotonic()
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=True) as session:
                jwks = _usable(await _document(session, await self._jwks_url(session)))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            known, self.problem = self.problem, str(error) or "no answer"
            if known is None:
                log.warning("the public keys of %s are not read: %s", self._settings.issuer, self.problem)
            return
        self.problem = None
        if jwks != self._jwks:
            log.info("%s has the public keys %s", self._settings.issuer, ", ".join(map(ascii, jwks)))
            self._jwks = jwks
            self._ready.clear()
            self.verified.clear()

    async def _jwks_url(self, session: aiohttp.ClientSession) -> str:
        """Return the URL of the issuer's keys; ValueError for a description that is not the issuer's."""
        if self._settings.jwks_url is not None:
            return self._settings.jwks_url
        issuer = str(self._settings.issuer)
        about = await _document(session, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        url = about.get("jwks_uri")
        if about.get("issuer") != issuer:
            raise ValueError("its openid-configuration names another issuer")
        if not isinstance(url, str) or not is_secure_url(url):
            raise ValueError("its openid-configuration has no jwks_uri with https")
        return url


class TokenCheck:
    """ASGI middleware that checks a token which is not known yet, before the endpoint asks who sends the request."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; why its token is not accepted is for the endpoint to say."""
        if scope["type"] == "http" and (token := _bearer(scope)) is not None:
            try:
                await self._tokens.check(token)
            except HeadwayError as error:
                scope[TOKEN_ERROR] = error
        await self._app(scope, receive, send)


def _bearer(scope: Scope) -> str | None:
    """Return what has the form of a JWT in a request's Authorization header."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            token = token.strip()
            return token.decode("latin-1") if scheme.lower() == b"bearer" and token.count(b".") == 2 else None
    return None


def claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, or by the path to it with dots; None if it is not there."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_tenant(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and is_label(value) and value != OTHER


def _words(value: Any) -> tuple[str, ...]:
    """Return the words of a claim: a list of them, or a text of them with spaces between."""
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else ()
    return tuple(word for word in words if isinstance(word, str) and word)


async def _document(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return a JSON object; ValueError for anything else, and for one that is too large."""
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status != 200:
            raise ValueError(f"{url} answers {answer.status}")
        data = b""
        async for part in answer.content.iter_any():
            data += part
            if len(data) > _MOST_BYTES:
                raise ValueError(f"{url} answers more than {_MOST_BYTES} bytes")
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError(f"{url} does not answer an object")
    return document


def _usable(document: Mapping[str, Any]) -> dict[str | None, Mapping[str, Any]]:
    """Return the public keys for signatures of a JWKS by `kid`; ValueError if there is none."""
    keys = document.get("keys")
    found: dict[str | None, Mapping[str, Any]] = {
        key.get("kid"): key
        for key in (keys if isinstance(keys, list) else ())[:_MOST_KEYS]
        if isinstance(key, dict)
        and isinstance(key.get("kid"), str | None)
        and key.get("kty") in _PUBLIC
        and key.get("use", "sig") == "sig"
    }
    if not found:
        raise ValueError("its JWKS has no public key for signatures")
    return found


def _refusal(error: Exception) -> RequestError:
    return _invalid(next((why for kind, why in _REASONS if isinstance(error, kind)), "is malformed"))


def _invalid(why: str, hint: str = "Get a new one from the issuer.") -> RequestError:
    """Return the error of a token, which does not quote it (401)."""
    return RequestError(
        f"The token {why}.",
        hint,
        status=401,
        code="invalid_token",
        headers={"www-authenticate": 'Bearer error="invalid_token"'},
    )
