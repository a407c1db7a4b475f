"""The rule of placement, and the index of prefix caches that it reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Arrived, Cached, Failed, Finished, InstanceDown, InstanceUp, Learned, Started
from headway.policy.core import ranks
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.placement.cost import Cost, Engine, _Room
from headway.policy.placement.index import PrefixIndex
from headway.policy.plan.ordered import Ordered
from headway.policy.plan.qlm import Qlm
from headway.ports import Planner
from headway.prefix import GRAIN, CacheReport, Keys, prompt_seed, token_keys
from headway.types import Batch, Request, Send, Slo
from tests.plan.place import Place, ask, instance

SEED = prompt_seed(None, None)
EXAMPLES = settings(max_examples=60)


def seconds(batch: Batch) -> float:
    return 0.01 + 1e-4 * batch.prefill + 1e-8 * batch.prefill_context + 1e-4 * batch.decodes + 1e-7 * batch.context


def prompt(chain: int, grains: int) -> Keys:
    return token_keys([chain] * (grains * GRAIN), SEED)


def report(*keys: Keys, epoch: str = "a", since: int = 0, until: int = 1, whole: bool = True) -> CacheReport:
    return CacheReport(epoch, since, until, np.concatenate(keys).tobytes(), whole=whole)


class Fleet(Place):
    """Engines with one latency, and an index that is told what they hold."""

    def __init__(self, count: int, planner: Planner | None = None, **more: object) -> None:
        engines = [instance(f"e{i}", 16, latency=seconds, **more) for i in range(count)]
        super().__init__(planner or Ordered(ranks.ATTAINABLE, ahead=1024), *engines)

    def holds(self, name: str, *keys: Keys) -> None:
        self.notify(Cached(name, report(*keys)), 0.0)

    def send(self, request: Request, keys: Keys) -> str:
        self.requests[request.id] = request
        self.note(self.core.on(Arrived(request, keys.tobytes()), request.arrival))
        return self.inside[request.id]


# ---- keys


@given(st.lists(st.integers(0, 50_000), max_size=200), st.integers(0, 5))
def test_keys_go_on_where_they_stopped(ids: list[int], grains: int) -> None:
    whole = token_keys(ids, SEED)
    split = min(grains, whole.size)
    rest = token_keys(ids[split * GRAIN :], SEED, whole.item(split - 1) if split else 0)
    assert whole.tolist() == [*whole[:split].tolist(), *rest.tolist()]
    assert len(set(whole.tolist())) == whole.size


def test_keys_differ_by_adapter_and_salt() -> None:
    seeds = [prompt_seed(adapter, salt) for adapter in (None, "a", "b") for salt in (None, "a", "b")]
    assert len({token_keys([1] * GRAIN, seed).item() for seed in seeds}) == len(seeds)


# ---- the rule


def test_a_conversation_goes_where_its_history_is() -> None:
    fleet = Fleet(4)
    fleet.holds("e2", prompt(7, 60))
    assert fleet.send(ask("a", prompt=1000), prompt(7, 62)) == "e2"
    backlog = fleet.core.cluster.backlog
    assert backlog.work[backlog.row_of["a"]] == pytest.approx(seconds(Batch(0, 0, 40, 40 * 960 + 800)))


def test_qlm_counts_what_engines_with_room_hold() -> None:
    fleet = Fleet(3, Qlm())
    assert fleet.send(ask("a", prompt=1000), prompt(7, 62)) == "e0"
    fleet.holds("e0", prompt(8, 60))
    assert fleet.send(ask("b", 1.0, prompt=1000), prompt(8, 62)) == "e0"
    assert fleet.send(ask("c", 2.0, prompt=1000), prompt(9, 62)) == "e1"


def test_what_is_on_its_way_counts_as_cached() -> None:
    """The second request with a prompt finds it before any report could tell."""
    fleet = Fleet(4)
    first = fleet.send(ask("a", prompt=1600), prompt(7, 100))
    fleet.send(ask("b", prompt=1600), prompt(8, 100))
    assert fleet.send(ask("c", prompt=1600), prompt(7, 100)) == first


def test_a_batch_due_tomorrow_counts_for_requests_like_it_alone() -> None:
    fleet, none = Fleet(2), prompt(0, 0)
    lines = {f"b{i}": fleet.send(ask(f"b{i}", slo=Slo(e2e=86_400.0)), none) for i in range(6)}
    assert sorted(lines.values()) == ["e0"] * 3 + ["e1"] * 3
    for id in [id for id, name in lines.items() if name == "e1"]:
        fleet.end(id, 1.0)
    chats = [fleet.send(ask(f"c{i}", 2.0, slo=Slo(ttft=1.0, tpot=0.1)), none) for i in range(4)]
    assert chats == ["e0", "e1", "e0", "e1"]
    assert fleet.send(ask("b6", 2.0, slo=Slo(e2e=86_400.0)), none) == "e1"


def test_an_engine_that_is_far_behind_loses_its_prefix_to_another() -> None:
    fleet = Fleet(2)
    fleet.holds("e0", prompt(7, 20))
    fleet.holds("e1", prompt(8, 1))
    sent = [fleet.send(ask(f"r{i}", prompt=2000 + i), prompt(7, 20)) for i in range(40)]
    assert sent[0] == "e0"
    assert sent.count("e1") >= 15, "the prefix is computed again where there is nothing to do"


@EXAMPLES
@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=40))
def test_a_send_says_what_its_engine_holds_and_whether_another_one_holds_more(
    engines: int, prompts: list[tuple[int, int]]
) -> None:
    fleet = Fleet(engines)
    index, names = fleet.core.cluster.placement.index, [f"e{i}" for i in range(engines)]
    for i, (chain, grains) in enumerate(prompts):
        request, keys = ask(f"r{i}", 0.01 * i, prompt=grains * GRAIN), prompt(chain, grains)
        held = {name: min(index.tokens(name, keys), request.prompt_tokens - 1) for name in names}
        (sent,) = fleet.core.on(Arrived(request, keys.tobytes()), request.arrival)
        assert isinstance(sent, Send)
        assert (sent.found, sent.moved) == (held[sent.instance], max(held.values()) > held[sent.instance])


def test_a_request_that_is_sent_away_from_its_prefix_has_moved_and_those_after_it_have_not() -> None:
    fleet = Fleet(2)
    fleet.holds("e0", prompt(7, 125))
    fleet.holds("e1", prompt(8, 1))
    sent = list[Send]()
    for i in range(60):
        keys = np.concatenate([prompt(7, 125), prompt(100 + i, 500)])
        sent += fleet.core.on(Arrived(ask(f"r{i}", prompt=10_000), keys.tobytes()), 0.0)  # type: ignore[arg-type]
    assert [send.instance for send in sent if send.moved] == ["e1"], "from then on both hold it"
    assert {send.found for send in sent if not send.moved} == {2000}


def test_of_equal_engines_one_whose_streams_can_go_on_elsewhere() -> None:
    """It costs nothing: the engine with less inside, or with the prompt in its cache, comes first."""
    fleet = Fleet(3)
    fleet.notify(InstanceUp(instance("e1", 16, latency=seconds, continues=True)), 0.0)
    fleet.holds("e2", prompt(7, 4))
    assert [fleet.send(ask(f"r{i}", prompt=600), prompt(i, 4)) for i in (1, 2, 7)] == ["e1", "e0", "e2"]


def test_equal_engines_take_turns() -> None:
    fleet = Fleet(3)
    sent = [fleet.send(ask(f"r{i}", prompt=100), prompt(i, 6)) for i in range(6)]
    assert sorted(sent) == ["e0", "e0", "e1", "e1", "e2", "e2"]


@EXAMPLES
@given(
    st.integers(2, 4), st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(0, 99), st.integers(0, 99)
)
def test_one_more_cached_token_makes_no_engine_cost_more(
    engines: int, prompts: list[int], less: int, more: int
) -> None:
    less, more = sorted((less, more))

    def cost(grains: int) -> Cost:
        fleet = Fleet(engines)
        for i, size in enumerate(prompts):
            fleet.send(ask(f"r{i}", 0.1 * i, prompt=size * GRAIN, slo=Slo(ttft=1 + i % 3)), prompt(i, size))
        fleet.holds("e0", prompt(99, grains) if grains else prompt(98, 1))
        cluster = fleet.core.cluster
        cluster.placement.came(ask("new"), prompt(99, 100).tobytes())
        row = cluster.backlog.add("new", arrival=2.0, due=3.0, prompt=1600, tokens=1700.0)
        there = Engine(cluster.instances["e0"], cluster.code("e0"))
        (found,) = cluster.placement.costs(cluster.backlog, row, [there], 2.0)
        return found

    before, after = cost(less), cost(more)
    assert max(after.seconds - before.seconds, after.own - before.own, after.first - before.first) <= 0


@pytest.mark.parametrize("own_order", [False, True])
def test_overdue_prompts_go_first_where_an_engine_keeps_vllm_s_own_order(own_order: bool) -> None:
    fleet = Fleet(2, own_order=own_order)
    name = fleet.send(ask("late", prompt=4000, slo=Slo(ttft=0.1)), prompt(1, 250))
    cluster = fleet.core.cluster
    row = cluster.backlog.add("new", arrival=0.2, due=1.2, prompt=1600, tokens=1700.0)
    there = Engine(cluster.instances[name], cluster.code(name))
    (cost,) = cluster.placement.costs(cluster.backlog, row, [there], 0.2)
    assert cost.first - cost.own == pytest.approx(own_order * (seconds(Batch(0, 0, 4000, 8_000_000)) - 0.2))


# ---- the index


class Cache:
    """An engine's cache as it is, with a log of all that it took in and gave up."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.held, self.log = f"epoch {epoch}", list[Keys](), list[tuple[int, bool]]()

    def compute(self, keys: Keys) -> None:
        self.log += [(key, True) for key in keys.tolist() if key not in self.keys]
        self.held.append(keys)

    def lose(self, at: int) -> None:
        gone = self.held.pop(at)
        self.log += [(key, False) for key in reversed(gone.tolist()) if key not in self.keys]

    @property
    def keys(self) -> set[int]:
        return {key for keys in self.held for key in keys.tolist()}

    def since(self, epoch: str, position: int) -> CacheReport:
        if epoch != self.epoch:
            return CacheReport(self.epoch, 0, len(self.log), np.array([*self.keys], np.int64).tobytes(), whole=True)
        last = dict(self.log[position:])
        packed = (np.array([key for key, there in last.items() if there is side], np.int64) for side in (True, False))
        return CacheReport(self.epoch, position, len(self.log), *(keys.tobytes() for keys in packed))

    def tokens(self, keys: Keys) -> int:
        known = self.keys
        return GRAIN * next((i for i, key in enumerate(keys.tolist()) if key not in known), keys.size)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "end", "lose", "report", "lost", "late", "restart", "forget"]),
        st.integers(0, 5),
        st.integers(1, 12),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(STEPS)
