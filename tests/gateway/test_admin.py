"""The administrators' page: tenants, keys and engines, and the endpoint of tenants; engines are FAKE."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from typer.testing import CliRunner

from headway import clock
from headway.cli.main import app
from headway.config import Budget, Key, Price, Tier, write
from headway.gateway.bill import window
from headway.gateway.watch.history import MOST_PAIRS
from headway.store.queue.keys import StoredKey
from tests.gateway.conftest import Serve
from tests.gateway.dashboard_pictures import ENGINES, KEYS, STORED, administered, create_keys, made_up, opened, spend
from tests.gateway.gateway import CLASSES, OPERATOR, Fake, Gateway, configuration, serving, until
from tests.gateway.test_agents import NODE
from tests.gateway.test_dashboard import CONTRASTS, FAULTS, NASTY
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import fakes

TENANTS = "/v1/headway/tenants"
AXE = NODE / "node_modules" / "axe-core" / "axe.min.js"
WIDTHS = pytest.mark.parametrize("width", [390, 1280])
PARTS = "#tenants", "#create", "#add", "#keys button >> nth=0"  # a table, and what opens forms
SMALL = """() => [...document.querySelectorAll("button, input:not([type=checkbox]), select, nav a")]
    .filter(one => one.checkVisibility() && one.getBoundingClientRect().height < 44).map(one => one.outerHTML)"""


def tenants(gateway: Gateway, query: str = "") -> dict[str, Any]:
    answer = gateway.get(f"{TENANTS}{query}", headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def by_name(gateway: Gateway, query: str = "") -> dict[str, Any]:
    return {one["id"]: one for one in tenants(gateway, query)["data"]}


# ---- the endpoint of tenants


def test_a_tenant_s_requests_limits_and_budgets(serve: Serve) -> None:
    budgets = (Budget("day", tokens=100_000), Budget("month", cost=5.0, soft=True), Budget("month", cost=9.0))
    keys = (
        Key("sk-alpha-123", "alpha", max_queued=7, requests_per_min=50, budgets=budgets),
        Key("sk-alpha-456", "alpha", max_queued=9, requests_per_min=60, budgets=(Budget("day", tokens=50_000),)),
    )
    classes = CLASSES | {"late": Tier(e2e_ms=0.001)}
    with serve(keys=keys, prices={"smollm2": Price(1.0, 10.0)}, classes=classes) as gateway:
        sender = {"authorization": "Bearer sk-alpha-123"}
        answer = gateway.post(gateway.chat(service_tier="late"), headers=sender)
        usage, cost = answer.json()["usage"], float(answer.headers["x-headway-cost"])
        alpha = until(lambda: (one := by_name(gateway)["alpha"])["window"]["answered"] and one)
        now = datetime.now(UTC)
        assert alpha["budgets"] == [
            {
                "unit": "tokens",
                "per": "day",
                "used": usage["total_tokens"],
                "soft": [],
                "hard": [50_000, 100_000],
                "resets_at": window("day", now)[1].timestamp(),
            },
            {
                "unit": "cost",
                "per": "month",
                "used": pytest.approx(cost),
                "soft": [5.0],
                "hard": [9.0],
                "resets_at": window("month", now)[1].timestamp(),
            },
        ]
        assert alpha["limits"] == {"max_queued": 9, "requests_per_min": 60, "tokens_per_min": None}
        assert (alpha["keys"], alpha["last_minute"]["requests"], alpha["waiting"], alpha["inside"]) == (2, 1, 0, 0)
        assert alpha["window"]["tokens_out"] == usage["completion_tokens"]
        assert (alpha["window"]["owed"], alpha["window"]["kept"]) == (1, 0)
        assert tenants(gateway, "?window=1h")["window_s"] == 3600
        assert error(gateway.get(f"{TENANTS}?window=1y", headers=OPERATOR), 400)["param"] == "window"


def test_budgets_count_for_all_gateways_of_a_store(tmp_path: Path, fake: Fake) -> None:
    key = Key("sk-alpha-123", "alpha", budgets=(Budget("day", tokens=1000),))
    config = configuration(tmp_path, fake.url, keys=(key,))
    with serving(config) as one, serving(replace(config)) as other:
        assert by_name(other)["alpha"]["budgets"][0]["used"] == 0
        answer = one.post(one.chat(**fakes()), headers={"authorization": "Bearer sk-alpha-123"})
        used = answer.json()["usage"]["total_tokens"]
        until(lambda: by_name(other)["alpha"]["budgets"][0]["used"] == used)
        assert by_name(other)["alpha"]["window"]["answered"] == 0, "of that gateway"


def test_of_many_tenants_those_with_requests_are_listed_and_the_others_summed(serve: Serve) -> None:
    keys = tuple(Key(f"sk-tenant-{number}", f"Tenant-{number}") for number in range(100))
    with serve(keys=keys) as gateway:
        for number in (98, 99):
            assert gateway.post(gateway.chat(), headers={"x-api-key": f"sk-tenant-{number}"}).status_code == 200
        until(lambda: all(one["window"]["answered"] for one in tenants(gateway)["data"][:2]))
        body = tenants(gateway)
        assert (len(body["data"]), body["others"]["tenants"]) == (64, 36)
        assert [one["id"] for one in body["data"][:3]] == ["Tenant-98", "Tenant-99", "Tenant-0"]
        assert [*by_name(gateway, "?name=tenant-9")] == ["Tenant-98", "Tenant-99", "Tenant-9"] + [
            f"Tenant-{number}" for number in range(90, 98)
        ]
        assert tenants(gateway, "?name=none")["data"] == []


def test_tenants_that_have_no_label_are_counted_with_the_others(serve: Serve) -> None:
    with serve(keys=tuple(Key(f"sk-tenant-{number}", f"Tenant-{number}") for number in range(70))) as gateway:

        async def answer() -> None:
            history = gateway.inner.metrics.history
            for number in range(70):
                history.answered(history.pair("default", f"Tenant-{number}"), 0.1, 0.01, 10, 0, 5)

        gateway.do(answer())
        body = tenants(gateway)
        assert {one["window"]["answered"] for one in body["data"]} == {1}
        assert (body["others"]["tenants"], body["others"]["window"]["tokens_in"]) == (6, 60)
        assert by_name(gateway, "?name=tenant-69")["Tenant-69"]["window"] is None


def test_a_tenant_of_whom_a_part_counts_with_the_others_has_no_figures(serve: Serve) -> None:
    with serve(keys=(Key("sk-alpha-123", "alpha"),)) as gateway:

        async def answer() -> None:
            history = gateway.inner.metrics.history
            for number in range(MOST_PAIRS + 2):  # of which the last two find no row
                history.answered(history.pair(f"class-{number}", "alpha"), 0.1, 0.01, 10, 0, 5)

        gateway.do(answer())
        body = tenants(gateway)
        assert [(one["id"], one["window"]) for one in body["data"]] == [("alpha", None)]
        assert body["others"]["window"]["answered"] == MOST_PAIRS + 2


def test_budgets_are_not_known_while_the_store_does_not_answer(serve: Serve) -> None:
    with serve(keys=(Key("sk-alpha-123", "alpha", budgets=(Budget("day", tokens=1000),)),)) as gateway:
        with closing(sqlite3.connect(gateway.config.broker.sqlite.path)) as db:
            db.execute("ALTER TABLE spent RENAME TO elsewhere")
        body = tenants(gateway)
        assert [(one["id"], one["budgets"]) for one in body["data"]] == [("alpha", None)]
        assert body["budgets_problem"].startswith("Budgets are not known: ")


def test_keys_are_searched_for(serve: Serve) -> None:
    with serve(keys=(Key("sk-alpha-123", "alpha"),), server={"stored_keys": True}, ready=False) as gateway:

        def found(query: str) -> tuple[list[str], dict[str, int]]:
            body = gateway.get(f"{STORED}?{query}", headers=OPERATOR).json()
            return [one["name"] or one["tenant"] for one in body["data"]], body["others"]

        keys = [
            StoredKey(f"{n:012}", b"%032d" % n, f'{{"tenant": "t", "name": "N{n}"}}', float(n), revoked=end)
            for n, end in ((1, None), (2, clock.now()), (3, None))
        ]
        gateway.do(gateway.inner.broker.put_keys(keys, 0.0))
        assert found("") == (["alpha", "N3", "N2", "N1"], {"found": 0, "hidden": 0})
        assert found("ended=false&limit=2") == (["alpha", "N3"], {"found": 1, "hidden": 1})
        assert found("name=n1") == found("name=HW-000000000001") == (["N1"], {"found": 0, "hidden": 3})
        for query in ("limit=0", "limit=x", "ended=maybe"):
            said = error(gateway.get(f"{STORED}?{query}", headers=OPERATOR), 400)
            assert said["param"] == query.partition("=")[0]


def test_keys_of_the_configuration_are_listed_without_their_texts(serve: Serve) -> None:
    with serve(keys=(Key("sk-alpha-123", "alpha", max_queued=7),), ready=False) as gateway:
        answer = gateway.get(STORED, headers=OPERATOR)
        (key,) = answer.json()["data"]
        assert (key["id"], key["name"], key["state"], key["max_queued"]) == (None, "alpha", "configured", 7)
        assert "sk-alpha" not in answer.text
        assert not answer.json()["stored_keys"]


def test_only_operators_may_ask(serve: Serve) -> None:
    with serve(keys=(Key("sk-alpha-123", "alpha"),), ready=False) as gateway:
        for path in (TENANTS, STORED, ENGINES):
            for headers in ({}, {"authorization": "Bearer sk-alpha-123"}):
                assert gateway.get(path, headers=headers).status_code == 401
    with serve(server={"operator_key": None}, ready=False) as gateway:
        assert error(gateway.get(TENANTS), 403)["code"] == "control_off"


# ---- a browser


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a past, budgets near their ends, names that are hostile or long, and requests inside."""
    long = Key("sk-long-1234", "a-tenant-with-a-long-name-" * 4, name="a long name of a key " * 4)
    with administered(tmp_path_factory.mktemp("admin"), Key("sk-nasty-123", NASTY, name=NASTY), long) as gateway:
        made_up(gateway, ("alpha", "beta", NASTY), 7200.0)
        spend(gateway, "alpha", KEYS[0].budgets[0], 0.85)
        spend(gateway, "alpha", KEYS[0].budgets[2], 0.5)
        spend(gateway, "beta", KEYS[1].budgets[0], 0.9995)
        create_keys(gateway)
        yield gateway


