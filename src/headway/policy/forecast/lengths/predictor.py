"""Online forecasts of output lengths from the prompt (EcoServe 2.3, 3.2.2).

The caller registers the `features` of a prompt, the model of `ridge.py` forecasts, and every answer is
learned from. Until there are enough answers, the forecast is the task's (`task.py`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from headway.policy.forecast.lengths.ridge import PLAIN, Features, History, Model
from headway.policy.forecast.lengths.task import TaskLengths
from headway.types import Forecast, Request

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
