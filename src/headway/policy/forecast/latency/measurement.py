"""The design of a latency measurement on a live engine, and the fit of latency laws to its iterations.

The load is made of scenes: answers in progress (a ladder of batch sizes, since they end one after another)
and prompts that arrive alone or among them. The shapes and times of the resulting batches come from the
engine's own iteration log, so a scene is a stimulus and never an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from headway.policy.forecast.latency.laws import KINDS, LAWS, Error, LatencyLaw, Shapes, errors, fit, nonnegative
from headway.types import Batch, Bools, Floats

_CONTEXTS, _QUICK_CONTEXTS = (32, 128, 256, 512, 1024), (64, 512)
_ALONE, _QUICK_ALONE = (16, 32, 64, 128, 256, 512, 1024, 1900), (32, 128, 512)
_AMONG, _QUICK_AMONG = (32, 128, 256, 512, 1024), (64, 256, 512)
PROMPT_OUTPUT = 3  # so that a request's beginning and its end lie in different iterations
_RUNG, _QUICK_RUNG = 12, 6  # iterations at each batch size of a ladder
_BETWEEN = 8  # iterations that pass between two prompts among answers, more or less
_AROUND = 5  # samples before and after one that tell whether the machine was disturbed
_DISTURBED = 1.2
_ENOUGH = 10  # requests that met a busy engine
_POOL = 6  # iterations of answers alone that make one sample: they differ by a token each


Row = Sequence[float | None]  # of an iteration log: start, seconds, interval, then a `Batch`


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine takes.

    max_running: requests at once.
    kv_tokens: tokens of KV.
    max_model_len: tokens of one request.
    """

    max_running: int
    kv_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Scene:
    """One load of the engine.

    answers: (prompt, output) tokens of requests that begin together.
    prompts: lengths of requests that come one after another, each for `PROMPT_OUTPUT` tokens, once all
        answers are in progress.
    """

    answers: tuple[tuple[int, int], ...] = ()
    prompts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that the scene computes, by which its progress counts."""
        return sum(prompt + 4 * output for prompt, output in self.answers) + sum(self.prompts)


def design(limits: Limits, rng: np.random.Generator, *, quick: bool = False, passes: int = 1) -> list[Scene]:
    """Return the scenes of the grid batch x context x prefill and of mixed batches, in random order.

    What does not fit the limits is left out. quick: a few points only. The same generator state, the same
    scenes.
    """
    scenes: list[Scene] = []
    for _ in range(passes):
        contexts = _QUICK_CONTEXTS if quick else _CONTEXTS
        scenes += [_ladder(context, limits, _QUICK_RUNG if quick else _RUNG, rng) for context in contexts]
        scenes.append(Scene((), tuple(n for n in (_QUICK_ALONE if quick else _ALONE) if _fits(n, limits))))
        scenes += _mixed(limits, rng, quick) + _visits(limits, rng, quick)
    return [scenes[i] for i in rng.permutation(len(scenes)) if scenes[i].answers or scenes[i].prompts]


def _ladder(context: int, limits: Limits, rung: int, rng: np.random.Generator) -> Scene:
    """Return a full batch whose answers end by halves, so that it passes through every power of two."""
    outputs, left, length = [], limits.max_running, rung
    while left:
        ends = (left + 1) // 2
        outputs += [length] * ends
        left, length = left - ends, length + rung
    return Scene(_around(context, outputs, limits, rng))


def _mixed(limits: Limits, rng: np.random.Generator, quick: bool) -> list[Scene]:
    prompts = tuple(n for n in (_QUICK_AMONG if quick else _AMONG) if _fits(n, limits))
    top = limits.max_running - 1  # one place is for the prompt
    sizes = {max(top // 2, 1)} if quick else {max(top // 8, 1), max(top // 2, 1), max(top, 1)}
    outputs = _BETWEEN * len(prompts) + 4
    return [
        Scene(_around(context, [outputs] * size, limits, rng), tuple(rng.permutation(prompts).tolist()))
        for size in sorted(sizes)
        for context in ((256,) if quick else (128, 512))
    ]


def _visits(limits: Limits, rng: np.random.Generator, quick: bool) -> list[Scene]:
    """Return answers in progress and many short prompts, by which overheads are measured."""
    count, sizes = (6, (0.5,)) if quick else (12, (0.25, 0.5, 1.0))
    answers = [max(round(share * limits.max_running) - 1, 1) for share in sizes]
    outputs = _BETWEEN * count
    return [
        Scene(
            _around(200, [outputs] * size, limits, rng),
            tuple(int(n) for n in rng.integers(40, 160, count) if _fits(int(n), limits)),
        )
        for size in answers
    ]


def _around(
    context: int, outputs: Sequence[int], limits: Limits, rng: np.random.Generator
) -> tuple[tuple[int, int], ...]:
    """Return answers whose contexts lie around a mean: real batches are never of one length."""
    found, room = [], limits.kv_tokens - limits.max_model_len  # a place for a prompt, whatever its length
    for output in outputs:
        prompt = min(int(context * rng.uniform(0.5, 1.5)) + 1, limits.max_model_len - output)
        if prompt >= 1 and prompt + output <= room:
            found.append((prompt, output))
            room -= prompt + output
    return tuple(found)


def _fits(prompt: int, limits: Limits) -> bool:
    return prompt + PROMPT_OUTPUT <= min(limits.max_model_len, limits.kv_tokens)


# ---- what the engine did


@dataclass(frozen=True, slots=True)
class Samples:
    """Iterations as measured: shapes, and seconds of each."""

    batches: list[Batch]
    seconds: Floats

    @classmethod
    def of(cls, rows: Sequence[Row], column: str = "interval") -> Samples:
        """Return the samples of an engine's rows (`engines/vllm/plugin/recording.py`), by `seconds` or by
        `interval`.

        Answers alone are pooled: neighbours of the same batch size differ by a token each, and their mean is
        what a simulation adds up. Rows without a time are left out.
        """
        place = {"seconds": 1, "interval": 2}[column]
        whole = [np.array(row, float) for row in rows if row[place] is not None]
        pools: list[list[Floats]] = []
        for row in whole:
            same = bool(pools) and not row[5] and not pools[-1][-1][5] and row[3] == pools[-1][-1][3]
            if same and len(pools[-1]) < _POOL:
                pools[-1].append(row)
            else:
                pools.append([row])
        means = [np.mean(pool, 0) for pool in pools]
        shapes = [Batch(*(round(value) for value in mean[3:7])) for mean in means]
        return cls(shapes, np.array([mean[place] for mean in means]))

    def only(self, rows: Bools) -> Samples:
        """Return the samples where `rows` is true."""
        return Samples([b for b, kept in zip(self.batches, rows, strict=True) if kept], self.seconds[rows])


@dataclass(frozen=True, slots=True)
class Fits:
    """Every law fitted to the same samples, how far each is off, and the name of the nearest.

    samples: those that were used.
    disturbed: how many were not, because another program had the machine.
    """

    laws: Mapping[str, LatencyLaw]
    errors: Mapping[str, dict[str, Error]]
    best: str
    samples: Samples
    disturbed: int


def fit_all(samples: Samples, names: Sequence[str] = tuple(LAWS)) -> Fits:
    """Fit every law; the best misses the means of like batches least. Raises ValueError without samples.

    Single iterations scatter far more than laws differ, so errors of single ones would not tell them apart.
    """
    calm = _calm(samples)
    used = samples.only(calm)
    laws = {name: _unbiased(name, used) for name in names}
    x = Shapes.of(used.batches)
    off = {name: errors(law, x, used.seconds) for name, law in laws.items()}
    best = min(laws, key=lambda name: _misfit(laws[name], used))
    return Fits(laws, off, best, used, int(np.count_nonzero(~calm)))


def _calm(samples: Samples) -> Bools:
    """Tell which samples belong to a stretch in which the engine had the machine to itself.

    A program that runs beside it for seconds makes every batch slow, of whatever shape: the median ratio to
    the forecast of the samples around tells. Single slow iterations are the engine's own and stay.
    """
    kept = np.ones(samples.seconds.size, bool)
    if kept.size <= 2 * _AROUND:
        return kept
    for _ in range(3):
        law, _errors = fit("stepped", samples.only(kept).batches, samples.seconds[kept])
        calm = ~_slow(samples.seconds / law.seconds(Shapes.of(samples.batches)))
        if np.array_equal(calm, kept):
            break
        kept = calm
    return kept


def _slow(ratio: Floats) -> Bools:
    """Tell where the median of a ratio and its neighbours is well above that of all."""
    padded = np.pad(ratio, _AROUND, mode="reflect")
    level = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _AROUND + 1), axis=1)
    return np.asarray(level >= _DISTURBED * np.median(ratio))


def disturbed(law: LatencyLaw, rows: Sequence[Row]) -> float:
    """Return the seconds of a run in which all was slow, whatever its shape: not the engine's doing."""
    samples = Samples.of(rows)
    if samples.seconds.size <= 2 * _AROUND:
        return 0.0
    slow = _slow(samples.seconds / law.seconds(Shapes.of(samples.batches)))
    share = float(samples.seconds[slow].sum() / samples.seconds.sum())
    return share * sum(float(row[2] or 0.0) for row in rows)


