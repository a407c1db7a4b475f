"""How many promised requests any schedule could keep on one engine: what an attainment is measured against.

Any schedule: it knows arrivals and lengths, preempts, swaps KV at no cost, splits prompts as it likes. The
bound follows in four steps, each of which only lets schedules do more.

1. The law of iteration time is replaced by one that is never longer: an iteration takes at least the base of
   each kind of row in it (prompt or answer) and marginal seconds c for each row. A token of an answer is
   computed as a decode, or with its whole context after an eviction; the cheaper way counts. A request that
   is late even alone on such an engine counts 0.

2. A kept request is two tasks, its prompt and the rest of its answer. Each has a window of time, and a limit
   L on the seconds that its iterations last together. A task gets a charge such that the tasks of any set A
   with windows inside [s, t] have charges of at most t - s together.

   Proof. The iterations k of A, T_k seconds each, are disjoint and inside [s, t]. Give each task a price
   p >= 0; P_k is the sum of the prices of A's rows in k. As the iterations of a task last at most L,

       t - s  >=  sum over k of T_k  >=  sum over k of T_k (1 + P_k) - sum over tasks of p L.

   T_k is at least b_k + C_k, the base and the sum of c of A's rows, so T_k (1 + P_k) is at least
   C_k + P_k b_k + b_k + P_k C_k. The last two terms are divided among the rows in one of four ways
   (`PerUse`): b_k / `max_running` for each row, b_k / all blocks for each block that it holds, or
   b_k / budget for each token computed, which add up to b_k at most; or by pace,

       b_k + P_k C_k  >=  2 sqrt(b_k P_k C_k)  >=  sum over rows of 2 sqrt(b_k p c),

   by the inequalities of the means and of Cauchy. Now all is a sum over rows, and what falls on a task's
   rows, less p L, is its charge. By pace, n tokens of equal c at the best price are charged b c / (L / n - b)
   each beside c: as much of the base as in the largest batch that keeps the pace. Every way and all prices
   give a bound; the least counts.

3. So for every interval, the charges of the kept tasks with windows inside are at most its length. The bound
   is the most that this allows requests that may be kept in part. The value 1 of a request is divided between
   its tasks, which may then be kept one without the other. What one machine can serve of tasks with windows
   is a polymatroid, so serving tasks in order of value per second is optimal (Edmonds 1970). Windows are
   widened to a grid of instants.

4. Of prompts alone whose windows end in the order in which they begin, as with one ttft for all, the largest
   set is counted, without parts and without a grid. It can be computed in that order, one after another,
   as soon as any order can: exchanging two neighbours that are not in order makes neither late.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.forecast.latency.laws import ADDITIVE, BROS, ROOFLINE, STEPPED
from headway.policy.forecast.latency.profiles import FixedLatency
from headway.simulate.instance import InstanceSpec
from headway.simulate.workload.traffic import Workload
from headway.types import Bools, Floats, Ints

_COARSE, _FINE = 300, 1000  # instants of the grid, for choosing shares and for the bound itself
_ROUNDING = 1e-9  # relative; targets that are met exactly stay met
_EARLIER = 1e-7  # seconds; sums of charges may have lost as many
_HIGHEST = 1e4  # price; higher ones, where almost no time is to spare, would cost digits
_FLOORS = (0.0, 0.5, 1.0)  # shares of a roofline's floor that count as base


class Costs(NamedTuple):
    """Step 1's law: seconds of a base, of a token, and of a token and one that it attends to.

    base: the least of all iterations; answer_base: of those with a decode.
    """

    base: float
    answer_base: float
    prefill: float
    prefill_pair: float
    decode: float
    decode_pair: float


class PerUse(NamedTuple):
    """One way to divide the base in step 2: what falls on one row, one block, one token, or 1 by pace."""

    row: float
    block: float
    token: float
    pace: float


class Contexts(NamedTuple):
    """One row's costs by the number of tokens before the one that it computes.

    decode: marginal seconds of a decode.
    again: marginal seconds of all tokens up to this one, the least of any division into chunks.
    blocks: KV blocks then held.
    """

    decode: Floats
    again: Floats
    blocks: Floats


class Requests(NamedTuple):
    """Requests that can be kept alone, as columns. Times are seconds, inf = no limit.

    prompt_from, prompt_to, answer_from, answer_to: windows of the two tasks.
    prompt_limit, answer_limit: the limits L of step 2.
    """

    prompt: Ints
    output: Ints
    prompt_from: Floats
    prompt_to: Floats
    answer_from: Floats
    answer_to: Floats
    prompt_limit: Floats
    answer_limit: Floats

    def only(self, rows: Bools) -> Requests:
        """Return the requests where `rows` is true."""
        return Requests._make(column[rows] for column in self)


def bound(workload: Workload, spec: InstanceSpec) -> float:
    """Return an upper bound on the number of promised requests on time, in any schedule: a whole number.

    Models other than the instance's own are not considered. TypeError for a latency model without a law.
    """
    promised = workload.take(workload.promised)
    if not len(promised):
        return 0.0
    ways = []
    for costs in _costs(spec):
        contexts = _contexts(costs, spec, int((promised.prompt + promised.output).max()))
        requests = _requests(promised, spec, costs, contexts)
        ways += [(requests, _charges(requests, contexts, costs, use)) for use in _uses(spec)]
    roughly = [_kept(*way, _COARSE) for way in ways]
    best = int(np.argmin(roughly))
    first = min(_whole(requests, prompts) for requests, (prompts, _) in ways)
    # Parts of requests do not count; a whole number may have lost its last digits.
    return float(math.floor(min(first, roughly[best], _kept(*ways[best], _FINE)) + 1e-6))


# ---- step 1: costs


def _costs(spec: InstanceSpec) -> list[Costs]:
    """Return laws that are nowhere above the engine's: non-negative terms are left out, max is a mean."""
    if not isinstance(spec.latency, FixedLatency):
        raise TypeError(f"a bound needs a latency law, not {type(spec.latency).__name__}")
    kind, coefficients = spec.latency.compiled_law
    c = [float(value) for value in coefficients]
    if kind in (ADDITIVE, STEPPED):  # a prompt computed token by token has no step
        return [Costs(c[0], c[0], c[3], c[4], c[1], c[2])]
    if kind == BROS:
        return [Costs(min(c[2], c[5]), c[5], c[0], c[1], c[3], c[4])]
    if kind == ROOFLINE:
        floors = [(c[0] + part * c[1], (1 - part) * c[4]) for part in _FLOORS]
        return [Costs(base, base, token, c[5], c[2] + token, c[3]) for base, token in floors]
    return [Costs(min(c[3], c[7]), c[7], c[0], 0.0, c[5], c[4])]


def _contexts(costs: Costs, spec: InstanceSpec, longest: int) -> Contexts:
    """Return the costs of contexts of 0 to `longest` tokens."""
    before = np.arange(longest + 1, dtype=float)
    decode = costs.decode + costs.decode_pair * before
    # A chunk of n >= 2 tokens counts at least n (n - 1) / 2 pairs within; one of 1 token is a decode.
    token = np.minimum(costs.prefill + costs.prefill_pair * before, decode)
    return Contexts(decode, np.asarray(np.cumsum(token), float), before // spec.instance.block_size + 1)


def _requests(workload: Workload, spec: InstanceSpec, costs: Costs, contexts: Contexts) -> Requests:
    """Return the requests that can be on time alone, with their tasks' windows and limits."""
    prompt, steps = workload.prompt, workload.output - 1
    first = contexts.again[prompt - 1] + costs.base * np.ceil(prompt / spec.budget)
    step = np.minimum(contexts.decode + costs.answer_base, contexts.again + costs.base)
    until = np.concatenate(([0.0], np.cumsum(step)))
    rest = until[prompt + steps] - until[prompt]
    pace = np.minimum(workload.tpot, workload.itl)
    ttft, tpot, e2e = (column * (1 + _ROUNDING) for column in (workload.ttft, pace, workload.e2e))
    pace = np.where(steps > 0, tpot * np.maximum(steps, 1), np.inf)
    # Each task leaves the other at least the seconds that it takes alone.
    prompt_limit, answer_limit = np.minimum(ttft, e2e - rest), np.minimum(pace, e2e - first)
    answer_to = workload.arrival + np.minimum(e2e, prompt_limit + answer_limit)
    able = (first <= prompt_limit) & (rest <= answer_limit)
    able &= contexts.blocks[prompt + steps - 1] <= spec.instance.blocks_total
    at = workload.arrival
    columns = (at, at + prompt_limit, at + first, answer_to, prompt_limit, answer_limit)
    return Requests(prompt, workload.output, *columns).only(able)


# ---- step 2: charges


def _uses(spec: InstanceSpec) -> list[PerUse]:
    shape = spec.instance
    return [
        PerUse(1 / shape.max_running, 0.0, 0.0, 0.0),
        PerUse(0.0, 1 / shape.blocks_total, 0.0, 0.0),
        PerUse(0.0, 0.0, 1 / spec.budget, 0.0),
        PerUse(0.0, 0.0, 0.0, 1.0),
    ]


def _charges(requests: Requests, contexts: Contexts, costs: Costs, use: PerUse) -> tuple[Floats, Floats]:
    """Return the charges of all prompts and of all answers, in seconds of the engine."""
    last = requests.prompt - 1
    own = contexts.again[last]
    prompts = own + costs.base * (use.row + use.block * contexts.blocks[last] + use.token * requests.prompt)
    # One price for however many chunks: the sum of their roots is at least the root of their sum.
    room = requests.prompt_limit - costs.base
    prompts += use.pace * costs.base * own / room
    return prompts, _answer_charges(requests, contexts, costs, use)


@compiled
def _answer_charges(requests: Requests, contexts: Contexts, costs: Costs, use: PerUse) -> Floats:
    """Return the charges of answers after their first token: at the best price by pace, or at price 0."""
    charges = np.zeros(requests.prompt.size)
    for i in range(charges.size):
        start, steps = requests.prompt[i], requests.output[i] - 1
        limit = requests.answer_limit[i]
        charges[i] = _answer_charge(contexts, costs, use, start, steps, 0.0, 0.0)
        spare = limit - steps * costs.answer_base
        if steps > 0 and use.pace > 0 and spare > 0 and limit < np.inf:
            roots = np.sqrt(contexts.decode[start : start + steps]).sum()
            price = min(use.pace * costs.answer_base * (roots / spare) ** 2, _HIGHEST)
            paced = _answer_charge(contexts, costs, use, start, steps, price, limit)
            charges[i] = max(charges[i], paced)
    return charges


@compiled
def _answer_charge(
    contexts: Contexts, costs: Costs, use: PerUse, start: int, steps: int, price: float, limit: float
) -> float:
    """Return the charge of an answer's tokens from context `start` on, at a price by pace."""
    total = -price * limit
    answer_mean = 2 * math.sqrt(use.pace * price * costs.answer_base)
    mean = 2 * math.sqrt(use.pace * price * costs.base)
    for context in range(start, start + steps):
        decode, again = contexts.decode[context], contexts.again[context]
        share = price + use.row + use.block * contexts.blocks[context]
        decoded = decode + costs.answer_base * (share + use.token) + answer_mean * math.sqrt(decode)
        redone = costs.base * (share + use.token * (context + 1)) + mean * math.sqrt(again) + again
        total += min(decoded, redone)
    return total


# ---- step 3: the most that can be kept


def _kept(requests: Requests, charges: tuple[Floats, Floats], instants: int) -> float:
    """Return how many requests can be kept, in part too, by these charges; at most `instants` on the grid."""
    start = np.concatenate((requests.prompt_from, requests.answer_from))
    end = np.concatenate((requests.prompt_to, requests.answer_to))
    work = np.concatenate(charges)
    tasks = np.isfinite(end) & (work > 0)
    value = _values(work, tasks)
    free = requests.prompt.size - value.sum()  # requests without any task that is due
    if not tasks.any():
        return float(free)
    start, end, work, value = start[tasks], end[tasks], work[tasks], value[tasks]
    times = np.unique(np.concatenate((start, end)))
    grid = times[np.unique(np.linspace(0, times.size - 1, instants).astype(int))]
    first, last = np.searchsorted(grid, start, "right") - 1, np.searchsorted(grid, end)
    order = np.argsort(-value / work, kind="stable")
    served = _serve(grid, first[order], last[order], work[order])
    return float(free + (value[order] * served).sum())


def _values(work: Floats, tasks: Bools) -> Floats:
    """Divide the value 1 of each request between its tasks that are due, in proportion to their work."""
    due = np.where(tasks, work, 0.0).reshape(2, -1)
    return np.asarray((due / np.maximum(due.sum(0), np.finfo(float).tiny)).ravel())


@compiled
def _serve(grid: Floats, first: Ints, last: Ints, work: Floats) -> Floats:
    """Return the part of each task that is served when each takes in turn what those before it leave.

    first, last: indices of the tasks' windows in the grid.
    """
    size = grid.size
    left = np.empty((size, size))  # seconds between two instants that tasks inside have not taken
    for s in range(size):
        left[s] = grid - grid[s]
    served = np.zeros(work.size)
    for i in range(work.size):
        room = work[i]
        for s in range(first[i] + 1):
            for t in range(last[i], size):
                if left[s, t] < room:
                    room = left[s, t]
        if room > 0:
            left[: first[i] + 1, last[i] :] -= room
            served[i] = room / work[i]
    return served


# ---- step 4: whole prompts


def _whole(requests: Requests, prompts: Floats) -> int:
    """Return how many requests can be kept for all that their prompts tell, by these charges."""
    order = np.lexsort((requests.prompt_from, requests.prompt_to))
    order = order[np.isfinite(requests.prompt_to[order]) & (prompts[order] > 0)]
    start, end, work = requests.prompt_from[order], requests.prompt_to[order], prompts[order]
    if (np.diff(start) < 0).any():
        return requests.prompt.size
    return int(requests.prompt.size - order.size + _most_in_order(start, end, work))


@compiled
def _most_in_order(start: Floats, end: Floats, work: Floats) -> int:
    """Return how many tasks can be done on time, one after another; `start` and `end` both ascend.

    Whenever one would end late, the task is left out without which the last ends earliest (Kise, Ibaraki and
    Mine 1978). So no other set of as many of these tasks ends earlier, and no larger set is on time.
    """
    kept, done, size = np.empty(start.size, np.int64), np.empty(start.size), 0
    for i in range(start.size):
        kept[size], done[size] = i, max(start[i], done[size - 1] if size else -np.inf) + work[i]
        size += 1
        if done[size - 1] <= end[i] + _EARLIER:
            continue
        size -= 1
        for k in range(_costliest(start, work, kept, done, size), size):
            kept[k] = kept[k + 1]
            done[k] = max(start[kept[k]], done[k - 1] if k else -np.inf) + work[kept[k]]
    return size


@compiled
def _costliest(start: Floats, work: Floats, kept: Ints, done: Floats, last: int) -> int:
    """Return the place of the task without which that at the place `last` (or the one before) ends earliest.

    Without an earlier one, all behind it come earlier by its work, or by as much as they have waited.
    """
    place, most, waited = last, done[last] - done[last - 1] if last else np.inf, np.inf
    for k in range(last, 0, -1):
        waited = min(waited, done[k] - work[kept[k]] - start[kept[k]])
        if waited <= most:
            break
        gain = min(waited, work[kept[k - 1]])
        if gain > most:
            place, most = k - 1, gain
    return place
