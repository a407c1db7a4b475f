"""Built-in LLM applications: nine of Hermes' ten, by the 10th, 50th and 90th percentiles of recorded runs.

The runs were published with Hermes (github.com/NephrenCake/Hermes, branch SC25, Datasets); percentiles of
tokens per request, of seconds outside the LLM and of parallel requests are in `_APPS`. Lengths are lognormal
and independent, except that a loop's prompts grow; what correlates in the recordings does not here. KBQAV,
EV: claims are verified in parallel. CC: three solutions. ALFWI, CG, FEV: loops. PE: a plan of tools. DM: a graph
of thoughts. MRS: summaries of parts, merged. Of FEV and MRS only samples by unit were published
(task_models_skewnorm_new.json), of LLMR nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from headway.policy.apps.graph import LLM
from headway.simulate.workload.applications import SHARES, AppRun, Step
from headway.types import Floats

_Range = tuple[float, float, float]  # 10th, 50th and 90th percentile
_NINTH = 1.2816  # standard deviations from the median to the 90th percentile of a normal distribution


@dataclass(frozen=True, slots=True)
class _Llm:
    """An LLM unit: percentiles of its prompt and its output, and how many parallel requests it has."""

    unit: str
    prompt: _Range
    output: _Range
    parallel: int = 1


@dataclass(frozen=True, slots=True)
class _Outside:
    """A unit outside the LLM, and percentiles of its seconds."""

    unit: str
    backend: str
    seconds: _Range


@dataclass(frozen=True, slots=True)
class _App:
    """An application: its units, and how they follow one another.

    widths: how many requests the units marked `parallel=0` have in a run, equally likely.
    rounds: how often the whole is repeated, equally likely. grows: tokens of prompt per round.
    tools: drawn once or twice before the last unit. ends_early: the last round is without its last unit.
    """

    units: tuple[_Llm | _Outside, ...]
    widths: tuple[int, ...] = (1,)
    rounds: tuple[int, ...] = (1,)
    grows: int = 0
    tools: tuple[_Outside, ...] = ()
    ends_early: bool = False


def _score(number: int) -> _Llm:
    return _Llm(f"score{number}", (2120, 2650, 3105), (255, 437, 658), 20)


_APPS: Mapping[str, _App] = {
    "KBQAV": _App(
        (
            _Llm("extract_claims", (603, 621, 648), (26, 68, 126)),
            _Llm("generate_queries", (285, 289, 294), (13, 17, 23), 0),
            _Outside("search", "search", (0.92, 1.09, 1.88)),
            _Llm("verifies", (408, 482, 647), (101, 142, 200), 0),
        ),
        widths=(1, 2, 2, 3, 3, 4, 4, 5, 6),
    ),
    "EV": _App(
        (
            _Llm("extract_claims", (757, 829, 931), (52, 81, 151)),
            _Llm("generate_queries", (257, 268, 277), (21, 32, 37), 0),
            _Outside("execute", "python", (0.0001, 0.0002, 0.0003)),
        ),
        widths=(2, 2, 3, 3, 4),
    ),
    "CC": _App(
        (
            _Llm("generate_queries", (305, 345, 434), (47, 67, 103)),
            _Llm("generate_solutions", (272, 309, 398), (111, 184, 271), 3),
            _Outside("code_execution", "docker", (0.344, 0.355, 0.381)),
        )
    ),
    "ALFWI": _App(
        (_Llm("thought", (1450, 1600, 1800), (4, 7, 31)), _Outside("act", "env", (0.112, 0.171, 0.206))),
        rounds=(10, 12, 13, 15, 15, 17, 20, 22),
        grows=35,
    ),
    "CG": _App(
        (
            _Llm("code_generation", (115, 160, 260), (86, 178, 427)),
            _Outside("code_execution", "docker", (12.24, 12.32, 12.43)),
        ),
        rounds=(1,) * 85 + (2,) * 8 + (3,) + (5,) * 6,
        grows=1100,
    ),
    "PE": _App(
        (
            _Llm("task_planning", (1853, 1869, 1886), (71, 116, 159)),
            _Llm("choose_model", (465, 492, 515), (76, 87, 106)),
            _Llm("response_results", (445, 715, 1133), (343, 499, 781)),
        ),
        tools=(
            _Outside("dnn:image-to-image", "dnn", (15.9, 16.6, 17.3)),
            _Outside("dnn:depth-estimation", "dnn", (3.6, 4.1, 4.5)),
            _Outside("dnn:visual-question-answering", "dnn", (1.5, 1.6, 2.7)),
        ),
    ),
    "DM": _App(
        (
            _Llm("generate1", (1263, 1569, 1844), (590, 923, 1357), 2),
            _score(1),
            _score(1),
            _Llm("aggregate", (2633, 3417, 4300), (610, 961, 1355), 2),
            _score(2),
            _score(2),
            _Llm("generate2", (1963, 2510, 2913), (619, 921, 1313)),
            _score(3),
        )
    ),
    "FEV": _App(
        (_Llm("thought", (1006, 1134, 1379), (32, 37, 45)), _Outside("search", "search", (1.31, 1.85, 3.35))),
        rounds=(2,) * 86 + (3,) * 12 + (4,) * 2,
        ends_early=True,
    ),
    "MRS": _App(
        (
            _Llm("generate_summary", (206, 473, 560), (86, 157, 275), 0),
            _Llm("collapse_summaries", (645, 1709, 1866), (391, 565, 845), 2),
            _Llm("generate_final_summary", (909, 1374, 2020), (480, 648, 1028)),
        ),
        widths=(10, 14, 18, 21, 21, 24, 28, 33),
    ),
}


def generated(count: int, rng: np.random.Generator, names: Collection[str] = SHARES) -> dict[str, list[AppRun]]:
    """Return that many runs of each of these built-in applications."""
    return {name: [_run(name, app, rng) for _ in range(count)] for name, app in _APPS.items() if name in names}


def _run(name: str, app: _App, rng: np.random.Generator) -> AppRun:
    width, rounds = int(rng.choice(app.widths)), int(rng.choice(app.rounds))
    steps = [_step(unit, width, app.grows * i, rng) for i in range(rounds) for unit in app.units]
    steps = steps[:-1] if app.ends_early else steps
    chosen: list[int] = rng.permutation(len(app.tools))[: rng.integers(1, 3)].tolist() if app.tools else []
    tools = [_step(app.tools[i], width, 0, rng) for i in chosen]
    return AppRun(name, (*steps[:-1], *tools, steps[-1]))


def _step(unit: _Llm | _Outside, width: int, more: int, rng: np.random.Generator) -> Step:
    if isinstance(unit, _Outside):
        return Step(unit.unit, unit.backend, seconds=float(_draw(unit.seconds, 1, rng)[0]))
    count = unit.parallel or width
    prompt, output = _draw(unit.prompt, count, rng) + more, _draw(unit.output, count, rng)
    lengths = np.maximum(np.rint(np.column_stack([prompt, output])), 1).astype(int).tolist()
    return Step(unit.unit, LLM, tuple((prompt, output) for prompt, output in lengths))


def _draw(percentiles: _Range, count: int, rng: np.random.Generator) -> Floats:
    """Draw from a lognormal distribution with this median, as wide as the outer percentiles say."""
    low, middle, high = np.log(percentiles)
    return np.asarray(np.exp(rng.normal(middle, (high - low) / (2 * _NINTH), count)))
