"""Pictures of the dashboard: `python -m tests.gateway.dashboard_pictures docs` writes those of the docs.

They show gateways in front of FAKE engines, one of which is down, with made-up figures of the last day.
"""

from __future__ import annotations

import math
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from headway import clock
from headway.config import BATCH, Budget, Key, Price, Tier
from headway.gateway.bill import Unit, limit_of, open_accounts
from headway.gateway.in_flight import InFlightRequest
from headway.gateway.watch.ends import Ended
from headway.gateway.watch.history import History
from headway.types import Request, Slo
from tests.gateway.gateway import OPERATOR, WEB, Fake, Gateway, configuration, serving, until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CLASSES = {
    "default": Tier(),
    "chat": Tier(ttft_ms=1500.0, tpot_ms=150.0),
    "code": Tier(e2e_ms=20_000.0),
    "batch": BATCH,
}
KEYS = (
    Key(
        "sk-alpha-123", "alpha", name="alpha-web", max_queued=200, requests_per_min=600, tokens_per_min=100_000,
        budgets=(Budget("day", tokens=2_000_000), Budget("month", cost=40.0, soft=True), Budget("month", cost=50.0)),
    ),
    Key("sk-beta-1234", "beta", name="beta-batch", classes=("default", "batch"), budgets=(Budget("month", cost=20.0),)),
    Key("sk-gamma-123", "gamma"),
)  # fmt: skip
ENGINES, STORED = "/v1/headway/engines", "/v1/headway/keys"
_DAY, _STEP = 86_400.0, 10.0
_SIZES = {"wide": (1280, 1000), "phone": (390, 844)}


def made_up(gateway: Gateway, tenants: tuple[str, ...] = ("alpha", "beta"), seconds: float = _DAY) -> None:
    """Give a gateway a past of so many seconds, on its own event loop."""

    async def fill() -> None:
        inner, now, chance = gateway.inner, clock.now(), random.Random(1)
        history = History(now - seconds)
        at = now - seconds
        while at < clock.now():
            load = 1 + 0.6 * math.sin(at / 900) + 0.3 * math.sin(at / 47)
            for name, tier in inner.config.classes.items():
                for tenant in tenants:
                    pair = history.pair(name, tenant)
                    for _ in range(chance.randrange(4)):
                        ttft, tpot = (
                            0.3 * load * chance.lognormvariate(0, 0.5),
                            0.05 * load * chance.lognormvariate(0, 0.3),
                        )
                        prompt = chance.randrange(50, 2000)
                        history.answered(pair, ttft, tpot, prompt, 2 * prompt // 3, chance.randrange(20, 400))
                        if tier.slo.objective != "best_effort":
                            history.judged(pair, chance.random() > 0.02 * load**2)
            history.note(at)
            at += _STEP
        history.note(clock.now())
        inner.metrics.history.__dict__.update(history.__dict__)
        for number, (name, tenant) in enumerate((c, t) for c in inner.config.classes for t in tenants):
            late = Request(
                f"hw-{number:016x}", "smollm2", 400, 200, now - 60 - 9 * number, Slo(ttft=1.5), tier=name, tenant=tenant
            )
            one = InFlightRequest(late, "chat", None, engine_future=None)  # type: ignore[arg-type]
            one.streams, one.first_token = True, late.arrival + 2 + number
            one.sends = ((late.arrival + 1.2 + number / 2, "e0"),)
            inner.late.ended(Ended(one, late.arrival + 5 + number, "finished", 40))

    gateway.do(fill())


@contextmanager
def opened(
    browser: Browser, gateway: Gateway, size: tuple[int, int], scheme: str = "light", query: str = ""
) -> Iterator[Page]:
    """Open the page of a gateway at a size, and wait until it is live."""
    width, height = size
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        timezone_id="Europe/Berlin",  # type: ignore[arg-type]
    )
    page.add_init_script("sessionStorage.setItem('headway-key', 'sk-operator-1')")
    page.goto(f"{gateway.url}/{query}")
    expect(page.locator("#state")).to_contain_text(re.compile("live,|updated"), timeout=20_000)
    expect(page.locator(".admin tbody:empty")).to_have_count(0)
    yield page
    page.close()


