"""Run folders: a recorded simulation on disk.

`run.json` says what was simulated, `workload.npz` holds the requests, `outcome.npz` what became of them and
`recording.npz` what every engine did in every iteration. Nothing is pickled, so a folder from elsewhere is
safe to open.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.prefix import Prefix
from headway.simulate.instance import InstanceSpec
from headway.simulate.outcome import Outcome
from headway.simulate.record.recorder import LOGS, Recording
from headway.simulate.workload.traffic import Workload

HEADER = "run.json"
VERSION = 4
_PARTS = ("workload", "outcome", "recording")


@dataclass(frozen=True, slots=True)
class Machine:
    """The fields of an instance that a reader of its run needs."""

    id: str
    model: str
    blocks: int
    block_size: int
    max_running: int
    slots: int
    budget: int

    @classmethod
    def of(cls, spec: InstanceSpec) -> Machine:
        it = spec.instance
        return cls(it.id, it.model, it.blocks_total, it.block_size, it.max_running, spec.slots, spec.budget)


@dataclass(frozen=True, slots=True)
class Header:
    """What was simulated, and how to do it again."""

    recipe: str
    fleet: tuple[Machine, ...]
    seed: int
    command: str
    about: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A recorded run.

    began: of a real one, the instant from which its seconds count; None = it is simulated.
    endings: of requests that have no end, what became of them, in words.
    """

    header: Header
    workload: Workload
    outcome: Outcome
    recording: Recording
    began: float | None = None
    endings: Mapping[int, str] = field(default_factory=dict)

    def name(self, request: int) -> str:
        """Return the id of a request."""
        return self.workload.ids[request] if self.workload.ids else f"r{request}"


def save(run: Run, folder: str | Path) -> Path:
    """Write a run folder, its header last, so that a folder with a header is whole. Return the folder."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / HEADER).unlink(missing_ok=True)
    for name in _PARTS:
        part = getattr(run, name)
        columns = {entry.name: _column(getattr(part, entry.name)) for entry in fields(part)}
        np.savez_compressed(place / f"{name}.npz", **columns)  # type: ignore[arg-type]  # numpy's own stub
    text = json.dumps({"version": VERSION, "simulated": True} | asdict(run.header), indent=1)
    half = place / f"{HEADER}.part"
    half.write_text(text + "\n", encoding="utf-8")
    os.replace(half, place / HEADER)
    return place


def load(folder: str | Path) -> Run:
    """Read a run folder. ConfigError when it is none, naming those below it, or when it is damaged."""
    place = Path(folder)
    if not (place / HEADER).is_file():
        raise ConfigError(f"{folder} is not the folder of a run.", _hint(place))
    try:
        header = _header(json.loads((place / HEADER).read_text("utf-8")), place)
        workload, outcome, recording = (_columns(place / f"{name}.npz") for name in _PARTS)
        return Run(
            header, _workload(workload), _outcome(outcome), Recording(**{name: recording[name] for name in LOGS})
        )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"The run in {folder} is damaged: {error}.", "Simulate it again.") from error


def found(folder: Path) -> list[Path]:
    """Return the run folders in or below a folder, at most two levels down, by name."""
    return sorted(file.parent for depth in ("", "*/", "*/*/") for file in folder.glob(f"{depth}{HEADER}"))


def _hint(place: Path) -> str:
    """Name the runs below the folder, or beside it when its name is wrong."""
    near = next((here for here in (place, *place.parents[:2]) if here.is_dir()), None)
    runs = ", ".join(str(run) for run in found(near)[:5]) if near else ""
    return f"Use {runs}." if runs else "Make one with headway simulate --out DIR: it lies in DIR/runs/RECIPE."


def _header(data: dict[str, Any], place: Path) -> Header:
    if data.get("version") != VERSION:
        raise ConfigError(
            f"{place} was written by another version of Headway ({data.get('version')!r}, not {VERSION}).",
            "Simulate it again.",
        )
    fleet = tuple(Machine(**machine) for machine in data["fleet"])
    return Header(data["recipe"], fleet, data["seed"], data["command"], data["about"])


def _columns(file: Path) -> dict[str, NDArray[Any]]:
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _column(values: Any) -> NDArray[Any]:
    """Return a field as an array; prefixes become JSON, since files with objects in them are not read."""
    if isinstance(values, tuple) and not all(isinstance(value, str) for value in values):
        return np.frombuffer(_packed(values), np.uint8)
    return np.asarray(values)


def _packed(prefixes: Sequence[Prefix | None]) -> bytes:
    """Return prefixes as JSON: [pieces, number of each prompt's piece], each piece with its parent's number, 0 = none.

    A deep prefix shares most pieces with others, so each is there once.
    """
    numbers: dict[tuple[str, int, bool, int], int] = {}

    def number(prefix: Prefix | None) -> int:
        chain, found = list[Prefix](), 0
        while prefix is not None:
            chain.append(prefix)
            prefix = prefix.parent
        for one in reversed(chain):
            found = numbers.setdefault((one.id, one.tokens, one.answer, found), len(numbers) + 1)
        return found

    rows = [number(prefix) for prefix in prefixes]
    return json.dumps([list(numbers), rows]).encode()


def _unpacked(data: bytes) -> tuple[Prefix | None, ...]:
    pieces, rows = json.loads(data)
    known: list[Prefix | None] = [None]
    for id, tokens, answer, parent in pieces:
        known.append(Prefix(id, tokens, answer, known[parent]))
    return tuple(known[row] for row in rows)


def _workload(columns: Mapping[str, NDArray[Any]]) -> Workload:
    values = {name: _names(column) for name, column in columns.items()}
    if "prefixes" in values:
        values["prefixes"] = _unpacked(values["prefixes"].tobytes()) if values["prefixes"].size else ()
    return Workload(**values)


def _names(column: NDArray[Any]) -> Any:
    """Return names (`tiers`, `models`, ...) as the tuple they were, columns as they are."""
    return tuple(column.tolist()) if column.dtype.kind == "U" else column


def _outcome(columns: Mapping[str, NDArray[Any]]) -> Outcome:
    """Return the outcome; a sum that the folder does not have gets its default."""
    values: dict[str, Any] = {name: column if column.ndim else column.item() for name, column in columns.items()}
    known = {entry.name for entry in fields(Outcome)}
    missing = [e.name for e in fields(Outcome) if e.default is MISSING and e.name not in values]
    if missing:
        raise KeyError(", ".join(missing))
    return Outcome(**{name: value for name, value in values.items() if name in known})
