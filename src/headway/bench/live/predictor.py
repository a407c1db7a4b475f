"""How well is an answer's length known before it is made, and what does knowing cost? (EcoServe 2.3, 3.2.2.)

Real prompts with recorded answers from `$HEADWAY_DATA/prompts`, in the order of the file; no engine runs and
nothing is simulated. A setting's plain name is the static split: fitted once to the first 80 %, asked about
the rest. "online": forecast, then learn, from the first request on, with the objects that `headway serve`
uses, fits included. "all": the data sets shuffled together, nobody tells the predictor which is which.

- accuracy_pct: share of answers not longer than the expected length with 10 % padding (EcoServe 2.3 as we
  read it; 10 % is its padding on Alpaca). Coverage alone can be had by forecasting a lot, hence
  overpredicted_tokens_pct: tokens forecast so and never made, over all made.
- within_pct: share of answers within 10 % of the expected length, both ways.
- covered_pct, unused_tokens_pct: the same two with the length that is served, a quantile of the forecast:
  77.5 % in the static split, the sweet spot online (`share`). missing_tokens_pct: tokens beyond that length.
- mae_tokens: mean absolute error of the expected length. ms_per_prediction: one prompt at a time, embedding
  included. fit_s: seconds of the static fit.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import Progress

from headway.bench.load.metrics import Row
from headway.bench.load.prompts import find
from headway.bench.output.plots import colour, legend, png, sheet
from headway.bench.output.results import deliver
from headway.errors import ConfigError
from headway.forecast.lengths.padding import QUANTILE, Adaptive, Padded, PaddingTuner
from headway.forecast.lengths.predictor import Predictor, features
from headway.forecast.lengths.ridge import PLAIN, Features, fit
from headway.forecast.lengths.task import TaskLengths
from headway.ports import Lengths
from headway.serve.lengths.embedding import Embedder, locate, one_thread
from headway.types import Floats, Request

DATA = ("alpaca", "alpaca_eval", "code_alpaca_2k", "gsm8k_test", "humaneval")
QUICK = {"alpaca": 500, "alpaca_eval": 120}
TOKENS = "smollm2"  # whose tokens are counted: the model that is served here
PADDING = 0.10
_TRAINED = 0.8
_LONGEST = 2048
_TIMED = 40  # predictions timed
PAPER = {"accuracy_pct": 77.5, "ms_per_prediction": 921.0}  # on Alpaca
NOTE = "alpaca: reference answers (text-davinci-003), where the paper has OPT-13B's; padding 10 % of the mean"


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests of a data set in their order, what their prompts look like, and their answers' tokens."""

    name: str
    texts: tuple[str, ...]
    requests: tuple[Request, ...]
    features: Features
    output_tokens: Floats

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a system forecast: the expected length, the length it would be served with, the true one."""

    expected: Floats
    padded: Floats
    output_tokens: Floats
    share: float | None = None
    fit_s: float | None = None
    ms: float | None = None


@dataclass(slots=True)
class System:
    """One way to forecast. `columns`: how many of the features it is told; 0 = it reads no prompt."""

    name: str
    lengths: Lengths
    columns: int = 0

    @property
    def predictor(self) -> Predictor | None:
        return self.lengths if isinstance(self.lengths, Predictor) else None

    def tell(self, asked: Asked, i: int) -> None:
        """Say what the prompt looks like, to who reads it."""
        if self.predictor is not None:
            self.predictor.tell(asked.requests[i].id, asked.features[i, : self.columns])


def systems(width: int) -> list[System]:
    """Return fresh systems; width: number of features."""
    return [
        System("predictor", Predictor(), width),
        System("no-embedding", Predictor(), PLAIN),
        System("task-mean", TaskLengths()),
        System("constant", Constant()),
    ]


class Constant(TaskLengths):
    """What a server that has learned nothing says: the prior, for every request."""

    def learn(self, request: Request, output_tokens: int) -> None:
        """Learn nothing."""


def main(*, quick: bool, as_json: bool, seed: int, out: Path | None) -> None:
    """Measure and print; `quick`: the beginnings of two data sets. ConfigError without data or encoder."""
    began = time.perf_counter()
    _needs_data()
    one_thread()  # as in service
    embed = _embedder()
    with Progress(disable=as_json) as bar:
        sets = [
            read(name, QUICK[name] if quick else None, embed) for name in bar.track(QUICK if quick else DATA)
        ]
        sets.append(together(sets, np.random.default_rng(seed)))
        static = {asked.name: trial(asked, embed) for asked in bar.track(sets)}
        online = {f"{asked.name}, online": prequential(asked) for asked in bar.track(sets)}
    results = {**static, **online}
    sizes = ", ".join(f"{asked.name} {len(asked):,}" for asked in sets)
    workload = f"prompts with recorded answers: {sizes}; {TOKENS} tokens; {NOTE}"
    deliver(
        list(rows_of(results)), bench="predictor", host="sim", title="How well is an answer's length known?",
        seconds=time.perf_counter() - began, seed=seed, workload=workload, as_json=as_json, out=out,
        pictures={"predictor": plot(sets[0].name, static[sets[0].name])} if out else None,
    )  # fmt: skip


def _needs_data() -> None:
    if "HEADWAY_DATA" not in os.environ:
        raise ConfigError(
            "Lengths that follow from prompts are only in real data.",
            "Set HEADWAY_DATA to a folder with prompts/alpaca.jsonl.gz (and others): lines of "
            '{"prompt": ..., "prompt_tokens": {"smollm2": ...}, "output_tokens": {"smollm2": ...}}.',
        )


def _embedder() -> Embedder:
    path = locate("minilm")
    assert path is not None
    return Embedder(path)


def read(name: str, limit: int | None, embed: Embedder) -> Asked:
    """Return a data set, its prompts embedded. ConfigError when a line has no lengths."""
    file = find(name)
    assert file is not None  # HEADWAY_DATA is set
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:limit]
    try:
        asked = [(row["prompt"], row["prompt_tokens"][TOKENS], row["output_tokens"][TOKENS]) for row in rows]
    except KeyError as error:
        raise ConfigError(
            f"{file} has a line without {error}.", f"Give every line both counts of {TOKENS}."
        ) from error
    texts, prompt, output_tokens = zip(*(one for one in asked if one[2] > 0), strict=True)
    looks = [features(*one) for one in zip(texts, prompt, embed.many(texts), strict=True)]
    requests = tuple(_request(f"{name}-{i}", tokens) for i, tokens in enumerate(prompt))
    return Asked(name, texts, requests, np.array(looks), np.array(output_tokens, float))


def _request(id: str, tokens: int) -> Request:
    return Request(id, TOKENS, tokens, _LONGEST, 0.0)


def together(sets: Sequence[Asked], rng: np.random.Generator) -> Asked:
    """Return all requests shuffled, as one task."""
    order = rng.permutation(sum(map(len, sets)))
    texts = [text for asked in sets for text in asked.texts]
    requests = [request for asked in sets for request in asked.requests]
    looks, output_tokens = (
        np.concatenate([a.features for a in sets]),
        np.concatenate([a.output_tokens for a in sets]),
    )
    chosen = [requests[i] for i in order]
    return Asked("all", tuple(texts[i] for i in order), tuple(chosen), looks[order], output_tokens[order])


# ---- the two ways to ask


def trial(asked: Asked, embed: Embedder) -> dict[str, Seen]:
    """Fit to the first 80 %, forecast the rest; nothing is learned from the rest."""
    return {system.name: _trial(asked, system, embed) for system in systems(asked.features.shape[1])}


def _trial(asked: Asked, system: System, embed: Embedder) -> Seen:
    cut = int(len(asked) * _TRAINED)
    for i in range(cut):
        system.tell(asked, i)
        system.lengths.learn(asked.requests[i], int(asked.output_tokens[i]))
    seconds = _fit(system)
    rest = range(cut, len(asked))
    ms = _ms(asked, system, rest[:_TIMED], embed)
    for i in rest:
        system.tell(asked, i)
    asking = [asked.requests[i] for i in rest]
    expected = np.array([system.lengths.forecast(request).mean for request in asking])
    padded = np.array([Padded(system.lengths, QUANTILE).forecast(request).mean for request in asking])
    return Seen(expected, padded, asked.output_tokens[cut:], None, seconds, ms)


def prequential(asked: Asked) -> dict[str, Seen]:
    """Forecast each request, then learn from its answer, and fit again whenever that is due."""
    return {system.name: _prequential(asked, system) for system in systems(asked.features.shape[1])}


def _prequential(asked: Asked, system: System) -> Seen:
    served = Adaptive(system.lengths, PaddingTuner())
    expected, padded = np.zeros(len(asked)), np.zeros(len(asked))
    for i, request in enumerate(asked.requests):
        system.tell(asked, i)
        expected[i], padded[i] = system.lengths.forecast(request).mean, served.forecast(request).mean
        served.learn(request, int(asked.output_tokens[i]))
        if system.predictor is not None and system.predictor.due:
            _fit(system)
    return Seen(expected, padded, asked.output_tokens, served.tuner.quantile)


def _fit(system: System) -> float | None:
    """Fit a predictor; return the seconds, None for systems without a model."""
    if system.predictor is None:
        return None
    began = time.perf_counter()
    system.predictor.adopt(fit(system.predictor.history()))
    return time.perf_counter() - began


def _ms(asked: Asked, system: System, which: Iterable[int], embed: Embedder) -> float:
    """Return the median milliseconds from a prompt's text to its forecast, one at a time."""
    seconds = []
    for i in which:
        request = asked.requests[i]
        began = time.perf_counter()
        if system.predictor is not None:
            meaning = embed(asked.texts[i]) if system.columns > PLAIN else None
            system.predictor.tell(request.id, features(asked.texts[i], request.prompt_tokens, meaning))
        system.lengths.forecast(request)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)) * 1000


