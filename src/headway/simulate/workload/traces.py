"""Recorded arrivals and lengths, read from files.

Formats, plain or gzipped: CSV (timestamp_s, prompt_tokens, output_tokens and, if there is one, class; also by
the names of Azure's files or plainly arrival, input, output) and Mooncake's JSONL (timestamp_ms or timestamp,
input_length, output_length and, if there are any, hash_ids: one for each 512 tokens of the prompt, equal where
these and all before them are); lengths alone also from a CSV without times and from ShareGPT's JSON as `vllm
bench serve` takes it. A file with a missing column, a negative or NaN value, unsorted times or no rows is
refused with an error that names the line and the fix. `result_files.py` reads results of load generators.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from headway.errors import ConfigError
from headway.prefix import Prefix
from headway.types import Bools, Floats, Ints

Row = Mapping[str, Any]
Count = Callable[[str], int]  # a tokenizer: text -> tokens

_CHARS_PER_TOKEN = 4  # the usual rule of thumb for English text
_MOST_TOKENS = 10**9  # longer than any context: a number of something else


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns of equal length.

    at: seconds from the first request, sorted.
    tiers: each request's class, () = the file names none.
    prefixes: what each prompt has in common with others, () = the file does not say.
    """

    at: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    tiers: tuple[str, ...] = ()
    prefixes: tuple[Prefix | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Columns of equal length, in tokens, in the file's order.

    about: how many requests of which file, and what was estimated or left out, for reports.
    """

    prompt_tokens: Ints
    output_tokens: Ints
    about: str


@dataclass(frozen=True, slots=True)
class _Format:
    time: str
    per_second: float
    prompt: str
    output: str


# Other names of columns -> ours
_NAMES = {
    "arrival": "timestamp_s",
    "arrival_s": "timestamp_s",
    "TIMESTAMP": "timestamp_s",
    "input": "prompt_tokens",
    "output": "output_tokens",
    "ContextTokens": "prompt_tokens",
    "GeneratedTokens": "output_tokens",
    "timestamp": "timestamp_ms",
    "tier": "class",
}
_FORMATS = {
    ".csv": _Format("timestamp_s", 1.0, "prompt_tokens", "output_tokens"),
    ".jsonl": _Format("timestamp_ms", 1000.0, "input_length", "output_length"),
}


def arrivals(path: str | Path, *, limit: int | None = None) -> Floats:
    """Return the first `limit` arrivals of a trace in seconds from its first; errors as `read`."""
    return read(path, limit=limit).at


def read(path: str | Path, *, limit: int | None = None) -> Trace:
    """Read the first `limit` rows of a trace file, or of `$HEADWAY_DATA/arrivals/NAME.*` for a bare name.

    Raises ConfigError, naming file, line and fix, when the file is missing, damaged, empty or not sorted.
    """
    _check_limit(limit)
    file = locate(path)
    form = _format(file)
    rows = list(islice(_sorted(_rows(file), form, file), limit))
    table = [(at, *_pair(row, form, file, line)) for line, at, row in rows]
    at, prompt, output = _columns_of(table, file, f"{form.time}, {form.prompt}, {form.output}")
    classes = [row.get(_named(row, "class")) for _, _, row in rows]
    tiers = tuple(str(one) for one in classes if one)
    if tiers and len(tiers) < len(rows):
        raise ConfigError(f"{file} has a class in some rows only.", "Give it in all of them or in none.")
    sizes = prompt.astype(np.int64)
    hashes = [_hashes(row, size, file, line) for (line, _, row), size in zip(rows, sizes.tolist(), strict=True)]
    try:
        prefixes = tuple(prefixes_of(hashes, sizes.tolist())) if any(hashes) else ()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", error.hint) from error
    return Trace((at - at[0]) / form.per_second, sizes, output.astype(np.int64), tiers, prefixes)


def read_lengths(path: str | Path, *, limit: int | None = None, count: Count | None = None) -> Lengths:
    """Read the lengths of the first `limit` requests of a file, or of a bare name's file in $HEADWAY_DATA.

    Takes what `read` takes with or without its times, and ShareGPT's .json: a list of {conversations: [{from,
    value}, ...]}, of which the first two turns are a prompt and its answer; conversations of one turn are left
    out. count: tokens of a text (default: its characters / 4, and `about` says "estimated"); only JSON needs it.
    Raises ConfigError as `read`.
    """
    _check_limit(limit)
    file = locate(path, ("lengths", "arrivals"))
    if Path(file.name.removesuffix(".gz")).suffix == ".json":
        return _conversations(file, limit, count)
    form = _format(file)
    table = [_pair(row, form, file, line) for line, row in islice(_rows(file), limit)]
    columns = [column.astype(np.int64) for column in _columns_of(table, file, f"{form.prompt}, {form.output}")]
    return Lengths(columns[0], columns[1], f"{len(table):,} requests of {file.name}")


def find(path: str | Path, folders: tuple[str, ...] = ("arrivals",)) -> Path | None:
    """Return the file of a path, or of a bare name in those folders of $HEADWAY_DATA; None = none there."""
    file = Path(path)
    if file.is_file():
        return file
    data = os.environ.get("HEADWAY_DATA")
    if not data or file.name != str(path):
        return None
    found = (sorted(Path(data, folder).glob(f"{path}.*")) for folder in folders)
    return next((files[0] for files in found if files), None)


def locate(path: str | Path, folders: tuple[str, ...] = ("arrivals",)) -> Path:
    """Return what `find` finds; ConfigError when there is none."""
    file = find(path, folders)
    if file is None:
        raise ConfigError(
            f"There is no trace {path}.",
            "Give the path of a .csv or .jsonl file (or .gz of one), or set HEADWAY_DATA and give a name"
            f" from its {' or '.join(folders)} folder.",
        )
    return file


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ConfigError(f"A trace cannot be cut to {limit} requests.", "Give a limit of 1 or more.")


def _columns_of(table: list[tuple[Any, ...]], file: Path, needs: str) -> list[Floats]:
    if not table:
        raise ConfigError(f"{file} has no rows.", f"It needs one request per row: {needs}.")
    return list(np.array(table, float).T)


def _format(file: Path) -> _Format:
    suffix = Path(file.name.removesuffix(".gz")).suffix
    if suffix not in _FORMATS:
        known = "; ".join(f"*{end} with {f.time}, {f.prompt}, {f.output}" for end, f in _FORMATS.items())
        raise ConfigError(f"{file} is not a trace by its name.", f"Known, plain or with .gz: {known}.")
    return _FORMATS[suffix]


def _rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line in the file, row); what the disk, gzip or the text refuses is a ConfigError."""
    kind = _csv_rows if ".csv" in file.suffixes else _jsonl_rows
    try:
        with _open(file) as text:
            yield from kind(text, file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", "Fetch the file again.") from error


def _named(row: Row, name: str) -> str:
    """Return the row's own name of one of our columns; ours where it has none."""
    theirs = (other for other, ours in _NAMES.items() if ours == name and other in row)
    return name if name in row else next(theirs, name)


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
            raise ConfigError(f"{file} line {line} is not a JSON object.", "Correct or remove that line.")
        yield line, row


def _sorted(rows: Iterator[tuple[int, Row]], form: _Format, file: Path) -> Iterator[tuple[int, float, Row]]:
    """Yield (line, time, row); ConfigError where time goes backwards."""
    before = -math.inf
    for line, row in rows:
        now = _number(row, form.time, file, line)
        if now < before:
            raise ConfigError(
                f"{file} line {line} is earlier ({now:g}) than the row before it ({before:g}).",
                f"Sort the file by {_named(row, form.time)}.",
            )
        before = now
        yield line, now, row


def _pair(row: Row, form: _Format, file: Path, line: int) -> tuple[float, float]:
    return _tokens(row, form.prompt, file, line), _tokens(row, form.output, file, line)


def _tokens(row: Row, name: str, file: Path, line: int) -> float:
    number = _number(row, name, file, line)
    if number != int(number) or number > _MOST_TOKENS:
        own = _named(row, name)
        raise ConfigError(
            f"{file} line {line} has {own} = {row[own]!r}, which is not a number of tokens.",
            f"Give a whole number of at most {_MOST_TOKENS:,}.",
        )
    return number


def _hashes(row: Row, prompt: int, file: Path, line: int) -> list[int]:
    """Return the hashes of a prompt's blocks, [] = the row has none."""
    hashes = row.get("hash_ids") or []
    if not (isinstance(hashes, list) and all(type(one) is int for one in hashes)):
        raise ConfigError(
            f"{file} line {line} has hash_ids that are not a list of integers.", "Give a list, or leave it out."
        )
    if hashes and abs(BLOCK * len(hashes) - prompt) >= BLOCK:
        raise ConfigError(
            f"{file} line {line} has {len(hashes)} hash_ids for a prompt of {prompt:,} tokens.",
            f"Give {-(-prompt // BLOCK)}, one per {BLOCK} tokens or part of them, or leave them out.",
        )
    return hashes


def _number(row: Row, name: str, file: Path, line: int) -> float:
    name = _named(row, name)
    value = row.get(name)
    if value is None:
        has = ", ".join(str(key) for key in row) or "nothing"
        raise ConfigError(f"{file} line {line} has no {name} (it has {has}).", f"Name that column {name}.")
    if name == "TIMESTAMP" and isinstance(value, str):
        with suppress(ValueError):
            value = datetime.fromisoformat(value).timestamp()
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(
            f"{file} line {line} has {name} = {value!r}.", "Give a number of 0 or more, or remove the row."
        )
    return number


# ---- ShareGPT's JSON


def _conversations(file: Path, limit: int | None, count: Count | None) -> Lengths:
    """Read prompt and answer of each conversation, as vLLM's ShareGPTDataset does (first two turns)."""
    entries = _json(file)
    turns = (_turns(entry, file, number) for number, entry in enumerate(entries, 1))
    pairs = list(islice((pair for pair in turns if pair is not None), limit))
    if not pairs:
        raise ConfigError(f"{file} has no conversation with an answer.", "Give ShareGPT's JSON itself.")
    counted = count or _estimate
    table = np.array([[counted(text) for text in pair] for pair in pairs], np.int64)
    return Lengths(table[:, 0], table[:, 1], _about(file, len(pairs), len(entries), limit, count))


def _about(file: Path, used: int, there: int, limit: int | None, count: Count | None) -> str:
    told = f"{used:,} conversations of {file.name}"
    if used != limit and used < there:
        told += f", {there - used:,} without an answer left out"
    return told if count else f"{told}, tokens estimated as characters / {_CHARS_PER_TOKEN}"


def _json(file: Path) -> list[Any]:
    fix = "It needs a list of {conversations: [{from, value}, ...]}, as ShareGPT's JSON is."
    try:
        with _open(file) as text:
            content = json.load(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} line {error.lineno} is not JSON: {error.msg}.", fix) from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", "Fetch the file again.") from error
    if not isinstance(content, list):
        raise ConfigError(f"{file} holds no list of conversations.", fix)
    return content


