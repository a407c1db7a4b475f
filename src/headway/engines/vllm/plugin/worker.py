"""What Headway adds to vLLM's workers (`--worker-extension-cls`).

It loads models, mends seeds, and lets answers go on that another engine began (`continuations.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm import __version__
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_input_batch import InputBatch

from headway.engines.vllm.fatal_fields import fatal_fields
from headway.engines.vllm.request_metadata import said_before


def preserve_seeds(sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model runner's `sample_tokens` that draws what is thrown away without its request's seed.

    Of a chunk that does not end its prompt, vLLM draws a token, too, and throws it away. It then sets the
    request's generator back by `set_offset`, which generators of CPUs do not have: the worker dies. Here such
    a draw leaves the generator as it is, so that tokens do not depend on how a prompt is cut.
    """

    @wraps(sample_tokens)
    def sample(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        generators = batch.generators  # by row; the sampler has the same dictionary
        thrown_away = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        kept = {row: generators.pop(row) for row in thrown_away if row in generators}
        try:
            return sample_tokens(runner, *args, **kwargs)
        finally:
            generators.update(kept)

    return sample


def take_up(add_request: Callable[..., Any]) -> Callable[..., Any]:
    """Return a batch's `add_request` that gives a new request the output which another engine has made of it.

    vLLM's first model runner has no such requests: of what it has preempted, it has kept the output.
    """

    @wraps(add_request)
    def add(batch: Any, request: Any) -> Any:
        if not request.output_token_ids and (said := said_before(request.sampling_params)):
            request.output_token_ids.extend(said)
            if request.generator is not None:
                draw(request.generator, len(said), batch.vocab_size)
        return add_request(batch, request)

    return add


def draw(generator: torch.Generator, tokens: int, vocabulary: int) -> None:
    """Advance a request's generator by the draws of so many tokens.

    On a CPU vLLM's sampler draws one number for a token, elsewhere one for each entry of the vocabulary.
    """
    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (tokens,), generator=generator, dtype=torch.long)
        return
    noise = torch.empty(vocabulary, dtype=torch.float32, device=generator.device)
    for _ in range(tokens):
        noise.exponential_(generator=generator)


InputBatch.add_request = take_up(InputBatch.add_request)

# vLLM imports this module in each worker, before it makes the model runner.
if "seed" in fatal_fields(__version__, current_platform.device_type, ["bare workers"]):
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner.sample_tokens = preserve_seeds(CPUModelRunner.sample_tokens)


class WorkerExtension:
    """Methods that vLLM adds to its worker class; they are called by `collective_rpc`."""

    # The worker's attributes used here.
    reload_weights: Any
    model_runner: Any

    def headway_load(self, path: str) -> None:
        """Load the weights of a model directory in place, everything that is made of them included.

        vLLM 0.32 makes kernel weights anew for each module whose own weights were in the checkpoint. A module
        whose weights are tied to another's (`lm_head` to `embed_tokens`) has none there: its packed copy,
        where the platform has one (CPUs), would stay that of the model before.
        """
        self.reload_weights(weights_path=path)
        owners: dict[int, Any] = {}
        for module in self.model_runner.get_model().modules():
            for weight in module.parameters(recurse=False):
                tied = weight.numel() and owners.setdefault(weight.data_ptr(), module) is not module
                if tied and hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
