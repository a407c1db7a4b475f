"""Latency laws: functions from the shape of a batch to seconds, and their fits (BROS 4.1, SLO-aware 4.2).

Published laws differ in what they multiply: BROS 4.1 takes tokens and tokens x attended tokens, SLO-aware 4.2
takes requests, length and their product. Here each is a small object of non-negative coefficients, fitted so
that every measured iteration counts by its relative error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import numpy as np

from headway.compiled import compiled
from headway.types import Batch, Bools, Floats

KINDS = ("prefill", "decode", "mixed")
_FLOORS = (16, 32, 64, 128, 256, 512, 1024)  # tokens up to which the floor is first supposed to hold


# Codes of the laws, for compiled loops.
ADDITIVE, ROOFLINE, BROS, SLO_AWARE, STEPPED = range(5)


@compiled
def law_seconds(kind: int, c: Floats, decodes: float, context: float, prefill: float, pairs: float) -> float:
    """Return the seconds of one iteration by the law `kind` with coefficients c, in its class's order."""
    if kind == ADDITIVE:
        return float(c[0] + c[1] * decodes + c[3] * prefill + (c[2] * context + c[4] * pairs))
    if kind == ROOFLINE:
        work = max(c[1], c[4] * (decodes + prefill))
        return float(c[0] + c[2] * decodes + work + (c[3] * context + c[5] * pairs))
    if kind == BROS:
        parts = c[0] * prefill + c[1] * pairs + (c[3] * decodes + c[4] * context)
        return float(parts + _base(prefill, decodes, c[2], c[5]))
    if kind == STEPPED:
        step = c[5] if prefill > 0 else 0.0
        return float(c[0] + c[1] * decodes + c[3] * prefill + (c[2] * context + c[4] * pairs) + step)
    length = max(2 * pairs / max(prefill, 1.0), min(prefill, 1.0))
    parts = c[0] * prefill + c[1] * (prefill / max(length, 1.0)) + c[2] * length
    parts += c[4] * context + c[5] * decodes + c[6] * (context / max(decodes, 1.0))
    return float(parts + _base(prefill, decodes, c[3], c[7]))


@compiled
def _base(prefill: float, decodes: float, prompts: float, answers: float) -> float:
    """Return the base of a batch: the larger of its parts', as the weights are read once."""
    return float(max(prompts if prefill > 0 else 0.0, answers if decodes > 0 else 0.0))


@compiled
def _each_law_seconds(kind: int, c: Floats, x: Floats) -> Floats:
    """Return the law's seconds for each column of x, shape (4, n)."""
    out = np.empty(x.shape[1])
    for i in range(out.size):
        out[i] = law_seconds(kind, c, x[0, i], x[1, i], x[2, i], x[3, i])
    return out


@dataclass(frozen=True, slots=True)
class Shapes:
    """Many batches as columns, each as in `types.Batch`.

    prefill_context counts the pairs of a prompt token and a token before it, those within the same chunk too
    (new * before + new * new / 2), as vLLM's hook does.
    """

    decodes: Floats
    context: Floats
    prefill: Floats
    prefill_context: Floats

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Shapes:
        """Return the columns of batches, in their order."""
        rows = [(b.decodes, b.context, b.prefill, b.prefill_context) for b in batches]
        return cls(*np.array(rows, float).reshape(-1, 4).T)

    def only(self, rows: Bools) -> Shapes:
        """Return the rows where `rows` is true."""
        return Shapes(*(getattr(self, field.name)[rows] for field in fields(self)))

    def kind(self, name: str) -> Bools:
        """Tell which rows are of a kind of `KINDS`: prompts only, answers only, or both."""
        prompts, answers = self.prefill > 0, self.decodes > 0
        return {"prefill": prompts & ~answers, "decode": answers & ~prompts, "mixed": prompts & answers}[name]


class LatencyLaw(ABC):
    """A law with its coefficients, which are the fields: seconds, or seconds per unit. CODE: see
    `law_seconds`."""

    __slots__ = ()
    NAME: ClassVar[str]
    CODE: ClassVar[int]

    def array(self) -> Floats:
        """Return the coefficients as float64, in the order of the fields."""
        return np.array([getattr(self, field.name) for field in fields(self)], float)  # type: ignore[arg-type]

    def seconds(self, x: Shapes) -> Floats:
        """Return the forecast duration of each row."""
        columns = np.stack([x.decodes, x.context, x.prefill, x.prefill_context]).astype(float)
        return _each_law_seconds(self.CODE, self.array(), columns)

    @classmethod
    @abstractmethod
    def fit(cls, x: Shapes, seconds: Floats) -> Self:
        """Return the law that is nearest to measured durations."""


