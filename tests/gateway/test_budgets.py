"""Budgets of tenants at gateways: refusals, what is given back, and two gateways that are killed."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.config import Broker, Budget, Key, Postgres, Price, Sqlite, Tier
from headway.store.journal.reader import read
from tests.gateway.batches import begin, ended, line
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, DEAD, SAY, WEB, Fake, Gateway, configuration, serving, until
from tests.gateway.test_postgres import start
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import fakes
from tests.helpers import postgres

PRICE = Price(prompt=1.0, answer=10.0, cached=0.5)
PRICES = {"smollm2": PRICE}


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
    words = ["explain", read(folder).requests[1].id, "--journal", str(folder)]
    said = CliRunner(env={"COLUMNS": "200"}).invoke(app, words).stdout
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


# ---- two gateways that are killed


def tokens_of(port: int, one: Key, **fields: Any) -> int | None:
    """Return the tokens of an answer, 0 = the budget refused it, None = the gateway died."""
    body = {"model": "smollm2", "messages": SAY, "max_tokens": 20, **fakes(tokens=20, **fields)}
    try:
        answer = WEB.post(f"http://127.0.0.1:{port}{CHAT}", json=body, headers=by(one))
    except httpx.HTTPError:
        return None
    assert answer.status_code in (200, 429), answer.text
    return int(answer.json()["usage"]["total_tokens"]) if answer.status_code == 200 else 0


@pytest.mark.timeout(300)
def test_two_gateways_that_are_killed_do_not_exceed_a_budget(fake: Fake, tmp_path: Path) -> None:
    """What was answered, with what was being answered as a gateway was killed, is at most the budget."""
    most, one = 2000, key(Budget("day", tokens=2000))
    broker = Broker(lease_seconds=2.0, sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    tokens, lost = list[int](), 0
    with ExitStack() as stack:
        begin = lambda name: start(stack, tmp_path / name, fake, broker, keys=(one,))  # noqa: E731
        pair = [begin(name) for name in "ab"]
        for life, name in enumerate("ab"):
            with ThreadPoolExecutor(8) as pool:
                asked = [
                    pool.submit(tokens_of, pair[i % 2].port, one, delay=0.02 if i >= 8 else 0.0) for i in range(16)
                ]
                until(lambda: sum(one.done() for one in asked) >= 8, 30)  # noqa: B023
                pair[life].process.kill()
                answers = [one.result() for one in asked]
            lost += answers.count(None)
            tokens += [count for count in answers if count]
            pair[life] = begin(name)
        assert lost, "some were being answered"
        while (count := tokens_of(pair[1].port, one)) != 0:
            assert count is not None
            tokens.append(count)
        until(lambda: not _open(tmp_path), 30)
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
