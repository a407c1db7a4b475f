"""The socket on which a gateway listens: its own, one that systemd passes, or a port that two gateways share."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from dataclasses import replace

from headway.addresses import netloc
from headway.config import Server
from headway.errors import ConfigError

_PASSED = 3  # the first file descriptor that systemd passes
_SO_ATTACH_REUSEPORT_CBPF, _BPF_RETURN = 51, 6  # asm-generic/socket.h; linux/bpf_common.h: BPF_RET | BPF_K


def listening(server: Server) -> tuple[socket.socket, Server]:
    """Return the socket that systemd passes or else a bound one, and the settings with its address."""
    if (sock := inherited()) is None:
        return bind(server.host, server.port, shared=server.reuse_port), server
    host, port = sock.getsockname()[:2]
    return sock, replace(server, host=host, port=port)


def inherited() -> socket.socket | None:
    """Return the socket that systemd has passed (sd_listen_fds(3)), None = there is none.

    ConfigError for anything but one TCP socket that listens.
    """
    passed = {name: os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if passed["LISTEN_PID"] != str(os.getpid()):
        return None
    fix = "Give the socket unit one ListenStream=, an address and a port."
    if passed["LISTEN_FDS"] != "1":
        raise ConfigError(f"systemd passed {passed['LISTEN_FDS']} sockets.", fix)
    try:
        sock = socket.socket(fileno=_PASSED)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"systemd passed no socket: {error}.", fix) from error
    if not listens or sock.family not in (socket.AF_INET, socket.AF_INET6):
        raise ConfigError("systemd passed a socket that does not listen for TCP.", fix)
    sock.set_inheritable(False)
    return sock


def steer_away(sock: socket.socket) -> None:
    """Let the kernel give new connections to the other gateway that listens on this shared port.

    What is in the queue of a socket that closes is lost. The sockets of a port are numbered from 0, the oldest
    first, and a program of one instruction, `return 1`, chooses; where that number does not exist, the kernel does.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 1))
    with contextlib.suppress(OSError):  # a kernel without it
        described = struct.pack("HP", 1, ctypes.addressof(program))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, described)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a bound socket; ConfigError when the address is taken or not ours. shared: as `server.reuse_port`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} on {host} is in use.",
                "Stop what listens there, or choose another with --port; to replace a gateway, start both with "
                "server.reuse_port = true.",
                param="server.port",
            ) from error
        raise ConfigError(
            f"Cannot listen on {netloc(host, port)}: {error.strerror or error}.", "Check --host and --port."
        ) from error
    return sock
