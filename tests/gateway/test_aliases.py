"""Aliases: requests for names that clients are built with are served by a model that is here."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import Config, Engine
from headway.errors import ConfigError
from headway.gateway.parsing.models import check_aliases, resolve_alias
from tests.gateway.conftest import Serve
from tests.gateway.gateway import SAY, Fake, until

ALIASES = {"claude-*": "smollm2", "gpt-4o": "smollm2", "brief": "terse"}
ENGINE = {"adapters": {"terse": "/adapters/terse"}}
MESSAGES = {"max_tokens": 8, "messages": SAY}


@pytest.mark.parametrize(
    ("name", "model"),
    [("claude-x", "a"), ("claude-opus", "b"), ("claude-", "a"), ("x", "x"), ("own", "own"), ("Claude-x", "Claude-x")],
)
def test_a_whole_name_goes_before_patterns_and_a_served_one_before_all(name: str, model: str) -> None:
    aliases = {"claude-*": "a", "*-opus": "c", "claude-opus": "b", "own*": "a"}
    assert resolve_alias(aliases, {"a", "b", "own"}, name) == model


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAY}),
        ("/v1/chat/completions", {"messages": SAY, "stream": True}),
        ("/v1/completions", {"prompt": "Say"}),
        ("/v1/responses", {"input": "Say"}),
        ("/v1/messages", MESSAGES),
    ],
)
def test_an_engine_and_metrics_see_the_model_itself(serve: Serve, fake: Fake, path: str, body: dict[str, Any]) -> None:
    with serve(aliases=ALIASES, engine=ENGINE) as gateway:
        for name, model in (("claude-sonnet-4", "smollm2"), ("brief", "terse")):
            answer = gateway.post({"model": name, **body}, path)
            assert answer.status_code == 200, answer.text
            assert fake.last()["body"]["model"] == model
        finished = 'headway_requests_total{class="default",model="smollm2",outcome="finished"'
        until(lambda: finished in gateway.get("/metrics").text)
        assert "claude" not in gateway.get("/metrics").text


def test_whole_names_are_listed_and_all_are_described(serve: Serve) -> None:
    with serve(aliases=ALIASES, engine=ENGINE) as gateway:
        listed = {one["id"]: one.get("parent") for one in gateway.get("/v1/models").json()["data"]}
        assert listed == {"smollm2": None, "terse": "smollm2", "gpt-4o": "smollm2", "brief": "terse"}
        assert gateway.get("/v1/models/claude-x").json()["parent"] == "smollm2"
        assert gateway.get("/v1/models/gpt-4").status_code == 404
        told = gateway.post({"model": "gpt-4o", "prompt": "One two"}, "/tokenize").json()
        assert told["count"] == 2
        back = gateway.post({"model": "claude-x", "tokens": told["tokens"]}, "/detokenize").json()
        assert back["prompt"] == "One two"


def test_aliases_of_nothing_and_of_models_are_refused() -> None:
    engines = (Engine(served_name="a"), Engine(served_name="b", adapters={"terse": "/terse"}))
    check_aliases(Config(engines=engines, aliases={"x": "a", "y-*": "terse"}))
    with pytest.raises(ConfigError) as caught:
        check_aliases(Config(engines=engines, aliases={"b": "a", "x": "c"}))
    assert [part.message for part in caught.value.parts] == [
        "The alias 'b' is the name of a model.",
        "The alias 'x' stands for 'c', which is not served.",
    ]
