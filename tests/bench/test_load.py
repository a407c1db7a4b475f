"""The load generator sends at the planned times and records what it received from a fake engine."""

from __future__ import annotations

import asyncio
import resource
import time

import numpy as np
import pytest

from headway.types import Slo
from headway.whatif.load import generator
from headway.whatif.load.records import Call
from testing.fake_engine import FakeEngine
from tests.bench.fake import METRICS, fake, serving, until

CHAT = Slo(ttft=1.5, tpot=0.15)


def call(at: float = 0.0, prompt: str = "hello", **more) -> Call:
    return Call(at, more.pop("tier", "chat"), prompt, more.pop("max_tokens", 8), **more)


async def one(engine: FakeEngine, planned: Call | None = None, **options):
    async with serving(engine) as url:
        (record,) = await generator.run(url, "m", [planned or call()], progress=False, **options)
    return record


async def test_a_completed_answer_is_timed_from_its_plan():
    began = time.monotonic()
    record = await one(fake(wait=0.1, delay=0.05), call(0.05))
    took = time.monotonic() - began
    assert record.ok
    assert record.status == 200
    assert record.at == 0.05
    assert record.at <= record.sent < record.first < record.last
    assert 0.099 <= record.ttft <= record.e2el - 0.14
    assert record.e2el < took
    assert (record.prompt_tokens, record.output_tokens) == (11, 8)
    assert record.tpot == pytest.approx((record.e2el - record.ttft) / 7)
    assert record.gaps.dtype == np.float32
    assert record.gaps.size == 3
    assert 0.14 <= record.gaps.sum() <= record.last - record.first + 1e-5


async def test_the_chunk_with_only_the_role_is_no_token():
    record = await one(fake(wait=0.1))
    assert record.ttft >= 0.099


async def test_a_chat_body_and_its_headers():
    seen = []
    await one(
        fake(on_request=seen.append),
        call(slo=Slo(ttft=1.5, tpot=0.0125, e2e=20), priority=10, ignore_eos=True, tier="b"),
        api_key="k",
    )
    assert [request["body"] for request in seen] == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 8,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "priority": 10,
        }
    ]
    sent = seen[0]["headers"]
    assert sent["x-slo-ttft-ms"] == "1500"
    assert sent["x-slo-tpot-ms"] == "12.5"
    assert sent["x-slo-e2e-ms"] == "20000"
    assert sent["x-llm-d-inference-objective"] == "b"
    assert sent["authorization"] == "Bearer k"


async def test_a_completion_without_priority_or_slo():
    seen = []
    record = await one(fake(on_request=seen.append), call(), endpoint="completions", send_priority=False)
    assert record.ok
    assert record.output_tokens == 8
    assert seen[0]["body"]["prompt"] == "hello"
    assert not {"priority", "ignore_eos", "messages"} & seen[0]["body"].keys()
    assert not [name for name in seen[0]["headers"] if name.startswith("x-slo")]


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("429", 429, "HTTP 429: FAKE instant engine: asked to fail"),
        ("500", 500, "HTTP 500: "),
        ("html", 502, "HTTP 502: <h1>bad gateway</h1>"),
        ("cut", 200, "ClientPayloadError"),
        ("error", 200, "error in the stream: {'message': 'FAKE instant engine: asked to fail'"),
        ("garbage", 200, "JSONDecodeError"),
        ("short", 200, "disconnect: "),
        ("empty", 200, "empty: "),
    ],
)
async def test_a_failure_is_recorded_and_misses_its_promise(how, status, error):
    record = await one(fake(script=lambda prompt: how), call(slo=CHAT))
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
    record = await one(fake(wait=5.0), patience=0.2)
    assert record.error.startswith("TimeoutError")


async def test_without_usage_chunks_are_counted_and_said():
    record = await one(fake(3, script=lambda prompt: "no usage"))
    assert record.ok
    assert record.counted
    assert (record.prompt_tokens, record.output_tokens) == (0, 3)


async def test_an_answer_of_one_invisible_token_is_an_answer():
    record = await one(fake(script=lambda prompt: "silent"))
    assert record.ok
    assert record.output_tokens == 1
    assert record.tpot is None
    assert record.first == record.last


async def test_it_is_open_loop_and_in_planned_order():
    planned = [call(at) for at in (0.2, 0.0, 0.1, 0.15, 0.05)]
    engine = fake(barrier=5)
    async with serving(engine) as url:
        records = await generator.run(url + "/v1/", "m", planned, progress=False)
    assert [record.at for record in records] == [0.0, 0.05, 0.1, 0.15, 0.2]
    assert engine.most_open == 5  # none waited for another's response
    assert all(0 <= record.sent - record.at < 1 for record in records)


async def test_many_at_once_share_no_socket():
    engine = fake(1, barrier=150)
    async with serving(engine) as url:
        records = await generator.run(url, "m", [call() for _ in range(150)], progress=False)
    assert engine.most_open == 150  # aiohttp's own limit would have been 100
    assert all(record.ok for record in records)


async def test_failures_do_not_stop_the_others():
    prompts = ["", "429", "cut", "", "garbage", ""]
    async with serving(fake(script=lambda prompt: prompt)) as url:
        records = await generator.run(url, "m", [call(i / 100, p) for i, p in enumerate(prompts)], progress=False)
    assert [record.ok for record in records] == [not prompt for prompt in prompts]


async def test_a_cancelled_run_reports_what_it_has():
    engine, planned = fake(1), [call(0.0), call(30.0)]
    async with serving(engine) as url:
        running = asyncio.create_task(generator.run(url, "m", planned, progress=False))
        await until(lambda: engine.asked and not engine.open)
        await asyncio.sleep(0.3)  # for its last bytes; the second is planned half a minute from now
        running.cancel()
        records = await running
    assert [record.ok for record in records] == [True]  # the second was never sent


async def test_a_cancelled_call_is_said_to_be_cut_off():
    engine = fake(wait=30.0)
    async with serving(engine) as url:
        running = asyncio.create_task(generator.run(url, "m", [call()], progress=False))
        await until(lambda: engine.asked)
        running.cancel()
        (record,) = await running
        assert not running.cancelled()
    assert record.error.startswith("cancelled: ")
    assert record.first is None


async def test_no_calls_no_records():
    assert await generator.run("http://127.0.0.1:9", "m", [], progress=False) == []


async def test_the_bar_goes_to_stderr(capsys):
    async with serving(fake(script=lambda prompt: prompt)) as url:
        await generator.run(url, "m", [call(0, ""), call(0.01, "429")])
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
    async with serving(fake()) as url:
        assert await generator.scrape(url + "/v1") == {"preemptions": 7.0}
    async with serving(fake(metrics=OURS)) as url:
        assert await generator.scrape(url) == {"preemptions": 7.0, "recomputed": 45.0}


@pytest.mark.parametrize("page", [None, "vllm:other 1\n", "vllm:num_preemptions_total nonsense\n"])
async def test_no_counters_to_read_are_none(page):
    async with serving(fake(metrics=page)) as url:
        assert await generator.scrape(url) == {}


async def test_counters_of_nobody_are_none():
    assert await generator.scrape("http://127.0.0.1:9") == {}


def test_what_only_one_reading_has_is_unknown():
    assert generator.gained({"a": 2.0, "b": 1.0}, {"a": 5.0, "c": 1.0}) == {"a": 3.0}


async def test_the_limit_of_open_files_is_raised_as_far_as_allowed():
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        for calls, least, most in ((500, 1024, 1024), (2000, 2000, 3000), (hard + 1, hard, hard)):
            await generator.session(calls).close()
            assert least <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
