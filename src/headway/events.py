"""Events: everything that happened, as the core receives it and as reports read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.prefix import CacheReport
from headway.stages import Resource, Stage
from headway.types import Floats, Instance, Request


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request was accepted. keys: of its prompt (`prefix.token_keys`), as bytes; empty = not known."""

    request: Request
    keys: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Started:
    """The first token is out."""

    id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A request was answered.

    cached_tokens, prompt_tokens: cached ones of its prompt, and all, as its engine counts them; None, 0 = not said.
    met: every target of its SLO was met.
    """

    id: str
    output_tokens: int
    cached_tokens: int | None = None
    prompt_tokens: int = 0
    met: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended without an answer. missed: its promise counts as missed; otherwise it counts in no share."""

    id: str
    reason: str
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """The engine gave up a request that can run again: it died before the first byte, or a swap took its KV.

    output_tokens: tokens of its answer that are out already and will not be generated again.
    aside_s: seconds for which an overflow engine that refused it gets no requests.
    engines: those that it may go to now, as in `Request`; None = as before.
    """

    id: str
    output_tokens: int = 0
    aside_s: float = 0.0
    engines: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class InstanceUp:
    instance: Instance


@dataclass(frozen=True, slots=True)
class InstanceDown:
    id: str


@dataclass(frozen=True, slots=True)
class Swapped:
    """A `Swap` has ended: this is what the instance serves from now on."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Warmed:
    """A `Warm` has ended: `instance.warm` says whose weights its host memory holds now."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Learned:
    """What an engine has learned about itself by now.

    theta: of its latency (`policy/forecast/latency/online.py`).
    cached: tokens of the longest prefix that it found in its cache lately.
    """

    instance: str
    theta: Floats
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Cached:
    """What an engine's prefix cache has taken in and given up."""

    instance: str
    report: CacheReport


@dataclass(frozen=True, slots=True)
class UnitBegan:
    """A unit of an application run has begun outside the LLM: a tool, a sandbox, another model.

    backend: what serves it.
    """

    tenant: str
    stage: Stage
    backend: str


@dataclass(frozen=True, slots=True)
class UnitEnded:
    """A unit outside the LLM has ended."""

    tenant: str
    stage: Stage


@dataclass(frozen=True, slots=True)
class RunEnded:
    """An application run has ended: its client said so, or was silent for too long."""

    tenant: str
    app: str
    run: str


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """A resource is warm, on a `Prewarm` or because it was needed. seconds: that warming took."""

    resource: Resource
    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed and nothing else."""


Event = (
    Arrived
    | Started
    | Finished
    | Failed
    | Returned
    | InstanceUp
    | InstanceDown
    | Swapped
    | Warmed
    | Learned
    | Cached
    | UnitBegan
    | UnitEnded
    | RunEnded
    | Prewarmed
    | Tick
)
