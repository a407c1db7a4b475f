"""Limits of engines for which the configuration has none.

On a GPU vLLM chooses by the card and the model. On a CPU its own choice fits a large server, so Headway has one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from headway.config import Engine
from headway.engines.vllm.process.metadata import is_cpu_build
from headway.models.resolve import resolve

# Fields of config.json that limit the context; of several the least counts, as in vLLM.
_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


class Sizes(NamedTuple):
    """Limits of an engine, and whether it runs without compiled graphs; named as in `Engine`."""

    max_running: int
    max_model_len: int
    max_batched_tokens: int
    eager: bool


# vLLM would take 128 requests at once, and compile the model for most of a minute at each start.
CPU = Sizes(16, 2048, 2048, eager=True)
# Until an engine reports its own limits; of a stock vLLM, which does not report its --max-num-seqs, what it has
# unless its card is large.
UNREPORTED = Sizes(256, 2048, 2048, eager=False)


def requested(engine: Engine, *, on_cpu: bool | None = None) -> Engine:
    """Return an engine with all that `vllm serve` is started with; what is unset there vLLM chooses.

    on_cpu: None = where this environment's vLLM runs.
    """
    if engine.url is not None or not (is_cpu_build() if on_cpu is None else on_cpu):
        return engine
    context = min(CPU.max_model_len, model_context(engine.model) or CPU.max_model_len)
    return replace(engine, **_filled(engine, CPU._replace(max_model_len=context))._asdict())


def expected(engine: Engine) -> Sizes:
    """Return the sizes that an engine is taken to have until it reports them."""
    return _filled(engine, CPU if engine.url is None and is_cpu_build() else UNREPORTED)


def _filled(engine: Engine, sizes: Sizes) -> Sizes:
    return sizes._replace(**{name: value for name in sizes._fields if (value := getattr(engine, name)) is not None})


def model_context(model: str) -> int | None:
    """Return the longest context that vLLM grants a model, by its limits in config.json.

    None = the model is not on this disk, or has rope scaling.
    """
    file = Path(resolve(model)) / "config.json"
    if not file.is_file():
        return None
    config: dict[str, Any] = json.loads(file.read_text())
    text = config.get("text_config") or config
    if text.get("rope_scaling") or "factor" in json.dumps(text.get("rope_parameters")):
        return None
    limits = [value for name in _CONTEXT if isinstance(value := text.get(name), int)]
    return max(min(limits), text.get("model_max_length") or 0) if limits else None
