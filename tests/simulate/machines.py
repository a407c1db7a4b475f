"""Small simulated machines whose every iteration takes the same time, and workloads for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headway.simulate.run import InstanceSpec, Load
from headway.simulate.workload.traffic import Workload, concat, single
from headway.types import Batch, Floats, Instance, Slo


@dataclass(frozen=True)
class Constant:
    """Every iteration takes the same time."""

    each: float

    def seconds(self, batch: Batch) -> float:
        return self.each

    def learn(self, batch: Batch, seconds: float) -> None:
        """It is known."""


GIB = 1 << 30


def machine(
    id: str,
    *models: str,
    each: float = 0.1,
    running: int = 4,
    blocks: int = 200,
    host: int = 0,
    cold: float = 10.0,
    warm: float = 1.0,
    longest: int = 1000,
) -> InstanceSpec:
    """A node that serves its first model and can load the others; each has 1 GiB of weights."""
    forms = [
        InstanceSpec(
            Instance(id, model, running, blocks, 16, longest),
            Constant(each),
            2 * running,
            256,
            0.0,
            Load(cold, warm, GIB),
            (),
            host * GIB,
        )
        for model in models or ("default",)
    ]
    return replace(forms[0], others=tuple(forms[1:]))


def at(*times: float, model: str = "default", prompt: int = 10, output: int = 5, slo: Slo | None = None) -> Workload:
    return single(np.array(times, float), prompt, output, model=model, slo=slo)


def together(*parts: Workload) -> Workload:
    return concat(*parts).sorted()


def random_traffic(seed: int, models: tuple[str, ...], count: int, span: float) -> Workload:
    """Requests of random lengths for random models over `span` seconds."""
    rng = np.random.default_rng(seed)
    times: Floats = np.sort(rng.uniform(0.0, span, count))
    which = rng.integers(0, len(models), count)
    parts = [
        single(
            times[which == k],
            rng.integers(1, 120, int((which == k).sum())),
            rng.integers(1, 30, int((which == k).sum())),
            model=model,
        )
        for k, model in enumerate(models)
    ]
    return concat(*parts).sorted()
