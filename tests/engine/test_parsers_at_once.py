"""vLLM's parsers read an answer whose beginning comes at once as they read it token by token.

A stream that goes on at another engine comes so (`continuations.py`); where a parser reads it otherwise, the gateway
ends the stream (docs/operating.md).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from headway.models.resolve import resolve

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
HERMES = f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
CODER = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
THOUGHT = "I should look.\nYes, so.\n</think>\n\n"
# Parsers of tools and of reasoning, an answer, and after how many tokens at once it is read otherwise.
CASES: list[tuple[str | None, str | None, str, str]] = [
    ("hermes", None, HERMES, "never"),
    ("hermes", "qwen3", f"<think>{THOUGHT}{HERMES}", "never"),
    (None, "qwen3", f"<think>{THOUGHT}It is 42.", "never"),
    (None, "deepseek_r1", f"{THOUGHT}It is 42.", "never"),
    ("qwen3_coder", None, f"Ok.\n{CODER}", "never"),
    ("mistral", None, f"[TOOL_CALLS][{CALL}]", "never"),
    ("granite", None, f"<|tool_call|>[{CALL}]", "never"),
    ("pythonic", None, '[weather(city="Paris"), weather(city="Rome")]', "never"),
    ("kimi_k2", None, f"Ok{KIMI}", "never"),
    ("glm45", "glm45", f"<think>Hm.</think>Ok\n{GLM}", "never"),
    ("llama3_json", None, CALL.replace("arguments", "parameters"), "last"),
    ("deepseek_v3", None, f"Ok{DEEPSEEK}", "often"),
]
MARKS = (
    "<|python_tag|> <think> </think> <tool_call> </tool_call> <|tool_call|> [TOOL_CALLS] "
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|> "
    "<|tool_call_argument_begin|> <arg_key> </arg_key> <arg_value> </arg_value>"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """SmolLM2's, with what the models of these parsers have as tokens."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(resolve("smollm2"))
    found.add_tokens(MARKS.split())
    found.get_vocab = functools.cache(found.get_vocab)  # each parser asks for it, which takes longer than its reading
    return found


def read(tokenizer: Any, tool: str | None, reasoning: str | None, pieces: list[tuple[str, list[int]]]) -> Any:
    """Return what a parser makes of an answer in these pieces; each is a text with its tokens."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    names = {"tool_parser_name": tool, "reasoning_parser_name": reasoning}
    kind = ParserManager.get_parser(**names, enable_auto_tools=tool is not None, model_name="m")
    more = {"tools": TOOLS, "tool_choice": "auto"} if tool else {}
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], stream=True, **more)
    parser, calls = kind(tokenizer, request.tools), dict[int, dict[str, str]]()
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": calls}
    for place, (text, ids) in enumerate(pieces):
        end = place == len(pieces) - 1
        delta = parser.parse_delta(text, ids, request, [5, 6], finished=end)
        if delta is None:
            continue
        out["content"] += delta.content or ""
        out["reasoning"] += delta.reasoning or ""
        for one in delta.tool_calls or ():
            call = calls.setdefault(one.index, {"name": "", "arguments": ""})
            call["name"] += (one.function and one.function.name) or ""
            call["arguments"] += (one.function and one.function.arguments) or ""
    return out


@pytest.mark.parametrize(("tool", "reasoning", "text", "differs"), CASES, ids=str)
def test_what_comes_at_once_is_read_alike(
    tokenizer: Any, tool: str | None, reasoning: str | None, text: str, differs: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = [tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
    pieces = [(texts[i + 1][len(texts[i]) :], [id]) for i, id in enumerate(ids)]
    whole, other = read(tokenizer, tool, reasoning, pieces), list[int]()
    assert whole["calls"] or whole["reasoning"]
    for said in range(1, len(ids)):
        first = texts[said + 1], ids[: said + 1]
        if read(tokenizer, tool, reasoning, [first, *pieces[said + 1 :]]) != whole:
            other.append(said)
    expected = {"never": [], "last": [len(ids) - 1], "often": other or [0]}
    assert other == expected[differs]
