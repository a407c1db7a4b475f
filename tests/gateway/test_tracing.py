"""OpenTelemetry spans as a collector gets them, and the ids that an engine is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from headway.config import Tracing
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, until
from tests.gateway.test_request_ends import fakes, hanging

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A collector that keeps the spans it was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.thread.join()
    collector.server.server_close()


def told(span: Any) -> dict[str, Any]:
    """Return the attributes of a span."""
    kinds = ("string_value", "int_value")
    return {one.key: getattr(one.value, next(k for k in kinds if one.value.HasField(k))) for one in span.attributes}


def test_a_span_for_each_state_below_that_of_the_client(serve: Serve, collector: Collector, fake: Fake) -> None:
    with serve(tracing=Tracing(collector.url)) as gateway:
        parent = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        answer = gateway.post(gateway.chat(stream=True), headers=parent)
        headers = fake.last()["headers"]
    assert headers["x-request-id"] == answer.headers["x-request-id"]
    spans = {span.name: span for span in collector.spans}
    assert list(spans) == ["queued", "in e0", "answering", "chat"]
    root = spans["chat"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
    assert headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    seen = told(root)
    assert seen["headway.request_id"] == answer.headers["x-request-id"]
    assert (seen["headway.outcome"], seen["headway.instance"]) == ("finished", "e0")
    assert seen["gen_ai.usage.output_tokens"] == 8
    at = root.start_time_unix_nano
    for name in ("queued", "in e0", "answering"):
        assert spans[name].parent_span_id == root.span_id
        assert abs(spans[name].start_time_unix_nano - at) < 10_000
        at = spans[name].end_time_unix_nano
    assert abs(root.end_time_unix_nano - at) < 10_000


def test_a_request_that_fails_is_an_error(serve: Serve, collector: Collector) -> None:
    with serve(tracing=Tracing(collector.url)) as gateway:
        assert gateway.post(gateway.chat(**fakes(end="cut"))).status_code >= 500
    root = next(span for span in collector.spans if span.name == "chat")
    assert root.status.code == 2
    assert told(root)["headway.outcome"] == "failed"


def test_each_request_has_one_span_whatever_its_end(serve: Serve, collector: Collector) -> None:
    with serve(tracing=Tracing(collector.url)) as gateway:
        gateway.post(gateway.chat(stream=True))
        gateway.post(gateway.chat(**fakes(end="cut")))
        with hanging(gateway, stream=True, **fakes(hold="client")):
            until(lambda: len(gateway.controller.requests) == 1)
        until(lambda: not gateway.controller.requests)
    roots = [told(span) for span in collector.spans if span.name == "chat"]
    assert sorted(root["headway.outcome"] for root in roots) == ["cancelled", "failed", "finished"]
    assert len({root["headway.request_id"] for root in roots}) == 3


def test_a_client_s_parent_that_is_not_sampled_is_obeyed(serve: Serve, collector: Collector) -> None:
    with serve(tracing=Tracing(collector.url)) as gateway:
        gateway.post(gateway.chat(), headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
        gateway.post(gateway.chat(), headers={"traceparent": "nonsense"})
    roots = [span for span in collector.spans if span.name == "chat"]
    assert [root.trace_id.hex() == TRACE for root in roots] == [False]


def test_a_collector_that_is_gone_costs_nothing(serve: Serve) -> None:
    with serve(tracing=Tracing("http://127.0.0.1:9")) as gateway:
        assert gateway.post(gateway.chat()).status_code == 200


def test_without_tracing_the_engine_gets_no_parent(gateway: Gateway, fake: Fake) -> None:
    gateway.post(gateway.chat(), headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert "traceparent" not in fake.last()["headers"]
