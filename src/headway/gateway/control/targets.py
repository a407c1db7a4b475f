"""Targets of classes, in words and against the measured pace of the engines."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from headway.config import Config, Tier
from headway.engines.vllm.process.pace import PROMPT, MeasuredPace

HEADROOM = 2.0  # a class may take this many times what an engine takes that has little to do
SPARE = 1.25  # a target that such an engine meets by less than this factor is missed as soon as there is more
_ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)  # times a power of ten
log = logging.getLogger("headway.gateway")


def measures(config: Config) -> bool:
    """Return whether a measurement of the engines says anything about the classes."""
    targets = ((tier.ttft_ms, tier.tpot_ms, tier.itl_ms) for tier in config.classes.values())
    return any(ms is not None for stated in targets for ms in stated)


@dataclass(slots=True)
class Paces:
    """The pace of each engine that was measured at its start. changed: called when there is another one."""

    by_engine: dict[str, MeasuredPace] = field(default_factory=dict)
    changed: Callable[[], None] = lambda: None

    def add(self, engine: str, pace: MeasuredPace) -> None:
        """Take note of an engine's pace."""
        self.by_engine[engine] = pace
        self.changed()

    def remove(self, engine: str) -> None:
        """Forget an engine that is gone."""
        if self.by_engine.pop(engine, None) is not None:
            self.changed()

    @property
    def slowest(self) -> MeasuredPace | None:
        """Return the pace that all of them can keep, None = none was measured."""
        return reduce(MeasuredPace.slowest, self.by_engine.values()) if self.by_engine else None

    def fit(self, classes: Mapping[str, Tier]) -> dict[str, Tier]:
        """Return the classes, with those that are `measured` as the engines can serve them."""
        pace = self.slowest
        return {name: tier if pace is None else fit_tier(tier, pace) for name, tier in classes.items()}

    def descriptions(self, classes: Mapping[str, Tier]) -> list[str]:
        """Return a line for each class that is `measured`, and for its targets if they cannot be met."""
        pace = self.slowest
        return [] if pace is None else [_line(name, tier, pace) for name, tier in classes.items() if tier.measured]

    def warnings(self, classes: Mapping[str, Tier]) -> Iterator[str]:
        """Yield a line for each class whose targets, stated as they are, no engine here can meet."""
        if (pace := self.slowest) is None:
            return
        for name, tier in classes.items():
            if not tier.measured and (missed := list(_missed(tier, pace, 1.0))):
                best = fit_tier(replace(tier, measured=True), pace)
                yield f"class {name}: {'; '.join(missed)}; the engines here can keep: {describe(best)}"


def fit_tier(tier: Tier, pace: MeasuredPace) -> Tier:
    """Return a class with the targets that an engine of this pace can meet, none tighter than stated."""
    if not tier.measured:
        return tier
    ttft = _reachable(tier.ttft_ms, pace.ttft)
    tpot, itl = (_reachable(ms, pace.together) for ms in (tier.tpot_ms, tier.itl_ms))
    return replace(tier, ttft_ms=ttft, tpot_ms=tpot, itl_ms=itl)


def _reachable(stated: float | None, took: float) -> float | None:
    """Return a target in milliseconds, raised where an idle engine, which takes `took` seconds, has no room."""
    return stated if stated is None or SPARE * 1000 * took <= stated else round_up(HEADROOM * 1000 * took)


def _missed(tier: Tier, pace: MeasuredPace, spare: float) -> Iterator[str]:
    """Yield, in words, each target that an idle engine misses, or does not meet by the factor `spare`."""
    if tier.ttft_ms is not None and spare * 1000 * pace.ttft > tier.ttft_ms:
        took = f"a prompt of {PROMPT} tokens takes {_ms(1000 * pace.ttft)}"
        yield f"{took}, {_verdict(1000 * pace.ttft, tier.ttft_ms)}"
    for stated in tier.tpot_ms, tier.itl_ms:
        if stated is not None and spare * 1000 * pace.together > stated:
            took = f"a token takes {_ms(1000 * pace.together)} with {_streams(pace)}"
            yield f"{took}, {_verdict(1000 * pace.together, stated)}"


def _verdict(took: float, stated: float) -> str:
    """Say in words that a target in milliseconds is missed, or nearly."""
    return f"{_ms(stated)} {'cannot be met here' if took > stated else 'leaves too little room'}"


def _line(name: str, tier: Tier, pace: MeasuredPace) -> str:
    promise = f"{name}: {describe(fit_tier(tier, pace))}"
    if missed := list(_missed(tier, pace, SPARE)):
        return f"{promise} (measured: {'; '.join(missed)})"
    first, each = _ms(1000 * pace.ttft), _ms(1000 * pace.together)
    return f"{promise} (measured: first token {first}, then {each} per token with {_streams(pace)})"


def _streams(pace: MeasuredPace) -> str:
    return "one stream" if pace.streams == 1 else f"{pace.streams} streams at once"


def round_up(number: float) -> float:
    """Return the value rounded up to a number of `_ROUND` times a power of ten."""
    power = 10.0 ** math.floor(math.log10(number))
    return next(round(step * power, 6) for step in _ROUND if step * power >= number * (1 - 1e-9))


def describe(tier: Tier) -> str:
    """Return what a class promises, and the soft target that orders it, in words."""
    parts, from_due = [], " from then on, however early the first one comes" if tier.pace == "line" else ""
    if tier.ttft_ms is not None:
        parts.append(f"first token {_ms(tier.ttft_ms)}")
    if tier.tpot_ms is not None:
        parts.append(f"{'then ' if parts else ''}{_ms(tier.tpot_ms)} per token{from_due}")
    if tier.itl_ms is not None:
        parts.append(f"no gap above {_ms(tier.itl_ms)}")
    if tier.e2e_ms is not None:
        parts.append(f"whole answer {_ms(tier.e2e_ms)}")
    if tier.share is not None:
        parts.append(f"for {100 * tier.share:.4g} % of the requests")
    if tier.ttft_ms is None and tier.e2e_ms is None:
        soft = "soon" if tier.soft_ttft_ms is None else f"within {_ms(tier.soft_ttft_ms)}"
        parts.append(f"first token {soft} (a soft target, no promise)")
    return ", ".join(parts)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds / 1000:,.3g} s" if milliseconds >= 10_000 else f"{round(milliseconds):,} ms"
