"""Sources of real traffic to simulate: a gateway's journal, or a file of arrivals and lengths.

The fleet is the journal's engines, or one that the caller describes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from headway.errors import ConfigError
from headway.simulate import fleet as fleets
from headway.simulate.instance import InstanceSpec
from headway.simulate.workload import result_files
from headway.simulate.workload.traffic import TrafficClass, Workload
from headway.store.journal.reader import JournalReader, read
from headway.whatif.experiment import Given
from headway.whatif.journal.advise import Case, recipes_of, served_of
from headway.whatif.journal.calibrate import Calibration, instances_of
from headway.whatif.journal.replay import busiest as busiest_part
from headway.whatif.journal.replay import traffic_of
from headway.whatif.journal.trust import suspects
from headway.whatif.load.mix import parse_slo
from headway.whatif.output.results import SIMULATED
from headway.whatif.scenario import Recorded, faster, of_trace

_MEASURED = "{}: {} iterations, fitted within {:.1%} of their time, {:.1f} ms to the engine and {:.1f} ms back."
_PREFIXES = "The simulation computes whole prompts, including parts that were in an engine's prefix cache."


@dataclass(frozen=True, slots=True)
class JournalSource:
    """Real traffic and the fleet to simulate it on.

    journal, trace: one of the two. since, until: times between which a journal's requests ended.
    specs: specs of the fleet; empty = the journal's engines.
    classes: SLOs and other settings of a trace's requests, by class.
    slo: SLO of a trace's other classes, as in "ttft:400 tpot:200" in ms.
    """

    journal: Path | None
    trace: str | None
    since: float | None
    until: float | None
    specs: tuple[fleets.Spec, ...]
    classes: tuple[TrafficClass, ...]
    slo: str
    seed: int

    def case(
        self, recipes: tuple[str, ...], loads: tuple[float, ...], *, target: float, most: int, busiest: float
    ) -> tuple[Case, str, list[str]]:
        """Return the case for `headway advise`, a sentence about it, and notes.

        busiest: seconds of the busiest stretch, which is simulated.
        """
        kinds, journal, notes, seen = self._machines()
        whole = self._requests(kinds, journal)
        part = busiest_part(whole, busiest)
        part, longer = Recorded(Given(kinds), part, "", self.seed).workload()
        unknown = self._unknown(journal, len(whole) - len(part), longer)
        served = None if unknown or journal is None else served_of(journal)
        if unknown:
            notes.append(f"The error of the simulation is not known, {unknown}.")
        case = Case(kinds, part, served, recipes, loads, target, most, seen)
        return case, self._about(part, kinds, longer), notes

    def _unknown(self, journal: JournalReader | None, left: int, longer: int) -> str:
        """Return why the simulator's error cannot be measured, "" = it can. left: number of requests left out."""
        if journal is None:
            return "as a trace, unlike a journal, does not have the served latencies"
        if self.specs:
            return "as these are not the journal's engines: leave out --instance and --fleet to measure it"
        if longer:
            return f"as {longer} requests are longer than any instance holds"
        if left:
            return f"as {left:,} requests are outside the busiest stretch: raise --busiest"
        if len(recipes_of(journal)) > 1:
            return "as the requests were served under several recipes: choose a time with --since and --until"
        return ""

    def scenario(self, load_: float, plan_us: float) -> Recorded:
        """Return the scenario for `headway simulate`. load_: factor of the arrivals' rate."""
        kinds, journal, notes, _ = self._machines()
        requests = faster(self._requests(kinds, journal), load_)
        about = " ".join([f"{self._about(requests, kinds, 0)}, at {load_:g}x its rate.", *notes])
        return Recorded(Given(kinds), requests, about, self.seed, plan_us)

    def _machines(self) -> tuple[tuple[InstanceSpec, ...], JournalReader | None, list[str], list[str]]:
        """Return the instances, the journal, notes on both, and the journal's `suspects`."""
        if (self.journal is None) == (self.trace is None):
            raise ConfigError(
                "There is no traffic to simulate.", "Give --journal DIR or --trace FILE, and only one of them."
            )
        journal = None if self.journal is None else read(self.journal, since=self.since, until=self.until)
        if journal is not None and not journal.requests:
            raise journal.nothing()
        notes = journal.left_out() if journal else []
        if self.specs:
            return tuple(fleets.build(self.specs)), journal, notes, []
        if journal is None:
            raise ConfigError(
                "There are no instances to simulate.",
                "Give --instance or --fleet, such as --instance llama-2-7b-a100:2.",
            )
        kinds, known = instances_of(journal)
        return kinds, journal, [*notes, *_measured(known), _PREFIXES], suspects(journal, known)

    def _requests(self, kinds: Sequence[InstanceSpec], journal: JournalReader | None) -> Workload:
        if journal is not None:
            return traffic_of(journal, self.seed)
        assert self.trace is not None, "either a journal or a trace is given"
        trace = result_files.read(self.trace)
        return of_trace(trace, self.classes, parse_slo(self.slo), kinds[0].instance.model)

    def _about(self, requests: Workload, kinds: Sequence[InstanceSpec], longer: int) -> str:
        seconds = float(requests.arrival[-1] - requests.arrival[0]) if len(requests) else 0.0
        left = f", {longer} longer than any instance holds left out" if longer else ""
        return (
            f"{SIMULATED}: {len(requests):,} requests over {seconds:,.0f} s from "
            f"{self.journal or self.trace}{left}; {len(kinds)} instance{'s' if len(kinds) > 1 else ''} today"
        )


def _measured(known: dict[str, Calibration]) -> list[str]:
    """Return a sentence on the calibration of each engine."""
    return [
        _MEASURED.format(name, one.iterations, one.error, 1000 * one.request, 1000 * one.token)
        for name, one in known.items()
    ]


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")


def seconds(text: str) -> float:
    """Parse a duration such as "90m" (s, m, h, d, w) into seconds. ConfigError for anything else."""
    match = _LENGTH.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise ConfigError(f"{text!r} is not a duration.", "Write it like 90m, 1h or 7d.")
    return float(match[1]) * _UNITS[match[2]]


def instant(text: str, now: float | None = None) -> float:
    """Parse "24h" (24 hours ago) or "2026-11-23 10:00" (local time) into seconds since the epoch.

    now: seconds since the epoch, None = the current time. ConfigError for anything else.
    """
    given = text.strip()
    if re.fullmatch(_LENGTH, given):
        return (time.time() if now is None else now) - seconds(given)
    try:
        return datetime.fromisoformat(given).timestamp()
    except ValueError:
        raise ConfigError(
            f"{text!r} is not a time.", "Write it like 90m, 24h or 7d, or like 2026-11-23 10:00."
        ) from None