@pytest.fixture
def small(serve: Serve, others: list[Fake]) -> Iterator[Gateway]:
    """A gateway with two engines that accepts stored keys."""
    with serve(*(one.url for one in others), server={"stored_keys": True}) as gateway:
        until(gateway.all_up)
        yield gateway


def sign_in(page: Page, gateway: Gateway, width: int) -> None:
    """Open the page and sign in with the keyboard alone."""
    page.set_viewport_size({"width": width, "height": 844})
    page.clock.install()
    page.goto(f"{gateway.url}/admin")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("sk-operator-1")
    page.keyboard.press("Enter")
    expect(page.locator("#tenants-title")).to_be_focused()
    expect(page.locator("#engines tr")).not_to_have_count(0)


def wait_for_tables(page: Page) -> None:
    """Let the seconds pass after which the page asks for all but the keys again."""
    page.clock.fast_forward(5000)


def tab_to(page: Page, target: Locator) -> None:
    """Press Tab until an element has the focus."""
    expect(target).to_be_visible()
    for _ in range(60):
        page.keyboard.press("Tab")
        if target.evaluate("node => node === document.activeElement"):
            return
    raise AssertionError(f"{target} cannot be reached by Tab")


@WIDTHS
def test_a_key_is_created_used_and_revoked_by_the_keyboard_alone(page: Page, small: Gateway, width: int) -> None:
    sign_in(page, small, width)
    tab_to(page, page.locator("#create"))
    page.keyboard.press("Enter")
    expect(page.get_by_label("Tenant", exact=True)).to_be_focused()
    page.keyboard.type("beta")
    tab_to(page, page.get_by_label("Classes"))
    page.keyboard.type("gold")
    page.keyboard.press("Enter")
    classes = page.get_by_label("Classes")
    expect(classes).to_be_focused()
    expect(classes).to_have_attribute("aria-invalid", "true")
    expect(classes).to_have_accessible_description("with commas; none: all keys.0.classes in the body names the unknown"
        " class 'gold'. The classes are batch, chat, default.")  # fmt: skip
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("default, chat")
    tab_to(page, page.get_by_label("Queued requests"))
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    secret = page.locator("#field-text")
    expect(secret).to_be_focused()
    text = secret.input_value()
    sender = {"authorization": f"Bearer {text}"}
    assert small.post(small.chat(), headers=sender).status_code == 200
    page.keyboard.press("Escape")
    expect(page.locator("#dialog")).to_be_empty()
    expect(page.locator("#create")).to_be_focused()
    row = page.locator("#keys tr")
    expect(row).to_contain_text("beta")
    expect(row).to_contain_text("7 queued")
    expect(page.locator("#said")).to_contain_text("was created")
    assert text not in page.content()
    tab_to(page, row.get_by_role("button", name="Revoke"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#said")).to_contain_text("is revoked")
    expect(page.locator("#keys-title")).to_be_focused()
    assert small.post(small.chat(), headers=sender).status_code == 401
    page.get_by_label("Ended ones, too").check()
    expect(row).to_contain_text("revoked")


def test_a_key_is_rotated_and_its_text_copied(browser: Browser, page: Page, small: Gateway) -> None:
    body = {"tenant": "beta", "budgets": [{"per": "day", "tokens": 5000}]}
    old = small.post(body, STORED, headers=OPERATOR).json()["data"][0]
    sign_in(page, small, 1280)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=small.url)
    page.get_by_role("button", name=f"Rotate {old['prefix']}").click()
    page.get_by_label("Hours for which").fill("1")
    page.get_by_role("button", name="Rotate", exact=True).click()
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    new = page.evaluate("navigator.clipboard.readText()")
    page.get_by_role("button", name="Close").click()
    for text in (new, old["key"]):
        assert small.get("/v1/models", headers={"x-api-key": text}).status_code == 200
    expect(page.locator("#keys tr").filter(has_text=old["prefix"])).to_contain_text("in 60 min")
    expect(page.locator("#keys tr").filter(has_text=new[:10])).to_contain_text("5K tokens/day")


@pytest.fixture
def held(page: Page, small: Gateway) -> Route:
    """A request for a new key, held back on its way, whose form has been closed."""
    sign_in(page, small, 1280)
    sent = list[Route]()
    page.route("**/keys", lambda route: sent.append(route) if route.request.method == "POST" else route.continue_())
    page.click("#create")
    page.get_by_label("Tenant", exact=True).fill("beta")
    with page.expect_request("**/keys"):
        page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.locator("#dialog")).to_be_hidden()
    return sent[0]


