"""Reads the tokens of a prompt with the model's own tokenizer, before the request is queued."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, RequestError
from headway.gateway.parsing.fields import texts_in
from headway.gateway.parsing.media import MediaCounter, media_tokens
from headway.gateway.parsing.requests import ChatBody, CompletionBody, too_long
from headway.gateway.tasks import in_daemon
from headway.models.resolve import resolve
from headway.prefix import prompt_seed, token_keys

_KEEPING = frozenset(("ByteLevel", "Digits", "Split"))  # pre-tokenizers that drop no byte
Encode = Callable[[str, bool], Sized]
Content = str | list[str | dict[str, Any]] | None  # of a message
# Fields of a body by which the engine makes other tokens of the same messages.
_ALTERING_FIELDS = frozenset(
    (
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "prompt_embeds",
    )
)
# Fields that a chat's template reads, and arguments of `apply_chat_template` that no request may set.
_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "documents", "reasoning_effort")
_RESERVED = frozenset(
    (
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompts of a request as the tokenizer reads them.

    lengths: tokens of each. salt: its `cache_salt`, which keeps its KV apart from that of other prompts.
    """

    lengths: Sequence[int]
    _encoding: Sized | None = None
    salt: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return sum(self.lengths)

    @property
    def ids(self) -> Sequence[int] | None:
        """The tokens that the engine computes; None = the engine alone knows them, or there are several prompts."""
        encoding: Any = self._encoding
        ids: Sequence[int] | None = getattr(encoding, "ids", encoding)  # the Rust tokenizer's, or a list
        return ids

    def keys(self, adapter: str | None) -> bytes:
        """Return the keys of its blocks (`prefix.token_keys`) for an adapter's KV; none where `ids` is None."""
        return b"" if (ids := self.ids) is None else token_keys(ids, prompt_seed(adapter, self.salt)).tobytes()


class TokenCounter:
    """Counts with one model's tokenizer. media: counts its images, None = it has none, or they cannot be counted."""

    def __init__(self, tokenizer: Any, media: MediaCounter | None = None) -> None:
        self._tokenizer, self._media = tokenizer, media
        self._encode: Encode = _encode(tokenizer)
        self._bytes = _Bytes.of(tokenizer)

    @classmethod
    async def load(cls, model: str) -> TokenCounter:
        """Load a model's tokenizer (seconds); ConfigError when the model has none."""
        load = lambda: (load_tokenizer(model), MediaCounter.of(resolve(model)))  # noqa: E731
        return cls(*await in_daemon(load))  # a download does not delay the end of the process

    def read(self, body: ChatBody | CompletionBody, most: int) -> Prompt:
        """Return the prompt's tokens; RequestError when its bytes alone show more than `most`.

        Of a prompt that cannot fit and is cut by the engine, a lower bound. How long it takes depends on the whole
        body: on tools and the number of messages, too.
        """
        if isinstance(body, ChatBody):
            encoding = self._read_chat(body, most)
        elif len(prompts := body.prompts) == 1:
            encoding = self._read_text(body, prompts[0], most)
        else:
            for one in prompts:
                if isinstance(one, str):
                    self._lower_bound(body, one, most)  # before any of them is tokenized
            return Prompt([_count(self._read_text(body, one, most)) for one in prompts])
        extra = body.model_extra or {}
        alike = body.keeps is None and _ALTERING_FIELDS.isdisjoint(extra)
        salt = extra.get("cache_salt")
        return Prompt([_count(encoding)], encoding if alike and not isinstance(encoding, int) else None, salt)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. RequestError for an unknown id."""
        self._check(ids)
        return str(self._tokenizer.decode(list(ids)))

    def words(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary writes them; errors as `text`."""
        self._check(ids)
        return list(self._tokenizer.convert_ids_to_tokens(list(ids)))

    def _check(self, ids: Sequence[int]) -> None:
        size = len(self._tokenizer)
        bad = next((one for one in ids if not 0 <= one < size), None)
        if bad is not None:
            raise RequestError(f"There is no token {bad}.", f"Send ids from 0 to {size - 1}.", param="tokens")

    def _read_text(self, body: CompletionBody, prompt: str | list[int], most: int) -> Sized | int:
        return self._encode_text(body, prompt, True, most) if isinstance(prompt, str) else prompt

    def _read_chat(self, body: ChatBody, most: int) -> Sized | int:
        messages = [{**m.model_dump(), "content": _text(m.content)} for m in body.messages]
        exact = all(_is_text(message.content) for message in body.messages)
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=body.tools, tokenize=False, **_template_arguments(body)
            )
        except Exception:  # a template may raise anything; the engine's own error reaches the client
            text, exact = "\n".join(message["content"] for message in messages), False
        encoding = self._encode_text(body, text, False, most)  # the template has added the special tokens
        return encoding if exact else self._with_media(body, _count(encoding), most)

    def _with_media(self, body: ChatBody, tokens: int, most: int) -> int:
        """Return the tokens of a prompt with its images; what is only a bound leaves room for an answer."""
        known, unknown = media_tokens(self._media, (message.content for message in body.messages))
        tokens += known
        answer = body.max_completion_tokens or body.max_tokens or 1
        return tokens + min(unknown, max(most - answer - tokens, 0))

    def _encode_text(self, body: ChatBody | CompletionBody, text: str, special: bool, most: int) -> Sized | int:
        """Return a text's tokens, with or without the special ones around it, or `_lower_bound`."""
        return self._lower_bound(body, text, most) or self._encode(text, special)

    def _lower_bound(self, body: ChatBody | CompletionBody, text: str, most: int) -> int:
        """Return a lower bound of the tokens of a text whose bytes are more than `most` can hold, else 0.

        RequestError for it unless the engine cuts it: to tokenize it may take a second.
        """
        least = self._bytes.least_tokens(text) if self._bytes is not None else 0
        if least <= most:
            return 0
        if body.keeps is None:
            raise too_long(body, f"at least {least} tokens", most)
        return least