def test_after_one_report_it_believes_what_is_so(steps: list[tuple[str, int, int]]) -> None:
    """Whatever was lost, late, doubled or reordered before, and whichever side began anew."""
    index, engine, inside, late, epochs = PrefixIndex(), Cache(0), dict[str, Keys](), list[CacheReport](), 0
    index.add("e", 1000, GRAIN)
    for number, (what, chain, size) in enumerate(steps):
        keys = prompt(chain, size)
        if what == "send":
            inside[f"r{number}"] = keys
            index.sent(f"r{number}", "e", keys)
        elif what == "end" and inside:
            id = sorted(inside)[chain % len(inside)]
            engine.compute(inside.pop(id))
            index.ended(id)
        elif what == "lose" and engine.held:
            engine.lose(chain % len(engine.held))
        elif what == "report":
            index.report("e", engine.since(*index.position("e")))
        elif what == "lost":
            late.append(engine.since(*index.position("e")))
        elif what == "late" and late:
            index.report("e", late.pop(chain % len(late)))
        elif what == "restart":
            epochs, inside = epochs + 1, {}
            engine = Cache(epochs)
            index.add("e", 1000, GRAIN)
        elif what == "forget":
            index, inside = PrefixIndex(), {}
            index.add("e", 1000, GRAIN)
    index.report("e", engine.since("", 0))
    for id in inside:
        index.ended(id)
    index.report("e", engine.since(*index.position("e")))
    for chain in range(6):
        assert index.tokens("e", prompt(chain, 12)) == engine.tokens(prompt(chain, 12))


