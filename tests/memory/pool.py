"""A two-ended pool with contents: every slot holds a token's name, and every copy is carried out on them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headway.policy.memory.two_ended import allocation, block_table, checkpoint
from headway.policy.memory.two_ended.block_table import (
    BEST_EFFORT,
    FREE,
    LOAD,
    MIRROR,
    MOVE,
    NONE,
    REAL_TIME,
    SAVE,
    TwoEndedTable,
)

Token = tuple[int, int, int]  # row, the row's life, token


@dataclass
class Pool:
    """A block table beside the memory that it describes. device: per block and slot; host: per row and
    token."""

    blocks: int = 6
    size: int = 4
    host_limit: int = 20
    rows: int = 6
    longest: int = 40
    decode_only: bool = False
    most_empty: bool = False
    table: TwoEndedTable = field(init=False)
    device: dict[tuple[int, int], Token] = field(default_factory=dict)
    host: dict[tuple[int, int], Token] = field(default_factory=dict)
    lives: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.table = block_table.new(
            self.blocks,
            self.size,
            self.longest,
            self.host_limit,
            self.rows,
            decode_only=self.decode_only,
            most_empty=self.most_empty,
        )
        self.lives = [0] * self.rows

    # ---- what an engine does

    def begin(self, running: list[int]) -> None:
        allocation.begin_iteration(self.table)
        for row in running:
            self.table.pinned[row] = self.table.kind[row] == BEST_EFFORT

    def enter(self, row: int, kind: int) -> None:
        self.lives[row] += 1
        allocation.add_row(self.table, row, kind)

    def grow(self, row: int, tokens: int) -> bool:
        """Read the row back, give it slots, carry out the copies, then compute: write the new tokens."""
        table = self.table
        if table.swapped_tokens[row]:
            if not allocation.swap_in(table, row):
                self.carry_out()
                return False
        elif not checkpoint.restore(table, row):
            self.carry_out()
            return False
        before = int(table.num_tokens[row])
        done = allocation.grow(table, row, tokens)
        self.carry_out()
        if done:
            self.read(row, before)
            for token in range(before, before + tokens):
                self.device[self.place(row, token)] = (row, self.lives[row], token)
                assert (row, token) not in self.host, "what was dropped is computed again"
        if done and self.decode_only and table.kind[row] == BEST_EFFORT and tokens > 1:
            last = int(table.block_ids[row, table.num_blocks[row] - 1])
            assert table.left_row[last] == NONE
            assert not table.mirrored[last] or table.num_tokens[row] % self.size == 0
        return done

    def away(self, row: int) -> bool:
        done = checkpoint.swap_out(self.table, row)
        self.carry_out()
        return done

    def leave(self, row: int) -> None:
        checkpoint.free_row(self.table, row)
        self.table.kind[row] = 0
        self.host = {key: token for key, token in self.host.items() if key[0] != row}

    # ---- the machine

    def place(self, row: int, token: int) -> tuple[int, int]:
        block = int(self.table.block_ids[row, token // self.size])
        return self.slot(row, token, block, int(self.table.mirrored[block]))

    def slot(self, row: int, token: int, block: int, mirrored: int) -> tuple[int, int]:
        at = token % self.size
        return block, at if self.table.kind[row] == REAL_TIME or not mirrored else self.size - 1 - at

    def carry_out(self) -> None:
        """Do the copies that were ordered, one by one. The tokens of a full block may lie in any order."""
        for kind, row, first, count, block, source, mirrored in self.table.ops[
            : self.table.state[0]["num_ops"]
        ].tolist():
            assert count > 0
            tokens = range(first, first + count)
            here = [self.slot(row, token, block, mirrored) for token in tokens]
            if kind == SAVE:
                for token, slot in zip(tokens, here, strict=True):
                    assert self.device[slot][:2] == (row, self.lives[row]), "not its own"
                    self.host[row, token] = self.device[slot]
            elif kind == LOAD:
                for token, slot in zip(tokens, here, strict=True):
                    self.device[slot] = self.host.pop((row, token))
            elif kind == FREE:
                for token in tokens:
                    self.host.pop((row, token), None)
            else:
                turned = mirrored ^ (kind == MIRROR)
                assert kind in (MIRROR, MOVE)
                there = [self.device[self.slot(row, token, source, turned)] for token in tokens]
                self.device.update(zip(here, there, strict=True))
        self.table.state[0]["num_ops"] = 0

    def read(self, row: int, tokens: int, saved: int = 0) -> None:
        """Attend: the row's tokens but the `saved` must be where its table says, and be its own."""
        for first in range(0, tokens, self.size):
            mine = range(first, min(first + self.size, tokens))
            held = [self.device.get(self.place(row, token)) for token in mine]
            there = [self.host.get((row, token), value) for token, value in zip(mine, held, strict=True)]
            assert saved or not any((row, token) in self.host for token in mine)
            wanted = [(row, self.lives[row], token) for token in mine]
            if len(mine) == self.size:
                assert sorted(there, key=str) == sorted(wanted, key=str)
            else:
                assert there == wanted

    def check(self) -> None:
        """Everything is whole, and what a row does not have on the device is on the host."""
        allocation.check_integrity(self.table)
        table = self.table
        for row in range(self.rows):
            tokens = int(table.num_tokens[row])
            there = [token for r, token in self.host if r == row]
            assert len(there) == table.host_tokens[row]
            self.read(row, tokens, saved=1)


def random_program(seed: int, steps: int = 14) -> Pool:
    """Run a random program on a small pool, checking as it goes; all have left at the end."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9)), int(rng.integers(2, 6)), int(rng.integers(0, 30))
    pool = Pool(*size, decode_only=bool(rng.integers(2)), most_empty=bool(rng.integers(2)))
    for _ in range(steps):
        inside = np.flatnonzero(pool.table.kind)
        pool.begin([int(row) for row in inside if rng.random() < 0.4])
        for _ in range(int(rng.integers(1, 4))):
            _random_act(pool, rng)
    pool.check()
    for row in range(pool.rows):
        pool.leave(row)
    pool.check()
    return pool


def _random_act(pool: Pool, rng: np.random.Generator) -> None:
    row, what = int(rng.integers(pool.rows)), rng.random()
    table = pool.table
    if table.kind[row] == 0:
        pool.enter(row, REAL_TIME if rng.random() < 0.5 else BEST_EFFORT)
    elif what < 0.12:
        pool.leave(row)
    elif what < 0.2 and table.num_tokens[row]:
        pool.away(row)
    else:
        room = pool.longest - int(table.num_tokens[row] + table.swapped_tokens[row])
        pool.grow(row, min(int(rng.integers(1, 9)), room)) if room else pool.leave(row)


__all__ = ["NONE", "Pool", "random_program"]
