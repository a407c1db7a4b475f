"""`headway bench predictor`: accuracy and cost of predicted output lengths (EcoServe 2.3, 3.2.2).

Uses real prompts with recorded outputs from `$HEADWAY_DATA/prompts`, in the order of the file; no engine runs
and nothing is simulated. A data set's plain name is the static split: fitted once to the first 70 % (EcoServe
2.3), evaluated on the rest. "online": forecast, then learn, from the first request on, with the objects that
`headway serve` uses. "all": the data sets shuffled together, unlabelled. System "other-answers" reads no prompt
but sees three other answers to it (`read_samples`), which shows how well a length can be known.

accuracy_pct: outputs not longer than the expected length with 10 % padding (EcoServe 2.3 as we read it)
overpredicted_tokens_pct: tokens predicted with that padding but never generated, over all generated
within_pct: outputs within 10 % of the expected length
covered_pct, unused_tokens_pct: as the first two, with the served length, a quantile of the forecast: 77.5 %
    in the static split, the tuned one online (`share`)
missing_tokens_pct: tokens beyond the served length, over all generated
over_pct, under_pct: unused and missing tokens of the served length as shares of it, means of the requests
    (EcoServe, figure 5a)
mae_tokens: mean absolute error of the expected length
ms_per_prediction: one prompt at a time, embedding included; ms_batched: 32 at a time, the embedding only
fit_s: seconds of the static fit
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import Progress
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingRegressor

from benchmarks.experiment import Result, experiment
from benchmarks.papers.quoted import quoted
from headway.errors import ConfigError
from headway.gateway.control.lengths.embedding import Embedder, locate, one_thread
from headway.policy.forecast.lengths.padding import QUANTILE, Adaptive, Padded, PaddingTuner
from headway.policy.forecast.lengths.predictor import PLAIN, Features, History, Predictor, features, fit
from headway.policy.forecast.lengths.task import TaskLengths
from headway.ports import Lengths
from headway.types import Floats, Ints, Request
from headway.whatif.load.prompts import find
from headway.whatif.output.plots import colours, legend, png, sheet
from headway.whatif.output.results import Ask, Row

DATA = ("alpaca", "alpaca_eval", "code_alpaca_2k", "gsm8k_test", "humaneval")
QUICK = {"alpaca": 500, "alpaca_eval": 120}
TOKENS = "smollm2"  # model whose tokenizer counts the tokens
PADDING = 0.10
_TRAINED = 0.7
_LONGEST = 2048
_TIMED = 40  # number of timed predictions
PAPER = {  # on Alpaca
    "accuracy_pct": quoted(77.5, "ecoserve", "2.3", 139),
    "covered_pct": quoted(77.5, "ecoserve", "2.3", 139),
    "over_pct": quoted(2.62, "ecoserve", "2.3", 141),
    "under_pct": quoted(9.3, "ecoserve", "2.3", 141, "9.30%"),
    "ms_per_prediction": quoted(921.0, "ecoserve", "3.2.2", 198, "0.921", 1000),
}
NOTE = "alpaca: reference answers (text-davinci-003), where the paper has OPT-13B's; padding 10 % of the mean"


@dataclass(frozen=True, slots=True)
class DataSet:
    """The requests of a data set in their order, the features of their prompts, and their output lengths."""

    name: str
    texts: tuple[str, ...]
    requests: tuple[Request, ...]
    features: Features
    output_tokens: Floats

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The forecasts of a system.

    expected: expected lengths
    padded: served lengths, padding included
    output_tokens: true lengths
    share: tuned quantile of the padding
    ms: milliseconds per prediction
    """

    expected: Floats
    padded: Floats
    output_tokens: Floats
    share: float | None = None
    fit_s: float | None = None
    ms: float | None = None
    ms_batched: float | None = None


@dataclass(slots=True)
class System:
    """A forecasting method.

    columns: number of features used; 0 = the prompt is not read
    """

    name: str
    lengths: Lengths
    columns: int = 0

    @property
    def predictor(self) -> Predictor | None:
        return self.lengths if isinstance(self.lengths, Predictor) else None

    def register(self, data: DataSet, i: int) -> None:
        """Give a predictor the features of the prompt."""
        if self.predictor is not None:
            self.predictor.register(data.requests[i].id, data.features[i, : self.columns])


def systems(width: int) -> list[System]:
    """Return new systems for `width` features."""
    return [
        System("predictor", Predictor(), width),
        System("no-embedding", Predictor(), PLAIN),
        System("task-mean", TaskLengths()),
        System("constant", Constant()),
    ]


