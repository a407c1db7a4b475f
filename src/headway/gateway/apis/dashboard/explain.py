"""Explains late requests for the dashboard, by running `headway explain`.

It runs in a separate process: it reads the journal and computes for a second or more, which the gateway's
requests should not notice, and the gateway imports nothing of what explains.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

from headway.errors import RequestError

_SECONDS = 60.0  # for one story
_SLACK_S = 60.0  # of the journal before a request arrived: it may go by another reading of the clock
_NICE = 10  # what serves goes first
_REFUSED = 2  # exit status of a command that says what is wrong
log = logging.getLogger("headway.gateway")


class Explainer:
    """Explains one request at a time from the journal in a folder, None = there is none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._lock = folder, asyncio.Lock()

    async def story(self, id: str, since: float) -> dict[str, Any]:
        """Return a request's story as JSON has it, without the path of the journal.

        RequestError for a request that is not in it.

        since: an instant before its arrival, by the machine's clock.
        """
        if self._folder is None:
            raise RequestError("This gateway keeps no journal.", "Set journal.dir.", status=404)
        if self._lock.locked():
            raise RequestError(
                "Another request is being explained.",
                "Try again in a few seconds.",
                status=503,
                kind="server_error",
                code="busy",
            )
        start = datetime.fromtimestamp(since - _SLACK_S, UTC).isoformat()
        async with self._lock:
            status, stdout, stderr = await _run(
                "explain", "--json", "--journal", str(self._folder), "--since", start, "--", id
            )
        if status == 0:
            story: dict[str, Any] = json.loads(stdout)
            del story["run"]
            return story
        fields = dict(line.split(":", 1) for line in stderr.decode(errors="replace").splitlines() if ":" in line)
        if status == _REFUSED and "error" in fields:
            hint = "The id is in the answer's x-request-id; the journal has it some seconds after the end."
            message = fields["error"].strip().replace(str(self._folder), "its folder")
            raise RequestError(message, hint, status=404, param="id")
        log.error("headway explain ended with status %s: %s", status, stderr[-2000:].decode(errors="replace"))
        raise RequestError(
            "The request cannot be explained.", "The gateway's log says why.", status=500, kind="server_error"
        )


async def _run(*args: str) -> tuple[int | None, bytes, bytes]:
    """Run a `headway` command; return its status, None when it took too long, and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headway.cli",
        *args,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | {"COLUMNS": "10000", "NO_COLOR": "1"},  # an error is one line
    )
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    try:
        async with asyncio.timeout(_SECONDS):
            stdout, stderr = await process.communicate()
        return process.returncode, stdout, stderr
    except TimeoutError:
        return None, b"", b"it took too long"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
