"""A real Envoy with the filter ext_proc, as gateways of Kubernetes configure it for an InferencePool.

The program is `envoy` on the path, or what `make envoy` has unpacked; `PROGRAM` is None where there is none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.engines.vllm.process.launch import Child, free_port

PROGRAM = shutil.which("envoy") or shutil.which("envoy", path=Path(__file__).parents[2] / ".envoy")
SUBSET = "x-test-subset"  # a request's header with the addresses that its picker may choose from
_TYPES = "type.googleapis.com/envoy.extensions."
_STREAMED = "FULL_DUPLEX_STREAMED"


def _typed(name: str, kind: str, **config: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": _TYPES + kind, **config}}


def _cluster(name: str, addresses: Sequence[tuple[str, int]], **more: Any) -> dict[str, Any]:
    sockets = ({"socket_address": {"address": host, "port_value": port}} for host, port in addresses)
    endpoints = [{"endpoint": {"address": socket}} for socket in sockets]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": assignment, **more}


def _ext_proc(body: str) -> dict[str, Any]:
    modes = {f"{side}_{part}_mode": "SEND" for side in ("request", "response") for part in ("header", "trailer")}
    return _typed(
        "envoy.filters.http.ext_proc",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        processing_mode={**modes, "request_body_mode": body, "response_body_mode": body},
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )


def _pool(engines: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the cluster of the engines, whose policy takes the address that the picker has named."""
    fallback = _typed("envoy.load_balancing_policies.random", "load_balancing_policies.random.v3.Random")
    source = {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
    policy = _typed(
        "envoy.load_balancing_policies.override_host",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[source],
        fallback_policy={"policies": [{"typed_extension_config": fallback}]},
    )
    return _cluster("pool", engines, load_balancing_policy={"policies": [{"typed_extension_config": policy}]})


def configuration(port: int, picker: int, engines: Sequence[tuple[str, int]], *, body: str = _STREAMED) -> Any:
    """Return Envoy's configuration. engines: their addresses. body: the mode in which bodies pass the picker."""
    rule = {"metadata_namespace": "envoy.lb.subset_hint", "key": "x-gateway-destination-endpoint-subset"}
    filters = [
        _typed(
            "envoy.filters.http.header_to_metadata",
            "filters.http.header_to_metadata.v3.Config",
            request_rules=[{"header": SUBSET, "on_header_present": rule, "remove": True}],
        ),
        _ext_proc(body),
        _typed("envoy.filters.http.router", "filters.http.router.v3.Router"),
    ]
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="test",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=filters,
    )
    listener = {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [manager]}],
    }
    http2: dict[str, Any] = {"explicit_http_config": {"http2_protocol_options": {}}}
    options = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": _TYPES + "upstreams.http.v3.HttpProtocolOptions",
            **http2,
        }
    }
    grpc = _cluster("picker", [("127.0.0.1", picker)], typed_extension_protocol_options=options)
    return {"static_resources": {"listeners": [listener], "clusters": [_pool(engines), grpc]}}


@contextmanager
def running(folder: Path, picker: int, engines: Sequence[tuple[str, int]], **more: Any) -> Iterator[str]:
    """Run Envoy until the block ends; yield its URL. picker: port of the picker."""
    assert PROGRAM is not None, "see `PROGRAM`"
    port = free_port()
    file = folder / f"envoy-{port}.json"
    file.write_text(json.dumps(configuration(port, picker, engines, **more)))
    argv = [PROGRAM, "-c", str(file), "--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id"]
    child = Child(argv, {}, folder / f"envoy-{port}.log")
    child.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.stop(grace=2.0)
