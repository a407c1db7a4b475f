"""Which of vLLM's parsers read what a model writes: calls of tools, and reasoning before an answer."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from headway.config import Engine
from headway.errors import RequestError


class Parsers(NamedTuple):
    """Names of vLLM's parsers, None = the model does not do that."""

    tool: str | None
    reasoning: str | None


# The first name that fits a model's counts (vLLM's documentation: tool calling, reasoning outputs).
_KNOWN = {
    r"qwen3-?coder": Parsers("qwen3_coder", None),
    r"qwen-?3": Parsers("hermes", "qwen3"),
    r"qwen-?2\.5|hermes": Parsers("hermes", None),
    r"deepseek-r1": Parsers("deepseek_v3", "deepseek_r1"),
    r"deepseek-v3": Parsers("deepseek_v3", None),
    r"gpt-oss": Parsers("openai", "openai_gptoss"),
    r"glm-4\.5": Parsers("glm45", "glm45"),
    r"kimi-k2": Parsers("kimi_k2", None),
    r"llama-3": Parsers("llama3_json", None),
    r"mistral|mixtral|devstral": Parsers("mistral", None),
    r"granite-3": Parsers("granite", None),
}
Kind = Literal["tool", "reasoning"]
# Where vLLM lists its parsers: a package and a table in it.
_TABLES: dict[Kind, tuple[str, str]] = {
    "tool": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
_TOOL, _REASONING = "--tool-call-parser", "--reasoning-parser"


def parsers(engine: Engine) -> Parsers:
    """Return the parsers of an engine: from `args`, else as configured, else what its model is known for."""
    known = next((found for name, found in _KNOWN.items() if re.search(name, engine.model.lower())), None)
    known = known or Parsers(None, None)
    return Parsers(
        _of(engine.tool_parser, _in_args(engine, _TOOL), known.tool),
        _of(engine.reasoning_parser, _in_args(engine, _REASONING), known.reasoning),
    )


def no_tool_parser() -> RequestError:
    """Return the error of a request with tools to an engine without a parser of their calls."""
    return RequestError(
        "This model cannot call tools here: its engine has no tool_parser.",
        'Set tool_parser in [[engines]], such as "hermes" (of a vLLM at a url, its --tool-call-parser), '
        'or send "tool_choice": "none".',
        param="tools",
        code="tools_unsupported",
    )


def options(engine: Engine) -> list[str]:
    """Return the options of `vllm serve` for the parsers that `args` does not name already."""
    names, line = parsers(engine), list[str]()
    if names.tool is not None and _in_args(engine, _TOOL) is None:
        line += ["--enable-auto-tool-choice", _TOOL, names.tool]
    if names.reasoning is not None and _in_args(engine, _REASONING) is None:
        line += [_REASONING, names.reasoning]
    return line


@cache
def known_to_vllm(kind: Kind) -> frozenset[str] | None:
    """Return the names of vLLM's parsers, None = it has no such list here.

    They are read from its source: to import vLLM takes ten seconds.
    """
    package, table = _TABLES[kind]
    vllm = find_spec("vllm")
    for folder in (vllm and vllm.submodule_search_locations) or ():
        file = Path(folder) / package / "__init__.py"
        for line in ast.parse(file.read_text()).body if file.is_file() else ():
            match line:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == table:
                    return frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))
    return None


def _of(configured: str | None, in_args: str | None, known: str | None) -> str | None:
    name = in_args or configured or known
    return None if name == "none" else name


def _in_args(engine: Engine, option: str) -> str | None:
    for word, following in pairwise((*engine.args, "")):
        name, _, value = word.partition("=")
        if name == option:
            return value or following
    return None
