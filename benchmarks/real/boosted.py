"""A candidate length predictor: quantile gradient boosting on top of the ridge's forecast.

Its features are the plain features of a prompt, those of its instruction and its input, the leading components
of the embedding, and the forecast of `ridge.py` (cross-fitted on the training rows). `headway bench predictor`
compares it; nothing is served with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingRegressor

from headway.policy.forecast.lengths.padding import QUANTILE
from headway.policy.forecast.lengths.ridge import PLAIN, Features, History, fit
from headway.types import Floats, Ints

_FOLDS = 5
_COMPONENTS = 32


def boosted(texts: Sequence[str], features: Features, output_tokens: Floats, cut: int) -> tuple[Floats, Floats]:
    """Fit to the first `cut` rows; return the median and the served (`QUANTILE`) lengths of the rest."""
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
