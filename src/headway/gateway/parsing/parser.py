"""The one parse: the headers of a request and its body, as an engine takes it, become a `ParsedRequest`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from headway.config import Config, Engine, Grammars, Key
from headway.engines.vllm.fatal_fields import check_fields
from headway.engines.vllm.parsers import no_tool_parser, parsers
from headway.errors import RequestError
from headway.gateway.parsing.media import refuse_urls
from headway.gateway.parsing.models import Served, ServedModels
from headway.gateway.parsing.pooling import PATHS as POOLING
from headway.gateway.parsing.requests import PATHS, ChatBody, CompletionBody, Kind, ParsedRequest, interpret, validate
from headway.gateway.parsing.tokens import Prompt
from headway.types import Request

Fields = dict[str, Any]


class Parser:
    """Parses requests of all APIs; nothing is refused here for want of room.

    config: its classes may change.
    """

    def __init__(self, models: ServedModels, config: Config) -> None:
        self.models, self.config = models, config

    def parse(
        self, kind: Kind, raw: Fields, headers: Mapping[str, str], key: Key | None, *, tenant: str, arrival: float
    ) -> ParsedRequest:
        """Parse a request; RequestError names the field or header that is wrong.

        raw: its body as JSON. key: whose limits its claims must keep, None = no limits.
        """
        raw, body = self._validate(kind, raw)
        served = self.models.find(body.model)
        _check_engines(served, kind, raw, body)
        prompt = served.counter.read(body, served.context)
        parsed = interpret(
            kind,
            raw,
            body,
            headers,
            self.config,
            model=served.model,
            adapter=served.adapter,
            tenant=tenant,
            arrival=arrival,
            lengths=prompt.lengths,
            max_model_len=served.context,
            max_running=served.max_running,
        )
        if key is not None:
            own = body.priority is not None or "x-vllm-priority" in headers
            check_claims(key, parsed.request, parsed.request.priority if own else None)
            parsed = replace(parsed, payer=key)
        if len(served.engines) > 1:
            parsed = replace(parsed, keys=prompt.keys(served.adapter))
        if parsed.request.stage is None or prompt.salt is not None:  # a salted prompt cannot be warmed
            return parsed
        return replace(parsed, prompt_ids=prompt.ids)

    def prompt(self, kind: Kind, raw: Fields) -> Prompt:
        """Return the tokens of a body's prompt; errors as `parse`."""
        _, body = self._validate(kind, raw)
        served = self.models.find(body.model)
        return served.counter.read(body, served.context)

    def _validate(self, kind: Kind, raw: Fields) -> tuple[Fields, ChatBody | CompletionBody]:
        """Check the fields of a body, and return it with its model's own name."""
        raw = {**raw, "model": self.models.own_name(raw.get("model"))}
        check_grammars(raw, self.config.grammars)
        refuse_urls(raw, self.config.server.media_domains)
        return raw, validate(kind, raw, self.models.longest)


def _check_engines(served: Served, kind: Kind, raw: Fields, body: ChatBody | CompletionBody) -> None:
    """Refuse what the model's engines cannot do, and fields that crash one of them."""
    if (pools := kind in POOLING) != (served.engine.runner == "pooling"):
        wanted = "pooling" if pools else "generate"
        does = "generates text" if pools else "embeds text and generates none"
        raise RequestError(
            f"{PATHS[kind]} needs another model: {body.model!r} {does}.",
            f'Use a model whose engine has runner = "{wanted}" in [[engines]].',
            code="unsupported_task",
            param="model",
        )
    if isinstance(body, ChatBody) and body.tools:
        _check_tools(served.engine, raw.get("tool_choice"))
    for engine in served.engines:
        check_fields(raw, engine.fatal)


def _check_tools(engine: Engine, choice: Any) -> None:
    """Refuse tools that the model may or must call, where nothing reads its calls."""
    if engine.url is None and choice != "none" and parsers(engine).tool is None:
        raise no_tool_parser()


# ---- what a key may claim


def check_claims(key: Key, request: Request, priority: int | None) -> None:
    """Raise RequestError (403) for a claim beyond the key's limits.

    priority: that the request asks for itself, None = it has its class's.
    """
    if key.classes is not None and request.tier not in key.classes:
        raise _refusal(
            f"This API key may not use the class {request.tier!r}",
            f"Set service_tier to one of {', '.join(key.classes)}",
            "keys.classes",
            "service_tier",
        )
    for name, seconds in _targets(request):
        least = getattr(key, f"{name}_ms")
        if seconds is not None and least is not None and seconds * 1000 < least:
            raise _refusal(
                f"This API key may not ask for a {name} of {seconds * 1000:g} ms, by its SLO or its class",
                f"Ask for {least:g} ms or more",
                f"keys.{name}_ms",
            )
    if key.priority is not None and priority is not None and priority < key.priority:
        raise _refusal(
            f"This API key may not ask for the priority {priority}",
            f"Use {key.priority} or a higher number",
            "keys.priority",
            "priority",
        )


