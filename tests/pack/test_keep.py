"""The default recipe's packer: one iteration, in what order and with whose KV."""

from __future__ import annotations

import numpy as np
import pytest

from headway.policy.core.engine_spec import EngineSpec, PromisesConfig
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.promises.outlook import ANSWER, DISTANT, FAR, PROMPT, WAITS, any_plain, under_pressure
from headway.policy.pack.promises.packer import Promises, kept_of, outlooks_of
from headway.policy.pack.promises.selection import select
from headway.policy.recipes.registry import find
from headway.types import Batch, Step
from tests.pack.keep import NONE, ROOM, answer, jobs, level, pace_among, packer, ran


def order_at(now: float, *rows: dict[str, float]) -> list[int]:
    return packer().pack(jobs(*rows), ROOM, now).order.tolist()


def test_what_is_not_kept_goes_by_its_soft_due() -> None:
    """A lost request is due at its first token, one without a promise at ten times its prompt alone."""
    lost, plain, kept = {"ttft": 0.001}, {}, {"ttft": 1.0}
    assert order_at(0.01, plain, lost, kept, {"ttft": 0.5}) == [3, 2, 1, 0]
    assert order_at(5.0, plain | {"arrival": 1.0}, lost | {"arrival": 2.0}) == [0, 1], "the eldest is late most"
    assert order_at(0.0, plain | {"prompt": 900}, plain) == [1, 0], "a short prompt is due sooner"
    assert order_at(1.0, plain | {"soft": 600.0}, plain | {"arrival": 1.0}) == [1, 0], "batch waits"
    assert order_at(600.0, plain | {"soft": 600.0}, plain | {"arrival": 599.9}) == [0, 1], "not for ever"


def test_a_batch_due_tomorrow_comes_last() -> None:
    line = {"e2e": 86400.0}
    assert order_at(0.0, line, {}, {"ttft": 1.0}, {"soft": 600.0}) == [2, 1, 3, 0]
    assert order_at(86395.0, line, {"arrival": 86395.0}) == [0, 1], "in time by its latest start"


def test_what_weighs_more_is_given_up_later_and_served_earlier() -> None:
    rows = [{"prompt": 1500, "ttft": 0.25, "weight": weight} for weight in (1.0, 4.0, 1.0)]
    assert order_at(0.0, *rows)[0] == 1
    assert order_at(9.0, *rows)[0] == 1


@pytest.mark.parametrize("silent", [0.15, 0.25])
def test_a_stream_goes_on_whatever_its_promise(silent: float) -> None:
    """Kept answers leave no time, but a stream that has been silent for long is not asked for any."""
    kept = [answer(ttft=1.0, tpot=0.0299, first=0.2, last=0.24) for _ in range(30)]
    for stream in (answer(), answer(ttft=0.05, tpot=0.01), answer(ttft=1.0, first=0.1)):
        now = 0.24
        table = jobs(*kept, stream | {"last": now - silent})
        step = packer(running=64).pack(table, ROOM, now)
        assert (30 in ran(step)) == (silent > 0.2)


def test_a_stream_that_goes_on_keeps_its_place_before_what_has_not_begun() -> None:
    step = packer(running=1).pack(jobs({"soft": 0.001}, answer(last=5.0)), ROOM, 5.0)
    assert ran(step).tolist() == [1]
    step = packer(running=1).pack(jobs({"soft": 0.001}, answer(last=5.0, e2e=86400.0)), ROOM, 5.0)
    assert ran(step).tolist() == [0], "unless nobody waits for its next token"


