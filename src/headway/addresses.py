"""Server addresses: notation and checks, and the hint for a certificate that is not trusted."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from ipaddress import IPv6Address
from urllib.parse import urlsplit

_SPACE = re.compile(r"[\s\x00-\x20]")
_LOOPBACK = ("127.0.0.1", "::1")
_NAME = re.compile(r"[^\s/:@?#\[\]]+")


def netloc(host: str, port: int) -> str:
    """Return host and port as a URL has them: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host(text: str) -> bool:
    """Tell whether a text can be the name or the address of a machine, without a port."""
    with suppress(ValueError):
        return bool(_NAME.fullmatch(text) or IPv6Address(text))
    return False


def is_url(text: str, *schemes: str) -> bool:
    """Tell whether a text is the URL of a server: one of these schemes, a host, and a port that there is."""
    try:
        parts = urlsplit(text)  # of ports it takes digits alone, up to 65535
        known = parts.scheme in schemes and parts.port != 0 and is_host(parts.hostname or "")
    except ValueError:
        return False
    return known and not _SPACE.search(text)


def is_secure_url(text: str) -> bool:
    """Tell whether a text is an https URL, or an http URL of this machine: answers cannot be changed on the way."""
    return is_url(text, "https") or (is_url(text, "http") and urlsplit(text).hostname in ("localhost", *_LOOPBACK))


def certificate_hint() -> str:
    """Return the hint for a server whose certificate is not trusted here."""
    file = os.environ.get("SSL_CERT_FILE", "unset")
    return (
        f"Set SSL_CERT_FILE (now {file}) to a PEM file of the authority that signed the server's certificate, and call "
        "the server by a name in that certificate."
    )
