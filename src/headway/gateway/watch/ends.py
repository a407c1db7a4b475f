"""The end of each request, reported once to all observers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from headway.gateway.in_flight import InFlightRequest, Outcome
from headway.types import Request

# Of a stream that has lost its engine: it is queued again; the others end with an error, as it has been resumed too
# often, cannot be, or the next engine's answer was another one.
Resumption = Literal["resumed", "limit", "unable", "diverged"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request in flight.

    at: instant. output_tokens: of its answer, of one that was cut short those that its client has got.
    reason: of a failure, as the broker keeps it.
    """

    in_flight: InFlightRequest
    at: float
    outcome: Outcome
    output_tokens: int = 0
    reason: str = ""

    @property
    def here(self) -> bool:
        """Return whether this gateway accepted the request and ended it."""
        return self.outcome not in ("abandoned", "not_stored")

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to what its client saw first: a token of a stream, or the whole answer."""
        first = self.in_flight.first_token
        instant = first if self.in_flight.streams and first is not None else self.at
        return instant - self.in_flight.request.arrival

    @property
    def e2e(self) -> float:
        """Seconds from its arrival to its end."""
        return self.at - self.in_flight.request.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds per token of one answer after its first."""
        return self.in_flight.request.tpot(self.ttft, self.e2e, self.output_tokens)

    @property
    def cost(self) -> float | None:
        """What its tenant pays, None where its model has no price."""
        return self.in_flight.bill.cost(self.in_flight.used(self.outcome, self.output_tokens))

    @property
    def met(self) -> bool:
        """Whether an answered request met every target of its SLO."""
        return self.in_flight.request.slo.met(self.ttft, self.tpot, self.e2e, self.in_flight.silence or 0.0)


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was refused before it was accepted; request: None = before its body was read."""

    reason: str
    tenant: str
    request: Request | None = None


class Observer:
    """Learns of ends and refusals; what an observer has no interest in, it does not override."""

    def ended(self, end: Ended) -> None:
        """A request in flight has ended."""
        return

    def refused(self, refusal: Refused) -> None:
        """A request was refused."""
        return

    def streamed(self, request: Request, silence: float) -> None:
        """A stream is over; silence: the longest between two of its tokens, in seconds."""
        return

    def resumed(self, request: Request, result: Resumption) -> None:
        """A stream has lost its engine."""
        return


class Observers(Observer):
    """Notifies several observers, in order."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def ended(self, end: Ended) -> None:
        """Notify them of an end."""
        for observer in self._observers:
            observer.ended(end)

    def refused(self, refusal: Refused) -> None:
        """Notify them of a refusal."""
        for observer in self._observers:
            observer.refused(refusal)

    def streamed(self, request: Request, silence: float) -> None:
        """Notify them of a stream that is over."""
        for observer in self._observers:
            observer.streamed(request, silence)

    def resumed(self, request: Request, result: Resumption) -> None:
        """Notify them of a stream that has lost its engine."""
        for observer in self._observers:
            observer.resumed(request, result)
