"""Prices, budgets and their accounts, without a gateway; what the report says of them."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headway.cli.main import app
from headway.config import Budget, Price, parse
from headway.errors import ConfigError
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
from headway.store.journal.rows import RequestRow
from headway.store.queue.memory import MemoryBroker
from headway.store.queue.port import AccountSpent, Job
from headway.types import Request, Slo
from tests.gateway.gateway import CHAT
from tests.gateway.test_budgets import PRICE, key
from tests.helpers.journal_rows import JournalReader, written
from tests.helpers.journal_rows import request as row

NOON = datetime(2026, 12, 31, 12, 30, tzinfo=UTC)

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


def test_adding_the_cost_changes_nothing_else_in_an_answer() -> None:
    answer = b'{"a":1.0e2,"choices":[{"x":"\\u00e9","n":1e-05}],"usage":{"prompt_tokens":3,"details":{"b":null}}}'
    told = priced(answer, 0.5)
    assert told == answer.replace(b"null}}", b'null},"cost":0.5}')
    assert [priced(one, 0.5) for one in (b'{"text":"a"}', b'{"usage":null}')] == [b'{"text":"a"}', b'{"usage":null}']


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
