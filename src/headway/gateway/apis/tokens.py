"""`POST /tokenize` and `/detokenize`, as vLLM's, by the gateway's own tokenizer."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from headway.errors import RequestError
from headway.gateway.apis.api import body_docs, error_docs
from headway.gateway.apis.state import AppState
from headway.gateway.parsing.requests import Kind, read_json

_MOST_IDS = 1_000_000
_TEXT: dict[str, Any] = {"model": {"type": "string"}, "prompt": {"type": "string"}}
_TOKENIZE = {
    "type": "object",
    "properties": {
        **_TEXT,
        "messages": {"type": "array", "items": {"type": "object"}},
        "return_token_strs": {"type": "boolean"},
    },
}
_DETOKENIZE = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"model": _TEXT["model"], "tokens": {"type": "array", "items": {"type": "integer"}}},
}


_ERRORS = error_docs(400, 401, 404, 413, 415, 429)


def add_token_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints."""

    @app.post("/tokenize", responses=_ERRORS, openapi_extra=body_docs(_TOKENIZE))
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a prompt, or of the messages of a chat."""
        state.count_request(request)
        return await state.work(request, partial(_tokens, state))

    @app.post("/detokenize", responses=_ERRORS, openapi_extra=body_docs(_DETOKENIZE))
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        state.count_request(request)
        return await state.work(request, partial(_text, state))


def _tokens(state: AppState, data: bytes) -> Response:
    """Return the answer with the tokens of a prompt, as the vocabulary writes them, too, if that was asked for."""
    body = read_json(data)
    kind: Kind = "chat" if "messages" in body else "completions"
    prompt = state.parser.prompt(kind, body)
    served, ids = state.models.find(body.get("model")), prompt.ids
    if ids is None:
        raise RequestError(
            "Only the engine knows the tokens of such a prompt.", "Send one text, or messages of text.", param="prompt"
        )
    answer = {"count": prompt.tokens, "max_model_len": served.context, "tokens": list(ids)}
    return JSONResponse(answer | ({"token_strs": served.counter.words(ids)} if body.get("return_token_strs") else {}))


def _text(state: AppState, data: bytes) -> Response:
    """Return the answer with the text of tokens."""
    body = read_json(data)
    ids, counter = body.get("tokens"), state.models.find(body.get("model")).counter
    if not isinstance(ids, list) or len(ids) > _MOST_IDS or not all(type(one) is int for one in ids):
        raise RequestError(
            "tokens is not a list of token ids.", f"Send a list of up to {_MOST_IDS:,} integers.", param="tokens"
        )
    return JSONResponse({"prompt": counter.text(ids)})
