"""Parsers of tool calls and reasoning: known by the model's name, unless the configuration says otherwise."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.config import Engine
from headway.engines.vllm.parsers import _KNOWN, Parsers, known_to_vllm, options, parsers
from headway.engines.vllm.process.answers import REPLACED_ERRORS
from headway.engines.vllm.process.launch import command


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("Qwen/Qwen3-8B", ("hermes", "qwen3")),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", ("qwen3_coder", None)),
        ("meta-llama/Llama-3.1-8B-Instruct", ("llama3_json", None)),
        ("deepseek-ai/DeepSeek-R1", ("deepseek_v3", "deepseek_r1")),
        ("openai/gpt-oss-20b", ("openai", "openai_gptoss")),
        ("smollm2", (None, None)),
    ],
)
def test_models_are_known_by_name(model: str, found: tuple[str | None, str | None]) -> None:
    assert parsers(Engine(model=model)) == Parsers(*found)


def test_what_is_configured_counts_more() -> None:
    qwen = Engine(model="Qwen/Qwen3-8B", tool_parser="none", reasoning_parser="deepseek_r1")
    assert parsers(qwen) == Parsers(None, "deepseek_r1")
    assert options(qwen) == ["--reasoning-parser", "deepseek_r1"]


def test_what_is_in_args_counts_most_and_is_not_said_twice() -> None:
    said = Engine(model="Qwen/Qwen3-8B", args=("--tool-call-parser=pythonic", "--reasoning-parser", "step3"))
    assert parsers(said) == Parsers("pythonic", "step3")
    assert options(said) == []


def test_vllm_is_told() -> None:
    line = command(Engine(tool_parser="hermes"), 8001, "headway")
    assert line[line.index("--tool-call-parser") + 1] == "hermes"
    assert "--enable-auto-tool-choice" in line
    assert "--enable-auto-tool-choice" not in command(Engine(), 8001, "headway")


def test_vllm_has_all_of_them() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tools, reasoning = ToolParserManager.list_registered(), ReasoningParserManager.list_registered()
    assert {one.tool for one in _KNOWN.values()} - {None} <= set(tools)
    assert {one.reasoning for one in _KNOWN.values()} - {None} <= set(reasoning)
    assert known_to_vllm("tool") == set(tools)
    assert known_to_vllm("reasoning") == set(reasoning)
    documented = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in tools if f"`{name}`" not in documented] == []


def test_vllm_says_what_is_told_in_our_words() -> None:
    folder = Path(find_spec("vllm").origin).parent  # type: ignore[union-attr, arg-type]
    said = [(folder / name).read_text() for name in ("multimodal/registry.py", "renderers/online_renderer.py")]
    assert all(any(words.decode() in text for text in said) for words in REPLACED_ERRORS)
