"""Fields of OpenAI's and Anthropic's APIs that no engine here supports, so that they are refused.

vLLM ignores fields that it does not know. That is right for those that change no answer (docs/clients.md
lists them), but not for those that a client relies on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import RequestError

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
