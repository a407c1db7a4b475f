"""The machine's clock is set while requests wait: promises, leases and stored answers do not notice."""

from __future__ import annotations

import time

import pytest

from headway import clock
from headway.config import Tier
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CLASSES, Fake, until
from tests.gateway.test_background import begin, finished, look
from tests.gateway.test_request_ends import fakes
from tests.test_clock import set_by

DAY = 86400.0
TIERS = CLASSES | {"roomy": Tier(e2e_ms=600_000.0, drop=True)}


@pytest.mark.parametrize("days", [-9, 9])
def test_a_clock_that_is_set_by_days(serve: Serve, fake: Fake, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(classes=TIERS, engine={"max_running": 1}) as gateway:
        old = begin(gateway)
        assert finished(gateway, old)["status"] == "completed"
        held = begin(gateway, **fakes(hold=f"jump{days}"))
        until(lambda: fake.last()["open"] == 1)
        waiting = begin(gateway, service_tier="roomy")
        set_by(days * DAY, monkeypatch)
        gateway.do(gateway.inner.broker.forget(clock.now() - DAY))
        fake.release(f"jump{days}")
        assert finished(gateway, held)["status"] == "completed"
        assert finished(gateway, waiting)["status"] == "completed", "it was not dropped as late"
        assert look(gateway, old)["status"] == "completed", "it was not forgotten"
        assert look(gateway, old)["created_at"] == pytest.approx(time.time(), abs=3600), "as people see it"
