"""vLLM 0.2's `Scheduler._schedule`, written down again with lists, for sequences of one sample each.

Independent of the packer: what runs here is the order of that code, group by group. Its `ignored` cases are
left out, so prompts must fit the budget and, with the watermark, the blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tests.pack.driven import SIZE, Ask, Limits


@dataclass
class Group:
    id: str
    ask: Ask
    output_tokens: int = 0
    blocks: int = 0

    @property
    def tokens(self) -> int:
        return self.ask.prompt + self.output_tokens


@dataclass
class Reference:
    limits: Limits
    swap: bool
    watermark: int
    waiting: deque[Group] = field(default_factory=deque)
    running: deque[Group] = field(default_factory=deque)
    swapped: deque[Group] = field(default_factory=deque)
    free: int = 0

    def __post_init__(self) -> None:
        self.free = self.limits.blocks

    def add(self, id: str, ask: Ask) -> None:
        self.waiting.append(Group(id, ask))

    def step(self) -> dict[str, int]:
        """Run one iteration; return who computed how many tokens."""
        groups, prompt = self._schedule()
        tokens = {group.id: group.tokens if prompt else 1 for group in groups}
        for group in groups:
            group.output_tokens += 1
            if group.output_tokens == group.ask.output:
                self._release(group)
                self.running.remove(group)
        return tokens

    def _schedule(self) -> tuple[list[Group], bool]:
        if not self.swapped:
            scheduled: list[Group] = []
            while self.waiting:
                group = self.waiting[0]
                if not self._can_allocate(group):
                    break
                batched = sum(one.tokens for one in scheduled) + group.tokens
                if batched > self.limits.budget or len(self.running) + 1 > self.limits.running:
                    break
                self._allocate(self.waiting.popleft())
                self.running.append(group)
                scheduled.append(group)
            if scheduled:
                return scheduled, True
        preempted = self._decode()
        if not preempted:
            self._swap_in()
        return list(self.running), False

    def _decode(self) -> list[Group]:
        self.running = deque(sorted(self.running, key=self._came))
        kept: deque[Group] = deque()
        preempted: list[Group] = []
        while self.running:
            group = self.running.popleft()
            while self.free < 1:
                victim = self.running.pop() if self.running else group
                self._preempt(victim)
                preempted.append(victim)
                if victim is group:
                    break
            else:
                self._append_slot(group)
                kept.append(group)
        self.running = kept
        return preempted

    def _swap_in(self) -> None:
        self.swapped = deque(sorted(self.swapped, key=self._came))
        while self.swapped:
            group = self.swapped[0]
            blocks = -(-(group.tokens - 1) // SIZE)
            if self.free - (blocks + 1) < self.watermark or len(self.running) + 1 > self.limits.running:
                break
            self.swapped.popleft()
            self.free, group.blocks = self.free - blocks, blocks
            self._append_slot(group)
            self.running.append(group)

    @staticmethod
    def _came(group: Group) -> int:
        return int(group.id[1:])

    def _can_allocate(self, group: Group) -> bool:
        return self.free - -(-group.tokens // SIZE) >= self.watermark

    def _allocate(self, group: Group) -> None:
        group.blocks = -(-group.tokens // SIZE)
        self.free -= group.blocks

    def _append_slot(self, group: Group) -> None:
        more = -(-group.tokens // SIZE) - group.blocks
        self.free, group.blocks = self.free - more, group.blocks + more

    def _preempt(self, group: Group) -> None:
        self._release(group)
        if self.swap:
            self.swapped.append(group)
        else:
            self.waiting.appendleft(group)

    def _release(self, group: Group) -> None:
        self.free, group.blocks = self.free + group.blocks, 0
