"""Tokens of an OpenID Connect issuer that clients may send instead of API keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headway.addresses import is_secure_url
from headway.config.tables import Amount, Positive
from headway.errors import ConfigError

_Name = Annotated[str, Field(min_length=1)]
# Signatures with a private key only: with a shared secret (HS256) the issuer's public key could sign.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Oidc:
    """Signed tokens (JWT) of one OpenID Connect issuer, accepted as `Authorization: Bearer TOKEN` beside keys.

    issuer: URL of the issuer, exactly as in the claim `iss`; unset, no tokens are accepted.
    audience: accepted values of the claim `aud`, at least one; a token needs one of them.
    jwks_url: URL of the issuer's public keys; unset, from ISSUER/.well-known/openid-configuration.
    algorithms: accepted signature algorithms.
    leeway_s: difference of clocks to allow for in `exp`, `nbf` and `iat`.
    refresh_s: time between two looks at the issuer's public keys. A token signed with an unknown key causes another
        look, once in 10 s at most. While the issuer does not answer, the keys that are known stay in use.
    tenant_claim: claim that names the tenant. In these names a dot leads into an object: "realm_access.roles".
    classes_claim: claim that lists the classes a token may use, as a list or separated by spaces; unset = all.
    admin_claim, admin_value: claim with this value, or with a list that has it, which makes its bearer an operator;
        unset, no token does.
    """

    issuer: _Name | None = None
    audience: tuple[_Name, ...] = ()
    jwks_url: _Name | None = None
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = ("RS256", "ES256", "EdDSA")
    leeway_s: Amount = 30.0
    refresh_s: Positive = 300.0
    tenant_claim: _Name = "tenant"
    classes_claim: _Name | None = None
    admin_claim: _Name | None = None
    admin_value: _Name = "headway-admin"


def oidc_contradictions(oidc: Oidc, where: str) -> Iterator[ConfigError]:
    """Find settings of an issuer that would accept tokens of others."""
    if oidc.issuer is None:
        return
    if not oidc.audience:
        problem = f"oidc.issuer in {where} is set, but not oidc.audience, so tokens for other services would do."
        fix = "Name the audience that the issuer puts into tokens for this gateway."
        yield ConfigError(problem, fix, param="oidc.audience")
    for name in ("issuer", "jwks_url"):
        url = getattr(oidc, name)
        if url is not None and not is_secure_url(url):
            problem = f"oidc.{name} in {where} is {url!r}, whose answers could be forged on the way."
            yield ConfigError(problem, "Use an https:// URL (http:// only on this machine).", param=f"oidc.{name}")
