"""Hit ratios of KV and LoRA caches, and completion times with them (Hermes 5.4, figure 13), SIMULATED.

KV: host memory of 8, 16 and 32 GiB with a disk behind it, 500 runs within 15 minutes. LoRA: 10 adapters on the
device, 20 in host memory, 200 on the disk, 1,000 runs within 25 minutes. All systems schedule as `hermes`
does; they differ in what the caches hold: `lru`, `epwq` and `hermes` of `sim/cache_policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.apps.prewarming import PrewarmOptions
from headway.apps.runs import RankOptions
from headway.bench.output.results import Row
from headway.bench.papers.hermes_workloads import GRAPHS, HERMES, Setting, engines, knowledge, pool, workload
from headway.recipes.hermes import variant
from headway.sim.cache_policy import Lru, Policy, Prewarmed, WaitingQueue
from headway.sim.replay import replay
from headway.sim.warm_engines import Adapters, KvCache
from headway.sim.workload.applications import Applications
from headway.sim.workload.run_prefixes import templates, with_prefixes
from headway.types import Floats

POLICIES: Mapping[str, Callable[[], Policy]] = {"lru": Lru, "epwq": WaitingQueue, HERMES: Prewarmed}
SIZES = (8, 16, 32)  # GiB of host memory
_TOKEN = 524_288  # bytes of KV of a token of Llama-2-7B in 16 bits
DISKS = {"": 3e9, ", slow disk": 1e8}  # bytes per second: assumed for NVMe; as published with Hermes
_SLOW_SIZE = 8
_SLOTS, _HOST, _ADAPTERS = 10, 20, 200
_ADAPTER_LOAD_S = 0.3
_ADAPTER_COPY_S = 16.8e6 / 15.5e9
_KV = Setting("kv", runs=500, window=900.0)
_LORA = Setting("lora", runs=1000, window=1500.0)
_K = 0.5
