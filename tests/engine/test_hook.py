"""What the packer decides is what vLLM's scheduler does: displacement, chunk caps, control, bad metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from headway.engines.vllm import oracle
from headway.engines.vllm.fatal_fields import WORKER_EXTENSION
from headway.engines.vllm.oracle import SchedulerOracle
from headway.engines.vllm.plugin.control import PendingUrgency, _control
from headway.engines.vllm.plugin.hook import HeadwayScheduler
from headway.engines.vllm.request_metadata import write_metadata
from headway.types import Forecast, Request

pytestmark = pytest.mark.filterwarnings("default")
Make = Callable[..., SchedulerOracle]
BLOCKS = 200


@pytest.fixture
def make() -> Make:
    def build(
        recipe: str, running: int = 2, budget: int = 256, blocks: int = BLOCKS, slots: int = 8
    ) -> SchedulerOracle:
        setup = oracle.config(
            max_running=running,
            max_batched_tokens=budget,
            max_model_len=1024,
            block_size=16,
            recipe=recipe,
            slots=slots,
        )
        return SchedulerOracle(oracle.scheduler(setup, blocks, 16, HeadwayScheduler))

    return build


def request_metadata(id: str, **values: Any) -> dict[str, Any]:
    return {"headway_id": id, "headway_arrival": 0.0} | {f"headway_{k}": v for k, v in values.items()}


def control(engine: SchedulerOracle, **message: Any) -> dict[str, Any]:
    class Core:
        scheduler = engine.scheduler

    return _control(Core, message)


def test_it_tells_which_fields_crash_its_engine(make: Make) -> None:
    engine = make("headway")
    import vllm

    known = ["seed"] if vllm.__version__.startswith("0.32.") else []  # newer releases were not tried on a CPU
    assert control(engine, op="state")["fatal"] == known
    parallel = cast(Any, engine.scheduler).vllm_config.parallel_config
    parallel.worker_extension_cls = WORKER_EXTENSION
    assert control(engine, op="state")["fatal"] == []


@pytest.mark.parametrize("recipe", ["priority", "edf", "slack"])
def test_urgent_takes_the_place_of_running_work_when_the_batch_is_full(make: Make, recipe: str) -> None:
    """vLLM issue 40004: there the urgent one waits until somebody ends."""
    engine = make(recipe)
    engine.add("a", 40, 50, priority=5, metadata=request_metadata("a"))
    engine.add("b", 40, 50, priority=5, metadata=request_metadata("b"))
    engine.step()
    engine.add("urgent", 40, 5, priority=0, metadata=request_metadata("urgent", ttft=0.5, tpot=0.1))
    assert "urgent" in engine.step()
    held = engine.scheduler.jobs
    assert held.computed[held.row_of["b"]] > 0, "the displaced one keeps its KV"
    while engine.busy:
        engine.step()
    assert engine.finished[0] == "urgent"
    assert engine.scheduler.counters["evictions"] == 0


def test_displacement_evicts_only_when_blocks_are_short(make: Make) -> None:
    engine = make("edf", blocks=12)
    engine.add("a", 80, 20, metadata=request_metadata("a"))
    engine.step()
    engine.add("urgent", 100, 5, metadata=request_metadata("urgent", ttft=0.5))
    engine.step()
    assert engine.scheduler.counters["evictions"] == 1
    while engine.busy:
        engine.step()
    assert engine.finished == ["urgent", "a"]
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 11


def test_prompt_chunks_go_to_the_urgent_first(make: Make) -> None:
    engine = make("edf", budget=128)
    engine.add("long", 600, 5, metadata=request_metadata("long"))
    assert engine.step() == {"long": 128}
    engine.add("urgent", 100, 5, metadata=request_metadata("urgent", ttft=0.5))
    assert engine.step() == {"long": 28, "urgent": 100}


def test_control_changes_urgency_while_running(make: Make) -> None:
    engine = make("slack", running=1)
    for name in "abc":
        engine.add(name, 20, 10, metadata=request_metadata(name))
    engine.step()
    state = control(engine, op="urgency", values={"c": -1})
    assert {job["id"]: job["urgency"] for job in state["jobs"]}["c"] == -1
    while engine.busy:
        engine.step()
    assert engine.finished[0] == "c"


def finish(engine: SchedulerOracle) -> list[str]:
    """Run to the end; return the requests in the order in which they ended."""
    while engine.busy:
        engine.step()
    return engine.finished


@pytest.mark.parametrize("recipe", ["priority", "edf", "slack"])
def test_a_rank_given_by_the_gateway_is_the_order_inside(make: Make, recipe: str) -> None:
    engine = make(recipe, running=1)
    for name, rank in (("d", math.inf), ("b", 1.0), ("c", 2.5), ("a", -math.inf), ("neutral", 0.0)):
        request = Request(name, "m", 20, 5, 0.0)
        wire = json.dumps(write_metadata(request, Forecast(np.array([5.0])), rank), allow_nan=False)
        engine.add(name, 20, 5, metadata=json.loads(wire))
    assert finish(engine) == ["a", "neutral", "b", "c", "d"]


def test_a_rerank_changes_the_order_of_requests_that_run_or_wait(make: Make) -> None:
    engine = make("slack", running=1)
    for name in "abc":
        engine.add(name, 20, 10, metadata=request_metadata(name, urgency=1.0))
    assert "a" in engine.step()
    control(engine, op="urgency", values={"a": 3.0, "b": 2.0})
    assert list(engine.step()) == ["c"], "the running request gives way"
    assert finish(engine) == ["c", "b", "a"]


def test_a_rerank_that_comes_before_its_request_is_kept(make: Make) -> None:
    engine = make("slack", running=1)
    engine.add("a", 20, 10, metadata=request_metadata("a"))
    control(engine, op="urgency", values={"a": 1.0, "c": -2.0, "d": math.inf})
    for name in "dbc":
        engine.add(name, 20, 10, metadata=request_metadata(name))
    assert finish(engine) == ["c", "b", "a", "d"]
    engine.step()  # the last one leaves with the next step
    assert not any(name in engine.scheduler.pending for name in "abcd")


def test_only_the_newest_reranks_of_unknown_requests_are_kept() -> None:
    pending = PendingUrgency(limit=2)
    for name, urgency in (("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 4.0)):
        pending.keep(name, urgency)
    assert [pending.of(name, 0.0) for name in "abc"] == [3.0, 0.0, 4.0]
    pending.drop("a")
    assert "a" not in pending


def test_all_samples_of_a_request_get_its_rank(make: Make) -> None:
    """With `n` = 2 vLLM makes two requests of one."""
    engine = make("slack", running=1)
    engine.add("other", 20, 10, metadata=request_metadata("other"))
    control(engine, op="urgency", values={"x": -1.0})
    engine.add("0_x", 20, 10, metadata=request_metadata("x"))
    control(engine, op="urgency", values={"x": -2.0})
    engine.add("1_x", 20, 10, metadata=request_metadata("x"))
    state = control(engine, op="state")
    assert [job["urgency"] for job in state["jobs"]] == [0.0, -2.0, -2.0]
    assert control(engine, op="state", jobs=False)["jobs"] == []


def test_state_says_how_far_the_requests_asked_for_are(make: Make) -> None:
    """The newest numbers: the packer's table learns of an iteration only before the next one."""
    engine = make("slack", budget=64)
    for id, prompt in (("a", 40), ("b", 100), ("c", 10)):
        engine.add(f"0_{id}", prompt, 10, metadata=request_metadata(id))
    engine.step()
    jobs = control(engine, op="state", ids=["a", "b", "stranger"])["jobs"]
    found = {job["id"]: (job["computed"], job["output_tokens"]) for job in jobs}
    assert found.keys() == {"a", "b"}
    assert found["a"] == (40, 1)
    assert found["b"][0] < 100
    assert found["b"][1] == 0


