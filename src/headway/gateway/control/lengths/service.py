"""Length forecasts in the gateway, from each task's last answers or from the prompt (EcoServe 2.3, 3.2.2).

One thread reads prompts before their requests are stored; another fits the model again. When more than
`_MAX_READING` prompts are being read, further ones are forecast from their task's last answers instead. So
are background jobs that an earlier process left: a new process has no model yet.
"""

from __future__ import annotations

import asyncio
import logging
import zipfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headway import config
from headway.gateway import tasks
from headway.gateway.control.lengths.embedding import Embedder, locate, one_thread
from headway.gateway.files import replacing
from headway.gateway.watch.metrics import Metrics
from headway.policy.forecast.lengths.padding import Adaptive, Padded, PaddingTuner
from headway.policy.forecast.lengths.predictor import History, Model, Predictor, features, fit
from headway.policy.forecast.lengths.task import GaussianLengths, TaskLengths
from headway.policy.recipes.recipe import Recipe
from headway.ports import Lengths
from headway.types import Request

_MAX_READING = 16  # prompts in the reading thread; one takes about 10 ms
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
Embed = Callable[[str], NDArray[np.float32]]
log = logging.getLogger("headway.gateway")


class LengthService(Protocol):
    """A source of length forecasts. lengths: the forecasts, for controller and engines."""

    @property
    def lengths(self) -> Lengths: ...

    async def read(self, request: Request, text: str | None) -> None:
        """Read the prompt of a request that is about to be stored."""

    def answered(self, request: Request, output_tokens: int) -> None:
        """Count how good the forecast was, before the answer is learned from."""

    def ended(self, id: str) -> None:
        """Forget a request."""


@asynccontextmanager
async def open_lengths(
    recipe: Recipe, settings: config.Predictor, metrics: Metrics, history: Path | None = None
) -> AsyncIterator[LengthService]:
    """Yield the source of forecasts that a recipe plans with; ConfigError when its encoder is missing.

    history: the file that keeps answers over restarts; None = they are not kept.
    """
    if recipe.lengths != "padded":
        yield TaskService(
            GaussianLengths(draws=np.random.default_rng(0)) if recipe.lengths == "drawn" else TaskLengths()
        )
        return
    one_thread()
    path = locate(settings.embedding)
    if path is None:
        log.warning('lengths are forecast without prompt embeddings (predictor.embedding = "none")')
    embedder = await asyncio.to_thread(Embedder, path) if path is not None else None
    service = PredictorService(settings, metrics, embedder)
    try:
        if history is not None:
            await service.recall(history)
        yield service
    finally:
        await service.stop()


class TaskService:
    """Forecasts from each task's answers; it reads no prompt."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths

    async def read(self, request: Request, text: str | None) -> None:
        """Do nothing."""

    def answered(self, request: Request, output_tokens: int) -> None:
        """Do nothing."""

    def ended(self, id: str) -> None:
        """Do nothing."""


class PredictorService:
    """Forecasts of the length predictor, padded.

    settings: a quantile to plan with, or None = the cheapest is found; window of answers.
    embed: turns a prompt into an embedding; None = forecasts do without.
    fit: makes a model of the answers that it is given.
    """

    def __init__(
        self,
        settings: config.Predictor,
        metrics: Metrics,
        embed: Embed | None = None,
        fit: Callable[[History], Model] = fit,
    ) -> None:
        self.predictor = Predictor(settings.window)
        self._quantile, self._tuner = settings.quantile, PaddingTuner()
        self.lengths: Lengths = (
            Padded(self.predictor, settings.quantile) if settings.quantile else Adaptive(self.predictor, self._tuner)
        )
        self._metrics = LengthMetrics(metrics.registry)
        self._metrics.quantile.set(self._quantile or self._tuner.quantile)
        self._embed, self._model_of = embed, fit
        self._history: Path | None = None
        self._reading = 0
        self._fitting: asyncio.Task[None] | None = None
        self._reader = ThreadPoolExecutor(1, "headway-reads")  # threads begin with the first piece of work
        self._fitter = ThreadPoolExecutor(1, "headway-fits")

    async def recall(self, history: Path) -> None:
        """Learn from the answers that an earlier process kept in this file, and keep answers there."""
        self._history = history
        loop = asyncio.get_running_loop()
        width = (await loop.run_in_executor(self._reader, self._features, "", 0)).size
        known = await loop.run_in_executor(self._reader, recall, history, width)
        if known is not None:
            self.predictor.remember(known)
            self._fit_if_due()

    async def stop(self) -> None:
        """Keep what was learned and let go of the threads."""
        if self.predictor.known and self._history is not None:
            await asyncio.to_thread(keep, self._history, self.predictor.history())
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._fitter.shutdown(wait=False, cancel_futures=True)
        if self._fitting is not None:
            await tasks.cancel(self._fitting)

    async def read(self, request: Request, text: str | None) -> None:
        """Give the predictor a prompt's features, computed beside the event loop."""
        if text is None:
            self._metrics.forecasts.labels("task_no_text").inc()
        elif self._reading >= _MAX_READING:
            self._metrics.forecasts.labels("task_crowd").inc()
        else:
            await self._read(request, text)

    async def _read(self, request: Request, text: str) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._reading += 1
        try:
            prompt = await loop.run_in_executor(self._reader, self._features, text, request.context)
        finally:
            self._reading -= 1
        self._metrics.seconds.observe(loop.time() - began)
        self.predictor.register(request.id, prompt)
        source = "prompt" if self.predictor.reads(request.id) else "task_untaught"
        self._metrics.forecasts.labels(source).inc()

    def _features(self, text: str, tokens: int) -> NDArray[np.float32]:
        return features(text, tokens, self._embed(text) if self._embed is not None else None)

    def answered(self, request: Request, output_tokens: int) -> None:
        """Count whether an answer was within its padded length."""
        if output_tokens > 0:
            longer = output_tokens > self.lengths.forecast(request).mean
            self._metrics.answers.labels("longer" if longer else "within").inc()

    def ended(self, id: str) -> None:
        """Forget a request, and begin a fit when one is due."""
        self.predictor.forget(id)
        self._metrics.quantile.set(self._quantile or self._tuner.quantile)
        self._fit_if_due()

    def _fit_if_due(self) -> None:
        if self._fitting is None and self.predictor.due:
            self._fitting = asyncio.create_task(self._fit())

    async def _fit(self) -> None:
        """Fit in a thread and adopt the model. A fit that fails is logged and keeps the old model."""
        loop, history = asyncio.get_running_loop(), self.predictor.history()
        try:
            model = await loop.run_in_executor(self._fitter, self._model_of, history)
        except Exception:
            log.exception("the length model could not be fitted to %d answers", len(history))
        else:
            self.predictor.adopt(model)
            self._metrics.known.set(len(history))
            if self._history is not None:
                await loop.run_in_executor(self._fitter, keep, self._history, history)
        finally:
            self._fitting = None


