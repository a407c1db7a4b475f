"""Carries the metadata of requests to pooling models from a header into the engine core."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from headway.engines.vllm.request_metadata import HEADER, from_header

_NAME = HEADER.encode()
_METADATA: ContextVar[dict[str, Any] | None] = ContextVar("headway_metadata", default=None)


class MetadataHeader:
    """ASGI middleware that notes the metadata of a request; it is seen by all that the request calls."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        text = next((value for name, value in scope.get("headers", ()) if name == _NAME), None)
        token = _METADATA.set(None if text is None else from_header(text.decode("latin-1")))
        try:
            await self._app(scope, receive, send)
        finally:
            _METADATA.reset(token)


def carry_metadata(engine_client: Any) -> None:
    """Let the engine client put the metadata of each request into its pooling parameters.

    vLLM's API has no `vllm_xargs` for pooling models, so the gateway sends it in a header. In the API server
    `MetadataHeader` notes it for the time of the request; the parameters travel to the engine core.
    """
    encode: Callable[..., Any] = engine_client.encode

    def encode_with_metadata(*args: Any, **kwargs: Any) -> Any:
        metadata = _METADATA.get()
        params = kwargs.get("pooling_params")
        if metadata and params is not None:
            params.extra_kwargs = {**(params.extra_kwargs or {}), **metadata}
        return encode(*args, **kwargs)

    engine_client.encode = encode_with_metadata
