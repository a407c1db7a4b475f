"""What the servers of engines offer besides OpenAI's API: the only place that says what an engine cannot do."""

from __future__ import annotations

from typing import NamedTuple

from headway.config.engines import Kind


class EngineApi(NamedTuple):
    """What Headway may ask of an engine's server; it sends nothing that the server cannot do.

    health: path that answers 200 while the server works. pause_s: seconds between two such questions.
    vllm: it has vLLM's routes and fields: /metrics and /version; `vllm_xargs`, with Headway's metadata for its
        scheduler, and `priority`; adapters. If Headway's scheduler is inside (it says so itself), also ranks, pauses
        and evictions, progress, pins, and reports of its prefix cache and its latency.
    """

    health: str
    pause_s: float
    vllm: bool


APIS: dict[Kind, EngineApi] = {
    "vllm": EngineApi("/health", 1.0, vllm=True),
    "openai": EngineApi("/v1/models", 15.0, vllm=False),  # not oftener: others count and limit such questions
}