@dataclass(frozen=True, slots=True)
class Additive(LatencyLaw):
    """base + a coefficient for each column."""

    NAME: ClassVar[str] = "additive"
    CODE: ClassVar[int] = ADDITIVE
    base: float
    decodes: float
    context: float
    prefill: float
    prefill_context: float

    @classmethod
    def fit(cls, x: Shapes, seconds: Floats) -> Self:
        one = np.ones_like(seconds)
        return cls(*_solve((one, x.decodes, x.context, x.prefill, x.prefill_context), seconds))


@dataclass(frozen=True, slots=True)
class Stepped(LatencyLaw):
    """Additive, and a batch with any prompt in it costs `step` more: its kernels are other ones."""

    NAME: ClassVar[str] = "stepped"
    CODE: ClassVar[int] = STEPPED
    base: float
    decodes: float
    context: float
    prefill: float
    prefill_context: float
    step: float

    @classmethod
    def fit(cls, x: Shapes, seconds: Floats) -> Self:
        one, prompts = np.ones_like(seconds), (x.prefill > 0).astype(float)
        columns = (one, x.decodes, x.context, x.prefill, x.prefill_context, prompts)
        return cls(*_solve(columns, seconds))


@dataclass(frozen=True, slots=True)
class Roofline(LatencyLaw):
    """Additive, but tokens' arithmetic (`prefill` s each) costs at least `floor`, reading the weights once.

    decodes: what a sequence costs beside that, such as the CPU's work.
    """

    NAME: ClassVar[str] = "roofline"
    CODE: ClassVar[int] = ROOFLINE
    base: float
    floor: float
    decodes: float
    context: float
    prefill: float
    prefill_context: float

    @classmethod
    def fit(cls, x: Shapes, seconds: Floats) -> Self:
        """Fit from several guesses of which rows lie on the floor, and keep the best.

        Given that guess the law is linear; the fit then says anew which rows lie there, until they agree.
        """
        tokens = x.decodes + x.prefill
        fits = [cls._from(x, seconds, tokens <= limit) for limit in _FLOORS]
        return min(fits, key=lambda law: float(np.square(law.seconds(x) / seconds - 1).sum()))

    @classmethod
    def _from(cls, x: Shapes, seconds: Floats, low: Bools) -> Self:
        law = cls._linear(x, seconds, low)
        for _ in range(30):
            now = law._work(x) <= law.floor
            if np.array_equal(now, low):
                break
            law, low = cls._linear(x, seconds, now), now
        return law

    @classmethod
    def _linear(cls, x: Shapes, seconds: Floats, low: Bools) -> Self:
        one, high = np.ones_like(seconds), ~low
        tokens = high * (x.decodes + x.prefill)
        columns = (one, low * one, x.decodes, x.context, tokens, x.prefill_context)
        return cls(*_solve(columns, seconds))

    def _work(self, x: Shapes) -> Floats:
        return np.asarray(self.prefill * (x.decodes + x.prefill))


@dataclass(frozen=True, slots=True)
class Bros(LatencyLaw):
    """BROS 4.1: a0 * L + a1 * L * L_a + b, with prompts and answers apart.

    L: tokens computed; L * L_a: their sum over the tokens each attends to. A mixed batch is the sum of both
    parts but has one base, the larger: the weights are read once.
    """

    NAME: ClassVar[str] = "bros"
    CODE: ClassVar[int] = BROS
    prefill_tokens: float
    prefill_pairs: float
    prefill_base: float
    decode_tokens: float
    decode_pairs: float
    decode_base: float

    @classmethod
    def fit(cls, x: Shapes, seconds: Floats) -> Self:
        """Fit each part on the batches that hold nothing else; a part without any is all zero."""
        (p, p_time), (d, d_time) = _apart(x, seconds)
        prefill = _solve((p.prefill, p.prefill_context, np.ones_like(p_time)), p_time)
        return cls(*prefill, *_solve((d.decodes, d.context, np.ones_like(d_time)), d_time))


@dataclass(frozen=True, slots=True)
class SloAware(LatencyLaw):
    """SLO-aware 4.2: alpha * b * l + beta * b + gamma * l + delta, with prompts and answers apart.

    b: requests, l: their mean length. A `Batch` has no number of prompts: it is taken as that of equal
    prompts with nothing before them, exact for one whole prompt. Mixed batches as in `Bros`.
    """

    NAME: ClassVar[str] = "slo_aware"
    CODE: ClassVar[int] = SLO_AWARE
    prefill_alpha: float
    prefill_beta: float
    prefill_gamma: float
    prefill_delta: float
    decode_alpha: float
    decode_beta: float
    decode_gamma: float
    decode_delta: float

    @classmethod
    def fit(cls, x: Shapes, seconds: Floats) -> Self:
        """Fit each part on the batches that hold nothing else; a part without any is all zero."""
        (p, p_time), (d, d_time) = _apart(x, seconds)
        prefill = _solve((p.prefill, *_prompts(p), np.ones_like(p_time)), p_time)
        columns = (d.context, d.decodes, d.context / np.maximum(d.decodes, 1), np.ones_like(d_time))
        return cls(*prefill, *_solve(columns, d_time))


