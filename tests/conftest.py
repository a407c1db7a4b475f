"""Markers and time limits by folder, and a check that no test module leaves a process behind."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from headway.gateway import main
from headway.gateway.parsing import tokens
from headway.models.resolve import resolve
from tests.helpers import postgres, rabbitmq

# Before torch is imported. With more, OpenMP's threads spin while another process has one of their cores.
os.environ["OMP_NUM_THREADS"] = "1"
gc.disable()  # until all tests are collected: collections take a third of their imports' time, and find nothing to free
ROOT = Path(__file__).parent
# Of engines in processes of their own, by worker: with one core they have one thread.
CORES = sorted(os.sched_getaffinity(0), reverse=True)
CORE = str(CORES[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(CORES)])
MARK = "HEADWAY_TESTS"  # inherited by every descendant, so it also identifies those whose parent has died
SECONDS = 60.0  # within which processes that were told to end have ended
OURS_TO_KEEP = ("resource_tracker", "forkserver")  # Python's own, one per test process

# Markers by path under tests/; what has none is the fast tier (`make test-fast`).
MARKERS = {
    "engine": ("engine",),
    "e2e": ("engine", "server"),
    "gateway": ("server",),
    "bench": ("slow",),
    "store/test_crash.py": ("slow",),
    "store/test_postgres_crash.py": ("slow",),
    "simulate/test_compiled_loop.py": ("slow",),
    "simulate/test_planning.py": ("slow",),
    "simulate/test_recorder.py": ("slow",),
    "simulate/test_run.py": ("slow",),
    "simulate/test_timeline.py": ("slow",),
    "test_model.py": ("slow",),
}
assert all((ROOT / path).exists() for path in MARKERS), "a path in MARKERS has moved"
# Some go first, since they take longest. The tests that share a server with a real engine go to one worker, and so do
# those that load vLLM's engine into their own process, which takes 10 s; the rest is handed out file by file.
E2E, ENGINE = "tests/e2e/", "tests/engine/"
SERVERS = tuple(f"{E2E}test_{name}.py" for name in ("clients", "crash", "examples", "serve"))
LOADED = tuple(f"{ENGINE}test_{name}.py" for name in ("exact", "continuations", "two_ends", "async"))
FIRST = (E2E, *LOADED, *(f"{ENGINE}test_{name}.py" for name in ("every_feature", "prewarming", "triton")), "tests/up/")
assert all((ROOT.parent / path).exists() for path in (*SERVERS, *FIRST)), "a path in SERVERS or FIRST has moved"
# Seconds that one test may take with all cores busy; elsewhere the `timeout` of pyproject.toml holds.
TIMEOUTS = {"engine": 1200, "e2e": 1800}

# A machine may stall for seconds in any example. The examples are the same every time, so that a run judges the change
# and not the draw; `make explore` draws new ones, and more where a test does not say how many.
settings.register_profile(
    "headway", deadline=None, derandomize=True, max_examples=33, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", settings.get_profile("headway"), derandomize=False, max_examples=100, print_blob=True
)
settings.load_profile("headway")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test the markers and the time limit of its file and folder; the longest go first.

    Of `LOADED` each may end what vLLM has set up in this process, so those that share an engine come before the others.
    After them, files of `gateway/`, which mostly wait, are spread evenly among the others, which mostly compute.
    """
    waiting, files = ROOT / "gateway", dict.fromkeys(item.path for item in items)
    groups = [[file for file in files if (waiting in file.parents) == waits] for waits in (True, False)]
    place = {file: i / len(group) for group in groups for i, file in enumerate(group)}

    def order(item: pytest.Item) -> tuple[int, float, str]:
        first = next((i for i, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST))
        return first, place[item.path] if first == len(FIRST) else 0.0, str(item.path)

    items.sort(key=order)
    for item in items:
        path = item.path.relative_to(ROOT)
        for key in (path.parts[0], path.as_posix()):
            for name in MARKERS.get(key, ()):
                item.add_marker(name)
        if path.parts[0] in TIMEOUTS:
            item.add_marker(pytest.mark.timeout(TIMEOUTS[path.parts[0]]))


def pytest_collection_finish() -> None:
    """Leave all that is imported by now out of garbage collections: each would take half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Return the scheduler: tests go to workers file by file, those of `SERVERS` and of `LOADED` to one each."""
    gc.enable()  # this process collects no tests

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SERVERS):
                return E2E
            return ENGINE if nodeid.startswith(LOADED) else nodeid.split("::", 1)[0]

    return ByFile(config, log)


@pytest.fixture
def other_user(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let this process run as another user than the owner of a file."""
    return lambda path: monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Let every disk be full but for a few bytes; return how many."""
    usage = shutil.disk_usage(tmp_path)._replace(free=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    return usage.free


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give temporary files a folder of this test alone."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SQLite's brokers look for damage many times a second."""
    for pause in ("headway.store.sqlite.health._PAUSE_S", "headway.store.queue.sqlite.TICK_S"):
        monkeypatch.setattr(pause, 0.02)


@pytest.fixture(scope="session", autouse=True)
def one_tokenizer() -> Iterator[None]:
    """Load SmolLM2's tokenizer once for all gateways and models that have its file: it takes longer than most tests."""
    loaded, whole = dict[str, Any](), tokens.load_tokenizer

    def load(model: str) -> Any:
        file = os.path.realpath(Path(resolve(model), "tokenizer.json"))
        if file not in loaded:
            loaded[file] = one = whole(model)
            one.get_vocab = functools.cache(one.get_vocab)  # 20 ms, of the 95 that a gateway takes to start
        return loaded[file]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "load_tokenizer", load)
        yield


@pytest.fixture(scope="session", autouse=True)
def memory_of_ended_gateways() -> Iterator[None]:
    """Let gateways that have ended be freed: one that starts would freeze their objects, 22 MB each.

    As in `headway serve`, glibc keeps one heap: the heaps of ended threads add 15 MB for each gateway.
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(main._M_ARENA_MAX, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "_tidy", gc.collect)
        yield


@pytest.fixture(scope="module", autouse=True)
def objects_of_earlier_files() -> None:
    """Leave what earlier files imported out of the collection with which each gateway starts: a second with vLLM."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def environment_mark() -> None:
    os.environ[MARK] = str(os.getpid())


@pytest.fixture(scope="session", autouse=True)
def no_server_left() -> Iterator[None]:
    """End the servers that tests have started."""
    yield
    postgres.stop()
    rabbitmq.stop()


@pytest.fixture(scope="module", autouse=True)
def no_process_left(environment_mark: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module that leaves processes behind, which would slow down every later test, and end them."""
    yield
    deadline = time.monotonic() + SECONDS
    while (left := _descendants()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not left:
        return
    found = [f"{process.pid}: {name}" for process, name in left]
    for process, _ in left:
        process.kill()
    pytest.fail(f"{request.module.__name__} left processes: " + "; ".join(found))


def _descendants() -> list[tuple[psutil.Process, str]]:
    """Return the processes that this one or its descendants have started, with their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) != str(os.getpid()):
                continue
            name = " ".join(process.cmdline()) or process.name()
        except psutil.Error:  # ended meanwhile, or another user's
            continue
        if not any(word in name for word in OURS_TO_KEEP):
            found.append((process, name))
    return found
