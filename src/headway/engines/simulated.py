"""What would an engine do with this, and when? vLLM's scheduling on numpy columns, without vLLM.

The simulated host of a packer: it applies a `Step` as `engines/vllm/hook.py` and stock `schedule()` together
apply it, on the same `Jobs` table, with a block account of its own. `tests/engine/test_licence.py` requires
identical steps from vLLM's own scheduler; time comes from a pace, which is where simulation begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.memory.ledger import Ledger
from headway.pack.room import missing
from headway.ports import Packer
from headway.types import Floats, Ints, Jobs, Slo

_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Ran:
    """One iteration: rows that computed and their tokens (aligned), rows paused, rows that lost their KV.

    preempted: how many of these memory took (stock's rule), not the packer. admitted: rows that came in.
    copied: tokens of KV that move between device and host for this iteration, both ways together.
    """

    start: float
    rows: Ints
    tokens: Ints
    paused: Ints
    evicted: Ints
    preempted: int
    admitted: int
    copied: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """What an iteration finished: ids, instants of their first tokens, times they lost their KV."""

    ids: list[str]
    first: Floats
    evictions: Ints


class SimulatedEngine:
    """One engine: its jobs, its blocks, its packer.

    blocks: usable KV blocks of `size` tokens. slots: requests that may hold KV. budget: tokens per iteration.
    """

    def __init__(
        self, packer: Packer, *, blocks: int, size: int, slots: int, budget: int, max_model_len: int
    ) -> None:
        self.packer = packer
        self.blocks, self.free, self.size = blocks, blocks, size
        self.slots, self.budget, self.max_model_len = slots, budget, max_model_len
        self.jobs = Jobs(256)
        self.target: Ints = np.zeros(256, np.int64)
        self._serial = 0

    def add(
        self, id: str, prompt: int, output: int, *, arrival: float, slo: Slo | None = None,
        priority: int = 0, left: float | None = None,
    ) -> int:  # fmt: skip
        """Queue a request that will answer with exactly `output` tokens; return its row."""
        self._serial += 1
        promise = slo or Slo()
        row = self.jobs.add(
            id, arrival=arrival, prompt=prompt, priority=priority, serial=self._serial,
            left=float(output if left is None else left),
            ttft=_or_never(promise.ttft), tpot=_or_never(promise.tpot), e2e=_or_never(promise.e2e),
        )  # fmt: skip
        if row >= self.target.size:
            self.target = np.concatenate([self.target, np.zeros(len(self.jobs.keys) - self.target.size, int)])
        self.target[row] = output
        return row

    @property
    def busy(self) -> bool:
        return len(self.jobs) > 0

    def schedule(self, now: float) -> Ran:
        """Decide and account one iteration that begins now."""
        step = self.packer.pack(self.jobs, Ledger(self.blocks, self.free, self.size, self.slots), now)
        for row in step.evict.tolist():
            self._evict(row)
        copied = self._save(step.save)
        live = self.jobs.running[step.order]
        chosen, waiting = step.order[live], step.order[~live]
        caps = None if step.tokens is None else step.tokens
        budget = self.budget if step.token_budget is None else min(step.token_budget, self.budget)
        holding = np.flatnonzero(self.jobs.running & self.jobs.live)
        paused = holding[~np.isin(holding, chosen)]
        rows, tokens, lost = self._continue(chosen, None if caps is None else caps[live], budget)
        limit = min(step.max_running or self.slots, self.slots - paused.size) - (chosen.size - lost.size)
        fresh, given = _NOBODY, _NOBODY
        if not lost.size:
            spare = budget - int(tokens.sum())
            fresh, given = self._admit(waiting, None if caps is None else caps[~live], spare, limit)
            copied += int(self.jobs.saved[fresh].sum())
            self.jobs.saved[fresh] = 0
        return Ran(
            now, np.concatenate([rows, fresh]), np.concatenate([tokens, given]), paused,
            np.concatenate([step.evict, lost]), lost.size, fresh.size, copied,
        )  # fmt: skip

    def complete(self, ran: Ran, now: float) -> Done:
        """Let the iteration end now: tokens come out. Returns what is finished by it."""
        jobs, rows = self.jobs, ran.rows
        jobs.computed[rows] += ran.tokens
        answers = rows[jobs.computed[rows] >= jobs.prompt[rows] + jobs.made[rows]]
        jobs.first[answers[jobs.made[answers] == 0]] = now
        jobs.made[answers] += 1
        jobs.left[answers] = np.maximum(jobs.left[answers] - 1.0, 1.0)
        rows = answers[jobs.made[answers] >= self.target[answers]]
        done = Done(jobs.names(rows), jobs.first[rows], jobs.evictions[rows])
        for row, name in zip(rows.tolist(), done.ids, strict=True):
            self._release(row)
            jobs.remove(name)
        return done

    def _continue(self, chosen: Ints, caps: Ints | None, budget: int) -> tuple[Ints, Ints, Ints]:
        """Give running rows their tokens in order. Returns rows, tokens, and rows preempted for memory."""
        jobs = self.jobs
        want = np.minimum(missing(jobs, chosen), self.max_model_len - jobs.computed[chosen] - 1)
        want = want if caps is None else np.minimum(want, caps)
        before = np.cumsum(want) - want
        tokens = np.clip(budget - before, 0, want)
        runs = tokens > 0
        rows, tokens = chosen[runs], tokens[runs]
        held = -(-(jobs.computed[rows] + tokens) // self.size)
        more = np.maximum(held - jobs.blocks[rows], 0)
        if int(more.sum()) > self.free:
            return self._squeeze(chosen.tolist(), dict(zip(rows.tolist(), tokens.tolist(), strict=True)))
        self.free -= int(more.sum())
        jobs.blocks[rows] += more
        return rows, tokens, _NOBODY

    def _squeeze(self, chosen: list[int], tokens: dict[int, int]) -> tuple[Ints, Ints, Ints]:
        """Do the same one by one when memory is short: stock takes it from the last row, then from itself."""
        ran: list[int] = []
        lost: list[int] = []
        for row in list(chosen):
            if chosen and row not in chosen:
                break
            if row not in tokens:
                continue
            more = -(-(int(self.jobs.computed[row]) + tokens[row]) // self.size) - int(self.jobs.blocks[row])
            while more > self.free and row in chosen:
                victim = chosen.pop()
                self._evict(victim)
                lost.append(victim)
            if row not in chosen:
                break
            self.free -= max(more, 0)
            self.jobs.blocks[row] += max(more, 0)
            ran.append(row)
        return np.array(ran, np.int64), np.array([tokens[r] for r in ran], np.int64), np.array(lost, np.int64)

    def _admit(self, waiting: Ints, caps: Ints | None, budget: int, places: int) -> tuple[Ints, Ints]:
        """Admit waiting rows in order until one does not fit whole, or there is no place or budget."""
        jobs, given = self.jobs, []
        whole, there = (jobs.prompt[waiting] + jobs.made[waiting]).tolist(), jobs.computed[waiting].tolist()
        limits = whole if caps is None else caps.tolist()
        for row, all_of_it, saved, cap in zip(waiting.tolist(), whole, there, limits, strict=True):
            tokens = min(all_of_it - saved, cap, budget)
            if places <= 0 or tokens <= 0 or -(-all_of_it // self.size) > self.free:
                break
            blocks = -(-(saved + tokens) // self.size)
            self.free -= blocks
            jobs.blocks[row], jobs.running[row] = blocks, True
            given.append(tokens)
            budget, places = budget - tokens, places - 1
        return waiting[: len(given)], np.array(given, np.int64)

    def _evict(self, row: int) -> None:
        self._release(row)
        self.jobs.evictions[row] += 1

    def _save(self, rows: Ints) -> int:
        """Move rows' KV to the host: their blocks and slots are free, their work is kept. Returns tokens."""
        jobs = self.jobs
        self.free += int(jobs.blocks[rows].sum())
        jobs.blocks[rows], jobs.running[rows], jobs.saved[rows] = 0, False, jobs.computed[rows]
        jobs.evictions[rows] += 1
        return int(jobs.saved[rows].sum())

    def _release(self, row: int) -> None:
        """Take a row's KV and its slot."""
        self.free += int(self.jobs.blocks[row])
        self.jobs.blocks[row] = self.jobs.computed[row] = self.jobs.saved[row] = 0
        self.jobs.running[row] = False


def _or_never(promise: float | None) -> float:
    return float("inf") if promise is None else promise
