"""The dashboard: what its events say, whom it lets look, what a browser makes of them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page, expect

from headway.config import Journal, Key, Tier
from headway.gateway.apis.dashboard.endpoints import Explainer
from headway.gateway.in_flight import InFlightRequest
from headway.gateway.watch.ends import Ended
from headway.gateway.watch.history import HistoryView, RatePair
from headway.gateway.watch.late import LateRequests, spans
from headway.types import Request, Slo
from tests.gateway.conftest import Serve
from tests.gateway.dashboard_pictures import busy, made_up, opened
from tests.gateway.gateway import CLASSES, OPERATOR, WEB, Fake, Gateway, until
from tests.gateway.test_journal import row

FAULTS, CONTRASTS = (Path(__file__).with_name(name).read_text() for name in ("readable.js", "contrasts.js"))
NASTY = '<img src=x onerror="document.title=1">'


def ended(id: str, by: float, *, promised: float = 1.0) -> tuple[InFlightRequest, float]:
    """Return a request that arrived at 100 and missed its end-to-end SLO by so many seconds, and its end."""
    request = Request(id, "m", 4, 8, 100.0, Slo(e2e=promised), tier="chat")
    one = InFlightRequest(request, "chat", None, engine_future=None)  # type: ignore[arg-type]
    return one, 100.0 + promised + by


# ---- the latest


@given(st.lists(st.integers(-10, 500).map(lambda tenths: tenths / 10), max_size=200))
def test_the_latest_are_kept(by: list[float]) -> None:
    late = LateRequests(RatePair)
    for number, seconds in enumerate(by):
        one, end = ended(f"r{number}", seconds)
        late.ended(Ended(one, end, "finished", 1))
    seen = [one.by for one in late.latest(HistoryView(), 160.0)]
    assert seen == pytest.approx(sorted((s for s in by if s > 1e-9), reverse=True)[:12], abs=1e-6)


def test_what_was_late_long_ago_is_not_listed() -> None:
    late = LateRequests(RatePair)
    one, end = ended("r0", 5.0)
    late.ended(Ended(one, end, "failed", 1))
    assert [found.id for found in late.latest(HistoryView(), end + 500)] == ["r0"]
    assert late.latest(HistoryView(), end + 700) == []
    assert [found.id for found in late.latest(HistoryView("1h"), end + 700)] == ["r0"]


def test_a_view_lists_its_own_even_if_others_were_later() -> None:
    late = LateRequests(RatePair)
    for number in range(40):
        one, end = ended(f"r{number}", 5.0 + number)
        one.request = replace(one.request, tier="code" if number else "chat")
        late.ended(Ended(one, end, "finished", 1))
    assert [found.id for found in late.latest(HistoryView(tier="chat"), end)] == ["r0"]
    assert len(late.latest(HistoryView(tier="code"), end)) == len(late.latest(HistoryView(), end)) == 12


def test_spans_add_up_to_the_whole_time() -> None:
    one, end = ended("r0", 9.0)
    one.sends, one.first_token = ((101.0, "e0"), (104.0, "e1")), 106.0
    assert spans(one, end) == (("queued", 1.0), ("in e0", 3.0), ("in e1", 2.0), ("answering", 4.0))


def test_the_target_that_was_missed_by_most_is_named() -> None:
    one, _ = ended("r0", 0.0)
    one.request = Request("r0", "m", 4, 8, 100.0, Slo(ttft=1.0, tpot=0.1), tier="chat")
    one.streams, one.first_token = True, 102.0
    late = LateRequests(RatePair)
    late.ended(Ended(one, 107.0, "finished", 11))
    found = late.latest(HistoryView(), 107.0)[0]
    assert (found.target, found.promised, found.by) == ("tpot", pytest.approx(1.0), pytest.approx(4.0))


# ---- events


@contextmanager
def live(gateway: Gateway, query: str = "", **more: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Open the stream of events and yield them."""
    with WEB.stream("GET", f"{gateway.url}/headway/live{query}", **more) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        yield (json.loads(line[6:]) for line in lines)


def test_a_question_for_the_head_of_the_events_ends(gateway: Gateway) -> None:
    answer = WEB.head(f"{gateway.url}/headway/live")
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")


