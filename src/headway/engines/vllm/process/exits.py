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
# May be gone at the next start, even with the same text: other processes hold the memory or the port.
_TRANSIENT = re.compile(
    r"memory|OSError|no space|in use|connect(ion|ed|error|timeout| to)|unreachable|time[sd]? ?out|HTTPError"
    r"|name resolution|\b(CUDA|HIP|NCCL|gloo)\b",
    re.IGNORECASE,
)


class EngineEnded(EngineError):
    """A vLLM process has ended. cause: its error, if another start is expected to fail with the same one."""

    cause: str | None = None


class BadArguments(EngineEnded):
    """vLLM refuses its arguments, so that another start would fail, too."""


def exit_error(name: str, code: int | None, log: str, *, tail: str, offline: bool, where: str) -> EngineEnded:
    """Return the error of an engine that has ended.

    code: exit status. log: the end of its log; tail: the last lines of that. where: path of the whole log.
    offline: its model is on this disk. If not, the download of a configuration may have failed.
    """
    error = last_error(log)
    said = "" if error is None else f"Its last error: {error}\n"
    problem = f"The engine {name} ended with exit code {code}. {said}Its last lines:\n{tail}\n"
    begun = any(line.startswith(_CORE) for line in log.splitlines())
    wrong = offline and not begun and error is not None and _WRONG.match(error)
    if code == _USAGE or wrong:
        hint = f"Correct its settings in [[engines]], and start Headway again. Its log is {where}."
        return BadArguments(problem, hint)
    found = EngineEnded(problem, f"The whole log is in {where}.")
    found.cause = None if error is None or _TRANSIENT.search(error) else error
    return found


def last_error(log: str) -> str | None:
    """Return the last error in a log, apart from those that only point to another one; None = there is none."""
    errors = [error for error in _errors(log) if not _POINTER.search(error)]
    return errors[-1] if errors else None


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
