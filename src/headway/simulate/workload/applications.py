"""Runs of LLM applications for a simulation: recorded ones, and how they arrive.

Format of a recorded run, one JSON object per line, plain or gzipped: {"app", "units": [...]}, units in the
order of execution, each {"unit", "type": "llm", "requests": [{"prompt_tokens", "completion_tokens"}, ...]}
with parallel requests, or {"unit", "type": backend, "exec_time_s"} outside the LLM.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import ConfigError
from headway.policy.apps.graph import LLM, Graph, Visit
from headway.prefix import Prefix
from headway.simulate.workload.traffic import Workload
from headway.types import Floats

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_LONGEST_ANSWER = 2048  # max_tokens of every request, which reveals no answer's length
# Shares of the applications (Hermes 5.1 with the weights of its published code): small ones have 72 % of the
# runs, medium ones 26 %, large ones 2 %.
SHARES: Mapping[str, float] = {"EV": 0.06, "CC": 0.22, "ALFWI": 0.22, "KBQAV": 0.22, "CG": 0.13, "PE": 0.13, "DM": 0.02}


@dataclass(frozen=True, slots=True)
class Step:
    """A unit of a recorded run.

    requests: (prompt tokens, output tokens) of its parallel requests; () outside the LLM.
    seconds: that it takes outside the LLM.
    """

    unit: str
    backend: str = LLM
    requests: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0

    @property
    def visit(self) -> Visit:
        """The step as a demand graph records it."""
        count = len(self.requests)
        if not count:
            return Visit(self.unit, self.backend, seconds=self.seconds)
        prompt, output = np.mean(self.requests, axis=0).tolist()
        return Visit(self.unit, self.backend, prompt, output, count)


@dataclass(frozen=True, slots=True)
class AppRun:
    """A recorded run: its steps, one after another."""

    app: str
    steps: tuple[Step, ...]

    @property
    def visits(self) -> list[Visit]:
        """The run as a demand graph learns from it."""
        return [step.visit for step in self.steps]


@dataclass(frozen=True, slots=True)
class Applications:
    """Runs that arrive at an engine or a fleet.

    runs: what each does. arrival: seconds from the start. target: seconds that it may take, inf = any.
    workload: all their requests, run by run and step by step; a request's arrival is that of its run until a
        simulation knows better. rows: of each run, the first row of every step and behind the last one.
    adapters: the LoRA adapter of each run's requests; () = none.
    """

    runs: tuple[AppRun, ...]
    arrival: Floats
    target: Floats
    workload: Workload
    rows: tuple[tuple[int, ...], ...]
    adapters: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.runs)


def read(path: str | Path) -> list[AppRun]:
    """Return the runs of a file. ConfigError, naming the line, for anything else."""
    path, runs = Path(path), list[AppRun]()
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    runs.append(_run(json.loads(line)))
                except _MALFORMED as error:
                    raise ConfigError(
                        f"{path}, line {number} is no recorded run: {type(error).__name__} {error}.",
                        'Give {"app", "units": [{"unit", "type", "requests" or "exec_time_s"}]} per line.',
                    ) from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", "Give a JSON lines file, or .gz.") from error
    if not runs:
        raise ConfigError(f"{path} holds no runs.", "Give a file with one run per line.")
    return runs


def graphs_of(runs: Sequence[AppRun]) -> dict[str, Graph]:
    """Return the demand graphs that some runs teach, by application."""
    graphs: dict[str, Graph] = {}
    for run in runs:
        graphs.setdefault(run.app, Graph(run.app)).learn(run.visits)
    return graphs


def draw(
    pool: Mapping[str, Sequence[AppRun]], count: int, rng: np.random.Generator, shares: Mapping[str, float] = SHARES
) -> list[AppRun]:
    """Draw runs: first the application by its share, then one of its runs, with replacement."""
    apps = [app for app, share in shares.items() if share > 0 and pool.get(app)]
    if not apps:
        raise ConfigError("There are no runs to draw from.", f"Give runs of {', '.join(shares)}.")
    weights = np.array([shares[app] for app in apps])
    chosen = rng.choice(len(apps), count, p=weights / weights.sum())
    return [pool[apps[i]][int(rng.integers(len(pool[apps[i]])))] for i in chosen.tolist()]


def applications(runs: Sequence[AppRun], arrival: Floats, model: str, target: Floats | None = None) -> Applications:
    """Return runs that arrive at these seconds (sorted); target: seconds that each may take.

    ConfigError for no runs, and for a step that is neither LLM requests nor seconds outside the LLM.
    """
    steps = [step for run in runs for step in run.steps]
    wrong = [step.unit for step in steps if (step.backend == LLM) != bool(step.requests)]
    if wrong or not all(run.steps for run in runs) or not runs:
        what = f"The unit {wrong[0]!r}" if wrong else "A run"
        raise ConfigError(f"{what} has nothing to do.", "Give each run steps, LLM steps requests, others none.")
    sizes = [[len(step.requests) for step in run.steps] for run in runs]
    per_run = np.array([sum(some) for some in sizes])
    ends = np.cumsum(np.concatenate([[0], per_run]))
    rows = tuple(tuple((begin + np.cumsum([0, *some])).tolist()) for begin, some in zip(ends, sizes, strict=False))
    lengths = np.array([pair for step in steps for pair in step.requests], np.int64).reshape(-1, 2)
    units = tuple(dict.fromkeys(step.unit for step in steps))
    apps = tuple(dict.fromkeys(run.app for run in runs))
    app = np.repeat([apps.index(run.app) for run in runs], per_run)
    n = len(lengths)
    never, none = np.full(n, np.inf), np.zeros(n, np.int64)
    workload = Workload(
        np.repeat(arrival, per_run), lengths[:, 0], lengths[:, 1],
        np.maximum(lengths[:, 1], _LONGEST_ANSWER), never, never, never,
        none, app, none, app, apps, (model,), apps,
        app, np.repeat(np.arange(len(runs)), per_run),
        np.repeat([units.index(step.unit) for step in steps], [len(step.requests) for step in steps]),
        apps, tuple(f"{i}" for i in range(len(runs))), units,
    )  # fmt: skip
    limit = np.full(len(runs), np.inf) if target is None else target
    return Applications(tuple(runs), np.asarray(arrival, float), limit, workload, rows)


def _run(values: Mapping[str, Any]) -> AppRun:
    steps = tuple(step for unit in values["units"] if (step := _step(unit)) is not None)
    if not steps:
        raise ValueError("a run without units")
    return AppRun(str(values["app"]), steps)


def _step(unit: Mapping[str, Any]) -> Step | None:
    """Return a unit as a step; None for one that did nothing (an LLM unit without requests)."""
    name, kind = str(unit["unit"]), str(unit["type"])
    if not name:
        raise ValueError("a unit without a name")
    if kind != LLM:
        kind = name if name.startswith(f"{kind}:") else kind  # such as dnn:object-detection
        seconds = float(unit.get("exec_time_s") or 0.0)
        if not math.isfinite(seconds):
            raise ValueError(f"a unit of {seconds} seconds")
        return Step(name, kind, seconds=max(seconds, 0.0))
    lengths = [(int(one["prompt_tokens"]), int(one["completion_tokens"])) for one in unit["requests"]]
    requests = tuple((max(prompt, 1), max(output, 1)) for prompt, output in lengths)
    return Step(name, LLM, requests) if requests else None


def templates(runs: Iterable[AppRun]) -> dict[str, int]:
    """Return the tokens of every unit's template, by "application/unit"."""
    shortest: dict[str, int] = {}
    for run in runs:
        for step in run.steps:
            for prompt, _ in step.requests:
                name = f"{run.app}/{step.unit}"
                shortest[name] = min(shortest.get(name, prompt), prompt)
    return shortest


