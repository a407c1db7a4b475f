"""The level and the latest start of each request. Compiled.

A request is kept as long as it can be on time by the learned latency and its length forecast. One that
cannot is served with best effort, earliest due first, after all that are kept.

In a long overload thousands of requests wait in the engine and cannot be on time: they were due before they
began, or their answers lost their KV and fell behind. An iteration considers `PromisesConfig.overdue_seen` from
the front of their order, which are admitted next, and the same number from its end, which show that there is an
overload (`pressure_of`). So its cost does not grow with the length of that queue.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled, compiled_in_place
from headway.policy.core.engine_spec import Caution, PackerParams, PromisesConfig
from headway.policy.core.feasibility import Pace, last_start, least_answer, next_token_seconds, pace_at
from headway.policy.core.ranks import BEYOND, SOFT
from headway.policy.forecast.latency.online import prefill_of, seconds_of
from headway.policy.pack.kernels import Rows, decodes, exclusive_of, missing_of, promised, tpot_from
from headway.types import Bools, Floats, Ints

_APART = 1e10  # more than any instant


@compiled_in_place
def due_order(jobs: Rows, row: int) -> float:
    """Return the sort key of an overdue row: answers that have begun first, then by the instant it was due.

    Weights count as in `outlook.soft_due`. Rows beyond their tenant's fair share come last.
    """
    target = jobs["soft"][row]
    if target == 0.0:
        target = min(jobs["ttft"][row], jobs["e2e"][row])
    due = jobs["arrival"][row] + (target if target < np.inf else SOFT) / jobs["weight"][row]
    if jobs["output_tokens"][row] > 0:
        return float(due - _APART)
    return float(due + (_APART if jobs["urgency"][row] == BEYOND else 0.0))


@compiled_in_place
def is_overdue(jobs: Rows, row: int, now: float) -> bool:
    """Tell whether a row was due by now and has no KV on the device.

    Rows with a rank from outside, and those that control holds, do not count.
    """
    if jobs["running"][row] or jobs["computed"][row] > jobs["saved"][row]:
        return False
    if jobs["held"][row] or jobs["resumable"][row]:
        return False
    if jobs["urgency"][row] != 0.0 and jobs["urgency"][row] != BEYOND:
        return False
    arrival, output_tokens, tpot = jobs["arrival"][row], jobs["output_tokens"][row], jobs["tpot"][row]
    if is_plain(jobs, row):
        return bool(arrival + (jobs["soft"][row] if jobs["soft"][row] > 0.0 else SOFT) < now)
    if output_tokens == 0:
        return is_over(jobs, row, now)
    answered = tpot_from(jobs, row) + (output_tokens + jobs["tokens_left"][row]) * tpot if tpot < np.inf else np.inf
    return bool(min(answered, arrival + jobs["e2e"][row]) < now)


@compiled
def in_sight(keep: PromisesConfig, jobs: Rows, rows: Ints, now: float) -> Ints:
    """Return the rows without the overdue ones that are neither first nor last in order."""
    seen, late, size, count = np.empty_like(rows), np.empty_like(rows), 0, 0
    for row in rows:
        if is_overdue(jobs, row, now):
            late[count], count = row, count + 1
        else:
            seen[size], size = row, size + 1
    most = keep.overdue_seen
    if count <= 2 * most:
        return rows
    late, due = late[:count], np.empty(count)
    for i in range(count):
        due[i] = due_order(jobs, late[i])
    serial = jobs["serial"][late]
    ends = _least(due, serial, most) | _least(-due, -serial, most)
    return np.concatenate((seen[:size], late[ends]))


@compiled
def _least(keys: Floats, serial: Ints, count: int) -> Bools:
    """Return a mask of the `count` least by key, of equals those with the lower serial: faster than to sort all."""
    limit = np.partition(keys, count - 1)[count - 1]
    least: Bools = keys < limit
    equal = np.flatnonzero(keys == limit)
    rest = count - np.count_nonzero(least)
    least[equal[np.argsort(serial[equal])[:rest]]] = True
    return least


# Levels, most urgent first. STREAM: silent for long. Kept, as they can be on time: ANSWER decodes, PROMPT
# does not, HOPE only if its answer is short, WAITS has no room yet. Not kept, by soft due: GOES_ON begun and
# due soon, OTHER, TURN by its tenant's turn, SURPLUS lost and beyond its tenant's fair share. FAR not due for
# long, DISTANT not for very long. LOST cannot be on time; `selection.py` makes it one of those from GOES_ON to SURPLUS.
STREAM, ANSWER, PROMPT, HOPE, WAITS, GOES_ON, OTHER, TURN, SURPLUS, FAR, DISTANT, LOST = range(-1, 11)

NOT_JUDGED, KEPT, TOO_LARGE = range(3)  # `Jobs.verdict`
_LAST = 1e9  # seconds: more than any answer is behind
_LONG_S = 1800.0  # for which a lost promise may show an overload after it was due


class Outlook(NamedTuple):
    """Columns aligned with the ranked rows.

    rows: of the `Jobs` table; those that are kept (`packer.kept_of`) by urgency, level and key.
    level: see above.
    start: the latest instant at which each can start (or go on) and be on time.
    """

    rows: Ints
    level: Ints
    start: Floats


class Answers(NamedTuple):
    """The answers in progress, as rows.

    pace: those that set the pace of iterations.
    lost: those that are given up.
    deferred: those that wait for the tpot of others.
    """

    pace: Ints
    lost: Ints
    deferred: Ints


@compiled
def in_progress(keep: PromisesConfig, jobs: Rows, rows: Ints, now: float) -> Ints:
    """Return the answers in progress that were promised something and are not late yet, by their serial.

    Those whose deadline is distant are left out: they wait for all others, so these are as fast as without them.
    """
    size, found = 0, np.empty(rows.size, np.int64)
    for row in rows:
        begun = jobs["running"][row] and jobs["output_tokens"][row] and promised(jobs, row)
        late = now > jobs["arrival"][row] + jobs["e2e"][row] or jobs["gap"][row] > jobs["itl"][row]
        late |= is_distant(keep, jobs, row, now)
        if begun and not late and jobs["first"][row] <= jobs["arrival"][row] + jobs["ttft"][row]:
            found[size], size = row, size + 1
    return found[:size][np.argsort(jobs["serial"][found[:size]])]


@compiled
def pace_of(jobs: Rows, answers: Ints, theta: Floats) -> Pace:
    """Return the pace of these answers in progress."""
    decodes, context, prefill_load, tpot = 0, 0.0, 0.0, np.inf
    base = seconds_of(theta, 0.0, 0.0, 0.0, 0.0)
    for row in answers:
        decodes += missing_of(jobs, row) == 1
        context += jobs["computed"][row]
        prefill_load += prefill_per_token(jobs, row, theta, base)
        tpot = min(tpot, jobs["tpot"][row])
    pace = pace_at(theta, decodes, context)
    return Pace(pace.decodes, pace.token, pace.base, max(min(pace.token + prefill_load, tpot), pace.token))


@compiled
def in_pace(params: PackerParams, jobs: Rows, answers: Ints, now: float, theta: Floats, pace: Pace) -> Answers:
    """Choose among the answers in progress if all together are slower than their tpots allow.

    Those with a deadline alone wait as long as they have time, the ones with most time first. If the others
    are still slower than a tpot, answers that are behind stay, the least behind first, as long as an
    iteration with them meets their tpot: if all went on, all would be lost. One whose tpot the iteration of
    all meets is never given up.
    """
    limit, lead, time = np.inf, np.empty(answers.size), np.empty(answers.size)
    for k in range(answers.size):
        lead[k] = lead_of(params.keep, jobs, answers[k], now)
        limit = min(limit, pace_to_catch_up(params.keep, jobs, answers[k], lead[k]))
    if pace.token <= limit:
        return Answers(answers, answers[:0], answers[:0])
    for k in range(answers.size):
        time[k] = _time_to_spare(params.caution, jobs, answers[k], now, limit) - 2.0 * pace.token
    counts, lost = np.zeros(answers.size, np.bool_), np.zeros(answers.size, np.bool_)
    decodes, context = 0, 0.0
    for k in np.argsort(np.where(time > 0.0, _LAST + time, -lead), kind="mergesort"):
        row = answers[k]
        if time[k] <= 0.0 and lead[k] < 0.0 and jobs["tpot"][row] >= pace.token:
            continue
        more, longer = decodes + (missing_of(jobs, row) == 1), context + jobs["computed"][row]
        seconds = seconds_of(theta, more, longer, 0.0, 0.0)
        lost[k] = time[k] <= 0.0 and lead[k] < 0.0 and seconds > jobs["tpot"][row]
        if not lost[k] and (time[k] <= 0.0 or seconds <= limit):
            counts[k], decodes, context = True, more, longer
    return Answers(answers[counts], answers[lost], answers[(time > 0.0) & ~counts])


@compiled
def pace_to_catch_up(keep: PromisesConfig, jobs: Rows, row: int, lead: float) -> float:
    """Return the seconds per token that meet an answer's tpot, should it be twice as long as expected."""
    tpot = jobs["tpot"][row]
    behind = min(lead, 0.0) / (2.0 * max(jobs["tokens_left"][row], 1.0))
    return float(max(tpot + behind, keep.catch_up_share * tpot))


