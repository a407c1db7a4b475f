"""`Idempotency-Key`: a background request or a batch that is sent again is the one that was accepted first.

Its id is made of its tenant and its key. The queue takes an id once, so it decides between two that come at
the same time, at whichever gateways. A digest of path and body is stored with the job, so that a key that
comes with another request is refused. It is free again once the job is deleted or forgotten
(`broker.keep_hours`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

from headway.errors import RequestError
from headway.gateway.parsing.requests import ParsedRequest
from headway.store.queue.port import Job

HEADER = "idempotency-key"
_LONGEST = 255  # characters of a key
_FIELD = "body_digest"  # in the job's request, beside the core's view


def with_key(parsed: ParsedRequest, headers: Mapping[str, str], path: str, data: bytes) -> ParsedRequest:
    """Return a background request under the id of its key; others, and one without a key, unchanged.

    path, data: as the client sent them. RequestError (400) for a key that is empty or too long.
    """
    if not parsed.background or (key := _key(parsed.request.tenant, headers)) is None:
        return parsed
    id = f"hw-{key[:20]}"
    digest = sha256(path.encode() + b"\0" + data).hexdigest()[:32]
    return replace(parsed, request=replace(parsed.request, id=id), digest=digest)


def batch_id(tenant: str, headers: Mapping[str, str]) -> str | None:
    """Return the id of a batch that comes with a key, None without one; raises as `with_key` does."""
    key = _key(tenant, headers)
    return None if key is None else f"batch_{key[:24]}"


def with_digest(request: str, digest: str | None) -> str:
    """Return the JSON object of a job's request with the digest of its path and body."""
    return request if digest is None else f'{request[:-1]},"{_FIELD}":"{digest}"}}'


def check_same(job: Job, digest: str | None) -> None:
    """Refuse a key that has come with another request (422)."""
    if json.loads(job.request).get(_FIELD) != digest:
        raise reused()


def reused() -> RequestError:
    """Return the error (422) of a key that has come with another request."""
    return RequestError(
        "This idempotency key was used for another request.",
        "Send each request under a key of its own, and again only as it was.",
        status=422,
        param=HEADER,
        code="idempotency_key_reused",
    )


def _key(tenant: str, headers: Mapping[str, str]) -> str | None:
    """Return the digest of a tenant's key, None without one; 400 when it is empty or too long."""
    key = headers.get(HEADER)
    if key is None:
        return None
    if not 0 < len(key) <= _LONGEST:
        raise RequestError(
            f"The idempotency key has {len(key)} characters.", f"Send 1 to {_LONGEST}, such as a UUID.", param=HEADER
        )
    return sha256(f"{tenant}\0{key}".encode()).hexdigest()