def with_prefixes(apps: Applications, shared: Mapping[str, int]) -> Applications:
    """Return runs whose requests say what they share; shared: as `templates` returns it.

    Every prompt is a chain of its run that begins with the unit's template, and goes on with the answer. Recordings
    hold lengths, no text. Two things follow from them:
    - All requests of a unit begin with its template (Hermes 2.3: "tasks in an LLM unit share the same system
      prompt"), of which the shortest prompt of the unit is an upper bound; it is taken for the template.
    - A unit with one request that was visited before in the run with one request, and whose prompt is at least
      as long as the prompt and the answer then, goes on with that conversation (agents such as ALFWI's).
    What parallel requests of one visit share beyond the template is not recorded, and none of it is assumed.
    """
    prefixes: list[Prefix] = []
    for number, run in enumerate(apps.runs):
        prefixes += _chains(run, number, shared)
    codes = np.arange(len(prefixes))
    return replace(apps, workload=replace(apps.workload, prefix=codes, prefixes=tuple(prefixes)))


def _chains(run: AppRun, number: int, shared: Mapping[str, int]) -> Sequence[Prefix]:
    """Return the prefixes of a run's requests, in order."""
    out: list[Prefix] = []
    talks: dict[str, tuple[str, int]] = {}  # by unit: the chain of its latest visit, and its tokens
    for step in run.steps:
        name = f"{run.app}/{step.unit}"
        for prompt, output in step.requests:
            chain, said = talks.get(step.unit, ("", prompt + 1))
            if len(step.requests) > 1 or prompt < said:
                chain = f"{name} {number}.{len(out)}"
            parent = Prefix(name, min(shared[name], prompt))
            out.append(Prefix(chain, prompt, answer=True, parent=parent))
            talks[step.unit] = chain, prompt + output
        if len(step.requests) > 1:
            talks.pop(step.unit)
    return out
