"""OpenTelemetry: a span for every request, with one for each of its states, passed on to vLLM.

A client's `traceparent` (W3C) is the parent; the engine gets the request's span as its own, so vLLM's spans
hang below it (its `--otlp-traces-endpoint`). Spans are sent by a thread of the SDK, in batches; a collector
that does not answer costs requests nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headway import clock
from headway.config import Tracing as Settings
from headway.gateway.in_flight import InFlightRequest
from headway.gateway.watch.ends import Ended, Observer
from headway.gateway.watch.late import spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_PARENT = "traceparent"
log = logging.getLogger("headway.gateway")


class RequestTracing(Observer):
    """Makes spans and sends them; without an endpoint it does nothing, and imports nothing."""

    def __init__(self, settings: Settings) -> None:
        self._provider: TracerProvider | None = None
        self._open: dict[str, Span] = {}
        if settings.endpoint is None:
            return
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as Provider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        provider = Provider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample)),
            resource=Resource.create({"service.name": settings.service}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=f"{settings.endpoint.rstrip('/')}/v1/traces", timeout=5)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._provider, self._tracer = provider, provider.get_tracer("headway")

    def begin(self, in_flight: InFlightRequest, parent: str | None) -> None:
        """Begin the span of a request at its arrival. parent: the client's `traceparent`, if it sent one."""
        if self._provider is None:
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        request = in_flight.request
        context = TraceContextTextMapPropagator().extract({} if parent is None else {_PARENT: parent})
        self._open[in_flight.id] = self._tracer.start_span(
            str(in_flight.kind),
            context=context,
            kind=SpanKind.SERVER,
            start_time=_ns(request.arrival),
            attributes={
                "gen_ai.request.model": request.model,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.usage.input_tokens": request.prompt_tokens,
                "headway.request_id": request.id,
                "headway.class": request.tier,
                "headway.tenant": request.tenant,
            },
        )

    def headers(self, id: str) -> dict[str, str]:
        """Return the headers that make a request's span the parent of the engine's."""
        span = self._open.get(id)
        if span is None:
            return {}
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
        return carrier

    def ended(self, end: Ended) -> None:
        """End the span of a request, with one for each state that it was in."""
        in_flight = end.in_flight
        span = self._open.pop(in_flight.id, None)
        if span is None:
            return
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.status import Status, StatusCode

        context, at = set_span_in_context(span), in_flight.request.arrival
        for state, seconds in spans(in_flight, end.at):
            child = self._tracer.start_span(state, context=context, start_time=_ns(at))
            at += seconds
            child.end(_ns(at))
        span.set_attribute("headway.outcome", end.outcome)
        span.set_attribute("gen_ai.usage.output_tokens", end.output_tokens)
        if in_flight.sends:
            span.set_attribute("headway.instance", in_flight.sends[-1][1])
        if end.outcome in ("failed", "refused", "not_stored"):
            span.set_status(Status(StatusCode.ERROR, end.outcome))
        span.end(_ns(end.at))

    def close(self) -> None:
        """Send what is left; it waits for the collector, at most a few seconds."""
        if self._provider is not None:
            self._provider.shutdown()


def _ns(instant: float) -> int:
    return int(clock.shown(instant) * 1e9)
