"""What one engine can do (`EngineSpec`) and what a packer makes of it (`KvUse`, `PackerParams`).

A spec is the argument of every packer's factory: in vLLM, in the simulator, in tests. What an engine cannot
do is known before the packer is made, so a packer can say at once how it uses the KV there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headway.errors import ConfigError
from headway.policy.core.ranks import DISTANT_S
from headway.policy.forecast.latency.online import OnlineLatency
from headway.types import UNLIMITED, Floats, Ints


class Obstacle(NamedTuple):
    """Why an engine lacks an ability ("an engine that ..."), and what to change so that it has it."""

    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Limits and abilities of one engine.

    max_running: requests that compute in one iteration.
    token_budget: most tokens of one iteration.
    block_size: tokens of a KV block.
    max_model_len: tokens of the longest request, prompt and answer together.
    copy_seconds: to move one token's KV between device and host; inf = the engine cannot.
    host_tokens: tokens that the host pool holds, 0 = no pool; None = a simulation that states no limit.
    two_ended: blocks can be filled from both ends.
    reservations: the engine carries out `Step.reserve` and `Step.lend`.
    latency: what iterations take, as learned on this engine.
    why_not: ability (a field's name) -> why the engine lacks it.
    max_gap_s: seconds that a stream which has begun may be silent while its KV is on the device.
    """

    max_running: int
    token_budget: int
    block_size: int = 16
    max_model_len: int = UNLIMITED
    copy_seconds: float = math.inf
    host_tokens: int | None = 0
    two_ended: bool = False
    reservations: bool = False
    latency: OnlineLatency = field(default_factory=OnlineLatency)
    why_not: Mapping[str, Obstacle] = field(default_factory=dict)
    max_gap_s: float = 1.0


@dataclass(frozen=True, slots=True)
class KvUse:
    """How a packer uses the KV of the engine it was made for.

    saves: it copies KV to the host (`Step.save`) instead of dropping it.
    reserves: it uses `Step.reserve` and `Step.lend`.
    two_ended: it counts on two-ended blocks.
    overlaps_copies: copies run beside the computation, not before it (as simulations charge them).
    most_empty: two-ended blocks are chosen by their empty slots alone (BROS 5.2).
    """

    saves: bool = False
    reserves: bool = False
    two_ended: bool = False
    overlaps_copies: bool = False
    most_empty: bool = False


class Caution(NamedTuple):
    """How early the default recipe gives up, defers and holds back.

    answer_safety: an answer with a deadline is kept while it has time for this many times its expected rest.
    start_safety: its prompt starts with time for this many more, unless half of it is left.
    lost_below_stds: a deadline is lost if even an answer this many deviations shorter than expected misses
        it.
    burst_lead_s: how far answers get ahead of their tpot before requests that are not kept run in long
        iterations: time for bursts of prompts.
    keeps_begun: an answer that has begun does not come last for its far deadline; half done, it holds KV for
        nothing. While every request has a promise that is so without pressure, too.
    """

    answer_safety: float
    start_safety: float
    lost_below_stds: float
    burst_lead_s: float
    keeps_begun: bool


