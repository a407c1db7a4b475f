"""A private PostgreSQL server with its own data and port, which ends with the process that started it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from testing.servers import process
from testing.servers.process import PASSWORD

_SECONDS = 30.0  # time limit for a start or a stop
_SETTLE_S = 0.5


def binaries() -> Path:
    """Return the folder with the server's binaries. Raise ConfigError if PostgreSQL is not installed."""
    found = shutil.which("postgres")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: int(one.parent.name))
    if found:
        folders.append(Path(found).resolve().parent)
    if not folders:
        raise ConfigError(
            "There is no PostgreSQL on this machine.", "`make servers` installs Debian's; or install another."
        )
    return folders[-1]


class PostgresServer:
    """A private server that can be stopped and started again on the same data."""

    def __init__(self) -> None:
        self.bin, self.port = binaries(), free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="headway-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._as = process.own("postgres", self.folder)  # PostgreSQL refuses to run as root
        self._env = process.environment("PG")
        self._make()

    @property
    def url(self) -> str:
        return self.url_of("headway", PASSWORD)

    def url_of(self, user: str, password: str, database: str = "postgres") -> str:
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def start(self, *more: str) -> None:
        """Start the server and wait until it answers. more: further command-line options."""
        options = [f"--port={self.port}", f"--unix_socket_directories={self.folder}"]
        options += ["--listen_addresses=127.0.0.1", "--max_connections=200", *more]
        with (self.folder / "log").open("ab") as out:
            argv = [str(self.bin / "postgres"), "-D", str(self.folder / "data"), *options]
            self._process = process.spawn(argv, self._env, out, self.folder, signal.SIGINT, self._as)
        deadline = time.monotonic() + _SECONDS
        while self._run("pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port), check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL does not start"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop the server and its sessions: SIGINT is a fast shutdown, SIGQUIT resembles a crash."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_SECONDS)
            self._process = None

    def pause(self) -> None:
        """Suspend all processes: connections stay open, but nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after `pause`."""
        self._signal_all(signal.SIGCONT)

    def fill_disk(self) -> None:
        """Limit the size of files to a few pages: the server ends, as on a full disk."""
        self._limit("65536")

    def free_disk(self) -> None:
        """Lift the limit of `fill_disk`, and start the server if it has ended."""
        assert self._process is not None
        if self._process.poll() is None:
            self._limit("unlimited")
            time.sleep(_SETTLE_S)  # a server that is about to end does so
        if self._process.poll() is not None:
            self.start()

    def _limit(self, size: str) -> None:
        """Set the soft limit of file sizes, as the user that owns the processes."""
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        for one in (first, *first.children(recursive=True)):
            argv = ["prlimit", f"--fsize={size}:", f"--pid={one.pid}"]
            subprocess.run(argv, cwd=self.folder, capture_output=True, **self._as)  # it may have ended

    def _signal_all(self, number: int) -> None:
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        for one in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # a session that has just ended
                one.send_signal(number)

    def add_file(self, name: str, content: bytes) -> str:
        """Write a file into the data folder that only the server may read; return its path."""
        path = self.folder / "data" / name
        path.write_bytes(content)
        path.chmod(0o600)
        if self._as:
            os.chown(path, self._as["user"], self._as["group"])
        return str(path)

    def remove(self) -> None:
        """Stop the server and delete its data."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self) -> None:
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        options = [f"--pgdata={self.folder / 'data'}", "--username=headway", f"--pwfile={password}"]
        self._run("initdb", *options, "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync")

    def _run(self, name: str, *args: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run([self.bin / name, *args], env=self._env, cwd=self.folder, capture_output=True, **self._as)
        assert not check or done.returncode == 0, done.stderr.decode()
        return done