def test_state_says_what_was_learned_once_there_is_something(make: Make) -> None:
    engine = make("slack")
    engine.add("a", 20, 80, metadata=request_metadata("a"))
    engine.step()
    assert control(engine, op="state")["latency"] is None
    for _ in range(60):
        engine.step()
    learned = control(engine, op="state")["latency"]
    assert learned["theta"] == engine.scheduler.latency.theta.tolist()
    assert learned["cached"] >= 0


def test_control_pauses_keeping_kv_and_resumes(make: Make) -> None:
    engine = make("slack")
    engine.add("a", 20, 10, metadata=request_metadata("a"))
    engine.add("b", 20, 10, metadata=request_metadata("b"))
    engine.step()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    state = control(engine, op="pause", ids=["a"])
    assert [job["held"] for job in state["jobs"]] == [True, False]
    assert all("a" not in engine.step() for _ in range(5))
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    control(engine, op="resume", ids=["a"])
    assert "a" in engine.step()


def test_control_holds_back_one_that_waits(make: Make) -> None:
    engine = make("slack")
    engine.add("a", 20, 3, metadata=request_metadata("a"))
    control(engine, op="pause", ids=["a"])
    assert engine.step() == {}
    control(engine, op="resume", ids=["a"])
    assert engine.step() == {"a": 20}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"op": "dance"},
        {"op": "urgency"},
        {"op": "urgency", "values": {"a": "x"}},
        {"op": "urgency", "values": {"a": math.nan}},
    ],
)
def test_control_answers_nonsense_with_an_error(make: Make, message: dict[str, Any]) -> None:
    engine = make("slack")
    engine.add("a", 20, 3, metadata=request_metadata("a"))
    assert "error" in control(engine, **message)
    assert engine.step() == {"a": 20}


