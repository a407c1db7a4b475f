"""Why a vLLM process has ended, by the error in its log, and whether another start would fail in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from headway.errors import EngineError

_USAGE = 2  # vLLM's exit status for a command line that it cannot read
# What vLLM's logger and its processes put before a line.
_LOG_PREFIX = re.compile(r"^(?:\([^)]*\bpid=\d+\) ?)?(?:ERROR \S+ \S+ \[[^\]]*\] ?)?")
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*: |[\w. ]+: error: ")
_INVALID, _FINDING = " validation error", re.compile(r"\S*$|  \S")  # pydantic's; fields and findings follow
_POINTER = re.compile(r"root cause|^(\w+\.)*EngineDeadError")
_CORE = "(EngineCore"  # begins the lines of vLLM's engine core process
# Raised before the engine core has begun, and so before memory is allocated: the arguments are wrong.
_WRONG = re.compile(r"(\w+\.)*(ValueError|\w*ValidationError|KeyError|TypeError|NotImplementedError|AssertionError): ")


class BadArguments(EngineError):
    """vLLM refuses its arguments, so that another start would fail, too."""


def exit_error(name: str, code: int | None, log: str, *, tail: str, offline: bool, where: str) -> EngineError:
    """Return the error of an engine that has ended.

    code: exit status. log: the end of its log; tail: the last lines of that. where: path of the whole log.
    offline: its model is on this disk. If not, the download of a configuration may have failed.
    """
    errors = list(_errors(log)) if code is not None and code > 0 else []  # else it was killed, whatever it wrote
    own = [error for error in errors if not _POINTER.search(error)]
    last_error = f"Its last error: {own[-1]}\n" if own else ""
    problem = f"The engine {name} ended with exit code {code}. {last_error}Its last lines:\n{tail}\n"
    begun = len(own) < len(errors) or any(line.startswith(_CORE) for line in log.splitlines())
    if code == _USAGE or (offline and not begun and own and _WRONG.match(own[-1])):
        hint = f"Correct its settings in [[engines]], and start Headway again. Its log is {where}."
        return BadArguments(problem, hint)
    return EngineError(problem, f"The whole log is in {where}.")


def _errors(log: str) -> Iterator[str]:
    """Yield the last line of each traceback and errors of the command line, with the details that pydantic adds."""
    inside, lines = False, [_LOG_PREFIX.sub("", line) for line in log.splitlines()]
    for i, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif _ERROR.match(line) and (inside or ": error: " in line):
            inside = False
            more = takewhile(_FINDING.match, lines[i + 1 :]) if _INVALID in line else ()
            yield " ".join([line, *map(str.strip, more)])