class Constant(TaskLengths):
    """Forecasts the prior for every request, like a server that has learned nothing."""

    def learn(self, request: Request, output_tokens: int) -> None:
        """Learn nothing."""


@experiment("predictor", "sim", "Prediction of output lengths")
def main(ask: Ask) -> Result:
    """Run the benchmark. `quick` reads parts of two data sets. Raise ConfigError without data or encoder."""
    _needs_data()
    one_thread()  # as in service
    embed = _embedder()
    with Progress(disable=ask.as_json) as bar:
        names = bar.track(QUICK if ask.quick else DATA)
        sets = [read(name, QUICK[name] if ask.quick else None, embed) for name in names]
        sets.append(together(sets, np.random.default_rng(ask.seed)))
        static = {data.name: trial(data, embed) for data in bar.track(sets)}
        online = {f"{data.name}, online": prequential(data) for data in bar.track(sets)}
    results = {**static, **online, "alpaca (Vicuna-7B)": {"other-answers": repeated()}}
    sizes = ", ".join(f"{data.name} {len(data):,}" for data in sets)
    workload = f"prompts with recorded answers: {sizes}; {TOKENS} tokens; {NOTE}"
    first = sets[0].name
    return Result(list(rows_of(results)), workload, lambda: {"predictor": plot(first, static[first])})


def _needs_data() -> None:
    if "HEADWAY_DATA" not in os.environ:
        raise ConfigError(
            "This benchmark needs real prompts with recorded outputs.",
            "Set HEADWAY_DATA to a folder with prompts/alpaca.jsonl.gz (and others): lines of "
            '{"prompt": ..., "prompt_tokens": {"smollm2": ...}, "output_tokens": {"smollm2": ...}}.',
        )


def _embedder() -> Embedder:
    path = locate("minilm")
    assert path is not None
    return Embedder(path)


def read(name: str, limit: int | None, embed: Embedder) -> DataSet:
    """Return a data set with embedded prompts. Raise ConfigError if a line has no lengths."""
    file = find(name)
    assert file is not None  # HEADWAY_DATA is set
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:limit]
    try:
        read = [(row["prompt"], row["prompt_tokens"][TOKENS], row["output_tokens"][TOKENS]) for row in rows]
    except KeyError as error:
        raise ConfigError(f"{file} has a line without {error}.", f"Give every line both counts of {TOKENS}.") from error
    texts, prompt, output_tokens = zip(*(one for one in read if one[2] > 0), strict=True)
    looks = [features(*one) for one in zip(texts, prompt, embed.many(texts), strict=True)]
    requests = tuple(_request(f"{name}-{i}", tokens) for i, tokens in enumerate(prompt))
    return DataSet(name, texts, requests, np.array(looks), np.array(output_tokens, float))


def _request(id: str, tokens: int) -> Request:
    return Request(id, TOKENS, tokens, _LONGEST, 0.0)


def together(sets: Sequence[DataSet], rng: np.random.Generator) -> DataSet:
    """Return the requests of all data sets, shuffled, as one task."""
    order = rng.permutation(sum(map(len, sets)))
    texts = [text for data in sets for text in data.texts]
    requests = [request for data in sets for request in data.requests]
    looks, output_tokens = (np.concatenate([a.features for a in sets]), np.concatenate([a.output_tokens for a in sets]))
    chosen = [requests[i] for i in order]
    return DataSet("all", tuple(texts[i] for i in order), tuple(chosen), looks[order], output_tokens[order])


# ---- static and online


def trial(data: DataSet, embed: Embedder) -> dict[str, Forecasts]:
    """Fit to the first 70 % and forecast the rest without learning from it."""
    seen = {system.name: _trial(data, system, embed) for system in systems(data.features.shape[1])}
    cut, began = int(len(data) * _TRAINED), time.perf_counter()
    median, served = boosted(data.texts, data.features, data.output_tokens, cut)
    seconds = time.perf_counter() - began
    return seen | {"boosted": Forecasts(median, served, data.output_tokens[cut:], fit_s=seconds)}


def _trial(data: DataSet, system: System, embed: Embedder) -> Forecasts:
    cut = int(len(data) * _TRAINED)
    for i in range(cut):
        system.register(data, i)
        system.lengths.learn(data.requests[i], int(data.output_tokens[i]))
    seconds = _fit(system)
    rest = range(cut, len(data))
    ms = _ms(data, system, rest[:_TIMED], embed)
    for i in rest:
        system.register(data, i)
    requests = [data.requests[i] for i in rest]
    expected = np.array([system.lengths.forecast(request).mean for request in requests])
    padded = np.array([Padded(system.lengths, QUANTILE).forecast(request).mean for request in requests])
    batched = _ms_batched(data.texts[cut : cut + _TIMED], embed) if system.columns > PLAIN else None
    return Forecasts(expected, padded, data.output_tokens[cut:], None, seconds, ms, batched)