def test_answers_that_can_wait_make_way_for_a_first_token_that_would_be_late_beside_them() -> None:
    """The prompt takes 43 ms alone and 80 ms beside 60 answers; it is due in 60 ms."""
    answers = [answer(ttft=1.0, tpot=0.1, output_tokens=20, computed=119, last=0.1) for _ in range(60)]
    urgent = {"prompt": 110, "ttft": 0.06, "tpot": 0.1, "arrival": 0.1}
    step = packer(running=64).pack(jobs(*answers, urgent), ROOM, 0.1)
    assert ran(step).tolist() == [60]
    patient = packer(running=64).pack(jobs(*answers, urgent | {"ttft": 2.0}), ROOM, 0.1)
    assert ran(patient).size == 61
    due = [one | {"output_tokens": 1, "computed": 100} for one in answers[:10]]
    some = packer(running=64).pack(jobs(*due, *answers[10:], urgent), ROOM, 0.15)
    assert set(range(10)) < set(ran(some)), "those that are due are computed with it"


def test_a_first_token_that_is_due_next_shares_its_iteration_only_within_a_part_of_the_time_left() -> None:
    """The urgent one takes 17 of 60 ms; a long one, promised or not, fills the iteration up to 24 ms."""
    urgent, latency = {"prompt": 20, "ttft": 0.06, "arrival": 0.1}, OnlineLatency()
    ahead = answer(ttft=1.0, tpot=0.2)

    def seconds(*rows: dict[str, float], **keep: float) -> float:
        step = packer(PromisesConfig(**keep)).pack(jobs(*rows, ahead), ROOM, 0.1)  # type: ignore[arg-type]
        assert step.tokens is not None
        assert step.tokens[step.order == 0] == [20]
        return latency.seconds(Batch(1, 104, int(step.tokens.sum()) - 1))

    for long in ({"prompt": 1500, "ttft": 2.0}, {"prompt": 1500}):
        assert 0.016 < seconds(urgent, long) <= 0.4 * 0.06 + 0.001
        assert seconds(urgent, long, urgent_share=np.inf) > 0.03


