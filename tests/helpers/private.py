"""A private server for tests, started when the first test asks for it.

With its environment variable set, that server is used instead, by tests that do not stop it. Where there is
nothing to start (`make servers` installs Debian's), the tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import pytest

from headway.errors import ConfigError


class Startable(Protocol):
    """A server of `testing.servers`."""

    @property
    def url(self) -> str: ...

    def start(self) -> None: ...

    def remove(self) -> None: ...


S = TypeVar("S", bound=Startable)


class Private(Generic[S]):
    """The session's own server. make: a server that is not started yet. variable: the URL of another one."""

    def __init__(self, make: Callable[[], S], variable: str) -> None:
        self._make, self._variable = make, variable
        self._server: S | None = None

    def new(self) -> S:
        """Return a server that is not started yet; without any to start the test is skipped."""
        try:
            return self._make()
        except ConfigError as error:
            pytest.skip(f"{error}")

    @contextmanager
    def own(self) -> Iterator[S]:
        """Yield a server for tests that stop, kill or pause it."""
        server = self.new()
        server.start()
        try:
            yield server
        finally:
            server.remove()

    def the_url(self) -> str:
        """Return the URL of the server to test with."""
        return os.environ.get(self._variable) or self.private().url

    def private(self) -> S:
        """Return the session's own server, started when it is first asked for."""
        if self._server is None:
            server = self.new()
            server.start()
            self._server = server
        return self._server

    def stop(self) -> None:
        """End what `private` has started."""
        if self._server is not None:
            self._server.remove()
            self._server = None
