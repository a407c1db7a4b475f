"""What the HTTP endpoints share: the open gateway, tenants, bodies within their limits."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from hmac import compare_digest
from ipaddress import ip_address
from socket import gethostname
from typing import Any

from fastapi import Request

from headway import clock
from headway.config import Engine, Key, Tier
from headway.config.keys import reveal, revealed
from headway.engines.vllm.fatal_fields import check_fields
from headway.engines.vllm.parsers import no_tool_parser, parsers
from headway.errors import RequestError
from headway.gateway.budget import Held
from headway.gateway.control.adapters import base_models
from headway.gateway.gateway import Gateway
from headway.gateway.http.connections import TENANT
from headway.gateway.offload import INLINE, offload
from headway.gateway.parsing.aliases import exact, meant
from headway.gateway.parsing.claims import check_claims
from headway.gateway.parsing.grammars import check_grammars
from headway.gateway.parsing.idempotency import keyed
from headway.gateway.parsing.pooling import PATHS as POOLING
from headway.gateway.parsing.requests import (
    HEADERS,
    PATHS,
    ChatBody,
    CompletionBody,
    Kind,
    ParsedRequest,
    interpret,
    read_json,
    validate,
)
from headway.gateway.parsing.tokens import Prompt, TokenCounter
from headway.types import Instance
from headway.types import Request as CoreRequest

Translate = Callable[[dict[str, Any]], dict[str, Any]]
_LARGE = 4  # large bodies that are parsed at a time


class AppState:
    """What the endpoints share: an open gateway, the models it serves and the API keys it accepts."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self.config = gateway, gateway.config
        self.models = {name: engine for engine in self.config.engines for name in engine.served}
        self.adapters = base_models(self.config.engines)
        self._served = {*self.models, *self.adapters}
        self.names = (*self.models, *self.adapters, *exact(self.config.aliases))
        # A body that is being read takes many times its bytes.
        self._large = asyncio.Semaphore(_LARGE)
        self.started = int(time.time())
        self.stopping = asyncio.Event()  # the gateway is being stopped
        self._salt = secrets.token_bytes(32)
        self._keys: dict[bytes, Key] = {}
        self._classes: Mapping[str, Tier] = {}  # as configured
        self.adopt(self.config.classes, self.config.keys)
        gateway.paces.changed = self._fit
        operator = self.config.server.operator_key
        self._operator = None if operator is None else self._digest(reveal(operator, "server.operator_key"))

    def adopt(self, classes: Mapping[str, Tier], keys: tuple[Key, ...]) -> None:
        """Take over classes and keys; ConfigError, which changes nothing, for a secret that is missing."""
        found = {self._digest(text): key for text, key in revealed(keys).items()}
        self.config = replace(self.config, keys=keys)
        self._keys, self._classes = found, classes
        self._fit()

    def _fit(self) -> None:
        """Let measured classes promise what the engines can do."""
        self.config = replace(self.config, classes=self.gateway.paces.fit(self._classes))
        self.gateway.adopt(self.config)

    def tenant(self, request: Request) -> str:
        """Return the tenant of a request; errors as `key`."""
        key = self.key(request)
        return "default" if key is None else key.tenant

    def key(self, request: Request) -> Key | None:
        """Return the key of a request, None if none are configured; 401 when none fits.

        Without keys, 403 for the web page of another site, whose user's browser can reach the server.
        """
        if not self._keys:
            self._check_page(request)
            return None
        given = self._given(request)
        key = None if given is None else self._keys.get(given)
        if key is not None:
            request.scope[TENANT] = key.tenant  # for the access log
        else:
            raise RequestError(
                "This server needs an API key.", "Send `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                status=401, code="invalid_api_key",
            )  # fmt: skip
        return key

    def _check_page(self, request: Request) -> None:
        """Refuse requests of web pages that are not this server's own, by an address or this machine's name.

        A page whose name was made to lead here (DNS rebinding) calls itself the server's own by that name.
        """
        if (origin := request.headers.get("origin")) is None:  # no browser, or nothing that changes anything
            return
        host = request.headers.get("host", "")
        own = "localhost", gethostname().lower(), self.config.server.host
        before, _, port = host.rpartition(":")
        name = (before if port.isdecimal() else host).strip("[]").lower()
        if origin.partition("://")[2] != host or not (name in own or _is_address(name)):
            raise RequestError(
                f"A web page ({origin[:64]!r}) may not use a server without API keys.",
                "Configure keys ([[keys]]), or open the page by the server's address.",
                status=403, code="foreign_page",
            )  # fmt: skip

    def _given(self, request: Request) -> bytes | None:
        """Return the digest of the key that a request carries; two different ones are none.

        RequestError for a header that comes twice: proxies and servers differ in which of the two counts.
        """
        for name in ("authorization", "x-api-key"):
            if len(request.headers.getlist(name)) > 1:
                raise RequestError(f"The header {name} comes more than once.", "Send it once.", param=name)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        bearer = key.strip() if scheme.lower() == "bearer" else None
        other = request.headers.get("x-api-key")  # as clients of Anthropic's API send it
        if bearer is not None and other is not None and bearer != other:
            return None
        given = other if bearer is None else bearer
        return None if given is None else self._digest(given)

    def _digest(self, key: str) -> bytes:
        """Return the digest by which keys are compared.

        The salt is this process's own, so how long a look-up takes tells nothing about a key.
        """
        return hmac.digest(self._salt, key.encode(), "sha256")

    def is_operator(self, request: Request) -> bool:
        """Tell whether a request carries the operator's key."""
        given = self._given(request)
        return self._operator is not None and given is not None and compare_digest(given, self._operator)

    def check_operator(self, request: Request, otherwise: str = "") -> None:
        """Refuse what only operators may do: 401 without their key, 403 when there is none.

        otherwise: what else the operator can do about the latter, for the hint.
        """
        if self._operator is None:
            raise RequestError(
                "This is for the operator, whose key is not configured.",
                f"Set server.operator_key, and send it{otherwise}.", status=403, code="control_off",
            )  # fmt: skip
        if not self.is_operator(request):
            raise RequestError(
                "This needs the operator's key.", "Send `Authorization: Bearer KEY` (server.operator_key).",
                status=401, code="invalid_api_key",
            )  # fmt: skip

    def check_reader(self, request: Request) -> None:
        """Refuse what describes the server to those without a key, where keys are configured; 401."""
        if not self.is_operator(request):
            self.key(request)

    def check_status(self, request: Request) -> None:
        """Refuse questions about the gateway's state where only operators may ask them."""
        if self.config.status_closed:
            self.check_operator(request, ", or set server.operator_only = false, which tells all clients")

    async def body(self, request: Request) -> bytes:
        """Read the body of a request that is answered at once; errors as `read`."""
        with self.gateway.bodies.hold() as held:
            return await self.read(request, held)

    async def read(self, request: Request, held: Held) -> bytes:
        """Read the body; 413 as soon as it is too long, whatever its declared length.

        415 when it is compressed, 429 when the bodies of all requests together are too long.
        """
        refuse_compressed(request)
        limit = self.config.server.max_body_kib * 1024
        declared = request.headers.get("content-length", "0")
        if declared.isdigit():
            if len(declared) > 18 or int(declared) > limit:
                raise self._too_long(limit)
            self.gateway.bodies.check(int(declared), held)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise self._too_long(limit)
            held.add(len(part))
            parts.append(part)
        return b"".join(parts)

    def _too_long(self, limit: int) -> RequestError:
        return RequestError(
            f"The body is larger than {limit} bytes.",
            "Send less, or raise server.max_body_kib.",
            status=413,
            code="body_too_large",
            headers={"connection": "close"},
        )

    async def json(self, request: Request, empty: bytes = b"") -> dict[str, Any]:
        """Read the JSON object of a request that is answered at once; errors as `read`.

        empty: stands for a body without bytes.
        """
        data = await self.body(request) or empty
        return await offload(len(data), partial(read_json, data))

    async def prompt(self, kind: Kind, data: bytes, translate: Translate | None = None) -> Prompt:
        """Return the tokens of a body's prompt; RequestError as for a request that is to be answered."""
        _, body = await offload(len(data), partial(self._validated, kind, data, translate))
        self._engine_of(body.model)
        model = self.adapters.get(body.model, body.model)
        counter = self.gateway.counters[model]
        return await offload(len(data), partial(counter.read, body, self._context(model)))

    async def parse(
        self, kind: Kind, request: Request, held: Held, translate: Translate | None = None
    ) -> ParsedRequest:
        """Parse an HTTP request, or refuse it before anything is stored.

        translate: makes the body that is served here of the client's.
        """
        arrival, key = clock.now(), self.key(request)
        if key is not None:
            held.tenant = key.tenant
            self.gateway.path.check_limits(key, arrival)
        data = await self.read(request, held)
        if len(data) <= INLINE:
            return await self._parse(kind, request, data, key, arrival, translate)
        async with self._large:
            return await self._parse(kind, request, data, key, arrival, translate)

    def describe(self, name: str) -> dict[str, Any]:
        """Return what OpenAI's API says of a model, an adapter or an alias. RequestError (404) for others."""
        self._engine_of(name)
        real = self._meant(name)
        longest, parent = self._context(self.adapters.get(real, real)), self.adapters.get(name, real)
        base = {} if parent == name else {"parent": parent}
        return {"id": name, "object": "model", "created": self.started, "owned_by": "headway",
                "max_model_len": longest} | base  # fmt: skip

    def _instances_of(self, model: str) -> list[Instance]:
        engines = self.gateway.dispatcher.engines.values()
        return [engine.instance for engine in engines if model in engine.config.served]

    def _context(self, model: str) -> int:
        """Return the tokens that every instance of a model has room for, as far as they tell."""
        instances = self._instances_of(model)
        told = [one for one in instances if "max_model_len" not in one.assumed]
        return min(one.max_model_len for one in told or instances)

    def only_model(self) -> str:
        """Return the model that a request means which names none: the only one here, else "" (a 404)."""
        return next(iter(self.models)) if len(self.models) == 1 else ""

    def counter(self, name: Any) -> TokenCounter:
        """Return the tokenizer of a model or an adapter. RequestError (404) when it is not served."""
        self._engine_of(str(name))
        real = self._meant(str(name))
        return self.gateway.counters[self.adapters.get(real, real)]

    def _meant(self, name: str) -> str:
        return meant(self.config.aliases, self._served, name)

    def _engine_of(self, name: str) -> Engine:
        """Return the engine of a model or an adapter. RequestError (404) when it is not served."""
        real = self._meant(name)
        engine = self.models.get(self.adapters.get(real, real))
        if engine is None:
            raise RequestError(
                f"The model {name[:100]!r} does not exist here.",
                f"Use one of {', '.join(sorted(self.names))}.",
                status=404, code="model_not_found", param="model",
            )  # fmt: skip
        return engine

    async def _parse(
        self, kind: Kind, request: Request, data: bytes, key: Key | None, arrival: float,
        translate: Translate | None,
    ) -> ParsedRequest:  # fmt: skip
        headers, path = _headers(request), request.scope["path"]
        raw, body = await offload(len(data), partial(self._validated, kind, data, translate))
        parsed, prompt = await self.interpreted(
            kind, raw, body, headers, key, arrival,
            tenant="default" if key is None else key.tenant, size=len(data),
        )  # fmt: skip
        if parsed.request.stage is not None:
            parsed = replace(parsed, request=self.gateway.dispatcher.promised(parsed.request))
        parsed = await self.gateway.path.with_earlier(keyed(parsed, headers, path, data))
        if parsed.earlier is None:
            self.gateway.path.check_capacity(parsed.request, None if key is None else key.max_queued)
        self._learn_prefix(parsed.request, prompt)
        return parsed

    async def interpreted(
        self, kind: Kind, raw: dict[str, Any], body: ChatBody | CompletionBody, headers: Mapping[str, str],
        key: Key | None, arrival: float, *, tenant: str, size: int,
    ) -> tuple[ParsedRequest, Prompt]:  # fmt: skip
        """Interpret a valid body for a model that is served; nothing is refused here for want of room.

        key: what its claims are held against, None = nothing. size: bytes of the body.
        """
        adapter = body.model if body.model in self.adapters else None
        model = self.adapters.get(body.model, body.model)
        engine = self._engine_of(body.model)
        _check_runner(engine, kind, body.model)
        if isinstance(body, ChatBody) and body.tools:
            _check_tools(engine, raw.get("tool_choice"))
        for one in self.gateway.dispatcher.engines.values():
            if model in one.models.names:
                check_fields(raw, one.fatal)

        context, slots = self._context(model), max(one.max_running for one in self._instances_of(model))

        def work() -> tuple[ParsedRequest, Prompt]:
            prompt = self.gateway.counters[model].read(body, context)
            return interpret(
                kind, raw, body, headers, self.config, model=model, adapter=adapter, tenant=tenant,
                arrival=arrival, lengths=prompt.lengths, max_model_len=context, max_running=slots,
            ), prompt  # fmt: skip

        parsed, prompt = await offload(size, work)
        if key is not None:
            own = body.priority is not None or "x-vllm-priority" in headers
            check_claims(key, parsed.request, parsed.request.priority if own else None)
        return parsed, prompt

    def _validated(
        self, kind: Kind, data: bytes, translate: Translate | None
    ) -> tuple[dict[str, Any], ChatBody | CompletionBody]:
        raw = read_json(data)
        return self.validated(kind, raw if translate is None else translate(raw))

    def validated(self, kind: Kind, raw: dict[str, Any]) -> tuple[dict[str, Any], ChatBody | CompletionBody]:
        """Check the fields of a body, and return it with its model's own name.

        Errors as `check_grammars` and `validate`.
        """
        name = self.only_model() if raw.get("model") is None else raw["model"]  # vLLM wants none
        raw = {**raw, "model": self._meant(name) if isinstance(name, str) else name}
        check_grammars(raw, self.config.grammars)
        return raw, validate(kind, raw, max(map(self._context, self.models), default=0))

    def _learn_prefix(self, request: CoreRequest, prompt: Prompt) -> None:
        """Take note of a prompt of a run; the KV of an adapter is its own, and cannot be pinned."""
        prefixes = self.gateway.prefixes
        if prefixes is None or request.stage is None or request.adapter is not None:
            return
        if self.models[request.model].runner == "pooling":
            return  # it completes no prompt
        if (ids := prompt.ids) is not None:
            prefixes.learn(request, ids)


