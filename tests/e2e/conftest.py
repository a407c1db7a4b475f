"""One `headway serve` with a real vLLM for all tests that only ask it something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import MARK
from tests.e2e.server import Headway


@pytest.fixture(scope="session")
def headway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Headway]:
    server = Headway(tmp_path_factory.mktemp("serve"))
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
