"""A table of requests made by hand, and the step that a packer makes of it."""

from __future__ import annotations

import numpy as np

from headway.policy.core.engine_spec import EngineSpec
from headway.policy.memory.budget import KvBudget
from headway.ports import Packer
from headway.types import Jobs

SPEC = EngineSpec(16, 2048)
NOW = 100.0
_NEVER = np.inf


class Table:
    """Requests by name; `step` says which of them compute how many tokens.

    The latency is that of an engine of which nothing is learned: 10 ms, 0.5 ms per answer, 0.29 ms per prompt
    token.
    """

    def __init__(self) -> None:
        self.jobs = Jobs()
        self._used = 0

    def waits(
        self,
        name: str,
        prompt: int,
        *,
        arrival: float = NOW,
        ttft: float = _NEVER,
        tpot: float = _NEVER,
        e2e: float = _NEVER,
        left: float = 50.0,
    ) -> None:
        """Add a request of which nothing is computed."""
        self.jobs.add(
            name,
            prompt=prompt,
            arrival=arrival,
            ttft=ttft,
            tpot=tpot,
            e2e=e2e,
            tokens_left=left,
            serial=len(self.jobs) + 1,
        )

    def answers(
        self,
        name: str,
        *,
        tpot: float = _NEVER,
        first: float = NOW - 1.0,
        made: int = 20,
        left: float = 50.0,
        ttft: float = 1.0,
        prompt: int = 100,
    ) -> None:
        """Add an answer in progress: `made` tokens are out since `first`."""
        blocks = -(-(prompt + made) // SPEC.block_size) + 1
        row = self.jobs.add(
            name,
            prompt=prompt,
            arrival=first - ttft,
            ttft=ttft,
            tpot=tpot,
            e2e=_NEVER,
            first=first,
            output_tokens=made,
            computed=prompt + made - 1,
            tokens_left=left,
            blocks=blocks,
            serial=len(self.jobs) + 1,
        )
        self.jobs.running[row] = True
        self._used += blocks

    def out(self, name: str, tokens: int = 1) -> None:
        """Let an answer make more tokens."""
        row = self.jobs.row_of[name]
        self.jobs.output_tokens[row] += tokens
        self.jobs.computed[row] += tokens

    def step(self, packer: Packer, now: float = NOW, blocks: int = 5000) -> dict[str, int]:
        """Return tokens by name, in order; prompts that get none are left out."""
        kv = KvBudget(blocks, blocks - self._used, SPEC.block_size, 64)
        step = packer.pack(self.jobs, kv, now)
        assert step.tokens is not None
        names = self.jobs.names(step.order.tolist())
        return {name: n for name, n in zip(names, step.tokens.tolist(), strict=True) if n}
