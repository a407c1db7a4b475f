"""A private RabbitMQ server: own node, data and ports, ended with the process that started it."""

from __future__ import annotations

import ctypes
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError

PASSWORD = "correct-horse"
_MARK = "HEADWAY_TESTS"  # by which tests find processes that a module left; the server outlives one
_SECONDS = 120.0  # for the server to start
_PR_SET_PDEATHSIG = 1
_CONFIG = f"""\
default_user = headway
default_pass = {PASSWORD}
loopback_users = none
disk_free_limit.absolute = 1MB
log.console = true
log.console.level = warning
"""


def script() -> Path:
    """Return what starts a server; Debian's own wrapper of it keeps to its own user and folders.

    ConfigError when there is none.
    """
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    if not found and (path := shutil.which("rabbitmq-server")):
        found = [Path(path)]
    if not found:
        raise ConfigError(
            "There is no RabbitMQ on this machine.", "Install one: `make rabbitmq` installs Debian's."
        )
    return found[-1]


class Server:
    """A private server, which may be stopped and started again on the same data."""

    def __init__(self) -> None:
        self.script, self.port, self._epmd_port = script(), free_port(), free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="headway-rabbitmq-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None
        (self.folder / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{self.port}\n" + _CONFIG)
        (self.folder / "enabled_plugins").write_text("[].\n")
        cookie = self.folder / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        # As with PostgreSQL, root's work is not given to a server of a test.
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:
            user = pwd.getpwnam("rabbitmq" if _is_user("rabbitmq") else "nobody")
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._env = self._environment()

    @property
    def url(self) -> str:
        return self.url_of("headway", PASSWORD)

    def url_of(self, user: str, password: str, vhost: str = "") -> str:
        return f"amqp://{user}:{password}@127.0.0.1:{self.port}/{vhost}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        if self._epmd is None:
            epmd = shutil.which("epmd") or "epmd"
            self._epmd = self._run(epmd, "-port", str(self._epmd_port))
        self._process = self._run(str(self.script))
        deadline = time.monotonic() + _SECONDS
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "RabbitMQ does not start"
            time.sleep(0.1)

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SECONDS)
            self._process = None

    def pause(self) -> None:
        """Stop it: it is there, but answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def remove(self) -> None:
        """End it and delete its data."""
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        """Tell whether it greets a client of AMQP 0.9.1."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as client:
            client.settimeout(10)
            client.sendall(b"AMQP\x00\x00\x09\x01")
            return bool(client.recv(1))
        return False

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as out:
            return subprocess.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder,
                start_new_session=True, preexec_fn=_die_with_parent, **self._as,
            )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        ours = {key: value for key, value in os.environ.items() if key != _MARK and key[:8] != "RABBITMQ"}
        folder = str(self.folder)
        return ours | {
            "HOME": folder, "ERL_EPMD_PORT": str(self._epmd_port), "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"{self.folder.name}@localhost", "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf", "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins", "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": f"{folder}/data", "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RUNNING_UNDER_SYSTEMD": "1",  # its script then becomes the server, with no shell before it
        }  # fmt: skip


def _is_user(name: str) -> bool:
    return any(user.pw_name == name for user in pwd.getpwall())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