def _headers(request: Request) -> dict[str, str]:
    """Return the headers of a request; where there are several of a name the first one counts.

    Some thirty names are looked up, for each of which Starlette would go through them all.
    """
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(request.headers.raw)}


def refuse_compressed(request: Request) -> None:
    """Refuse a compressed body, whose size nobody knows before it is unpacked: RequestError (415)."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise RequestError(
            f"The body is compressed ({coding[:40]!r}), which is not read here.",
            "Send it as it is, without Content-Encoding.", status=415, code="unsupported_encoding",
            headers={"accept-encoding": "identity"},
        )  # fmt: skip


def _check_runner(engine: Engine, kind: Kind, model: str) -> None:
    """Refuse what the model of an engine cannot do: to generate text, or to embed it."""
    if (kind in POOLING) == (engine.runner == "pooling"):
        return
    path = PATHS[kind]
    what = "generates text" if kind in POOLING else "embeds text and generates none"
    wanted = "pooling" if kind in POOLING else "generate"
    raise RequestError(
        f"{path} needs another model: {model!r} {what}.",
        f'Use a model whose engine has runner = "{wanted}" in [[engines]].',
        code="unsupported_task", param="model",
    )  # fmt: skip


def _check_tools(engine: Engine, choice: Any) -> None:
    """Refuse tools that the model may or must call, where nothing reads its calls."""
    if engine.url is None and choice != "none" and parsers(engine).tool is None:
        raise no_tool_parser()


def header_docs(*names: str) -> list[dict[str, Any]]:
    """Return the documentation of these headers for OpenAPI; of all that scheduled requests may have."""
    return [
        {"name": name, "in": "header", "required": False, "schema": {"type": HEADERS[name]}}
        for name in names or HEADERS
    ]


def error_docs(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of error answers for OpenAPI."""
    return {code: {"description": "An error in OpenAI's shape."} for code in codes}


def _is_address(name: str) -> bool:
    """Tell whether the name of a host is an IP address."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