def _targets(request: Request) -> list[tuple[str, float | None]]:
    """Return the SLOs in seconds; the deadline of its run counts as an e2e."""
    slo, stage = request.slo, request.stage
    run = stage.target if stage else None
    return [("ttft", slo.ttft), ("tpot", slo.tpot), ("itl", slo.itl), ("e2e", slo.e2e), ("e2e", run)]


def _refusal(what: str, hint: str, setting: str, param: str | None = None) -> RequestError:
    return RequestError(
        f"{what} ({setting}).",
        f"{hint}, or ask the operator for more.",
        status=403,
        kind="permission_error",
        code="beyond_key",
        param=param,
    )


_FIELDS = ("response_format", "structured_outputs")  # and vLLM's earlier names, which begin with guided_
_REGEX = frozenset(("pattern", "regex", "whitespace_pattern", "guided_regex", "guided_whitespace_pattern"))
_GRAMMAR = frozenset(("grammar", "guided_grammar"))
_AS_TEXT = frozenset(("json", "guided_json", "structural_tag"))  # may have their JSON as a text
_BOUNDS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
# An escaped character, a class, a counted repetition, or any other character.
# An unclosed class extends to the end of the text, and nothing is given back: the time stays linear.
_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+\]?|\{(\d++)(?:,(\d*+))?\}|.", re.DOTALL)
# Of a grammar, in which "[" may be text.
_REPEATS = re.compile(r"\{(\d++)(?:,(\d*+))?\}")
_ENDLESS = 10**9  # more than any limit
_HINT = "Send a smaller grammar, or raise grammars.{} in the server's configuration."


def check_grammars(raw: Mapping[str, Any], limits: Grammars) -> None:
    """Refuse a request whose structured output is larger than the configuration allows.

    The engine compiles a grammar on the cores that all its requests share, and some of its libraries write
    repetitions out: eleven characters, "a{1,100000}", may take minutes.
    """
    fields = {name: value for name, value in raw.items() if name in _FIELDS or name.startswith("guided_")}
    if raw.get("tool_choice") not in (None, "auto", "none"):  # the arguments are held to the tools' schemas
        fields["tools"] = raw.get("tools")
    regex, repeats = 0, 0.0
    for name, value in fields.items():
        for key, one, depth in _nodes(name, value, limits.max_kib * 1024):
            if depth > limits.max_depth:
                raise _too_large(name, f"more than {limits.max_depth} objects within each other", "max_depth")
            if key in _REGEX and isinstance(one, str):
                regex += expanded_length(one)
            elif key in _GRAMMAR and isinstance(one, str):
                repeats += sum(max(_count(most), _count(least)) for least, most in _REPEATS.findall(one))
            elif key in _BOUNDS and isinstance(one, int | float):
                repeats += max(0, min(one, limits.max_repeats + 1))  # NaN counts as nothing
        if len(json.dumps(value)) > limits.max_kib * 1024:
            raise _too_large(name, f"more than {limits.max_kib} KiB", "max_kib")
        if regex > limits.max_regex:
            what = f"regular expressions of more than {limits.max_regex} characters, repetitions written out"
            raise _too_large(name, what, "max_regex")
        if repeats > limits.max_repeats:
            what = f"bounds, such as maxLength or {{9}} of a grammar, of more than {limits.max_repeats} in sum"
            raise _too_large(name, what, "max_repeats")


def _too_large(name: str, what: str, limit: str) -> RequestError:
    return RequestError(f"{name} has {what}.", _HINT.format(limit), param=name, code="grammar_too_large")


def _nodes(name: str, value: Any, longest: int) -> Iterator[tuple[str, Any, int]]:
    """Yield all values within a field, each with its name and how many objects and arrays it is in.

    longest: characters of a text that is parsed as JSON; what is longer is refused anyway.
    """
    waiting = [(name, value, 0)]
    while waiting:
        key, one, depth = waiting.pop()
        if key in _AS_TEXT and isinstance(one, str) and len(one) <= longest:
            one = _parse(one)
        yield key, one, depth
        if isinstance(one, dict):
            waiting += [(inner, child, depth + 1) for inner, child in one.items()]
            if key == "patternProperties":
                waiting += [("pattern", pattern, depth + 1) for pattern in one]
        elif isinstance(one, list):
            waiting += [("", child, depth + 1) for child in one]


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # the engine says what is wrong with it


def expanded_length(regex: str) -> int:
    """Return the characters of a regular expression, a class as one, with its repetitions written out.

    Dialects differ, so this is not a parser: what it does not understand counts as characters.
    """
    sizes, last = [0], 0  # of the groups that are open, and of what a repetition would repeat
    for part in _PARTS.finditer(regex):
        text, least, most = part[0], part[1], part[2]
        if text == "(":
            sizes.append(1)
        elif text == ")" and len(sizes) > 1:
            last = min(sizes.pop() + 1, _ENDLESS)
            sizes[-1] += last
        elif least is not None:
            times = max(_count(least), _count(most), 1)
            sizes[-1] += last * (times - 1)
            last = min(last * times, _ENDLESS)
        elif text not in "*+?":  # loops, which are written once
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def _count(digits: str | None) -> int:
    return int(digits or 0) if len(digits or "") < 10 else _ENDLESS
