"""Refusals come in OpenAI's shape, before memory is spent on the request."""

from __future__ import annotations

import gzip
import json
import logging
import socket
from typing import Any

import httpx
import openai
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.config import Engine
from headway.errors import RequestError
from headway.gateway.parsing.parser import _check_tools
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, SAY, WEB, Gateway, until

COMPLETIONS = "/v1/completions"
MIB = 2**20


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Check that this is an error in OpenAI's shape and return it."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


# ---- bodies


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"{'model': 1}",
        b"\xff\xfe{}",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a":' * 100_000,
        b"[" * 5000,
        b"9" * 5000,
        b"\x00",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_malformed_json(gateway: Gateway, raw: bytes, path: str) -> None:
    said = error(gateway.post(None, path, content=raw), 400)
    assert "JSON" in said["message"]


@pytest.mark.parametrize("raw", [b"null", b"[]", b'"text"', b"3", b"true"])
def test_json_that_is_no_object(gateway: Gateway, raw: bytes) -> None:
    assert "not an object" in error(gateway.post(None, content=raw), 400)["message"]


@pytest.mark.parametrize("depth", [300, 600, 900, 930, 960, 970, 980, 985, 990])
def test_deep_json_is_passed_on_or_refused(gateway: Gateway, depth: int) -> None:
    """Somewhere here Python's own limits end, in different places for reading and for writing."""
    raw = json.dumps(gateway.chat())[:-1] + ', "deep": ' + "[" * depth + "]" * depth + "}"
    assert gateway.post(None, content=raw.encode()).status_code in (200, 400)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kv_transfer_params": {"prompt_token_ids": [7]}}, "kv_transfer_params.prompt_token_ids"),
    ({"model": 3}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages.0"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": 3}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages.0.content"),
    ({"stream": "maybe"}, "stream"),
    ({"stream": 2}, "stream"),
    ({"stream_options": 3}, "stream_options"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"priority": 2**31}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"background": "no"}, "background"),
    ({"service_tier": 3}, "service_tier"),
    ({"service_tier": "platinum"}, "service_tier"),
    ({"ttft_slo_ms": -5}, "ttft_slo_ms"),
    ({"ttft_slo_ms": 0}, "ttft_slo_ms"),
    ({"tpot_slo_ms": "fast"}, "tpot_slo_ms"),
    ({"tpot_slo_ms": True}, "tpot_slo_ms"),
    ({"ttlt_slo_ms": 1e9}, "ttlt_slo_ms"),
    ({"ttlt_slo_ms": 5e-324}, "ttlt_slo_ms"),
    ({"vllm_xargs": []}, "vllm_xargs"),
    ({"tools": {}}, "tools"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[str(fields) for fields, _ in WRONG])
def test_wrong_types_name_the_field(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    said = error(gateway.post(gateway.chat(**fields)), 400)
    assert said["param"] == param
    assert said["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "prompt", [None, 3, {}, [], [1, "a"], [[1], ["a"]], [None], [["a"]], [2**31], [-1], [[1], [2**40]]]
)
def test_wrong_prompts(gateway: Gateway, prompt: Any) -> None:
    said = error(gateway.post({"model": "smollm2", "prompt": prompt}, COMPLETIONS), 400)
    assert said["param"] == "prompt"


def test_a_mark_of_the_encoding_is_no_part_of_the_body(gateway: Gateway) -> None:
    raw = b"\xef\xbb\xbf" + json.dumps(gateway.chat()).encode()
    assert gateway.post(None, content=raw).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/files", "/tokenize"])
def test_a_compressed_body_is_refused_in_words(gateway: Gateway, path: str) -> None:
    raw = gzip.compress(json.dumps(gateway.chat()).encode())
    answer = gateway.post(None, path, content=raw, headers={"content-encoding": "gzip"})
    assert "gzip" in error(answer, 415)["message"]
    plain = gateway.post(gateway.chat(), headers={"content-encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/nothing", CHAT])
def test_a_head_is_answered_as_a_get_without_its_body(gateway: Gateway, path: str) -> None:
    whole, head = gateway.get(path), WEB.head(gateway.url + path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_missing_fields(gateway: Gateway) -> None:
    assert error(gateway.post({"model": "smollm2"}), 400)["param"] == "messages"
    assert error(gateway.post({"model": "smollm2"}, COMPLETIONS), 400)["param"] == "prompt"


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms", "x-llm-d-slo-ttft-ms"])
@pytest.mark.parametrize("value", ["-1", "0", "soon", "nan", "inf", "1e99", "", "1e-320", "0x10"])
def test_wrong_slo_headers(gateway: Gateway, name: str, value: str) -> None:
    assert error(gateway.post(gateway.chat(), headers={name: value}), 400)["param"] == name


@pytest.mark.parametrize("value", ["", "urgent", "1.5", str(2**31), "9" * 5000])
def test_wrong_priority_header(gateway: Gateway, value: str) -> None:
    error(gateway.post(gateway.chat(), headers={"x-vllm-priority": value}), 400)


def test_an_unknown_model(gateway: Gateway) -> None:
    said = error(gateway.post(gateway.chat(model="gpt-9\u2028" * 99)), 404)
    assert (said["code"], said["param"]) == ("model_not_found", "model")
    assert "smollm2" in said["message"]
    with gateway.client() as client, pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=SAY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, CHAT),
        ({"messages": SAY, "max_tokens": 10**40}, CHAT),
        ({"messages": SAY, "max_tokens": 5, "max_completion_tokens": 2049}, CHAT),
        ({"prompt": [7] * 2048}, COMPLETIONS),
        ({"prompt": ["short", "word " * 3000]}, COMPLETIONS),
    ],
)
def test_prompts_over_the_limit(gateway: Gateway, fields: dict[str, Any], path: str) -> None:
    said = error(gateway.post({"model": "smollm2", **fields}, path), 400)
    assert said["code"] == "context_length_exceeded"
    assert "2048" in said["message"]


