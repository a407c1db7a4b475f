"""One `headway serve` with a real vLLM for all tests that only ask it something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import MARK
from tests.e2e.server import Headway


@pytest.fixture(scope="session")
def headway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Headway]:
    with _running(Headway(tmp_path_factory.mktemp("serve"))) as server:
        yield server


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Headway]:
    """One whose vLLM embeds."""
    with _running(Headway(tmp_path_factory.mktemp("pooling"), runner="pooling")) as server:
        yield server


@contextmanager
def _running(server: Headway) -> Iterator[Headway]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK)  # it outlives the modules that it serves
        server.start()
    try:
        server.wait_ready()
        yield server
        status, left = server.interrupt()
        assert status == 0
        assert left == []
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()
