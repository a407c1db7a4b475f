"""Sandboxes in Linux namespaces, where code sees only Python and the system's libraries, read-only."""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
from functools import cache
from itertools import chain
from pathlib import Path

from headway.cluster.backends import namespaces_main, sandbox_main
from headway.cluster.backends.worker import failure
from headway.errors import ConfigError

_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/usr/share/zoneinfo",
)


def argv(argument: str, disk_mib: int, memory_mib: int) -> list[str]:
    """Return the command that runs `sandbox_main` in namespaces. argument: for `sandbox_main`."""
    command = [sys.executable, "-I", "-c", Path(sandbox_main.__file__).read_text(), argument]
    shown = chain.from_iterable(_visible().items())
    limits = [str(disk_mib), str(memory_mib)]
    return [sys.executable, "-I", "-S", namespaces_main.__file__, *limits, *shown, "--", *command]


def check_namespaces(name: str) -> None:
    """Raise ConfigError if sandboxes cannot be confined here. May block for 20 s."""
    why = failure(*argv(json.dumps({"limits": {}, "imports": []}), 1, 64))
    if why is not None:
        raise ConfigError(
            f"backends.{name} cannot isolate its sandboxes by namespaces here: {why}.",
            "Run the gateway on Linux 5.12 or later, as root with CAP_SYS_ADMIN or as another user where "
            "unprivileged user namespaces are allowed (in a container also by its seccomp and AppArmor "
            'profiles), or set isolation = "docker"; "process" only if you trust all code that is sent.',
            param=f"backends.{name}.isolation",
        )


@cache
def _visible() -> dict[str, str]:
    """Return the paths that the interpreter needs, {inside: outside}: none nested, links resolved outside."""
    paths = sysconfig.get_paths()
    wanted = {
        *_SYSTEM,
        *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        f"{sys.base_prefix}/lib",
        f"{sys.prefix}/pyvenv.cfg",
        sys.executable,
        os.path.realpath(sys.executable),
    }
    found: dict[str, str] = {}
    for path in sorted(wanted):
        if os.path.exists(path) and not any(Path(path).is_relative_to(above) for above in found):
            found[path] = os.path.realpath(path)
    return found