class PromisesConfig(NamedTuple):
    """The numbers of the default recipe's policy (`policy/pack/promises`, docs/policy.md).

    lost, calm: the numbers that depend on pressure: while it is full, and while no request is lost. Between
        the two they are interpolated (`outlook.under_pressure`).
    growth_share: of the expected growth of answers, what admission leaves KV for; nothing for those with a
        tpot and no deadline.
    full_pressure_share: share of the requests that are lost at which the pressure is full.
    overload_s: a lost promise counts for the pressure until this many seconds after it was due; if it had more
        time from arrival to due, then for as long again, at most half an hour.
    long_answer_stds: requests that are not kept leave a deadline's answer time to be this many deviations
        longer.
    defer_beyond_s: a request without a tpot comes last while its latest start is further away; inf = never.
    distant_s: while its deadline is even this far away it comes last of all, begun or not. distant_share: an
        iteration whose requests beside the kept ones are all such takes this share of the tightest tpot, or of a
        usual iteration, so that one that arrives meanwhile does not wait for long.
    begun_size_share: share of its size at which an answer with a deadline counts when the largest is given
        up; 0 = none of them is.
    tpot_margin: share of each tpot that answers keep in reserve when prompts take of their time.
    itl_margin: share of each itl that iterations leave at least, because forecasts of them err; more where they err
        by more (`OnlineLatency.slow`).
    catch_up_share: an answer behind its tpot asks for iterations in which it catches up by the end of twice
        its expected answer, but for none shorter than this share of its tpot.
    short_answer_stds: for a first token that would be late, an answer may fall behind its tpot by the seconds that it
        makes up for until it ends, should it be this many deviations shorter than expected; inf = never.
    overdue_share, kept_overdue_share: a stream that is silent for this share of `EngineSpec.max_gap_s` goes
        first; the second for kept streams and those whose deadline is far.
    near_s: requests that have begun and are due within this go before those that have not.
    overdue_seen: overdue requests that an iteration considers: this many from the front of their order, and
        this many from its end (`promises/outlook.py`).
    soft_target_factor: the soft target of a request without one, in seconds that its prompt takes alone
        without what the prefix cache held of it.
    alone_share: a prompt that would be late beside the answers, and takes more than this share of its ttft
        there, runs without those that can wait; inf = never.
    leading_share: share of the tightest tpot that an iteration with requests that are not kept may take,
        while a kept prompt waits or an answer is less than two tokens ahead.
    burst_share: the same, while an answer is less than `burst_lead_s` ahead of its tpot.
    ttft_share: share of the tightest ttft among kept prompts that an iteration with them may take; at least a
        usual iteration (`iteration.usual_seconds`), at most two.
    urgent_share: share of the time left until the next promised first token is due that the iteration which
        makes that token may take; inf = any.
    pause_lead_tokens: an answer this many tokens ahead of its tpot may move its KV to the host pool for a
        prompt that finds no room; inf = never.
    kv_lead_tokens: in the selection, the KV of an answer this many tokens ahead of its tpot counts only for
        the part of the time that its pace needs, less so the less it is ahead; inf or no pool = in full.
    turn_capacity: answers ahead of their tpot take turns, with their KV, while by the (cautious) forecast
        they need at most this many batches; 0 = no turns.
    selects_largest_set: under overload keeps the largest set that can be on time; False = all not yet lost.
    limits_size: the largest requests are given up while more arrives than can be served on time
        (`promises/demand.py`).
    prompts_yield: prompts are computed only in time that the answers in progress have to spare; False
        computes `min_chunk` of their tokens in each iteration.
    scales_growth: for kept requests `growth_share` is scaled by pressure; False = never.
    short_prompts_first: kept prompts run shortest first where that makes none late; False = by latest start.
    """

    lost: Caution = Caution(1.5, 2.0, 2.0, 0.6, True)
    calm: Caution = Caution(0.8, 0.0, 3.0, 0.0, False)
    growth_share: float = 0.5
    full_pressure_share: float = 0.25
    overload_s: float = 180.0
    long_answer_stds: float = 2.0
    defer_beyond_s: float = 30.0
    distant_s: float = DISTANT_S
    distant_share: float = 0.4
    begun_size_share: float = 0.5
    tpot_margin: float = 0.01
    itl_margin: float = 0.1
    catch_up_share: float = 0.6
    short_answer_stds: float = 1.5
    overdue_share: float = 0.2
    kept_overdue_share: float = 0.6
    near_s: float = 30.0
    overdue_seen: int = 128
    soft_target_factor: float = 10.0
    alone_share: float = 0.3
    leading_share: float = 0.9
    burst_share: float = 0.3
    ttft_share: float = 0.4
    urgent_share: float = 0.4
    pause_lead_tokens: float = 200.0
    kv_lead_tokens: float = 3000.0
    turn_capacity: float = 1.3
    selects_largest_set: bool = True
    limits_size: bool = True
    prompts_yield: bool = True
    scales_growth: bool = True
    short_prompts_first: bool = True


class PackerParams(NamedTuple):
    """A packer as compiled loops take it.

    kind: which packer (`kernels.FCFS`, `SLACK`, `PROMISES`, ...); the other fields are that packer's.
    keep, caution: of `promises.Promises` only.
    host: tokens that rows' KV on the host may take, 0 = it is not copied there.
    copy_seconds: of one token. max_gap: `EngineSpec.max_gap_s`.
    gap_share: of each itl, what iterations may take (`outlook.under_pressure`).
    demand: account of what arrives, which the packer keeps (`promises/demand.py`).
    taught: `OnlineLatency.taught`.
    """

    kind: int
    max_running: int
    budget: int
    min_chunk: int
    max_step: float
    keep: PromisesConfig = PromisesConfig()
    host: int = 0
    copy_seconds: float = 0.0
    max_gap: float = math.inf
    caution: Caution = PromisesConfig().lost
    gap_share: float = 1.0 - PromisesConfig().itl_margin
    demand: Floats = np.empty((6, 0))
    taught: Ints = np.zeros(1, np.int64)


def check(spec: EngineSpec, kv: KvUse, recipe: str) -> None:
    """Raise ConfigError when a recipe's packer needs what its engine cannot do."""
    if kv.reserves and not spec.reservations:
        why = spec.why_not.get("reservations", Obstacle("does not support it", "Start the engine by Headway"))
        raise ConfigError(
            f"{recipe} reserves and lends KV, which is not possible in an engine that {why.reason}.",
            f"{why.hint}, or choose another recipe.",
            param="engines",
        )
    # Two-ended blocks keep an account of what the host has no room for; saving whole requests needs a pool.
    if kv.saves and not kv.two_ended and spec.host_tokens == 0:
        raise ConfigError(
            f"{recipe} swaps KV to the host, and an engine has no memory for it there.",
            "Give every [[engines]] a host_kv_gib, or choose another recipe.",
            param="engines.host_kv_gib",
        )
