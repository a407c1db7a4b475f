"""A packer on the simulated engine, iteration by iteration, with what every packer owes checked each time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.ports import Packer
from headway.types import Ints, Slo

SIZE = 16
CHAT = Slo(ttft=0.4, tpot=0.2)


@dataclass(frozen=True)
class Ask:
    """A request that comes `after` so many iterations."""

    prompt: int
    output: int
    after: int = 0
    slo: Slo = field(default_factory=Slo)


@dataclass(frozen=True)
class Limits:
    """What the engine has."""

    running: int = 8
    budget: int = 256
    blocks: int = 1000
    slots: int = 16


@dataclass(frozen=True)
class Iteration:
    """What was decided. answers: the ids that made one token from a complete prompt. inside: held KV before.

    waiting: were not inside before. computed, made: of every id, before. saved: ids on the host before.
    """

    tokens: dict[str, int]
    answers: set[str]
    paused: set[str]
    evicted: list[str]
    inside: list[str]
    waiting: list[str]
    saved: set[str]
    computed: dict[str, int]
    output_tokens: dict[str, int]
    free: int
    copied: int

    @property
    def prompts(self) -> set[str]:
        return set(self.tokens) - self.answers


@dataclass
class Driven:
    """The run. `ends`: iteration after which each request was finished, by id."""

    packer: Packer
    limits: Limits
    seconds: float = 0.02
    ends: dict[str, int] = field(default_factory=dict)
    now: float = 100.0
    helps: bool = False  # the packer leaves it to the engine to take memory back
    count: int = 0

    def __post_init__(self) -> None:
        self.engine = SimulatedEngine(
            self.packer,
            blocks=self.limits.blocks,
            size=SIZE,
            slots=self.limits.slots,
            budget=self.limits.budget,
            max_model_len=10_000,
        )

    def go(self, asks: Iterable[Ask]) -> Iterator[Iteration]:
        """Yield iteration by iteration until everybody is served; each moment is checked."""
        todo = sorted(((ask.after, i, ask) for i, ask in enumerate(asks)), key=lambda entry: entry[:2])
        outputs = {f"r{i}": ask for _, i, ask in todo}
        limit = 50 + 4 * sum(ask.prompt + ask.output for _, _, ask in todo)
        while todo or self.engine.busy:
            while todo and (todo[0][0] <= self.count or not self.engine.busy):
                _, i, ask = todo.pop(0)
                self.engine.add(f"r{i}", ask.prompt, ask.output, arrival=self.now, slo=ask.slo)
            yield self._step()
            assert self.count < limit, f"{len(self.engine.jobs)} requests never end"
        assert self.ends.keys() == outputs.keys()
        assert self.engine.free == self.limits.blocks

    def served(self, asks: Iterable[Ask]) -> dict[str, int]:
        """Serve everybody; return how many tokens each got."""
        asks, made = list(asks), dict[str, int]()
        for seen in self.go(asks):
            for id, tokens in seen.tokens.items():
                whole = asks[int(id[1:])].prompt + seen.output_tokens[id]
                made[id] = seen.output_tokens[id] + (seen.computed[id] + tokens >= whole)
        return made

    def _step(self) -> Iteration:
        jobs, names = self.engine.jobs, self._names
        rows = jobs.rows()
        rows = rows[np.argsort(jobs.serial[rows])]
        inside, saved = rows[jobs.running[rows]], rows[jobs.saved[rows] > 0]
        done = (jobs.output_tokens > 0) & (jobs.computed == jobs.prompt + jobs.output_tokens - 1)
        computed, output_tokens = dict(zip(names(rows), jobs.computed[rows].tolist(), strict=True)), {}
        output_tokens = dict(zip(names(rows), jobs.output_tokens[rows].tolist(), strict=True))
        before = (names(inside), names(rows[~jobs.running[rows]]), set(names(saved)), computed, output_tokens)
        free = self.engine.free
        ran = self.engine.schedule(self.now)
        self._check(ran)
        tokens = dict(zip(names(ran.rows), ran.tokens.tolist(), strict=True))
        answers = {name for name in tokens if done[jobs.row_of[name]]}
        seen = Iteration(tokens, answers, set(names(ran.paused)), names(ran.evicted), *before, free, ran.copied)
        self.now += self.seconds
        finished = self.engine.complete(ran, self.now).ids
        self.count += 1
        self.ends |= dict.fromkeys(finished, self.count)
        return seen

    def _check(self, ran: Ran) -> None:
        """What every packer owes: no idle iteration, no surprise for the engine, no block lost."""
        engine, jobs = self.engine, self.engine.jobs
        rows = jobs.rows()
        assert ran.rows.size, "the engine stands still with work in it"
        assert ran.preempted == 0 or self.helps, "the engine had to help itself"
        assert int(ran.tokens.sum()) <= self.limits.budget
        assert ran.rows.size <= self.limits.running
        assert int(np.count_nonzero(jobs.running & jobs.live)) <= self.limits.slots
        assert engine.free >= 0
        assert engine.free + int(jobs.blocks[rows].sum()) == self.limits.blocks
        assert (jobs.blocks[rows] * SIZE >= np.where(jobs.running[rows], jobs.computed[rows], 0)).all()

    def _names(self, rows: Ints) -> list[str]:
        return self.engine.jobs.names(rows.tolist())


def loads(prompts: int = 120, outputs: int = 40, most: int = 14) -> st.SearchStrategy[list[Ask]]:
    """Draw requests of both kinds that come one after the other or all at once."""
    ask = st.builds(
        Ask, st.integers(1, prompts), st.integers(1, outputs), st.integers(0, 30), st.sampled_from([Slo(), CHAT])
    )
    return st.lists(ask, min_size=1, max_size=most)


# 12 blocks hold the longest of `loads` alone, with one to spare.
limits = st.builds(Limits, st.integers(1, 6), st.integers(6, 200), st.integers(12, 40), st.integers(6, 12))
ample = st.builds(Limits, st.integers(1, 6), st.integers(6, 200), st.just(1000), st.integers(6, 12))
