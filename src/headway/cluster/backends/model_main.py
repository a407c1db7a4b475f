"""The worker process of a model backend: loads a model, then calls it for each line of JSON on its input.

`python -m headway.cluster.backends.model_main module:function OPTIONS OUTPUT_BYTES`. Output that
the model's code prints goes to standard error, so that it cannot be mistaken for an answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from headway.plugins import attribute

_PR_SET_PDEATHSIG = 1


def answer(call: Callable[[Any], Any], line: bytes, most: int) -> bytes:
    """Call the model and return its answer, or its error, as a line of JSON."""
    try:
        output = call(json.loads(line)["input"])
    except (ValueError, TypeError, LookupError) as error:
        return json.dumps({"refused": f"{type(error).__name__}: {error}"[:500]}).encode()
    except Exception as error:
        return json.dumps({"failed": f"{type(error).__name__}: {error}"[:500]}).encode()
    try:
        data = json.dumps({"output": output}, default=_plain, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        return json.dumps({"failed": f"its output is not JSON: {error}"[:500]}).encode()
    if len(data) > most:
        return json.dumps({"failed": f"its output has {len(data)} bytes, more than {most}"}).encode()
    return data


def _plain(value: Any) -> Any:
    """Convert arrays and their scalars to JSON types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def main() -> None:
    """Load the model, report ready, and answer until the gateway closes the pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    load, options, most = sys.argv[1:]
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        call = attribute(load)(**json.loads(options))
        out.write(b"ready\n")
        out.flush()
        for line in sys.stdin.buffer:
            out.write(answer(call, line, int(most)) + b"\n")
            out.flush()


if __name__ == "__main__":
    main()