@compiled
def _time_to_spare(caution: Caution, jobs: Rows, row: int, now: float, token: float) -> float:
    """Return the seconds for which an answer with a deadline alone can wait, at this pace; others 0."""
    if jobs["tpot"][row] < np.inf or jobs["e2e"][row] == np.inf:
        return 0.0
    left = jobs["arrival"][row] + jobs["e2e"][row] - now
    return float(left - caution.answer_safety * jobs["tokens_left"][row] * token)


@compiled
def prompt_seconds(jobs: Rows, row: int, theta: Floats, pace: Pace) -> float:
    """Return the seconds until the next token of a row that has the engine for itself."""
    return next_token_seconds(theta, missing_of(jobs, row), pace.base)


@compiled
def prefill_per_token(jobs: Rows, row: int, theta: Floats, base: float) -> float:
    """Return the seconds of a row's prompt, without what the prefix cache held of it, per token of its answer.

    That is the load of prompts on an iteration if each request that ends is followed by one like it.
    """
    answer = jobs["output_tokens"][row] + jobs["tokens_left"][row]
    return float((prefill_of(theta, jobs["prompt"][row] - jobs["found"][row]) - base) / answer)


@compiled
def size_of(jobs: Rows, row: int, theta: Floats, pace: Pace) -> float:
    """Return the seconds that a row still needs: its prompt, and its expected answer at today's pace."""
    prompt = prompt_seconds(jobs, row, theta, pace) if missing_of(jobs, row) > 1 else 0.0
    return float(prompt + jobs["tokens_left"][row] * pace.token)


