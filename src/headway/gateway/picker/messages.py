"""Protobuf messages of Envoy's external processing and of gRPC's health checks: the fields that the picker uses.

Names and numbers are those of envoy/service/ext_proc/v3/external_processor.proto, envoy/config/core/v3/base.proto and
grpc/health/v1/health.proto; protobuf skips all other fields that Envoy sends. Enums are read as numbers. Packages with
all of Envoy's messages (`xds-protos`) are not used, because they overwrite files of OpenTelemetry's and Google's
packages, which the gateway needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

FULL_DUPLEX = 4  # of BodySendMode: bodies are streamed both ways
OVERWRITE = 2  # of HeaderAppendAction: OVERWRITE_IF_EXISTS_OR_ADD
SERVING, NOT_SERVING = 1, 2  # of HealthCheckResponse.ServingStatus
_PACKAGE = "headway.picker"  # only in this descriptor pool: names are not sent
_SCALARS = {"bool": 8, "string": 9, "bytes": 12, "int32": 5}
# Message -> field -> (number, type); "*" = repeated, "%" = a map from strings.
_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, "*string")},
    "Metadata": {"filter_metadata": (1, "%Struct")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {"status": (1, "HttpStatus"), "headers": (2, "HeaderMutation"), "body": (3, "bytes")},
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}
_ONE_OF = {"ProcessingRequest": "request", "ProcessingResponse": "response"}  # message -> name of its oneof
_BESIDE = {"metadata_context", "protocol_config", "dynamic_metadata"}  # fields outside the oneof


def _message(name: str, fields: Mapping[str, tuple[int, str]]) -> DescriptorProto:
    message = DescriptorProto(name=name)
    if name in _ONE_OF:
        message.oneof_decl.add(name=_ONE_OF[name])
    for field, (number, kind) in fields.items():
        one = message.field.add(name=field, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if name in _ONE_OF and field not in _BESIDE:
            one.oneof_index = 0
        if kind.startswith("%"):
            entry = _message("FilterMetadataEntry", {"key": (1, "string"), "value": (2, kind[1:])})
            entry.options.map_entry = True
            message.nested_type.append(entry)
            kind = f"*{name}.FilterMetadataEntry"
        if kind.startswith("*"):
            one.label, kind = FieldDescriptorProto.LABEL_REPEATED, kind[1:]
        if kind in _SCALARS:
            one.type = _SCALARS[kind]
        else:
            one.type = FieldDescriptorProto.TYPE_MESSAGE
            one.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".{_PACKAGE}.{kind}"
    return message


def _classes() -> dict[str, Any]:
    pool = DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    file = FileDescriptorProto(name="headway_picker.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    file.message_type.extend(_message(name, fields) for name, fields in _FIELDS.items())
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}


_CLASSES = _classes()
ProcessingRequest, ProcessingResponse = _CLASSES["ProcessingRequest"], _CLASSES["ProcessingResponse"]
HealthCheckRequest, HealthCheckResponse = _CLASSES["HealthCheckRequest"], _CLASSES["HealthCheckResponse"]


def headers_of(message: Any) -> list[tuple[str, bytes]]:
    """Return the headers of an `HttpHeaders`, with names in lower case."""
    return [(one.key.lower(), one.raw_value or one.value.encode()) for one in message.headers.headers]


def mutation(headers: Mapping[str, str | bytes], remove: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of a `HeaderMutation` that sets some headers and removes others."""
    encoded = {key: value.encode() if isinstance(value, str) else value for key, value in headers.items()}
    sets = [{"header": {"key": key, "raw_value": value}, "append_action": OVERWRITE} for key, value in encoded.items()]
    return {"set_headers": sets, "remove_headers": remove}


def changed_headers(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `HeadersResponse` with a header mutation."""
    return {"response": {"header_mutation": changes}}


def streamed(body: bytes, *, end: bool = False) -> dict[str, Any]:
    """Return the fields of a `BodyResponse` with a part of a body."""
    return {"response": {"body_mutation": {"streamed_response": {"body": body, "end_of_stream": end}}}}
