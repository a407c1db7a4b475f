"""The fields that any server with OpenAI's API reads; a request with others must be answered by a vLLM."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from headway.engines.vllm.request_metadata import client_xargs

# Of /v1/chat/completions and /v1/completions, from OpenAI's reference. `logit_bias` is left out: its token ids are
# those of one tokenizer. `priority` decides nothing about an answer, and is taken out (`EngineBody.fitted`).
_FIELDS = frozenset(
    (
        *("model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "echo", "suffix", "stop", "seed"),
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty"),
        *("logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "verbosity", "user", "metadata", "store", "prompt_cache_key", "safety_identifier"),
        *("modalities", "prediction", "priority"),
    )
)


def needs_vllm(raw: Mapping[str, Any], own: Container[str]) -> bool:
    """Tell whether the body of a chat or completion has fields that only vLLM reads, or token ids as its prompt.

    own: fields that the gateway reads itself and sends to no engine.
    """
    if client_xargs(raw.get("vllm_xargs") or {}):
        return True
    others = (name for name, value in raw.items() if value is not None and name not in _FIELDS and name not in own)
    if any(name != "vllm_xargs" for name in others):
        return True
    prompt = raw.get("prompt")
    return isinstance(prompt, list) and not all(isinstance(one, str) for one in prompt)