def _count(encoding: Sized | int) -> int:
    return encoding if isinstance(encoding, int) else len(encoding)


def load_tokenizer(model: str) -> Any:
    """Return a model's tokenizer from transformers; ConfigError when the model has none."""
    from transformers.utils import logging

    logging.disable_default_handler()
    logging.enable_propagation()  # to the gateway's log, in its format
    path = resolve(model)
    try:
        if Path(path, "tokenizer.json").is_file():  # complete in itself; AutoTokenizer would import torch
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The tokenizer of {model!r} cannot be loaded: {str(error)[:300]}.",
            "Headway counts prompts with it; give a complete model directory or a reachable hub id.",
        ) from error


def _encode(tokenizer: Any) -> Encode:
    """Return a function that reads a text's tokens, with or without the special ones around it.

    It calls the Rust tokenizer directly where there is one: transformers' wrapper takes twice the time, and
    sets truncation before each call, which is not safe in two threads. A batch lets other threads run
    meanwhile; `encode` holds the interpreter.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text, special: tokenizer.encode(text, add_special_tokens=special)
    backend.no_truncation()
    backend.no_padding()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns whenever a child is started
    return lambda text, special: backend.encode_batch_fast([text], add_special_tokens=special)[0]


def _text(content: Content) -> str:
    """Return a message's text, as vLLM joins its parts, without others (images)."""
    return "\n".join(texts_in(content))


def _is_text(content: Content) -> bool:
    return not isinstance(content, list) or all(isinstance(part, str) or part.get("type") == "text" for part in content)


def _template_arguments(body: ChatBody) -> dict[str, Any]:
    """Return the template's arguments, merged as by vLLM: fields of the body override its template kwargs."""
    extra = body.model_extra or {}
    sent = extra.get("chat_template_kwargs")
    kwargs = {name: value for name, value in sent.items() if name not in _RESERVED} if isinstance(sent, dict) else {}
    own = {name: extra[name] for name in _TEMPLATE_FIELDS if extra.get(name) is not None}
    if "reasoning_effort" in own:
        kwargs.setdefault("enable_thinking", own["reasoning_effort"] != "none")
    return {"add_generation_prompt": True, **kwargs, **own}


@dataclass(frozen=True, slots=True)
class _Bytes:
    """What the bytes of a text say about its tokens, without tokenizing it.

    most: bytes of the longest token. lost: bytes that become no token.
    """

    most: int
    lost: bytes

    @classmethod
    def of(cls, tokenizer: Any) -> _Bytes | None:
        """Return it for a byte-level tokenizer that keeps every byte; None for others."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or backend.normalizer is not None or backend.pre_tokenizer is None:
            return None
        split = json.loads(backend.pre_tokenizer.__getstate__())
        parts = split["pretokenizers"] if split["type"] == "Sequence" else [split]
        kinds = [part["type"] for part in parts if part.get("behavior") != "Removed"]
        if len(kinds) < len(parts) or "ByteLevel" not in kinds or not _KEEPING.issuperset(kinds):
            return None
        added = backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):  # these take in the space around them
            return None
        vocabulary = tokenizer.get_vocab()  # one character for each byte, except in added tokens
        longest = max(*map(len, vocabulary), *(len(token.content.encode()) for token in added))
        return cls(longest, bytes(byte for byte, symbol in _symbols() if symbol not in vocabulary))

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens."""
        return -(-len(text.encode("utf-8", "ignore").translate(None, self.lost)) // self.most)


@cache
def _symbols() -> frozenset[tuple[int, str]]:
    """Return how byte-level tokenizers write each byte of UTF-8."""
    from tokenizers.pre_tokenizers import ByteLevel

    split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    begins = (*range(0x800), *range(0x800, 0xD000, 0x800), 0xE000, 0xF000, 0x10000, *range(2**18, 0x110000, 2**18))
    return frozenset(pair for code in begins for pair in zip(chr(code).encode(), split(chr(code))[0][0], strict=True))
