"""The plots of QLM's evaluation: attainment or throughput against each experiment's parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from benchmarks.papers.qlm_estimates import Estimate
from benchmarks.papers.qlm_tables import QlmResults, QlmTrial
from benchmarks.papers.qlm_workloads import QlmSetting
from headway.whatif.output.plots import colour, colours, line_legend, png, sheet
from headway.whatif.output.results import SIMULATED

# Experiment, title, figure, parameter, its name.
_Panel = tuple[str, str, str, Callable[[QlmSetting], float], str]
_PANELS: tuple[_Panel, ...] = (
    ("tail", "Figure 8: W_A", "throughput.req_per_s", lambda s: s.tail, "rate of tail models / peak"),
    ("multi", "Figure 9: W_A", "attainment", lambda s: 100 * s.interactive, "latency-sensitive, %"),
    ("slo", "Figure 20: W_A", "attainment", lambda s: s.slo_scale, "SLO scale"),
    ("single", "Figure 12: W_B", "attainment", lambda s: 100 * s.interactive, "latency-sensitive, %"),
    ("queue", "Figure 16: W_B", "attainment", lambda s: float(s.queued), "requests queued at the start"),
    ("mega", "Figure 15: W_C", "attainment", lambda s: 100 * s.mega, "mega prompts, %"),
    ("mix", "Figure 14: A10s", "throughput.req_per_s", lambda s: 10.0 * dict(s.gpus)["a10"], "A10, %"),
)
_BARS = (("multi-ablation", "Figure 10: W_A"), ("single-ablation", "Figure 13: W_B"))


def plots(results: QlmResults) -> dict[str, bytes]:
    """Return {name: PNG} of the parts that were run: varied parameters, ablations, estimator."""
    trials = results.trials
    drawn = {f"qlm-{panel[0]}": _lines(trials[panel[0]], panel) for panel in _PANELS if panel[0] in trials}
    bars = [(name, title) for name, title in _BARS if name in trials]
    if bars:
        drawn["qlm-ablation"] = _ablation([(title, trials[name]) for name, title in bars])
    shown = [one for one in results.estimates if one.name.startswith("completion")]
    return drawn | ({"qlm-estimator": _estimator(shown)} if shown else {})


def _lines(trials: Sequence[QlmTrial], panel: _Panel) -> bytes:
    _, title, figure_name, varied, label = panel
    figure, (axes,) = sheet(1, 1, 6, 4)
    for system, shade in colours(one.system for one in trials).items():
        mine = [one for one in trials if one.system == system]
        values = np.array([one.figures[figure_name] for one in mine], float)
        at = [varied(one.setting) for one in mine]
        axes.plot(at, values, marker="o", ms=3, color=shade, label=system)
    axes.set(title=title, xlabel=label, ylabel=figure_name)
    axes.set_ylim(bottom=0)
    if panel[0] == "queue":
        axes.set_xscale("symlog", linthresh=100)
        axes.set_xlim(left=0)
    line_legend(figure, 4)
    return png(figure, SIMULATED)


def _ablation(parts: Sequence[tuple[str, Sequence[QlmTrial]]]) -> bytes:
    figure, panels = sheet(len(parts), 2, 11, 3.2 * len(parts))
    for i, (title, trials) in enumerate(parts):
        _bars(panels[2 * i], title, trials, "attainment")
        _bars(panels[2 * i + 1], title, trials, "throughput.req_per_s")
    return png(figure, SIMULATED)


def _bars(axes: Axes, title: str, trials: Sequence[QlmTrial], name: str) -> None:
    values = np.array([one.figures[name] for one in trials], float)
    shades = colours(one.system for one in trials)
    axes.barh([one.system for one in trials], values, color=[shades[one.system] for one in trials])
    axes.invert_yaxis()
    axes.set(title=title, xlabel=name)


def _estimator(shown: Sequence[Estimate]) -> bytes:
    figure, panels = sheet(1, len(shown), 3.2 * len(shown), 3.2)
    for axes, one in zip(panels, shown, strict=True):
        axes.plot(one.simulated, one.forecast, ".", ms=2, color=colour(0))
        end = float(one.simulated.max())
        axes.plot([0, end], [0, end], "--", lw=0.8, color="black")
        axes.set(title=f"{one.name}, R2 {one.r2:.4f}", xlabel="simulated, s", ylabel="forecast, s")
        axes.title.set_fontsize(8)
    return png(figure, SIMULATED)
