"""`POST /v1/backends/NAME`: units outside the LLM that the gateway executes, and warms ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sklearn.datasets import load_digits

import headway
from headway.config import Backend, Key
from headway.errors import HeadwayError
from headway.events import Prewarmed
from headway.policy.apps.prewarming import Prewarming
from headway.stages import Resource
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, configuration, serving, until
from tests.gateway.test_namespaces import namespaces_or_skip

MODELS = "tests.gateway.backend_models"
BACKENDS = {
    "python": Backend("sandbox", isolation="process", processes=2),
    "digits": Backend("model", load=f"{MODELS}:digits", processes=1),
    "echo": Backend(f"{MODELS}:Echo", options={"word": "hm"}),
}
ALL = Key("key-of-all", "default")
OF_ALL = {"authorization": f"Bearer {ALL.key}"}
RUN = {"x-headway-app": "agent", "x-headway-run": "r1"}
PRINT = {"input": {"code": "print(6 * 7)"}}


@pytest.fixture(scope="module")
def hermes(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a recipe that plans warm-ups."""
    folder = tmp_path_factory.mktemp("hermes")
    with serving(configuration(folder, fake.url, recipe="hermes", backends=BACKENDS, keys=(ALL,))) as gateway:
        yield gateway


def ask(gateway: Gateway, name: str, body: Any = PRINT, **more: Any) -> httpx.Response:
    if ALL in gateway.config.keys:
        more["headers"] = OF_ALL | more.get("headers", {})
    return gateway.post(body, f"/v1/backends/{name}", **more)


def live(gateway: Gateway, name: str) -> int:
    """Return the processes of a backend."""
    return int(gateway.inner.backends[name].pool.live)  # type: ignore[attr-defined]


def test_a_unit_is_executed_and_is_part_of_its_run(hermes: Gateway) -> None:
    answer = ask(hermes, "python", headers=RUN).json()
    assert answer | {"object": "headway.unit", "backend": "python", "warm": False} == answer
    assert answer["output"]["stdout"] == "42\n"
    assert 0 < answer["waited_s"] <= answer["seconds"]
    assert ask(hermes, "echo", {"input": 1, "unit": "repeat"}, headers=RUN).json()["output"][1:] == ["default", 1]
    told = hermes.get("/v1/runs/r1?app=agent", headers=OF_ALL).json()
    units = [(unit["unit"], unit["backend"], unit["in_progress"]) for unit in told["units"]]
    assert units == [("python", "python", 0), ("repeat", "echo", 0)]
    assert told["units"][0]["seconds"] > 0
    assert ask(hermes, "echo", {"input": 1, "final": True}, headers=RUN).status_code == 200
    assert hermes.get("/v1/runs/r1?app=agent", headers=OF_ALL).json()["status"] == "ended"
    assert hermes.metric('headway_backend_units_total{backend="python",start="cold"}') == 1


async def test_the_client_helper_executes_units(hermes: Gateway) -> None:
    async with headway.run("helped", base_url=f"{hermes.url}/v1", api_key=ALL.key) as run:
        done = await run.execute_async("python", PRINT["input"], unit="execute")
        again = await asyncio.to_thread(run.execute, "echo", 1)
        told = hermes.get(f"/v1/runs/{run.id}?app=helped", headers=OF_ALL).json()
    assert done.output["stdout"] == "42\n"
    assert 0 < done.waited_s <= done.seconds
    assert again.output[1:] == ["default", 1]
    assert [(unit["unit"], unit["backend"]) for unit in told["units"]] == [("execute", "python"), ("echo", "echo")]


def test_the_client_helper_raises_what_the_gateway_refuses(hermes: Gateway) -> None:
    run = headway.run("helped", base_url=f"{hermes.url}/v1", api_key=ALL.key)
    with pytest.raises(HeadwayError, match="no backend 'pyton'") as caught:
        run.execute("pyton", 1)
    assert caught.value.status == 404
    with pytest.raises(HeadwayError, match="gave no answer") as caught:
        headway.run("helped", base_url="http://127.0.0.1:9/v1").execute("python", 1)
    assert caught.value.status == 502


def test_a_unit_without_a_run_is_executed(hermes: Gateway) -> None:
    runs = hermes.metric("headway_live_runs")
    assert ask(hermes, "python").json()["output"]["exit_code"] == 0
    assert ask(hermes, "python", PRINT | {"app": "agent"}).json()["output"]["exit_code"] == 0
    assert hermes.metric("headway_live_runs") == runs


