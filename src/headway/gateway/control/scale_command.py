"""Runs a command of the operator's whenever a model needs another number of engines (docs/scale.md)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from subprocess import DEVNULL, STDOUT

from headway.config import Scale
from headway.errors import EngineError
from headway.gateway import tasks

_POLL_S, _LONGEST_S = 1.0, 60.0  # between two looks at the number; doubled with each failure
_LIMIT_S = 300.0  # for a command
_TAIL = 1000  # bytes of its output that are logged
log = logging.getLogger("headway.gateway")
Wanted = Callable[[], Mapping[str, int]]


def commands(scale: Mapping[str, Scale], wanted: Wanted) -> list[tasks.Loop]:
    """Return what runs the commands of models. wanted: returns the numbers of engines, by model, as far as known."""
    return [partial(_follow, model, one.command, wanted) for model, one in scale.items() if one.command is not None]


async def _follow(model: str, command: Sequence[str], wanted: Wanted) -> None:
    """Run a model's command for each new number until it has succeeded with that; one at a time, until cancelled."""
    done, pause = None, _POLL_S
    while True:
        await asyncio.sleep(pause)
        number = wanted().get(model)
        if number in (None, done):
            pause = _POLL_S
            continue
        words = [word.replace("{model}", model).replace("{wanted}", str(number)) for word in command]
        try:
            await _run(words)
        except EngineError as error:
            pause = min(2 * pause, _LONGEST_S)
            log.error("%s needs %s engines: %s It is run again in %g s.", model, number, error.message, pause)
        else:
            done, pause = number, _POLL_S
            log.info("%s needs %s engines: %s has exited with status 0", model, number, words[0])


async def _run(words: Sequence[str]) -> None:
    """Run a command to its end; EngineError unless it succeeds. Ended early, it is killed with its process group."""
    with tempfile.TemporaryFile() as out:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=DEVNULL, stdout=out, stderr=STDOUT, start_new_session=True
            )
        except OSError as error:
            raise EngineError(f"{words[0]} cannot be run: {error.strerror}.", "Correct scale.command.") from error
        try:
            async with asyncio.timeout(_LIMIT_S):
                status = await process.wait()
        except TimeoutError:
            raise EngineError(f"{words[0]} has not ended within {_LIMIT_S:g} s.", "Look into it.") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status:
            out.seek(max(out.seek(0, os.SEEK_END) - _TAIL, 0))
            said = out.read().decode(errors="replace").strip()
            raise EngineError(f"{words[0]} has exited with status {status} ({said or 'no output'}).", "Look into it.")
