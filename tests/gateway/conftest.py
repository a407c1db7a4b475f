"""One fake engine for the session, one gateway for each module, others where a test wants them different."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import headway.gateway.picker  # noqa: F401  before gRPC, whose fork handlers it switches off
from headway.engines.vllm.process.client import VllmEngine
from tests.conftest import MARK
from tests.gateway.dashboard_pictures import CHROMIUM
from tests.gateway.gateway import Fake, Gateway, configuration, serving
from tests.helpers import postgres

Serve = Callable[..., AbstractContextManager[Gateway]]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what replaces a method of the gateway's engines, by its name."""
    return functools.partial(monkeypatch.setattr, VllmEngine)


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    """The fake engine that stays up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK)  # it outlives the modules that it serves
        engine = Fake(tmp_path_factory.mktemp("fake")).start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Fake]]:
    """Two more fake engines."""
    engines = [Fake(tmp_path_factory.mktemp("fake")).start() for _ in range(2)]
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Fake]:
    """A fake engine that the test may stop and start again."""
    engine = Fake(tmp_path).start()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    """A fake engine without Headway's scheduler (`stock_engine.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK)
        engine = Fake(tmp_path_factory.mktemp("stock"), module="tests.gateway.stock_engine").start()
    yield engine
    engine.stop()


@pytest.fixture
def own() -> Iterator[postgres.PrivateServer]:
    """A PostgreSQL server that the test may stop."""
    with postgres.own() as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    expect.set_options(timeout=20_000)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test when its script fails, or does what its security policy forbids."""
    page, errors = browser.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
    page.set_default_timeout(20_000)
    yield page
    page.close()
    assert errors == []


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals and the like are in the user's state directory where there is no queue's file to be beside."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def gateway(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with the default recipe and a queue on disk, attached to the fake engine."""
    with serving(configuration(tmp_path_factory.mktemp("gateway"), fake.url)) as running:
        yield running


@pytest.fixture
def serve(fake: Fake, tmp_path: Path) -> Serve:
    """Return what runs a gateway of one's own: serve(*urls, recipe=..., broker=..., server={...})."""

    def run(*urls: str, ready: bool = True, **fields: Any) -> AbstractContextManager[Gateway]:
        return serving(configuration(tmp_path, *(urls or (fake.url,)), **fields), ready=ready)

    return run
