"""A KV connector for tests that pretends to load some prompts' KV asynchronously; it copies nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput

CONFIG = {
    "kv_connector": "SlowLoads",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


class SlowLoads(KVConnectorBase_V1):
    """The scheduler's side of the connector; a request names the tokens to load: kv_transfer_params = {"load": n}.

    There is no worker's side; its methods raise.

    unsure: ids for which the number of tokens is not known yet.
    lost: ids whose load has failed.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = int(vllm_config.cache_config.block_size)
        self.unsure: set[str] = set()
        self.lost: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self.unsure:
            return None, False
        if request.request_id in self.lost:
            return 0, False
        there = min((request.kv_transfer_params or {}).get("load", 0), request.num_tokens - 1)
        tokens = there // self._block_size * self._block_size - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing: there is no KV to copy."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.lost |= connector_output.failed_recving

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def reset_cache(self) -> bool:
        return True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError
