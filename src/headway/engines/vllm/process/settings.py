"""Settings of engines that vLLM would refuse only after its imports, half a minute into the start."""

from __future__ import annotations

import os
from difflib import get_close_matches
from functools import partial

from headway.config import Engine
from headway.config.copies import numbers
from headway.engines.vllm.parsers import Kind, known_to_vllm, parsers
from headway.engines.vllm.process.sizes import model_context
from headway.errors import ConfigError, check_all

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
