"""What the prompts of recorded runs have in common, as `Prefix`es.

Recordings hold lengths, no text. Two things follow from them:
- All requests of a unit begin with its template (Hermes 2.3: "tasks in an LLM unit share the same system
  prompt"), of which the shortest prompt of the unit is an upper bound; it is taken for the template.
- A unit with one request that was visited before in the run with one request, and whose prompt is at least
  as long as the prompt and the answer then, goes on with that conversation (agents such as ALFWI's).
What parallel requests of one visit share beyond the template is not recorded, and none of it is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from headway.prefix import Prefix
from headway.simulate.workload.applications import Applications, AppRun


def templates(runs: Iterable[AppRun]) -> dict[str, int]:
    """Return the tokens of every unit's template, by "application/unit"."""
    shortest: dict[str, int] = {}
    for run in runs:
        for step in run.steps:
            for prompt, _ in step.requests:
                name = f"{run.app}/{step.unit}"
                shortest[name] = min(shortest.get(name, prompt), prompt)
    return shortest


def with_prefixes(apps: Applications, shared: Mapping[str, int]) -> Applications:
    """Return runs whose requests say what they share; shared: as `templates` returns it.

    Every prompt is a chain of its run that begins with the unit's template, and goes on with the answer.
    """
    prefixes: list[Prefix] = []
    for number, run in enumerate(apps.runs):
        prefixes += _chains(run, number, shared)
    codes = np.arange(len(prefixes))
    return replace(apps, workload=replace(apps.workload, prefix=codes, prefixes=tuple(prefixes)))


def _chains(run: AppRun, number: int, shared: Mapping[str, int]) -> Sequence[Prefix]:
    """Return the prefixes of a run's requests, in order."""
    out: list[Prefix] = []
    talks: dict[str, tuple[str, int]] = {}  # by unit: the chain of its latest visit, and its tokens
    for step in run.steps:
        name = f"{run.app}/{step.unit}"
        for prompt, output in step.requests:
            chain, said = talks.get(step.unit, ("", prompt + 1))
            if len(step.requests) > 1 or prompt < said:
                chain = f"{name} {number}.{len(out)}"
            parent = Prefix(name, min(shared[name], prompt))
            out.append(Prefix(chain, prompt, answer=True, parent=parent))
            talks[step.unit] = chain, prompt + output
        if len(step.requests) > 1:
            talks.pop(step.unit)
    return out
