"""What a request costs: in the answers of each API, in the journal, and after a reload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.config import Budget, Config, Key, Price, write
from headway.gateway.reload import Reload
from headway.store.journal.reader import read
from headway.whatif.journal.costs import sums_of
from tests.gateway.batches import begin, content, ended, line
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, OPERATOR, SAY, WEB, Fake, Gateway, configuration, serving, until
from tests.gateway.test_budgets import PRICE, PRICES, ask, by, key, settled
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import events, fakes


def test_a_budget_by_cost_serves_no_model_without_a_price(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    one = key(Budget("day", cost=1.0))
    with serve(keys=(one,), prices={"any": PRICE}) as gateway:
        until(lambda: "[prices.any]: no model or adapter has that name" in caplog.text)
        said = error(ask(gateway, one), 403)
        assert (said["code"], "[prices.smollm2]" in said["message"]) == ("no_price", True)
        assert gateway.jobs() == {}


@pytest.fixture
def reloaded(fake: Fake, tmp_path: Path) -> Iterator[tuple[Gateway, Callable[[Config], None]]]:
    """A gateway with a key, and what has it read another configuration on SIGHUP."""
    file, config = (
        tmp_path / "headway.toml",
        configuration(tmp_path, fake.url, keys=(key(),), server={"stored_keys": True}),
    )
    file.write_text(write(config))
    with serving(config) as gateway:
        state = gateway.server._state
        assert state is not None

        async def begin() -> Reload:
            return Reload(file, state)

        again = gateway.do(begin())

        def reread(new: Config) -> None:
            file.write_text(write(new))
            gateway.do(again.run())

        yield gateway, reread


def test_prices_are_read_again_on_sighup(reloaded: tuple[Gateway, Callable[[Config], None]]) -> None:
    gateway, reread = reloaded
    for price in (PRICE, replace(PRICE, answer=10 * PRICE.answer)):
        reread(replace(gateway.config, prices={"smollm2": price}))
        answer = gateway.post(gateway.chat(**fakes(prompt=30, tokens=5)), headers=by(key()))
        usage = answer.json()["usage"]
        cost = price.units(usage["prompt_tokens"], usage["completion_tokens"])
        assert float(answer.headers["x-headway-cost"]) == pytest.approx(cost)


def test_a_budget_by_cost_its_price_and_an_engine_come_with_one_sighup(
    reloaded: tuple[Gateway, Callable[[Config], None]], others: list[Fake]
) -> None:
    gateway, reread = reloaded
    one = replace(gateway.config.engines[0], served_name="smollm2")
    engines = one, replace(one, url=others[0].url)
    dear = key(Budget("day", cost=9.0))
    reread(replace(gateway.config, engines=engines, keys=(dear,), prices=PRICES))
    until(lambda: [*gateway.controller.cluster.instances] == ["e0", "e1"])
    assert ask(gateway, dear).status_code == 200
    added = gateway.post({"url": others[1].url, "served_name": "smollm2"}, "/v1/headway/engines", headers=OPERATOR)
    assert added.status_code == 202, added.text


def test_a_reload_warns_of_prices_without_a_model_and_of_stored_keys_whose_models_have_none(
    reloaded: tuple[Gateway, Callable[[Config], None]], caplog: pytest.LogCaptureFixture
) -> None:
    gateway, reread = reloaded
    reread(replace(gateway.config, prices=PRICES))
    body = {"tenant": "beta", "budgets": [{"per": "day", "cost": 9}]}
    (made,) = gateway.post(body, "/v1/headway/keys", headers=OPERATOR).json()["data"]
    reread(replace(gateway.config, prices=PRICES))
    assert "budget by cost" not in caplog.text
    assert "no model or adapter has that name" not in caplog.text
    reread(replace(gateway.config, prices={"smolm2": PRICE}))
    assert "[prices.smolm2]: no model or adapter has that name; served here: smollm2" in caplog.text
    assert f"stored keys with a budget by cost ({made['id']}) cannot use smollm2" in caplog.text


def test_the_cost_of_a_request_is_told_and_noted(serve: Serve) -> None:
    one = key()
    with serve(keys=(one, Key("sk-beta-1234", "beta")), prices=PRICES) as gateway:
        answer = ask(gateway, one, **fakes(prompt=30, tokens=5))
        usage = answer.json()["usage"]
        cost = PRICE.units(usage["prompt_tokens"], usage["completion_tokens"])
        assert float(answer.headers["x-headway-cost"]) == pytest.approx(cost)
        stream = ask(gateway, one, stream=True, stream_options={"include_usage": True}, **fakes(prompt=30, tokens=5))
        told = [event["usage"]["cost"] for event in events(stream) if event != "[DONE]" and event.get("usage")]
        assert told == [pytest.approx(cost)]
        ask(gateway, Key("sk-beta-1234", "beta"))
        until(lambda: gateway.metric('headway_cost_total{model="smollm2",tenant="alpha"}') == pytest.approx(2 * cost))
        folder = gateway.config.journal_dir
        assert folder is not None
    rows = read(folder).requests
    assert [one.key for one in rows] == ["first", "first", "beta"]
    assert [one.cost for one in rows[:2]] == [pytest.approx(cost)] * 2
    assert [one.paid_output for one in rows[:2]] == [usage["completion_tokens"]] * 2
    sums = sums_of(rows, "tenant")
    assert [*sums] == ["alpha", "beta"], "the dearest first"
    assert float(sums["alpha"].cost) == pytest.approx(2 * cost)
    assert [*sums_of(rows, "key")] == ["first", "beta"]
    assert [*sums_of(rows, "app")] == ["(none)"]
    assert sums_of(rows, "class")["default"].requests == 3


def test_the_cost_is_the_same_number_everywhere(serve: Serve) -> None:
    one = key()
    with serve(keys=(one,), prices={"smollm2": Price(1234.567891, 0.7)}) as gateway:
        answer = ask(gateway, one, **fakes(prompt=31, tokens=5))
        odd = fakes(prompt=0, tokens=5)  # then the gateway's own count of the prompt is billed
        stream = ask(gateway, one, stream=True, stream_options={"include_usage": True}, **odd)
        told = [answer.json()["usage"]["cost"]]
        told += [event["usage"]["cost"] for event in events(stream) if event != "[DONE]" and event.get("usage")]
        assert answer.headers["x-headway-cost"] == repr(told[0]) == "0.038275104621"
        folder = gateway.config.journal_dir
        assert folder is not None
    rows = read(folder).requests
    assert [one.cost for one in rows] == told
    assert sums_of(rows, "tenant")["alpha"].cost == sum(Decimal(repr(cost)) for cost in told)


def typed(stream: httpx.Response) -> list[dict[str, Any]]:
    """Return the typed events of a stream."""
    return [json.loads(one.partition("data: ")[2]) for one in stream.text.split("\n\n") if one]


@pytest.mark.parametrize("stream", [False, True])
def test_other_apis_have_the_cost_in_their_usage(serve: Serve, stream: bool) -> None:
    with serve(prices=PRICES) as gateway:
        asked = {"model": "smollm2", "max_tokens": 8, "messages": SAY, "stream": stream}
        message = gateway.post(asked, "/v1/messages")
        told = typed(message)[-2:-1] if stream else [message.json()]
        asked = {"model": "smollm2", "max_output_tokens": 8, "input": "Say something.", "stream": stream}
        response = gateway.post(asked, "/v1/responses")
        told.append(typed(response)[-1]["response"] if stream else response.json())
        told.append(gateway.get(f"/v1/responses/{told[-1]['id']}").json())
        for usage in (one["usage"] for one in told):
            assert usage["cost"] == pytest.approx(PRICE.units(usage["input_tokens"], usage["output_tokens"]))
        assert "x-headway-cost" in message.headers or stream


def test_answers_that_are_fetched_later_have_their_cost(serve: Serve) -> None:
    with serve(prices=PRICES) as gateway:
        chat = gateway.post(gateway.chat(background=True)).json()["id"]
        response = {"model": "smollm2", "max_output_tokens": 8, "input": "Say something.", "background": True}
        other = gateway.post(response, "/v1/responses").json()["id"]
        until(lambda: all(state == "done" for state, _ in gateway.jobs().values()))
        told = [gateway.get(f"/v1/responses/{id}").json() for id in (chat, other)]
        usages = [one["response"]["usage"] for one in told]
        assert [one["usage"]["cost"] for one in told] == [one["cost"] for one in usages]
        file = ended(gateway, begin(gateway, [line("a")]))["output_file_id"]
        usages += [one["response"]["body"]["usage"] for one in content(gateway, file)]
        assert len(usages) == 3
        for usage in usages:
            assert usage["cost"] == pytest.approx(PRICE.units(usage["prompt_tokens"], usage["completion_tokens"]))


def test_a_client_that_leaves_pays_for_what_it_got(serve: Serve) -> None:
    one = key(Budget("day", tokens=10_000))
    with serve(keys=(one,)) as gateway:
        body = gateway.chat(stream=True, max_tokens=100, **fakes(tokens=100, delay=0.05))
        with WEB.stream("POST", gateway.url + CHAT, json=body, headers=by(one)) as answer:
            assert next(answer.iter_bytes())
        (count,) = settled(gateway).values()
        assert 0 < count < 100, "its prompt and some tokens"


def test_a_request_that_fails_before_its_first_token_costs_nothing(serve: Serve) -> None:
    one = key(Budget("day", tokens=10_000))
    with serve(keys=(one,)) as gateway:
        assert ask(gateway, one, **fakes(end="500")).status_code == 500
        assert [*settled(gateway).values()] == [0.0]


def test_speech_without_usage_costs_all_that_it_may(serve: Serve) -> None:
    one = key(Budget("day", tokens=10_000))
    with serve(keys=(one,), prices=PRICES) as gateway:
        form = {"model": "smollm2", "max_completion_tokens": "40"}
        answer = gateway.post(None, "/v1/audio/transcriptions", files={"file": b"x"}, data=form, headers=by(one))
        assert answer.status_code == 200
        assert float(answer.headers["x-headway-cost"]) >= PRICE.units(0, 40)
        assert next(iter(settled(gateway).values())) > 40
