"""A grammar whose masks take long ends its own request, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.engines.vllm.plugin.grammar_time import MOST_S, SLOW_S, GrammarTimeMixin


class Grammar:
    """One whose mask takes so many seconds of the scheduler's timer."""

    def __init__(self, scheduler: Stock, seconds: float) -> None:
        self.scheduler, self.seconds, self.ended = scheduler, seconds, False

    def fill_bitmask(self, mask: Any, index: int) -> None:
        self.scheduler.now += self.seconds

    def is_terminated(self) -> bool:
        return self.ended


class Stock:
    """What vLLM's scheduler has of structured output."""

    def __init__(self) -> None:
        self.now = self.elsewhere = 0.0
        self.requests, self.grammar_compile_error_reqs = dict[str, Any](), set[str]()
        backend = SimpleNamespace(allocate_token_bitmask=lambda count: None)
        self.structured_output_manager = SimpleNamespace(backend=backend)

    def get_grammar_bitmask(self, ids: list[str]) -> Any:
        for grammar in (self.requests[id].structured_output_request.grammar for id in ids):
            if not grammar.is_terminated():
                grammar.fill_bitmask(None, 0)
        return SimpleNamespace(structured_output_request_ids=ids) if ids else None


class Scheduler(GrammarTimeMixin, Stock):
    def __init__(self, **seconds: float) -> None:
        super().__init__()
        self.timer = lambda: self.now + self.elsewhere
        self.cpu_timer = lambda: self.now
        for id, took in seconds.items():
            asked = SimpleNamespace(grammar=Grammar(self, took))
            self.requests[id] = SimpleNamespace(structured_output_request=asked)

    def ended(self, steps: int) -> set[str]:
        for _ in range(steps):
            assert self.get_grammar_bitmask([]) is None
            self.get_grammar_bitmask([id for id in self.requests if id not in self.grammar_compile_error_reqs])
        return self.grammar_compile_error_reqs


def test_the_slow_one_ends_and_others_go_on() -> None:
    steps = int(MOST_S / 0.3) + 1
    assert Scheduler(alone=0.3).ended(steps - 1) == set()
    assert Scheduler(alone=0.3).ended(steps) == {"alone"}
    assert Scheduler(slow=0.3, fast=0.001, other=0.01).ended(steps) == {"slow"}


def test_many_quick_ones_together_are_not_to_blame() -> None:
    many = {f"r{i}": SLOW_S / 10 for i in range(100)}
    assert Scheduler(**many).ended(100) == set()


def test_what_other_processes_take_does_not_count() -> None:
    scheduler = Scheduler(a=0.001)
    grammar = scheduler.requests["a"].structured_output_request.grammar

    def slow(mask: Any, index: int) -> None:
        scheduler.elsewhere += 0.3
        scheduler.now += 0.001

    grammar.fill_bitmask = slow
    assert scheduler.ended(100) == set()


def test_what_has_ended_is_forgotten_and_not_measured() -> None:
    scheduler = Scheduler(a=0.3, b=0.3)
    scheduler.requests["b"].structured_output_request.grammar.ended = True
    assert scheduler.ended(8) == {"a"}
    again = scheduler.requests.pop("a")
    scheduler.requests["b"].structured_output_request.grammar.ended = False
    scheduler.ended(1)
    scheduler.requests["a"] = again  # another one of this name
    scheduler.grammar_compile_error_reqs.clear()
    assert scheduler.ended(1) == set()


def test_the_client_learns_why_where_vllm_takes_a_reason() -> None:
    outputs = pytest.importorskip("vllm.outputs")
    if not hasattr(outputs, "RequestError"):
        pytest.skip("vLLM 0.32 takes the ids alone")
    scheduler = Scheduler(slow=0.3)
    scheduler.grammar_compile_error_reqs = {}
    scheduler.ended(int(MOST_S / 0.3) + 1)
    assert "grammar" in scheduler.grammar_compile_error_reqs["slow"].message
