"""An answer that goes on behind any of its tokens is the one that was never interrupted (float32)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.engines.vllm.fatal_fields import WORKER_EXTENSION
from tests.engine.conftest import Engine, prompts, started
from tests.engine.every_feature import write_adapter

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
TOKENS = 40
PROMPT = prompts(1, seed=8)[0]


@pytest.fixture(scope="module")
def caching(few_layers: str) -> Iterator[Engine]:
    """An engine that finds in its prefix cache what another request has computed, and has adapters."""
    more = {"enable_prefix_caching": True, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    yield from started(few_layers, worker_extension_cls=WORKER_EXTENSION, **more)


def answers(engine: Engine, *saids: list[int], adapter: Any = None, **params: Any) -> list[Any]:
    """Return the answers behind what was said, all computed at once. adapter: a `LoRARequest`."""
    from vllm import SamplingParams

    options = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False} | params
    for i, said in enumerate(saids):
        extra = {"headway_id": f"a{i}"} | ({"headway_said": said} if said else {})
        request = SamplingParams(**options, extra_args=extra)
        engine.llm.llm_engine.add_request(f"a{i}", {"prompt_token_ids": PROMPT}, request, lora_request=adapter)
    done = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        done |= {out.request_id: out.outputs[0] for out in engine.llm.llm_engine.step() if out.finished}
    assert not engine.scheduler._said
    assert not len(engine.scheduler.jobs)
    return [done[f"a{i}"] for i in range(len(saids))]


def check_each_prefix(engine: Engine, places: range = range(1, TOKENS), **params: Any) -> list[int]:
    """Compare the answers behind each of these prefixes with the whole one; return its tokens."""
    (whole,) = answers(engine, [], **params)
    tokens = list(whole.token_ids)
    for place, one in zip(places, answers(engine, *(tokens[:place] for place in places), **params), strict=True):
        assert list(one.token_ids) == tokens, place
        assert one.finish_reason == whole.finish_reason
    return tokens


def test_greedy_tokens_are_the_same_behind_each_token(engine: Engine) -> None:
    tokens = check_each_prefix(engine)
    assert len(set(tokens)) > 3


def test_what_was_said_is_found_in_the_prefix_cache(caching: Engine) -> None:
    tokens = check_each_prefix(caching, range(1, TOKENS, 6))
    free = caching.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    (again,) = answers(caching, tokens[:-1])  # of which all whole blocks are cached
    assert list(again.token_ids) == tokens
    assert caching.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_an_adapter_s_answer_goes_on(caching: Engine, few_layers: str, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    write_adapter(tmp_path, few_layers, seed=1, spread=0.2)
    tokens = check_each_prefix(caching, range(1, TOKENS, 6), adapter=LoRARequest("a", 1, str(tmp_path)))
    assert tokens != list(answers(caching, [])[0].token_ids)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9, "top_k": 50},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"min_tokens": 30, "ignore_eos": False},
    ],
    ids=str,
)
def test_what_depends_on_the_output_so_far_goes_on(engine: Engine, params: dict[str, Any]) -> None:
    check_each_prefix(engine, range(1, TOKENS, 4), **params)


def test_log_probabilities_are_those_of_the_tokens(engine: Engine) -> None:
    (whole,) = answers(engine, [], logprobs=2)
    tokens = list(whole.token_ids)
    (again,) = answers(engine, tokens[:17], logprobs=2)
    assert list(again.token_ids) == tokens
    assert len(again.logprobs) == TOKENS
    for place in range(17, TOKENS):
        assert again.logprobs[place].keys() == whole.logprobs[place].keys()
        for id, one in whole.logprobs[place].items():
            assert again.logprobs[place][id].logprob == pytest.approx(one.logprob, abs=1e-4)


def test_a_stop_token_and_a_limit_end_it_where_they_did(engine: Engine) -> None:
    tokens = list(answers(engine, [])[0].token_ids)
    stop = next(id for place, id in enumerate(tokens) if place > 10 and id not in tokens[:place])
    end = tokens.index(stop) + 1
    for said in (tokens[:3], tokens[: end - 1]):
        (one,) = answers(engine, said, stop_token_ids=[stop])
        assert (list(one.token_ids), one.finish_reason, one.stop_reason) == (tokens[:end], "stop", stop)
    (one,) = answers(engine, tokens[:19], max_tokens=20)
    assert (list(one.token_ids), one.finish_reason) == (tokens[:20], "length")


def test_a_grammar_has_read_what_was_said(engine: Engine) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    for grammar in ({"regex": "(ab|ba){3}[0-9]{12}"}, {"json": {"type": "array", "items": {"enum": [17, 170, 71]}}}):
        structured = StructuredOutputsParams(**grammar)
        params = {"structured_outputs": structured, "ignore_eos": False, "max_tokens": 20}
        tokens = list(answers(engine, [], **params)[0].token_ids)
        check_each_prefix(engine, range(1, len(tokens)), **params)


@pytest.mark.parametrize("said", [["a"], "text", [10**6], [-1], [True], list(range(TOKENS)), [1] * 5000], ids=repr)
def test_what_is_no_output_is_ignored(engine: Engine, said: Any) -> None:
    whole, odd = answers(engine, [], said)
    assert odd.token_ids == whole.token_ids


def test_the_table_has_it_as_an_answer_that_has_begun(engine: Engine) -> None:
    from vllm import SamplingParams

    tokens = list(answers(engine, [])[0].token_ids)
    extra = {"headway_id": "a", "headway_said": tokens[:20], "headway_first": 7.0, "headway_arrival": 5.0}
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False, extra_args=extra)
    engine.llm.llm_engine.add_request("a", {"prompt_token_ids": PROMPT}, params)
    (name,) = engine.scheduler.jobs.names(engine.scheduler.jobs.rows())
    row = engine.scheduler.jobs.row_of[name]
    jobs = engine.scheduler.jobs
    assert (jobs.first[row], jobs.output_tokens[row], jobs.prompt[row]) == (7.0, 20, len(PROMPT))
    engine.llm.llm_engine.abort_request(["a"])
    assert not engine.scheduler._said
