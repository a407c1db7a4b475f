"""Requests as load generators recorded them: results of `vllm bench serve` and of guidellm, as a `Trace`.

`vllm bench serve --save-result --save-detailed` writes start_times, input_lens and output_lens; guidellm
writes benchmarks[].requests.successful[] with request_start_time, prompt_tokens and output_tokens, of which
the largest benchmark of a sweep is taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import ConfigError
from headway.simulate.workload import traces
from headway.simulate.workload.traces import Trace

_VLLM = ("start_times", "input_lens", "output_lens")
_FIX = "Give the file of vllm bench serve --save-result --save-detailed, or of guidellm --output-path NAME.json."


def read(path: str | Path) -> Trace:
    """Read a trace file (`traces.read`) or a load generator's results (.json). ConfigError names the fix."""
    file = traces.find(path)
    if file is None or file.suffix != ".json":
        return traces.read(path)
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", _FIX) from error
    if isinstance(content, dict) and "benchmarks" in content:
        columns = _guidellm(content, file)
    else:
        columns = _vllm(content, file)
    return _trace(columns, file)


def _vllm(content: Any, file: Path) -> Sequence[Sequence[Any]]:
    missing = [name for name in _VLLM if not (isinstance(content, dict) and content.get(name))]
    if missing:
        raise ConfigError(f"{file} has no {', '.join(missing)}.", _FIX)
    return [content[name] for name in _VLLM]


def _guidellm(content: dict[str, Any], file: Path) -> Sequence[Sequence[Any]]:
    try:
        runs = [benchmark["requests"]["successful"] for benchmark in content["benchmarks"]]
        largest = max(runs, key=len)
        rows = [
            (one.get("request_start_time", one.get("start_time")), one["prompt_tokens"], one["output_tokens"])
            for one in largest
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{file} has no requests as guidellm writes them: {error!r}.", _FIX) from error
    return list(zip(*rows, strict=True))


def _trace(columns: Sequence[Sequence[Any]], file: Path) -> Trace:
    """Return the requests that were answered, by arrival."""
    try:
        at, prompt, output = (np.array(column, float) for column in columns)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file} has columns that are not numbers of requests: {error}.", _FIX) from error
    if not at.size == prompt.size == output.size:
        raise ConfigError(f"{file} has {at.size} arrivals for {prompt.size} and {output.size} lengths.", _FIX)
    whole = np.isfinite(at) & (prompt >= 1) & (output >= 1)
    if not whole.any():
        raise ConfigError(f"{file} has no request that was answered.", "Repeat the run that wrote it.")
    order = np.argsort(at[whole], kind="stable")
    at, prompt, output = (column[whole][order] for column in (at, prompt, output))
    return Trace(at - at[0], prompt.astype(np.int64), output.astype(np.int64))