@compiled
def blocks_of(jobs: Rows, row: int, block: int, grow: float) -> float:
    """Return the KV blocks that a row alone will hold after `grow` of its remaining answer."""
    tokens = jobs["prompt"][row] + jobs["output_tokens"][row] + grow * jobs["tokens_left"][row]
    return float(max(tokens / block + 1.0 - jobs["shared"][row], exclusive_of(jobs, row)))


@compiled
def growth_of(keep: PromisesConfig, pressure: float) -> float:
    """Return the share of answers' growth that admission leaves KV for: the more, the more requests are lost.

    While none is, a prompt comes in at once, and an answer with time to spare that loses its KV is computed
    again.
    """
    if not keep.scales_growth:
        return keep.growth_share
    return keep.growth_share * pressure


@compiled_in_place
def pressure_of(keep: PromisesConfig, jobs: Rows, outlook: Outlook, now: float, theta: Floats) -> float:
    """Return the share of requests that overload has lost, divided by `full_pressure_share`, at most 1.

    Promises that were lost long ago count neither as lost nor as requests: what an overload has left does not
    show that there still is one. Nor does what is given up as too large: without it there may be none.
    """
    lost, counted = 0, 0
    for i in range(outlook.rows.size):
        if outlook.level[i] != LOST:
            counted += 1
        elif jobs["verdict"][outlook.rows[i]] != TOO_LARGE and _still_counts(keep, jobs, outlook.rows[i], now):
            counted += 1
            lost += not is_hopeless(jobs, outlook.rows[i], theta)
    return float(min(lost / max(keep.full_pressure_share * counted, 1.0), 1.0))


@compiled_in_place
def _still_counts(keep: PromisesConfig, jobs: Rows, row: int, now: float) -> bool:
    """Tell whether a lost row still shows an overload: until `overload_s` after it was due.

    If it had more time than that from arrival to due, then for as long again, at most half an hour.
    """
    arrival, ttft, tpot, e2e = jobs["arrival"][row], jobs["ttft"][row], jobs["tpot"][row], jobs["e2e"][row]
    in_time = jobs["output_tokens"][row] > 0 and jobs["first"][row] <= arrival + ttft
    due = 0.0 if in_time else ttft  # seconds after arrival
    if tpot < np.inf:
        begin = jobs["first"][row] - arrival if in_time and ttft == np.inf else ttft
        due = begin + tpot * (jobs["output_tokens"][row] + jobs["tokens_left"][row])
    if e2e < np.inf:
        due = max(due, e2e) if in_time else min(due, e2e)
    return bool(now - arrival < due + max(min(due, _LONG_S), keep.overload_s))