def _unbiased(name: str, samples: Samples) -> LatencyLaw:
    """Return the law fitted to the mean of like batches, all samples together as long as they were.

    Least squares of relative errors aim below the mean of what scatters, by its variance: short iterations
    would come out too short. A simulation adds up, so it needs means.
    """
    law, _ = fit(name, samples.batches, samples.seconds)
    for _ in range(2):
        law, _ = fit(name, samples.batches, _typical(law, samples))
    return _level(law, samples)


def _typical(law: LatencyLaw, samples: Samples) -> Floats:
    """Return the law's seconds, corrected for each kind of batch (powers of two of its size) by its mean."""
    x = Shapes.of(samples.batches)
    told = law.seconds(x)
    kinds = np.stack([np.ceil(np.log2(x.decodes + 1)), np.ceil(np.log2(x.prefill + 1))], 1)
    _, kind = np.unique(kinds, axis=0, return_inverse=True)
    ratio = np.bincount(kind.ravel(), samples.seconds) / np.bincount(kind.ravel(), told)
    return np.asarray(told * ratio[kind.ravel()])


def _misfit(law: LatencyLaw, samples: Samples) -> float:
    """Return the share of all time by which a law misses each kind of batch as a whole."""
    told, x = law.seconds(Shapes.of(samples.batches)), Shapes.of(samples.batches)
    off = _typical(law, samples) - told
    apart = [abs(float(off[x.kind(kind)].sum())) for kind in KINDS]
    return (sum(apart) + float(np.abs(off).sum())) / float(samples.seconds.sum())


