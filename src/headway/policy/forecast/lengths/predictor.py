"""Online forecasts of output lengths from the prompt (EcoServe 2.3, 3.2.2).

The caller registers the `features` of a prompt, a ridge regression forecasts, and every answer is
learned from. Until there are enough answers, the forecast is the task's (`task.py`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.policy.forecast.lengths.task import TaskLengths
from headway.types import Floats, Forecast, Ints, Request

Features = NDArray[np.float32]  # per prompt: `PLAIN` numbers, then its embedding, if there is one
PLAIN = 8
SAMPLES = 64  # of each forecast

_NEAR = 0.1 / PLAIN  # weight of a squared difference in a plain feature, in standard deviations
_MEANINGS = (0.25, 1.0)  # candidates for the weight of a squared distance between embeddings
_RIDGES = (0.1, 0.3, 1.0)  # candidates for the noise, over the variance that features explain
_OTHER_TASK = 1.0  # distance that another task adds
_CHOSEN_ON = 256  # answers that the candidates are compared on
_LEVELS = 32  # forecasts at which the errors are kept


@dataclass(frozen=True, slots=True)
class History:
    """Answers, oldest first.

    features: of their prompts, one row each.
    tasks: of the requests.
    output_tokens: at least 1 each.
    """

    features: Features
    tasks: tuple[str, ...]
    output_tokens: Floats

    def __len__(self) -> int:
        return len(self.tasks)

    def last(self, n: int) -> History:
        """Return the latest n answers."""
        return History(self.features[-n:], self.tasks[-n:], self.output_tokens[-n:])


@dataclass(frozen=True, slots=True)
class _Scale:
    """The scaling of features, after which a squared distance is an exponent of the kernel."""

    centre: NDArray[np.float32]
    factor: NDArray[np.float32]

    @classmethod
    def of(cls, features: Features, meaning: float) -> _Scale:
        centre, factor = np.zeros(features.shape[1]), np.full(features.shape[1], np.sqrt(meaning))
        centre[:PLAIN] = features[:, :PLAIN].mean(0)
        # Features that hardly vary must not tell the next prompt from all others.
        factor[:PLAIN] = np.sqrt(_NEAR) / np.maximum(features[:, :PLAIN].std(0), 0.1)
        return cls(centre.astype(np.float32), factor.astype(np.float32))

    def __call__(self, features: Features) -> Features:
        return np.asarray((features - self.centre) * self.factor, np.float32)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Scaled features, their squared lengths, and codes of tasks."""

    features: Features
    sizes: NDArray[np.float32]
    codes: Ints

    @classmethod
    def of(cls, features: Features, codes: Ints) -> _Rows:
        return cls(features, np.einsum("ij,ij->i", features, features), codes)


@dataclass(frozen=True, slots=True)
class Model:
    """A fitted forecast of lengths, by kernel ridge regression on features of the prompt (EcoServe 2.3).

    It predicts the square root of the length: prompts of similar embedding and size get similar answers. The spread
    of a forecast comes from the leave-one-out errors of answers with similar forecasts. It stands in for the paper's
    fine-tuned OPT-13B and takes a hundredth of a second. Immutable: the next one is fitted in the background and
    replaces it.
    """

    scale: _Scale
    rows: _Rows
    tasks: dict[str, int]
    weights: Floats
    middle: float
    levels: Floats
    errors: Floats  # at each level `SAMPLES` errors, ascending

    def samples(self, features: Features, tasks: Sequence[str]) -> Floats:
        """Return `SAMPLES` equally likely lengths per prompt (row of features), ascending, at least 1
        token."""
        codes = np.array([self.tasks.get(task, -1) for task in tasks], np.int64)
        root = self.middle + _kernel(_Rows.of(self.scale(features), codes), self.rows) @ self.weights
        level = np.clip(np.searchsorted(self.levels, root), 0, len(self.levels) - 1)
        return np.asarray(np.maximum(root[:, None] + self.errors[level], 1.0) ** 2, float)


def fit(history: History) -> Model:
    """Return the model of these answers, at least 2; deterministic. O(n^3): about a second for 2,048."""
    tasks = {task: code for code, task in enumerate(sorted(set(history.tasks)))}
    codes = np.array([tasks[task] for task in history.tasks], np.int64)
    meaning, ridge = _choose(history.last(_CHOSEN_ON), codes[-_CHOSEN_ON:])
    scale = _Scale.of(history.features, meaning)
    rows, root = _Rows.of(scale(history.features), codes), np.sqrt(history.output_tokens)
    middle = float(root.mean())
    weights, off = _solve(_kernel(rows, rows), root - middle, ridge)
    levels, errors = _errors(root - off, off)
    return Model(scale, rows, tasks, weights, middle, levels, errors)


def _choose(history: History, codes: Ints) -> tuple[float, float]:
    """Return the weight of meaning and the ridge whose leave-one-out errors are the smallest."""
    root = np.sqrt(history.output_tokens)
    has_meaning = history.features.shape[1] > PLAIN
    best, least = (_MEANINGS[-1], _RIDGES[-1]), np.inf
    for meaning in _MEANINGS if has_meaning else _MEANINGS[-1:]:
        rows = _Rows.of(_Scale.of(history.features, meaning)(history.features), codes)
        kernel = _kernel(rows, rows)
        for ridge in _RIDGES:
            loss = float(np.square(_solve(kernel, root - root.mean(), ridge)[1]).mean())
            if loss < least:
                best, least = (meaning, ridge), loss
    return best


