"""Application runs at the gateway: how requests name them, units outside the LLM, their end."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest

import headway
from headway.config import Apps, Key
from headway.errors import ConfigError, RequestError
from headway.gateway.parsing.run_identity import RunFields, stage_of
from headway.policy.recipes.registry import RECIPES
from headway.stages import Stage
from tests.gateway.conftest import Serve
from tests.gateway.gateway import DEAD, SAY, Fake, Gateway, until
from tests.gateway.test_request_ends import fakes, hanging

RUN = {"x-headway-app": "agent", "x-headway-run": "r1"}


@pytest.mark.parametrize(
    ("headers", "body", "stage"),
    [
        ({}, {}, None),
        (RUN, {}, Stage("agent", "r1", "call")),
        (
            RUN | {"x-headway-unit": "act", "x-slo-run-ms": "1500", "x-headway-run-final": "TRUE"},
            {},
            Stage("agent", "r1", "act", 1.5, True),
        ),
        (
            {},
            {"app": "agent", "run": "r1", "unit": "act", "slo_run_ms": 1500, "final": True},
            Stage("agent", "r1", "act", 1.5, True),
        ),
        (
            RUN | {"x-headway-run-final": "0", "x-slo-run-ms": "20"},
            {"app": "b", "final": True, "slo_run_ms": 1},
            Stage("agent", "r1", "call", 0.02),
        ),
        ({"x-session-id": "s1"}, {}, Stage("session", "s1", "call")),
        ({"x-session-id": "s1"}, {"run": "r2"}, Stage("session", "r2", "call")),
        ({}, {"app": "agent"}, Stage("agent", "", "call")),
        ({"x-headway-app": "Prüfung à 世".encode().decode("latin-1")}, {}, Stage("Prüfung à 世", "", "call")),
        ({"x-headway-app": "Pr\xfcfung"}, {}, Stage("Prüfung", "", "call")),
    ],
)
def test_headers_before_the_body(headers: dict[str, str], body: dict[str, Any], stage: Stage | None) -> None:
    assert stage_of(headers, RunFields(**body) if body else None) == stage


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"x-headway-app": "a" * 129}, "has 129 characters"),
        (RUN | {"x-headway-unit": "u" * 129}, "has 129 characters"),
        ({"x-headway-app": "a\x9bb"}, "printable"),
        (RUN | {"x-headway-unit": "a\tb"}, "printable"),
        (RUN | {"x-headway-run-final": "yes"}, "must be true or false"),
        (RUN | {"x-slo-run-ms": "soon"}, "milliseconds"),
        (RUN | {"x-slo-run-ms": "nan"}, "milliseconds"),
        (RUN | {"x-slo-run-ms": "1e12"}, "milliseconds"),
        ({"x-slo-run-ms": "100"}, "but no run"),
        ({"x-headway-unit": "act"}, "but no run"),
        ({"x-headway-run-final": "true"}, "but no run"),
    ],
)
def test_headers_that_cannot_be_used(headers: dict[str, str], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        stage_of(headers, None)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"app": ""}, "headway.app"),
        ({"app": "a" * 129}, "headway.app"),
        ({"run": 7}, "headway.run"),
        ({"final": "true"}, "headway.final"),
        ({"slo_run_ms": 0}, "headway.slo_run_ms"),
        ({"slo_run_ms": "5"}, "headway.slo_run_ms"),
        ({"deadline": 5}, "headway.deadline"),
        ("x", "headway"),
    ],
)
def test_fields_that_cannot_be_used(gateway: Gateway, field: Any, param: str) -> None:
    refused = gateway.post(gateway.chat(headway=field))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_the_body_s_field_names_a_run_and_does_not_reach_the_engine(gateway: Gateway, fake: Fake) -> None:
    with gateway.client() as client:
        client.chat.completions.create(
            model="smollm2",
            messages=SAY,
            extra_body={"headway": {"app": "agent", "run": "by-body"}},  # type: ignore[arg-type]
        )
    assert "headway" not in fake.last()["body"]
    until(lambda: gateway.get("/v1/runs/by-body?app=agent").json()["units"][0]["in_progress"] == 0)


# ---- the life of a run


def test_a_run_from_its_first_request_to_its_end(serve: Serve) -> None:
    with serve() as gateway, gateway.client() as client:
        with headway.run("kbqav", base_url=f"{gateway.url}/v1", deadline=60, id="k/1") as run:
            at = "/v1/runs/k%2F1?app=kbqav"
            assert gateway.get(at).status_code == 404
            for unit in ("extract", "verify"):
                client.chat.completions.create(
                    model="smollm2",
                    messages=SAY,
                    extra_headers=run.unit(unit),
                    max_tokens=8,  # type: ignore[arg-type]
                )
                with run.outside("search", backend="web"):
                    inside = gateway.get(at).json()
            assert inside["units"][-1] | {"in_progress": 1, "backend": "web"} == inside["units"][-1]
            told = gateway.get(at).json()
            assert gateway.metric('headway_live_runs{app="kbqav"}') == 1
        assert [one["unit"] for one in told["units"]] == ["extract", "search", "verify", "search"]
        assert (told["status"], told["outcome"], told["slo_run_ms"]) == ("live", None, 60_000)
        assert told["attained"]["output_tokens"] == 16
        assert told["attained"]["seconds"] > 0
        assert told["expected_rest_s"] is None, "no run of it has ended yet"
        ended = gateway.get(at).json()
        assert (ended["status"], ended["outcome"]) == ("ended", "in_time")
        assert ended["seconds"] < 60
        assert gateway.metric('headway_runs_total{app="kbqav",outcome="in_time"}') == 1
        assert gateway.metric('headway_run_seconds_count{app="kbqav"}') == 1
        assert gateway.metric('headway_run_slo_attainment{app="kbqav"}') == 1
        assert gateway.metric("headway_live_runs") == 0
        again = gateway.post({"app": "kbqav"}, "/v1/runs/k%2F1/end")
        assert (again.status_code, again.json()["outcome"]) == (200, "in_time")
        assert gateway.metric('headway_runs_total{app="kbqav",outcome="in_time"}') == 1


def test_a_run_that_missed_its_deadline_and_one_that_failed(serve: Serve) -> None:
    with serve() as gateway:
        final = RUN | {"x-headway-run-final": "true"}
        gateway.post(gateway.chat(), headers=final | {"x-slo-run-ms": "0.001"})
        until(lambda: gateway.metric('headway_runs_total{app="agent",outcome="late"}') == 1)
        gateway.post(gateway.chat(**fakes(end="400")), headers=final)
        until(lambda: gateway.metric('headway_runs_total{app="agent",outcome="failed"}') == 1)
        gateway.post(gateway.chat(), headers={"x-headway-app": "agent"})
        until(lambda: gateway.metric('headway_runs_total{app="agent",outcome="finished"}') == 1)
        assert gateway.metric('headway_run_slo_attainment{app="agent"}') == 0
        assert gateway.metric('headway_run_slo_owed_total{app="agent"}') == 1


def test_a_run_that_never_ends_times_out(serve: Serve) -> None:
    with serve(recipe="hermes", apps=Apps(run_timeout_s=0.01)) as gateway:
        gateway.post(gateway.chat(), headers=RUN)
        until(lambda: gateway.get("/v1/runs/r1?app=agent").json()["outcome"] == "timed_out")
        assert len(gateway.controller.planner.runs) == 0  # type: ignore[attr-defined]


def test_an_end_waits_for_the_request_in_progress(serve: Serve, fake: Fake) -> None:
    with serve(recipe="hermes") as gateway, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gateway.post, gateway.chat(**fakes(hold="run")), headers=RUN)
        until(lambda: len(gateway.controller.requests) == 1)
        told = gateway.post({"app": "agent"}, "/v1/runs/r1/end")
        assert told.json()["status"] == "ending"
        fake.release("run")
        assert asked.result().status_code == 200
        until(lambda: gateway.get("/v1/runs/r1?app=agent").json()["status"] == "ended")


def test_requests_must_be_complete_when_their_run_must_be(serve: Serve) -> None:
    mine = {"app": "agent", "run": "r1", "slo_run_ms": 60_000}
    with serve(DEAD, ready=False) as gateway, hanging(gateway, headway=mine):
        first = until(lambda: [*gateway.controller.requests.values()])[0]
        assert first.slo.e2e == 60
        later = {"app": "agent", "run": "r1"}
        with hanging(gateway, headway=later), hanging(gateway, headway=later, ttlt_slo_ms=10_000):
            until(lambda: gateway.controller.queued == 3)
            one, other = list(gateway.controller.requests.values())[1:]
            assert one.arrival + one.slo.e2e == pytest.approx(first.arrival + 60)
            assert other.slo.e2e == 10


def test_a_client_that_leaves_does_not_fail_its_run(serve: Serve) -> None:
    with serve(DEAD, ready=False) as gateway:
        with hanging(gateway, headway={"app": "agent", "run": "r1", "final": True, "slo_run_ms": 60_000}):
            until(lambda: gateway.controller.queued == 1)
        until(lambda: gateway.metric('headway_runs_total{app="agent",outcome="in_time"}') == 1)


# ---- reports that cannot be used


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/runs/nobody/end", {}, 404, "run_not_found"),
        ("/v1/runs/nobody/end", None, 404, "run_not_found"),
        ("/v1/runs/nobody/end", {"ap": "x"}, 400, None),
        (f"/v1/runs/{'n' * 129}/units", {"unit": "u", "state": "started"}, 400, None),
        ("/v1/runs/nobody/units", {"unit": "u", "state": "ended"}, 404, "run_not_found"),
        ("/v1/runs/nobody/units", {"unit": "u", "state": "paused"}, 400, None),
        ("/v1/runs/nobody/units", {"state": "started"}, 400, None),
        ("/v1/runs/nobody/units", {"unit": "u" * 129, "state": "started"}, 400, None),
        ("/v1/runs/nobody/units", {"unit": "u", "state": "started", "backend": "llm"}, 400, None),
    ],
)
def test_reports_that_cannot_be_used(gateway: Gateway, path: str, body: Any, status: int, code: Any) -> None:
    refused = gateway.post(body, path)
    assert refused.status_code == status
    assert refused.json()["error"]["code"] == code
    assert gateway.get("/v1/runs/nobody").status_code == 404, "nothing has begun"


def test_units_that_end_without_a_start_and_too_many_in_progress(gateway: Gateway) -> None:
    path = "/v1/runs/tools/units"
    started, ended = ({"unit": "search", "state": state} for state in ("started", "ended"))
    assert gateway.post(started, path).status_code == 200
    assert gateway.post(ended, path).status_code == 200
    refused = gateway.post(ended, path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "unit_not_started")
    codes = [gateway.post(started, path).status_code for _ in range(257)]
    assert codes == [200] * 256 + [400]
    assert gateway.post({}, "/v1/runs/tools/end").json()["status"] == "ended"


# ---- applications and tenants


def test_tenants_do_not_see_each_other_s_runs(serve: Serve) -> None:
    keys = (Key("sk-alpha-123", "alpha"), Key("sk-beta-4567", "beta"))
    with serve(recipe="hermes", keys=keys) as gateway:
        alpha, beta = ({"authorization": f"Bearer {key.key}"} for key in keys)
        assert gateway.post(gateway.chat(), headers=alpha | RUN).status_code == 200
        at = "/v1/runs/r1?app=agent"
        until(lambda: gateway.get(at, headers=alpha).json()["units"][0]["in_progress"] == 0)
        for path in ("/v1/apps", at):
            assert gateway.get(path).status_code == 401
        for path in ("/v1/runs/r1/end", "/v1/runs/r1/units"):
            assert gateway.post({"app": "agent"}, path).status_code == 401
        assert gateway.get(at, headers=beta).status_code == 404
        assert gateway.post({"app": "agent"}, "/v1/runs/r1/end", headers=beta).status_code == 404
        assert gateway.get("/v1/apps", headers=beta).json()["data"] == []
        listed = {"id": "agent", "object": "headway.app", "live_runs": 1, "learned_runs": 0}
        assert gateway.get("/v1/apps", headers=alpha).json()["data"] == [listed]
        assert gateway.post({"app": "agent"}, "/v1/runs/r1/end", headers=alpha).status_code == 200
        listed |= {"live_runs": 0, "learned_runs": 1}
        assert gateway.get("/v1/apps", headers=alpha).json()["data"] == [listed]
        assert gateway.get("/v1/apps", headers=beta).json()["data"] == []
        gateway.post(gateway.chat(), headers=alpha | RUN)
        assert gateway.get(at, headers=alpha).json()["expected_rest_s"] > 0


def test_labels_are_bounded(serve: Serve) -> None:
    with serve() as gateway:
        for i in range(66):
            gateway.post({"app": f"a{i}", "unit": "u", "state": "started"}, "/v1/runs/r/units")
        page = gateway.get("/metrics").text
        assert page.count("headway_live_runs{") == 65
        assert 'headway_live_runs{app="(other)"} 2.0' in page


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_serves_runs(serve: Serve, recipe: str) -> None:
    with serve(recipe=recipe) as gateway:
        with headway.run("agent", base_url=f"{gateway.url}/v1", id="r1") as run:
            assert gateway.post(gateway.chat(), headers=run.unit("act")).status_code == 200
            with run.outside("tool"):
                pass
        until(lambda: gateway.get("/v1/runs/r1?app=agent").json()["outcome"] == "finished")


# ---- the client


async def test_the_async_client_reports_and_ends_also_after_an_error(gateway: Gateway) -> None:
    async def fail() -> None:
        run = headway.run("async", base_url=f"{gateway.url}/v1", id="a1")
        async with run, run.outside("sandbox", backend="python"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    told = await asyncio.to_thread(gateway.get, "/v1/runs/a1?app=async")
    assert (told.json()["status"], told.json()["outcome"]) == ("ended", "finished")
    assert told.json()["seconds"] is not None, "the unit has ended"


def test_the_client_goes_on_without_a_gateway(caplog: pytest.LogCaptureFixture) -> None:
    run = headway.run("agent", base_url=f"{DEAD}/v1")
    with caplog.at_level(logging.WARNING, "headway.client"), run, run.outside("tool"):
        pass
    assert len(caplog.records) == 3


def test_the_client_says_what_the_gateway_refused(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with headway.run("agent", base_url=f"{gateway.url}/v1") as run:
        pass
    assert not caplog.records, "a run without a request has nothing to end"
    run.report("units", {"app": "agent", "unit": "u", "state": "over"})
    assert "Correct 'state'" in caplog.text


def test_what_the_client_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="OPENAI_BASE_URL"):
        headway.run("agent")
    for app in ("", "a" * 129, "ä", "a\nb", " a"):
        with pytest.raises(ConfigError, match="no header can carry"):
            headway.run(app, base_url=DEAD)
    for deadline in (0, -1, float("nan"), 1e6):
        with pytest.raises(ConfigError, match="deadline"):
            headway.run("agent", base_url=DEAD, deadline=deadline)
    monkeypatch.setenv("OPENAI_BASE_URL", DEAD)
    assert headway.run("agent", deadline=1.5).unit("act", final=True) | {"x-headway-run": ""} == {
        "x-headway-app": "agent",
        "x-headway-run": "",
        "x-headway-unit": "act",
        "x-slo-run-ms": "1500",
        "x-headway-run-final": "true",
    }


def test_the_client_needs_nothing_but_httpx() -> None:
    code = (
        "import sys, headway; assert 'httpx' not in sys.modules; headway.run;"
        "assert 'httpx' in sys.modules;"
        "print({'numpy', 'numba', 'pydantic', 'aiohttp', 'vllm', 'openai'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_langchain_sends_the_headers(gateway: Gateway) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="not among the development dependencies")
    with headway.run("chain", base_url=f"{gateway.url}/v1", id="c1") as run:
        model = langchain.ChatOpenAI(
            model="smollm2", base_url=f"{gateway.url}/v1", api_key="none", default_headers=run.headers()
        )
        model.bind(extra_headers=run.unit("verify")).invoke("hello")
        told = gateway.get("/v1/runs/c1?app=chain").json()
    assert [unit["unit"] for unit in told["units"]] == ["verify"]


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "a\u202eb", "\x7f", "a\x00"])
def test_names_are_printable(gateway: Gateway, name: str) -> None:
    for field in ("app", "run", "unit"):
        refused = gateway.post(gateway.chat(headway={"app": "agent", "run": "r"} | {field: name}))
        assert refused.status_code == 400
        assert "printable" in refused.json()["error"]["message"]
    unit = {"unit": "act", "state": "started"}
    others = [
        gateway.post(unit, f"/v1/runs/{quote(name)}/units"),
        gateway.post(unit | {"app": name}, "/v1/runs/r/units"),
        gateway.post(unit | {"backend": name}, "/v1/runs/r/units"),
        gateway.get("/v1/runs/r", params={"app": name}),
    ]
    assert [answer.status_code for answer in others[1:]] == [400] * 3
    assert others[0].status_code == (404 if "\n" in name else 400)  # no path has a line's end
    assert name not in gateway.get("/metrics").text


def test_a_session_s_id_that_cannot_be_printed_is_kept_as_its_digest() -> None:
    stage = stage_of({"x-session-id": "a\x9bb"}, None)
    assert stage is not None
    assert stage.run.startswith("sha256:")
