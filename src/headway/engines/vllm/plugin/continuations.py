"""Requests whose answer another engine began: they go on behind the tokens that were said there.

To vLLM such a request is as one that it has preempted: the tokens are output of the request, computed with its
prompt or found in the prefix cache. Its first output carries them, too, in front of the next token: vLLM's API
server then has the answer from its first token on, for its text, stop strings, parsers and usage.

The workers of vLLM's first model runner keep the output of a request themselves (`worker.py`); its second one
gets it with the request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from headway.engines.vllm.request_metadata import begin_anew, said_before
from headway.types import Jobs


class ContinuationsMixin:
    """Placed before a stock scheduler class."""

    requests: dict[str, Any]
    structured_output_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._said: dict[str, list[int]] = {}  # by the engine's id, until the first output has carried them

    def _take_up(self, request: Any) -> None:
        """Give a new request the output that it has already; what is no such output is ignored."""
        said = said_before(request.sampling_params)
        if not said:
            return
        if request.resumable or not self._are_output(request, said):
            begin_anew(request.sampling_params)
            return
        self._said[request.request_id] = said
        request.append_output_token_ids(said)
        request.prefill_stats = None  # vLLM takes all that a new request finds in the cache for its prompt

    def _are_output(self, request: Any, said: Any) -> bool:
        stock: Any = self
        vocabulary = stock.vllm_config.model_config.get_vocab_size()
        if not isinstance(said, list) or not all(type(id) is int and 0 <= id < vocabulary for id in said):
            return False
        return bool(len(said) < min(request.max_tokens, stock.max_model_len - request.num_prompt_tokens))

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Advance a grammar, once it is compiled, over what was said."""
        stock: Any = super()
        compiling = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ready = bool(stock._handle_blocked_waiting_request(request))
        if ready and compiling and (said := self._said.get(request.request_id)):
            self.structured_output_manager.accept_tokens(request, said)
        return ready

    def _prepend_said(self, outputs: dict[int, Any]) -> None:
        """Put what was said in front of the first output of each request."""
        for output in (output for of_client in outputs.values() for output in of_client.outputs):
            if output.new_token_ids and (said := self._said.pop(output.request_id, None)) is not None:
                output.new_token_ids = [*said, *output.new_token_ids]
                if output.new_logprobs is not None:
                    output.new_logprobs = _padded(output.new_logprobs, said)


def _padded(logprobs: LogprobsLists, said: list[int]) -> LogprobsLists:
    """Return log probabilities with rows for what was said, whose own the gateway's client has already."""
    ids = np.zeros((len(said), logprobs.logprob_token_ids.shape[1]), logprobs.logprob_token_ids.dtype)
    ids[:, 0] = said
    return LogprobsLists(
        np.concatenate([ids, logprobs.logprob_token_ids]),
        np.concatenate([np.zeros(ids.shape, logprobs.logprobs.dtype), logprobs.logprobs]),
        np.concatenate([np.ones(len(said), logprobs.sampled_token_ranks.dtype), logprobs.sampled_token_ranks]),
    )


class TokenCapsMixin:
    """Bounds what a request computes in this step, where vLLM's own code decides how many tokens it gets.

    Stock aligns chunks (Mamba blocks, images, drafters that look ahead) after it has bounded them by its budgets;
    a cap is one more bound, so it comes before each of these. Stock adds draft tokens to a request that has one
    token to compute, and pads new requests to the same number; a cap that admits all known tokens keeps the drafts.

    token_caps: most tokens per request id; a request that is not in it is not bounded.
    """

    scheduler_config: Any
    jobs: Jobs
    token_caps: dict[str, int]

    def _cap(self, caps: dict[str, int]) -> None:
        """Set the caps of this step; without any, stock's own code runs, which it does for every request."""
        self.token_caps = caps
        if caps:
            self.__dict__["_reserve_prefill_lookahead"] = self._capped_lookahead
        else:
            self.__dict__.pop("_reserve_prefill_lookahead", None)

    def _capped(self, request: Any, computed: int, tokens: int) -> int:
        cap = self.token_caps.get(request.request_id)
        if cap is None or tokens <= cap or not self.scheduler_config.enable_chunked_prefill:
            return tokens
        known = request.num_tokens + request.num_output_placeholders - computed
        if known <= cap:
            return tokens
        # Where less of its prefix is cached than the packer knew, it comes as far all the same.
        ahead = int(self.jobs.computed[self.jobs.row_of[request.request_id]]) - computed
        return min(cap + max(ahead, 0), tokens)

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, local: int = 0, external: int = 0) -> int:
        stock: Any = super()
        capped = self._capped(request, request.num_computed_tokens + local + external, num_new_tokens)
        tokens = int(stock._mamba_block_aligned_split(request, capped, local, external))
        if tokens or capped == num_new_tokens:
            return tokens
        self.token_caps.pop(request.request_id)  # no block ends within the cap, in this step or any later one
        return int(stock._mamba_block_aligned_split(request, num_new_tokens, local, external))

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        stock: Any = super()
        capped = self._capped(request, num_computed_tokens, num_new_tokens)
        inputs = stock._try_schedule_encoder_inputs(request, num_computed_tokens, capped, *args, **kwargs)
        whole = not self._cuts_input(request, num_computed_tokens, inputs[1])
        if (inputs[1] and whole) or capped == num_new_tokens:
            return inputs
        self.token_caps.pop(request.request_id)  # an input that must not be cut is longer than the cap
        return stock._try_schedule_encoder_inputs(request, num_computed_tokens, num_new_tokens, *args, **kwargs)

    def _cuts_input(self, request: Any, computed: int, tokens: int) -> bool:
        """Return whether a chunk ends within an input that must not be cut; stock 0.32 sees it only partly."""
        if not self.scheduler_config.disable_chunked_mm_input:
            return False
        places = (feature.mm_position for feature in request.mm_features)
        return any(place.offset < computed + tokens < place.offset + place.length for place in places)

    def _capped_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Replace `_reserve_prefill_lookahead`, the one place where stock asks how many tokens may run."""
        stock: Any = super()
        capped = self._capped(request, num_computed_tokens, num_new_tokens)
        return int(stock._reserve_prefill_lookahead(request, num_computed_tokens, capped))