def test_a_form_that_is_closed_while_it_is_sent_still_shows_the_key(page: Page, small: Gateway, held: Route) -> None:
    held.continue_()
    text = page.locator("#field-text").input_value()
    assert small.get("/v1/models", headers={"x-api-key": text}).status_code == 200


def test_the_text_of_a_new_key_waits_for_an_open_form_and_outlives_a_refusal(page: Page, held: Route) -> None:
    page.click("#add")
    page.get_by_label("Model").fill("half a name")
    held.continue_()
    expect(page.locator("#said")).to_contain_text("was created")
    expect(page.get_by_label("Model")).to_have_value("half a name")
    page.keyboard.press("Escape")
    expect(page.locator("#field-text")).to_be_visible()
    refusal = {"error": {"message": "No.", "code": "invalid_api_key"}}
    page.route("**/engines", lambda route: route.fulfill(status=401, json=refusal))
    expect(page.locator("#asks")).to_be_visible()
    expect(page.locator("#field-text")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#key")).to_be_focused()


def answering(page: Page, path: str, body: dict[str, Any]) -> None:
    """Let the page get an answer that begins with fields of `body`, instead of those of the gateway."""
    page.route(f"**/{path}*", lambda route: route.fulfill(json=route.fetch().json() | body))


def test_what_a_budget_with_several_limits_says(page: Page, full: Gateway) -> None:
    one = {"unit": "tokens", "per": "day", "soft": [], "hard": [50, 100], "resets_at": clock.now() + 3600}
    alpha = by_name(full)["alpha"]
    said = {
        60: "of keys with the limit 50: spent: requests are refused",
        85: "near its limitof keys with the limit 50: spent",
        100: "monthspent: requests are refused",
    }
    sign_in(page, full, 1280)
    for used, text in said.items():
        budgets = [one | {"used": used, "per": "month"}]
        answering(page, "tenants", {"data": [alpha | {"budgets": budgets}], "budgets_problem": None})
        wait_for_tables(page)
        expect(page.locator("#tenants")).to_contain_text(text)
    answering(page, "tenants", {"data": [alpha | {"budgets": None}], "budgets_problem": "Budgets are not known: why."})
    wait_for_tables(page)
    expect(page.locator("#tenants")).to_contain_text("not known")
    expect(page.locator("#tenants-problem")).to_have_text("Budgets are not known: why.")


def test_the_latest_error_of_an_engine_is_shown(page: Page, full: Gateway) -> None:
    sign_in(page, full, 1280)
    expect(page.get_by_role("button", name="Why failed e1")).to_be_visible()
    data = full.get(ENGINES, headers=OPERATOR).json()["data"]
    with page.expect_response("**/engines"):
        answering(page, "engines", {"data": [one | {"error": one["error"] and "A later one."} for one in data]})
        wait_for_tables(page)
    page.wait_for_timeout(100)
    page.get_by_role("button", name="Why failed e1").click()
    expect(page.locator("#dialog-text")).to_have_text("A later one.")


def test_a_part_that_is_not_answered_is_marked_and_the_others_go_on(page: Page, small: Gateway) -> None:
    sign_in(page, small, 1280)
    page.route("**/tenants*", lambda _: None)  # it hangs
    wait_for_tables(page)
    expect(page.locator("#tenants-problem")).to_contain_text("The gateway does not answer.", timeout=20_000)
    assert small.post({}, f"{ENGINES}/e1/drain", headers=OPERATOR).status_code == 202
    wait_for_tables(page)
    expect(page.locator("#engines")).to_contain_text("drained")
    expect(page.locator("#engines-problem")).to_be_empty()


def test_without_a_key_one_request_is_refused(page: Page, small: Gateway) -> None:
    refused = list[str]()
    page.on("response", lambda one: refused.append(one.url) if one.status == 401 else None)
    page.goto(f"{small.url}/admin")
    expect(page.locator("#key")).to_be_focused()
    page.wait_for_load_state("networkidle")
    assert len(refused) == 1
    assert page.locator("#said").evaluate("node => getComputedStyle(node).display") != "none", "it is a live region"


def test_of_many_keys_some_are_shown_and_the_others_found(page: Page, small: Gateway, tmp_path: Path) -> None:
    keys = [StoredKey(f"{number:012}", b"%032d" % number, f'{{"tenant": "t{number}"}}', 1.0) for number in range(130)]
    small.do(small.inner.broker.put_keys(keys, 0.0))
    sign_in(page, small, 1280)
    expect(page.locator("#keys tr")).to_have_count(100)
    expect(page.locator("#keys-more")).to_contain_text("30 more: search for them.")
    page.get_by_label("Find a key").fill("T129")
    expect(page.locator("#keys tr")).to_have_count(1)
    expect(page.locator("#keys-more")).to_have_text("Not shown: 129 keys.")
    (tmp_path / "headway.toml").write_text(write(small.config))
    result = CliRunner().invoke(app, ["key", "list", "-c", str(tmp_path / "headway.toml"), "--json"])
    assert len(json.loads(result.stdout)) == 130


@WIDTHS
def test_engines_are_added_drained_and_removed(page: Page, small: Gateway, fake: Fake, width: int) -> None:
    sign_in(page, small, width)
    page.click("#add")
    page.get_by_label("Address").fill(fake.url)
    page.get_by_label("Name", exact=True).fill("e1")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_label("Name", exact=True)).to_have_accessible_description(
        "none: the next free of e0, e1, ... There is an engine e1 already. Choose another id, or leave it out."
    )
    page.get_by_label("Name", exact=True).fill("third")
    page.get_by_label("Further settings").fill("[1]")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_label("Further settings")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Further settings").fill('{"max_running": 4}')
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator("#said")).to_contain_text("Added: third.")
    third = page.locator("#engines tr").filter(has_text="third")
    expect(third).to_contain_text("up")
    page.get_by_role("button", name="Drain e1").click()
    page.get_by_role("button", name="Drain", exact=True).click()
    second = page.locator("#engines tr").filter(has_text="e1")
    expect(second).to_contain_text("drained")
    page.get_by_role("button", name="Use again e1").click()
    page.get_by_role("button", name="Use again", exact=True).click()
    expect(second).to_contain_text("up")
    page.get_by_role("button", name="Remove third").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Remove third")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Remove", exact=True).click()
    expect(page.locator("#engines tr")).to_have_count(2)
    expect(page.locator("#engines-title")).to_be_focused()