LAWS: dict[str, type[Additive] | type[Stepped] | type[Roofline] | type[Bros] | type[SloAware]] = {
    law.NAME: law for law in (Additive, Stepped, Roofline, Bros, SloAware)
}


@dataclass(frozen=True, slots=True)
class Error:
    """The error of a law, as fractions of the measured seconds: the mean and two quantiles over `rows`."""

    mean: float
    p50: float
    p90: float
    rows: int


def fit(name: str, batches: Sequence[Batch], seconds: Floats) -> tuple[LatencyLaw, dict[str, Error]]:
    """Return the named law fitted to measured seconds (one per batch, > 0), and its `errors`."""
    x, measured = Shapes.of(batches), np.asarray(seconds, float)
    if not measured.size or measured.shape != x.decodes.shape or not np.all(measured > 0):
        raise ValueError("a fit needs one duration above 0 for each batch, and at least one batch")
    law = LAWS[name].fit(x, measured)
    return law, errors(law, x, measured)


def errors(law: LatencyLaw, x: Shapes, measured: Floats) -> dict[str, Error]:
    """Return the absolute relative error of a law: "all", and each kind of `KINDS` that occurs."""
    off = np.abs(law.seconds(x) / measured - 1)
    rows = {"all": np.ones_like(off, bool)} | {kind: x.kind(kind) for kind in KINDS}
    return {kind: _error(off[which]) for kind, which in rows.items() if which.any()}


def nonnegative(a: Floats, y: Floats) -> Floats:
    """Return x >= 0 that minimises |a x - y| (Lawson and Hanson's active set); a: (rows, columns)."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0  # a column of zeros explains nothing and stays at 0
    a = a / scale
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    for _ in range(10 * a.shape[1]):
        slope = np.where(free, -np.inf, a.T @ (y - a @ x))
        if slope.max(initial=-np.inf) <= 1e-10 * (1 + np.linalg.norm(y)):
            break
        free[slope.argmax()] = True
        x, free = _within(a, y, x, free)
    return np.asarray(x / scale)


def _within(a: Floats, y: Floats, x: Floats, free: Bools) -> tuple[Floats, Bools]:
    """Move x to the best values of its free columns; a column that would turn negative stops at 0."""
    while free.any():
        best = np.zeros_like(x)
        best[free] = np.linalg.lstsq(a[:, free], y, rcond=None)[0]
        wrong = free & (best <= 0)
        if not wrong.any():
            return best, free
        x = x + (x[wrong] / (x[wrong] - best[wrong])).min() * (best - x)
        free = free & (x > 1e-12)
        x = np.where(free, x, 0.0)
    return x, free


def _solve(columns: Sequence[Floats], seconds: Floats) -> list[float]:
    if not seconds.size:
        return [0.0] * len(columns)
    return [float(v) for v in nonnegative(np.stack(columns, 1) / seconds[:, None], np.ones_like(seconds))]


def _apart(x: Shapes, seconds: Floats) -> list[tuple[Shapes, Floats]]:
    return [(x.only(rows), seconds[rows]) for rows in (x.kind("prefill"), x.kind("decode"))]


def _prompts(x: Shapes) -> tuple[Floats, Floats]:
    """Return the number of prompts and their length, see `SloAware`."""
    length = np.maximum(2 * x.prefill_context / np.maximum(x.prefill, 1), np.minimum(x.prefill, 1))
    return x.prefill / np.maximum(length, 1), length


def _error(off: Floats) -> Error:
    p50, p90 = np.quantile(off, (0.5, 0.9))
    return Error(float(off.mean()), float(p50), float(p90), off.size)


# Table 2 of the paper, in seconds: Qwen2.5-7B on two V100s.
PUBLISHED = SloAware(1e-4, 5.7e-3, 1e-5, 43.67e-3, 2e-7, 0.275e-3, 8.8e-7, 15.85e-3)
_LENGTHS = (32, 128, 512, 1024, 2048)  # the law holds below 2k tokens


def sampled(latency: Callable[[Batch], float], max_running: int) -> SloAware:
    """Return the law that is nearest to a latency model in batches of up to `max_running` requests.

    latency: forecast seconds of an iteration.
    """
    batches = list(_batches(max_running))
    seconds = np.array([latency(batch) for batch in batches])
    return SloAware.fit(Shapes.of(batches), seconds)


def _batches(max_running: int) -> Iterator[Batch]:
    """Yield batches of equal prompts, and of answers with equal context."""
    for size in sorted({1, 2, max(max_running // 2, 1), max_running}):
        for length in _LENGTHS:
            yield Batch(0, 0, size * length, size * length * length // 2)
            yield Batch(size, size * length, 0)
