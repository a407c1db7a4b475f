"""The account of runs: how each ended, when, and that what is remembered is bounded."""

from __future__ import annotations

import pytest

from headway.events import Arrived, Failed, Finished, RunEnded, UnitBegan, UnitEnded
from headway.policy.apps.account import EndedRun, RunAccount
from headway.stages import Stage
from headway.types import Request


def request(
    id: str,
    run: str = "r",
    arrival: float = 0.0,
    *,
    app: str = "agent",
    unit: str = "act",
    tenant: str = "t",
    target: float | None = None,
    final: bool = False,
) -> Request:
    return Request(id, "m", 100, 50, arrival, tenant=tenant, stage=Stage(app, run, unit, target, final))


def served(account: RunAccount, one: Request, end: float) -> list[EndedRun]:
    """Let a request arrive and be answered."""
    return [*account.note(Arrived(one), one.arrival), *account.note(Finished(one.id, 7), end)]


KEY = ("t", "agent", "r")


@pytest.mark.parametrize(
    ("target", "outcome", "met"), [(None, "finished", None), (9.0, "in_time", True), (8.9, "late", False)]
)
def test_a_run_takes_from_its_first_request_to_the_end_of_its_last(
    target: float | None, outcome: str, met: bool | None
) -> None:
    account = RunAccount(600.0)
    assert served(account, request("a", arrival=1.0, target=target), 3.0) == []
    (ended,) = served(account, request("b", arrival=6.0, target=target, final=True), 10.0)
    assert (ended.key, ended.seconds, ended.outcome, ended.met) == (KEY, 9.0, outcome, met)
    assert account.live(KEY) is None
    assert account.ended(KEY) == ended


def test_silence_ends_a_run_and_does_not_count_as_its_time() -> None:
    account = RunAccount(600.0)
    served(account, request("a", target=5.0), 4.0)
    served(account, request("b", run="late", target=3.0), 4.0)
    assert account.expire(604.0) == []
    ended = account.expire(604.1)
    assert [(one.seconds, one.outcome, one.met) for one in ended] == [
        (4.0, "timed_out", True),
        (4.0, "timed_out", False),
    ]


def test_a_request_in_progress_keeps_its_run_alive_and_a_unit_outside_does_not() -> None:
    account = RunAccount(600.0)
    account.note(Arrived(request("a")), 0.0)
    account.note(UnitBegan("t", Stage("agent", "other", "search"), "tool"), 0.0)
    ended = account.expire(1e6)
    assert [(one.key[2], one.seconds, one.outcome) for one in ended] == [("other", None, "timed_out")]
    assert account.live(KEY) is not None


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("engine_gone: e0", "failed"),
        ("dropped: late", "failed"),
        ("client_gone: bye", "in_time"),
        ("cancelled", "in_time"),
    ],
)
def test_what_the_client_gave_up_is_no_failure(reason: str, outcome: str) -> None:
    account = RunAccount(600.0)
    account.note(Arrived(request("a", target=10.0)), 0.0)
    account.note(Failed("a", reason), 1.0)
    (ended,) = served(account, request("b", arrival=2.0, final=True), 3.0)
    assert ended.outcome == outcome
    assert ended.met == (outcome == "in_time")


def test_an_application_without_a_run_has_a_run_per_request() -> None:
    account = RunAccount(600.0)
    (ended,) = served(account, request("a", run=""), 2.0)
    assert ended.key == ("t", "agent", "a")
    assert account.note(Arrived(Request("p", "m", 1, 1, 0.0)), 0.0) == []
    assert account.tenants == ["t"], "a request without an application is no run"


def test_an_end_waits_for_the_requests_in_progress_and_comes_once() -> None:
    account = RunAccount(600.0)
    account.note(Arrived(request("a")), 0.0)
    account.note(Arrived(request("b")), 0.0)
    assert account.note(RunEnded(*KEY), 1.0) == []
    assert account.note(Finished("a", 5), 2.0) == []
    (ended,) = account.note(Finished("b", 5), 3.0)
    assert ended.seconds == 3.0
    assert account.note(RunEnded(*KEY), 4.0) == []
    assert account.note(Finished("b", 5), 5.0) == []


def test_a_final_request_that_ends_first_waits_for_the_others() -> None:
    account = RunAccount(600.0)
    account.note(Arrived(request("a")), 0.0)
    assert served(account, request("b", final=True), 1.0) == []
    assert len(account.note(Finished("a", 5), 2.0)) == 1


def test_units_outside_the_llm() -> None:
    account = RunAccount(600.0)
    search = Stage("agent", "r", "search")
    account.note(UnitEnded("t", search), 0.0)
    assert account.live(KEY) is None, "the end of what has not begun begins nothing"
    account.note(UnitBegan("t", search, "tool"), 1.0)
    account.note(UnitBegan("t", search, "tool"), 2.0)
    account.note(Arrived(request("a", unit="search")), 2.5)
    account.note(UnitEnded("t", search), 3.0)
    run = account.live(KEY)
    assert run is not None
    assert run.outside == 1
    account.note(UnitEnded("t", search), 4.0)
    account.note(UnitEnded("t", search), 5.0)
    tool, llm = run.visits
    assert (tool.backend, tool.seconds, tool.inside) == ("tool", 3.0, 0)
    assert (llm.backend, llm.requests, llm.inside) == ("llm", 1, 1), "an LLM unit of the same name is another"
    assert run.last == 4.0


def test_ten_thousand_runs_of_one_tenant_are_bounded_and_push_out_no_other_tenant_s() -> None:
    account = RunAccount(600.0)
    served(account, request("x", tenant="other"), 1.0)
    ended = [one for i in range(10_500) for one in served(account, request(f"q{i}", f"r{i}"), 2.0)]
    assert [one.key[2] for one in ended] == [f"r{i}" for i in range(500)]
    assert {one.outcome for one in ended} == {"timed_out"}
    assert dict(account.live_by_app("t")) == {"agent": 10_000}
    assert account.live(("other", "agent", "r")) is not None
    assert len(account.expire(1000.0)) == 10_001
    assert account.ended(("t", "agent", "r499")) is None, "the oldest of more than 10,000 are forgotten"
    assert account.ended(("t", "agent", "r500")) is not None
    assert not account.live_by_app("t")


def test_a_run_that_never_ends_is_bounded() -> None:
    account = RunAccount(600.0)
    for i in range(1000):
        served(account, request(f"q{i}", unit=f"u{i}", arrival=float(i)), i + 0.5)
    run = account.live(KEY)
    assert run is not None
    assert [visit.unit for visit in run.visits] == [f"u{i}" for i in range(900, 1000)]
    assert len(run.visited) == 100
    assert run.steps == 1000
    assert not run.teaches
