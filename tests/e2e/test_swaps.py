"""Model swaps on a real vLLM: in place, by restart, and one whose new engine is killed while it loads.

One engine goes through all of it, because each start takes a quarter of a minute. A model that was loaded in
place must answer as a vLLM that was started with it, token by token (float32, greedy).
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.config import Broker, Config, Engine, Server, Sqlite
from headway.engines.vllm.process import models
from headway.engines.vllm.process.host_weights import is_warm
from headway.models.compare import weight_files
from headway.models.variants import vary
from tests.conftest import CORE
from tests.gateway.gateway import CLASSES, serving, until
from tests.gateway.swapping import Swapping, kinds, note_events

LONG = "The sea is wide, and the ships that cross it are small. " * 24  # more than two blocks of 128 tokens
PROMPTS = ("The capital of France is", "Once upon a time", LONG)


def tokens(gateway: Swapping, model: str, prompt: str = PROMPTS[0], **fields: Any) -> list[int]:
    """Return the tokens of a greedy answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = gateway.post(body | {"ignore_eos": True} | fields, "/v1/completions", timeout=300)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return list(answer.json()["choices"][0]["token_ids"])


def answers(gateway: Swapping, model: str) -> list[list[int]]:
    return [tokens(gateway, model, prompt) for prompt in PROMPTS]


def cached(gateway: Swapping) -> float:
    """Return the tokens that the engine has found in its prefix cache so far."""
    return gateway.metric("vllm:prefix_cache_hits_total")


def streamed(gateway: Swapping, model: str, began: Any) -> str:
    stream = gateway.client(timeout=300).completions.create(
        model=model, prompt=PROMPTS[1], max_tokens=500, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    text = ""
    for chunk in stream:
        text += chunk.choices[0].text if chunk.choices else ""
        began()
    return text


def test_answers_after_a_swap_are_those_of_a_fresh_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *_path()]))
    monkeypatch.setattr(models, "RETRY_AFTER", (2.0, 2.0))
    events = note_events(monkeypatch)
    model = vary("smollm2", tmp_path / "smollm2", layers=4, scale=0.0)
    near = vary(str(model), tmp_path / "near", seed=1, scale=0.6)
    short = vary(str(model), tmp_path / "short", layers=3)
    engine = Engine(
        model=str(model),
        models=(str(near), str(short)),
        dtype="float32",
        cores=CORE,
        max_model_len=1024,
        max_running=8,
        start_timeout_s=1200,
        host_weights_gib=1,
    )
    queue = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    config = Config("tests.gateway.swapping:RECIPE", Server(port=8000), (engine,), queue, classes=CLASSES)
    with serving(config, ready=False) as inner, ThreadPoolExecutor() as pool:
        gateway = Swapping(**vars(inner))
        until(lambda: gateway.engine.up.is_set(), 1200)
        first = answers(gateway, "smollm2")
        whole = streamed(gateway, "smollm2", lambda: None)
        in_place(gateway, pool, first, whole)
        loaded = answers(gateway, "near")
        assert all(a != b for a, b in zip(first, loaded, strict=True)), "other weights answer otherwise"
        assert kinds(events) == ["InstanceUp:smollm2", "Swapped:near", "Swapped:smollm2", "Swapped:near"]
        assert killed(gateway, pool) == loaded, "the engine that came back was started with it"
        assert kinds(events)[4:] == ["InstanceUp:near", "Swapped:short"]

        assert is_warm(weight_files(gateway.engine.models.path("near")))
        warm = lambda: set(gateway.controller.cluster.instances["e0"].warm)  # noqa: E731
        until(lambda: warm() == {"smollm2", "near", "short"})
        until(lambda: {state for state, _ in gateway.jobs().values()} == {"done"})


def in_place(gateway: Swapping, pool: ThreadPoolExecutor, first: list[list[int]], whole: str) -> None:
    """Swap in the middle of a stream and with a request inside that has sent nothing."""
    began: list[int] = []
    stream = pool.submit(streamed, gateway, "smollm2", lambda: began.append(1))
    until(lambda: began, 60)
    held = pool.submit(tokens, gateway, "smollm2", max_tokens=300)  # seconds: a busy machine stops this thread
    until(lambda: gateway.engine._open == 2, 60)
    gateway.order("near")
    assert stream.result() == whole, "no token is lost, repeated, or another model's"
    assert held.result()[:8] == first[0], "it went back to the queue, and the model came back for it"
    before = cached(gateway)
    assert tokens(gateway, "smollm2", LONG) == first[2]
    before = cached(gateway)
    assert tokens(gateway, "smollm2", LONG) == first[2]
    assert cached(gateway) > before, "prefixes are found again as long as the model stays"
    before = cached(gateway)
    other = tokens(gateway, "near", LONG)
    assert cached(gateway) == before, "and none of another model's"
    assert other != first[2]


def killed(gateway: Swapping, pool: ThreadPoolExecutor) -> list[list[int]]:
    """Kill the new engine of a restart while it loads; return what near answers when it has come back.

    All that waits is answered in the end, the requests for the model that was not loaded, too.
    """
    before = gateway.engine.child
    waiting = [pool.submit(tokens, gateway, "short") for _ in range(2)]
    until(lambda: gateway.engine.child not in (None, before), 60)
    assert gateway.engine.loading == "short"
    back = [pool.submit(tokens, gateway, "near", prompt) for prompt in PROMPTS]
    until(lambda: len(gateway.inner.dispatcher.in_flight) == 5, 60)
    gateway.engine.child.signal(signal.SIGKILL)  # type: ignore[union-attr]
    answered = [one.result() for one in back]
    short = [one.result() for one in waiting]
    assert short[0] == short[1] != answered[0]
    labels = 'instance="e0",kind="restart",model="short"'
    for outcome in ("failed", "loaded"):
        assert gateway.metric(f'headway_model_swaps_total{{{labels},outcome="{outcome}"}}') == 1
    return answered


def _path() -> list[str]:
    return [path for path in (os.environ.get("PYTHONPATH"),) if path]
