"""`headway profile`: an engine's latency profile, and residuals of each latency law by kind of batch."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.markup import escape

from headway.config import Engine
from headway.policy.forecast.latency.laws import KINDS, Shapes
from headway.policy.forecast.latency.measurement import Fits
from headway.policy.forecast.latency.profiles import LatencyProfile
from headway.whatif.measured import profile
from headway.whatif.measured.profile import ProfileMeasurement, ProfileTarget
from headway.whatif.output.results import About, Grid, Report, Row, deliver, say

_HEADER = ("law", *(f"{kind}, mean (p90) %" for kind in ("all", *KINDS)))
_COLOURS = {"prefill": "#D55E00", "decode": "#0072B2", "mixed": "#009E73"}


@dataclass(frozen=True, slots=True)
class Found:
    """The samples, fitted laws and latency profile of an engine."""

    measured: ProfileMeasurement
    fits: Fits
    profile: LatencyProfile

    def rows(self) -> list[Row]:
        """Return the laws' residual.{mean,p90}_pct by kind of batch, and the engine's figures."""
        rows = [
            Row(f"residual.{name}_pct", form, kind, 100 * getattr(error, name), "%")
            for form, kinds in self.fits.errors.items()
            for kind, error in kinds.items()
            for name in ("mean", "p90")
        ]
        return rows + [Row(id, self.fits.best, "engine", value, unit) for id, value, unit in self._others()]

    def _others(self) -> list[tuple[str, float | None, str]]:
        profile = self.profile
        extra = np.array([row[2] - row[1] for row in self.measured.rows if row[2] and row[1]])
        request, token = profile.request_overhead_s or 0.0, profile.token_overhead_s or 0.0
        return [
            ("iterations", float(len(self.measured.rows)), "count"),
            ("disturbed", float(self.fits.disturbed), "count"),
            ("interval.extra_ms", float(extra.mean() * 1000), "ms"),
            ("overhead.request_ms", 1000 * request, "ms"),
            ("overhead.token_ms", 1000 * token, "ms"),
            ("interruption_ms", 1000 * (profile.interruption_s or 0.0), "ms"),
            ("kv.tokens", float(profile.kv_tokens or 0), "tokens"),
            ("load.cold_s", profile.load_cold_s, "s"),
        ]


def main(
    engine: Engine | None,
    url: str | None,
    model: str | None,
    *,
    device: str | None,
    quick: bool,
    as_json: bool,
    seed: int,
    out: Path | None,
) -> None:
    """Profile an engine: start `engine`, or attach to the one at `url`; print and write the result."""
    began, where = time.perf_counter(), device or profile.device()
    found = asyncio.run(_found(engine, url, model, where, quick, seed))
    report = build(found, time.perf_counter() - began, About(_describe(found), seed))
    deliver(report, as_json=as_json, out=out, pictures=lambda: {"profile": draw(found)})
    if out is not None:
        found.profile.save(out / "pace.json")
        say(f"written: {out}/pace.json")


async def _found(
    engine: Engine | None, url: str | None, model: str | None, where: str, quick: bool, seed: int
) -> Found:
    rng = np.random.default_rng([seed, 77])
    if engine is None:
        assert url is not None, "the caller gives an engine or an address"
        return await _measured(await profile.attached(url, model), where, rng, quick)
    logs = Path(tempfile.mkdtemp(prefix="headway-profile-"))
    profile.console.print(f"[dim]starting vLLM, logs: {escape(str(logs))}[/]")
    async with profile.started(engine, logs) as target:
        return await _measured(target, where, rng, quick)


async def _measured(target: ProfileTarget, where: str, rng: np.random.Generator, quick: bool) -> Found:
    measured = await profile.measure(target, rng, quick=quick, passes=1 if quick else 2)
    fits = measured.fits()
    return Found(measured, fits, measured.profile(fits, where))


def _describe(found: Found) -> str:
    profile, limits = found.profile, found.measured.limits
    return (
        f"{profile.model} on {profile.device}: {len(found.measured.rows)} iterations, from one decision "
        f"to the next; batch limit {limits.max_running}, {limits.kv_tokens} tokens of KV. The profile keeps "
        f"{found.fits.best!r}, the law with the smallest residuals."
    )


def build(found: Found, seconds: float, about: About) -> Report:
    """Return the report: a line per law, a column per kind of batch; * marks the law that is kept."""
    return Report(
        "profile",
        "vllm",
        "Latency profile of an engine",
        found.rows(),
        seconds,
        about,
        Grid(_HEADER, [_lines(found)]),
        notes=_facts(found),
    )


def _lines(found: Found) -> list[list[str]]:
    return [
        [form + ("*" if form == found.fits.best else "")]
        + [
            f"{100 * kinds[kind].mean:.1f} ({100 * kinds[kind].p90:.1f})" if kind in kinds else "-"
            for kind in ("all", *KINDS)
        ]
        for form, kinds in found.fits.errors.items()
    ]


def _facts(found: Found) -> list[str]:
    rows = [row for row in found.rows() if not row.id.startswith("residual") and row.ours is not None]
    return [f"{row.id}: {row.ours:,.2f}".rstrip("0").rstrip(".") for row in rows]


def draw(found: Found) -> bytes:
    """Return a PNG of the kept law's forecasts against the measured iterations, by kind of batch."""
    from headway.whatif.output.plots import png, sheet

    figure, (axes,) = sheet(1, 1, 5, 4.4)
    used = found.fits.samples
    x = Shapes.of(used.batches)
    forecast, seen = found.fits.laws[found.fits.best].seconds(x) * 1000, used.seconds * 1000
    for kind, colour in _COLOURS.items():
        axes.loglog(seen[x.kind(kind)], forecast[x.kind(kind)], ".", color=colour, label=kind, alpha=0.7)
    edges = [float(seen.min()), float(seen.max())]
    axes.loglog(edges, edges, color="#444444", linewidth=1)
    axes.set(xlabel="measured, ms", ylabel=f"{found.fits.best}, ms", title="iterations")
    axes.legend(frameon=False)
    return png(figure)
