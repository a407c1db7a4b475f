"""`/v1/audio/transcriptions` and `/v1/audio/translations`: speech, queued and scheduled as all else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.config import Server
from headway.gateway.apis.api import SCHEDULED, Api, header_docs
from headway.gateway.parsing.media import PATHS, AudioForm, AudioKind
from headway.gateway.parsing.requests import ParsedRequest

_FILE = {"type": "string", "format": "binary"}
_TEXT = {"type": "string"}
_FORM = {
    "type": "object",
    "required": ["file", "model"],
    "properties": {
        "file": _FILE,
        "model": _TEXT,
        "prompt": _TEXT,
        "language": _TEXT,
        "response_format": {"enum": ["json", "verbose_json"]},
        "temperature": {"type": "number"},
        "stream": {"type": "boolean"},
        "service_tier": _TEXT,
    },
}


class AudioApi(Api):
    """OpenAI's API of speech, which vLLM serves, too: the form goes to the engine with its fields as they came."""

    def most(self, server: Server) -> int:
        return server.max_audio_mib * 2**20

    def decode(self, data: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
        return {"form": AudioForm.read(data, headers.get("content-type", ""))}

    def read(self, raw: dict[str, Any]) -> dict[str, Any]:
        form: AudioForm = raw["form"]
        return form.chat_fields()

    def completed(self, parsed: ParsedRequest, raw: dict[str, Any], *, keeps: bool) -> ParsedRequest:
        form, request = raw["form"], replace(parsed.request, vllm_only=True)
        upstream = form.for_engine(request.adapter or request.model)
        return replace(parsed, request=request, upstream=upstream, text=None, keys=b"", prompt_ids=None)


def audio_apis() -> dict[str, Api]:
    """Return the APIs by path."""
    return {path: AudioApi(kind, _docs(kind)) for kind, path in PATHS.items()}


def _docs(kind: AudioKind) -> dict[str, Any]:
    return {
        "name": kind,
        "description": "Write down speech." if kind == "transcriptions" else "Write down speech in English.",
        "responses": {200: {"description": "The text; with `stream`, its events."}, **SCHEDULED},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}},
            "parameters": header_docs(),
        },
    }