def repeated() -> Forecasts:
    """Return forecasts of an answer's length from other answers to the same prompt."""
    lengths = read_samples(Path(os.environ["HEADWAY_DATA"]))
    return Forecasts(*forecast_samples(lengths, _TRAINED))


def prequential(data: DataSet) -> dict[str, Forecasts]:
    """Forecast each request, then learn from its output; refit the models whenever that is due."""
    return {system.name: _prequential(data, system) for system in systems(data.features.shape[1])}


def _prequential(data: DataSet, system: System) -> Forecasts:
    served = Adaptive(system.lengths, PaddingTuner())
    expected, padded = np.zeros(len(data)), np.zeros(len(data))
    for i, request in enumerate(data.requests):
        system.register(data, i)
        expected[i], padded[i] = system.lengths.forecast(request).mean, served.forecast(request).mean
        served.learn(request, int(data.output_tokens[i]))
        if system.predictor is not None and system.predictor.due:
            _fit(system)
    return Forecasts(expected, padded, data.output_tokens, served.tuner.quantile)


def _fit(system: System) -> float | None:
    """Fit a predictor and return the seconds; None for systems without a model."""
    if system.predictor is None:
        return None
    began = time.perf_counter()
    system.predictor.adopt(fit(system.predictor.history()))
    return time.perf_counter() - began


def _ms(data: DataSet, system: System, which: Iterable[int], embed: Embedder) -> float:
    """Return the median milliseconds from a prompt's text to its forecast, one prompt at a time."""
    seconds = []
    for i in which:
        request = data.requests[i]
        began = time.perf_counter()
        if system.predictor is not None:
            meaning = embed(data.texts[i]) if system.columns > PLAIN else None
            system.predictor.register(request.id, features(data.texts[i], request.prompt_tokens, meaning))
        system.lengths.forecast(request)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)) * 1000


def _ms_batched(texts: Sequence[str], embed: Embedder) -> float:
    """Return the milliseconds per prompt when many are embedded at once."""
    began = time.perf_counter()
    embed.many(texts)
    return (time.perf_counter() - began) / len(texts) * 1000


# ---- figures


def rows_of(results: dict[str, dict[str, Forecasts]]) -> Iterable[Row]:
    """Yield the figures of every system and setting, with the paper's for the predictor on Alpaca."""
    for setting, seen in results.items():
        for system, one in seen.items():
            paper = PAPER if (system, setting) == ("predictor", "alpaca") else {}
            for id, ours, unit in figures(one):
                if ours is not None:
                    yield Row(id, system, setting, ours, unit, paper.get(id))


def figures(seen: Forecasts) -> list[tuple[str, float | None, str]]:
    """Return (id, value, unit) of each figure in the module's docstring."""
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
        ("over_pct", _share(seen.padded - output_tokens, seen.padded), "%"),
        ("under_pct", _share(output_tokens - seen.padded, seen.padded), "%"),
        ("mae_tokens", float(np.abs(output_tokens - expected).mean()), "tokens"),
        ("share", seen.share, ""),
        ("ms_per_prediction", seen.ms, "ms"),
        ("ms_batched", seen.ms_batched, "ms"),
        ("fit_s", seen.fit_s, "s"),
    ]


def _covered(length: Floats, output_tokens: Floats) -> float:
    return 100 * float((output_tokens <= length).mean())


def _unused(length: Floats, output_tokens: Floats) -> float:
    return 100 * float(np.maximum(length - output_tokens, 0).sum() / np.abs(output_tokens).sum())


def _share(tokens: Floats, allocated: Floats) -> float:
    return 100 * float((np.maximum(tokens, 0) / allocated).mean())


def plot(setting: str, seen: dict[str, Forecasts]) -> bytes:
    """Return a PNG of true over expected lengths, and of their ratio by system."""
    figure, (left, right) = sheet(1, 2, 10, 4)
    one = seen["predictor"]
    left.scatter(one.expected, one.output_tokens, s=6, color=colours(seen)["predictor"], linewidths=0)
    top = float(max(one.expected.max(), one.output_tokens.max()))
    left.plot([1, top], [1, top], color="#888888", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="expected tokens", ylabel="true tokens", title=f"predictor, {setting}")
    shades = colours(seen)
    for system, other in seen.items():
        ratio = np.sort(other.output_tokens / other.expected)
        right.step(ratio, np.arange(1, len(ratio) + 1) / len(ratio), color=shades[system], where="post")
    right.axvline(1 + PADDING, color="#888888", linewidth=0.8)
    right.set(xlim=(0, 3), xlabel="true / expected length", ylabel="share of outputs", title="10 % padding: the line")
    legend(figure, list(seen))
    return png(figure)