@compiled_in_place
def is_hopeless(jobs: Rows, row: int, theta: Floats) -> bool:
    """Tell whether a row could not be on time even alone on the engine, so that its loss shows no overload."""
    prompt = prefill_of(theta, jobs["prompt"][row])
    token = seconds_of(theta, 1.0, jobs["prompt"][row], 0.0, 0.0)
    answer = token * (jobs["output_tokens"][row] + jobs["tokens_left"][row])
    return bool(token > jobs["tpot"][row] or last_start(0.0, jobs["ttft"][row], jobs["e2e"][row], prompt, answer) < 0.0)


@compiled
def under_pressure(params: PackerParams, pressure: float, all_promised: bool, slow: float) -> PackerParams:
    """Return the parameters under this pressure: while nothing is lost, no request is given up early.

    all_promised: no request is without a promise. slow: `OnlineLatency`'s.
    """
    calm, lost = params.keep.calm, params.keep.lost
    caution = Caution(
        calm.answer_safety + pressure * (lost.answer_safety - calm.answer_safety),
        calm.start_safety + pressure * (lost.start_safety - calm.start_safety),
        calm.lost_below_stds + pressure * (lost.lost_below_stds - calm.lost_below_stds),
        lost.burst_lead_s if pressure > 0.0 else calm.burst_lead_s,
        lost.keeps_begun if pressure > 0.0 or all_promised else calm.keeps_begun,
    )
    return PackerParams(
        params.kind,
        params.max_running,
        params.budget,
        params.min_chunk,
        params.max_step,
        params.keep,
        params.host,
        params.copy_seconds,
        params.max_gap,
        caution,
        min(1.0 - params.keep.itl_margin, 1.0 / slow),
        params.demand,
        params.taught,
    )


@compiled
def reserved_of(jobs: Rows, row: int, block: int, grow: float) -> float:
    """Return the KV blocks that admission counts for a row; grow: share of its answer that is left.

    An answer that has a tpot and no deadline can catch up after an eviction: nothing is held back for it. With
    an itl an eviction breaks the promise, so blocks for the whole answer are held back.
    """
    if jobs["itl"][row] < np.inf:
        grow = 1.0
    return blocks_of(jobs, row, block, 0.0 if can_wait(jobs, row) else grow)


@compiled
def can_wait(jobs: Rows, row: int) -> bool:
    """Tell whether a row's answer may stand still when it is ahead: it has a tpot, no itl and no deadline."""
    return bool(jobs["tpot"][row] < np.inf and min(jobs["e2e"][row], jobs["itl"][row]) == np.inf)


@compiled
def is_plain(jobs: Rows, row: int) -> bool:
    """Tell whether nothing is promised to a row any more: only its first token was, or nothing at all."""
    decided = jobs["output_tokens"][row] and min(jobs["tpot"][row], jobs["e2e"][row]) == np.inf
    return bool(decided or not promised(jobs, row))


@compiled
def any_plain(jobs: Rows, rows: Ints) -> bool:
    """Tell whether one of these rows has no promise."""
    for row in rows:  # noqa: SIM110  (numba has no any())
        if is_plain(jobs, row):
            return True
    return False


@compiled
def outlook_of(params: PackerParams, jobs: Rows, row: int, now: float, theta: Floats, pace: Pace) -> tuple[int, float]:
    """Return the level of a row and its latest start, -inf where that does not matter."""
    if is_plain(jobs, row):
        return OTHER, -np.inf
    made, caution = jobs["output_tokens"][row], params.caution
    prompt = prompt_seconds(jobs, row, theta, pace)
    first_due = jobs["arrival"][row] + jobs["ttft"][row]
    end, answer = jobs["arrival"][row] + jobs["e2e"][row] - prompt, jobs["tokens_left"][row] * pace.token
    least = least_answer(caution.lost_below_stds, jobs["spread"][row], answer)
    to_come = np.inf if made else jobs["ttft"][row]
    lost = last_start(jobs["arrival"][row], to_come, jobs["e2e"][row], prompt, least) < now
    lost |= made > 0 and jobs["first"][row] > first_due
    slow = answer * pace.mean / pace.token
    time = caution.answer_safety * slow
    if made == 0:  # how long the answer will be is uncertain, and a long one needs an early start
        time = max(time, min(time + caution.start_safety * slow, 0.5 * (end - jobs["arrival"][row])))
    start = min(end - time, first_due - prompt if made == 0 else np.inf)
    if made and jobs["tpot"][row] < np.inf:  # what it is behind it can catch up until its answer ends
        due = tpot_from(jobs, row) + made * jobs["tpot"][row] - prompt
        catch_up = due + 2.0 * jobs["tokens_left"][row] * max(jobs["tpot"][row] - pace.token, 0.0)
        lost = lost or catch_up < now
        next_start = jobs["last"][row] + jobs["itl"][row] - prompt  # and a gap that was too long stays
        lost = lost or jobs["gap"][row] > jobs["itl"][row] or next_start < now
        if _is_paused(jobs, row) and not lost:
            return PROMPT, min(due, next_start)  # so that it goes on before it is behind
        start = min(start, catch_up, next_start)
    if lost:
        return LOST, -np.inf
    if start - now > params.keep.defer_beyond_s and jobs["tpot"][row] == np.inf:
        if is_distant(params.keep, jobs, row, now):
            return DISTANT, start
        if not (made and caution.keeps_begun):
            return FAR, start
    if made and missing_of(jobs, row) == 1 and jobs["running"][row]:
        return ANSWER, start
    return PROMPT if start >= now or jobs["running"][row] else HOPE, start