def test_state_and_log_tell_what_ran(make: Make) -> None:
    engine = make("slack")
    engine.add("a", 20, 3, metadata=request_metadata("ours"))
    engine.step()
    state = control(engine, op="state", log=5)
    assert state["running"] == 1
    assert state["jobs"][0]["id"] == "ours"
    assert state["log"][-1][1] == {"a": 20}


def counts(engine: Any) -> tuple[int, int, int]:
    state = control(engine, op="state", jobs=False)
    return state["running"], state["paused"], state["waiting"]


def test_state_tells_computing_paused_and_waiting_requests_apart(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    engine = make("slack", running=2)
    for name in "abc":
        engine.add(name, 20, 10, metadata=request_metadata(name))
    engine.step()
    assert counts(engine) == (2, 0, 1)
    first = engine.scheduler.running[0].request_id
    control(engine, op="pause", ids=[first])
    engine.step()
    assert counts(engine) == (3, 1, 0), "another one has taken its turn"
    engine.scheduler.finish_requests(list("abc"), RequestStatus.FINISHED_ABORTED)
    assert counts(engine) == (0, 0, 0)


@pytest.mark.parametrize("junk", ["abc", None, True, [1.0], math.nan, math.inf])
def test_malformed_metadata_do_not_stop_the_engine(make: Make, junk: Any) -> None:
    engine = make("slack")
    names = ("ttft", "arrival", "tokens_left", "urgency")
    engine.add("a", 20, 3, metadata={f"headway_{name}": junk for name in names})
    engine.add("b", 20, 3)
    while engine.busy:
        engine.step()
    assert sorted(engine.finished) == ["a", "b"]


def test_aborted_requests_leave_the_table(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    engine = make("slack", running=1)
    for name in "abc":
        engine.add(name, 20, 10, metadata=request_metadata(name))
    engine.step()
    engine.scheduler.finish_requests(["a", "c"], RequestStatus.FINISHED_ABORTED)
    while engine.busy:
        engine.step()
    assert engine.finished == ["b"]
    assert len(engine.scheduler.jobs) <= 1  # the last one leaves with the next step
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def test_slots_bound_what_holds_kv(make: Make) -> None:
    """Paused requests keep their slot in the model runner: no more than `slots` ever hold KV."""
    engine = make("edf", running=2, slots=3)
    for i in range(8):
        engine.add(f"r{i}", 20, 12, metadata=request_metadata(f"r{i}", ttft=10.0 - i))
        engine.step()
        assert len(engine.scheduler.running) <= 3
    while engine.busy:
        engine.step()
    assert len(engine.finished) == 8
