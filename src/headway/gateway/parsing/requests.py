"""The steps of the parse (`parser.py`) that know the fields of engines' APIs: JSON, fields, class and SLO.

Only the fields that Headway reads are checked here. Every other field goes to the engine as it came, and the
engine's own error goes to the client as it is.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from headway.config import Config, Key, Tier
from headway.errors import RequestError
from headway.gateway.parsing import run_identity
from headway.gateway.parsing.engine_body import EngineBody
from headway.gateway.parsing.fields import Ms, milliseconds, needs_vllm, parse_as, refuse_in, text_of
from headway.gateway.parsing.media import PATHS as AUDIO
from headway.gateway.parsing.media import AudioKind
from headway.gateway.parsing.pooling import PATHS as POOLING
from headway.gateway.parsing.pooling import PoolingKind, as_completion
from headway.store.queue.port import Job
from headway.types import Request, Slo

Kind = Literal["chat", "completions"] | PoolingKind | AudioKind
_GENERATING: dict[Kind, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PATHS = _GENERATING | dict[Kind, str](POOLING.items()) | dict[Kind, str](AUDIO.items())
_Count = Annotated[int, Field(ge=1)]
_Choices = Annotated[int, Field(ge=1, le=128)]

# Objects and arrays in a body, at most: each one costs far more to read than the two bytes that it takes.
_MOST_NESTED = 16_384
_FEWEST = 2048  # elements that a list may have for every model, however short its context
_MOST = {"stop": 1024, "bad_words": 1024}  # texts that the engine looks for with every token

# Synonymous header names, of which the first one present wins; the last entry is the body's field.
_SLO_NAMES: dict[str, tuple[str, ...]] = {
    "ttft": ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "ttft_slo_ms"),
    "tpot": ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms", "tpot_slo_ms"),
    "e2e": ("x-slo-e2e-ms", "x-llm-d-slo-e2e-ms", "ttlt_slo_ms"),
    "itl": ("x-slo-itl-ms", "itl_slo_ms"),
}
# The headers that are read, with their JSON types.
HEADERS: dict[str, str] = {
    **{name: "number" for names in _SLO_NAMES.values() for name in names[:-1]},
    "x-vllm-priority": "integer",
    **dict.fromkeys(("x-llm-d-inference-objective", "x-headway-task", "idempotency-key"), "string"),
    **run_identity.HEADERS,
}
# OpenAI's names, unless a class has them; where there is no class for one, vLLM ignores it, and so do we.
_OPENAI_TIERS = {"auto": "default", "default": "default", "scale": "default", "priority": "chat", "flex": "batch"}
_HEADWAY_FIELDS = ("ttft_slo_ms", "tpot_slo_ms", "ttlt_slo_ms", "itl_slo_ms", "background", "service_tier", "headway")


class Body(BaseModel):
    """The fields of both endpoints. Fields not named here pass through.

    Those that vLLM has, too, are read as loosely as vLLM does: 8.0 and "8" are integers.
    """

    model_config = ConfigDict(extra="allow")
    prompt_field: ClassVar[str] = "prompt"

    model: str
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    max_tokens: _Count | None = None
    n: _Choices | None = None
    best_of: _Choices | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    service_tier: str | None = None
    background: Annotated[bool, Field(strict=True)] | None = None
    ttft_slo_ms: Ms | None = None
    tpot_slo_ms: Ms | None = None
    ttlt_slo_ms: Ms | None = None
    itl_slo_ms: Ms | None = None
    headway: run_identity.RunFields | None = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def keeps(self) -> int | None:
        """Tokens that the engine keeps of a longer prompt; -1 = as many as fit, None = it cuts none."""
        return self.truncate_prompt_tokens

    @property
    def choices(self) -> int:
        """Answers that the engine makes to each prompt."""
        return max(self.n or 1, self.best_of or 1)


class ChatMessage(BaseModel):
    """One chat message; the engine's chat template checks the rest of it."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | Annotated[list[str | dict[str, Any]], Field(fail_fast=True)] | None = None


class ChatBody(Body):
    prompt_field: ClassVar[str] = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: _Count | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


_TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # no vocabulary has others, and they are kept as int32
_Ids = Annotated[list[_TokenId], Field(fail_fast=True)]
_Prompts = Annotated[list[str], Field(fail_fast=True)] | _Ids | Annotated[list[_Ids], Field(fail_fast=True)]


class CompletionBody(Body):
    prompt: str | Annotated[_Prompts, Field(min_length=1)]

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, texts or token ids."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast(list[str | list[int]], [self.prompt] if single else self.prompt)


class PoolingBody(CompletionBody):
    """The body of a request for a pooling model, as a completion of its texts."""

    prompt_field: ClassVar[str] = "input"
    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0

    @property
    def keeps(self) -> int | None:
        cut = self.max_tokens_per_query > 0 or self.max_tokens_per_doc > 0
        return -1 if cut and self.truncate_prompt_tokens is None else self.truncate_prompt_tokens


@dataclass(frozen=True, slots=True)
class Kept:
    """What the queue keeps of a request so that others can go on from it.

    content: a JSON object. conversation: which its input and answer are added to.
    """

    content: str
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed HTTP request.

    request: the core's view.
    kind: the endpoint.
    upstream: the body for the engine.
    text: what the length of the answer is forecast from, None = nothing is known of it.
    stream, background: how the client wants the response.
    wants_usage: the client asked for the usage event of a stream. wants_ids: it asked for token ids.
    trace_parent: its W3C `traceparent`, None = it sent none.
    prompt_ids: its tokens, where it belongs to a run and the gateway knows them.
    keys: of its prompt, as in `Arrived`, where several engines have its model.
    echo: what its answer says of it, in an API whose answers do.
    digest: of path and body, where its id is that of an idempotency key (`idempotency.py`).
    earlier: the job that was accepted under that key.
    payer: the API key whose budgets it counts in, None = without keys.
    kept: what others may go on from, None = nothing.
    """

    request: Request
    kind: Kind
    upstream: EngineBody
    text: str | None
    stream: bool
    background: bool
    wants_usage: bool
    wants_ids: bool = False
    trace_parent: str | None = None
    prompt_ids: Sequence[int] | None = None
    keys: bytes = b""
    echo: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    earlier: Job | None = None
    payer: Key | None = None
    kept: Kept | None = None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")  # Python parses it, other parsers do not


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def read_json(raw: bytes) -> dict[str, Any]:
    """Parse a body; RequestError when it is not a JSON object that can be passed on."""
    if (nested := _nested(raw)) > _MOST_NESTED:
        raise RequestError(
            f"The JSON body has {nested} objects and arrays.", f"Send at most {_MOST_NESTED}.", code="too_many_values"
        )
    try:
        text = raw.decode("utf-8-sig")  # editors of Windows begin a file with a mark of its encoding
        value = _JSON.decode(text)
        if "\\ud" in text or "\\uD" in text:  # half a surrogate pair is legal JSON but no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"The body is not valid JSON: {str(error)[:200]}.", "Send a JSON object.", code="invalid_json"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(f"The body is a JSON {type(value).__name__}, not an object.", 'Send {"model": ..., ...}.')
    return value


def _nested(raw: bytes) -> int:
    """Return how many objects and arrays a JSON text has, without reading it."""
    count = raw.count(b"[") + raw.count(b"{")
    if count <= _MOST_NESTED:
        return count
    # Those inside strings are text. Without escaped characters, every quote begins or ends a string.
    outside = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_STRUCTURE).split(b'"')[::2]
    return sum(map(len, outside))


_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[{'))


def validate(kind: Kind, raw: Mapping[str, Any], longest: int) -> ChatBody | CompletionBody:
    """Check the fields Headway reads; RequestError names the field and what it must be.

    longest: context of the models here, in tokens; no list of tokens or messages needs more elements.
    """
    most = max(longest, _FEWEST)
    if kind in POOLING:
        return parse_as(PoolingBody, as_completion(kind, raw, most))
    for name, limit in (*dict.fromkeys(("prompt", "messages", "tools"), most).items(), *_MOST.items()):
        value = raw.get(name)
        if isinstance(value, list) and len(value) > limit:
            raise RequestError(
                f"{name} has {len(value)} elements.", f"Send at most {limit}.", param=name, code="too_many_values"
            )
    refuse_in(raw, chat=kind == "chat")
    if kind == "chat":
        return parse_as(ChatBody, raw)
    if raw.get("echo") and raw.get("max_tokens") == 0:
        raw = {**raw, "max_tokens": 1}  # as vLLM does, which makes the token and leaves it out
    return parse_as(CompletionBody, raw)


def interpret(
    kind: Kind, raw: dict[str, Any], body: ChatBody | CompletionBody, headers: Mapping[str, str],
    config: Config, *, model: str, adapter: str | None, tenant: str, arrival: float,
    lengths: Sequence[int], max_model_len: int, max_running: int,
) -> ParsedRequest:  # fmt: skip
    """Join headers, body and configured classes; headers win over the body, both over the class.

    model, adapter: that serve it. lengths: tokens of each prompt; RequestError when one cannot fit the model.
    max_running: of the engine.
    """
    _check_names(headers, body)
    name, tier = _tier(body, headers, config)
    lengths = [_truncated(body, tokens, max_model_len) for tokens in lengths]
    longest, places = max(lengths), len(lengths) * body.choices
    request = Request(
        id=f"hw-{uuid.uuid4().hex[:20]}",
        model=model,
        prompt_tokens=sum(lengths),
        max_tokens=_max_tokens(body, longest, max_model_len),
        arrival=arrival,
        slo=_slo(body, headers, tier),
        priority=_priority(body, headers, tier),
        adapter=adapter,
        tenant=tenant,
        task=run_identity.name_in(headers, "x-headway-task") or name,
        tier=name,
        stage=run_identity.stage_of(headers, body.headway),
        drop=tier.drop,
        longest_prompt=longest,
        vllm_only=kind in POOLING or needs_vllm(raw, own=_HEADWAY_FIELDS),
        # A text that is embedded leaves its batch at once, so any number of them takes one batch.
        places=min(places, max_running) if kind in POOLING else places,
    )
    background, stream = _delivery(body)
    wants_usage = bool((body.stream_options or {}).get("include_usage"))
    upstream = _engine_fields(raw, body, request.priority, wants_usage)
    return ParsedRequest(
        request, kind, EngineBody.of(upstream), None if kind in POOLING else text_of(raw), stream,
        background, wants_usage, bool(body.return_token_ids), headers.get("traceparent"),
    )  # fmt: skip


_SLO_HEADERS = [name for name in HEADERS if "slo" in name]
_SLO_FIELDS = [names[-1] for names in _SLO_NAMES.values()]
_SLO_WORD = re.compile(r"(^|[-_])slo([-_]|$)")


def _check_names(headers: Mapping[str, str], body: Body) -> None:
    """Refuse unknown names that look like an SLO: ignored, they would promise nothing."""
    for known, names in ((_SLO_HEADERS, headers), (_SLO_FIELDS, body.model_extra or {})):
        for name in names:
            if "slo" in (low := name.lower()) and _SLO_WORD.search(low) and low not in known:
                near = get_close_matches(low, known, n=1, cutoff=0.0)[0]
                raise RequestError(
                    f"{name[:64]!r} is not the name of an SLO.",
                    f"Did you mean {near!r}?",
                    param=name[:64],
                    code="unknown_slo",
                )


def _delivery(body: Body) -> tuple[bool, bool]:
    """Return whether the client polls for the answer, and whether it reads it as it comes."""
    if body.background and body.stream:
        raise RequestError("A background request cannot stream.", "Leave out stream, and poll GET /v1/responses/{id}.")
    return bool(body.background), bool(body.stream)


def _engine_fields(
    raw: dict[str, Any], body: ChatBody | CompletionBody, priority: int, wants_usage: bool
) -> dict[str, Any]:
    """Return the body for the engine, without what is Headway's own."""
    upstream = {key: value for key, value in raw.items() if key not in _HEADWAY_FIELDS}
    upstream["priority"] = priority
    if isinstance(body, CompletionBody) and not isinstance(body, PoolingBody) and body.max_tokens is None:
        upstream["max_tokens"] = _COMPLETION_TOKENS  # as it is planned, whatever the engine's default
    if body.stream is not None:
        upstream["stream"] = body.stream  # so that the engine reads it as it is read here
    if body.stream:
        # Headway counts tokens by the usage event; a client that did not ask must not get it per chunk.
        options = (body.stream_options or {}) if wants_usage else {}
        upstream["stream_options"] = {**options, "include_usage": True}
    return upstream