@compiled
def is_distant(keep: PromisesConfig, jobs: Rows, row: int, now: float) -> bool:
    """Tell whether a row's only deadline that is still to come is more than `distant_s` away."""
    due = jobs["arrival"][row] + jobs["e2e"][row]
    nearer = min(jobs["tpot"][row], jobs["itl"][row], np.inf if jobs["output_tokens"][row] else jobs["ttft"][row])
    return bool(keep.distant_s < due - now < np.inf and nearer == np.inf)


@compiled
def _is_paused(jobs: Rows, row: int) -> bool:
    """Tell whether a row waits with its KV in the host pool."""
    return bool(not jobs["running"][row] and jobs["computed"][row] > 0)


@compiled
def lead_of(keep: PromisesConfig, jobs: Rows, row: int, now: float) -> float:
    """Return the seconds by which an answer is ahead of its tpot; less the margin that it keeps of it."""
    kept = (1.0 - keep.tpot_margin) * jobs["tpot"][row]
    return float(tpot_from(jobs, row) + jobs["output_tokens"][row] * kept - now)


@compiled
def rest_of(params: PackerParams, jobs: Rows, row: int, now: float) -> float:
    """Return the seconds for which an answer can stand still: by its lead, and by its itl."""
    return float(min(lead_of(params.keep, jobs, row, now), until_gap(params, jobs, row, now)))


@compiled
def made_up_for(keep: PromisesConfig, jobs: Rows, row: int, pace: Pace) -> float:
    """Return the seconds behind its tpot that an answer makes up for until it ends, should it be short.

    By the mean pace, with the prompts to come: where these take all the time that its tpot leaves, it is nothing.
    """
    if keep.short_answer_stds == np.inf or not can_wait(jobs, row):
        return 0.0
    each = max((1.0 - keep.tpot_margin) * jobs["tpot"][row] - pace.mean, 0.0)
    left = jobs["tokens_left"][row]
    # Of the whole answer, `spread` is the deviation; that of the rest, given that it has come so far, is about this.
    deviation = jobs["spread"][row] * np.sqrt((jobs["output_tokens"][row] + left) * left)
    return float(max(left - keep.short_answer_stds * deviation, 0.0) * each)


@compiled
def until_gap(params: PackerParams, jobs: Rows, row: int, now: float) -> float:
    """Return the seconds until an answer's gap is too long, less a margin; inf = it has no itl."""
    return float(jobs["last"][row] + params.gap_share * jobs["itl"][row] - now)


@compiled
def soft_due(keep: PromisesConfig, jobs: Rows, row: int, level: int, theta: Floats) -> float:
    """Return the instant by which a row that is not kept should be served, earlier with more weight.

    Without a target from outside it depends on the tokens of its prompt that the prefix cache did not hold.
    It follows the cache while the row waits and does not change as the row is computed: two rows would take each
    other's KV in turn.
    """
    target = jobs["soft"][row]
    if target == 0.0 or level in (FAR, DISTANT):
        target = min(jobs["ttft"][row], jobs["e2e"][row])
    if target == np.inf:
        target = keep.soft_target_factor * prefill_of(theta, jobs["prompt"][row] - jobs["found"][row])
    return float(jobs["arrival"][row] + target / jobs["weight"][row])


@compiled
def is_silent(jobs: Rows, row: int, now: float, seconds: float) -> bool:
    """Tell whether a stream that has its KV has had no token for `seconds`."""
    return bool(decodes(jobs, row) and now - jobs["last"][row] > seconds)


@compiled
def is_over(jobs: Rows, row: int, now: float) -> bool:
    """Tell whether a row is LOST for certain: its deadline passed before its first token came.

    Under overload that is so for most rows.
    """
    due = jobs["arrival"][row] + min(jobs["ttft"][row], jobs["e2e"][row])
    return bool(due < now and jobs["output_tokens"][row] == 0)
