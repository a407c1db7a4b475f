"""Compiles what estimates of demand and ranks of runs need."""

from __future__ import annotations

import numpy as np

from headway.policy.apps.demand import SAMPLES, Costs, Demand, Known
from headway.policy.apps.gittins import gittins, latest_start, mean_remaining
from headway.policy.apps.graph import LLM, Graph, Visit


def prepare() -> None:
    """Compile it; that takes seconds, which the first run's request would wait otherwise."""
    graph = Graph("")
    graph.learn([Visit("", LLM, 1.0, 1.0, 1)])
    Demand(graph).draw("", {}, None, Known(), Costs(1.0, 1.0, 1.0), 0)
    samples, one, row = np.ones((1, SAMPLES)), np.ones(1), np.zeros(1, np.int64)
    gittins(samples, one, row)
    mean_remaining(samples, one, row)
    latest_start(samples, one, one, 0.0, row)
