"""The smaller tables of a configuration, from [backends.NAME] to [wire]."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headway.config.keys import Secret

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