def _level(law: LatencyLaw, samples: Samples) -> LatencyLaw:
    """Return the law scaled so that all samples together last as long as they did."""
    factor = float(samples.seconds.sum() / law.seconds(Shapes.of(samples.batches)).sum())
    return scaled(law, factor)


def scaled(law: LatencyLaw, factor: float) -> LatencyLaw:
    """Return a law whose every duration is `factor` times as long: all laws are linear in their fields."""
    typed: Any = law
    found: LatencyLaw = type(typed)(*(factor * float(getattr(typed, entry.name)) for entry in fields(typed)))
    return found


def bias(law: LatencyLaw, rows: Sequence[Row], *, more: float = 0.0) -> float:
    """Return by which fraction a law's forecast of rows, all together, is longer than they were.

    more: seconds to add to the forecast, such as all interruptions of that time.
    """
    whole = [row for row in rows if row[2] is not None]
    shapes = Shapes(*np.array([row[3:7] for row in whole], float).reshape(-1, 4).T)
    told = float(law.seconds(shapes).sum()) + more
    return float(told / sum(float(row[2] or 0) for row in whole) - 1)


def interruptions(rows: Sequence[Row], arrivals: Sequence[Floats]) -> tuple[list[float], list[Row]]:
    """Return by how many seconds each kind of arrival makes the iteration in progress longer, and the rows
    without that.

    arrivals: instants at which requests were sent, one array per kind. Where the API server has the engine's
    cores, its work for a request is taken from whatever runs; a latency law that held it would count it
    twice.
    """
    whole = np.array([row for row in rows if row[2] is not None], float)
    counts = np.stack([_during(whole, times) for times in arrivals], 1)
    x = Shapes(*whole[:, 3:7].T)
    prompts = (x.prefill > 0).astype(float)
    columns = np.stack([np.ones_like(prompts), x.decodes, x.context, x.prefill, x.prefill_context, prompts], 1)
    each = _robust(np.hstack([columns, counts]), whole[:, 2])[6:]
    shorter = whole.copy()
    shorter[:, 2] = np.maximum(whole[:, 2] - counts @ each, whole[:, 2] / 2)
    return each.tolist(), shorter.tolist()


