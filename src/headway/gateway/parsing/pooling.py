"""Requests for pooling models: embeddings, scores, reranking, classification.

For the queue each is a prompt whose answer is one token, which is never made. Its texts are read here; all
else goes to the engine as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from headway.errors import RequestError
from headway.gateway.parsing.fields import texts_in

PoolingKind = Literal["embeddings", "pooling", "classify", "score", "rerank"]
PATHS: dict[PoolingKind, str] = {
    "embeddings": "/v1/embeddings",
    "pooling": "/pooling",
    "classify": "/classify",
    "score": "/v1/score",
    "rerank": "/v1/rerank",
}
ENDPOINTS: dict[str, PoolingKind] = {path: kind for kind, path in PATHS.items()} | {
    "/score": "score",
    "/rerank": "rerank",
    "/v2/rerank": "rerank",
}
# The fields with texts, by kind; of synonyms the first one present is read.
_INPUTS: dict[PoolingKind, tuple[tuple[str, ...], ...]] = {
    "embeddings": (("input", "messages"),),
    "pooling": (("input", "messages"),),
    "classify": (("input", "messages"),),
    "score": (("queries", "text_1", "data_1"), ("documents", "items", "text_2", "data_2")),
    "rerank": (("query",), ("documents",)),
}
FIELDS = {name for fields in _INPUTS.values() for names in fields for name in names}  # messages of chats, too
_NOT_HERE = ("stream", "background")
_JSON = ("float", "base64")  # encodings that leave the answer JSON


def as_completion(kind: PoolingKind, raw: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return the body of a completion of one token over the same texts; RequestError for a bad one.

    most: elements of a list.
    """
    _check(kind, raw)
    prompt, read = list[Any](), set[str]()
    for names in _INPUTS[kind]:
        name = next((one for one in names if raw.get(one) is not None), None)
        if name is None:
            raise RequestError(f"{names[0]} is missing.", "Send a text or a list of texts.", param=names[0])
        prompt += _texts(name, raw[name], most)
        read.add(name)
    rest = {name: value for name, value in raw.items() if name not in read}
    return rest | {"prompt": prompt, "max_tokens": 1}


def _check(kind: PoolingKind, raw: Mapping[str, Any]) -> None:
    for name in _NOT_HERE:
        if raw.get(name):
            raise RequestError(
                f"{PATHS[kind]} cannot be asked with {name}.",
                f"Leave out {name}.",
                param=name,
                code="unsupported_value",
            )
    encoding = raw.get("encoding_format")
    if encoding is not None and encoding not in _JSON:
        raise RequestError(
            f"The encoding_format {str(encoding)[:40]!r} is not served here.",
            f"Use one of {', '.join(_JSON)}.",
            param="encoding_format",
            code="unsupported_value",
        )


def _texts(name: str, value: Any, most: int) -> list[Any]:
    """Return the texts of a field, or its lists of token ids."""
    if isinstance(value, list) and len(value) > most:
        raise RequestError(
            f"{name} has {len(value)} elements.", f"Send at most {most}.", param=name, code="too_many_values"
        )
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return value
        if all(isinstance(one, list) for one in value):
            return [_chat(one) if any(isinstance(part, dict) for part in one) else one for one in value]
        if all(type(one) in (int, float) for one in value):
            return [value]
        if all(isinstance(one, str | dict) for one in value):
            return [_chat(value)] if name == "messages" else list(map(_content, value))
    if isinstance(value, dict):
        return [_content(value)]
    raise RequestError(
        f"{name} is not a text, a list of texts, or a list of token ids.", "Send one of these.", param=name
    )


def _chat(messages: list[Any]) -> str:
    """Return the text of a conversation."""
    return "\n".join(_content(one) for one in messages if isinstance(one, str | dict))


def _content(value: str | dict[str, Any]) -> str:
    """Return the text of a message, or of the parts of a document; images count as nothing."""
    content = value if isinstance(value, str) else value.get("content", value.get("text"))
    return "\n".join(texts_in(content))