def test_one_model_needs_no_name(gateway: Gateway) -> None:
    assert gateway.post({"messages": SAY}).status_code == 200
    told = gateway.post({"input": "Hi.", "stream": True}, "/v1/responses").text.partition("data: ")[2]
    assert json.loads(told.partition("\n")[0])["response"]["model"] == "smollm2"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": [{"role": "user", "content": "word " * 3000}], "max_tokens": 8}, CHAT),
        ({"prompt": ["short", "word " * 200_000]}, COMPLETIONS),
    ],
)
def test_a_prompt_that_the_engine_cuts(gateway: Gateway, fields: dict[str, Any], path: str) -> None:
    answer = gateway.post({"model": "smollm2", "truncate_prompt_tokens": -1, **fields}, path)
    assert answer.status_code == 200, answer.text


def test_the_last_prompt_that_fits(gateway: Gateway) -> None:
    answer = gateway.post({"model": "smollm2", "prompt": [7] * 2047, "max_tokens": 1}, COMPLETIONS)
    assert answer.status_code == 200


def test_background_cannot_stream(gateway: Gateway) -> None:
    error(gateway.post(gateway.chat(background=True, stream=True)), 400)


def test_nothing_refused_is_stored(gateway: Gateway) -> None:
    before = gateway.jobs()
    gateway.post(gateway.chat(model="nothing"))
    gateway.post(gateway.chat(max_tokens=10**6))
    assert gateway.jobs() == before


# ---- paths and methods


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", COMPLETIONS, 405),
        ("POST", "/health", 405),
        ("GET", "/v1/responses/hw-1", 404),
        ("POST", "/v1/responses/hw-1/cancel", 404),
        ("GET", "/%00%ff/%2e%2e/etc", 404),
        ("BREW", "/health", 400),
    ],
)
def test_unknown_paths_and_methods(gateway: Gateway, method: str, path: str, status: int) -> None:
    answer = WEB.request(method, gateway.url + path)
    error(answer, status)
    if status == 405:
        assert answer.headers["allow"]


# ---- too much


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the bytes of bodies that the gateway takes in."""
    sizes: list[int] = [0]
    original = HttpToolsProtocol.on_body

    def on_body(self: HttpToolsProtocol, body: bytes) -> None:
        sizes[0] += len(body)
        original(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", on_body)
    return sizes


def test_a_large_body_with_its_length(gateway: Gateway, read: list[int]) -> None:
    for _ in range(5):
        said = error(gateway.post(None, content=b"x" * 10 * MIB), 413)
        assert said["code"] == "body_too_large"
    assert read[0] < 5 * MIB / 2


def test_a_large_body_in_chunks(gateway: Gateway, read: list[int]) -> None:
    for _ in range(5):
        said = error(gateway.post(None, content=(b"x" * 65536 for _ in range(160))), 413)
        assert said["code"] == "body_too_large"
    assert read[0] < 5 * 2 * MIB


def test_the_length_is_enough_to_refuse(gateway: Gateway) -> None:
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 10485760\r\n\r\n" % CHAT.encode()
    assert speak(gateway, [head]).startswith(b"HTTP/1.1 413 ")


def test_a_limit_of_one_s_own(serve: Serve) -> None:
    with serve(server={"max_body_kib": 1, "max_header_kib": 1}) as gateway:
        error(gateway.post(gateway.chat(user="x" * 2000)), 413)
        assert gateway.post(gateway.chat(), headers={"x-much": "y" * 2000}).status_code == 431
        assert gateway.post(gateway.chat()).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 40_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(4000)) + b"\r\n",
        b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["a long line", "many lines", "a long path"],
)
def test_large_headers(gateway: Gateway, head: bytes) -> None:
    answer = speak(gateway, [head])
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert speak(gateway, [head[i : i + 1000] for i in range(0, len(head), 1000)]).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nx: ", b"GET /", b"GET /health HTTP/1.1\r\n"])
def test_a_head_that_never_ends(gateway: Gateway, start: bytes) -> None:
    piece = b"y: z\r\n" * 1000 if start.endswith(b"\r\n") else b"y" * 4096
    answer = speak(gateway, [start, *([piece] * 1000)])
    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("nonsense", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET\r\n\r\n"])
def test_what_is_not_http(gateway: Gateway, nonsense: bytes) -> None:
    answer = speak(gateway, [nonsense])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "HTTP" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_large_headers_after_a_request_on_the_same_connection(gateway: Gateway) -> None:
    """The limit is each request's own: a connection may carry many small heads and large bodies."""
    body = json.dumps(gateway.chat(user="x" * 50_000)).encode()
    ask = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
    with socket.create_connection(("127.0.0.1", gateway.config.server.port), timeout=10) as line:
        for _ in range(5):
            line.sendall(ask)
            until(lambda: b'"finish_reason":"length"' in line.recv(65536))


