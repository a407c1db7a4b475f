"""Messages of gateways, controllers and agents besides events and commands.

They keep views of each other complete though
any of them, or the connection between them, may end at any moment: a controller says whom it knows
(`Standing`), and one that does not find itself there reports all that it has (`Present`, `EngineState`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.events import Event
from headway.types import Command, Instance, Progress, Request


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request of a gateway.

    instance: the one that it was sent to, None = it is queued. started: it has its first token.
    since: instant from which the gateway has it. Of two that think so, it is the later one's.
    """

    request: Request
    instance: str | None
    started: bool
    since: float


@dataclass(frozen=True, slots=True)
class Present:
    """Requests that a gateway has, in the order of their arrival. last: it has no others."""

    requests: tuple[InFlight, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine as its agent sees it; from agents, every second and when it changes.

    url, key: where it listens, and what it asks for. instance: None = it is down.
    current: the model that it serves, or is to serve. given_up: models that it cannot load, and why.
    failure: why it is down, None = it is not, or begins to run. fatal: request fields that crash it.
    """

    id: str
    url: str
    key: str | None
    instance: Instance | None
    current: str
    loading: str | None
    given_up: Mapping[str, str]
    prefix_caching: bool
    restarts: int
    failure: str | None
    fatal: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """A gateway or an agent ends in order, and has nothing any more."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """An engine's answer to `Asked`: how far it is. asked: an instant before that of the answer."""

    instance: str
    progress: Mapping[str, Progress]
    asked: float


@dataclass(frozen=True, slots=True)
class Asked:
    """The controller asks how far an instance is with requests."""

    instance: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests of a class of a tenant that wait outside the engines, by their places."""

    tenant: str
    tier: str
    count: int


@dataclass(frozen=True, slots=True)
class Alive:
    """A gateway lives; twice a second. waiting: its requests outside engines. count: all of its requests."""

    waiting: tuple[Waiting, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Standing:
    """A controller leads; to all gateways and agents, twice a second.

    known: gateways and agents whose requests or engines it knows. waiting: by gateway.
    """

    known: frozenset[str]
    waiting: Mapping[str, tuple[Waiting, ...]]


Report = Present | EngineState | Gone | Alive | Progressed | Asked | Standing
Item = Event | Command | Report
