"""The workloads of Kubernetes' inference-perf (workload-catalog/*/config.json), as generators of conversations.

Lengths, turns and waits are the catalog's, except where its figures contradict each other or ask for more than an
engine here reads (`docs/bench/catalog.md` lists both). A mean prompt includes the system prompt, but in
batch-synthetic-data-generation, where the system prompt is the longer one. SLOs are the catalog's, too: of batch
workloads, for whose first token nobody waits, the time until the last one; agentic-trace-replay has none.
"""

from __future__ import annotations

from benchmarks.catalog.conversations import Conversations, Spread
from headway.types import Slo

ONCE, NO_GAP = Spread(1, 1, 1, 0), Spread(1, 1, 1, 0)

CHAT = Conversations(
    "interactive-chat",
    system=1000,
    prompt=Spread(500, 15_000, 4000, 2500),
    added=Spread(10, 1000, 50, 40),
    answer=Spread(10, 1000, 300, 150, "normal"),
    turns=Spread(1, 15, 4, 2.5),
    gap=Spread(5, 300, 45, 40),
    slo=Slo(ttft=1.0, tpot=0.05),
    longest=16_000,
)
CODE = Conversations(
    "code-generation",
    system=3000,
    prompt=Spread(10_000, 90_000, 40_000, 58_400),
    added=Spread(100, 10_000, 1500, 1200),
    answer=Spread(50, 10_000, 425, 825),
    turns=Spread(40, 40, 40, 1),
    gap=Spread(1, 1000, 15, 55),
    slo=Slo(ttft=30.0, tpot=0.1),
    longest=120_000,
    priority=1,
)
RESEARCH = Conversations(
    "deep-research",
    system=2000,
    prompt=Spread(2000, 100_000, 45_000, 35_000, "exponential"),
    added=Spread(500, 15_000, 3000, 2500),
    answer=Spread(50, 4000, 300, 850, "exponential"),
    turns=Spread(2, 50, 15, 8.5, "normal"),
    gap=Spread(5, 60, 25, 12, "normal"),
    slo=Slo(ttft=10.0, tpot=0.1),
    longest=120_000,
    priority=1,
)
REASONING = Conversations(
    "reasoning",
    system=250,
    prompt=Spread(100, 5000, 1000, 800),
    added=ONCE,
    answer=Spread(500, 32_000, 8000, 6500, "exponential"),
    turns=ONCE,
    gap=NO_GAP,
    slo=Slo(ttft=2.0, tpot=0.1),
    longest=40_000,
)
SUMMARIES = Conversations(
    "batch-summarization-rag",
    system=500,
    prompt=Spread(1000, 80_000, 15_000, 22_000, "bimodal"),
    added=ONCE,
    answer=Spread(50, 2000, 500, 300, "normal"),
    turns=ONCE,
    gap=NO_GAP,
    slo=Slo(e2e=630.0),
    longest=90_000,
    priority=2,
)
SYNTHETIC = Conversations(
    "batch-synthetic-data-generation",
    system=2000,
    prompt=Spread(2050, 17_000, 2500, 1200),
    added=ONCE,
    answer=Spread(500, 8000, 4000, 2500, "uniform"),
    turns=ONCE,
    gap=NO_GAP,
    slo=Slo(e2e=2080.0),
    longest=26_000,
    priority=2,
)
AGENTS = Conversations(
    "agentic-trace-replay",
    system=3000,
    prompt=Spread(4000, 100_000, 49_000, 138_900),
    added=Spread(100, 20_000, 3800, 3800),
    answer=Spread(10, 10_000, 660, 3070),
    turns=Spread(1, 300, 22, 23),
    gap=Spread(1, 1000, 13, 176),
    slo=Slo(),
    longest=120_000,
    priority=3,
)
LONG = Conversations(
    "long-prompts",
    system=1000,
    prompt=Spread(90_000, 110_000, 100_000, 5000, "normal"),
    added=ONCE,
    answer=Spread(50, 1000, 300, 150, "normal"),
    turns=ONCE,
    gap=NO_GAP,
    slo=Slo(ttft=90.0, tpot=0.1),
    longest=120_000,
    priority=1,
)
