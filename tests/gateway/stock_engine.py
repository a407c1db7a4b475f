"""A FAKE engine that tells of itself what stock vLLM 0.32 does: it has no scheduler of Headway's.

It was started with --max-model-len 1024 --max-num-seqs 8.
"""

from __future__ import annotations

from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from testing.fake_engine import FakeEngine, main

SEQUENCES, CONTEXT, BLOCK, BLOCKS = 8, 1024, 128, 182
_PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="smollm2"}} {running:.1f}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="smollm2"}} {waiting:.1f}
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{{engine="0",model_name="smollm2",reason="capacity"}} {waiting:.1f}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="smollm2",reason="deferred"}} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="smollm2"}} 0.25
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block}",engine="0",kv_cache_size_tokens="{tokens}",\
mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="{blocks}"}} 1.0
"""


class StockEngine(FakeEngine):
    """Its requests beyond the batch wait, as far as it tells."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._told(scope["path"])
        await (super().__call__(scope, receive, send) if answer is None else answer(scope, receive, send))

    def _told(self, path: str) -> Response | None:
        match path:
            case "/v1/models":
                card = {"id": "smollm2", "object": "model", "parent": None, "max_model_len": CONTEXT}
                return JSONResponse({"object": "list", "data": [card]})
            case "/metrics":
                running = min(self.open, SEQUENCES)
                return PlainTextResponse(
                    _PAGE.format(
                        running=running, waiting=self.open - running, block=BLOCK, blocks=BLOCKS, tokens=BLOCK * BLOCKS
                    )
                )
            case "/version":
                return JSONResponse({"version": "0.32.0"})
            case "/headway/control":
                return JSONResponse({"detail": "Not Found"}, 404)
        return None


if __name__ == "__main__":
    main(StockEngine)