def test_an_engine_whose_work_would_wait_is_drained_by_force_only(page: Page, serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url) as gateway, ThreadPoolExecutor(1) as pool:
        mortal.stop()
        until(lambda: gateway.get("/ready").status_code == 503, 20)
        pool.submit(gateway.post, gateway.chat(), timeout=30)
        until(lambda: gateway.controller.queued == 1)
        sign_in(page, gateway, 1280)
        page.get_by_role("button", name="Drain e0").click()
        page.get_by_role("button", name="Drain", exact=True).click()
        expect(page.get_by_role("alert").filter(has_text="which no other engine has")).to_be_visible()
        page.get_by_label("Also if requests wait").check()
        page.get_by_role("button", name="Drain", exact=True).click()
        expect(page.locator("#engines tr")).to_contain_text("drained")
        assert gateway.post({"engines": ["e0"]}, f"{ENGINES}/roll", headers=OPERATOR).status_code == 202
        mortal.start()


@WIDTHS
def test_tenants_near_their_budgets_and_names_that_are_markup(browser: Browser, full: Gateway, width: int) -> None:
    with opened(browser, full, (width, 844), query="admin") as page:
        row = page.locator("#tenants tr")
        alpha, beta = (row.filter(has=page.locator("th", has_text=name)) for name in ("alpha", "beta"))
        expect(alpha).to_contain_text("tokens 1.7M of 2M today")
        expect(alpha).to_contain_text("near its limit")
        expect(alpha).to_contain_text("cost 25 of 50 this month")
        expect(alpha).to_contain_text("soft limit at 40")
        expect(alpha).to_contain_text("of 200")
        expect(beta).to_contain_text("nearly spent: most requests are refused")
        expect(row.filter(has_text=NASTY)).to_have_count(1)
        expect(page.locator("#keys tr").filter(has_text=NASTY)).to_have_count(1)
        assert page.title() == "Headway: administration"
        assert page.locator("main img").count() == 0
        page.fill("#find-tenant", "BET")
        expect(row).to_have_count(1)
        page.fill("#find-tenant", "")
        page.select_option("#window", "1h")
        expect(alpha).to_contain_text("% of")
        expect(page.locator("#engines")).to_contain_text("drained")
        page.get_by_role("button", name="Why failed e1").click()
        expect(page.locator("#dialog-text")).not_to_be_empty()


