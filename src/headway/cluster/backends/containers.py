"""Sandboxes as containers, run by the `docker` command (Docker's, or podman-docker's).

A container has no network, no capabilities, a read-only image and a /tmp in memory; it is removed with the
sandbox. If its gateway is killed, it ends by itself: at once if it has no code yet, otherwise with its code or
by a timer inside it, which hostile code can turn off.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from headway.cluster.backends import sandbox_main
from headway.cluster.backends.worker import failure
from headway.config import Backend as Settings
from headway.errors import ConfigError

log = logging.getLogger("headway.cluster.backends")
PROCESSES = 64  # limit for the code of one sandbox
_REMOVE_S = 20.0  # limit for removing a container
_TRIES, _RETRY_S = 5, 0.5  # of removing one that may be created late
_NOBODY = 65534
# Variables by which `docker` finds its daemon.
_DOCKER_VARIABLES = (
    "PATH",
    "HOME",
    "XDG_RUNTIME_DIR",
    "DOCKER_HOST",
    "DOCKER_CONFIG",
    "DOCKER_CONTEXT",
    "DOCKER_CERT_PATH",
    "DOCKER_TLS_VERIFY",
)


def check_docker(name: str, image: str) -> None:
    """Raise ConfigError if no Docker daemon answers, or if it lacks the image. May block for 40 s."""
    why = failure("docker", "version")
    if why is not None:
        raise ConfigError(
            f"backends.{name} has no Docker for its sandboxes here: {why}.",
            'Install Docker and start its daemon, or set isolation = "namespaces".',
            param=f"backends.{name}.isolation",
        )
    if failure("docker", "image", "inspect", image) is not None:
        raise ConfigError(
            f"backends.{name}: Docker does not have the image {image}.",
            f"Get it: docker pull {image}",
            param=f"backends.{name}.image",
        )


def command_env(passed: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for `docker`: the variables that it needs, and those to pass on to the container."""
    return {**{name: os.environ[name] for name in _DOCKER_VARIABLES if name in os.environ}, **passed}


class Container:
    """One container, created when its command runs."""

    def __init__(self, backend: str, settings: Settings) -> None:
        self._backend, self._settings = backend, settings
        self._name = f"headway-sandbox-{secrets.token_hex(8)}"

    def argv(self, argument: str, env: Mapping[str, str], passed: Iterable[str]) -> list[str]:
        """Return the command that runs `sandbox_main` in the container.

        argument: for `sandbox_main`. env: variables to set. passed: names of variables to copy from the command's
            environment.
        """
        settings, memory = self._settings, f"{self._settings.memory_mib}m"
        bounds = [
            "--network=none",
            "--read-only",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            f"--user={_NOBODY}:{_NOBODY}",
            f"--memory={memory}",
            f"--memory-swap={memory}",
            f"--pids-limit={PROCESSES}",
            f"--tmpfs=/tmp:rw,uid={_NOBODY},size={settings.disk_mib}m",
            "--workdir=/tmp",
        ]
        variables = [f"--env={name}={value}" for name, value in env.items()]
        variables += [f"--env={name}" for name in passed]
        named = [f"--name={self._name}", f"--label=headway.backend={self._backend}"]
        source = Path(sandbox_main.__file__).read_text()  # nothing is mounted: the daemon may be elsewhere
        return [
            "docker",
            "run",
            "--rm",
            "--interactive",
            "--pull=never",
            *named,
            *bounds,
            *variables,
            settings.image,
            "python3",
            "-I",
            "-c",
            source,
            argument,
        ]

    async def remove(self, patience_s: float = _REMOVE_S) -> bool:
        """Kill and remove the container; return whether it existed. Give up on a daemon that hangs."""
        quiet, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        removing = await asyncio.create_subprocess_exec(
            "docker", "rm", "--force", self._name, stdin=quiet, stdout=pipe, stderr=quiet
        )
        try:
            removed, _ = await asyncio.wait_for(removing.communicate(), patience_s)
            return bool(removed)
        except TimeoutError:
            removing.kill()
            await removing.wait()
            log.warning("Docker has not removed the container %s; remove it by hand", self._name)
            return True

    async def remove_unfinished(self) -> None:
        """Remove a container that was not ready: the daemon may create it after its command was killed."""
        for _ in range(_TRIES):
            if await self.remove():
                return
            await asyncio.sleep(_RETRY_S)
