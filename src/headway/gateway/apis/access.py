"""The operator's key and what needs it, in every process of Headway that serves HTTP."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from hmac import compare_digest
from ipaddress import ip_address
from socket import gethostname

from starlette.requests import Request

from headway.config import Config, Key
from headway.config.keys import OPERATOR_NAME, reveal
from headway.errors import RequestError
from headway.gateway.watch.audit import ACTOR, OPERATOR

TOKEN_ERROR = "headway.token_error"  # in the scope of a request: why its token is not accepted


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request, by its key or token.

    key: tenant and limits; None for a token without a tenant.
    until: the instant at which key or token ends, in seconds since the epoch.
    operator: the subject of an operator's token, None = the sender is not an operator.
    token: the sender has a token, which names no limits but classes.
    """

    key: Key | None
    until: float = math.inf
    operator: str | None = None
    token: bool = False


class Access:
    """Checks requests for the operator's key. Raises ConfigError when the key cannot be read."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._salt = secrets.token_bytes(32)
        operator = config.server.operator_key
        self._operator = None if operator is None else self.digest(reveal(operator, "server.operator_key"))

    def _key_digest(self, request: Request) -> bytes | None:
        """Return the digest of the key that a request carries; None without one, or with two different ones.

        RequestError for a header that comes twice: proxies and servers differ in which of the two counts.
        """
        for name in ("authorization", "x-api-key"):
            if len(request.headers.getlist(name)) > 1:
                raise RequestError(f"The header {name} comes more than once.", "Send it once.", param=name)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else None
        other = request.headers.get("x-api-key")  # as clients of Anthropic's API send it
        if bearer is not None and other is not None and bearer != other:
            return None
        key = other if bearer is None else bearer
        return None if key is None else self.digest(key)

    def digest(self, key: str) -> bytes:
        """Return the digest by which keys are compared.

        The salt is this process's own, so how long a look-up takes reveals nothing about a key.
        """
        return self._salted(hashlib.sha256(key.encode()).digest())

    def _salted(self, digest: bytes) -> bytes:
        """Return the digest by which a key is compared that is known by its SHA-256."""
        return hmac.digest(self._salt, digest, "sha256")

    def is_operator(self, request: Request) -> bool:
        """Return whether a request carries the operator's key."""
        digest = self._key_digest(request)
        return self._operator is not None and digest is not None and compare_digest(digest, self._operator)

    def operator(self, request: Request) -> str:
        """Return the operator that sent a request, for logs."""
        return OPERATOR_NAME

    def check_operator(self, request: Request, otherwise: str = "") -> None:
        """Refuse what only operators may do: 401 without their key or token, 403 when there is none.

        otherwise: what else the operator can do about the latter, for the hint.
        """
        if self.is_operator(request):
            request.scope[OPERATOR], request.scope[ACTOR] = True, self.operator(request)
            return
        admin = self.config.oidc.admin_claim if self.config.oidc.issuer else None
        if self._operator is None and admin is None:
            raise RequestError(
                "This is for the operator, whose key is not configured.",
                f"Set server.operator_key, and send it{otherwise}.",
                status=403,
                code="control_off",
            )
        if (error := request.scope.get(TOKEN_ERROR)) is not None:
            raise error
        token = "" if admin is None else f", or a token with {self.config.oidc.admin_value!r} in the claim {admin!r}"
        raise RequestError(
            "This needs the operator's key.",
            f"Send `Authorization: Bearer KEY` (server.operator_key{token}).",
            status=401,
            code="invalid_api_key",
        )

    def check_status(self, request: Request) -> None:
        """Refuse questions about this part's state where only operators may ask them."""
        if self.config.status_closed:
            self.check_operator(request, ", or set server.operator_only = false, which shows it to all clients")
        elif not self.config.closed:
            self._refuse_foreign_pages(request)

    def tells_status(self, request: Request) -> bool:
        """Return whether a request may know this part's state."""
        try:
            self.check_status(request)
        except RequestError:
            return False
        return True

    def _refuse_foreign_pages(self, request: Request) -> None:
        server = self.config.server
        refuse_foreign_pages(request, (*server.hosts, server.host), server.cors_origins)


# Names of machines that no public name server knows.
_LOCAL = (".localhost", ".local", ".internal", ".svc")
_FORMS = ("text/plain", "application/x-www-form-urlencoded")  # which a page may send without being asked


def refuse_foreign_pages(request: Request, hosts: Collection[str], origins: Collection[str] = ()) -> None:
    """Raise RequestError for a Host that is not this server's, for another Origin, and for the content of forms.

    A page may send a form or text to any server that its user's browser can reach, and a page whose host name
    leads here (DNS rebinding) may also read the answer; the request's Host is then that name.

    hosts: names by which the server is called, besides addresses and local names; one that begins with a dot stands
        for all that end so. origins: of pages that may use this server.
    """
    host = request.headers.get("host", "")
    before, _, port = host.rpartition(":")
    name = (before if port.isdecimal() else host).strip("[]").lower()
    if not _is_own(name, hosts):
        raise RequestError(
            f"A server without API keys is not called {name[:64]!r}.",
            "Configure keys ([[keys]]), add the name to server.hosts, or use the server's address.",
            status=403,
            code="foreign_host",
        )
    origin = request.headers.get("origin")
    if origin is not None and origin not in origins and origin.partition("://")[2] != host:
        raise RequestError(
            f"A web page ({origin[:64]!r}) may not use a server without API keys.",
            "Configure keys ([[keys]]), or open the page by the server's address.",
            status=403,
            code="foreign_page",
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _FORMS:
        raise RequestError(
            f"The content type {kind} is not served here.",
            "Send JSON as application/json, and files as multipart/form-data.",
            status=415,
            code="unsupported_media_type",
        )


def _is_own(name: str, hosts: Collection[str]) -> bool:
    known = {host.lower() for host in hosts}
    if "." not in name or name.endswith(_LOCAL) or name == gethostname().lower() or name in known:
        return True
    return _is_address(name) or any(name.endswith(host) for host in known if host.startswith("."))


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
