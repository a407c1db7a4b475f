"""How long will this answer be, as the door can know it? The host of the length predictor.

A prompt is read by one thread beside the event loop, before anything is owed for it; the model is fitted
again by another. A crowd at the door does not wait: beyond `_CROWD` prompts the task's last answers must do.
Jobs that an earlier process left are not read either: a new process has no model yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from headway import config
from headway.forecast.lengths.padding import Adaptive, Padded, PaddingTuner
from headway.forecast.lengths.predictor import Predictor, features
from headway.forecast.lengths.ridge import fit
from headway.forecast.lengths.task import TaskLengths
from headway.ports import Lengths
from headway.recipes.recipe import Recipe
from headway.serve.lengths.embedding import Embedder, locate, one_thread
from headway.serve.lengths.history import keep, recall
from headway.serve.metrics import Metrics
from headway.types import Request

_CROWD = 16  # prompts in the reading thread; one takes about 10 ms
_MS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
log = logging.getLogger("headway.serve")


class LengthService:
    """Whose forecasts a recipe plans with: the tasks' own, or a predictor's, padded (`lengths`).

    Headway's metrics say how many forecasts came from the prompt, how many from the task and why, the share
    in use, and how many answers were within their padded length. kept: the file that answers are kept in over
    restarts (`answers.py`), None = nowhere.
    """

    def __init__(
        self, recipe: Recipe, settings: config.Predictor, metrics: Metrics, kept: Path | None = None
    ) -> None:
        self.lengths: Lengths = TaskLengths()
        self.predictor: Predictor | None = None
        if recipe.lengths == "padded":
            self.predictor = Predictor(settings.window)
            self._spot = PaddingTuner()
            share = settings.share
            self.lengths = Padded(self.predictor, share) if share else Adaptive(self.predictor, self._spot)
            self._share = share
            self._measures(metrics)
        self._settings, self._kept_in = settings, kept
        self._embedder: Embedder | None = None
        self._reading = 0
        self._fitting: asyncio.Task[None] | None = None
        self._reader = ThreadPoolExecutor(1, "headway-reads")  # threads begin with the first piece of work
        self._fitter = ThreadPoolExecutor(1, "headway-fits")

    def _measures(self, metrics: Metrics) -> None:
        r = metrics.registry
        self._made = Counter(
            "headway_forecasts", "Length forecasts, by what they follow.", ["by"], registry=r
        )
        self._kept = Counter(
            "headway_forecast_answers", "Answers against their padded length.", ["was"], registry=r
        )
        self._padding = Gauge(
            "headway_forecast_share", "Share of a forecast that is planned with.", registry=r
        )
        self._known = Gauge("headway_forecast_history", "Answers that the length model knows.", registry=r)
        self._took = Histogram(
            "headway_forecast_seconds", "To read a prompt, waiting included.", buckets=_MS, registry=r
        )
        self._padding.set(self._share or self._spot.quantile)

    async def start(self) -> None:
        """Load the encoder (ConfigError when it is not there) and what earlier answers have taught."""
        if self.predictor is None:
            return
        one_thread()
        path, loop = locate(self._settings.embedding), asyncio.get_running_loop()
        if path is None:
            log.warning('lengths are forecast without the prompts\' meaning (predictor.embedding = "none")')
        else:
            self._embedder = await loop.run_in_executor(self._reader, Embedder, path)
        if self._kept_in is not None:
            width = (await loop.run_in_executor(self._reader, self._look, "", 0)).size
            history = await loop.run_in_executor(self._reader, recall, self._kept_in, width)
            if history is not None:
                self.predictor.remember(history)
                self._fit_if_due(self.predictor)

    async def stop(self) -> None:
        """Keep what was learned and let go of the threads."""
        if self.predictor is not None and self.predictor.known and self._kept_in is not None:
            await asyncio.to_thread(keep, self._kept_in, self.predictor.history())
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._fitter.shutdown(wait=False, cancel_futures=True)
        if self._fitting is not None:
            self._fitting.cancel()
            await asyncio.gather(self._fitting, return_exceptions=True)

    async def read(self, request: Request, body: Mapping[str, Any]) -> None:
        """Tell the predictor what the prompt looks like; the event loop goes on meanwhile."""
        if self.predictor is None:
            return
        text = text_of(body)
        if text is None:
            self._made.labels("task_no_text").inc()
        elif self._reading >= _CROWD:
            self._made.labels("task_crowd").inc()
        else:
            await self._read(self.predictor, request, text)

    async def _read(self, predictor: Predictor, request: Request, text: str) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._reading += 1
        try:
            seen = await loop.run_in_executor(self._reader, self._look, text, request.prompt_tokens)
        finally:
            self._reading -= 1
        self._took.observe(loop.time() - began)
        predictor.tell(request.id, seen)
        self._made.labels("prompt" if predictor.reads(request.id) else "task_untaught").inc()

    def _look(self, text: str, tokens: int) -> Any:
        return features(text, tokens, self._embedder(text) if self._embedder is not None else None)

    def ending(self, request: Request, output_tokens: int) -> None:
        """Note what is about to be learned: whether the answer was within its padded length."""
        if self.predictor is not None and output_tokens > 0:
            longer = output_tokens > self.lengths.forecast(request).mean
            self._kept.labels("longer" if longer else "within").inc()

    def ended(self, id: str) -> None:
        """Let go of a request, and begin a fit when one is due."""
        if self.predictor is None:
            return
        self.predictor.forget(id)
        self._padding.set(self._share or self._spot.quantile)
        self._fit_if_due(self.predictor)

    def _fit_if_due(self, predictor: Predictor) -> None:
        if self._fitting is None and predictor.due:
            self._fitting = asyncio.create_task(self._fit(predictor))

    async def _fit(self, predictor: Predictor) -> None:
        """Fit aside and swap the model in. A fit that fails leaves the old model, and says so."""
        history = predictor.history()
        try:
            model = await asyncio.get_running_loop().run_in_executor(self._fitter, fit, history)
        except Exception:
            log.exception("the length model could not be fitted to %d answers", len(history))
        else:
            predictor.adopt(model)
            self._known.set(len(history))
            if self._kept_in is not None:
                await asyncio.get_running_loop().run_in_executor(self._fitter, keep, self._kept_in, history)
        finally:
            self._fitting = None


def text_of(body: Mapping[str, Any]) -> str | None:
    """Return the text that an answer's length depends on most: the last message a user wrote, or the prompt.

    None when there is none: token ids, images only.
    """
    if "messages" in body:
        theirs = [message for message in body["messages"] if message.get("role") == "user"]
        content = (theirs or body["messages"])[-1].get("content")
        if isinstance(content, list):
            content = " ".join(str(part["text"]) for part in content if "text" in part)
        return content or None
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) else prompt
    return first if isinstance(first, str) and first else None
