"""The tables of a configuration other than [[engines]], [[keys]] and [classes], from [backends.NAME] to [wire]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headway.addresses import is_secure_url, netloc
from headway.config.keys import Secret
from headway.errors import ConfigError

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_STRICT)
class Backend:
    """A backend that executes the units of applications outside the LLM, for `POST /v1/backends/NAME`.

    kind: "sandbox" executes Python code that clients send; "model" calls your model; "module:Class" is your
        implementation of `headway.cluster.backends.port.Backend`.
    load: "module:function", which loads the model and returns a callable; options: the function's arguments.
    isolation: isolation of a sandbox: "namespaces" (own files and processes, no network; Linux), "process" (none:
        for code that you trust), or "docker" (a container of `image`, which has python3).
    imports: modules that a sandbox imports before it gets code.
    env: names of the gateway's environment variables that a sandbox inherits; unset, none.
    processes: limit of workers, including those started ahead. waiting: limit of units that wait for a worker.
    keep_s: time for which a model stays loaded after a unit.
    timeout_s: limit of one unit. output_kib: limit of a unit's output. memory_mib: limit of all processes of a sandbox
        together, with "process" of each. disk_mib: limit of all files of a sandbox, with "process" of each.
    """

    kind: Annotated[str, Field(pattern=r"^(sandbox|model|[\w.]+:\w+)$")]
    load: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    isolation: Literal["namespaces", "process", "docker"] = "namespaces"
    image: Annotated[str, Field(pattern=r"^[\w.][\w./:@-]*$")] = "python:3.12-slim"
    imports: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    processes: Count = 4
    waiting: Count = 64
    start_timeout_s: Positive = 60.0
    timeout_s: Positive = 30.0
    keep_s: Positive = 300.0
    memory_mib: Count = 1024
    disk_mib: Count = 64
    output_kib: Count = 256


@dataclass(frozen=True, config=_STRICT)
class Batches:
    """Files of requests that are answered within hours (`/v1/files`, `/v1/batches`).

    dir: the directory of the files and their progress; gateways that share the queue share it, too. Unset, beside
        the queue in sqlite, or in PostgreSQL with the queue. "none", or a queue in memory = no batches.
    max_file_mib, max_lines: limit of one file. tenant_mib: limit of all files of a tenant.
    max_open: limit of a tenant's batches that have not ended.
    lines: limit of a tenant's batch requests that wait for an engine or are in one; unset, twice the engines'
        batch limits (engines.max_running).
    """

    dir: Annotated[str, Field(min_length=1)] | None = None
    max_file_mib: Count = 200
    max_lines: Count = 50_000
    tenant_mib: Count = 4096
    max_open: Count = 100
    lines: Count | None = None


@dataclass(frozen=True, config=_STRICT)
class Grammars:
    """Limits of one request's structured output, because compiling it occupies the engine's cores.

    max_kib: size of schemas, regular expressions, grammars and choices, as JSON.
    max_depth: nesting depth of objects and arrays in a schema.
    max_regex: characters of all regular expressions, with repetitions written out: "[a-z]{3}" has 3.
    max_repeats: sum of a schema's bounds (minLength, maxLength, minItems, maxItems and the like) and of a grammar's
        counted repetitions.
    """

    max_kib: Count = 64
    max_depth: Count = 64
    max_regex: Count = 1024
    max_repeats: Count = 10_000


@dataclass(frozen=True, config=_STRICT)
class Journal:
    """The journal: a row per request that ended, and the engines' iterations, without text of prompts.

    dir: directory of its files, which gateways on one machine may share; unset, beside the queue if that is on disk;
        "none" = no journal is kept.
    max_mib: limit of all its files; the oldest are deleted first. days: age at which files are deleted.
    """

    dir: Annotated[str, Field(min_length=1)] | None = None
    max_mib: Annotated[int, Field(ge=16)] = 256
    days: Positive = 14.0


@dataclass(frozen=True, config=_STRICT)
class Price:
    """What a model or an adapter costs, [prices.MODEL], in units of any currency for a million tokens.

    prompt: price of tokens of prompts. cached: price of those that were in the engine's prefix cache; unset, as the
        others. answer: price of tokens of answers.
    """

    prompt: Amount
    answer: Amount
    cached: Amount | None = None

    def units(self, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """Return the price of a request's tokens; cached_tokens: of its prompt."""
        cached = self.prompt if self.cached is None else self.cached
        prompt = (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * cached
        return (prompt + output_tokens * self.answer) / 1e6


@dataclass(frozen=True, config=_STRICT)
class Audit:
    """The audit log: a line of JSON for each act of an operator and each refused key, without text of prompts.

    path: file to which lines are appended; unset = no audit log is kept.
    """

    path: Annotated[str, Field(min_length=1)] | None = None


@dataclass(frozen=True, config=_STRICT)
class Picker:
    """The endpoint picker: names an engine for each request that comes through Envoy, for a Kubernetes InferencePool.

    port: gRPC port at server.host, with TLS if server.tls has a certificate; unset = off.
    max_streams: limit of open requests, waiting or being answered; further ones get a 429.
    """

    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    max_streams: Count = 4096


@dataclass(frozen=True, config=_STRICT)
class Log:
    """The gateway's log, on stderr.

    level: level of the least important lines that are written.
    format: "text", or "json" for one object per line.
    access: log every HTTP request when it has ended, except probes (/health, /ready, /metrics).
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    access: bool = False


@dataclass(frozen=True, config=_STRICT)
class Scale:
    """Bounds of the number of engines of one model, [scale.MODEL], that follows its promises (docs/scale.md).

    min, max: engines; with min = 0 the last one stops while nothing comes. share: share of the promises to keep;
        unset, what the model's classes promise (classes.CLASS.share, or 0.99) on average over its requests.
    start_s: time of an engine's start, until one has been seen. starts_engines: `headway serve` starts and stops the
        engines of this machine by it, `headway up` agents, with copies of the model's first engine.
    command: program and arguments to run instead whenever another number is wanted, by `headway serve` or the
        controller that leads. In each argument {model} and {wanted} are replaced.
    """

    max: Count
    min: Annotated[int, Field(ge=0)] = 1
    share: Annotated[float, Field(gt=0, lt=1, strict=False)] | None = None
    start_s: Positive = 60.0
    starts_engines: bool = False
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None


@dataclass(frozen=True, config=_STRICT)
class Tracing:
    """OpenTelemetry: a span for every request and each of its states, by OTLP over HTTP.

    endpoint: address of a collector, such as "http://localhost:4318"; unset = no tracing.
    service: service name of the spans.
    sample: share of the requests without a parent span that are traced; a parent decides for the others.
    """

    endpoint: str | None = None
    service: Annotated[str, Field(min_length=1)] = "headway"
    sample: Annotated[float, Field(ge=0, le=1, strict=False)] = 1.0


@dataclass(frozen=True, config=_STRICT)
class Postgres:
    """Settings of the postgres broker.

    url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE, or better "env:NAME" or "file:PATH". It may ask for TLS
        (?sslmode=verify-full); missing parts are taken from PGPASSWORD and the like.
    schema: database schema for the queue alone; gateways that name the same schema share the queue.
    timeout_s: limit for a connection or a commit.
    """

    url: Secret | None = None
    schema: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,62}$")] = "headway"
    timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=False)] = 5.0


@dataclass(frozen=True, config=_STRICT)
class Tls:
    """TLS of the gateway's port. The files are read again within seconds after they change.

    cert: PEM file of the certificate and its chain; unset, plain HTTP. key: PEM file of its private key.
    """

    cert: Annotated[str, Field(min_length=1)] | None = None
    key: Annotated[str, Field(min_length=1)] | None = None


@dataclass(frozen=True, config=_STRICT)
class Up:
    """The processes of `headway up` on a Ray cluster, besides an agent for each of [[engines]].

    address: address of the Ray cluster; "auto" = the cluster of this machine.
    gateways, controllers: number of processes. Gateways use the ports from server.port on.
    cpus, memory_gib: resources that each of these reserves on its node; agents reserve engines.resources.
    """

    address: Annotated[str, Field(min_length=1)] = "auto"
    gateways: Count = 2
    controllers: Count = 2
    cpus: Amount = 1.0
    memory_gib: Amount = 1.0


@dataclass(frozen=True, config=_STRICT)
class Wire:
    """The RabbitMQ over which gateways, controllers and agents find each other; `headway serve` needs none.

    url: amqp://USER:PASSWORD@HOST:PORT/VHOST, or amqps:// for TLS, or better "env:NAME" or "file:PATH"; separate
        the nodes of a cluster with commas.
    name: name of this Headway; several may share one RabbitMQ.
    lease_seconds: silence after which a gateway or an agent counts as gone.
    host: address at which gateways reach an agent's engines.
    """

    url: Secret | None = None
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] = "headway"
    lease_seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=False)] = 10.0
    host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"


Share = Annotated[float, Field(gt=0, le=1, strict=False)]
Port = Annotated[int, Field(ge=1, le=65535)]


@dataclass(frozen=True, config=_STRICT)
class Server:
    """The gateway. Sizes are checked before memory is spent on a request.

    operator_key: key for /headway/control, /v1/headway/engines and /v1/headway/keys; unset, these are off, unless
        [oidc] has operators. operator_only: only operators see /metrics, the dashboard and the details of /ready, also
        on controllers and agents; unset, true if there are keys or tokens.
    stored_keys: accept the API keys that `headway key` makes, which are kept in the queue's store; clients then need a
        key or a token, even if there is none yet.
    hosts: without keys, Host names to accept besides addresses and local names; ".a.org" = all subdomains of a.org.
    cors_origins: origins of web pages whose scripts may use the API ("https://app.example"); "*" = of any, where
        clients need a key.
    media_domains: hosts whose images, audio and video engines may fetch by URL, over http and https: "images.example"
        at ports 80 and 443, "images.example:8080" at that port; others are refused, and data: URLs always accepted.
    max_queued_mib: limit of bodies being uploaded or waiting for an engine, and of streams' bodies of up to 32 KiB
        until they end; background requests wait on disk.
    max_attempts: times that a request is sent to an engine, if it loses the engine before its answer begins; after the
        last it fails with status 500, or with 503 if only the connection was lost.
    head_timeout_s: limit for a request's headers, from the connection's opening, and for a TLS handshake before it.
    body_timeout_s: limit for a body.
    write_timeout_s: limit for a client that stops reading its answer. idle_timeout_s: limit between two requests.
    keepalive_s: interval of the comments that keep proxies from closing a silent stream; 0 = none.
    max_connections: limit of client connections; unset, from the limit of open files, at most 16,384. Connections
        without a request in progress are closed to make room for new ones.
    drain_s: time for requests in progress when the gateway, or an agent with its engines, stops; "streams" = until
        the last one has ended.
    reuse_port: share the port (SO_REUSEPORT), so that a new gateway takes over before this one stops.
    tenant_share: with keys of several tenants: share that one tenant may take of the room that the others leave
        in the queue (max_queued and max_queued_mib) and among a backend's workers. class_share: share of its
        tenant's part of the queue that one class may take.
    Secrets, here and in keys and engines, are written out, or given as "env:NAME" or "file:PATH".
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    max_body_kib: Count = 1024
    max_header_kib: Count = 32
    max_queued: Count = 1000
    max_queued_mib: Count = 256
    max_answer_mib: Count = 16  # limit of an answer that is not streamed; all large ones together get four times it
    tenant_share: Share = 0.5
    class_share: Share = 0.75
    operator_key: Secret | None = None
    operator_only: bool | None = None
    max_attempts: Count = 2
    max_resumes: Annotated[int, Field(ge=0)] = 3  # times that a stream whose engine is lost goes on; 0 = it ends
    head_timeout_s: Positive = 10.0
    body_timeout_s: Positive = 60.0
    write_timeout_s: Positive = 60.0
    idle_timeout_s: Count = 30
    keepalive_s: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)] = 30.0
    max_connections: Count | None = None
    drain_s: Annotated[int, Field(ge=0)] | Literal["streams"] = 5
    reuse_port: bool = False
    hosts: tuple[str, ...] = ()
    stored_keys: bool = False
    tls: Tls = field(default_factory=Tls)
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")], ...] = ()
    max_audio_mib: Count = 25  # limit of an uploaded speech form; vLLM itself refuses files above 25 MB
    media_domains: tuple[Annotated[str, Field(pattern=r"^[a-zA-Z0-9.-]+(:[1-9][0-9]{0,4})?$")], ...] = ()

    @property
    def url(self) -> str:
        """Return the URL of the gateway, with the address on which it listens."""
        return f"http{'s' * (self.tls.cert is not None)}://{netloc(self.host, self.port)}"