def _kernel(a: _Rows, b: _Rows) -> Floats:
    """Return exp(-squared distance) between rows; another task adds `_OTHER_TASK` to the distance."""
    apart = a.sizes[:, None] + b.sizes[None, :] - 2 * (a.features @ b.features.T)
    apart = np.maximum(apart, 0) + _OTHER_TASK * (a.codes[:, None] != b.codes[None, :])
    return np.asarray(np.exp(-apart.astype(float)))


def _solve(kernel: Floats, target: Floats, ridge: float) -> tuple[Floats, Floats]:
    """Return the weights, and by how much each target is above its forecast from all the others."""
    inverse = np.linalg.inv(kernel + ridge * np.eye(len(target)))
    weights = inverse @ target
    return weights, weights / np.diag(inverse)


def _errors(forecast: Floats, off: Floats) -> tuple[Floats, Floats]:
    """Return levels of forecasts and, at each, quantiles of the errors of the quarter with the nearest
    forecasts."""
    order = np.argsort(forecast, kind="stable")
    forecast, off, n = forecast[order], off[order], len(off)
    near = min(n, max(32, n // 4))
    quantiles = (np.arange(SAMPLES) + 0.5) / SAMPLES
    at = np.unique(np.linspace(0, n - 1, min(_LEVELS, n)).astype(int))
    first = np.clip(at - near // 2, 0, n - near)
    return forecast[at], np.array([np.quantile(off[i : i + near], quantiles) for i in first])


WINDOW = 2048  # answers that a model is fitted to
_CODE = frozenset("{}()[]=;`<>")


def features(text: str, prompt_tokens: int, meaning: Features | None = None) -> Features:
    """Return the features of a prompt: sizes and marks on a logarithmic scale, then its embedding."""
    marks = (
        prompt_tokens,
        len(text),
        text.count("?"),
        text.count("\n"),
        sum(map(str.isdigit, text)),
        sum(letter in _CODE for letter in text),
        len(text.split()),
        text.count(".") + text.count("!"),
    )
    assert len(marks) == PLAIN
    plain = np.log1p(np.array(marks, np.float32))
    return plain if meaning is None else np.concatenate([plain, meaning.astype(np.float32)])


@dataclass(slots=True)
class _Open:
    """A request in flight: the features of its prompt, and its forecast once that was asked for."""

    features: Features
    forecast: Forecast | None = None


class Predictor:
    """Forecasts from the prompt for requests with registered features, from the task for all others.

    Pure: the caller fits the model in the background (`due`, `history`, `fit`, `adopt`). A fit is due at
    `least` answers and then whenever their number has grown by a quarter, at most by 256.

    window: answers in the history, at most.
    opened: requests in flight, at most; the oldest are forgotten first.
    """

    def __init__(self, window: int = WINDOW, least: int = 64, opened: int = 16384) -> None:
        self.tasks = TaskLengths()
        self.model: Model | None = None
        self.least, self._opened = least, opened
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._seen: deque[tuple[Features, str, float]] = deque(maxlen=window)
        self._fresh = 0  # answers since the last fit began

    def register(self, id: str, features: Features) -> None:
        """Register the features of a request's prompt, before its first forecast."""
        self._open[id] = _Open(features)
        if len(self._open) > self._opened:
            self._open.popitem(last=False)

    def forget(self, id: str) -> None:
        """Let go of a request that ended; unknown ids are ignored."""
        self._open.pop(id, None)

    def reads(self, id: str) -> bool:
        """Tell whether this request's forecast comes from its prompt."""
        return self.model is not None and id in self._open

    def forecast(self, request: Request) -> Forecast:
        """Return the distribution of the answer's tokens, sorted, each in 1..max_tokens.

        A request with features keeps its first forecast, so that every policy plans with the same.
        """
        told = self._open.get(request.id)
        if told is None:
            return self.tasks.forecast(request)
        if told.forecast is None:
            told.forecast = self._read(told.features, request)
        return told.forecast

    def learn(self, request: Request, output_tokens: int) -> None:
        """Add one answer's length; empty answers (aborted before the first token) teach nothing."""
        self.tasks.learn(request, output_tokens)
        told = self._open.pop(request.id, None)
        if told is not None and output_tokens > 0:
            self._seen.append((told.features, request.task, float(output_tokens)))
            self._fresh += 1

    def remember(self, history: History) -> None:
        """Take over the history of an earlier process, before this one's first answer."""
        for features, task, output_tokens in zip(
            history.features, history.tasks, history.output_tokens.tolist(), strict=True
        ):
            self._seen.append((features, task, output_tokens))
            self.tasks.add(task, int(output_tokens))
        self._fresh = len(self._seen)

    @property
    def known(self) -> int:
        """The answers in the history."""
        return len(self._seen)

    @property
    def due(self) -> bool:
        """Tell whether the model should be fitted (again)."""
        enough = self.least if self.model is None else min(max(32, len(self._seen) // 4), 256)
        return self._fresh >= enough

    def history(self) -> History:
        """Return the answers to fit to; from now on the count for the next fit begins anew."""
        self._fresh = 0
        features, tasks, output_tokens = zip(*self._seen, strict=True)
        return History(np.array(features, np.float32), tuple(tasks), np.array(output_tokens))

    def adopt(self, model: Model) -> None:
        """Forecast with this model from now on."""
        self.model = model

    def _read(self, features: Features, request: Request) -> Forecast:
        if self.model is None:
            return self.tasks.forecast(request)
        samples = self.model.samples(features[None, :], (request.task,))[0]
        return Forecast(np.minimum(samples, request.max_tokens))
