"""Refuses, on a server without API keys, what web pages of other sites could send through a user's browser.

A page may send a form or text to any server that its user's browser can reach, and a page whose name was made to
lead here (DNS rebinding) may also read the answer: then its own name is the request's Host.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from socket import gethostname

from starlette.requests import Request

from headway.errors import RequestError

# Names of machines that no public name server knows.
_LOCAL = (".localhost", ".local", ".internal", ".svc")
_FORMS = ("text/plain", "application/x-www-form-urlencoded")  # which a page may send without being asked


def refuse_foreign_pages(request: Request, hosts: Collection[str], origins: Collection[str] = ()) -> None:
    """Raise RequestError for a Host that is not this server's, for another Origin, and for the content of forms.

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