def _during(rows: Floats, times: Floats) -> Floats:
    """Return how many of the times fall into each row's iteration."""
    place = np.searchsorted(rows[:, 0], times, "right") - 1
    place = place[(place >= 0) & (times < rows[np.maximum(place, 0), 0] + rows[np.maximum(place, 0), 2])]
    return np.bincount(place, minlength=rows.shape[0]).astype(float)


def _robust(a: Floats, y: Floats) -> Floats:
    """Return x >= 0 with a x near y, errors counted relative to a x; what is far off is left out."""
    weight, near = 1 / y, np.ones(y.size, bool)
    for _ in range(6):
        x = nonnegative(a[near] * weight[near, None], y[near] * weight[near])
        told = np.maximum(a @ x, 1e-4)
        weight, near = 1 / told, (y < 1.6 * told) & (y > 0.6 * told)
    return x


# ---- what lies outside of the iterations


@dataclass(frozen=True, slots=True)
class Seen:
    """One request by two clocks that agree.

    sent, shown: when the client sent it and saw its first token.
    entered, first: when the scheduler got it, and its decision after the first token.
    """

    sent: float
    entered: float
    first: float
    shown: float


def overheads(seen: Sequence[Seen], rows: Sequence[Row]) -> tuple[float, float]:
    """Return (request, token) overheads in seconds.

    request: from the client to the scheduler. A scheduler takes what has come when it decides next, so the
        overhead is the one for which entries at those instants are right on average.
    token: from the decision after an iteration to the client, the mean of the middle nine tenths.

    If enough requests met a busy engine, only these count: its cores are shared, and idle ones are rare.
    """
    starts = np.array([row[0] for row in rows if row[2] is not None], float)
    ends = starts + np.array([row[2] for row in rows if row[2] is not None], float)
    met = [s for s in seen if _inside(np.array([s.sent]), starts, ends)[0]]
    seen = met if len(met) >= _ENOUGH else seen
    sent, entered = np.array([s.sent for s in seen]), np.array([s.entered for s in seen])
    late = np.sort([s.shown - s.first for s in seen])
    cut = late.size // 20
    return _request_overhead(sent, entered, starts, ends), float(late[cut : late.size - cut].mean())


def _request_overhead(sent: Floats, entered: Floats, starts: Floats, ends: Floats) -> float:
    low, high = 0.0, float(np.max(entered - sent, initial=1e-3))
    for _ in range(40):
        middle = (low + high) / 2
        off = np.sort(_entries(sent + middle, starts, ends) - entered)
        cut = off.size // 20  # a lost time slice here and there is no overhead
        low, high = (middle, high) if off[cut : off.size - cut].mean() < 0 else (low, middle)
    return (low + high) / 2


def _entries(ready: Floats, starts: Floats, ends: Floats) -> Floats:
    """Return when a scheduler takes what is ready: at once when idle, else when its iteration is over."""
    place = np.maximum(np.searchsorted(starts, ready, "right") - 1, 0)
    return np.where(_inside(ready, starts, ends), ends[place], ready)


def _inside(instants: Floats, starts: Floats, ends: Floats) -> Bools:
    """Tell which instants lie within an iteration."""
    place = np.searchsorted(starts, instants, "right") - 1
    return np.asarray((place >= 0) & (instants < ends[np.maximum(place, 0)]))
