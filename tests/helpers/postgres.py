"""A private PostgreSQL server for tests: own data, own port, started when the first test asks for it.

With HEADWAY_POSTGRES_URL set, that server is used instead, by tests that do not stop it. Where there are no
binaries (`make postgres` installs Debian's), the tests are skipped.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg
import psutil  # type: ignore[import-untyped]
import pytest

from headway.broker.postgres_link import Address
from headway.engines.vllm.process.launch import free_port

URL = "HEADWAY_POSTGRES_URL"
PASSWORD = "correct-horse"
MARK = (
    "HEADWAY_TESTS"  # by which tests/conftest.py finds processes that a module left; the server outlives one
)
_SECONDS = 30.0  # for the server to start
_PR_SET_PDEATHSIG = 1
_used: list[str] = []  # schemas


def binaries() -> Path:
    """Return the folder of the newest server's binaries; without any the test is skipped."""
    found = shutil.which("postgres")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: int(one.parent.name))
    if found:
        folders.append(Path(found).resolve().parent)
    if not folders:
        pytest.skip(
            "there is no PostgreSQL here (`make postgres` installs Debian's), nor HEADWAY_POSTGRES_URL"
        )
    return folders[-1]


class Server:
    """A private server, which may be stopped and started again on the same data."""

    def __init__(self) -> None:
        self.bin, self.port = binaries(), free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="headway-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root.
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:
            user = pwd.getpwnam("postgres" if _is_user("postgres") else "nobody")
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._env = {key: value for key, value in os.environ.items() if key != MARK and key[:2] != "PG"}
        self._make()

    @property
    def url(self) -> str:
        return self.url_of("headway", PASSWORD)

    def url_of(self, user: str, password: str, database: str = "postgres") -> str:
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def start(self, *more: str) -> None:
        """Start it, and wait until it answers; more: of its options."""
        options = ["-c", f"port={self.port}", "-c", f"unix_socket_directories={self.folder}",
                   "-c", "listen_addresses=127.0.0.1", "-c", "max_connections=200", *more]  # fmt: skip
        with (self.folder / "log").open("ab") as out:
            self._process = subprocess.Popen(
                [self.bin / "postgres", "-D", self.folder / "data", *options], env=self._env,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder,
                preexec_fn=_die_with_parent, **self._as,
            )  # fmt: skip
        deadline = time.monotonic() + _SECONDS
        while self._run("pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port), check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL does not start"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it, with its sessions: SIGINT is a fast shutdown, SIGQUIT is as a crash."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_SECONDS)
            self._process = None

    def pause(self) -> None:
        """Stop all its processes: it is there, but answers nothing."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        assert self._process is not None
        process = psutil.Process(self._process.pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # a session that has just ended
                one.send_signal(number)

    def add_file(self, name: str, content: bytes) -> str:
        """Put a file beside its data that it alone may read; return its path."""
        path = self.folder / "data" / name
        path.write_bytes(content)
        path.chmod(0o600)
        if self._as:
            os.chown(path, self._as["user"], self._as["group"])
        return str(path)

    def remove(self) -> None:
        """End it and delete its data."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self) -> None:
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        self._run(
            "initdb", "-D", str(self.folder / "data"), "-U", "headway", "--pwfile", str(password),
            "--auth", "scram-sha-256", "--encoding", "UTF8", "--no-locale", "--no-sync",
        )  # fmt: skip

    def _run(self, name: str, *args: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [self.bin / name, *args], env=self._env, cwd=self.folder, capture_output=True, **self._as
        )
        assert not check or done.returncode == 0, done.stderr.decode()
        return done


@cache
def private() -> Server:
    """Return the session's own server, started when it is first asked for."""
    server = Server()
    server.start()
    return server


def stop() -> None:
    """End what `private` has started, clear what is left in another server."""
    if URL in os.environ:
        for schema in _used:
            run_sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE", url=the_url())
    if private.cache_info().currsize:
        private().remove()
        private.cache_clear()


def the_url() -> str:
    """Return the URL of the server to test with."""
    return os.environ.get(URL) or private().url


def fresh(url: str | None = None) -> Address:
    """Return a schema that nothing has used, by default of the server to test with."""
    _used.append(f"test_{secrets.token_hex(6)}")
    return Address(url or the_url(), _used[-1], 10.0)


def run_sql(sql: str, *values: Any, url: str) -> list[Any]:
    """Run a statement in a session of its own, from any thread, and return its rows."""

    async def run() -> list[Any]:
        connection = await asyncpg.connect(url, timeout=10)
        try:
            return list(await connection.fetch(sql, *values))
        finally:
            await connection.close()

    return _apart(lambda: asyncio.run(run()))


def _apart(work: Callable[[], list[Any]]) -> list[Any]:
    """Return what work returns in a thread without an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _is_user(name: str) -> bool:
    return any(user.pw_name == name for user in pwd.getpwall())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
