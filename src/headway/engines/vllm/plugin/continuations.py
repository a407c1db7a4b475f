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
