"""Model swaps of a gateway whose engines are FAKE child processes: what goes back, what waits, what fails."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.config import Broker, Config, Engine, Server, Sqlite, Tier
from headway.engines.vllm.process import models
from headway.events import Event
from tests.gateway.gateway import SAY, serving, until
from tests.gateway.swapping import Swapping, behave, kinds, make_model, note_events, use_fake_engines


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    return note_events(monkeypatch)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]) -> Callable[..., Any]:
    """Start a gateway whose engine serves `a` and can load b (the same shape) and c (another one)."""
    use_fake_engines(monkeypatch)
    for name, layers in (("a", 1), ("b", 1), ("c", 2)):
        make_model(tmp_path, name, layers=layers)

    @contextmanager
    def run(recipe: str = "RECIPE", retry_after: float = 0.3, **engine: Any) -> Iterator[Swapping]:
        monkeypatch.setattr(models, "RETRY_AFTER", (retry_after, retry_after))
        names = [str(tmp_path / name) for name in "abc"]
        one = Engine(**({"model": names[0], "models": tuple(names[1:]), "max_running": 8} | engine))
        queue = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite"), "normal"))
        classes = {"default": Tier()}  # without targets the engine is not measured at its start
        server = Server(max_resumes=0)  # an impatient planner would swap for ever between a stream and a request
        config = Config(f"tests.gateway.swapping:{recipe}", server, (one,), broker=queue, classes=classes)
        with serving(config) as gateway:
            yield Swapping(**vars(gateway))

    return run


@pytest.mark.parametrize("recipe", ["RECIPE", "THINKING"])
@pytest.mark.parametrize(("model", "way"), [("b", "in_place"), ("c", "restart")])
def test_a_request_waits_for_its_model_and_is_answered_with_it(
    start: Any, events: list[Event], recipe: str, model: str, way: str
) -> None:
    with start(recipe) as gateway:
        child = gateway.engine.child.process.pid
        assert gateway.ask("a").json()["model"] == "a"
        answer = gateway.ask(model)
        assert answer.status_code == 200
        assert answer.json()["model"] == model
        assert answer.headers["x-headway-waited-for"] == f"{model} is not loaded; e0 can load it"
        assert "x-headway-waited-for" not in gateway.ask(model).headers
        assert (gateway.engine.child.process.pid == child) == (way == "in_place")
        assert kinds(events) == ["InstanceUp:a", f"Swapped:{model}"]
        instance = gateway.controller.cluster.instances["e0"]
        assert instance.model == model
        assert {one.model for one in instance.loadable} == {"a", "b", "c"} - {model}
        labels = f'instance="e0",kind="{way}",model="{model}"'
        assert gateway.metric(f'headway_model_swaps_total{{{labels},outcome="loaded"}}') == 1
        assert gateway.metric(f'headway_engine_model{{instance="e0",model="{model}"}}') == 1
        engine = gateway.get("/ready").json()["engines"]["e0"]
        assert (engine["model"], engine["loading"], engine["up"]) == (model, None, True)


def test_models_lists_all_and_an_unknown_one_is_refused(start: Any) -> None:
    with start() as gateway:
        assert [card["id"] for card in gateway.get("/v1/models").json()["data"]] == ["a", "b", "c"]
        refused = gateway.ask("d")
        assert refused.status_code == 404
        assert "Use one of a, b, c." in refused.text


def test_what_has_not_sent_a_byte_goes_back_and_is_answered_later(start: Any, events: list[Event]) -> None:
    with start() as gateway, ThreadPoolExecutor() as pool:
        hold = {"vllm_xargs": {"fake_hold": "x"}}
        held = [pool.submit(gateway.ask, "a", stream=stream, **hold) for stream in (True, False)]
        until(lambda: gateway.fake("/last")["open"] == 2)
        requests = list(gateway.inner.dispatcher.in_flight.values())
        gateway.order("b")
        until(lambda: "Swapped:a" in kinds(events))
        assert kinds(events) == ["InstanceUp:a", "Swapped:b", "Swapped:a"]
        until(lambda: gateway.fake("/last")["open"] == 2)
        assert (gateway.fake("/last")["asked"], gateway.fake("/last")["aborted"]) == (4, 2)
        gateway.fake("/release/x")
        assert all('"model":"a"' in one.result().text for one in held)
        assert [request.attempts for request in requests] == [0, 0], "a swap is not the death of an engine"
        until(lambda: {state for state, _ in gateway.jobs().values()} == {"done"})  # written after the answer
        assert gateway.metric('headway_requeue_seconds_count{reason="model_swap"}') == 2
        assert gateway.metric('headway_requeue_seconds_sum{reason="model_swap"}') > 0


def test_a_stream_that_has_begun_ends_before_the_swap(start: Any, events: list[Event]) -> None:
    with start("IMPATIENT") as gateway, ThreadPoolExecutor() as pool:
        ask = {"model": "a", "messages": SAY, "max_tokens": 8, "stream": True}
        began = threading.Event()

        def stream() -> list[Any]:
            chunks = []
            slow = {"vllm_xargs": {"fake_delay": 0.1}}
            for chunk in gateway.client().chat.completions.create(**ask, extra_body=slow):
                began.set()
                chunks.append((time.monotonic(), chunk))
            return chunks

        streamed = pool.submit(stream)
        assert began.wait(10)
        other = gateway.ask("c")
        answered = time.monotonic()
        assert other.json()["model"] == "c"
        chunks = streamed.result()
        text = "".join(chunk.choices[0].delta.content or "" for _, chunk in chunks if chunk.choices)
        assert text.count("fake") == 8, "no token is lost or repeated"
        assert chunks[-1][0] < answered
        assert kinds(events) == ["InstanceUp:a", "Swapped:c"]


def test_a_swap_is_given_up_when_streams_do_not_end(start: Any, events: list[Event]) -> None:
    with start("IMPATIENT", drain_timeout_s=0.3) as gateway, ThreadPoolExecutor() as pool:
        slow = {"vllm_xargs": {"fake_delay": 0.2}, "stream": True}
        streamed = pool.submit(gateway.ask, "a", **slow)
        until(lambda: any(one.first_token for one in gateway.inner.dispatcher.in_flight.values()))
        assert gateway.ask("b").json()["model"] == "b"
        assert streamed.result().text.count("fake ") == 8
        assert kinds(events)[:2] == ["InstanceUp:a", "InstanceUp:a"]
        assert kinds(events)[-1] == "Swapped:b"


@pytest.mark.parametrize(("model", "behaviour"), [("b", "fail"), ("b", "die"), ("c", "fail"), ("c", "die")])
def test_a_swap_that_fails_goes_back_to_the_model_before(
    start: Any, events: list[Event], tmp_path: Path, model: str, behaviour: str
) -> None:
    behave(tmp_path / model, behaviour)
    with start(retry_after=1.5) as gateway, ThreadPoolExecutor() as pool:
        waiting = pool.submit(gateway.ask, model)
        until(lambda: kinds(events) == ["InstanceUp:a", "InstanceUp:a"])
        behave(tmp_path / model, "")
        assert gateway.ask("a").json()["model"] == "a"
        assert waiting.result().json()["model"] == model, "it was tried again"
        assert "InstanceDown" not in kinds(events)
        way = "in_place" if model == "b" else "restart"
        labels = f'instance="e0",kind="{way}",model="{model}"'
        assert gateway.metric(f'headway_model_swaps_total{{{labels},outcome="failed"}}') >= 1


def test_a_model_that_keeps_failing_is_given_up_and_its_requests_are_told(
    start: Any, events: list[Event], tmp_path: Path
) -> None:
    behave(tmp_path / "c", "die")
    with start() as gateway, ThreadPoolExecutor() as pool:
        job = gateway.ask("c", background=True).json()
        refused = pool.submit(gateway.ask, "c").result()
        assert refused.status_code == 503
        assert "could not be loaded by e0" in refused.json()["error"]["message"]
        assert gateway.ask("c").json()["error"]["code"] == "model_unavailable"
        ended = until(lambda: (one := gateway.get(f"/v1/responses/{job['id']}").json())["error"] and one)
        assert ended["status"] == "failed"
        assert ended["error"]["message"].startswith("model_unavailable: ")
        assert gateway.ask("a").status_code == gateway.ask("b").status_code == 200
        assert kinds(events).count("InstanceUp:a") == 1 + 3


def test_a_model_that_vllm_refuses_is_given_up_at_once(start: Any, events: list[Event], tmp_path: Path) -> None:
    behave(tmp_path / "c", "refuse")
    with start() as gateway:
        assert gateway.ask("c").json()["error"]["code"] == "model_unavailable"
        assert gateway.ask("a").status_code == 200
        assert kinds(events).count("InstanceUp:a") == 1 + 1


def test_a_request_says_what_it_waits_for(start: Any, tmp_path: Path) -> None:
    behave(tmp_path / "c", "hang")
    with start() as gateway:
        job = gateway.ask("c", background=True).json()
        assert job["status"] == "queued"
        assert job["waiting_for"] == "c is not loaded; e0 can load it"
        path = f"/v1/responses/{job['id']}"
        until(lambda: gateway.get(path).json()["waiting_for"] == "c is being loaded by e0")
        assert gateway.metric('headway_queued{model="c"}') == 1
        assert gateway.ask("a", background=True).json()["waiting_for"] == "a is not loaded; e0 can load it"
        behave(tmp_path / "c", "")
        done = until(lambda: (one := gateway.get(f"/v1/responses/{job['id']}").json())["status"] != "queued" and one)
        assert done["status"] == "completed"
        assert "waiting_for" not in done


@pytest.mark.parametrize("model", ["b", "c"])
def test_a_kill_during_the_load_loses_nothing(start: Any, events: list[Event], tmp_path: Path, model: str) -> None:
    behave(tmp_path / model, "hang")
    with start() as gateway, ThreadPoolExecutor() as pool:
        first = gateway.engine.child
        waiting = [pool.submit(gateway.ask, one) for one in (model, "a", model)]
        until(lambda: gateway.engine.loading)
        if model == "c":
            until(lambda: gateway.engine.child not in (None, first))
        time.sleep(0.2)
        gateway.engine.child.signal(signal.SIGKILL)
        until(lambda: "InstanceUp:a" in kinds(events)[1:])
        behave(tmp_path / model, "")
        assert [one.result().json()["model"] for one in waiting] == [model, "a", model]
        assert "InstanceDown" not in kinds(events)


def test_a_kill_while_streams_end_is_the_death_of_the_engine(start: Any, events: list[Event]) -> None:
    with start("IMPATIENT") as gateway, ThreadPoolExecutor() as pool:
        slow = {"vllm_xargs": {"fake_delay": 0.5}, "stream": True}
        streamed = pool.submit(gateway.ask, "a", **slow)
        until(lambda: any(one.first_token for one in gateway.inner.dispatcher.in_flight.values()))
        waiting = pool.submit(gateway.ask, "b")
        until(lambda: gateway.engine.loading)
        gateway.engine.child.signal(signal.SIGKILL)
        assert "error" in streamed.result().text
        assert waiting.result().json()["model"] == "b"
        assert kinds(events) == ["InstanceUp:a", "InstanceDown", "InstanceUp:a", "Swapped:b"]


def test_weights_are_held_in_host_memory_within_the_budget(start: Any, events: list[Event]) -> None:
    """Each model has 16 kB of weights per layer; the budget holds two of them."""
    with start(host_weights_gib=36_000 / 2**30) as gateway:
        warm = lambda: gateway.controller.cluster.instances["e0"].warm  # noqa: E731
        until(lambda: warm() == ("a",))
        for model, held in (("b", ("a", "b")), ("a", ("b", "a")), ("c", ("c",))):
            gateway.ask(model)
            until(lambda held=held: warm() == held)
