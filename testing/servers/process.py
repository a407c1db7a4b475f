"""A private server's process: it does not run as root, and ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import pwd
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

PASSWORD = "correct-horse"
_MARK = "HEADWAY_TESTS"  # marks processes that a test module must not leave behind; the server may outlive it
_PR_SET_PDEATHSIG = 1


def own(name: str, *paths: Path) -> dict[str, Any]:
    """Give the paths to a user, or to nobody without that user; return `Popen`'s arguments to run as that user.

    {} where this process does not run as root.
    """
    if os.getuid() != 0:
        return {}
    known = {user.pw_name: user for user in pwd.getpwall()}
    user = known.get(name) or known["nobody"]
    for path in paths:
        os.chown(path, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def environment(prefix: str) -> dict[str, str]:
    """Return this process's environment without variables of the server, which begin with `prefix`."""
    return {key: value for key, value in os.environ.items() if key != _MARK and not key.startswith(prefix)}


def spawn(
    argv: Sequence[str], env: Mapping[str, str], out: Any, folder: Path, at_end: int, as_user: Mapping[str, Any]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own. at_end: the signal that it gets when the thread that calls this ends."""
    return subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        cwd=folder,
        start_new_session=True,
        preexec_fn=partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, at_end),
        **as_user,
    )