_UNCONFIGURED = Tier()
_COMPLETION_TOKENS = 16  # of a completion that does not say, as in vLLM


def _tier(body: Body, headers: Mapping[str, str], config: Config) -> tuple[str, Tier]:
    name = headers.get("x-llm-d-inference-objective") or body.service_tier or "default"
    if name not in config.classes and name in _OPENAI_TIERS:
        name = _OPENAI_TIERS[name]
        name = name if name in config.classes else "default"
    if name == "default":
        return name, config.classes.get(name, _UNCONFIGURED)
    if name not in config.classes:
        raise RequestError(
            f"There is no class {name[:64]!r}.",
            f"Use one of {', '.join(sorted(config.classes))}, or add it to [classes] in the configuration.",
            param="service_tier",
        )
    return name, config.classes[name]


def _slo(body: Body, headers: Mapping[str, str], tier: Tier) -> Slo:
    own: dict[str, Any] = {
        target: value for target, names in _SLO_NAMES.items() if (value := _target(names, body, headers)) is not None
    }
    if not body.stream and ("itl" in own or tier.itl_ms is not None):
        own["itl"] = None  # an answer that comes as a whole has no gaps
    if not own:
        return tier.slo  # one object for all requests without targets of their own
    soft = None if {"ttft", "e2e"} & own.keys() else tier.slo.soft
    return replace(tier.slo, **own, soft=soft)


