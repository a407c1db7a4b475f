"""The plots of Hermes' evaluation: completion times and their distribution, deadlines, caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.papers.hermes_workloads import FACTORS, ServedRuns
from headway.whatif.output.plots import colours, legend, line_legend, png, sheet
from headway.whatif.output.results import SIMULATED


def plots(results: Mapping[str, Sequence[ServedRuns]]) -> dict[str, bytes]:
    """Return {name: PNG} of the experiments that were run."""
    drawn = {}
    if "act" in results:
        drawn = {"hermes-act": _bars(results["act"]), "hermes-cdf": _distribution(results["act"])}
    if "deadlines" in results:
        drawn["hermes-deadlines"] = _deadlines(results["deadlines"])
    return drawn


def _bars(served: Sequence[ServedRuns]) -> bytes:
    """Draw the mean completion time by intensity (figure 9a)."""
    figure, (axes,) = sheet(1, 1, 7, 4)
    systems = list(dict.fromkeys(one.system for one in served))
    settings = list(dict.fromkeys(one.setting.name for one in served))
    for number, (system, shade) in enumerate(colours(systems).items()):
        means = [float(one.act.mean()) for one in served if one.system == system]
        at = np.arange(len(settings)) + (number - len(systems) / 2 + 0.5) * 0.8 / len(systems)
        axes.bar(at, means, 0.8 / len(systems), color=shade)
    axes.set_xticks(range(len(settings)), settings)
    axes.set(ylabel="mean application completion time, s", title="Figure 9a")
    legend(figure, systems)
    return png(figure, SIMULATED)


def _distribution(served: Sequence[ServedRuns]) -> bytes:
    """Draw the distribution of completion times in the first setting (figure 9b)."""
    figure, (axes,) = sheet(1, 1, 7, 4)
    first = served[0].setting
    shown = [one for one in served if one.setting == first]
    shades = colours(one.system for one in shown)
    for one in shown:
        share = np.arange(1, one.act.size + 1) / one.act.size
        axes.plot(np.sort(one.act), share, color=shades[one.system], label=one.system)
    axes.set(xlabel="application completion time, s", ylabel="share of runs", title=f"Figure 9b, {first.name}")
    axes.set_xscale("log")
    line_legend(figure, 4)
    return png(figure, SIMULATED)


def _deadlines(served: Sequence[ServedRuns]) -> bytes:
    """Draw the share of runs that meet their deadline in the first setting, by the deadline's factor (figure 11)."""
    served = [one for one in served if one.setting == served[0].setting]
    figure, (axes,) = sheet(1, 1, 7, 4)
    names = ["all", *(f"{factor:g}x" for factor in FACTORS)]
    shades = colours(one.system for one in served)
    for number, one in enumerate(served):
        met = one.act <= one.target
        shares = [100 * met.mean(), *(100 * met[one.factor == factor].mean() for factor in FACTORS)]
        at = np.arange(len(names)) + (number - len(served) / 2 + 0.5) * 0.8 / len(served)
        axes.bar(at, shares, 0.8 / len(served), color=shades[one.system])
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="runs in time, %", title="Figure 11")
    legend(figure, [one.system for one in served])
    return png(figure, SIMULATED)


def hit_ratios(hits: Mapping[tuple[str, str], float]) -> bytes:
    """Draw the hit ratio by cache and policy (figure 13). hits: % by system and setting."""
    figure, (axes,) = sheet(1, 1, 9, 4)
    systems = list(dict.fromkeys(system for system, _ in hits))
    settings = list(dict.fromkeys(setting for _, setting in hits))
    for number, (system, shade) in enumerate(colours(systems).items()):
        at = np.arange(len(settings)) + (number - len(systems) / 2 + 0.5) * 0.8 / len(systems)
        heights = [hits[system, setting] for setting in settings]
        axes.bar(at, heights, 0.8 / len(systems), color=shade)
    axes.set_xticks(range(len(settings)), [setting.replace(", ", ",\n") for setting in settings])
    axes.set(ylabel="requests that found what they needed, %", title="Figure 13", ylim=(0, 100))
    legend(figure, systems)
    return png(figure, SIMULATED)