# ---- figures


def rows_of(results: dict[str, dict[str, Seen]]) -> Iterable[Row]:
    """Yield the figures of every system in every setting, the paper's beside the predictor's on Alpaca."""
    for setting, seen in results.items():
        for system, one in seen.items():
            paper = PAPER if (system, setting) == ("predictor", "alpaca") else {}
            for id, ours, unit in figures(one):
                if ours is not None:
                    yield Row(id, system, setting, ours, unit, paper.get(id))


def figures(seen: Seen) -> list[tuple[str, float | None, str]]:
    """Return (id, value, unit), as the module's question defines them."""
    expected, output_tokens = seen.expected, seen.output_tokens
    reserved = np.ceil((1 + PADDING) * expected - 1e-9)  # 1.1 * 100 is a little over 110
    within = np.abs(output_tokens - expected) <= PADDING * expected
    return [
        ("accuracy_pct", _covered(reserved, output_tokens), "%"),
        ("overpredicted_tokens_pct", _unused(reserved, output_tokens), "%"),
        ("within_pct", 100 * float(within.mean()), "%"),
        ("covered_pct", _covered(seen.padded, output_tokens), "%"),
        ("unused_tokens_pct", _unused(seen.padded, output_tokens), "%"),
        ("missing_tokens_pct", _unused(-seen.padded, -output_tokens), "%"),
        ("mae_tokens", float(np.abs(output_tokens - expected).mean()), "tokens"),
        ("share", seen.share, ""),
        ("ms_per_prediction", seen.ms, "ms"),
        ("fit_s", seen.fit_s, "s"),
    ]