class LengthMetrics:
    """Prometheus metrics of the predictor.

    forecasts: what each followed, the prompt or the task, and why the task.
    answers: within their padded length, or longer.
    quantile: of a forecast, planned with.
    known: answers that the model was fitted to.
    seconds: to read a prompt, waiting included.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        self.forecasts = Counter("headway_forecasts", "Length forecasts, by their source.", ["by"], registry=r)
        self.answers = Counter(
            "headway_forecast_answers", "Answers within or beyond their padded forecast.", ["was"], registry=r
        )
        self.quantile = Gauge(
            "headway_forecast_quantile", "Quantile of the length forecast that plans use.", registry=r
        )
        self.known = Gauge("headway_forecast_history", "Answers that the length model knows.", registry=r)
        self.seconds = Histogram(
            "headway_forecast_seconds", "To forecast from a prompt, waiting included.", buckets=_BUCKETS, registry=r
        )


_MOST = 64 << 20  # bytes; four times what 8,192 answers take


def keep(path: Path, history: History) -> None:
    """Write a history atomically, readable by its owner only; a disk error is logged.

    It holds sizes, marks and embeddings of prompts, their tasks and the lengths of their answers; no text.
    """
    try:
        with replacing(path) as file:
            np.savez(file, features=history.features, tasks=np.array(history.tasks), made=history.output_tokens)
    except OSError as error:
        log.warning("lengths are not kept: %s (%s); set predictor.history to another file", path, error)


def recall(path: Path, width: int) -> History | None:
    """Return what `keep` wrote, or None and a log entry when the file cannot be used.

    width: features of a prompt now; those of another embedding cannot be compared with them.
    """
    try:
        if path.stat().st_size > _MOST:
            raise ValueError(f"it is larger than {_MOST >> 20} MiB")
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise ValueError("it is damaged")
        with np.load(path, allow_pickle=False) as file:
            features, tasks, lengths = file["features"], file["tasks"], file["made"]
        return _history(features, tasks, lengths, width)
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged archive raises nearly anything
        log.warning("%s is not used (%s); lengths are learned anew", path, error)
        return None


def _history(features: NDArray[Any], tasks: NDArray[Any], lengths: NDArray[Any], width: int) -> History:
    if features.ndim != 2 or tasks.shape != lengths.shape or lengths.shape != features.shape[:1]:
        raise ValueError("its columns differ in length")
    if features.dtype != np.float32 or lengths.dtype != np.float64 or tasks.dtype.kind != "U":
        raise ValueError("its columns are of other types")
    if not (np.isfinite(features).all() and np.isfinite(lengths).all() and (lengths >= 1).all()):
        raise ValueError("it holds what cannot be a length or a trait")
    if features.shape[1] != width:
        raise ValueError("it was learned with another predictor.embedding")
    return History(features, tuple(tasks.tolist()), lengths)
