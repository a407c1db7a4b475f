"""Write a function, run its check in a sandbox, and show the model the error until the check passes.

python examples/code_check.py "add(a, b), which returns the sum" --check "assert add(2, 3) == 5"
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import headway
from common import Model, connect, options
from headway.client import Run

APP = "code-check"
_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_MEMORY = 512 << 20  # bytes
_LONGEST = 300  # characters of an error shown to the model


@dataclass(frozen=True)
class Result:
    """The code of the last attempt, and the error of its check; None = the check passed."""

    code: str
    attempts: int
    error: str | None


def solve(model: Model, run: Run, task: str, check: str, attempts: int, seconds: float) -> Result:
    """Return code that passes the check, or the last attempt's.

    Units of the run: `write`, and `check` outside the LLM. seconds: time limit of one check.
    """
    question = f"Write the Python function {task}. Answer with the code only."
    asked, result = question, Result("", 0, "nothing was written")
    for attempt in range(1, attempts + 1):
        code = code_of(model.ask(asked, run.unit("write"), max_tokens=160))
        with run.outside("check", backend="python-sandbox"):
            error = sandbox(f"{code}\n{check}\n", seconds)
        result = Result(code, attempt, error)
        if error is None:
            break
        asked = f"{question}\n\nThis code is wrong:\n{code[:600]}\n\nIts check says: {error}"
    return result


def code_of(answer: str) -> str:
    """Return the first block of code in an answer, or all of it if there is none."""
    block = _BLOCK.search(answer)
    return (block.group(1) if block else answer).strip()


def sandbox(code: str, seconds: float) -> str | None:
    """Run code in a separate Python process and return its error, or None if it succeeds.

    The process does not share this one's modules and environment, and its time, memory and file size are
    limited. It is not confined otherwise: use a container for code from a model that you do not trust.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", code],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                preexec_fn=_limit,
            )
        except subprocess.TimeoutExpired:
            return f"timed out after {seconds:g} s"
        except ValueError:
            return "a null byte in the code"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1][:_LONGEST] if lines else f"exit status {done.returncode}"


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def main() -> None:
    """Print the code; exit with 1 if its check fails."""
    parser = options(__doc__ or "")
    parser.add_argument("task", nargs="?", default="add(a, b), which returns the sum of a and b")
    parser.add_argument("--check", default="assert add(2, 3) == 5", help="Python that raises if it is wrong")
    parser.add_argument("--attempts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="time limit of one check")
    args = parser.parse_args()
    model = connect(args.base_url, args.api_key, args.model)
    with headway.run(APP, base_url=args.base_url, api_key=args.api_key, deadline=args.deadline) as run:
        result = solve(model, run, args.task, args.check, args.attempts, args.seconds)
    verdict = "passed" if result.error is None else f"failed: {result.error}"
    print(f"Run {run.id}: attempt {result.attempts} of {args.attempts} {verdict}\n{result.code}")
    sys.exit(result.error is not None)


if __name__ == "__main__":
    main()
