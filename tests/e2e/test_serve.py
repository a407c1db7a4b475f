"""A fresh `headway serve`: the official client streams a chat with SLOs, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.server import ANSWER_S, OPERATOR, Headway
from tests.gateway.gateway import WEB

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def client(headway: Headway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{headway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_streams_a_chat_with_slos(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        max_tokens=20,
        temperature=0,
        stream=True,
        extra_headers={"x-slo-ttft-ms": "5000", "x-slo-tpot-ms": "1000"},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len(chunks) > 2, "tokens come as they are made"
    assert all(chunk.usage is None for chunk in chunks), "usage only when asked for"


def test_stream_and_whole_answer_agree(client: openai.OpenAI) -> None:
    ask = {"model": "smollm2", "messages": QUESTION, "max_tokens": 20, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**ask)
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_parameters_reach_the_engine(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2",
        prompt="One two three four",
        max_tokens=12,
        n=2,
        logprobs=3,
        temperature=0.9,
        stop=["zzzz"],
        extra_body={"ignore_eos": True},
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_a_prompt_with_a_seed_may_come_in_chunks(client: openai.OpenAI) -> None:
    """It crashes stock vLLM 0.32 on a CPU; `tests/engine/test_exact.py` compares tokens."""
    both = [f"{word} word more " * 400 for word in ("one", "no")]  # more than one iteration computes
    answer = client.completions.create(
        model="smollm2", prompt=both, max_tokens=8, seed=7, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_stop_ends_an_answer(client: openai.OpenAI) -> None:
    ask = {"model": "smollm2", "prompt": "1 2 3 4 5 6", "max_tokens": 16, "temperature": 0}
    free = client.completions.create(**ask).choices[0].text
    word = free.split()[1]
    stopped = client.completions.create(**ask, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[: free.index(word)]


def test_engine_errors_pass_through_unchanged(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(
            model="smollm2", messages=QUESTION, temperature="hot", extra_body={"max_tokens": 5}
        )  # type: ignore[call-overload]


def test_metrics_join_both_sides(headway: Headway, client: openai.OpenAI) -> None:
    promised = {"x-slo-ttft-ms": "600000"}
    client.completions.create(model="smollm2", prompt="1 2 3", max_tokens=2, extra_headers=promised)
    deadline = time.monotonic() + ANSWER_S
    page = ""
    while 'headway_slo_attainment{class="default",model="smollm2"}' not in page:  # counted after the answer
        assert time.monotonic() < deadline
        time.sleep(0.05)
        page = WEB.get(f"{headway.url}/metrics", timeout=ANSWER_S).text
    assert 'headway_engine_up{instance="e0"} 1.0' in page
    assert 'headway_engine_kv{instance="e0",kv="stock"} 1.0' in page
    assert "vllm:num_preemptions_total{" in page
    assert 'instance="e0"' in page.split("vllm:num_preemptions_total{")[1].split("}")[0]


def test_the_built_in_chat_is_measured_before_requests_are_taken(headway: Headway, client: openai.OpenAI) -> None:
    """Its promise is one that this machine keeps while it has nothing else to do, however slow it is."""
    log = (headway.folder / "gateway.log").read_text()
    assert log.index("engine e0: measured in") < log.index("engine e0 is up")
    assert "chat: first token" in log
    assert "class strict: a prompt of 256 tokens takes" in log, "1 ms is stated, and no engine's"
    before = _total(headway, "headway_slo_met_total"), _total(headway, "headway_slo_owed_total")
    for _ in range(3):
        chat = client.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=16, stream=True, service_tier="priority"
        )
        assert list(chat)
    deadline = time.monotonic() + ANSWER_S
    while (owed := _total(headway, "headway_slo_owed_total")) < before[1] + 3:  # counted after the answer
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (_total(headway, "headway_slo_met_total"), owed) == (before[0] + 3, before[1] + 3)
    assert _total(headway, "headway_stream_gap_seconds_count") >= 3


def _total(headway: Headway, name: str) -> float:
    """Return a metric of class chat, 0 before it has counted anything."""
    page = WEB.get(f"{headway.url}/metrics", timeout=ANSWER_S).text
    start = f'{name}{{class="chat",model="smollm2"'  # a tenant may follow
    return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(start)), 0.0)


def test_what_no_engine_could_do_on_time_is_refused_where_the_class_asks_for_it(
    headway: Headway, client: openai.OpenAI
) -> None:
    """By the latency that the real engine has learned and told."""
    ask = {"model": "smollm2", "messages": QUESTION, "max_tokens": 48, "extra_body": {"ignore_eos": True}}
    client.chat.completions.create(**ask)
    assert headway.control({"op": "state"}).json()["latency"]["theta"]
    time.sleep(2.5)  # the gateway asks for it every second
    with pytest.raises(openai.RateLimitError, match=r"would take .* 0\.001 s were promised") as caught:
        client.chat.completions.create(**ask, service_tier="strict")
    assert caught.value.response.headers["x-headway-dropped-reason"] == "infeasible"
    assert "retry-after" not in caught.value.response.headers, "it was refused at the door"


def test_control_reaches_the_running_scheduler(headway: Headway) -> None:
    state = headway.control({"op": "state", "log": 3}).json()
    assert state["recipe"] == "headway"
    assert state["blocks_free"] == state["blocks_total"]
    assert len(state["log"]) == 3
    refused = headway.control({"op": "dance"})
    assert "error" in refused.json()


def test_why_a_request_was_late_is_told_from_the_journal(headway: Headway, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="smollm2",
        messages=QUESTION,
        max_tokens=12,
        extra_headers={"x-slo-e2e-ms": "1"},
        extra_body={"ignore_eos": True},
        stream=False,
    )
    folder = str(headway.queue.with_suffix(".journal"))
    deadline = time.monotonic() + ANSWER_S
    seen: dict[str, float] = {}
    while time.monotonic() < deadline and "running" not in seen:  # the engine is asked every second
        argv = [sys.executable, "-m", "headway.cli", "explain", raw.headers["x-request-id"]]
        told = subprocess.run([*argv, "--journal", folder, "--json"], capture_output=True, check=False)
        seen = json.loads(told.stdout)["seconds"] if told.returncode == 0 else {}
    story = json.loads(told.stdout)
    assert not story["simulated"]
    assert "against an SLO of 0.001 s" in story["verdict"]
    assert {"outside", "prefill", "running"} <= set(seen)
    assert sum(seen.values()) == pytest.approx(story["latency"])
    assert max(seen, key=lambda state: seen[state]) in ("running", "prefill", "waiting")


def test_an_engine_is_replaced_while_requests_come(headway: Headway, client: openai.OpenAI) -> None:
    path, ask = f"{headway.url}/v1/headway/engines", {"model": "smollm2", "messages": QUESTION, "temperature": 0}
    (before,) = WEB.get(path, headers=OPERATOR).json()["data"]
    with ThreadPoolExecutor() as pool:
        stream = client.chat.completions.create(**ask, max_tokens=100, stream=True, extra_body={"ignore_eos": True})
        begun = next(stream)
        rolled = WEB.post(f"{path}/roll", json={}, headers=OPERATOR)
        assert (rolled.status_code, rolled.json()["data"][0]["id"]) == (202, "e0")
        waiting = pool.submit(client.chat.completions.create, **ask, max_tokens=20)
        chunks = [begun, *stream]
        assert chunks[-1].choices[0].finish_reason == "length", "the stream ended where it began"
        assert "Paris" in str(waiting.result(ANSWER_S).choices[0].message.content), "it waited for the new engine"
    (engine,) = WEB.get(path, headers=OPERATOR).json()["data"]
    assert (engine["state"], engine["restarts"], engine["error"]) == ("up", before["restarts"] + 1, None)
