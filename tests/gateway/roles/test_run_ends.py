"""Engines are told of application runs that their clients have ended, from gateways of other processes, too."""

from __future__ import annotations

from pathlib import Path

from headway.config import Apps
from headway.prefix import CacheReport, run_number
from tests.gateway.gateway import WEB, Fake, Gateway, configuration, until
from tests.gateway.roles.parts import parts


def ask(gateway: Gateway, run: str, **headers: str) -> int:
    """Let a request of a run be answered; return the run's number."""
    named = {"x-headway-app": "agent", "x-headway-run": run} | headers
    assert gateway.post(gateway.chat(), headers=named).status_code == 200
    return run_number(("default", "agent", run))


def test_runs_that_clients_end_and_one_that_times_out(tmp_path: Path, others: list[Fake]) -> None:
    for fake in others:
        report = CacheReport("a", 0, 1, whole=True)
        assert WEB.post(f"{fake.url}/cache", json=report.plain()).status_code == 200
    config = configuration(tmp_path, *(fake.url for fake in others), apps=Apps(run_timeout_s=3.0))
    with parts(config, tmp_path) as headway:
        headway.controller("c1")
        headway.agent("a1", "e0", "e1")
        with headway.gateway("g1") as gateway:
            ended = ask(gateway, "ended")
            had = next(fake for fake in others if fake.last()["asked"])
            other = next(fake for fake in others if fake is not had)
            assert had.last()["body"]["vllm_xargs"]["headway_run"] == ended
            assert gateway.post({"app": "agent"}, "/v1/runs/ended/end").status_code == 200
            until(lambda: had.last()["ended"] == [ended])
            assert other.last()["ended"] == [], "it has had no request of this run"
            ask(gateway, "silent")
            final = ask(gateway, "final", **{"x-headway-run-final": "true"})
            until(lambda: gateway.metric('headway_runs_total{app="agent",outcome="timed_out"}') == 1)
            until(lambda: sorted(one for fake in others for one in fake.last()["ended"]) == sorted([ended, final]))