def _turns(entry: Any, file: Path, number: int) -> tuple[str, str] | None:
    """Return (prompt, answer) of conversation `number`, None when it has no answer."""
    try:
        texts = [turn["value"] for turn in entry["conversations"][:2]]
    except (KeyError, TypeError):
        texts = [None]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{file} conversation {number} has no conversations: [{{from, value}}, ...].",
            "Correct or remove that entry.",
        )
    return (texts[0], texts[1]) if len(texts) == 2 else None


def _estimate(text: str) -> int:
    return -(-len(text) // _CHARS_PER_TOKEN)


BLOCK = 512  # tokens of a block in Mooncake's traces


def prefixes_of(hashes: Sequence[Sequence[int]], tokens: Sequence[int], block: int = BLOCK) -> list[Prefix | None]:
    """Return the prefix of each prompt; None for one without hashes.

    hashes: of each prompt's blocks; one stands for its block and all blocks before it. The last block may be
        shorter. tokens: of each prompt. block: tokens of a block.
    Raises ConfigError for hashes of single blocks.
    """
    numbers: dict[int, int] = {}
    blocks = np.array([numbers.setdefault(hash, len(numbers)) for one in hashes for hash in one], np.int64)
    ends = np.cumsum([len(one) for one in hashes])
    begins = np.split(_chain_begins(blocks, ends), ends[:-1])
    prompts = zip(np.split(blocks, ends[:-1]), begins, tokens, strict=True)
    known: dict[tuple[int, int], Prefix] = {}
    return [_prefix(mine, np.flatnonzero(first), size, block, known) for mine, first, size in prompts]


def _chain_begins(blocks: Ints, ends: Ints) -> Bools:
    """Tell which blocks begin a chain: those at the beginning of a prompt, and those behind a fork."""
    before = np.concatenate([[-1], blocks])[:-1]
    before[ends[ends < blocks.size]] = -1
    links = np.unique(np.stack([before, blocks], axis=1), axis=0)
    if len(links) > np.unique(blocks).size:
        raise ConfigError(
            "One of the hash_ids follows different blocks.",
            "Give hashes that stand for a block and all blocks before it.",
        )
    parents, children = np.unique(links[:, 0], return_counts=True)
    return np.asarray((before < 0) | np.isin(before, parents[children > 1]))


def _prefix(blocks: Ints, begins: Ints, tokens: int, block: int, known: dict[tuple[int, int], Prefix]) -> Prefix | None:
    """Return a prompt's prefix: chains that are named by their first blocks, each up to the next fork.

    known: pieces of all prompts by first block and length. A deep prefix shares most of its pieces.
    """
    found: Prefix | None = None
    for begin, end in pairwise([*begins.tolist(), blocks.size]):
        first, length = int(blocks[begin]), min(end * block, tokens)
        if (first, length) not in known:
            known[first, length] = Prefix(f"block {first}", length, parent=found)
        found = known[first, length]
    return found
