"""A private RabbitMQ server with its own node, data and ports, which ends with the process that started it."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from testing.servers import process
from testing.servers.process import PASSWORD

_SECONDS = 120.0  # time limit for a start or a stop
_CONFIG = f"""\
default_user = headway
default_pass = {PASSWORD}
loopback_users = none
disk_free_limit.absolute = 1MB
log.console = true
log.console.level = warning
"""


def script() -> Path:
    """Return the script that starts a server. Raise ConfigError if RabbitMQ is not installed.

    Debian's wrapper in PATH is the second choice: it insists on its own user and folders.
    """
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    if not found and (path := shutil.which("rabbitmq-server")):
        found = [Path(path)]
    if not found:
        raise ConfigError("There is no RabbitMQ on this machine.", "Install one: `make servers` installs Debian's.")
    return found[-1]


class RabbitServer:
    """A private server that can be stopped and started again on the same data.

    epmd: the port mapper, shared by the nodes of a cluster; None = a private one. cookie: the cluster's
    Erlang cookie.
    """

    def __init__(self, epmd: PortMapper | None = None, cookie: str = "") -> None:
        self.script, self.port, self._owns_epmd = script(), free_port(), epmd is None
        self.epmd = epmd or PortMapper()
        self.folder = Path(tempfile.mkdtemp(prefix="headway-rabbitmq-"))
        self.node = f"{self.folder.name}@localhost"
        self._process: subprocess.Popen[bytes] | None = None
        self.join([])
        (self.folder / "enabled_plugins").write_text("[].\n")
        file = self.folder / ".erlang.cookie"
        file.write_text(cookie or secrets.token_hex(16))
        file.chmod(0o400)
        # As with PostgreSQL, no test server runs as root.
        self._as = process.own("rabbitmq", self.folder, *self.folder.iterdir())
        self._env = self._environment()

    def join(self, nodes: Sequence[str]) -> None:
        """Form a cluster of these nodes, this one included, at the first start; if empty, run alone."""
        kind = "cluster_formation.peer_discovery_backend = classic_config\n" if nodes else ""
        peers = (f"cluster_formation.classic_config.nodes.{i} = {node}\n" for i, node in enumerate(nodes, 1))
        text = f"listeners.tcp.1 = 127.0.0.1:{self.port}\n{_CONFIG}{kind}{''.join(peers)}"
        (self.folder / "rabbitmq.conf").write_text(text)

    @property
    def url(self) -> str:
        return self.url_of("headway", PASSWORD)

    def url_of(self, user: str, password: str, vhost: str = "") -> str:
        return f"amqp://{user}:{password}@127.0.0.1:{self.port}/{vhost}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Start the server without waiting."""
        self.epmd.start(self._env, self._as)
        with (self.folder / "log").open("ab") as out:
            self._process = process.spawn([str(self.script)], self._env, out, self.folder, signal.SIGKILL, self._as)

    def wait(self) -> None:
        """Wait until the server answers."""
        assert self._process is not None
        deadline = time.monotonic() + _SECONDS
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "RabbitMQ does not start"
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the server, as in a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SECONDS)
            self._process = None

    def pause(self) -> None:
        """Suspend the server: connections stay open, but nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after `pause`."""
        self._signal(signal.SIGCONT)

    def remove(self) -> None:
        """Kill the server and delete its data."""
        self.kill()
        if self._owns_epmd:
            self.epmd.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        """Return True if the server greets an AMQP 0.9.1 client."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as client:
            client.settimeout(10)
            client.sendall(b"AMQP\x00\x00\x09\x01")
            return bool(client.recv(1))
        return False

    def _environment(self) -> dict[str, str]:
        folder = str(self.folder)
        return process.environment("RABBITMQ") | {
            "HOME": folder,
            "ERL_EPMD_PORT": str(self.epmd.port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RUNNING_UNDER_SYSTEMD": "1",  # makes the script exec the server, without a shell in between
        }


class PortMapper:
    """Erlang's port mapper, through which nodes find each other; the first node starts it."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, env: Mapping[str, str], as_user: Mapping[str, Any]) -> None:
        """Start the port mapper, unless it runs."""
        if self._process is None:
            argv = [shutil.which("epmd") or "epmd", "-port", str(self.port)]
            self._process = process.spawn(argv, env, subprocess.DEVNULL, Path("/"), signal.SIGKILL, as_user)

    def stop(self) -> None:
        """Stop the port mapper."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SECONDS)
            self._process = None


class RabbitCluster:
    """A cluster of `nodes` private servers."""

    def __init__(self, nodes: int) -> None:
        epmd, cookie = PortMapper(), secrets.token_hex(16)
        self.epmd, self.nodes = epmd, [RabbitServer(epmd, cookie) for _ in range(nodes)]
        if nodes > 1:
            for one in self.nodes:
                one.join([each.node for each in self.nodes])

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    def begin(self) -> None:
        """Start all nodes."""
        for node in self.nodes:
            node.begin()

    def wait(self) -> None:
        """Wait until all nodes answer; by then they have joined."""
        for node in self.nodes:
            node.wait()

    def remove(self) -> None:
        """Kill all nodes and delete their data."""
        for node in self.nodes:
            node.remove()
        self.epmd.stop()
