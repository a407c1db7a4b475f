"""The program inside a sandbox, run by a fresh interpreter; it needs only Python's standard library.

It limits its resources, imports the configured modules, reports ready, and executes the code of one unit. The
code has the interpreter's standard output and error, and the interpreter ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1


def limit(settings: dict[str, Any]) -> None:
    """Limit the resources of this process, and let it end with the gateway."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, most in settings["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _wait_for(child: int, seconds: float) -> int:
    """Wait for a child and return its exit status: 128 + N for signal N, 1 after a timeout.

    This is process 1 of a container: when it exits, the kernel kills all others.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if not ended:
            signal.sigtimedwait({signal.SIGCHLD}, min(left, 0.1))
    return 1


def main() -> None:
    """Get ready, and execute one unit: a line of JSON with its `code`."""
    settings = json.loads(sys.argv[1])
    limit(settings)
    with contextlib.redirect_stdout(sys.stderr):  # `ready` must be the first line
        for name in settings["imports"]:
            importlib.import_module(name)
    print("ready", flush=True)
    line = sys.stdin.buffer.readline()
    if not line:  # the gateway no longer needs this sandbox
        return
    code = json.loads(line)["code"]
    if "seconds" in settings and (child := os.fork()):
        os._exit(_wait_for(child, settings["seconds"]))
    sys.argv = ["code"]
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit:
        raise
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, frames)
        sys.exit(1)


if __name__ == "__main__":
    main()
