"""Does the load generator send when it said, and tell what came back? (Against a fake endpoint.)"""

from __future__ import annotations

import asyncio
import resource
import time

import numpy as np
import pytest

from headway.bench.load import generator
from headway.bench.load.records import Call
from headway.types import Slo
from tests.bench.fake import METRICS, Fake, serving

CHAT = Slo(ttft=1.5, tpot=0.15)


def call(at: float = 0.0, prompt: str = "hello", **more) -> Call:
    return Call(at, more.pop("tier", "chat"), prompt, more.pop("max_tokens", 8), **more)


async def one(fake: Fake, planned: Call | None = None, **options):
    async with serving(fake):
        (record,) = await generator.run(fake.url, "m", [planned or call()], progress=False, **options)
    return record


async def test_a_completed_answer_is_timed_from_its_plan():
    began = time.monotonic()
    record = await one(Fake(words=4, wait=0.1, gap=0.05), call(0.05))
    took = time.monotonic() - began
    assert record.ok
    assert record.status == 200
    assert record.at == 0.05
    assert record.at <= record.sent < record.first < record.last
    assert 0.099 <= record.ttft <= record.e2el - 0.14
    assert record.e2el < took
    assert (record.prompt_tokens, record.output_tokens) == (11, 8)
    assert record.tpot == pytest.approx((record.e2el - record.ttft) / 7)
    assert record.itl.dtype == np.float32
    assert record.itl.size == 3
    assert record.itl.sum() == pytest.approx(record.last - record.first, abs=1e-5)


async def test_the_chunk_with_only_the_role_is_no_token():
    record = await one(Fake(wait=0.1))
    assert record.ttft >= 0.099


async def test_a_chat_body_and_its_headers():
    fake = Fake()
    await one(
        fake,
        call(slo=Slo(ttft=1.5, tpot=0.0125, e2e=20), priority=10, ignore_eos=True, tier="b"),
        api_key="k",
    )
    assert fake.bodies == [
        {
            "model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "priority": 10,
        }
    ]  # fmt: skip
    sent = fake.headers[0]
    assert sent["x-slo-ttft-ms"] == "1500"
    assert sent["x-slo-tpot-ms"] == "12.5"
    assert sent["x-slo-e2e-ms"] == "20000"
    assert sent["x-llm-d-inference-objective"] == "b"
    assert sent["authorization"] == "Bearer k"


async def test_a_completion_without_priority_or_slo():
    fake = Fake()
    record = await one(fake, call(), endpoint="completions", send_priority=False)
    assert record.ok
    assert record.output_tokens == 8
    assert fake.bodies[0]["prompt"] == "hello"
    assert not {"priority", "ignore_eos", "messages"} & fake.bodies[0].keys()
    assert not [name for name in fake.headers[0] if name.startswith("x-slo")]


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("429", 429, "HTTP 429: no room: try later"),
        ("500", 500, "HTTP 500: "),
        ("html", 502, "HTTP 502: <h1>bad gateway</h1>"),
        ("drop", 200, "ClientPayloadError"),
        ("error", 200, "error in the stream: {'message': 'engine died'}"),
        ("garbage", 200, "JSONDecodeError"),
        ("short", 200, "disconnect: "),
        ("empty", 200, "empty: "),
    ],
)
async def test_a_failure_is_recorded_and_misses_its_promise(how, status, error):
    record = await one(Fake(script=lambda prompt: how), call(slo=CHAT))
    assert record.status == status
    assert record.error is not None
    assert record.error.startswith(error)
    assert not record.ok
    assert not record.met
    assert record.last is not None


async def test_nobody_there_is_recorded():
    (record,) = await generator.run("http://127.0.0.1:9", "m", [call()], progress=False)
    assert record.status is None
    assert record.error.startswith("ClientConnectorError")


async def test_patience_ends():
    record = await one(Fake(wait=5), patience=0.2)
    assert record.error.startswith("TimeoutError")


async def test_without_usage_chunks_are_counted_and_said():
    record = await one(Fake(words=3, script=lambda prompt: "no usage"))
    assert record.ok
    assert record.counted
    assert (record.prompt_tokens, record.output_tokens) == (0, 3)


