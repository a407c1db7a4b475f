"""Limits of engines for which the configuration has none, and settings that vLLM would refuse half a minute later.

On a GPU vLLM chooses by the card and the model. On a CPU its own choice fits a large server, so Headway has one.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headway.config import Engine
from headway.config.engines import numbers
from headway.engines.vllm.parsers import Kind, known_to_vllm, parsers
from headway.engines.vllm.process.metadata import is_cpu_build
from headway.errors import ConfigError, check_all
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


_OVERRIDES = {"--max-model-len", "--hf-overrides", "--config", "--config-format"}


def check_settings(where: str, engine: Engine) -> None:
    """Raise ConfigError for parsers that vLLM does not have, and for more context than the models have.

    where: the engine's table in the configuration.
    """
    names = parsers(engine)
    check_all(
        partial(_check_parser, where, engine, "tool", names.tool),
        partial(_check_parser, where, engine, "reasoning", names.reasoning),
        *(partial(_check_context, where, engine, model) for model in engine.served.values()),
    )


def _check_parser(where: str, engine: Engine, kind: Kind, name: str | None) -> None:
    known = known_to_vllm(kind)
    if name is None or known is None or name in known or f"--{kind}-parser-plugin" in _options(engine):
        return
    near = get_close_matches(name, known, n=1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"{where}.{kind}_parser is {name!r}, and vLLM has no {kind} parser of that name.",
        f'{meant}There are {", ".join(sorted(known))}, and "none".',
        param=f"{where}.{kind}_parser",
    )


def cores_of(cores: str | None) -> set[int]:
    """Return the CPU cores of a list such as "0-3,8", None = all that this process may use; ValueError if malformed."""
    return set(os.sched_getaffinity(0) if cores is None else numbers(cores))


def check_cores(where: str, cores: str | None) -> None:
    """Raise ConfigError for a list of cores that cannot be read, or that names one that this process may not use."""
    mine = cores_of(None)
    try:
        missing = cores_of(cores) - mine
    except ValueError:
        fix = 'Write numbers and ranges, as in "0-3,8".'
        raise ConfigError(
            f"{where}.cores is {cores!r}, which lists no CPU cores.", fix, param=f"{where}.cores"
        ) from None
    if missing:
        raise ConfigError(
            f"{where}.cores names core {min(missing)}, which this process may not use.",
            f"Use some of {', '.join(map(str, sorted(mine)))}.",
            param=f"{where}.cores",
        )


def _check_context(where: str, engine: Engine, model: str) -> None:
    """Compare the context with that of a model on this disk."""
    asked = engine.max_model_len
    if asked is None or engine.runner == "pooling" or _OVERRIDES & _options(engine):
        return
    if os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0"):
        return
    longest = model_context(model)
    if longest is not None and asked > longest:
        raise ConfigError(
            f"{where}.max_model_len is {asked}, but {model} has a context of {longest}.",
            f"Set max_model_len = {longest} or less.",
            param=f"{where}.max_model_len",
        )


def _options(engine: Engine) -> set[str]:
    return {word.partition("=")[0] for word in engine.args}