def speak(gateway: Gateway, pieces: list[bytes]) -> bytes:
    """Send raw bytes until they are refused; return the answer."""
    with socket.create_connection(("127.0.0.1", gateway.config.server.port), timeout=10) as line:
        try:
            for piece in pieces:
                line.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            assert len(pieces) > 1
        answer = b""
        try:
            while part := line.recv(65536):
                answer += part
        except ConnectionResetError:
            assert answer
        return answer


def test_what_is_refused_leaves_a_trace(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headway.gateway"):
        assert gateway.post(gateway.chat(model="no\nsuch")).status_code == 404
        assert gateway.get("/v1/none%0Asuch").status_code == 404
    lines = [one.getMessage() for one in caplog.records if ": 404, " in one.getMessage()]
    assert len(lines) == 2
    assert not any("\n" in line for line in lines), "a client forges no line"
    assert 'headway_http_errors_total{status="404",type="' in gateway.get("/metrics").text


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_tools_that_nothing_reads_are_refused_in_our_words(choice: Any) -> None:
    with pytest.raises(RequestError, match="tool_parser in"):
        _check_tools(Engine(), choice)


@pytest.mark.parametrize(
    ("engine", "choice"), [(Engine(tool_parser="hermes"), None), (Engine(), "none"), (Engine(url="http://a"), "auto")]
)
def test_tools_that_are_read_or_are_not_known_of_pass(engine: Engine, choice: str | None) -> None:
    _check_tools(engine, choice)


def test_pages_of_configured_origins_may_use_the_api(serve: Serve) -> None:
    page = "https://app.example"
    with serve(server={"cors_origins": (page,)}) as gateway:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-slo-ttft-ms"}
        for origin, status in ((page, 200), ("https://other.example", 400)):
            preflight = WEB.options(gateway.url + CHAT, headers={"origin": origin, **asked})
            assert preflight.status_code == status
            assert preflight.headers.get("access-control-allow-origin") == (page if status == 200 else None)
        assert (
            "x-slo-ttft-ms"
            in WEB.options(gateway.url + CHAT, headers={"origin": page, **asked}).headers[
                "access-control-allow-headers"
            ]
        )
        for body in (gateway.chat(), gateway.chat(stream=True), gateway.chat(max_tokens=0)):
            answer = gateway.post(body, headers={"origin": page})
            assert answer.headers["access-control-allow-origin"] == page
            assert answer.headers["access-control-expose-headers"] == "*"
        assert error(gateway.post(gateway.chat(), headers={"origin": "https://other.example"}), 403)
    with serve() as gateway:
        assert WEB.options(gateway.url + CHAT, headers={"origin": page, **asked}).status_code == 405


def test_without_keys_web_pages_of_other_sites_are_refused(serve: Serve) -> None:
    """A form or a fetch of text/plain reaches any server that its user's browser can reach."""
    text, data = {"content-type": "text/plain"}, {"content-type": "application/json"}
    with serve(server={"hosts": ("Llm.example", ".b.example")}) as gateway:
        body, own = json.dumps(gateway.chat()).encode(), gateway.url.removeprefix("http://")
        port = own.rpartition(":")[2]
        rebound, local = f"evil.example:{port}", f"localhost:{port}"
        others = ("http://evil.example", "null", "http://localhost:3000", f"http://{own}1", "http://[")
        for origin, host in (*((one, own) for one in others), (f"http://{rebound}", rebound)):
            answer = gateway.post(content=body, headers=text | {"origin": origin, "host": host})
            assert error(answer, 403)["code"] == ("foreign_host" if host == rebound else "foreign_page")
        for path in ("/v1/models", "/v1/files", "/metrics", "/openapi.json", "/headway/live"):
            assert error(gateway.get(path, headers={"host": rebound}), 403)["code"] == "foreign_host"
        assert gateway.get("/ready", headers={"host": rebound}).json() == {"ready": True}
        assert error(gateway.post(content=body, headers=text), 415)["code"] == "unsupported_media_type"
        hosts = ("headway", "gpu.local", "a.svc", "[::1]:80", "llm.example", "c.b.example:8000")
        own = ({}, {"origin": gateway.url}, {"origin": f"http://{local}", "host": local}, *({"host": h} for h in hosts))
        for headers in own:
            assert gateway.post(content=body, headers=data | headers).status_code == 200
