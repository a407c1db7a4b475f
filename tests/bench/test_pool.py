"""Is the small pool small, and big enough to start with?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engines.vllm.process.launch import block_size, command
from headway.errors import ConfigError
from headway.types import Slo
from headway.whatif.load import mix
from headway.whatif.load.records import Record
from headway.whatif.measured import compare, systems
from headway.whatif.measured.systems import standard_engine
from tests.bench.fake import fake, serving

ENGINE = standard_engine("smollm2", max_running=16, blocks=None, host_kv_gib=1.0)
SHORT = mix.Mix("short", (mix.TrafficTier("a", max_tokens=100, prompt_tokens=(200, 200)),))


@given(st.integers(1, 4096), st.sampled_from([16, 32, 128]))
def test_enough_for_one_request_is_enough(length: int, size: int) -> None:
    engine = replace(ENGINE, max_model_len=length, args=("--block-size", str(size)))
    fewest = compare.fewest_blocks(engine)
    assert (fewest - 2) * size < length <= (fewest - 1) * size, "one block is vLLM's own"
    compare.check_blocks(replace(engine, blocks=fewest))
    compare.check_blocks(engine)
    if fewest > 1:
        with pytest.raises(ConfigError, match=f"hold one request of {length}") as error:
            compare.check_blocks(replace(engine, blocks=fewest - 1))
        assert str(fewest) in error.value.hint


@pytest.mark.parametrize("words", [("--block-size", "32"), ("--block-size=32",), ("-x", "--block-size", "32")])
def test_a_block_is_what_the_command_line_says(words: tuple[str, ...]) -> None:
    assert block_size(replace(ENGINE, args=words)) == 32
    assert block_size(replace(ENGINE, args=("--block-size",))) == block_size(ENGINE) >= 16


async def test_a_third_of_a_full_batch() -> None:
    """300 tokens and the template are 10 to 11 blocks of 32; a third of 64 such requests."""
    engine = replace(ENGINE, max_running=64, max_model_len=1024, args=("--block-size", "32"))
    blocks = (await compare.tight(engine, SHORT, 0)).blocks
    assert 64 * 10 / 3 <= blocks <= 64 * 12 / 3
    assert await compare.tight(engine, SHORT, 0) == await compare.tight(engine, SHORT, 0)


async def test_it_never_is_too_small_to_start() -> None:
    engine = await compare.tight(replace(ENGINE, max_running=1), SHORT, 0)
    assert engine.blocks == compare.fewest_blocks(engine)


def test_stock_vllm_is_counted_and_has_no_host_pool() -> None:
    line = command(replace(ENGINE, blocks=20), 1, None, "priority")
    assert line[line.index("--num-gpu-blocks-override") + 1] == "20"
    assert line[line.index("--scheduler-cls") + 1].endswith("scheduler_stats.scheduler")
    assert "--kv-transfer-config" not in line


def test_only_those_that_swap_have_a_host_pool() -> None:
    assert systems._usable("vllm-v0-swap", ENGINE).host_kv_gib == 1.0
    assert systems._usable("slack", ENGINE).host_kv_gib == 0.0


async def test_stock_vllm_says_itself_what_it_counted_and_a_gateway_on_its_page() -> None:
    async with serving(fake(counters={"recomputed": 5.0})) as url:
        assert await systems.counted("vllm-fcfs", url) == {"preemptions": 7.0, "recomputed": 5.0}
        assert await systems.counted("slack", url) == {"preemptions": 7.0}


def test_rounds_add_up() -> None:
    outcome = compare.CompareOutcome({"a": ([], {})}, 1.0, None, ENGINE)
    for counters in ({"preemptions": 2.0, "loans": 1.0}, {"preemptions": 3.0}):
        compare._append(outcome, "a", [ended(at=1.0, last=5.0)], counters)
    records, counted = outcome.results["a"]
    assert counted == {"preemptions": 5.0}, "what one round did not know is not known of both"
    assert [(record.at, record.last) for record in records] == [(1.0, 5.0), (5.0, 9.0)]


def ended(at: float, last: float) -> Record:
    return Record("a", at, at, last, last, 1, 2, np.empty(0, np.float32), 200, None, Slo())


def test_what_cannot_be_served_is_refused_before_anything_starts() -> None:
    systems.check(("vllm-fcfs", "slack", "vllm-v0-swap"), ENGINE)
    with pytest.raises(ConfigError, match="swaps KV"):
        systems.check(("vllm-v0-swap",), replace(ENGINE, host_kv_gib=0.0))
    with pytest.raises(ConfigError, match="no recipe"):
        systems.check(("vllm-fcfs", "slacks"), ENGINE)
