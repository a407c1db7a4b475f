"""The operator's key and what needs it, in every process of Headway that serves HTTP."""

from __future__ import annotations

import hmac
import secrets
from hmac import compare_digest

from starlette.requests import Request

from headway.config import Config
from headway.config.keys import reveal
from headway.errors import RequestError
from headway.gateway.apis.web_pages import refuse_foreign_pages


class Access:
    """Checks requests for the operator's key. Raises ConfigError when the key cannot be read."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._salt = secrets.token_bytes(32)
        operator = config.server.operator_key
        self._operator = None if operator is None else self._digest(reveal(operator, "server.operator_key"))

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
        return None if key is None else self._digest(key)

    def _digest(self, key: str) -> bytes:
        """Return the digest by which keys are compared.

        The salt is this process's own, so how long a look-up takes reveals nothing about a key.
        """
        return hmac.digest(self._salt, key.encode(), "sha256")

    def is_operator(self, request: Request) -> bool:
        """Return whether a request carries the operator's key."""
        digest = self._key_digest(request)
        return self._operator is not None and digest is not None and compare_digest(digest, self._operator)

    def check_operator(self, request: Request, otherwise: str = "") -> None:
        """Refuse what only operators may do: 401 without their key, 403 when there is none.

        otherwise: what else the operator can do about the latter, for the hint.
        """
        if self._operator is None:
            raise RequestError(
                "This is for the operator, whose key is not configured.",
                f"Set server.operator_key, and send it{otherwise}.",
                status=403,
                code="control_off",
            )
        if not self.is_operator(request):
            raise RequestError(
                "This needs the operator's key.",
                "Send `Authorization: Bearer KEY` (server.operator_key).",
                status=401,
                code="invalid_api_key",
            )

    def check_status(self, request: Request) -> None:
        """Refuse questions about this part's state where only operators may ask them."""
        if self.config.status_closed:
            self.check_operator(request, ", or set server.operator_only = false, which shows it to all clients")
        elif not self.config.keys:
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
