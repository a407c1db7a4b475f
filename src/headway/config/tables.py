"""The tables of a configuration that stand for themselves, from [backends.NAME] to [wire]."""

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
    """What serves units of applications outside the LLM, for `POST /v1/backends/NAME`.

    kind: "sandbox" executes Python code that clients send; "model" calls a model of your own; "module:Class"
        is a backend of your own (`headway.cluster.backends.port.Backend`).
    load: of a model: "module:function", which returns a callable; options: the function's arguments.
    isolation: of a sandbox: "namespaces" (own files and processes, no network; Linux), "process" (none: for
        code that you trust), or "docker" (a container of `image`, which has python3).
    imports: modules that a sandbox has imported before it gets code.
    env: names of environment variables that a sandbox is given; it has none of the gateway's otherwise.
    processes: workers at a time, started ahead ones included. waiting: units that may wait for one.
    keep_s: how long a model stays loaded after a unit.
    timeout_s: of one unit. output_kib: of its output. memory_mib: of all processes of a sandbox together, with
        "process" of each. disk_mib: of all files that it writes, with "process" of each.
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

    dir: the directory of the files and of their progress, which gateways that share the queue share, too;
        unset, beside the queue in sqlite, or within the one in PostgreSQL. "none", or a queue in memory =
        there are no batches.
    max_file_mib, max_lines: of one file. tenant_mib: of all files of a tenant.
    max_open: batches of a tenant that have not ended.
    lines: of a tenant's batches that wait for an engine or are in one at a time; unset, twice what the
        engines compute at a time (engines.max_running).
    """

    dir: Annotated[str, Field(min_length=1)] | None = None
    max_file_mib: Count = 200
    max_lines: Count = 50_000
    tenant_mib: Count = 4096
    max_open: Count = 100
    lines: Count | None = None


@dataclass(frozen=True, config=_STRICT)
class Grammars:
    """Limits of what one request's structured output may have: to compile it takes the engine's cores.

    max_kib: of schemas, regular expressions, grammars and choices, as JSON.
    max_depth: objects and arrays within each other in a schema.
    max_regex: characters of all regular expressions, with what they repeat written out: "[a-z]{3}" has 3.
    max_repeats: sum of the bounds of a schema, minLength, maxLength, minItems, maxItems and the like, and of a
        grammar's counted repetitions.
    """

    max_kib: Count = 64
    max_depth: Count = 64
    max_regex: Count = 1024
    max_repeats: Count = 10_000


@dataclass(frozen=True, config=_STRICT)
class Journal:
    """The journal: a row per request that ended, and the engines' iterations, without text of prompts.

    dir: its folder, which gateways on one machine may share; unset, beside the queue if that is on disk;
        "none" = no journal is kept.
    max_mib: of all its files; the oldest are deleted first. days: files older than this are deleted, too.
    """

    dir: Annotated[str, Field(min_length=1)] | None = None
    max_mib: Annotated[int, Field(ge=16)] = 256
    days: Positive = 14.0


@dataclass(frozen=True, config=_STRICT)
class Log:
    """What the gateway logs, to stderr.

    level: of the least important lines that are written.
    format: "text", or "json": one object per line.
    access: a line for every HTTP request but probes (/health, /ready, /metrics), when it has ended.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    access: bool = False


@dataclass(frozen=True, config=_STRICT)
class Tracing:
    """OpenTelemetry: a span for every request and each of its states, by OTLP over HTTP.

    endpoint: of a collector, such as "http://localhost:4318"; unset = no tracing.
    service: the name that the spans have there.
    sample: share of the requests without a parent that get one; of others the parent decides.
    """

    endpoint: str | None = None
    service: Annotated[str, Field(min_length=1)] = "headway"
    sample: Annotated[float, Field(ge=0, le=1, strict=False)] = 1.0


@dataclass(frozen=True, config=_STRICT)
class Postgres:
    """The postgres broker's own settings.

    url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE, or better where it is: "env:NAME" or "file:PATH". It
        may ask for TLS (?sslmode=verify-full); what it leaves out is taken from PGPASSWORD and the like.
    schema: of the database, for the queue alone; gateways that name the same one share it.
    timeout_s: that the server may take for a connection or a commit.
    """

    url: Secret | None = None
    schema: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,62}$")] = "headway"
    timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=False)] = 5.0


@dataclass(frozen=True, config=_STRICT)
class Up:
    """What `headway up` runs on a Ray cluster beside an agent for each of [[engines]].

    address: of the Ray cluster; "auto" = the one that this machine belongs to.
    gateways, controllers: how many. The ports of gateways are server.port and those after it.
    cpus, memory_gib: that each of these reserves on its node; agents have engines.resources.
    """

    address: Annotated[str, Field(min_length=1)] = "auto"
    gateways: Count = 2
    controllers: Count = 2
    cpus: Amount = 1.0
    memory_gib: Amount = 1.0


@dataclass(frozen=True, config=_STRICT)
class Wire:
    """The RabbitMQ over which gateways, controllers and agents find each other; `headway serve` needs none.

    url: amqp://USER:PASSWORD@HOST:PORT/VHOST, or amqps:// for TLS, or better where it is: "env:NAME" or
        "file:PATH"; those of several nodes of a cluster with commas between.
    name: of this Headway; several may share one RabbitMQ.
    lease_seconds: a gateway or an agent that was silent for this long is taken for gone.
    host: the address by which gateways reach the engines of an agent.
    """

    url: Secret | None = None
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] = "headway"
    lease_seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=False)] = 10.0
    host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
