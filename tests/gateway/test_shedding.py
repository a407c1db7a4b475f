"""A request that a planner rejects after it was accepted ends with 429 and the reason, or as a failed job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, until
from tests.gateway.test_request_ends import fakes


def test_sheddable_work_is_refused_while_the_engine_is_saturated(serve: Serve, fake: Fake) -> None:
    with serve(recipe="llm-d-like", engine={"max_running": 1}) as gateway, ThreadPoolExecutor(4) as pool:
        core = gateway.controller
        window = core.cluster.instances["e0"].window
        slow = [pool.submit(gateway.post, gateway.chat(**fakes(hold="shed"))) for _ in range(window)]
        until(lambda: len(core.requests) == window and core.queued == 0)
        waits = pool.submit(gateway.post, gateway.chat(service_tier="chat"))  # it has an SLO, so it is never shed
        until(lambda: core.queued == 1)
        refused = gateway.post(gateway.chat(service_tier="batch"))
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-headway-dropped-reason"] == "saturated"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        accepted = gateway.post(gateway.chat(service_tier="batch", background=True)).json()
        state, reason = until(lambda: (end := gateway.jobs()[accepted["id"]])[0] != "open" and end)
        assert state == "failed"
        assert reason.startswith("dropped: ")
        fake.release("shed")
        assert [answer.result().status_code for answer in (*slow, waits)] == [200] * (window + 1)
        assert gateway.metric('headway_dropped_total{reason="saturated",tenant="default"}') == 2
