"""The FAKE engine's answers for pooling models: vLLM's format, meaningless numbers."""

from __future__ import annotations

from typing import Any

_USAGE = {"prompt_tokens": 11, "total_tokens": 11, "completion_tokens": 0}


def pooled_answer(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a pooling request; None for any other path."""
    kind = path.rsplit("/", 1)[-1]
    frame = {"id": "fake", "object": "list", "created": 0, "model": body.get("model"), "usage": _USAGE}
    if kind == "rerank":
        return frame | {"results": [_ranked(i, text) for i, text in enumerate(body["documents"])]}
    if kind == "score":
        documents = body.get("documents", body.get("text_2"))
        count = len(documents) if isinstance(documents, list) else 1
        return frame | {"data": [{"index": i, "object": "score", "score": 0.5} for i in range(count)]}
    if kind in ("embeddings", "pooling", "classify"):
        texts = body.get("input")
        several = isinstance(texts, list) and not isinstance(texts[0], int)
        count = len(texts) if several and texts is not None else 1
        return frame | {"data": [_embedded(i) for i in range(count)]}
    return None


def _embedded(index: int) -> dict[str, Any]:
    return {"index": index, "object": "embedding", "embedding": [0.5, -0.25, 0.125, 1e-3]}


def _ranked(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "document": {"text": text}, "relevance_score": 0.5}
