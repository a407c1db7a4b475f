"""Does every copy touch the slots it means, and where does the CPU's attention keep a slot?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines.vllm.plugin import right_aligned_cpu
from headway.engines.vllm.plugin.slot_copies import IN, OUT, WITHIN, HostSlots, copies_of
from headway.policy.memory.two_ended import allocation, block_table, checkpoint
from headway.policy.memory.two_ended.block_table import BEST_EFFORT, FREE, REAL_TIME, SAVE

pytestmark = pytest.mark.filterwarnings("default")
SIZE, BLOCKS, LONGEST = 4, 5, 24


class Memory:
    """A book whose copies are carried out on arrays, as by the worker. A token's KV is row * 100 + token."""

    def __init__(self, host: int) -> None:
        self.book = block_table.new(BLOCKS, SIZE, LONGEST, host, 4, decode_only=True)
        self.slots = HostSlots(LONGEST)
        self.device = np.full((BLOCKS + 1) * SIZE, -1)
        self.host = np.full(host, -1)

    def carry_out(self) -> None:
        for way, source, target in copies_of(self.book, self.slots):
            taken = self.host[source] if way == IN else self.device[source]
            (self.host if way == OUT else self.device)[target] = taken
            assert way in (IN, OUT, WITHIN)
        assert self.slots.held() == self.book.state[0]["host_tokens"] <= self.host.size
        self.book.state[0]["num_ops"] = 0

    def place(self, row: int, token: int) -> int:
        block, at = int(self.book.block_ids[row, token // SIZE]), token % SIZE
        right = self.book.kind[row] == BEST_EFFORT and self.book.mirrored[block]
        return (block + 1) * SIZE + (SIZE - 1 - at if right else at)

    def grow(self, row: int, tokens: int) -> None:
        book = self.book
        here = allocation.swap_in(book, row) if book.swapped_tokens[row] else checkpoint.restore(book, row)
        before = int(book.num_tokens[row])
        done = here and allocation.grow(book, row, tokens)
        self.carry_out()
        if done:
            self.attend(row, before)
            for token in range(before, before + tokens):
                self.device[self.place(row, token)] = row * 100 + token

    def attend(self, row: int, tokens: int) -> None:
        for first in range(0, tokens, SIZE):
            mine = range(first, min(first + SIZE, tokens))
            there = [int(self.device[self.place(row, token)]) for token in mine]
            wanted = [row * 100 + token for token in mine]
            assert (sorted(there) if len(mine) == SIZE else there) == wanted


acts = st.tuples(st.integers(0, 3), st.sampled_from(["grow"] * 8 + ["away", "leave"]), st.integers(1, 6))


@given(st.lists(acts, max_size=60), st.sampled_from([0, 3, 12, 60]))
@settings(max_examples=66)
def test_every_row_reads_what_it_wrote(acts: list[tuple[int, str, int]], host: int) -> None:
    memory = Memory(host)
    book = memory.book
    for row, act, tokens in acts:
        allocation.begin_iteration(book)
        if book.kind[row] == 0:
            allocation.add_row(book, row, REAL_TIME if row % 2 else BEST_EFFORT)
        book.pinned[row] = book.kind[row] == BEST_EFFORT
        if act == "leave" or book.num_tokens[row] + book.swapped_tokens[row] + tokens > LONGEST:
            checkpoint.free_row(book, row)
            memory.slots.drop(row)
            book.kind[row] = 0
        elif act == "away" and book.num_tokens[row]:
            checkpoint.swap_out(book, row)
            memory.carry_out()
        else:
            memory.grow(row, 1 if tokens > 3 else tokens)
        allocation.check_integrity(book)


SHAPES = [(32, 3, 64), (128, 2, 128), (64, 1, 256)]  # slots of a block, heads, elements


def test_a_host_slot_that_changes_hands_within_a_step_is_written_by_one_copy_after_the_other() -> None:
    book = block_table.new(4, 32, 64, 64, 2)
    for kind, row in ((SAVE, 0), (FREE, 0), (SAVE, 1)):
        block_table.add_op(book, kind, row, 0, 8, row, row)
    first, second = copies_of(book, HostSlots(64))
    assert (first.way, second.way) == (OUT, OUT)
    assert first.target.tolist() == second.target.tolist()
    assert first.source.tolist() == list(range(32, 40))
    assert second.source.tolist() == list(range(64, 72))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "heads", "dim"), SHAPES)
def test_a_slot_copied_elsewhere_reads_as_before(kind: str, size: int, heads: int, dim: int) -> None:
    """The attention's own operators: write, copy slots by `layout`, attend there."""
    import torch

    right_aligned_cpu.load_kernels()
    torch.manual_seed(size)
    dtype = getattr(torch, kind)
    cache = torch.zeros(4, heads, size, 2 * dim, dtype=dtype)
    query = torch.randn(1, heads, dim).to(dtype)
    right_aligned_cpu._write(cache, torch.randn(size, 2, heads, dim).to(dtype), size + torch.arange(size))
    where, flat = right_aligned_cpu.layout(cache, size), cache.view(4, -1)
    assert sorted(where.flatten().tolist()) == list(range(cache[0].numel()))
    backwards = torch.arange(size).flip(0)
    flat[2][where[backwards]] = flat[1][where]
    flat[3][where[backwards]] = flat[2][where]
    first, turned, back = (right_aligned_cpu.attend(cache, query, [block], size, -1) for block in (1, 2, 3))
    assert first.abs().max() > 0
    near = 2e-2 if kind == "bfloat16" else 1e-5
    assert torch.allclose(turned.float(), first.float(), atol=near), "the same tokens, turned round"
    assert torch.equal(back, first)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "heads", "dim"), SHAPES)
def test_the_attention_reads_from_the_right_only_through_the_window(
    kind: str, size: int, heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    dtype, attend = getattr(torch, kind), right_aligned_cpu.attend
    assert right_aligned_cpu.reads_from_the_right(size, heads, dim, dtype)
    monkeypatch.setattr(right_aligned_cpu, "attend", lambda *args: attend(*args[:-1], -1))
    assert not right_aligned_cpu.reads_from_the_right(size, heads, dim, dtype)
