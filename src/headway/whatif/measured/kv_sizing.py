"""KV sizing for `bench compare --tight`: blocks for a third of what a full batch of the mix holds.

A batch needs the prompts of the mix, counted with the model's own tokenizer, and max_tokens of each request.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway.config import Engine
from headway.engines.vllm.process.launch import block_size
from headway.errors import ConfigError
from headway.gateway.parsing.requests import ChatBody
from headway.gateway.parsing.tokens import TokenCounter
from headway.whatif.load import mix
from headway.whatif.load.records import Call

SHARE = 1 / 3  # of the KV that `max_running` requests hold at their maximum length
_SAMPLE = 512  # requests of the mix
_NULL = 1  # vLLM's null block


def least(engine: Engine) -> int:
    """Return the fewest blocks that vLLM starts with: one request of max_model_len, and the null block."""
    return -(-engine.context_limit // block_size(engine)) + _NULL


def check(engine: Engine) -> None:
    """Raise ConfigError when the configured blocks cannot hold one request of max_model_len."""
    if engine.blocks is not None and engine.blocks < least(engine):
        raise ConfigError(
            f"{engine.blocks} KV blocks of {block_size(engine)} tokens, one of them vLLM's own, cannot hold "
            f"one request of {engine.context_limit} tokens.",
            f"Give {least(engine)} or more.",
            param="engines.blocks",
        )


async def tight(engine: Engine, load: mix.Mix, seed: int) -> Engine:
    """Return the engine with KV for `SHARE` of a full batch of this mix, and at least for one request.

    Raises ConfigError when the model has no tokenizer or the mix no prompts.
    """
    counter = await TokenCounter.load(engine.model)
    rng = np.random.default_rng([seed, 3000])
    calls = mix.calls(load, np.zeros(_SAMPLE), rng, warn=lambda _: None)
    held = [-(-_tokens(counter, call, engine) // block_size(engine)) for call in calls]
    wanted = round(SHARE * engine.batch_limit * float(np.mean(held))) + _NULL
    return replace(engine, blocks=max(wanted, least(engine)))


def _tokens(counter: TokenCounter, call: Call, engine: Engine) -> int:
    messages = [{"role": "user", "content": call.prompt}]
    body = ChatBody.model_validate({"model": engine.name, "messages": messages})
    return counter.read(body, engine.context_limit).tokens + call.max_tokens
