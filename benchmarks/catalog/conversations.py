"""Conversations: requests that begin with all that was said before, as prefix caches meet them.

Open-loop traffic: a turn comes a drawn time after the one before it, whether or not that one is answered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headway.prefix import Prefix
from headway.simulate.workload.arrivals import poisson
from headway.simulate.workload.traffic import Workload, single
from headway.types import Floats, Ints, Slo


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution, cut off at `least` and `most`; mean and std: before the cut.

    uniform: between `least` and `most`, whatever mean and std are. bimodal: of two modes with this mean and std the
    higher one is `most`; values lie within a half of the lower one.
    """

    least: float
    most: float
    mean: float
    std: float
    kind: Literal["log_normal", "normal", "exponential", "uniform", "bimodal"] = "log_normal"

    def draw(self, size: int, rng: np.random.Generator) -> Floats:
        """Draw values of this distribution."""
        if self.kind == "normal":
            drawn = rng.normal(self.mean, self.std, size)
        elif self.kind == "exponential":
            drawn = rng.exponential(self.mean, size)
        elif self.kind == "uniform":
            drawn = rng.uniform(self.least, self.most, size)
        elif self.kind == "bimodal":
            low = self.mean - self.std**2 / (self.most - self.mean)
            high = rng.random(size) < (self.mean - low) / (self.most - low)
            drawn = np.where(high, self.most, low * rng.uniform(0.5, 1.5, size))
        else:
            variance = math.log(1 + (self.std / self.mean) ** 2)
            drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), size)
        return np.clip(drawn, self.least, self.most)


@dataclass(frozen=True, slots=True)
class Conversations:
    """What conversations are like.

    system: tokens with which all of them begin. prompt: mean tokens of a conversation's prompts; the first is
        chosen so that they have this mean. added: tokens that a turn adds. answer: tokens. turns: of a
        conversation. gap: seconds from one turn to the next.
    longest: tokens of prompt and answer; a conversation ends before it has more.
    priority: as vLLM has it, for systems that go by it; lower is more urgent.
    """

    name: str
    system: int
    prompt: Spread
    added: Spread
    answer: Spread
    turns: Spread
    gap: Spread
    slo: Slo
    longest: int
    priority: int = 0

    def workload(self, rate: float, duration: float, rng: np.random.Generator, tier: str = "") -> Workload:
        """Return the turns of conversations that begin at `rate` per second, up to `duration` seconds."""
        begins = poisson(rate, duration, rng).tolist()
        turns = [turn for i, begin in enumerate(begins) for turn in self._turns(i, begin, duration, rng)]
        return of_turns(turns, self.slo, tier or self.name, self.priority)

    def _turns(self, number: int, begin: float, end: float, rng: np.random.Generator) -> Iterator[Turn]:
        count = int(self.turns.draw(1, rng)[0])
        added, answers = self.added.draw(count, rng).astype(int), self.answer.draw(count, rng).astype(int)
        at = begin + np.concatenate([[0.0], np.cumsum(self.gap.draw(count - 1, rng))])
        growth = np.concatenate([[0], np.cumsum(answers[:-1] + added[1:])])
        first = max(int(self.prompt.draw(1, rng)[0] - growth.mean()), self.system + int(added[0]))
        parent = Prefix(f"{self.name} system", self.system) if self.system else None
        for when, grown, answer in zip(at.tolist(), growth.tolist(), answers.tolist(), strict=True):
            if when >= end or first + grown + answer > self.longest:
                return
            yield Turn(when, answer, Prefix(f"{self.name} {number}", first + grown, answer=True, parent=parent))


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: its instant, the tokens of its answer, and its whole prompt."""

    at: float
    answer: int
    prompt: Prefix


def of_turns(turns: Sequence[Turn], slo: Slo, tier: str, priority: int = 0) -> Workload:
    """Return turns as a workload, by arrival."""
    ordered = sorted(turns, key=lambda turn: turn.at)
    prompt: Ints = np.array([turn.prompt.tokens for turn in ordered], np.int64)
    answer: Ints = np.array([max(turn.answer, 1) for turn in ordered], np.int64)
    work = single(np.array([turn.at for turn in ordered], float), prompt, answer, slo=slo, tier=tier, priority=priority)
    longest = np.full(len(ordered), int(answer.max(initial=1)))
    prefixes = tuple(turn.prompt for turn in ordered)
    return replace(work, max_tokens=longest, prefix=np.arange(len(ordered)), prefixes=prefixes or (None,))
