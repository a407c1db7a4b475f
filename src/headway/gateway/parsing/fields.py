"""Checks of what clients send, with errors that name the field and what it must be."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from reprlib import Repr
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from headway.engines.vllm.request_metadata import client_xargs
from headway.errors import RequestError

# The fields that any server with OpenAI's API reads; a request with others must be answered by a vLLM.
# Of /v1/chat/completions and /v1/completions, from OpenAI's reference. `logit_bias` is left out: its token ids are
# those of one tokenizer. `priority` decides nothing about an answer, and is taken out (`EngineBody.fitted`).
_FIELDS = frozenset(
    (
        *("model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "echo", "suffix", "stop", "seed"),
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty"),
        *("logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "verbosity", "user", "metadata", "store", "prompt_cache_key", "safety_identifier"),
        *("modalities", "prediction", "priority"),
    )
)


def needs_vllm(raw: Mapping[str, Any], own: Container[str]) -> bool:
    """Tell whether the body of a chat or completion has fields that only vLLM reads, or token ids as its prompt.

    own: fields that the gateway reads itself and sends to no engine.
    """
    if client_xargs(raw.get("vllm_xargs") or {}):
        return True
    others = (name for name, value in raw.items() if value is not None and name not in _FIELDS and name not in own)
    if any(name != "vllm_xargs" for name in others):
        return True
    prompt = raw.get("prompt")
    return isinstance(prompt, list) and not all(isinstance(one, str) for one in prompt)


# Fields that no engine here supports, so that they are refused. vLLM ignores fields that it does not know. That is
# right for those that change no answer (docs/clients.md lists them), but not for those that a client relies on.
Fields = Mapping[str, str]  # by name, what to do instead
_TEXT = "Answers are texts: leave it out."
_MODERATE = "Leave it out, and moderate texts in your program."
_CONVERSATION = "A line of a batch goes on from no other response; send the earlier items in input."

CHAT: Fields = {
    "functions": "Send tools instead.",
    "function_call": "Send tool_choice instead.",
    "audio": _TEXT,
    "web_search_options": "Send a tool of type function that searches.",
    "moderation": _MODERATE,
}
RESPONSES: Fields = {
    "previous_response_id": _CONVERSATION,
    "conversation": _CONVERSATION,
    "prompt": "Headway keeps no prompt templates; send instructions and input.",
    "max_tool_calls": "Leave it out: tools are called by your program, which can count their calls.",
    "moderation": _MODERATE,
    "previous_input_messages": "Send the earlier messages in input.",
    "enable_response_messages": "Leave it out: the response has its items in output.",
}
MESSAGES: Fields = {
    "container": "Leave it out: code is executed by your program.",
    "mcp_servers": "Leave it out, and describe their tools by an input_schema.",
    "thread": "Leave it out, and send the earlier messages.",
    "compaction": "Leave it out, and ask for a summary in a message.",
}


COMPLETIONS: Fields = {"prompt_embeds": "Their tokens cannot be counted; send a prompt."}


def refuse(raw: Mapping[str, Any], fields: Fields) -> None:
    """Raise RequestError for a body that has one of these fields."""
    for name, hint in fields.items():
        if raw.get(name):
            raise refusal(name, hint)


def refusal(name: str, hint: str) -> RequestError:
    """Return the error of an unsupported field."""
    return RequestError(f"{name} cannot be used here.", hint, param=name, code="unsupported_parameter")


def refuse_in(raw: Mapping[str, Any], *, chat: bool) -> None:
    """Raise RequestError for a chat or completion that asks for what no engine here can do, or cannot be counted."""
    refuse(raw, CHAT if chat else COMPLETIONS)
    if chat and raw.get("modalities") not in (None, [], ["text"]):
        raise refusal("modalities", _TEXT)
    transfer = raw.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:  # vLLM computes them instead
        raise refusal("kv_transfer_params.prompt_token_ids", "Send token ids as the prompt of /v1/completions.")


_MIN_MS, _MAX_MS = 0.001, 86_400_000  # an SLO is at least a microsecond, at most a day
Ms = Annotated[float, Field(ge=_MIN_MS, le=_MAX_MS, allow_inf_nan=False, strict=True)]
Model = TypeVar("Model", bound=BaseModel)
# How pydantic names a member of a union in the path of an error; the client knows only the field.
_SHORT = Repr()  # never writes out the whole of a long value
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80
_UNION = re.compile(r"str$|list\[|constrained-|function-")


def parse_as(model: type[Model], raw: Mapping[str, Any]) -> Model:
    """Return a body as a model; RequestError names the field and what it must be."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(part) for part in first["loc"] if not _UNION.match(str(part)))
        value = "" if first["type"] == "missing" else f" (it is {_SHORT.repr(first.get('input'))})"
        text = f"{path}: {first['msg'][:1].lower()}{first['msg'][1:]}{value}."
        raise RequestError(text, f"Correct {path!r} in the body.", param=path) from error


def milliseconds(name: str, text: str) -> float:
    """Return the value of a header in milliseconds; RequestError unless it is a number within the limits."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _MIN_MS <= value <= _MAX_MS:
        raise RequestError(
            f"The header {name} is {text[:40]!r}.",
            f"It must be a number of milliseconds from {_MIN_MS} to {_MAX_MS} (a day).",
            param=name,
        )
    return value


def list_in(value: Any, where: str) -> list[Any]:
    """Return a field that is a list. RequestError (400) for anything else. where: its place, such as messages.0."""
    if not isinstance(value, list):
        raise RequestError(f"{where} is not a list.", "Send a list of objects.", param=where.split(".")[0])
    return value


def object_in(value: Any, where: str) -> Mapping[str, Any]:
    """Return a field that is an object; otherwise as `list_in`."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} is not an object.", "Send an object.", param=where.split(".")[0])
    return value


def text_of(body: Mapping[str, Any]) -> str | None:
    """Return the text that an answer's length depends on most: the user's last message, or the prompt.

    None for token ids and for images without text.
    """
    if "messages" in body:
        by_user = [message for message in body["messages"] if message.get("role") == "user"]
        content = (by_user or body["messages"])[-1].get("content")
        return " ".join(texts_in(content)) or None
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) else prompt
    return first if isinstance(first, str) and first else None


def texts_in(content: Any) -> list[str]:
    """Return the texts of a message: its content is one, or has parts, of which images have none."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [str(text) for text in texts if text is not None]
