"""A two-ended pool with contents: every slot holds a token's name, and every copy is carried out on them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headway.memory.two_ended import allocation, block_table, checkpoint
from headway.memory.two_ended.block_table import (
    BEST_EFFORT,
    FREE,
    LOAD,
    MIRROR,
    MOVE,
    NOBODY,
    ORDERS,
    REAL_TIME,
    SAVE,
    TwoEndedTable,
)

Token = tuple[int, int, int]  # row, the row's life, token


@dataclass
class Pool:
    """The book beside what it speaks of. device: per block and slot; host: per row and token."""

    blocks: int = 6
    size: int = 4
    host_limit: int = 20
    rows: int = 6
    longest: int = 40
    decode_only: bool = False
    book: TwoEndedTable = field(init=False)
    device: dict[tuple[int, int], Token] = field(default_factory=dict)
    host: dict[tuple[int, int], Token] = field(default_factory=dict)
    lives: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.book = block_table.new(
            self.blocks, self.size, self.longest, self.host_limit, self.rows,
            decode_only=self.decode_only,
        )  # fmt: skip
        self.lives = [0] * self.rows

    # ---- what an engine does

    def begin(self, running: list[int]) -> None:
        allocation.begin(self.book)
        for row in running:
            self.book.pinned[row] = self.book.kind[row] == BEST_EFFORT

    def enter(self, row: int, kind: int) -> None:
        self.lives[row] += 1
        allocation.enter(self.book, row, kind)

    def grow(self, row: int, tokens: int) -> bool:
        """Read the row back, give it slots, carry out the copies, then compute: write the new tokens."""
        book = self.book
        if book.away[row]:
            if not allocation.come_back(book, row):
                self.carry_out()
                return False
        elif not checkpoint.restore(book, row):
            self.carry_out()
            return False
        before = int(book.stored[row])
        done = allocation.grow(book, row, tokens)
        self.carry_out()
        if done:
            self.read(row, before)
            for token in range(before, before + tokens):
                self.device[self.place(row, token)] = (row, self.lives[row], token)
                assert (row, token) not in self.host, "what was dropped is computed again"
        if done and self.decode_only and book.kind[row] == BEST_EFFORT and tokens > 1:
            last = int(book.table[row, book.held[row] - 1])
            assert book.left[last] == NOBODY
            assert not book.mirrored[last] or book.stored[row] % self.size == 0
        return done

    def away(self, row: int) -> bool:
        done = checkpoint.away(self.book, row)
        self.carry_out()
        return done

    def leave(self, row: int) -> None:
        checkpoint.forget(self.book, row)
        self.book.kind[row] = 0
        self.host = {key: token for key, token in self.host.items() if key[0] != row}

    # ---- the machine

    def place(self, row: int, token: int) -> tuple[int, int]:
        block = int(self.book.table[row, token // self.size])
        return self.slot(row, token, block, int(self.book.mirrored[block]))

    def slot(self, row: int, token: int, block: int, mirrored: int) -> tuple[int, int]:
        at = token % self.size
        return block, at if self.book.kind[row] == REAL_TIME or not mirrored else self.size - 1 - at

    def carry_out(self) -> None:
        """Do the copies that were ordered, one by one. The tokens of a full block may lie in any order."""
        for kind, row, first, count, block, source, mirrored in self.book.orders[
            : self.book.counts[ORDERS]
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
        self.book.counts[ORDERS] = 0

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
        allocation.check_integrity(self.book)
        book = self.book
        for row in range(self.rows):
            tokens = int(book.stored[row])
            there = [token for r, token in self.host if r == row]
            assert len(there) == book.host[row]
            self.read(row, tokens, saved=1)


def random_program(seed: int, steps: int = 14) -> Pool:
    """Run a random program on a small pool, checking as it goes; all have left at the end."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9)), int(rng.integers(2, 6)), int(rng.integers(0, 30))
    pool = Pool(*size, decode_only=bool(rng.integers(2)))
    for _ in range(steps):
        inside = np.flatnonzero(pool.book.kind)
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
    book = pool.book
    if book.kind[row] == 0:
        pool.enter(row, REAL_TIME if rng.random() < 0.5 else BEST_EFFORT)
    elif what < 0.12:
        pool.leave(row)
    elif what < 0.2 and book.stored[row]:
        pool.away(row)
    else:
        room = pool.longest - int(book.stored[row] + book.away[row])
        pool.grow(row, min(int(rng.integers(1, 9)), room)) if room else pool.leave(row)


__all__ = ["NOBODY", "Pool", "random_program"]