def test_of_an_engine_that_reports_nothing_what_was_used_last_is_assumed() -> None:
    index = PrefixIndex()
    index.add("e", 10, GRAIN)
    for id, chain in enumerate((1, 2, 1, 3)):
        index.sent(str(id), "e", prompt(chain, 4))
        index.ended(str(id))
    assert [index.tokens("e", prompt(chain, 4)) // GRAIN for chain in (1, 2, 3)] == [4, 2, 4]


def test_answers_correct_what_is_assumed_of_an_engine_that_reports_nothing() -> None:
    """It has 8 blocks, not 16 as assumed: a request of each pair finds what the other one left."""
    index = PrefixIndex()
    index.add("e", 16, GRAIN)
    for chain in (1, 2, 3, 4):
        index.sent(str(chain), "e", prompt(chain, 4))
        index.answered(str(chain), 0)
        index.ended(str(chain))
    assert index.tokens("e", prompt(1, 4)) == 4 * GRAIN, "as believed: nothing was known, nothing was found"
    for id in "ab":
        index.sent(id, "e", prompt(1, 4))
    for id in "ab":  # the second one was sent before the first one's answer
        index.answered(id, 0)
        index.ended(id)
    held = [index.tokens("e", prompt(chain, 4)) // GRAIN for chain in (1, 2, 3, 4)]
    assert held == [4, 0, 0, 4]
    index.sent("c", "e", prompt(3, 4))
    index.answered("c", 4 * GRAIN)  # it has more than believed
    index.ended("c")
    assert [index.tokens("e", prompt(chain, 4)) // GRAIN for chain in (1, 3, 4)] == [4, 4, 4]


def test_answers_change_nothing_where_an_engine_reports() -> None:
    index = PrefixIndex()
    index.add("e", 16, GRAIN)
    index.report("e", report(prompt(1, 4), prompt(2, 4)))
    index.sent("a", "e", prompt(1, 4))
    index.answered("a", 0)
    index.ended("a")
    assert index.tokens("e", prompt(2, 4)) == 4 * GRAIN


def test_blocks_of_engines_may_differ() -> None:
    index = PrefixIndex()
    index.add("small", 100, GRAIN)
    index.add("large", 100, 8 * GRAIN)
    for name in ("small", "large"):
        index.sent(name, name, prompt(1, 20))
    assert [index.tokens(name, prompt(1, 19)) for name in ("small", "large")] == [19 * GRAIN, 16 * GRAIN]


def test_an_engine_that_comes_back_holds_nothing() -> None:
    fleet = Fleet(2)
    fleet.holds("e1", prompt(7, 60))
    fleet.notify(InstanceDown("e1"), 1.0)
    fleet.notify(InstanceUp(instance("e1", 16, latency=seconds)), 2.0)
    assert fleet.core.cluster.placement.index.tokens("e1", prompt(7, 60)) == 0


@pytest.mark.parametrize("end", [Finished("r0", 10), Failed("r0", "gone")])
def test_an_end_leaves_nothing_behind(end: Finished | Failed) -> None:
    fleet = Fleet(2)
    name = fleet.send(ask("r0", slo=Slo(ttft=1, tpot=0.1)), prompt(1, 1))
    fleet.notify(Started("r0"), 1.0)
    placement = fleet.core.cluster.placement
    load = placement._loads[name]
    assert (load.answers, load.waiting, load.room.places) == (1, {}, 1)
    fleet.notify(end, 2.0)
    assert (load.answers, load.waiting, load.room, load.firm) == (0, {}, _Room(), _Room())
    assert (load.context, load.rate) == (0, 0)
    assert [placement._keys, placement._rates, placement._inside] == [{}, {}, {}]


def test_a_slow_engine_that_is_free_is_not_passed_over() -> None:
    def slow(batch: Batch) -> float:
        return 3 * seconds(batch)

    place = Place(
        Ordered(ranks.ATTAINABLE, ahead=1024), instance("fast", 16, latency=seconds), instance("slow", 16, latency=slow)
    )
    for i in range(8):
        place.come(ask(f"r{i}", prompt=2000 + i))
    assert list(place.inside.values()).count("slow") == 2, "each gets what it computes by the same instant"


def test_an_engine_that_has_learned_nothing_counts_as_the_others() -> None:
    """Until then it would look as fast as what a latency begins with, and get all."""
    place = Place(Ordered(ranks.ATTAINABLE, ahead=1024), instance("e0", 16), instance("e1", 16))
    place.notify(Learned("e1", OnlineLatency().theta * 10), 0.0)
    place.notify(InstanceUp(instance("e2", 16)), 0.0)
    for i in range(6):
        place.come(ask(f"r{i}", prompt=2000))
    assert sorted(place.inside.values()) == ["e0", "e0", "e1", "e1", "e2", "e2"]


def test_what_is_inside_an_engine_that_comes_up_again_still_is() -> None:
    """A swap that failed, or a controller that learns of engines after their requests."""
    fleet = Fleet(2)
    for i in range(4):
        fleet.send(ask(f"r{i}", prompt=160), prompt(i, 10))
    placement, (name, other) = fleet.core.cluster.placement, ("e0", "e1")
    before = placement._loads[name].room.places
    fleet.notify(InstanceUp(instance(name, 16, latency=seconds)), 1.0)
    assert placement._loads[name].room.places == before == placement._loads[other].room.places == 2
    assert placement.index.tokens(name, prompt(0, 10)) == 160


def test_requests_of_one_plan_find_each_others_prompt() -> None:
    fleet = Fleet(2)
    fleet.notify(InstanceDown("e0"), 0.0)
    fleet.notify(InstanceDown("e1"), 0.0)
    for i in range(4):
        fleet.core.note(Arrived(ask(f"r{i}", prompt=3200), prompt(i % 2, 200).tobytes()), 0.0)
    fleet.core.note(InstanceUp(instance("e0", 16, latency=seconds)), 1.0)
    fleet.notify(InstanceUp(instance("e1", 16, latency=seconds)), 1.0)
    assert fleet.inside["r0"] == fleet.inside["r2"] != fleet.inside["r1"] == fleet.inside["r3"]


def test_an_engine_without_a_prefix_cache_holds_nothing() -> None:
    fleet = Fleet(2, prefix_caching=False)
    sent = {fleet.send(ask(f"r{i}", prompt=1600), prompt(7, 100)) for i in range(2)}
    assert sent == {"e0", "e1"}


def test_an_answer_that_is_not_streamed_counts_as_begun_in_time() -> None:
    fleet = Fleet(2)
    name = fleet.send(ask("r0", prompt=1600), prompt(1, 100))
    load = fleet.core.cluster.placement._loads[name]
    fleet.send(ask("r1", 0.5, prompt=1600), prompt(2, 100))
    assert list(load.waiting) == ["r0"]
    fleet.send(ask("r2", 9.0, prompt=1600), prompt(3, 100))
    assert (load.answers, "r0" in load.waiting) == (1, False)