def test_events_say_what_waits_and_what_was_late(gateway: Gateway) -> None:
    assert gateway.post(gateway.chat(), headers={"x-slo-e2e-ms": "0.001"}).status_code == 200
    unhurried = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "60000"}  # a cold machine may need seconds
    chat = gateway.chat(service_tier="chat", stream=True)
    assert gateway.post(chat, headers=unhurried).status_code == 200
    with live(gateway) as events:
        first = next(event for event in events if "chat" in event["attained"])  # counted after its last byte
        second = next(events)
    assert first["engines"]["e0"]["up"]
    assert first["engines"]["e0"]["kv"] == 0.0
    assert [first["engines"]["e0"][state] for state in ("computing", "paused", "waiting")] == [0, 0, 0]
    assert second["at"] > first["at"]
    assert set(first["lines"]) >= set(CLASSES)
    assert first["lines"]["chat"] == {"waiting": 0, "inside": 0, "oldest": 0.0}
    assert first["attained"]["chat"]["kept"] == first["attained"]["chat"]["owed"] >= 1
    found = first["late"][0]
    assert (found["target"], found["outcome"]) == ("e2e", "finished")
    assert [state for state, _ in found["spans"]] == ["queued", "in e0", "answering"]
    assert sum(seconds for _, seconds in found["spans"]) == pytest.approx(found["by"] + found["promised"])


def test_events_show_a_view(gateway: Gateway) -> None:
    assert gateway.post(gateway.chat(service_tier="chat")).status_code == 200
    with live(gateway, "?window=24h&class=chat&tenant=default") as events:
        found = next(event for event in events if event["answered"])  # counted after its last byte
    assert (found["window_s"], list(found["lines"]), found["tenants"]) == (86400, ["chat"], ["default"])
    assert found["ttft"]["all"]["p99"] >= found["ttft"]["all"]["p50"] > 0
    with live(gateway, "?tenant=beta") as events:
        assert next(events)["answered"] == 0
    refused = gateway.get("/headway/live?window=5m")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "window")


def test_the_page_holds_nothing_and_loads_nothing(gateway: Gateway) -> None:
    page = gateway.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "smollm2" not in page.text
    assert not [
        word
        for word in ("http:", "https:", "src=", "@import")
        if word in page.text.replace("http://www.w3.org/2000/svg", "")
    ]


def test_only_operators_look_where_they_alone_may(serve: Serve) -> None:
    limits = {"operator_key": "sk-operator-1", "operator_only": True}
    with serve(ready=False, server=limits) as gateway:
        assert gateway.get("/").status_code == 200
        assert gateway.get("/headway/live").status_code == 401
        with live(gateway, headers=OPERATOR) as events:
            assert next(events)["recipe"]


def test_so_many_look_and_no_more(gateway: Gateway) -> None:
    with ExitStack() as viewers:
        for _ in range(32):
            next(viewers.enter_context(live(gateway)))
        refused = gateway.get("/headway/live")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_viewers")
        with live(gateway, headers=OPERATOR) as own:
            assert next(own), "the operator has places of its own"
    until(lambda: WEB.stream("GET", f"{gateway.url}/headway/live").__enter__().status_code == 200)


def test_who_looks_does_not_hold_up_the_end(serve: Serve) -> None:
    with serve(server={"drain_s": 60}) as gateway, live(gateway) as events:
        next(events)
        began = time.monotonic()
        gateway.server.should_exit = True
        assert list(events) is not None
    assert time.monotonic() - began < 50, "the stream ends with the gateway, not with the time for requests"


# ---- explain