_Name = Annotated[str, Field(min_length=1)]
# Signatures with a private key only: with a shared secret (HS256) the issuer's public key could sign.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Oidc:
    """Signed tokens (JWT) of one OpenID Connect issuer, accepted as `Authorization: Bearer TOKEN` beside keys.

    issuer: URL of the issuer, exactly as in the claim `iss`; unset, no tokens are accepted.
    audience: accepted values of the claim `aud`, at least one; a token needs one of them.
    jwks_url: URL of the issuer's public keys; unset, from ISSUER/.well-known/openid-configuration.
    algorithms: accepted signature algorithms.
    leeway_s: difference of clocks to allow for in `exp`, `nbf` and `iat`.
    refresh_s: time between two looks at the issuer's public keys. A token signed with an unknown key causes another
        look, once in 10 s at most. While the issuer does not answer, the keys that are known stay in use.
    tenant_claim: claim that names the tenant. In these names a dot leads into an object: "realm_access.roles".
    classes_claim: claim that lists the classes a token may use, as a list or separated by spaces; unset = all.
    admin_claim, admin_value: claim with this value, or with a list that has it, which makes its bearer an operator;
        unset, no token does.
    """

    issuer: _Name | None = None
    audience: tuple[_Name, ...] = ()
    jwks_url: _Name | None = None
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = ("RS256", "ES256", "EdDSA")
    leeway_s: Amount = 30.0
    refresh_s: Positive = 300.0
    tenant_claim: _Name = "tenant"
    classes_claim: _Name | None = None
    admin_claim: _Name | None = None
    admin_value: _Name = "headway-admin"


def oidc_contradictions(oidc: Oidc, where: str) -> Iterator[ConfigError]:
    """Find settings of an issuer that would accept tokens of others."""
    if oidc.issuer is None:
        return
    if not oidc.audience:
        problem = f"oidc.issuer in {where} is set, but not oidc.audience, so tokens for other services would do."
        fix = "Name the audience that the issuer puts into tokens for this gateway."
        yield ConfigError(problem, fix, param="oidc.audience")
    for name in ("issuer", "jwks_url"):
        url = getattr(oidc, name)
        if url is not None and not is_secure_url(url):
            problem = f"oidc.{name} in {where} is {url!r}, whose answers could be forged on the way."
            yield ConfigError(problem, "Use an https:// URL (http:// only on this machine).", param=f"oidc.{name}")