def test_without_rights_nothing_is_shown(page: Page, full: Gateway) -> None:
    page.goto(f"{full.url}/admin")
    expect(page.locator("#asks")).to_contain_text("Enter the operator's key (server.operator_key)")
    expect(page.locator("#why")).to_be_empty()
    for key in ("wrong-key-123", "sk-alpha-123"):
        page.fill("#key", key)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("#why")).to_contain_text("This key was not accepted.")
        expect(page.locator(".part")).to_have_count(3)
        expect(page.locator(".part:visible")).to_have_count(0)
        assert page.locator("tbody tr").count() == 0
    page.fill("#key", "sk-operator-1")
    page.keyboard.press("Enter")
    expect(page.locator("#engines tr")).to_have_count(3)
    page.get_by_role("link", name="Overview").click()
    expect(page.locator("#state")).to_contain_text("live")
    page.get_by_role("link", name="Administration").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#asks")).to_be_visible()
    expect(page.locator(".part:visible")).to_have_count(0)


def test_where_no_key_is_configured_the_page_says_so(page: Page, serve: Serve) -> None:
    with serve(server={"operator_key": None}) as gateway:
        page.goto(f"{gateway.url}/admin")
        expect(page.locator("#why")).to_contain_text("Set server.operator_key")


def test_a_gateway_that_is_gone_leaves_what_was_shown(page: Page, serve: Serve) -> None:
    with serve() as gateway:
        sign_in(page, gateway, 1280)
    wait_for_tables(page)
    expect(page.locator("#engines-problem")).to_contain_text("This is not current (last answer: ")
    expect(page.locator("#engines tr")).to_have_count(1)


