"""Bounds of what requests compute in a step, as a packer has decided."""

from __future__ import annotations

from typing import Any

from headway.types import Jobs


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
