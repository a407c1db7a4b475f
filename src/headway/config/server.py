"""The gateway's settings in the configuration."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headway.addresses import netloc
from headway.config.keys import Secret
from headway.config.tables import Count, Positive, Tls

_STRICT = ConfigDict(extra="forbid", strict=True)
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
    media_domains: hosts whose images, audio and video engines may fetch by URL ("images.example"), over http and
        https; others are refused, and data: URLs always accepted.
    max_queued_mib: limit of bodies being uploaded or waiting for an engine, and of streams' bodies of up to 32 KiB
        until they end; background requests wait on disk.
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
    max_attempts: Count = 2  # attempts at a request whose engine dies before it answers
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
    media_domains: tuple[Annotated[str, Field(pattern=r"^[a-zA-Z0-9.-]+$")], ...] = ()

    @property
    def url(self) -> str:
        """Return the URL of the gateway, with the address on which it listens."""
        return f"http{'s' * (self.tls.cert is not None)}://{netloc(self.host, self.port)}"