def _target(names: tuple[str, ...], body: Body, headers: Mapping[str, str]) -> float | None:
    """Return a target of the request's own in seconds, None = it has none."""
    *header_names, body_name = names
    for name in header_names:
        if name in headers:
            return milliseconds(name, headers[name]) / 1000
    value = getattr(body, body_name)
    return None if value is None else value / 1000


def _priority(body: Body, headers: Mapping[str, str], tier: Tier) -> int:
    text = headers.get("x-vllm-priority")
    if text is None:
        return tier.priority if body.priority is None else body.priority
    try:
        value = int(text)
    except ValueError:
        value = 2**31
    if not -(2**31) <= value < 2**31:
        raise RequestError(
            f"The header x-vllm-priority is {text[:40]!r}.", "It must be a 32-bit integer; lower is more urgent."
        )
    return value


def _truncated(body: ChatBody | CompletionBody, prompt_tokens: int, max_model_len: int) -> int:
    """Return the tokens that the engine keeps of a prompt, which it cuts where its client asks for that."""
    if body.keeps is None:
        return prompt_tokens
    if body.keeps >= 0:
        return min(prompt_tokens, body.keeps)
    return min(prompt_tokens, max_model_len if isinstance(body, PoolingBody) else max_model_len - 1)


def _max_tokens(body: ChatBody | CompletionBody, prompt_tokens: int, max_model_len: int) -> int:
    """Return the limit of output tokens, which vLLM lowers to what the prompt leaves of the context.

    RequestError when the prompt leaves nothing, or more is asked for than the context ever has.
    """
    if isinstance(body, PoolingBody):
        if prompt_tokens > max_model_len:
            raise too_long(body, f"{prompt_tokens} tokens", max_model_len)
        return 1
    if isinstance(body, ChatBody):
        limit = body.max_completion_tokens or body.max_tokens
    else:
        limit = body.max_tokens or _COMPLETION_TOKENS
    room = max_model_len - prompt_tokens
    if room < 1 or (limit or 1) > max_model_len:
        raise too_long(body, f"{prompt_tokens} tokens and {limit or 1} more are asked for", max_model_len)
    return min(limit or room, room)


def too_long(body: ChatBody | CompletionBody, what: str, max_model_len: int) -> RequestError:
    """Return the error of a prompt that has `what`, which does not fit the model."""
    return RequestError(
        f"The prompt has {what}, but {body.model} has room for {max_model_len}.",
        "Shorten the prompt or lower max_tokens.",
        param=body.prompt_field,
        code="context_length_exceeded",
    )
