"""Structured output has limits: a few characters of a grammar may take an engine's cores for minutes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Grammars
from headway.errors import RequestError
from headway.gateway.parsing.parser import check_grammars, expanded_length
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, Gateway
from tests.gateway.test_refusals import COMPLETIONS, error

LIMITS = Grammars()


def schema(**field: Any) -> dict[str, Any]:
    """Return the schema of an object with one field."""
    return {"type": "object", "properties": {"a": field}, "required": ["a"]}


def response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def nested(depth: int) -> dict[str, Any]:
    return schema(**nested(depth - 1)) if depth else {"type": "string"}


def deep(depth: int) -> Any:
    """Return more lists within each other than can be written as JSON."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def tool(**field: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema(**field)}}


REPEATED = "[a-z]{1,100000}"
TOO_LARGE: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": REPEATED}, "max_regex"),
    ({"guided_regex": "((a{1,99}){1,99}){1,99}"}, "max_regex"),
    ({"guided_regex": "[a-z]*" * 2000}, "max_regex"),
    ({"structured_outputs": {"regex": REPEATED}}, "max_regex"),
    ({"structured_outputs": {"json": json.dumps(schema(pattern=REPEATED))}}, "max_regex"),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": {"pattern": REPEATED}})}}, "max_regex"),
    ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": REPEATED}}, "max_regex"),
    ({"structured_outputs": {"grammar": "root ::= " + "[a-z]" * 20_000}}, "max_kib"),
    ({"guided_json": schema(patternProperties={REPEATED: {}})}, "max_regex"),
    ({"guided_choice": ["word"] * 10_000}, "max_kib"),
    (response_format(schema(pattern=REPEATED)), "max_regex"),
    (response_format({"anyOf": [schema(pattern="[a-z]{1,200}")] * 20}), "max_regex"),
    (response_format(schema(enum=["word"] * 10_000)), "max_kib"),
    (response_format(schema(maxLength=100_000)), "max_repeats"),
    (response_format(schema(minLength=-100_000, maxLength=1e5)), "max_repeats"),
    (response_format({"allOf": [schema(maxItems=600 + i) for i in range(20)]}), "max_repeats"),
    (response_format(schema(maxLength=10**400)), "max_repeats"),
    ({"structured_outputs": {"grammar": "root ::= [a-z ]{1,100000}"}}, "max_repeats"),
    (response_format(nested(40)), "max_depth"),
    (response_format(deep(10_000)), "max_depth"),
    ({"tools": [tool(pattern=REPEATED)], "tool_choice": "required"}, "max_regex"),
    ({"tools": [tool(pattern=REPEATED)], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "max_regex"),
]
FITTING: list[dict[str, Any]] = [
    {"guided_regex": r"\d{3}-\d{4}", "guided_choice": None},
    {"structured_outputs": {"regex": r"\{1,100000\}[{1,100000}]"}},
    {"structured_outputs": {"json": "no JSON", "grammar": 'root ::= "a"{1,100}'}},
    response_format(schema(pattern="^[a-z]{1,200}@[a-z]{1,200}$", minLength=1, maxLength=4000)),
    response_format(schema(properties={"pattern": {"const": 1}, "maxLength": {"type": "integer"}})),
    response_format(nested(20)),
    {"tools": [tool(pattern=REPEATED)], "tool_choice": "auto"},
    {"stop": [REPEATED] * 4},
]


@pytest.mark.parametrize(("fields", "limit"), TOO_LARGE)
def test_what_is_too_large_names_its_limit(fields: dict[str, Any], limit: str) -> None:
    with pytest.raises(RequestError, match=rf"grammars\.{limit} ") as caught:
        check_grammars(fields, LIMITS)
    assert caught.value.param == next(iter(fields))


def test_a_grammar_that_is_a_text_is_measured_before_it_is_parsed() -> None:
    for words, limit in (("word", "max_depth"), ("word" * 20_000, "max_kib")):
        deep = '{"a": ' * 100 + f'"{words}"' + "}" * 100
        with pytest.raises(RequestError, match=rf"grammars\.{limit} "):
            check_grammars({"structured_outputs": {"json": deep}}, LIMITS)


@pytest.mark.parametrize("fields", FITTING)
def test_what_is_common_fits(fields: dict[str, Any]) -> None:
    check_grammars(fields, LIMITS)


REPETITIONS = st.tuples(st.integers(1, 30), st.integers(1, 30) | st.none())


def _repeated(inner: tuple[str, int], times: tuple[int, int | None]) -> tuple[str, int]:
    least, most = times
    size = (inner[1] + 2) * max(least, most or 0)
    return f"({inner[0]}){{{least}{'' if most is None else f',{most}'}}}", size


def _joined(parts: list[tuple[str, int]]) -> tuple[str, int]:
    return "".join(text for text, _ in parts), sum(size for _, size in parts)


@given(
    st.recursive(
        st.sampled_from([("a", 1), (r"\(", 1), (r"[)\]{9}]", 1), (r"\{9}", 3), ("c{5}{5}", 25), (".*", 1)]),
        lambda inner: st.builds(_repeated, inner, REPETITIONS) | st.lists(inner, max_size=4).map(_joined),
    )
)
def test_repetitions_are_expanded_length(regex: tuple[str, int]) -> None:
    assert expanded_length(regex[0]) == regex[1]


@given(st.text("(){}[]\\,*+?|a0123456789"))
def test_any_text_has_a_length(text: str) -> None:
    assert 0 <= expanded_length(text) <= 10**18 * (len(text) + 1)


def test_repetitions_within_each_other_take_no_time_to_count() -> None:
    assert expanded_length("(" * 9000 + "a" + "){999999999}" * 9000) > 10**9
    assert expanded_length("a{" + "9" * 9000 + "}") > 10**8
    assert expanded_length("[" * 1_000_000) == 1
    assert expanded_length("a{1,2" * 200_000) == 5 * 200_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"structured_outputs": {"regex": REPEATED}}),
        (COMPLETIONS, {"prompt": "a", "guided_regex": REPEATED}),
        (
            "/v1/responses",
            {
                "input": "a",
                "text": {"format": {"type": "json_schema", "name": "a", "schema": schema(pattern=REPEATED)}},
            },
        ),
    ],
)
def test_it_is_refused_at_the_door(gateway: Gateway, path: str, fields: dict[str, Any]) -> None:
    said = error(gateway.post(gateway.chat(**fields), path), 400)
    assert said["code"] == "grammar_too_large"
    assert said["message"].endswith("or raise grammars.max_regex in the server's configuration.")


def test_limits_are_configured(serve: Serve) -> None:
    with serve(grammars=Grammars(max_regex=200_000)) as gateway:
        assert gateway.post(gateway.chat(guided_regex=REPEATED)).status_code == 200
