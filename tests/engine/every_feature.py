"""Answer requests that use vLLM's features with real engines; print their tokens by recipe as JSON.

`python -m tests.engine.every_feature FOLDER MODEL RECIPE ...`, with RECIPE `stock` for vLLM's own scheduler; FOLDER
is for adapters. A process that has had one engine cannot have another like it, so each recipe has a fork of one that
has imported vLLM.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.conftest import ENV

# The n-gram drafter's numba threads and torch's would spin on one core: an iteration takes 20 times as long.
os.environ.update(ENV | {"NUMBA_NUM_THREADS": "1"})
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COMMON = "You are a careful assistant. " * 34  # what the prompts of one phase begin with


def main(folder: Path, model: str, recipe: str) -> dict[str, Any]:
    """Return the answers of an engine by phase."""
    llm = start(recipe, model)
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    seen = watch(scheduler)
    out: dict[str, Any] = {}
    for phase in (repetitions, constrained, adapters, shared_prefixes):
        before = seen["drafts"]
        for name, request in phase(llm, folder).items():
            engine.add_request(name, *request)
        out[phase.__name__] = answers(engine) | {"drafts": seen["drafts"] - before}
    if recipe != "stock":
        out["pinned"] = pinned(llm, scheduler)
    out["free"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return out | {"steps": seen["steps"]}


def start(recipe: str, model: str) -> Any:
    from vllm import LLM

    from headway.engines.vllm.plugin.hook import HeadwayScheduler

    options = {"headway": {"recipe": recipe, "max_running": 4}}  # so that its batches are not stock's
    hook: dict[str, Any] = {"scheduler_cls": HeadwayScheduler, "additional_config": options}
    return LLM(
        model,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=256,
        async_scheduling=False,
        scheduling_policy="priority",
        # A model of few layers would fill its answers with white space.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        enable_lora=True,
        max_loras=1,
        max_lora_rank=8,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
        **({} if recipe == "stock" else hook),
    )


def pinned(llm: Any, scheduler: Any) -> list[int]:
    """Pin the prefix of the last phase and give it back; return its full blocks and those held and free."""
    tokens = llm.get_tokenizer().encode(COMMON)
    answer = scheduler.control({"op": "pin", "chain": "common", "tokens": tokens})
    scheduler.control({"op": "unpin", "chain": "common"})
    return [len(tokens) // 32, answer["pinned"] // 32, answer["blocks_free"]]


def watch(scheduler: Any) -> dict[str, int]:
    """Count steps, and the draft tokens that the scheduler sends to be verified."""
    seen, schedule = {"steps": 0, "drafts": 0}, scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        seen["steps"] += bool(output.num_scheduled_tokens)
        seen["drafts"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return output

    scheduler.schedule = watched
    return seen


def answers(engine: Any) -> dict[str, Any]:
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for one in engine.step():
            if one.finished:
                done[one.request_id] = {"tokens": list(one.outputs[0].token_ids), "text": one.outputs[0].text}
    return done


# ---- what they ask


def params(tokens: int, name: str = "", **more: Any) -> Any:
    from vllm import SamplingParams

    promise = {"headway_ttft": 0.5, "headway_tpot": 0.05} if name.endswith(("1", "4")) else {}
    return SamplingParams(temperature=0, max_tokens=tokens, extra_args={"headway_id": name, **promise}, **more)


def repetitions(llm: Any, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Prompts whose answers repeat what stands in them."""
    asks = {}
    for i in range(6):
        text = f"Repeat: one two three four five {i}. " * (3 + 2 * i)
        asks[f"n{i}"] = ({"prompt": text}, params(32, f"n{i}", ignore_eos=True))
    return asks


def constrained(llm: Any, folder: Path) -> dict[str, tuple[Any, ...]]:
    """JSON by a schema, and calls of a tool, as the OpenAI server asks the engine for them."""
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.tool_parsers.utils import get_json_schema_from_tools

    calls = get_json_schema_from_tools("required", tools())
    asks = {}
    for i, (name, schema) in enumerate([("s0", SCHEMA), ("t1", calls), ("s2", SCHEMA), ("t3", calls)]):
        text = f"Answer in JSON. Question {i}: who is there, and what is the weather?"
        prompt = llm.get_tokenizer().apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        asks[name] = ({"prompt": prompt}, params(80, name, structured_outputs=StructuredOutputsParams(json=schema)))
    return asks


def tools() -> list[Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    return [ChatCompletionToolsParam.model_validate(TOOL)]


def adapters(llm: Any, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Requests of two adapters and none, of which one adapter fits in at a time."""
    from vllm.lora.request import LoRARequest

    asks = {}
    for i in range(6):
        lora = LoRARequest("ab"[i % 2], 1 + i % 2, str(folder / "ab"[i % 2])) if i % 3 else None
        asks[f"l{i}"] = ({"prompt": f"The capital of country {i} is"}, params(12, f"l{i}", ignore_eos=True), None, lora)
    return asks


def shared_prefixes(llm: Any, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Prompts with a prefix of some 200 tokens in common, and with priorities; KV runs out."""
    asks = {}
    for i in range(8):
        text = COMMON + f"Item {i}: " + "word " * (60 * (i % 3))
        asks[f"p{i}"] = ({"prompt": text}, params(24, f"p{i}", ignore_eos=True), None, None, None, (5 * i) % 3)
    return asks


def write_adapter(path: Path, model: str, seed: int, spread: float = 0.03) -> None:
    """Write a random LoRA adapter of the test model. spread: of its weights."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((Path(model) / "config.json").read_text())
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for part, size in (("lora_A", (8, width)), ("lora_B", (width, 8))):
            weights[f"{name}.{part}.weight"] = torch.tensor(rng.normal(0, spread, size), dtype=torch.float32)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    import vllm.entrypoints.llm  # noqa: F401  once for all

    adapters_in, path, *recipes = sys.argv[1:]
    for seed, name in enumerate("ab"):
        write_adapter(Path(adapters_in) / name, path, seed)
    with ProcessPoolExecutor(len(recipes), multiprocessing.get_context("fork")) as pool:
        found = pool.map(partial(main, Path(adapters_in), path), recipes)
        print(json.dumps(dict(zip(recipes, found, strict=True))))
