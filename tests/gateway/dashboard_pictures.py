"""Pictures of the dashboard: `python -m tests.gateway.dashboard_pictures docs` writes those of the docs.

They show a gateway in front of FAKE engines, one of which is down, with made-up figures of the last day.
"""

from __future__ import annotations

import math
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from headway import clock
from headway.config import BATCH, Tier
from headway.gateway.in_flight import InFlightRequest
from headway.gateway.watch.ends import Ended
from headway.gateway.watch.history import History
from headway.types import Request, Slo
from tests.gateway.gateway import Fake, Gateway, configuration, serving, until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CLASSES = {
    "default": Tier(),
    "chat": Tier(ttft_ms=1500.0, tpot_ms=150.0),
    "code": Tier(e2e_ms=20_000.0),
    "batch": BATCH,
}
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
    page.goto(f"{gateway.url}/{query}")
    expect(page.locator("#state")).to_contain_text("live,", timeout=20_000)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
