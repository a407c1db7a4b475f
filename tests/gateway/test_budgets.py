"""Prices and budgets: what a request costs, who pays, and what happens when a budget has no room."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headway.cli.main import app
from headway.config import Broker, Budget, Config, Engine, Key, Postgres, Price, Server, Sqlite, Tier, parse, write
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.gateway.apis.state import AppState
from headway.gateway.bill import (
    Bill,
    Used,
    accounts_of,
    bill_of,
    priced,
    reserved_in,
    unused_by,
    window,
    with_bill,
    without_promises,
)
from headway.gateway.reload import Reload
from headway.store.journal.reader import read
from headway.store.journal.rows import RequestRow
from headway.store.queue.memory import MemoryBroker
from headway.store.queue.port import AccountSpent, Job
from headway.types import Request, Slo
from headway.whatif.journal.costs import sums_of
from tests.gateway.batches import begin, content, ended, line
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, DEAD, OPERATOR, SAY, WEB, Fake, Gateway, configuration, serving, until
from tests.gateway.test_cli import headway
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import events, fakes
from tests.helpers import postgres
from tests.helpers.journal_rows import JournalReader, written
from tests.helpers.journal_rows import request as row

PRICE = Price(prompt=1.0, answer=10.0, cached=0.5)
PRICES = {"smollm2": PRICE}
NOON = datetime(2026, 12, 31, 12, 30, tzinfo=UTC)


def key(*budgets: Budget, **fields: Any) -> Key:
    return Key("sk-alpha-123", "alpha", name="first", budgets=budgets, **fields)


def by(one: Key) -> dict[str, str]:
    return {"authorization": f"Bearer {one.key}"}


def ask(gateway: Gateway, one: Key, **fields: Any) -> httpx.Response:
    return gateway.post(gateway.chat(**fields), headers=by(one))


def used(gateway: Gateway) -> dict[str, float]:
    """Return what is counted in each account."""
    with closing(sqlite3.connect(f"file:{gateway.config.broker.sqlite.path}?mode=ro", uri=True)) as db:
        return dict(db.execute("SELECT account, sum(units) FROM spent GROUP BY account"))


def settled(gateway: Gateway) -> dict[str, float]:
    """Wait until no request is open, and return what is counted in each account."""
    until(lambda: all(state != "open" for state, _ in gateway.jobs().values()))
    return used(gateway)


# ---- windows and accounts


@pytest.mark.parametrize(
    ("per", "begin", "end"),
    [
        ("day", datetime(2026, 12, 31, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)),
        ("month", datetime(2026, 12, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_day_and_a_month_are_those_of_utc(per: Any, begin: datetime, end: datetime) -> None:
    assert window(per, NOON) == (begin, end)


@given(st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1)))
def test_an_instant_is_in_its_window_and_its_end_begins_the_next(instant: datetime) -> None:
    now = instant.replace(tzinfo=UTC)
    for per in ("day", "month"):
        begin, end = window(per, now)  # type: ignore[arg-type]
        assert begin <= now < end
        assert window(per, end)[0] == end  # type: ignore[arg-type]
        assert timedelta(hours=24) <= end - begin <= timedelta(days=31)


def test_the_most_that_a_request_may_cost_counts_in_each_account() -> None:
    request = Request("a", "m", 1_000, 100, 0.0, tenant="alpha", places=3)
    budgets = (Budget("day", tokens=5000), Budget("day", tokens=4000, soft=True), Budget("month", cost=2.0))
    accounts = accounts_of(key(*budgets), request, PRICE, NOON)
    assert [(one.name, one.units) for one in accounts] == [
        ("budget of alpha: tokens per day", 1300.0),
        ("budget of alpha: cost per month", (1000 * 1 + 300 * 10) / 1e6),
    ]
    assert accounts[0].charge.most == pytest.approx(4000)
    del accounts[0].limits[0]
    assert accounts[0].charge.most == pytest.approx(5000)
    assert accounts_of(None, request, PRICE, NOON) == []


async def test_a_day_s_budget_begins_anew_with_the_next_day() -> None:
    """Also for a request that ends after its day, and beside a gateway whose clock is behind."""
    broker = MemoryBroker("a")
    await broker.renew(1e12)

    async def put(id: str, now: datetime) -> bool:
        request = Request(id, "m", 10, 50, 0.0, tenant="alpha")
        accounts = accounts_of(key(Budget("day", tokens=100)), request, None, now)
        try:
            await broker.put(Job(id, "alpha", CHAT, b"", "{}", 0.0), [one.charge for one in accounts])
        except AccountSpent:
            return False
        return True

    before, after = NOON.replace(hour=23, minute=59), NOON + timedelta(hours=12)
    name = "budget of alpha: tokens per day"
    assert [await put("a", NOON), await put("b", before)] == [True, False]
    assert await put("c", after), "the next day"
    assert await broker.done("a", None, 1.0, {name: 50.0})
    assert [await put("d", before), await put("e", after)] == [False, False], "c counts for both"
    assert await broker.done("c", None, 1.0, {name: 50.0})
    assert await put("f", after), "10 and 60 of 100"


def test_cached_tokens_have_their_own_price() -> None:
    assert PRICE.units(1_000_000, 0, 400_000) == 0.6 + 0.2
    assert Price(1.0, 2.0).units(1_000_000, 0, 400_000) == 1.0
    assert Bill().cost(Used(1, 1)) is None
    assert Bill(price=Price(0.1, 2.0)).cost(Used(3, 0)) == 3e-07, "rounded once, for all that tell it"


def test_a_job_keeps_its_bill() -> None:
    accounts = accounts_of(key(Budget("day", cost=1.0)), Request("a", "m", 10, 10, 0.0), PRICE, NOON)
    bill = Bill("first", PRICE, reserved_in(accounts), "cost per day")
    job = Job("a", "alpha", CHAT, b"", with_bill('{"model":"m"}', bill), 0.0)
    assert bill_of(job) == bill
    assert bill_of(replace(job, request='{"model":"m"}')) == Bill()
    assert unused_by(job) == {}, "what its client got is not known"
    assert unused_by(replace(job, background=True)) == {accounts[0].name: accounts[0].units}


def test_without_promises() -> None:
    request = Request("a", "m", 1, 1, 0.0, slo=Slo(ttft=1.0, tpot=0.1, line=True, share=0.9), drop=True)
    served = without_promises(request)
    assert served.slo.objective == "best_effort"
    assert not served.drop


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"per": "day"}, "needs either tokens or a cost"),
        ({"per": "day", "tokens": 1, "cost": 1.0}, "needs either tokens or a cost"),
        ({"per": "month", "cost": 1.0}, "has a budget by cost, but the model smollm2 has no price"),
    ],
)
def test_budgets_that_say_nothing(budget: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({"keys": [{"key": "sk-alpha-123", "tenant": "alpha", "budgets": [budget]}]})


def test_every_model_needs_a_price_where_a_budget_is_of_money() -> None:
    keys = [{"key": "sk-alpha-123", "tenant": "alpha", "budgets": [{"per": "day", "cost": 1.0}]}]
    price = {"prompt": 1, "answer": 2}
    parse({"keys": keys, "prices": {"smollm2": price}})
    parse({"keys": keys, "prices": {"any": price}, "engines": [{"url": "http://a"}]})
    with pytest.raises(ConfigError, match="the model other has no price"):
        parse({"keys": keys, "prices": {"smollm2": price}, "engines": [{}, {"model": "other"}]})
    with pytest.raises(ConfigError, match="the model MODEL has no price"):
        parse({"keys": keys, "engines": [{"url": "http://a"}]})


def test_a_budget_by_cost_serves_no_model_without_a_price(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    one = key(Budget("day", cost=1.0))
    with serve(keys=(one,), prices={"any": PRICE}) as gateway:
        until(lambda: "[prices.any]: no model or adapter has that name" in caplog.text)
        said = error(ask(gateway, one), 403)
        assert (said["code"], "[prices.smollm2]" in said["message"]) == ("no_price", True)
        assert gateway.jobs() == {}


# ---- costs


@pytest.mark.parametrize("wrong", [-1, "0.15", None])
def test_a_price_that_is_wrong_is_named(wrong: object) -> None:
    price = {"answer": 2.0} if wrong is None else {"prompt": wrong, "answer": 2.0}
    with pytest.raises(ConfigError, match=r"prices.smollm2.prompt"):
        parse({"prices": {"smollm2": price}})


def test_what_is_more_than_the_whole_budget_need_not_wait() -> None:
    (account,) = accounts_of(
        key(Budget("day", tokens=100)), Request("a", "m", 10, 500, 0.0, tenant="alpha"), None, NOON
    )
    assert "smaller max_tokens: it is more than the whole budget" in account.refusal(0.0, NOON).hint


def test_prices_are_read_again_on_sighup(fake: Fake, tmp_path: Path) -> None:
    file, dear = tmp_path / "headway.toml", replace(PRICE, answer=10 * PRICE.answer)

    def told() -> Config:
        return replace(configuration(tmp_path, fake.url), prices={"smollm2": PRICE})

    file.write_text(write(told()))
    with serving(told()) as gateway:

        async def read_again() -> None:
            again = Reload(file, AppState(gateway.inner))
            file.write_text(write(replace(told(), prices={"smollm2": dear})))
            await again.run()

        for price in (PRICE, dear):
            answer = gateway.post(gateway.chat(**fakes(prompt=30, tokens=5)))
            usage = answer.json()["usage"]
            cost = price.units(usage["prompt_tokens"], usage["completion_tokens"])
            assert float(answer.headers["x-headway-cost"]) == pytest.approx(cost)
            gateway.do(read_again())


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


def test_adding_the_cost_changes_nothing_else_in_an_answer() -> None:
    answer = b'{"a":1.0e2,"choices":[{"x":"\\u00e9","n":1e-05}],"usage":{"prompt_tokens":3,"details":{"b":null}}}'
    told = priced(answer, 0.5)
    assert told == answer.replace(b"null}}", b'null},"cost":0.5}')
    assert [priced(one, 0.5) for one in (b'{"text":"a"}', b'{"usage":null}')] == [b'{"text":"a"}', b'{"usage":null}']


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


# ---- budgets


def test_a_hard_budget_refuses_with_the_time_of_its_end(serve: Serve) -> None:
    one = key(Budget("day", tokens=150))
    with serve(keys=(one, Key("sk-beta-1234", "beta")), prices=PRICES) as gateway:
        first = ask(gateway, one, max_tokens=60, **fakes(tokens=8))
        assert first.status_code == 200
        spent = first.json()["usage"]["total_tokens"]
        assert [*settled(gateway).values()] == [spent], "what was not used is given back"
        refused = ask(gateway, one, max_tokens=150)
        said = error(refused, 429)
        assert said["code"] == "budget_spent"
        assert said["type"] == "insufficient_quota"
        assert f"budget of 150 tokens per day has {150 - spent} left" in said["message"]
        assert "keys.budgets" in said["message"]
        assert "UTC" in said["message"]
        wait, headers = int(refused.headers["retry-after"]), refused.headers
        assert 0 < wait <= 86_400
        assert headers["x-ratelimit-reset-tokens"] == f"{wait}s"
        assert headers["x-ratelimit-limit-tokens"] == "150"
        assert headers["x-headway-dropped-reason"] == "budget"
        assert headers["x-should-retry"] == "false"
        assert len(gateway.jobs()) == 1, "nothing was stored"
        assert [*used(gateway).values()] == [spent], "nothing was counted"
        assert ask(gateway, one, max_tokens=30).status_code == 200, "a smaller one has room"
        assert ask(gateway, Key("sk-beta-1234", "beta"), max_tokens=150).status_code == 200
        assert gateway.metric('headway_dropped_total{reason="budget",tenant="alpha"}') == 1


def test_what_was_not_used_is_given_back_before_the_answer_ends(serve: Serve) -> None:
    one = key(Budget("day", tokens=100_000))
    chat = {"model": "smollm2", "messages": SAY, "max_tokens": 50, **fakes(tokens=8)}
    response = {"model": "smollm2", "input": "hi", "max_output_tokens": 50, **fakes(tokens=8)}
    with serve(keys=(one,)) as gateway:
        spent = 0.0
        for path, body in ((CHAT, chat), ("/v1/messages", chat), ("/v1/responses", response)):
            for stream in (False, True) * 5:
                assert gateway.post(body | {"stream": stream}, path, headers=by(one)).status_code == 200
                (now,) = used(gateway).values()
                assert 8 < now - spent < 50, (path, stream)
                spent = now
        for path, body in ((CHAT, chat), ("/v1/responses", response)) * 3:
            assert gateway.post(body | fakes(end="400"), path, headers=by(one)).status_code == 400
            assert [*used(gateway).values()] == [spent]


@pytest.mark.usefixtures("own_state")
def test_what_was_not_used_is_available_at_another_gateway_at_once(tmp_path: Path, fake: Fake) -> None:
    address = postgres.fresh()
    broker = Broker(kind="postgres", postgres=Postgres(address.url, address.schema))
    one = key(Budget("day", tokens=2500))
    config = configuration(tmp_path, fake.url, broker=broker, keys=(one,))
    with serving(config) as first, serving(replace(config)) as second:
        for turn in range(20):
            fields = {"max_tokens": 1900, "stream": turn % 4 > 1, **fakes(tokens=8)}
            answer = ask((first, second)[turn % 2], one, **fields)
            assert answer.status_code == 200, answer.text


def test_a_budget_of_money(serve: Serve) -> None:
    one = key(Budget("month", cost=0.001))
    with serve(keys=(one,), prices=PRICES) as gateway:
        assert ask(gateway, one, max_tokens=50, **fakes(tokens=50)).status_code == 200
        (cost,) = settled(gateway).values()
        assert cost == pytest.approx(0.0005, rel=0.2)
        assert "cost per month" in error(ask(gateway, one, max_tokens=60), 429)["message"]


def test_requests_at_once_do_not_exceed_a_budget(serve: Serve) -> None:
    one = key(Budget("day", tokens=400))
    with serve(keys=(one,)) as gateway, ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda _: ask(gateway, one, max_tokens=20, **fakes(tokens=20)), range(40))]
        tokens = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert sum(tokens) <= 400
        assert [*settled(gateway).values()] == [sum(tokens)]


def test_beyond_a_soft_budget_requests_are_served_without_promises(serve: Serve) -> None:
    one = key(Budget("day", tokens=100, soft=True), Budget("day", tokens=1000))
    with serve(keys=(one,), classes={"default": Tier(), "chat": Tier(ttft_ms=5000.0)}) as gateway:
        first = ask(gateway, one, service_tier="chat", max_tokens=50)
        assert first.headers["x-headway-slo-ttft-ms"] == "5000"
        assert "x-headway-beyond-budget" not in first.headers
        second = ask(gateway, one, service_tier="chat", max_tokens=90)
        assert second.status_code == 200
        assert second.headers["x-headway-beyond-budget"] == "tokens per day"
        assert "x-headway-slo-ttft-ms" not in second.headers
        assert error(ask(gateway, one, max_tokens=1000), 429)["code"] == "budget_spent"
        folder = gateway.config.journal_dir
        settled(gateway)
    assert folder is not None
    assert [row.budget for row in read(folder).requests] == [None, "tokens per day"]
    said = subprocess.run(
        [sys.executable, "-m", "headway.cli", "explain", read(folder).requests[1].id, "--journal", str(folder)],
        capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "200"},
    ).stdout  # fmt: skip
    assert "budget of tokens per day had no room for it, so it was served without promises" in said


def test_background_work_and_batches_count(serve: Serve) -> None:
    one = key(Budget("day", tokens=1000))
    with serve(keys=(one,)) as gateway:
        assert ask(gateway, one, background=True, **fakes(tokens=8)).status_code == 202
        (first,) = settled(gateway).values()
        assert first > 8
        begin(gateway, [line("a", **fakes(tokens=8))], headers=by(one))
        until(lambda: len(gateway.jobs()) == 2)
        (both,) = settled(gateway).values()
        assert both > first + 8


def test_lines_of_a_batch_wait_for_budget_that_other_lines_give_back(serve: Serve) -> None:
    one = key(Budget("day", tokens=1000))
    with serve(keys=(one,)) as gateway:
        records = [line(f"{i}", max_tokens=600, **fakes(tokens=8)) for i in range(8)]
        batch = ended(gateway, begin(gateway, records, headers=by(one)), 30, headers=by(one))
        assert batch["request_counts"]["completed"] == 8


def test_what_is_reserved_for_a_cancelled_request_is_given_back(serve: Serve) -> None:
    one = key(Budget("day", tokens=1000))
    with serve(DEAD, ready=False, keys=(one,)) as gateway:
        id = ask(gateway, one, background=True, max_tokens=500).json()["id"]
        assert next(iter(used(gateway).values())) > 500
        assert ask(gateway, one, background=True, max_tokens=500).status_code == 429
        assert gateway.post(None, f"/v1/responses/{id}/cancel", headers=by(one)).status_code == 200
        assert [*settled(gateway).values()] == [0.0]
        assert ask(gateway, one, background=True, max_tokens=500).status_code == 202


def test_a_cancelled_request_that_no_gateway_holds_is_not_paid(serve: Serve) -> None:
    one = key(Budget("day", tokens=1000))
    with serve(DEAD, ready=False, keys=(one,)) as gateway:
        id = ask(gateway, one, background=True, max_tokens=500).json()["id"]
        gateway.do(gateway.inner.background.hand_over())
        assert gateway.post(None, f"/v1/responses/{id}/cancel", headers=by(one)).status_code == 200
        assert [*settled(gateway).values()] == [0.0]


def test_background_work_that_outlives_its_gateway_counts_once(fake: Fake, tmp_path: Path) -> None:
    one = key(Budget("day", tokens=1000))
    config = configuration(tmp_path, DEAD, keys=(one,), prices=PRICES)
    with serving(config, ready=False) as gateway:
        assert ask(gateway, one, background=True, max_tokens=500, **fakes(tokens=20)).status_code == 202
        (reserved,) = used(gateway).values()
        assert reserved > 500
    with serving(replace(config, engines=(replace(config.engines[0], url=fake.url),))) as gateway:
        (count,) = settled(gateway).values()
        assert 20 < count < 100
        assert gateway.newest()[0] == "done"
    folder = config.journal_dir
    assert folder is not None
    (row,) = read(folder).requests
    assert (row.key, row.paid_output) == ("first", 20)
    assert row.cost is not None


# ---- the report


def test_the_report_by_tenant_as_csv(tmp_path: Path) -> None:
    rows: list[RequestRow] = [
        row("a", tenant="=x, y", key="k", cost=1.5, paid_prompt=10, paid_cached=4, paid_output=5),
        row("b", tenant="z", app="chat", cost=None, paid_prompt=1, paid_output=1),
        *(row(f"c{i}", tenant="y", app="sums", cost=cost) for i, cost in enumerate((0.1, 0.2, 1e-6, 3e-7 * 3))),
    ]
    folder = written(JournalReader(requests=rows), tmp_path / "journal")

    def report(*options: str) -> Any:
        return CliRunner().invoke(app, ["report", "--journal", str(folder), "--since", "1970-01-01", *options])

    assert [*csv.reader(io.StringIO(report("--by", "tenant", "--csv").stdout))] == [
        ["tenant", "requests", "prompt_tokens", "cached_tokens", "answer_tokens", "cost"],
        ["'=x, y", "1", "10", "4", "5", "1.5"],
        ["y", "4", "0", "0", "0", "0.3000019"],
        ["z", "1", "1", "0", "1", "0"],
    ]
    found = json.loads(report("--by", "app", "--json").stdout)["rows"]
    told = {one["setting"]: one["ours"] for one in found if one["id"] == "paid.cost"}
    assert told == {"(none)": 1.5, "sums": 0.3000019, "chat": 0.0}
    assert "--by colour is unknown" in str(report("--by", "colour").exception)
    assert "Give --by" in str(report("--csv").exception)


# ---- two gateways that are killed


class Killable:
    """A gateway process on a queue that others share."""

    def __init__(self, folder: Path, name: str, fake: Fake, one: Key) -> None:
        self.port, self.folder = free_port(), folder
        self.file = folder / f"{name}.toml"
        config = Config(
            server=Server(port=self.port, operator_key="sk-operator-1"),
            engines=(Engine(url=fake.url, max_running=32),),
            broker=Broker(lease_seconds=2.0, sqlite=Sqlite(str(folder / "queue.sqlite"))),
            keys=(one,),
        )
        self.file.write_text(write(config))
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = headway("serve", "-c", str(self.file), folder=self.folder, stderr=subprocess.DEVNULL)

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return WEB.get(f"http://127.0.0.1:{self.port}/ready").status_code == 200
        return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def ask(self, one: Key, **fields: Any) -> int | None:
        """Return the tokens of an answer, 0 = the budget refused it, None = the gateway died."""
        body = {"model": "smollm2", "messages": SAY, "max_tokens": 20, **fields}
        try:
            answer = WEB.post(f"http://127.0.0.1:{self.port}{CHAT}", json=body, headers=by(one))
        except httpx.HTTPError:
            return None
        assert answer.status_code in (200, 429), answer.text
        return int(answer.json()["usage"]["total_tokens"]) if answer.status_code == 200 else 0


@pytest.mark.timeout(300)
def test_two_gateways_that_are_killed_do_not_exceed_a_budget(fake: Fake, tmp_path: Path) -> None:
    """What was answered, with what was being answered as a gateway was killed, is at most the budget."""
    most, one = 2000, key(Budget("day", tokens=2000))
    pair, tokens, lost = [Killable(tmp_path, name, fake, one) for name in "ab"], list[int](), 0
    try:
        for gateway in pair:
            gateway.start()
        for life in range(3):
            for gateway in pair:
                until(gateway.is_ready, 60)
            with ThreadPoolExecutor(8) as pool:
                asked = [
                    pool.submit(pair[i % 2].ask, one, **fakes(tokens=20, delay=0.02 if i >= 8 else 0.0))
                    for i in range(16)
                ]
                until(lambda: sum(one.done() for one in asked) >= 8, 30)  # noqa: B023
                victim = pair[life % 2]
                victim.kill()
                answers = [one.result() for one in asked]
            lost += answers.count(None)
            tokens += [count for count in answers if count]
            victim.start()
        assert lost, "some were being answered"
        until(victim.is_ready, 60)
        while (count := victim.ask(one, **fakes(tokens=20))) != 0:
            assert count is not None
            tokens.append(count)
        until(lambda: not _open(tmp_path), 30)
    finally:
        for gateway in pair:
            gateway.kill()
    with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as db:
        rows = db.execute("SELECT id, units FROM spent").fetchall()
    each, counted = max(tokens), sum(units for _, units in rows)
    assert 1 <= len(rows) <= 1 + lost, "a sum of those that ended, and those that were lost"
    assert sum(tokens) <= counted <= most
    assert counted <= sum(tokens) + lost * 2 * each, "those that were lost count with what was reserved"
    assert most - counted < 2 * each, "it was used up"


def _open(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "queue.sqlite")) as db:
        return int(db.execute("SELECT count(*) FROM jobs WHERE state = 'open'").fetchone()[0])
