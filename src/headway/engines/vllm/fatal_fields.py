"""Request fields that crash engines of some vLLM releases: one request takes down all that run with it.

Headway's scheduler inside an engine reports which of them are fatal to it; for stock vLLM `process/limits.py` finds
them. The gateway refuses requests with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import RequestError

WORKER_EXTENSION = "headway.engines.vllm.plugin.worker.WorkerExtension"  # mends what it can


def _samples(raw: Mapping[str, Any]) -> bool:
    """Return whether tokens are drawn at random; a temperature that is not given is that of the model."""
    try:
        return raw.get("temperature") is None or float(raw["temperature"]) != 0
    except (TypeError, ValueError, OverflowError):
        return True  # the engine says what is wrong with it


def _has_seed(raw: Mapping[str, Any]) -> bool:
    return raw.get("seed") not in (None, -1, "-1") and _samples(raw)


def _has_top_k(raw: Mapping[str, Any]) -> bool:
    return raw.get("top_k") not in (None, 0, -1, "0", "-1") and _samples(raw)


def _has_prompt_logprobs(raw: Mapping[str, Any]) -> bool:
    """Return whether a request asks for them: by name, or with `echo`, which a chat needs no `logprobs` for."""
    echoed = raw.get("echo") and (raw.get("logprobs") is not None or "messages" in raw)
    return raw.get("prompt_logprobs") is not None or bool(echoed)


@dataclass(frozen=True, slots=True)
class _Fatal:
    """A field, and the engines that it crashes.

    releases: how their versions begin. device: as vLLM names it. feature: what must be on.
    used_by: whether a request uses it. hint: what to do instead.
    """

    releases: tuple[str, ...]
    device: str
    feature: str
    used_by: Callable[[Mapping[str, Any]], bool]
    hint: str


_FATAL = {
    # A chunk of a prompt draws no token, and the generators of CPUs cannot be set back; `plugin/worker.py`
    # mends it.
    "seed": _Fatal(("0.32.",), "cpu", "bare workers", _has_seed, 'Leave it out, or send "temperature": 0.'),
    # For drafts it is repeated by code that takes it for floats; without drafts there is nothing to repeat.
    "top_k": _Fatal(("0.32.",), "cpu", "drafts", _has_top_k, "Leave it out, or use top_p."),
    # Adapters are looked up by request where there are as many rows as tokens.
    "prompt_logprobs": _Fatal(
        ("0.32.",),
        "cpu",
        "adapters",
        _has_prompt_logprobs,
        "Leave it out, and echo with logprobs, which asks for it, too.",
    ),
}


def fatal_fields(version: str, device: str, features: Iterable[str]) -> list[str]:
    """Return the fields that crash an engine.

    features: "drafts" and "adapters" where they are on, "bare workers" without Headway's extension.
    """
    on = set(features)
    return [
        name
        for name, fatal in _FATAL.items()
        if version.startswith(fatal.releases) and device == fatal.device and fatal.feature in on
    ]


def known_fields(names: Iterable[str]) -> tuple[str, ...]:
    """Return the fields of the table among those that an engine reports."""
    return tuple(name for name in names if name in _FATAL)


def check_fields(raw: Mapping[str, Any], fatal: Iterable[str]) -> None:
    """Refuse a body that has one of these fields. RequestError."""
    for name in fatal:
        if _FATAL[name].used_by(raw):
            raise RequestError(
                f"{name} would crash the engine of this model: its vLLM has a bug there.",
                _FATAL[name].hint,
                param=name,
                code="unsupported_parameter",
            )
