"""Health, readiness, metrics of gateway and engines, models, and control of a running scheduler."""

from __future__ import annotations

from collections.abc import Callable

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.engines.vllm.process.client import VllmEngine
from headway.gateway.watch.collectors import relabelled
from headway.gateway.watch.metrics import Metrics
from headway.types import Request, Send
from tests.gateway.conftest import Serve
from tests.gateway.gateway import DEAD, Fake, Gateway, until
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import fakes


def families(gateway: Gateway) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Return every sample on /metrics by its family: (name, labels, value)."""
    answer = gateway.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.name not in found, "no family comes twice"
        found[family.name] = [(s.name, s.labels, s.value) for s in family.samples]
    return found


@pytest.mark.parametrize(
    ("page", "kept"),
    [
        ("vllm:a 1\n", ["vllm:a"]),
        ("vllm:a 1\n" * 20_000, ["vllm:a"]),
        ("vllm:a 1\n" * 20_001, []),
        ("vllm:a{" + 'b="c",' * 10_000 + "} 1\n", []),
        ("<html>", []),
        ("a 1\n", []),
        ("", []),
    ],
)
def test_only_pages_that_are_read_soon_are_merged(page: str, kept: list[str]) -> None:
    assert [family.name for family in relabelled({"e0": page})] == kept


def test_metrics_of_both_sides(serve: Serve, fake: Fake) -> None:
    with serve(fake.url, fake.url) as gateway:
        gateway.post(gateway.chat(service_tier="chat", stream=True))
        gateway.post(gateway.chat(ttft_slo_ms=0.001))
        gateway.post(gateway.chat(**fakes(end="400")))
        until(lambda: not gateway.controller.requests)
        found = families(gateway)
        attained = {labels["class"]: value for _, labels, value in found["headway_slo_attainment"]}
        assert attained == {"chat": 1.0, "default": 0.0}
        ends = {
            (by["class"], by["outcome"]): value
            for name, by, value in found["headway_requests"]
            if name.endswith("_total")
        }
        assert ends == {("chat", "finished"): 1, ("default", "finished"): 1, ("default", "refused"): 1}
        assert {labels["instance"] for _, labels, _ in found["vllm:num_preemptions"]} == {"e0", "e1"}
        assert {labels["instance"] for _, labels, _ in found["vllm:cache_config_info"]} == {"e0", "e1"}
        assert {value for _, _, value in found["headway_engine_up"]} == {1.0}
        assert [value for _, _, value in found["headway_evictions"]] == [0.0, 0.0]
        counted = {
            name
            for name in found
            if name.startswith("headway_engine_")
            and name.removeprefix("headway_engine_") not in ("up", "scraped", "state", "model", "requests")
        }
        assert counted == {
            f"headway_engine_{name}" for name in ("steps", "step_seconds", "pauses", "evictions", "restarts", "kv")
        }
        assert sorted(by["instance"] for _, by, _ in found["headway_engine_evictions"]) == ["e0", "e1"]
        tokens = {labels["kind"]: value for name, labels, value in found["headway_tokens"] if name.endswith("_total")}
        assert tokens["output"] == 16
        assert not any(name.startswith("process_") for name in found), "an engine's process is not ours"
        for name in ("headway_ttft_seconds", "headway_tpot_seconds", "headway_e2e_seconds"):
            counts = [value for sample, _, value in found[name] if sample.endswith("_count")]
            assert counts == [1, 1]


def test_metrics_of_placement() -> None:
    """A request's prompt counts where it is sent, and once as moved if another engine held more of it."""
    metrics, request = Metrics(), Request("a", "m", 100, 8, 0.0, tier="chat")
    metrics.placed(request, Send("a", "e0", found=96))
    metrics.placed(request, Send("a", "e1", found=32, moved=True))

    def counted(name: str) -> list[float | None]:
        by = [{"instance": engine, "class": "chat"} for engine in ("e0", "e1")]
        return [metrics.registry.get_sample_value(f"headway_placed_{name}_total", labels) for labels in by]

    assert counted("prompt_tokens") == [100.0, 100.0]
    assert counted("cached_tokens") == [96.0, 32.0]
    assert counted("moves") == [0.0, 1.0]


def test_metrics_without_an_engine(serve: Serve) -> None:
    with serve(DEAD, ready=False) as gateway:
        found = families(gateway)
        assert found["headway_engine_up"][0][1:] == ({"instance": "e0"}, 0.0)
        assert not any(name.startswith("vllm:") for name in found)


def test_an_engine_whose_metrics_are_nonsense(gateway: Gateway, engines: Callable[..., None]) -> None:
    async def nonsense(_: VllmEngine, seconds: float) -> str:
        return "vllm:broken{ 1 2 3\n<html>"

    engines("metrics", nonsense)
    assert "headway_engine_up" in families(gateway)


def test_ready_follows_the_engines(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url, DEAD) as gateway:  # one instance of the model is enough
        assert gateway.get("/ready").json()["engines"]["e1"]["up"] is False
        assert gateway.get("/health").json() == {"status": "ok"}
        mortal.stop()
        gone = until(lambda: (seen := gateway.get("/ready")).status_code == 503 and seen)
        assert gone.json()["ready"] is False
        assert gateway.get("/health").status_code == 200
        mortal.start()
        until(lambda: gateway.get("/ready").status_code == 200)
        assert gateway.get("/ready").json()["engines"]["e0"]["restarts"] >= 1


def test_models(serve: Serve, fake: Fake) -> None:
    with serve(engine={"served_name": "tiny", "max_model_len": 512}) as gateway:
        (model,) = gateway.get("/v1/models").json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
        assert gateway.post(gateway.chat(model="tiny")).status_code == 200
        assert gateway.post(gateway.chat(model="smollm2")).status_code == 404
        with gateway.client() as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            assert client.models.retrieve("tiny").model_dump(exclude_none=True) == model
            with pytest.raises(openai.NotFoundError, match="Use one of tiny"):
                client.models.retrieve("large/model")


def test_control_reaches_the_engine(gateway: Gateway) -> None:
    state = gateway.control({"op": "state"})
    assert state.status_code == 200
    assert state.json()["block_size"] == 16
    wrong = gateway.control({"op": "dance"})
    assert wrong.status_code == 400
    assert "dance" in wrong.json()["error"]["message"]
    assert gateway.control([]).status_code == 400


def test_an_engine_without_control(serve: Serve) -> None:
    """Headway attaches to whatever speaks OpenAI's API, here to itself: there is no scheduler inside."""
    with serve() as inner, serve(inner.url) as outer:
        assert outer.control({"op": "state"}).status_code == 502
        assert outer.post(outer.chat()).status_code == 200
        answer = outer.post(outer.chat(stream=True))
        assert answer.text.count("fake ") == 8
        assert "usage" not in answer.text
        assert families(outer)["headway_engine_up"][0][2] == 1.0


def test_an_address_that_answers_everything_with_html(serve: Serve, html: str) -> None:
    with serve(html) as gateway:
        assert gateway.control({"op": "state"}).status_code == 502
        assert gateway.get("/metrics").status_code == 200
        assert error(gateway.post(gateway.chat()), 502)["code"] == "invalid_answer"


@pytest.fixture
def html() -> object:
    """A web server that has nothing to do with vLLM."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            page = b"<h1>hello</h1>"
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_schema_names_what_clients_may_send(gateway: Gateway) -> None:
    schema = gateway.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages", "ttft_slo_ms", "background", "service_tier"} <= set(body["properties"])
    assert gateway.get("/docs").status_code == 200
