"""The time in which the gateway checks a token of an OpenID Connect issuer, with real signatures."""

from __future__ import annotations

import asyncio
import time

import jwt
import numpy as np
from jwt.utils import base64url_decode

from headway.config import Config, Oidc
from headway.gateway.apis.access import Access
from headway.gateway.apis.oidc import Tokens
from headway.whatif.output.results import Row
from testing.servers.issuer import Issuer

_ALGORITHMS = Oidc().algorithms


def token_rows(count: int) -> list[Row]:
    """Measure the check of `count` tokens of as many tenants, when each is new, once more, and the signatures alone."""
    return [row for algorithm in _ALGORITHMS for row in asyncio.run(_rows(algorithm, count))]


async def _rows(algorithm: str, count: int) -> list[Row]:
    with Issuer(algorithm=algorithm) as issuer:
        tokens = Tokens(Oidc(issuer.url, ("headway",)), Access(Config()).digest)
        await tokens.check(issuer.token())  # reads the issuer's keys
        texts = [issuer.token(tenant=f"tenant-{number}") for number in range(count)]
        times = {"first time": await _times(tokens, texts), "known token": await _times(tokens, texts)}
        times["signature alone"] = _signature_times(jwt.PyJWK(issuer.jwks()["keys"][0]), texts)
    return [
        Row(f"jwt.check_us.{label}", "headway", f"{algorithm}, {when}", float(np.quantile(seen, p)), "us")
        for when, seen in times.items()
        for label, p in (("p50", 0.5), ("p99", 0.99))
    ]


def _signature_times(key: jwt.PyJWK, texts: list[str]) -> list[float]:
    times = []
    for text in texts:
        signed, _, signature = text.encode().rpartition(b".")
        decoded = base64url_decode(signature)
        began = time.perf_counter()
        assert key.Algorithm.verify(signed, key.key, decoded)
        times.append((time.perf_counter() - began) * 1e6)
    return times


async def _times(tokens: Tokens, texts: list[str]) -> list[float]:
    times = []
    for text in texts:
        began = time.perf_counter()
        await tokens.check(text)
        times.append((time.perf_counter() - began) * 1e6)
    return times