def _covered(length: Floats, output_tokens: Floats) -> float:
    return 100 * float((output_tokens <= length).mean())


def _unused(length: Floats, output_tokens: Floats) -> float:
    return 100 * float(np.maximum(length - output_tokens, 0).sum() / np.abs(output_tokens).sum())


def plot(setting: str, seen: dict[str, Seen]) -> bytes:
    """Draw true against expected lengths, and how far answers are above them, for one setting."""
    figure, (left, right) = sheet(1, 2, 10, 4)
    one = seen["predictor"]
    left.scatter(one.expected, one.output_tokens, s=6, color=colour(0), linewidths=0)
    top = float(max(one.expected.max(), one.output_tokens.max()))
    left.plot([1, top], [1, top], color="#888888", linewidth=0.8)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="expected tokens",
        ylabel="true tokens",
        title=f"predictor, {setting}",
    )
    for number, (_, other) in enumerate(seen.items()):
        ratio = np.sort(other.output_tokens / other.expected)
        right.step(ratio, np.arange(1, len(ratio) + 1) / len(ratio), color=colour(number), where="post")
    right.axvline(1 + PADDING, color="#888888", linewidth=0.8)
    right.set(
        xlim=(0, 3),
        xlabel="true / expected length",
        ylabel="share of answers",
        title="10 % padding: the line",
    )
    legend(figure, list(seen))
    return png(figure)