async def test_an_answer_of_one_invisible_token_is_an_answer():
    record = await one(Fake(script=lambda prompt: "silent"))
    assert record.ok
    assert record.output_tokens == 1
    assert record.tpot is None
    assert record.first == record.last


async def test_it_is_open_loop_and_in_planned_order():
    planned = [call(at) for at in (0.2, 0.0, 0.1, 0.15, 0.05)]
    fake = Fake(hold=5)
    async with serving(fake):
        records = await generator.run(fake.url + "/v1/", "m", planned, progress=False)
    assert [record.at for record in records] == [0.0, 0.05, 0.1, 0.15, 0.2]
    assert fake.most_open == 5  # none waited for another's answer
    assert all(0 <= record.sent - record.at < 1 for record in records)


async def test_many_at_once_share_no_socket():
    fake = Fake(hold=150, words=1)
    async with serving(fake):
        records = await generator.run(fake.url, "m", [call() for _ in range(150)], progress=False)
    assert fake.most_open == 150  # aiohttp's own limit would have been 100
    assert all(record.ok for record in records)


async def test_failures_do_not_stop_the_others():
    fake = Fake(script=lambda prompt: prompt)
    prompts = ["", "429", "drop", "", "garbage", ""]
    async with serving(fake):
        records = await generator.run(
            fake.url, "m", [call(i / 100, p) for i, p in enumerate(prompts)], progress=False
        )
    assert [record.ok for record in records] == [not prompt for prompt in prompts]


async def test_a_cancelled_run_reports_what_it_has():
    fake = Fake(words=1, script=lambda prompt: "")
    planned = [call(0.0), call(30.0)]
    async with serving(fake):
        running = asyncio.create_task(generator.run(fake.url, "m", planned, progress=False))
        await asyncio.wait_for(fake.done.wait(), 10)
        await asyncio.sleep(0.3)  # for its last bytes; the second is planned half a minute from now
        running.cancel()
        records = await running
    assert [record.ok for record in records] == [True]  # the second was never sent


async def test_a_cancelled_call_is_said_to_be_cut_off():
    fake = Fake(wait=30)
    async with serving(fake):
        running = asyncio.create_task(generator.run(fake.url, "m", [call()], progress=False))
        await asyncio.wait_for(fake.came.wait(), 10)
        running.cancel()
        (record,) = await running
        assert not running.cancelled()
    assert record.error.startswith("cancelled: ")
    assert record.first is None


async def test_no_calls_no_records():
    assert await generator.run("http://127.0.0.1:9", "m", [], progress=False) == []


async def test_the_bar_goes_to_stderr(capsys):
    fake = Fake(script=lambda prompt: prompt)
    async with serving(fake):
        await generator.run(fake.url, "m", [call(0, ""), call(0.01, "429")])
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "1/2 done 2 sent 1 failed" in " ".join(seen.err.split())


OURS = (
    METRICS
    + """# TYPE headway_engine_recomputed counter
headway_engine_recomputed_total{instance="e0"} 30.0
headway_engine_recomputed_total{instance="e1"} 1.5e+01
headway_engine_up{instance="e1"} 1.0
"""
)


async def test_counters_are_summed_over_engines():
    async with serving(Fake()) as fake:
        assert await generator.scrape(fake.url + "/v1") == {"preemptions": 7.0}
    async with serving(Fake(metrics=OURS)) as fake:
        assert await generator.scrape(fake.url) == {"preemptions": 7.0, "recomputed": 45.0}


@pytest.mark.parametrize("page", [None, "vllm:other 1\n", "vllm:num_preemptions_total nonsense\n"])
async def test_no_counters_to_read_are_none(page):
    async with serving(Fake(metrics=page)) as fake:
        assert await generator.scrape(fake.url) == {}


async def test_counters_of_nobody_are_none():
    assert await generator.scrape("http://127.0.0.1:9") == {}


def test_what_only_one_reading_has_is_unknown():
    assert generator.gained({"a": 2.0, "b": 1.0}, {"a": 5.0, "c": 1.0}) == {"a": 3.0}


def test_the_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch):
    seen = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: seen.append(limits))
    generator._allow_files(500)
    generator._allow_files(2000)
    generator._allow_files(10**6)
    assert seen == [(2000, 4096), (4096, 4096)]