_FOLDS = 5
_COMPONENTS = 32


def boosted(texts: Sequence[str], features: Features, output_tokens: Floats, cut: int) -> tuple[Floats, Floats]:
    """Fit a candidate to the first `cut` rows; return the median and the served (`QUANTILE`) lengths of the rest.

    Quantile gradient boosting on the plain features of a prompt, those of its instruction and its input, the leading
    components of the embedding, and the forecast of the ridge (cross-fitted). Serving does not use it.
    """
    target = np.log(output_tokens[:cut])
    ridge = np.empty(len(output_tokens))
    for fold in range(_FOLDS):
        left = np.arange(fold, cut, _FOLDS)
        ridge[left] = _ridge(features, output_tokens, np.setdiff1d(np.arange(cut), left), left)
    rest = np.arange(cut, len(output_tokens))
    ridge[cut:] = _ridge(features, output_tokens, np.arange(cut), rest)
    columns = [features[:, :PLAIN], np.array([_parts(text) for text in texts]), ridge[:, None]]
    if features.shape[1] > PLAIN:
        meaning = features[:, PLAIN:]
        components = PCA(min(_COMPONENTS, *meaning[:cut].shape), random_state=0).fit(meaning[:cut])
        columns.append(components.transform(meaning))
    seen = np.concatenate(columns, axis=1)
    median, served = (_quantile(seen[:cut], target, seen[cut:], share) for share in (0.5, QUANTILE))
    return median, np.ceil(served)


def _ridge(features: Features, output_tokens: Floats, known: Ints, asked: Ints) -> Floats:
    """Return the logarithms of the ridge's mean forecasts."""
    model = fit(History(features[known], ("",) * len(known), output_tokens[known]))
    return np.asarray(np.log(model.samples(features[asked], ("",) * len(asked)).mean(1)))


def _parts(text: str) -> Floats:
    """Return the logarithmic sizes of a prompt's first line and of the rest, and two flags of the first line."""
    first, _, rest = text.partition("\n")
    sizes = (len(first), len(rest), len(rest.split()), rest.count("\n"), rest.count(","))
    return np.append(np.log1p(np.array(sizes, float)), (":" in first, first.endswith("?")))


def _quantile(seen: Floats, target: Floats, asked: Floats, share: float) -> Floats:
    model = HistGradientBoostingRegressor(
        loss="quantile",
        quantile=share,
        max_iter=120,
        learning_rate=0.05,
        max_leaf_nodes=8,
        min_samples_leaf=min(30, len(target) // 4),
        l2_regularization=1.0,
        random_state=0,
    )
    return np.asarray(np.exp(model.fit(seen, target).predict(asked)), float)


FILE = "alpaca_output_samples.csv.gz"
_COLUMNS = ("vicuna7b_t0_0", "vicuna7b_t0_3", "vicuna7b_t0_5", "vicuna7b_t0_7")  # the last is predicted


def read_samples(folder: Path) -> Floats:
    """Return the lengths of the answers in `folder`/lengths, shape (prompts, 4), without empty ones.

    With sampling, a model's answers to one prompt differ in length. `alpaca_output_samples` has four answers of
    Vicuna-7B to each of 20,000 Alpaca prompts, at temperatures 0, 0.3, 0.5 and 0.7. The first three predict the
    length of the last, better than any prompt could.

    Raise ConfigError if the file or one of its columns is missing.
    """
    path = folder / "lengths" / FILE
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [[float(row[name] or 0) for name in _COLUMNS] for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error!r}.",
            f"Put a CSV file with lengths of answers there, with the columns {', '.join(_COLUMNS)}.",
        ) from error
    lengths = np.array(rows).reshape(-1, len(_COLUMNS))
    return np.asarray(lengths[(lengths > 0).all(axis=1)])


def forecast_samples(lengths: Floats, trained: float) -> tuple[Floats, Floats, Floats]:
    """Fit to the first `trained` share of prompts; return medians, served and true lengths of the rest."""
    cut, seen = int(len(lengths) * trained), np.sort(np.log(lengths[:, :-1]), axis=1)
    target = np.log(lengths[:, -1])
    median, served = (
        np.exp(
            HistGradientBoostingRegressor(loss="quantile", quantile=share, random_state=0)
            .fit(seen[:cut], target[:cut])
            .predict(seen[cut:])
        )
        for share in (0.5, QUANTILE)
    )
    return median, np.ceil(served), np.asarray(lengths[cut:, -1])