def test_a_request_is_explained_as_the_command_does(gateway: Gateway) -> None:
    answer = gateway.post(gateway.chat(), headers={"x-slo-e2e-ms": "0.001"})
    id = answer.headers["x-request-id"]

    def told() -> httpx.Response:
        return gateway.get("/headway/explain", params={"id": id, "since": str(time.time() - 100)}, timeout=60)

    story = until(lambda: (got := told()).status_code == 200 and got.json(), 60)  # the journal is a bit late
    assert story["request"] == id
    assert "run" not in story, "paths of this machine are not for all"
    assert "against an SLO of" in story["verdict"]
    assert sum(story["seconds"].values()) == pytest.approx(story["latency"])
    assert all(span["because"] for span in story["timeline"])
    assert abs(story["began"] + story["arrival"] - time.time()) < 1000


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("", 400, "id"),
        ("id=x&since=then", 400, "since"),
        ("id=x&since=nan", 400, "since"),
        ("id=x&since=1e300", 400, "since"),
        ("id=" + 600 * "x", 400, "id"),
        ("id=--help", 404, "id"),
    ],
)
def test_what_cannot_be_explained_is_refused(gateway: Gateway, query: str, status: int, param: str) -> None:
    assert gateway.post(gateway.chat()).status_code == 200
    refused = gateway.get(f"/headway/explain?{query}", timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


def test_one_request_is_explained_at_a_time(tmp_path: Path) -> None:
    async def both() -> list[Any]:
        explainer = Explainer(tmp_path)
        return await asyncio.gather(*(explainer.story("x", time.time()) for _ in range(2)), return_exceptions=True)

    errors = asyncio.run(both())
    assert [getattr(error, "status", None) for error in errors] == [404, 503]


@pytest.mark.parametrize("only", [None, False])
def test_explanations_are_the_operator_s_where_there_are_keys(serve: Serve, only: bool | None) -> None:
    limits = {"operator_key": "sk-operator-1", "operator_only": only}
    with serve(ready=False, server=limits, keys=(Key("sk-alpha", "alpha"),)) as gateway:
        assert gateway.get("/headway/live?window=5m").status_code == (401 if only is None else 400)
        for headers in ({}, {"authorization": "Bearer sk-alpha"}):
            assert gateway.get("/headway/explain?id=x", headers=headers).status_code == 401
        assert gateway.get("/headway/explain", headers=OPERATOR).status_code == 400


def test_without_a_journal_nothing_is_explained(serve: Serve) -> None:
    with serve(ready=False, journal=Journal(dir="none")) as gateway:
        refused = gateway.get("/headway/explain?id=x")
        assert (refused.status_code, "journal.dir" in refused.json()["error"]["message"]) == (404, True)


# ---- a browser


def test_a_browser_shows_it(page: Page, serve: Serve) -> None:
    with serve(classes=CLASSES | {NASTY: Tier(e2e_ms=0.001)}) as gateway:
        assert gateway.post(gateway.chat(service_tier="chat")).status_code == 200
        assert gateway.post(gateway.chat(service_tier=NASTY)).status_code == 200
        page.goto(gateway.url)
        expect(page.locator("#state")).to_contain_text("live")
        expect(page.locator("#lines tr")).to_have_count(len(CLASSES) + 1)
        expect(page.locator("#engines tr")).to_contain_text("smollm2")
        expect(page.locator("#engines tr")).to_contain_text("0 of 32")
        expect(page.locator("#inside")).to_have_text("0 computing, 0 paused, 0 waiting in engines")
        expect(page.locator("#late tr").first).to_contain_text("queued")
        expect(page.locator("#late tr").first).to_contain_text(NASTY)
        expect(page.locator("#kept")).to_have_text("50.0 %")
        expect(page.locator("#zone")).to_contain_text("Times are in your time zone:")
        expect(page.locator("#cached")).to_be_empty()
        assert page.title() == "Headway"
    expect(page.locator("#state")).to_contain_text("not live")


def test_with_several_engines_the_tokens_found_in_caches_are_shown(page: Page, serve: Serve, stock: Fake) -> None:
    long = [{"role": "user", "content": "One more word. " * 100}]
    with serve(stock.url, stock.url) as gateway:
        ids = [gateway.post(gateway.chat(messages=long)).headers["x-request-id"] for _ in range(2)]
        first, second = (row(gateway, id) for id in ids)
        held = second.prompt_tokens // 128 * 128  # its blocks have 128 tokens
        assert (first.found, second.found, first.instance) == (0, held, second.instance)
        share = 100 * held / (first.prompt_tokens + second.prompt_tokens)
        page.goto(gateway.url)
        expect(page.locator("#cached")).to_have_text(f"{share:.1f} % of prompt tokens in the window were cached")
        page.fill("#id", second.id)
        page.keyboard.press("Enter")
        went = f"It went to {second.instance}, which held {held} of its {second.prompt_tokens} prompt tokens; it waited"
        expect(page.locator("#about")).to_contain_text(went, timeout=60_000)


def test_a_browser_asks_for_the_operator_s_key(page: Page, serve: Serve) -> None:
    with serve(ready=False, server={"operator_key": "sk-operator-1", "operator_only": True}) as gateway:
        page.goto(gateway.url)
        expect(page.locator("#asks")).to_be_visible()
        page.fill("#key", "sk-operator-1")
        page.click("button")
        expect(page.locator("#state")).to_contain_text("live")
        expect(page.locator("#engines tr")).to_have_count(1)
        expect(page.locator("#asks")).to_be_hidden()


def test_the_address_keeps_the_view(page: Page, gateway: Gateway) -> None:
    assert gateway.post(gateway.chat(service_tier="chat")).status_code == 200
    page.goto(f"{gateway.url}/?window=1h&class=chat")
    expect(page.locator("#state")).to_contain_text("live")
    expect(page.locator("#lines tr")).to_have_count(1)
    expect(page.locator("#class")).to_have_value("chat")
    page.select_option("#window", "24h")
    page.select_option("#class", "batch")
    expect(page.locator("#lines tr")).to_contain_text("batch")
    expect(page.locator(".tile .window").first).to_have_text(", last 24 hours")
    assert page.url.endswith("/?window=24h&class=batch")
    page.reload()
    expect(page.locator("#lines tr")).to_contain_text("batch")


def test_an_id_opens_its_story_by_the_keyboard(page: Page, serve: Serve) -> None:
    with serve(classes=CLASSES | {"late": Tier(e2e_ms=0.001)}) as gateway:
        id = gateway.post(gateway.chat(service_tier="late")).headers["x-request-id"]
        until(lambda: gateway.get("/headway/explain", params={"id": id}, timeout=60).status_code == 200, 60)
        page.goto(gateway.url)
        button = page.locator("#late button")
        expect(button).to_have_text(id)
        button.focus()
        page.wait_for_timeout(2500)  # two more snapshots
        expect(button).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#verdict")).to_contain_text("against an SLO of", timeout=60_000)
        expect(page.locator("#states tr").first).to_contain_text(re.compile("outside|unseen"))  # a moment may be either
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate(FAULTS) == []
        page.keyboard.press("Escape")
        expect(page.locator("#story")).to_be_hidden()
        expect(button).to_be_focused()
        page.fill("#id", "none")
        page.keyboard.press("Enter")
        expect(page.locator("#verdict")).to_contain_text("'none' is not among", timeout=60_000)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with 20 classes, long names, a past, and an engine that is down."""
    names = [f"class-{number}" for number in range(18)] + ["a-very-long-name-" * 6]
    classes = {"default": Tier()} | {name: Tier(ttft_ms=1500.0, tpot_ms=150.0) for name in names}
    with busy(tmp_path_factory.mktemp("crowded"), classes) as running:
        made_up(running, ("alpha", "a-tenant-with-a-long-name-" * 6), 7200.0)
        yield running


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_nothing_overlaps_or_is_cut_off(browser: Browser, crowded: Gateway, width: int, scheme: str) -> None:
    for query in ("?window=24h", "?class=class-1&window=1h", "?class=none"):
        with opened(browser, crowded, (width, 900), scheme, query) as page:
            assert page.evaluate(FAULTS) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_empty_page_is_readable(browser: Browser, serve: Serve, width: int) -> None:
    with serve() as gateway, opened(browser, gateway, (width, 900)) as page:
        assert page.evaluate(FAULTS) == []
        expect(page.locator("#chart-kept")).to_contain_text("nothing in this time")
        expect(page.locator("#none")).to_be_visible()


def test_text_stands_out_and_charts_say_what_they_show(browser: Browser, crowded: Gateway) -> None:
    for scheme in ("light", "dark"):
        with opened(browser, crowded, (1280, 900), scheme) as page:
            found = page.evaluate(CONTRASTS)
            assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
            about = [chart.get_attribute("aria-label") or "" for chart in page.locator("svg[role=img]").all()]
            assert len(about) == 4
            assert all("nothing in this time" not in text and ": " in text for text in about)
            for _ in ("Overview", "Administration", "window"):
                page.keyboard.press("Tab")
            expect(page.locator("#window")).to_be_focused()
            style = "node => getComputedStyle(node).outlineStyle"
            assert page.locator("#window").evaluate(style) == "solid"
