"""When did requests really come?

Recorded arrivals with their lengths, read from Azure's CSV (timestamp_s, prompt_tokens, output_tokens) and
Mooncake's JSONL (timestamp_ms, input_length, output_length), plain or gzipped. A file that cannot be trusted
(missing column, negative or NaN value, unsorted times, nothing in it) is refused with its line and the mend.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from headway.errors import ConfigError
from headway.types import Floats, Ints

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns of equal length: at = seconds from the first request (sorted), and tokens in and out."""

    at: Floats
    prompt_tokens: Ints
    output_tokens: Ints


@dataclass(frozen=True, slots=True)
class _Format:
    time: str
    per_second: float
    prompt: str
    output: str


_FORMATS = {
    ".csv": _Format("timestamp_s", 1.0, "prompt_tokens", "output_tokens"),
    ".jsonl": _Format("timestamp_ms", 1000.0, "input_length", "output_length"),
}


def arrivals(path: str | Path, *, limit: int | None = None) -> Floats:
    """Return the first `limit` arrivals of a trace in seconds from its first; errors as `read`."""
    return read(path, limit=limit).at


def read(path: str | Path, *, limit: int | None = None) -> Trace:
    """Read the first `limit` rows of a trace file, or of `$HEADWAY_DATA/arrivals/NAME.*` for a bare name.

    Raises ConfigError, naming file, line and mend, when the file is missing, damaged, empty or not sorted.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"A trace cannot be cut to {limit} requests.", "Give a limit of 1 or more.")
    file = locate(path)
    form = _format(file)
    rows = [_numbers(row, form, file, line) for line, row in islice(_rows(file), limit)]
    if not rows:
        raise ConfigError(f"{file} has no rows.", f"It needs one request per row: {_columns(form)}.")
    table = np.array(rows, float)
    return Trace(table[:, 0] - table[0, 0], table[:, 1].astype(np.int64), table[:, 2].astype(np.int64))


def locate(path: str | Path) -> Path:
    """Return the file of a path or of a data-set name; ConfigError when there is none."""
    file = Path(path)
    if file.exists():
        return file
    data = os.environ.get("HEADWAY_DATA")
    if data and file.name == str(path):
        found = sorted(Path(data, "arrivals").glob(f"{path}.*"))
        if found:
            return found[0]
    raise ConfigError(
        f"There is no trace {path}.",
        "Give the path of a .csv or .jsonl file (or .gz of one), or set HEADWAY_DATA and give a name"
        " from its arrivals folder.",
    )


def _format(file: Path) -> _Format:
    suffix = Path(file.name.removesuffix(".gz")).suffix
    if suffix not in _FORMATS:
        known = "; ".join(f"*{end} with {_columns(form)}" for end, form in _FORMATS.items())
        raise ConfigError(f"{file} is not a trace by its name.", f"Known, plain or with .gz: {known}.")
    return _FORMATS[suffix]


def _columns(form: _Format) -> str:
    return f"{form.time}, {form.prompt}, {form.output}"


def _rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line in the file, row); what the disk, gzip or the text refuses is a ConfigError."""
    kind = _csv_rows if ".csv" in file.suffixes else _jsonl_rows
    try:
        with _open(file) as text:
            yield from _sorted(kind(text, file), file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", "Fetch the file again.") from error


def _open(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8", newline="")
    return file.open(encoding="utf-8", newline="")


def _csv_rows(text: IO[str], file: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line, row) of a CSV file with a header."""
    reader = csv.DictReader(text)
    for row in reader:
        yield reader.line_num, row


def _jsonl_rows(text: IO[str], file: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line, row) of a file with one JSON object per line; ConfigError for anything else."""
    for line, content in enumerate(text, 1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{file} line {line} is not a JSON object.", "Mend or remove that line.")
        yield line, row


def _sorted(rows: Iterator[tuple[int, Row]], file: Path) -> Iterator[tuple[int, Row]]:
    form, before = _format(file), -math.inf
    for line, row in rows:
        now = _number(row, form.time, file, line)
        if now < before:
            raise ConfigError(
                f"{file} line {line} is earlier ({now:g}) than the row before it ({before:g}).",
                f"Sort the file by {form.time}.",
            )
        before = now
        yield line, row


def _numbers(row: Row, form: _Format, file: Path, line: int) -> tuple[float, float, float]:
    at, prompt, output = (_number(row, name, file, line) for name in (form.time, form.prompt, form.output))
    return at / form.per_second, prompt, output


def _number(row: Row, name: str, file: Path, line: int) -> float:
    value = row.get(name)
    if value is None:
        has = ", ".join(str(key) for key in row) or "nothing"
        raise ConfigError(f"{file} line {line} has no {name} (it has {has}).", f"Name that column {name}.")
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(
            f"{file} line {line} has {name} = {value!r}.", "Give a number of 0 or more, or remove the row."
        )
    return number
