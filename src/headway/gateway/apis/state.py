"""What the HTTP endpoints share: the open gateway, tenants, bodies within their limits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from headway import clock
from headway.config import Config, Key, Tier
from headway.config.keys import revealed
from headway.errors import RequestError
from headway.gateway import tasks
from headway.gateway.apis.access import TOKEN_ERROR, Access, Sender
from headway.gateway.apis.api import Api
from headway.gateway.apis.oidc import Tokens
from headway.gateway.apis.stored_keys import FORGET_S, StoredKeys
from headway.gateway.budget import Held
from headway.gateway.gateway import Gateway
from headway.gateway.http.connections import TENANT
from headway.gateway.in_flight import VIA, Via
from headway.gateway.offload import INLINE, offload
from headway.gateway.parsing.idempotency import with_key
from headway.gateway.parsing.models import ServedModels, unserved
from headway.gateway.parsing.parser import Parser
from headway.gateway.parsing.pooling import PATHS as POOLING
from headway.gateway.parsing.requests import ParsedRequest, read_json
from headway.gateway.watch.audit import ACTOR
from headway.store.queue.port import Job

_SHOWN = 5  # keys in a warning
_LARGE = 4  # large bodies that are parsed at a time
T = TypeVar("T")


class AppState(Access):
    """What the endpoints share: an open gateway, the models it serves and the API keys it accepts.

    stored: the keys in the queue's store. configured: those of `[[keys]]`, by digest. classes: as configured.
    by_tenant: the senders with a key, also those that have ended since the last change.
    tokens: those of the issuer, None = there is none.
    """

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.config)
        self.gateway = gateway
        self.parser = Parser(self._served(), self.config)
        # A body that is being read takes many times its bytes.
        self._large = asyncio.Semaphore(_LARGE)
        self.stopping = asyncio.Event()  # the gateway is being stopped
        self.stored = StoredKeys(gateway.broker, self._fit)
        self.tokens = None if self.config.oidc.issuer is None else Tokens(self.config.oidc, self.digest)
        self._senders: dict[bytes, Sender] = {}  # by digest of their keys
        self._removed: dict[str, Sender] = {}  # by tenant: the first of its last keys in `[[keys]]`, since it has none
        self._ended: dict[str, Sender] = {}  # by tenant: its key that ended last
        self.classes: Mapping[str, Tier] = {}
        self.configured: dict[bytes, Key] = {}
        self.by_tenant: dict[str, list[Sender]] = {}  # with keys; tokens have the limits of the first key
        self.adopt(self.config, self.keys_of(self.config))
        gateway.paces.changed = self._fit
        gateway.fleet.changed = self._follow_fleet

    async def begin(self) -> None:
        """Read the keys of the queue's store, before the first request; errors as those of the store."""
        if self.config.server.stored_keys:
            await self.stored.refresh()

    @property
    def loops(self) -> list[tasks.Loop]:
        """Return what runs while the gateway serves."""
        stored = [self.stored.run] if self.config.server.stored_keys else []
        return stored if self.tokens is None else [*stored, self.tokens.run]

    @property
    def models(self) -> ServedModels:
        return self.parser.models

    def keys_of(self, new: Config) -> dict[bytes, Key]:
        """Return a configuration's keys by digest; errors as `revealed`, with the operator's key in force."""
        found = revealed(new.keys, lambda text: self.digest(text) == self._operator)
        return {self.digest(text): key for text, key in found.items()}

    def adopt(self, new: Config, configured: dict[bytes, Key]) -> None:
        """Adopt classes, keys (as of `keys_of`) and prices."""
        now, tenants = clock.now(), {key.tenant for key in configured.values()}
        gone = [key for key in self.configured.values() if key.tenant not in tenants]
        kept = {tenant: one for tenant, one in self._removed.items() if one.until > now - FORGET_S}
        self._removed = kept | {key.tenant: Sender(key, now) for key in reversed(gone)}
        self.configured = configured
        self.classes = new.classes
        self.config = replace(self.config, prices=new.prices)
        self._fit()

    def _follow_fleet(self) -> None:
        """Serve the models of the engines that stay."""
        self.parser.models = self._served()
        self._fit()

    def _served(self) -> ServedModels:
        stay = {id: one for id, one in self.gateway.dispatcher.engines.items() if one.leaving != "remove"}
        self.config = replace(self.config, engines=tuple(replace(one.config, id=id) for id, one in stay.items()))
        return ServedModels(self.config, stay.values(), self.gateway.counters)

    def _fit(self) -> None:
        """Take over the keys that are valid now, and let measured classes promise what the engines can do."""
        senders = {digest: Sender(key) for digest, key in self.configured.items()}
        for stored, key in self.stored.usable():
            senders[self._salted(stored.digest)] = Sender(key, math.inf if stored.expires is None else stored.expires)
        self._senders = senders
        self.by_tenant = {}
        for sender in senders.values():
            if sender.key is not None:
                self.by_tenant.setdefault(sender.key.tenant, []).append(sender)
        ended = ((tenant, Sender(key, end)) for tenant, (end, key) in self.stored.ended().items())
        self._ended = dict(sorted([*self._removed.items(), *ended], key=lambda one: one[1].until))  # the latest counts
        # Tokens keep the limits of their tenant's ended key, so its requests are counted.
        kept = (one for tenant, one in self._ended.items() if tenant not in self.by_tenant)
        keys = tuple(one.key for one in (*senders.values(), *kept) if one.key is not None)
        self.config = replace(self.config, keys=keys, classes=self.gateway.paces.fit(self.classes))
        self.parser.config = self.config
        self.gateway.adopt(self.config)

    def price_warnings(self) -> Iterator[str]:
        """Yield warnings: of prices without a model, and of stored keys with a budget by cost that lack prices."""
        prices = self.config.prices
        if line := unserved(prices, self.models.own):
            yield line
        models = sorted(set(self.models.engines) - set(prices))
        stored = self.stored.usable() if models else ()
        if ids := [one.id for one, key in stored if any(budget.cost is not None for budget in key.budgets)]:
            some = ", ".join(ids[:_SHOWN]) + (", ..." if len(ids) > _SHOWN else "")
            yield (
                f"stored keys with a budget by cost ({some}) cannot use {', '.join(models)}: "
                f"add [prices.{models[0]}], of 0 if it costs nothing"
            )

    @property
    def ready(self) -> bool:
        """Tell whether requests for every model can be answered, and their ends stored."""
        return self._every_model_is_up() and not any(self.storage().values())

    def storage(self) -> dict[str, int | str | None]:
        """Return what keeps requests or their ends from being stored; 0 or None: nothing does."""
        gateway = self.gateway
        return {
            "ends_not_stored": len(gateway.path.closings),
            "broker": gateway.broker.problem() or gateway.dispatcher.control.problem(),
            "batches": None if gateway.batches is None else gateway.batches.problem(),
        }

    def _every_model_is_up(self) -> bool:
        """Return whether there are models, and each has an engine that takes any work; those for overflow do not.

        A model that may have none (scale.MODEL.min = 0) gets one for its next request.
        """
        engines = self.gateway.dispatcher.engines.values()
        idle = {model for model, one in self.gateway.config.scale.items() if not one.min}
        up = {name for one in engines if one.serves and not one.config.overflow for name in one.models.names}
        return bool(self.models.engines) and up | idle >= set(self.models.engines)

    def tenant(self, request: Request) -> str:
        """Return the tenant of a request; errors as `key`."""
        return tenant_of(self.key(request))

    def key(self, request: Request) -> Key | None:
        """Return the key of a request, None if none are configured; 401 when none fits.

        Without keys, 403 and 415 for what a web page of another site could send; 403 for a token without a tenant.
        """
        if not self.config.closed:
            self._refuse_foreign_pages(request)
            return None
        if (sender := self._sender(request)) is None:
            raise request.scope.get(TOKEN_ERROR) or RequestError(
                "This server needs an API key that is valid.",
                "Send `Authorization: Bearer KEY` or `x-api-key: KEY`; the operator's key sends no requests.",
                status=401,
                code="invalid_api_key",
            )
        if sender.key is None:
            oidc = self.config.oidc
            names = " and ".join(map(repr, filter(None, (oidc.tenant_claim, oidc.classes_claim))))
            problem = f"The token lacks a tenant or classes (claims {names})."
            raise RequestError(problem, "Ask the issuer for it.", status=403, kind="permission_error", code="no_tenant")
        key = sender.key
        if sender.token and (limits := self.limits_of_tokens(key.tenant)) is not None:
            key = replace(limits, classes=key.classes or limits.classes, name=key.name)
        request.scope[TENANT], request.scope[ACTOR] = key.tenant, key.label  # for the logs
        return key

    def limits_of_tokens(self, tenant: str) -> Key | None:
        """Return a tenant's first valid key, else the one that ended last, at most 30 days ago; None = none is."""
        now, known = clock.now(), self.by_tenant.get(tenant, [])
        ended = [*known, self._ended[tenant]] if tenant in self._ended else known
        last = max(ended, key=lambda one: one.until, default=None)
        found = next((one for one in known if one.until > now), last)
        return None if found is None or found.until < now - FORGET_S else found.key

    def is_operator(self, request: Request) -> bool:
        """Return whether a request carries the operator's key, or an operator's token."""
        return super().is_operator(request) or self._token_operator(request) is not None

    def operator(self, request: Request) -> str:
        """Return the operator that sent a request, for logs: of a token, its subject."""
        return self._token_operator(request) or super().operator(request)

    def _token_operator(self, request: Request) -> str | None:
        sender = self._sender(request)
        return None if sender is None else sender.operator

    def _sender(self, request: Request) -> Sender | None:
        """Return the sender of a request; None for a key or token that is unknown or has ended."""
        digest = self._key_digest(request)
        if digest is None:
            return None
        sender = self._senders.get(digest)
        # Tokens are accepted in this header only.
        if sender is None and self.tokens and request.headers.get("authorization", "").lower().startswith("bearer "):
            sender = self.tokens.verified.get(digest)
        return sender if sender is not None and sender.until > clock.now() else None

    def count_request(self, request: Request) -> Key | None:
        """Return the key of a request that costs work, and count it in its minute; errors as `key`, and 429."""
        key = self.key(request)
        if key is not None:
            self.gateway.path.check_rate(key)
        return key

    def check_reader(self, request: Request) -> None:
        """Refuse what describes the server to those without a key, where keys are configured; 401."""
        if not self.is_operator(request):
            self.key(request)

    async def read(self, request: Request, held: Held, limit: int | None = None) -> bytes:
        """Read the body; 413 as soon as it is too long, whatever its declared length. limit: bytes, if not JSON's.

        415 when it is compressed, 429 when the bodies of all requests together are too long.
        """
        refuse_compressed(request)
        limit = self.config.server.max_body_kib * 1024 if limit is None else limit
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
            "Send less, or raise server.max_body_kib (server.max_audio_mib for speech).",
            status=413,
            code="body_too_large",
            headers={"connection": "close"},
        )

    async def json(self, request: Request, empty: bytes = b"") -> dict[str, Any]:
        """Read the JSON object of a request that is answered at once; errors as `read`.

        empty: stands for a body without bytes.
        """
        return await self.work(request, lambda data: read_json(data or empty))

    async def work(self, request: Request, work: Callable[[bytes], T]) -> T:
        """Return what is made of the body of a request that is answered at once; errors as `read`."""
        with self.gateway.bodies.hold() as held:
            held.tenant = request.scope.get(TENANT, "")
            data = await self.read(request, held)
            return await self._work(len(data), partial(work, data))

    async def _work(self, size: int, work: Callable[[], T]) -> T:
        """Return what is made of a body of so many bytes; few large ones at a time."""
        async with self._large if size > INLINE else nullcontext():
            return await offload(size, work)

    async def receive(self, api: Api, request: Request, held: Held) -> ParsedRequest:
        """Read, parse and admit an HTTP request, or refuse it before anything is stored."""
        arrival, key = clock.now(), self.key(request)
        if key is not None:
            held.tenant = key.tenant
            self.gateway.path.check_rate(key)
            self.gateway.path.check_room(key)
        data, headers = await self.read(request, held, api.most(self.config.server)), _headers(request)
        tenant, broker = tenant_of(key), self.gateway.broker if self.config.broker.keeps else None

        def parse(earlier: Job | None) -> ParsedRequest:
            raw = api.decode(data, headers)
            raw = raw if earlier is None else api.recalled(raw, earlier)
            parsed = self.parser.parse(api.kind, api.read(raw), headers, key, tenant=tenant, arrival=arrival)
            parsed = api.completed(parsed, raw, keeps=broker is not None)
            return with_key(parsed, headers, request.scope["path"], data)

        names = await self._work(len(data), lambda: api.names(api.decode(data, headers))) if api.goes_on(data) else {}
        if names:
            async with self._large:  # of what it goes on from, too
                earlier = await api.earlier(names, broker, tenant, self.config.server.max_body_kib * 1024)
                more = 0 if earlier is None else len(earlier.request) + len(earlier.result or b"")
                held.add(more)
                parsed = await offload(len(data) + more, partial(parse, earlier))
        else:
            parsed = await self._work(len(data), partial(parse, None))
        kept = 0 if parsed.kept is None else len(parsed.kept.content)
        held.resize(max(len(data), len(parsed.upstream.content)) + kept)
        via: Via | None = request.scope.get(VIA)
        if via is not None and not parsed.background:  # that is sent by the gateway itself
            parsed = replace(parsed, request=via.restricted(parsed.request))
        parsed = await self.gateway.path.admit(parsed, key)
        self._learn_prefix(parsed)
        return parsed

    def _learn_prefix(self, parsed: ParsedRequest) -> None:
        """Take note of a prompt of a run; the KV of an adapter is its own, and cannot be pinned."""
        prefixes, ids, request = self.gateway.prefixes, parsed.prompt_ids, parsed.request
        if prefixes is not None and ids is not None and request.adapter is None and parsed.kind not in POOLING:
            prefixes.learn(request, ids)


def tenant_of(key: Key | None) -> str:
    """Return the tenant of a key; None = without keys."""
    return "default" if key is None else key.tenant


def _headers(request: Request) -> dict[str, str]:
    """Return the headers of a request; where there are several of a name the first one counts.

    Some thirty names are looked up, for each of which Starlette would go through them all.
    """
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(request.headers.raw)}


def refuse_compressed(request: Request) -> None:
    """Refuse a compressed body, whose size is not known before it is unpacked: RequestError (415)."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise RequestError(
            f"The body is compressed ({coding[:40]!r}), which is not read here.",
            "Send it as it is, without Content-Encoding.",
            status=415,
            code="unsupported_encoding",
            headers={"accept-encoding": "identity"},
        )