def parts(page: Page) -> Iterator[str]:
    """Yield for the page, then for its forms, one after the other."""
    yield PARTS[0]
    for opener in PARTS[1:]:
        page.locator(opener).click()
        expect(page.locator("#dialog form")).to_be_visible()
        yield opener
        page.keyboard.press("Escape")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1280])
def test_nothing_overlaps_is_cut_off_or_too_small(browser: Browser, full: Gateway, width: int, scheme: str) -> None:
    with opened(browser, full, (width, 900), scheme, "admin") as page:
        expect(page.locator("#keys tr")).to_have_count(len(KEYS) + 3)
        for opener in parts(page):
            assert page.evaluate(FAULTS) == [], opener
            if width == 360:
                assert page.evaluate(SMALL) == [], opener
        assert {name: ratio for name, ratio in page.evaluate(CONTRASTS).items() if ratio < 4.5} == {}


@pytest.mark.skipif(not AXE.exists(), reason="make clients has not installed axe-core (no npm?)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@WIDTHS
def test_axe_finds_nothing(browser: Browser, full: Gateway, width: int, scheme: str) -> None:
    with opened(browser, full, (width, 844), scheme, "admin") as page:
        expect(page.locator("#keys tr")).to_have_count(len(KEYS) + 3)
        page.evaluate(AXE.read_text())
        assert not {opener: found for opener in parts(page) if (found := violations(page))}
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(f"{full.url}/admin")
    expect(page.locator("#asks")).to_be_visible()
    page.evaluate(AXE.read_text())
    assert violations(page) == []
    page.close()


def violations(page: Page) -> list[Any]:
    """Return what axe-core finds, by its rules."""
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]


def test_the_focus_stays_while_tables_are_drawn_anew(page: Page, small: Gateway) -> None:
    sign_in(page, small, 1280)
    button = page.get_by_role("button", name="Remove e1")
    button.focus()
    assert small.post({}, f"{ENGINES}/e1/drain", headers=OPERATOR).status_code == 202
    wait_for_tables(page)
    expect(page.get_by_role("button", name="Use again e1")).to_be_visible()
    expect(button).to_be_focused()