@contextmanager
def busy(folder: Path, classes: Mapping[str, Tier] = CLASSES) -> Iterator[Gateway]:
    """Serve in front of two fake engines: the first holds its answers back, the second has died."""
    engines = [Fake(folder).start(), Fake(folder).start()]
    urls = (one.url for one in engines)
    try:
        with serving(configuration(folder, *urls, classes=dict(classes), engine={"max_running": 4})) as gateway:
            engines[1].stop()
            until(lambda: not gateway.get("/ready").json()["engines"]["e1"]["up"], 30)
            with ThreadPoolExecutor(9) as pool:
                for number in range(9):
                    name = list(classes)[number % len(classes)]
                    pool.submit(gateway.post, gateway.chat(service_tier=name, vllm_xargs={"fake_hold": "all"}))
                until(lambda: len(gateway.controller.requests) == 9)
                yield gateway
                engines[0].release("all")
    finally:
        engines[0].stop()


@contextmanager
def administered(folder: Path, *keys: Key) -> Iterator[Gateway]:
    """Serve tenants with keys and budgets in front of three fake engines: one is down, one is drained."""
    engines = [Fake(folder).start() for _ in range(3)]
    config = configuration(
        folder, *(one.url for one in engines), classes=CLASSES, keys=(*KEYS, *keys), engine={"max_running": 4},
        prices={"smollm2": Price(prompt=0.15, answer=0.6)}, server={"stored_keys": True},
    )  # fmt: skip
    try:
        with serving(config) as gateway, ThreadPoolExecutor(9) as pool:
            until(gateway.all_up, 30)
            engines[1].stop()
            assert gateway.post({}, f"{ENGINES}/e2/drain", headers=OPERATOR).status_code == 202
            states = lambda: [one["state"] for one in gateway.get(ENGINES, headers=OPERATOR).json()["data"]]  # noqa: E731
            until(lambda: states()[1:] == ["failed", "drained"], 30)
            for number in range(9):
                sender = {"authorization": f"Bearer {KEYS[number % 2].key}"}
                pool.submit(gateway.post, gateway.chat(vllm_xargs={"fake_hold": "all"}), headers=sender)
            until(lambda: len(gateway.controller.requests) == 9)
            yield gateway
            engines[0].release("all")
    finally:
        engines[0].stop()
        engines[2].stop()


def spend(gateway: Gateway, tenant: str, budget: Budget, share: float) -> None:
    """Count a share of a tenant's budget as used, in the store."""
    units: dict[Unit, float] = dict.fromkeys(("tokens", "cost"), share * limit_of(budget))
    (account,) = open_accounts(tenant, [budget], units, datetime.now(UTC))
    assert gateway.do(gateway.inner.broker.spend("made up", account.charge))


def create_keys(gateway: Gateway) -> None:
    """Store keys of a tenant: one that expires, one that is revoked."""
    bodies = {"expires_s": 86_400 * 30, "requests_per_min": 60, "classes": ["chat"]}, {"name": "delta-old"}
    ids = [
        gateway.post({"tenant": "delta"} | body, STORED, headers=OPERATOR).json()["data"][0]["id"] for body in bodies
    ]
    assert WEB.delete(f"{gateway.url}{STORED}/{ids[1]}", headers=OPERATOR).status_code == 200


def main(out: Path) -> None:
    """Write the pictures of the docs."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with busy(Path(folder)) as gateway:
            made_up(gateway)
            for scheme in ("light", "dark"):
                with opened(browser, gateway, _SIZES["wide"], scheme, "?window=1h") as page:
                    page.screenshot(path=out / f"dashboard-{scheme}.png", full_page=True)
            with opened(browser, gateway, _SIZES["phone"]) as page:
                page.screenshot(path=out / "dashboard-phone.png")
        with administered(Path(folder)) as gateway:
            made_up(gateway, tuple(key.tenant for key in KEYS))
            for budget, share in zip(KEYS[0].budgets[::2], (0.61, 0.86), strict=True):
                spend(gateway, KEYS[0].tenant, budget, share)
            spend(gateway, KEYS[1].tenant, KEYS[1].budgets[0], 0.9995)
            create_keys(gateway)
            for name, size in _SIZES.items():
                with opened(browser, gateway, size, query="admin") as page:
                    page.screenshot(path=out / f"admin-{name}.png", full_page=name == "wide")
            with opened(browser, gateway, _SIZES["wide"], "dark", "admin") as page:
                page.click("#create")
                page.screenshot(path=out / "admin-dark.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