def test_a_prompt_is_priced_with_the_context_that_is_computed_already() -> None:
    """Tokens of a long prompt attend to all before them, so fewer fit the time that answers leave."""

    def chunk(computed: int) -> int:
        row = {"prompt": 20_000, "computed": computed, "blocks": -(-computed // 16), "running": computed > 0}
        table = jobs(answer(ttft=1.0, tpot=0.2), row | {"ttft": 90.0})
        step = packer().pack(table, KvBudget(2000, 2000, 16, 64), 0.2)
        assert step.tokens is not None
        return int(step.tokens[step.order == 1].sum())

    assert chunk(10_000) < 0.8 * chunk(1)


@pytest.mark.parametrize("promised", [False, True])
def test_a_prompt_comes_in_beside_answers_however_dear_its_tokens_are(promised: bool) -> None:
    """2 ms a token on a base of 50 ms: with a fixed least chunk and a fixed longest iteration none would."""
    latency = OnlineLatency()
    rng = np.random.default_rng(0)
    for _ in range(400):
        decodes, prompt = int(rng.integers(0, 12)), int(rng.integers(0, 2)) * int(rng.integers(1, 200))
        latency.learn(Batch(decodes, 100 * decodes, prompt), 0.05 + 0.004 * decodes + 0.002 * prompt)
    slo = {"ttft": 3.0, "tpot": 0.15} if promised else {}
    table = jobs(*[answer(**slo, last=0.2) for _ in range(10)], {"prompt": 300})
    step = Promises(EngineSpec(16, 2048, latency=latency)).pack(table, ROOM, 0.2)
    assert 10 in ran(step)


def test_urgency_from_outside_goes_first() -> None:
    table = jobs({"ttft": 1.0}, {"urgency": -1.0})
    assert packer().pack(table, ROOM, 0.0).order.tolist() == [1, 0]


def test_prompts_wait_until_the_answers_have_the_time_for_them() -> None:
    """An iteration of 30 answers takes about 26 ms by the first guess; a prompt of 600 tokens, 75 ms more."""
    rows = [answer(ttft=1.0, tpot=0.03) for _ in range(30)]
    table = jobs(*rows, {"prompt": 600, "ttft": 5.0, "tpot": 0.03})
    many, always = packer(running=64), packer(PromisesConfig(prompts_yield=False), running=64)
    tight = PromisesConfig(tpot_margin=0.0)

    def prompt(at: float, by: Promises = many) -> int:
        step = by.pack(table, ROOM, at)
        assert step.tokens is not None
        return int(step.tokens[step.order == 30].sum())

    assert prompt(0.249) == 0 < prompt(0.249, always), "1 ms ahead"
    assert 0 < prompt(0.19) < prompt(0.15), "as much as they can wait for"
    assert prompt(0.19) < prompt(0.19, packer(tight, running=64)), "and have a margin then"


def test_an_answer_falls_behind_for_a_first_token_that_would_be_late_if_it_makes_up_for_that() -> None:
    """The prompt takes 0.14 s in one iteration, and 0.2 s in iterations of its tpot."""

    def chunk(left: float, spread: float, ttft: float = 0.18, by: Promises | None = None) -> int:
        begun = answer(ttft=1.0, tpot=0.05, tokens_left=left, spread=spread)
        prompt = {"prompt": 400, "ttft": ttft, "tpot": 0.05, "arrival": 0.34}
        step = (by or packer()).pack(jobs(begun, prompt), ROOM, 0.34)
        assert step.tokens is not None
        assert 0 in ran(step)
        return int(step.tokens[step.order == 1].sum())

    assert chunk(200.0, 0.5) == 400
    never = packer(PromisesConfig(short_answer_stds=np.inf))
    assert chunk(200.0, 0.5, by=never) < 200
    assert chunk(200.0, 1.0) < 200, "it may be too short for that"
    assert chunk(2.0, 0.0) < 400, "as it is when few tokens are left"
    assert chunk(200.0, 0.5, ttft=0.3) < 200, "the prompt has the time to wait for it"


def test_what_fills_an_iteration_does_not_make_its_first_tokens_late() -> None:
    table = jobs({"prompt": 50, "ttft": 0.05}, {"prompt": 2000})
    step, alone = packer().pack(table, ROOM, 0.0), packer().pack(jobs({"prompt": 2000}), ROOM, 0.0)
    assert step.tokens is not None
    assert alone.tokens is not None
    assert step.tokens[0] == 50
    assert 50 + step.tokens[1:].sum() < alone.tokens[0] / 2


@pytest.mark.parametrize(("ahead", "pool", "paused"), [(300, 1000, True), (100, 1000, False), (300, 0, False)])
def test_an_answer_far_ahead_pauses_for_a_prompt_that_finds_no_kv(ahead: int, pool: int, paused: bool) -> None:
    now = 0.1 + (300 - ahead) * 0.1
    grown = answer(ttft=1.0, tpot=0.1, output_tokens=300, prompt=100, computed=399, blocks=26)
    table = jobs(grown, {"prompt": 90, "ttft": 1.0, "tpot": 0.1, "arrival": now})
    step = Promises(EngineSpec(8, 2048, copy_seconds=1e-6, host_tokens=pool)).pack(table, KvBudget(28, 2, 16, 8), now)
    assert ran(step).tolist() == ([1] if paused else [0])
    assert step.save.tolist() == ([0] if paused else [])


def test_an_answer_far_ahead_does_not_shut_prompts_out_because_it_will_be_long() -> None:
    """Its KV can be in the host pool meanwhile, so it takes only a part of the device's for all that time."""
    long = answer(ttft=1.0, tpot=0.1, output_tokens=300, computed=399, blocks=26, tokens_left=300.0)
    for tokens, first in ((300.0, 1), (np.inf, 0)):
        table = jobs(long, {"prompt": 90, "ttft": 1.0, "tpot": 0.1, "arrival": 0.1})
        spec = EngineSpec(8, 2048, copy_seconds=1e-6, host_tokens=1000)
        step = Promises(spec, PromisesConfig(kv_lead_tokens=tokens)).pack(table, KvBudget(28, 2, 16, 8), 0.1)
        assert ran(step).tolist() == [first]


def test_a_paused_answer_goes_on_before_it_is_behind() -> None:
    away = {"ttft": 1.0, "tpot": 0.1, "first": 0.1, "output_tokens": 50, "computed": 149, "prompt": 100}
    fresh = {"prompt": 100, "ttft": 1.0, "tpot": 0.1}
    for now, first in ((1.0, 1), (5.0, 0)):
        step = packer().pack(jobs(away, fresh | {"arrival": now}), KvBudget(12, 12, 16, 8), now)
        assert ran(step).tolist() == [first]


def test_kv_is_left_for_growth_only_once_a_request_is_lost() -> None:
    """Two answers hold 14 of 40 blocks and may grow by 25; a newcomer needs 7 now."""
    grown = answer(e2e=20.0, tokens_left=400.0)
    rows = [grown, grown, {"e2e": 25.0, "tokens_left": 20.0}]
    room = ROOM._replace(total=40, free=26)
    late, hopeless = {"prompt": 10, "ttft": 0.05}, {"prompt": 2000, "ttft": 0.001}
    assert 2 in ran(packer().pack(jobs(*rows), room, 0.1))
    assert 2 in ran(packer().pack(jobs(*rows, hopeless), room, 0.1)), "it could not be on time alone either"
    assert 2 not in ran(packer().pack(jobs(*rows, late), room, 0.1))
    assert 2 not in ran(packer(PromisesConfig(scales_growth=False)).pack(jobs(*rows), room, 0.1))


def test_best_effort_leaves_time_for_an_answer_that_is_longer_than_expected() -> None:
    """100 tokens are expected in 2 s, 20 ms each; two deviations more would have to take 8 ms each."""
    rows = [answer(e2e=2.1, tokens_left=50.0, spread=1.0), *(answer() for _ in range(30))]
    step = packer(running=64).pack(jobs(*rows), ROOM, 0.1)
    assert 0 in ran(step)
    assert ran(step).size < 10
    assert ran(packer(PromisesConfig(long_answer_stds=-1.0), running=64).pack(jobs(*rows), ROOM, 0.1)).size == 31


def test_best_effort_leaves_answers_their_gained_time() -> None:
    """It runs only as far as an iteration stays below the tightest tpot."""
    table = jobs(answer(ttft=1.0, tpot=0.012), *(answer(last=0.1) for _ in range(30)))
    step = packer(running=64).pack(table, ROOM, 0.11)
    assert 0 in ran(step)
    assert ran(step).size < 5
    alone = jobs(*(answer() for _ in range(30)))
    assert ran(packer(running=64).pack(alone, ROOM, 0.11)).size == 30


@pytest.mark.parametrize(
    ("spec", "swaps", "saved"),
    [
        (EngineSpec(8, 2048, copy_seconds=1e-6, host_tokens=1000), True, True),
        (EngineSpec(8, 2048, copy_seconds=1.0, host_tokens=1000), True, False),
        (EngineSpec(8, 2048, copy_seconds=1e-6, host_tokens=1000), False, False),
        (EngineSpec(8, 2048, copy_seconds=1e-6, host_tokens=0), True, False),
    ],
)
def test_kv_that_yields_goes_to_the_host_where_that_costs_less(spec: EngineSpec, swaps: bool, saved: bool) -> None:
    table = jobs(answer(ttft=0.01, tpot=0.02, arrival=-9.0), {"prompt": 90, "ttft": 1.0})
    step = Promises(spec, swaps=swaps).pack(table, KvBudget(7, 0, 16, 8), 0.2)
    assert list(step.save) == ([0] if saved else [])
    assert list(step.evict) == ([] if saved else [0])


@pytest.mark.parametrize("recipe", ["headway", "slack", "edf", "bros", "ecoserve", "vllm"])
@pytest.mark.parametrize("seconds", [0.02, 0.3, 1.0, 30.0])
def test_answers_that_are_late_go_on_however_slow_the_engine_is(recipe: str, seconds: float) -> None:
    latency = OnlineLatency()
    for decodes, prompt in ((0, 300), (1, 188), (4, 64), (4, 64), (3, 64), (0, 64), (0, 44)):
        latency.learn(Batch(decodes, 100.0 * decodes, prompt), seconds)
    late = [answer(e2e=8.0) if i % 2 else answer(ttft=1.5, tpot=0.15) for i in range(12)]
    spec = EngineSpec(16, 2048, latency=latency, two_ended=True, reservations=True, host_tokens=9999)
    step = find(recipe).packer(spec).pack(jobs(*late), KvBudget(1000, 900, 16, 32), 100.0)
    assert step.order.size > 0


def test_while_nothing_is_lost_requests_are_given_more_time() -> None:
    params = packer().params
    assert under_pressure(params, 1.0, all_promised=False, slow=1.0) == params
    calm = params.keep.calm
    assert under_pressure(params, 0.0, all_promised=False, slow=1.0) == params._replace(caution=calm)
    half = under_pressure(params, 0.5, all_promised=False, slow=1.0).caution
    assert calm.answer_safety < half.answer_safety < params.caution.answer_safety


@pytest.mark.parametrize(
    ("pressure", "all_promised", "expected"), [(0.0, True, ANSWER), (0.0, False, FAR), (0.5, False, ANSWER)]
)
def test_a_begun_answer_due_in_minutes_waits_for_requests_without_a_promise_alone(
    pressure: float, all_promised: bool, expected: int
) -> None:
    params = under_pressure(packer().params, pressure, all_promised, 1.0)
    assert level(answer(e2e=300.0), params=params) == expected
    assert level({"e2e": 300.0}, params=params) == FAR, "a prompt waits in any case"
    assert {level(one, params=params) for one in (answer(e2e=86400.0), {"e2e": 86400.0})} == {DISTANT}


def test_requests_without_a_promise_are_seen() -> None:
    promised = answer(e2e=9.0), {"ttft": 1.0}, answer(tpot=0.1)
    for plain in ({}, answer(), answer(ttft=1.0)):
        table = jobs(*promised, plain)
        assert any_plain(table.data, table.rows())
    table = jobs(*promised)
    assert not any_plain(table.data, table.rows())


def test_while_promises_are_lost_answers_get_a_second_ahead_first() -> None:
    """Of 0.2 s what is not kept has 0.3, until the answer could wait for a burst of prompts."""

    def chunk(seconds: float) -> int:
        lost = {"arrival": -50.0, "ttft": 20.0, "prompt": 5000}
        ahead = {"output_tokens": 20, "computed": 119, "blocks": 8, "first": -4.0 + seconds}
        table = jobs(answer(ttft=1.0, tpot=0.2, last=0.1) | ahead, lost)
        step = packer().pack(table, KvBudget(2000, 2000, 16, 64), 0.2)
        assert step.tokens is not None
        return int(step.tokens[step.order == 1].sum())

    assert chunk(0.5) < 0.5 * chunk(2.0)


def test_what_is_lost_gives_its_kv_to_what_is_kept() -> None:
    table = jobs(answer(ttft=0.05, tpot=0.1, last=0.4), {"ttft": 1.0, "prompt": 100})
    step = packer().pack(table, KvBudget(10, 3, 16, 8), 0.5)
    assert step.evict.tolist() == [0]
    assert ran(step).tolist() == [1]


def test_a_large_prompt_lets_smaller_ones_pass_while_it_finds_no_kv() -> None:
    table = jobs(
        answer(ttft=1.0, tpot=0.2, blocks=20, prompt=310, computed=314),
        {"ttft": 5.0, "prompt": 400},
        {"ttft": 6.0, "prompt": 50},
    )
    step = packer().pack(table, KvBudget(30, 10, 16, 8), 0.2)
    assert sorted(ran(step).tolist()) == [0, 2]


# ---- turns in a batch that is too small


def turns(*more: dict[str, float], ahead: int = 50, slots: int = 64, keep: PromisesConfig | None = None) -> Step:
    """Pack four answers, the second of them ahead by that many tokens, in a batch of four, and `more`."""
    usual = answer(ttft=1.0, tpot=0.1)
    far = answer(ttft=1.0, tpot=0.1, output_tokens=5 + ahead, computed=104 + ahead, blocks=11)
    table = jobs(usual, far, usual, usual, *more)
    return packer(keep, running=4).pack(table, KvBudget(1000, 900, 16, slots), 0.1)


def test_answers_far_ahead_take_turns_for_a_prompt_that_must_start_now() -> None:
    urgent, early = {"ttft": 0.2, "tpot": 0.1}, {"ttft": 3.0, "tpot": 0.1}
    step = turns(urgent)
    assert sorted(ran(step)) == [0, 2, 3, 4], "the second waits"
    assert not step.evict.size, "with its KV"
    assert not step.save.size
    assert sorted(ran(turns(early))) == [0, 1, 2, 3], "a prompt that has the time waits for a slot"
    assert sorted(ran(turns(urgent, keep=PromisesConfig(turn_capacity=0.0)))) == [0, 1, 2, 3]
    assert sorted(ran(turns(urgent, slots=4))) == [0, 1, 2, 3], "to wait with its KV takes a slot of its own"


def test_no_more_answers_take_turns_than_the_batch_can_keep_on_time() -> None:
    """An iteration takes about 13 ms by the first guess: with a tpot of 15 ms nearly every one is needed."""
    assert [_with_tight(*["urgent"] * n).count(PROMPT) for n in range(5)] == [0, 1, 1, 1, 1]


def test_prompts_that_wait_for_a_slot_are_not_passed() -> None:
    """By KV smaller ones may pass; here one that needs a slot less often would."""
    assert _with_tight("patient") == [PROMPT]
    assert _with_tight("urgent", "urgent", "patient") == [PROMPT, WAITS, WAITS]


def _with_tight(*names: str) -> list[int]:
    """Return the levels of prompts beside four answers with a tight tpot in a batch of four."""
    tight = answer(ttft=1.0, tpot=0.015, output_tokens=50, computed=149, blocks=10, tokens_left=100.0)
    prompts = {
        "urgent": {"ttft": 0.2, "tpot": 0.015, "tokens_left": 100.0},
        "patient": {"ttft": 0.25, "tpot": 1.0, "tokens_left": 100.0},
    }
    table, theta, now = jobs(*[tight] * 4, *(prompts[name] for name in names)), OnlineLatency().theta, 0.1
    keep = packer(PromisesConfig(selects_largest_set=False), running=4).params
    pace = pace_among(table)
    outlook = kept_of(table.data, outlooks_of(keep, table.data, table.rows(), now, theta, pace, NONE), theta, pace)
    select(keep, table.data, outlook, ROOM, now, theta, pace, 0.015, 0.2, 0.0)
    return [int(outlook.level[outlook.rows == 4 + i][0]) for i in range(len(names))]


@pytest.mark.parametrize("free", [4000, 0])
def test_answers_without_time_for_them_do_not_run_in_place_of_prompts_that_wait(free: int) -> None:
    long = {"computed": 2000, "prompt": 1996, "blocks": 126, "last": 0.2}
    late, made = answer(ttft=0.05, tpot=0.1, first=0.15, **long), []
    for waiting in (0, 60):
        table = jobs(answer(tpot=0.1, ttft=1.0, **long), *[late] * 40, *[{"ttft": 0.01}] * waiting)
        step = packer(running=64).pack(table, KvBudget(10_000, free, 16, 128), 0.3)
        made.append(np.count_nonzero(table.running[ran(step)]))
    assert 1 < made[0] == made[1] < 41
