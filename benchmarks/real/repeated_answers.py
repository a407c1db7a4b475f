"""A bound on length prediction: forecasts from other answers to the same prompt.

With sampling, a model's answers to one prompt differ in length. `alpaca_output_samples` has four answers of
Vicuna-7B to each of 20,000 Alpaca prompts, at temperatures 0, 0.3, 0.5 and 0.7. The first three predict the
length of the last, better than any prompt could. A predictor that reads only the prompt cannot be expected to
waste less.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from headway.errors import ConfigError
from headway.policy.forecast.lengths.padding import QUANTILE
from headway.types import Floats

FILE = "alpaca_output_samples.csv.gz"
_COLUMNS = ("vicuna7b_t0_0", "vicuna7b_t0_3", "vicuna7b_t0_5", "vicuna7b_t0_7")  # the last is predicted


def read(folder: Path) -> Floats:
    """Return the lengths of the answers in `folder`/lengths, shape (prompts, 4), without empty ones.

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


def forecast(lengths: Floats, trained: float) -> tuple[Floats, Floats, Floats]:
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
