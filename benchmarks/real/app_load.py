"""The load of `headway bench apps`: recorded runs of applications, scaled down, beside chat with an SLO.

The runs are those of `headway bench papers hermes` (recorded ones with HEADWAY_DATA, else the built-in
applications), split alternately: the demand graphs learn from one half, the other half is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.papers import hermes_workloads
from headway.policy.apps.graph import Graph
from headway.simulate.workload import arrivals
from headway.simulate.workload.applications import SHARES, AppRun, Step, draw, graphs_of
from headway.whatif.load import mix, prompts
from headway.whatif.load.records import Call

APPS = ("KBQAV", "CC", "CG")  # parallel requests and a search; code and a container; a loop with a container
APP_CLASS = "app"  # class of the applications' requests, without an SLO
CHAT = mix.Mix("chat", (mix.BUILTIN["chat-batch"].tiers[0],))
SCALE = 0.25  # the runs were recorded on GPUs, but run on two cores
BURSTINESS = 1 / 16  # of the runs' arrivals: a coefficient of variation of 4, as in Mooncake's trace (Hermes 5.1)
_CHATS = 0.5  # chat requests per run
_LONGEST_ANSWER = 512

_Half = Mapping[str, Sequence[AppRun]]


@dataclass(frozen=True, slots=True)
class Script:
    """A run to be replayed.

    at: planned arrival, seconds. prompts: the texts of each step, one per request
    """

    id: str
    at: float
    run: AppRun
    prompts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class AppLoad:
    """The runs and chat requests that arrive at a system in a round."""

    scripts: tuple[Script, ...]
    chat: tuple[Call, ...]

    @property
    def requests(self) -> int:
        """The number of requests, over all runs and chat."""
        return len(self.chat) + sum(len(texts) for script in self.scripts for texts in script.prompts)


@dataclass(frozen=True, slots=True)
class AppShape:
    """The parameters of the load.

    scale: factor of the recorded tokens and of the seconds outside the LLM
    burstiness: shape of the gamma-distributed gaps between runs; 1 = Poisson, lower is burstier
    chat: classes of the chat beside the runs, with independent Poisson arrivals
    """

    scale: float = SCALE
    burstiness: float = BURSTINESS
    chat: mix.Mix = CHAT

    def load(self, rate: float, seconds: float, seed: Sequence[int]) -> AppLoad:
        """Return the load of `seconds` seconds at `rate` runs/s; the same for the same seed."""
        rng = np.random.default_rng(seed)
        at = arrivals.bursty(rate, self.burstiness, seconds, rng)
        runs = draw(_scaled(self.scale)[0], len(at), rng)
        scripts = [
            Script(f"{number}", when, run, tuple(_texts(step, rng) for step in run.steps))
            for number, (when, run) in enumerate(zip(at.tolist(), runs, strict=True))
        ]
        beside = arrivals.poisson(_CHATS * rate, seconds, rng)
        return AppLoad(tuple(scripts), tuple(mix.calls(self.chat, beside, rng, warn=_silent)))

    def graphs(self) -> list[Graph]:
        """Return the demand graphs learned from the other half of the runs."""
        taught = _scaled(self.scale)[1]
        return list(graphs_of([run for some in taught.values() for run in some]).values())


def calls_of(script: Script) -> list[Call]:
    """Return all requests of a run, sent together at the run's arrival."""
    return [
        call(script.at, text, output)
        for step, texts in zip(script.run.steps, script.prompts, strict=True)
        for text, (_, output) in zip(texts, step.requests, strict=True)
    ]


def call(at: float, prompt: str, output: int) -> Call:
    """Return an application's request, whose answer has exactly `output` tokens."""
    return Call(at, APP_CLASS, prompt, output, ignore_eos=True)


def source() -> str:
    """Return the source of the runs, for reports."""
    return hermes_workloads.source().partition(",")[0]


def scaled(run: AppRun, factor: float) -> AppRun:
    """Return the run with tokens and seconds times `factor`; requests too long for an engine are cut."""
    return replace(run, steps=tuple(_step(step, factor) for step in run.steps))


def _step(step: Step, factor: float) -> Step:
    requests = tuple(
        (_cut(prompt * factor, prompts.LONGEST), _cut(output * factor, _LONGEST_ANSWER))
        for prompt, output in step.requests
    )
    return replace(step, requests=requests, seconds=step.seconds * factor)


def _cut(tokens: float, most: int) -> int:
    return min(max(round(tokens), 1), most)


@cache
def _scaled(factor: float) -> tuple[_Half, _Half]:
    """Return the runs to serve and the runs to learn from, by application."""
    served, taught = hermes_workloads.pool()
    return _of(served, factor), _of(taught, factor)


def _of(half: _Half, factor: float) -> _Half:
    return {app: [scaled(run, factor) for run in half[app]] for app in APPS}


def shares() -> dict[str, float]:
    """Return the applications' shares of the runs, as `draw` draws them; they sum to 1."""
    whole = sum(SHARES[name] for name in APPS)
    return {name: SHARES[name] / whole for name in APPS}


def _texts(step: Step, rng: np.random.Generator) -> tuple[str, ...]:
    return tuple(prompts.generate(1, (prompt, prompt), rng)[0] for prompt, _ in step.requests)


def _silent(_: str) -> None:
    """Discard a warning: the report names the source of the prompts."""