def test_a_real_model_stays_loaded(hermes: Gateway) -> None:
    rows = load_digits().data[:3] / 16
    answers = [ask(hermes, "digits", {"input": rows.tolist()}).json() for _ in range(2)]
    assert [answer["output"] for answer in answers] == [[0, 1, 2]] * 2
    assert [answer["warm"] for answer in answers] == [False, True]
    refused = ask(hermes, "digits", {"input": [[1.0, 2.0]]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "backend_refused")


@pytest.mark.parametrize(
    ("name", "body", "status", "param"),
    [
        ("nothing", PRINT, 404, None),
        ("python", {}, 400, "input"),
        ("python", [1], 400, None),
        ("python", {"input": 7}, 400, "input"),
        ("python", PRINT | {"code": "1"}, 400, "code"),
        ("python", PRINT | {"unit": "u" * 129}, 400, "unit"),
        ("python", PRINT | {"unit": "u"}, 400, None),
    ],
)
def test_what_cannot_be_executed(hermes: Gateway, name: str, body: Any, status: int, param: str | None) -> None:
    refused = ask(hermes, name, body)
    assert refused.status_code == status
    error = refused.json()["error"]
    assert error["message"]
    if param is not None:
        assert error["param"] == param


def test_a_unit_whose_client_leaves_is_given_up(hermes: Gateway) -> None:
    sleeps = {"input": {"code": "import time; time.sleep(60)"}}
    with pytest.raises(httpx.ReadTimeout):
        ask(hermes, "python", sleeps, headers=RUN | {"x-headway-run": "left"}, timeout=1.0)
    until(lambda: hermes.get("/v1/runs/left?app=agent", headers=OF_ALL).json()["units"][0]["in_progress"] == 0)
    assert live(hermes, "python") == 0


@pytest.mark.parametrize("recipe", ["hermes", "headway"])
def test_a_recipe_that_plans_warm_ups_finds_the_sandbox_warm(serve: Serve, recipe: str) -> None:
    """The runs before have shown that code is executed after the answer, so it is warmed with the answer."""
    resource, warm = Resource("backend", "python"), list[bool]()
    with serve(recipe=recipe, backends=BACKENDS, keys=(ALL,)) as gateway:
        for _ in range(3):
            with headway.run("coder", base_url=f"{gateway.url}/v1", api_key=ALL.key) as run:
                before = warmed(gateway)
                # As if it took long to start: it is to be warmed at once, and expected for long.
                gateway.do(_tell(gateway, Prewarmed(resource, 1000.0)))
                asked = gateway.chat(max_tokens=512, vllm_xargs={"fake_tokens": 512})
                assert gateway.post(asked, headers=OF_ALL | run.unit("write")).status_code == 200
                if warm:  # there is a graph
                    until(lambda before=before: warmed(gateway) > before)  # type: ignore[misc]
                warm.append(ask(gateway, "python", headers=run.unit("execute")).json()["warm"])
        assert warm == [False, True, True]
        assert prewarming(gateway).seconds[resource] < 1000.0, "the planner was told"
        until(lambda: gateway.metric('headway_prewarm_end_total{kind="backend",outcome="used"}') == 2)
        assert gateway.metric('headway_backend_units_total{backend="python",start="warm"}') == 2


def warmed(gateway: Gateway) -> float:
    return gateway.metric('headway_prewarm_total{kind="backend",outcome="warmed"}')


def prewarming(gateway: Gateway) -> Prewarming:
    """Return what the planner knows of warm-ups."""
    planner: Any = gateway.controller.planner
    found = planner.still.runs.prewarming if hasattr(planner, "still") else planner.prewarming
    assert isinstance(found, Prewarming)
    return found


async def _tell(gateway: Gateway, event: Prewarmed) -> None:
    gateway.inner.dispatcher.notify(event)


ISOLATED = BACKENDS | {"python": Backend("sandbox", processes=2)}


def test_tenants_see_no_backend_without_a_key_and_nothing_of_each_other(serve: Serve) -> None:
    namespaces_or_skip()
    keys = (Key("key-of-anna", "anna"), Key("key-of-bert", "bert"))
    with serve(backends=ISOLATED, keys=keys) as gateway:
        assert ask(gateway, "echo", {"input": 1}).status_code == 401
        anna, bert = ({"authorization": f"Bearer {key.key}"} for key in keys)
        assert ask(gateway, "echo", {"input": 1}, headers=bert).json()["output"] == ["hm", "bert", 1]
        assert ask(gateway, "python", headers=RUN | anna).status_code == 200
        assert gateway.get("/v1/runs/r1?app=agent", headers=anna).status_code == 200
        assert gateway.get("/v1/runs/r1?app=agent", headers=bert).status_code == 404


def test_units_count_against_the_limits_of_their_tenant(serve: Serve) -> None:
    namespaces_or_skip()
    keys = (
        Key("key-of-anna", "anna", requests_per_min=2),
        Key("key-of-bert", "bert", max_queued=1),
        Key("key-of-carl", "carl"),
    )
    anna, bert, carl = ({"authorization": f"Bearer {key.key}"} for key in keys)
    with ThreadPoolExecutor() as threads, serve(backends=ISOLATED, keys=keys) as gateway:
        assert [ask(gateway, "echo", {"input": 1}, headers=anna).status_code for _ in range(3)] == [200, 200, 429]
        sleeps = {"input": {"code": "import time; time.sleep(600)"}}
        units = [threads.submit(ask, gateway, "python", sleeps, headers=one) for one in (bert, carl)]
        pool: Any = gateway.inner.backends["python"].pool  # type: ignore[attr-defined]
        until(lambda: pool.busy == 2)
        refused = ask(gateway, "echo", {"input": 1}, headers=bert)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_queue_full")
        assert ask(gateway, "echo", {"input": 1}, headers=carl).status_code == 200
        gateway.do(pool.close())
        assert [unit.result().status_code for unit in units] == [200, 200]
        assert ask(gateway, "echo", {"input": 1}, headers=bert).status_code == 200


def test_nothing_is_executed_unless_it_is_configured(gateway: Gateway) -> None:
    refused = ask(gateway, "python")
    assert refused.status_code == 404
    assert "Add a table [backends.NAME]" in refused.json()["error"]["message"]


def test_the_gateway_ends_its_sandboxes_when_it_stops(serve: Serve) -> None:
    sleeps = {"input": {"code": "import time; time.sleep(60)"}}
    with ThreadPoolExecutor() as threads:
        with serve(backends=BACKENDS, keys=(ALL,)) as gateway:
            unit = threads.submit(ask, gateway, "python", sleeps)
            until(lambda: live(gateway, "python") == 1)
            backends = gateway.inner.backends
        assert backends["python"].pool.live == 0  # type: ignore[attr-defined]
        assert unit.exception() is not None or unit.result().status_code >= 500
