"""A recipe: one planner for the slow loop and one packer for the fast loop, with what they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headway.forecast.latency.online import OnlineLatency
from headway.ports import Packer, Planner


@dataclass(frozen=True, slots=True)
class Recipe:
    """planner() and packer(max_running, token_budget, pace) make fresh policies; `about`: one line.

    pull: as in `Cluster`. saves: the packer uses `Step.save`, which needs an engine that can copy KV to the
    host; reserves: `Step.reserve` and `Step.lend`, which need an engine that shares no prefixes
    (`engines/vllm/plugin/reservations.py`). swaps: the planner loads other models where instances can. lengths: whose
    forecasts it is meant for: those that the host has, those padded, or an oracle's, which only a simulation
    has. kv: how an engine with a host pool keeps KV for it: in two-ended blocks, or in plain ones, copies (in
    simulations) before or beside the computation.
    """

    name: str
    about: str
    planner: Callable[[], Planner]
    packer: Callable[[int, int, OnlineLatency], Packer]
    pull: bool = True
    saves: bool = False
    swaps: bool = False
    reserves: bool = False
    lengths: Literal["host", "padded", "oracle"] = "host"
    kv: Literal["before", "beside", "two-ended"] = "before"
