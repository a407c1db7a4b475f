"""What became of application runs: whether each ended, when, and within the time that was promised.

The account is the host's and works with every planner. It says when a run has ended; a planner that ranks
runs (`policy/apps/runs.py`) is told so by `RunEnded`. Both follow one run with the same object
(`policy/apps/run.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headway.events import Arrived, Event, Failed, Finished, RunEnded, UnitBegan, UnitEnded
from headway.policy.apps.run import Key, OpenVisit, Run, place_of
from headway.types import Request

Outcome = Literal["finished", "in_time", "late", "failed", "timed_out"]
MOST_OUTSIDE = 256  # executions outside the LLM that one run may have in progress
_VISITS = 100  # that are kept of a live run
_MOST_LIVE = 10_000  # live runs of a tenant; beyond them the one that is silent for longest times out
_MOST_ENDED = 10_000  # ended runs of a tenant that are remembered
_LEFT = ("client_gone", "cancelled", "lease_lost", "handed_over")  # how reasons begin that are no failure of ours


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended.

    began: instant of its first request or unit. seconds: from then to the end of its last one, None = none
        has ended. target: seconds that it was promised, None = no deadline.
    outcome: "failed" = a request had no answer though its client waited; "timed_out" = its end was never
        told; otherwise "finished" without a deadline, "in_time" or "late" with one.
    told: its client said that it ends.
    """

    key: Key
    began: float
    seconds: float | None
    target: float | None
    outcome: Outcome
    told: bool

    @property
    def met(self) -> bool | None:
        """Tell whether it kept its deadline, None = it had none.

        One whose end was never told has kept it if its last request ended in time.
        """
        if self.target is None:
            return None
        return self.outcome != "failed" and self.seconds is not None and self.seconds <= self.target


@dataclass(slots=True)
class _Tenant:
    """The runs of one tenant, by application and run.

    quiet: live runs without a request in progress, the one that is silent for longest first.
    """

    live: dict[Key, Run] = field(default_factory=dict)
    quiet: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    ended: OrderedDict[Key, EndedRun] = field(default_factory=OrderedDict)
    by_app: Counter[str] = field(default_factory=Counter)


class RunAccount:
    """Live and lately ended runs.

    silent_s: seconds without any sign of life after which a run has timed out. A request in progress is one;
        a unit outside the LLM gives one when it begins and one when it ends.
    """

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._tenants: dict[str, _Tenant] = {}
        self._of: dict[str, tuple[Run, OpenVisit]] = {}  # by id of a request in progress

    # ---- what is known

    def live(self, key: Key) -> Run | None:
        """Return a live run."""
        return self._known(key[0]).live.get(key)

    def ended(self, key: Key) -> EndedRun | None:
        """Return a run that has ended, as long as it is remembered."""
        return self._known(key[0]).ended.get(key)

    def live_by_app(self, tenant: str) -> Mapping[str, int]:
        """Return how many live runs each application of a tenant has."""
        return self._known(tenant).by_app

    @property
    def tenants(self) -> list[str]:
        """The tenants that have had runs."""
        return list(self._tenants)

    # ---- what happens

    def note(self, event: Event, now: float) -> list[EndedRun]:
        """Take note of an event; return the runs that have ended with it."""
        match event:
            case Arrived(request) if request.stage is not None:
                return self._arrived(request, now)
            case Finished(id, output_tokens):
                return self._went(id, output_tokens, now)
            case Failed(id, reason):
                return self._went(id, None, now, left=reason.startswith(_LEFT))
            case UnitBegan(tenant, stage, backend):
                run, ended = self._get((tenant, stage.app, stage.run), now)
                run.began_outside(stage.unit, backend, now)
                self._settle(run)
                return ended
            case UnitEnded(tenant, stage):
                known = self.live((tenant, stage.app, stage.run))
                if known is not None and known.ended_outside(stage.unit, now) is not None:
                    self._settle(known)
            case RunEnded(tenant, app, name):
                known = self.live((tenant, app, name))
                if known is not None:
                    known.final = True
                    return self._end_if_final(known)
        return []

    def expire(self, now: float) -> list[EndedRun]:
        """End the runs that have been silent for too long."""
        out: list[EndedRun] = []
        for runs in self._tenants.values():
            while runs.quiet:
                run = runs.live[next(iter(runs.quiet))]
                if now - run.seen <= self._silent_s:
                    break
                out.append(self._end(run, timed_out=True))
        return out

    def _arrived(self, request: Request, now: float) -> list[EndedRun]:
        key, unit = place_of(request)
        run, ended = self._get(key, request.arrival)
        visit, _ = run.came(request, unit, 0.0, now)
        self._of[request.id] = (run, visit)
        self._settle(run)
        return ended

    def _went(self, id: str, output_tokens: int | None, now: float, *, left: bool = False) -> list[EndedRun]:
        if id not in self._of:
            return []
        run, visit = self._of.pop(id)
        run.went(id, visit, output_tokens, now, left=left)
        self._settle(run)
        return self._end_if_final(run)

    # ---- runs

    def _known(self, tenant: str) -> _Tenant:
        """Return a tenant's runs; a question adds no tenant."""
        return self._tenants.get(tenant) or _Tenant()

    def _runs_of(self, tenant: str) -> _Tenant:
        return self._tenants.setdefault(tenant, _Tenant())

    def _get(self, key: Key, began: float) -> tuple[Run, list[EndedRun]]:
        """Return a live run, or begin it; and the run that times out because there are too many."""
        runs = self._runs_of(key[0])
        known = runs.live.get(key)
        if known is not None:
            return known, []
        ended = []
        if len(runs.live) >= _MOST_LIVE and runs.quiet:
            ended.append(self._end(runs.live[next(iter(runs.quiet))], timed_out=True))
        run = runs.live[key] = Run(key, -1, began, kept=_VISITS)
        runs.by_app[key[1]] += 1
        return run, ended

    def _settle(self, run: Run) -> None:
        """Keep the order of quiet runs after a sign of life."""
        quiet = self._runs_of(run.key[0]).quiet
        quiet.pop(run.key, None)
        if not run.requests:
            quiet[run.key] = None

    def _end_if_final(self, run: Run) -> list[EndedRun]:
        return [self._end(run)] if run.final and not run.requests else []

    def _end(self, run: Run, *, timed_out: bool = False) -> EndedRun:
        tenant, app, _ = run.key
        runs = self._runs_of(tenant)
        del runs.live[run.key]
        runs.quiet.pop(run.key, None)
        runs.by_app[app] -= 1
        if not runs.by_app[app]:
            del runs.by_app[app]
        ended = _ended(run, timed_out)
        runs.ended.pop(run.key, None)
        runs.ended[run.key] = ended
        if len(runs.ended) > _MOST_ENDED:
            runs.ended.popitem(last=False)
        return ended


def _ended(run: Run, timed_out: bool) -> EndedRun:
    seconds = None if run.last is None else run.last - run.began
    outcome: Outcome = "finished"
    if run.lost:
        outcome = "failed"
    elif timed_out:
        outcome = "timed_out"
    elif run.target is not None:
        outcome = "in_time" if seconds is not None and seconds <= run.target else "late"
    return EndedRun(run.key, run.began, seconds, run.target, outcome, run.final)
