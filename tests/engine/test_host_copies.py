"""KV copies are correct however late the copy stream runs, and none of them blocks the CPU thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.engines.vllm.plugin import host_copies, right_aligned_gpu
from headway.engines.vllm.plugin.host_copies import HostBlocks, Streams
from headway.engines.vllm.plugin.right_aligned_rows import RightAligned, Rows
from headway.engines.vllm.plugin.slot_copies import IN, OUT, WITHIN, Copy
from headway.engines.vllm.plugin.two_ended_pool import TwoEndedPool

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
BLOCKS, PLACES, SHAPE = 12, 9, (2, 4, 6)


class Queued(TorchDispatchMode):  # type: ignore[misc]
    """Queues calls of index_copy_ instead of executing them."""

    def __init__(self, queue: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() != "aten::index_copy_":
            return func(*args, **(kwargs or {}))
        self.queue.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


class LateStreams(Streams):
    """Executes queued copies only when the compute stream waits for them: as late as possible."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queue: list[Callable[[], Any]] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        with Queued(self.queue):
            yield

    def join(self) -> None:
        while self.queue:
            self.queue.pop(0)()


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 400, 1000, 5000]))
def test_what_is_loaded_is_what_was_saved(random: Any, staging: int) -> None:
    """Blocks are overwritten as soon as they are saved; the staging buffer holds between one block and all of them."""
    caches = [torch.zeros(BLOCKS, *SHAPE), torch.zeros(BLOCKS, *SHAPE, dtype=torch.float16)]
    streams = LateStreams()
    host = HostBlocks(caches, PLACES, streams, staging)
    held: list[tuple[list[int], list[list[torch.Tensor]]]] = []
    free = PLACES
    for _ in range(12):
        count = random.randint(1, 5)
        if count <= free and random.random() < 0.6:
            blocks = random.sample(range(BLOCKS), count)
            for cache in caches:
                cache[blocks] = torch.from_numpy(
                    np.random.default_rng(random.randint(0, 9999)).random((count, *SHAPE))
                ).to(cache.dtype)
            saved = [[cache[block].clone() for block in blocks] for cache in caches]
            held.append((host.save(blocks), saved))
            free -= count
            for cache in caches:
                cache[blocks] = -1
        elif held:
            places, saved = held.pop(random.randrange(len(held)))
            blocks = random.sample(range(BLOCKS), len(places))
            host.load(places, blocks)
            host.release(places)
            free += len(places)
            for cache, was in zip(caches, saved, strict=True):
                assert torch.equal(cache[blocks], torch.stack(was))


class Waits(TorchDispatchMode):  # type: ignore[misc]
    """Records the calls that would make the CPU wait for a GPU; the device `meta` stands for the GPU.

    On CUDA these are copies that are not `non_blocking`, indices on the host, and everything that reads a value.
    """

    READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in given} | (
            {kwargs["device"].type} if kwargs.get("device") else set()
        )
        copies = func.name() in ("aten::copy_", "aten::_to_copy")
        non_blocking = kwargs.get("non_blocking") or (func.name() == "aten::copy_" and args[2:] == (True,))
        if "meta" in devices and (func.name() in self.READS or (len(devices) > 1 and not (copies and non_blocking))):
            self.calls.append(func.name())
        return func(*args, **kwargs)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The `meta` device, with pinning replaced: PyTorch's CPU build cannot pin memory."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(
        host_copies, "allocate", lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device)
    )
    return torch.device("meta")


def waits(act: Callable[[], Any]) -> list[str]:
    with Waits() as counter:
        act()
    return counter.calls


def test_the_detector_sees_blocking_calls(on_a_device: torch.device) -> None:
    cache = torch.zeros(4, 3, device=on_a_device)
    assert waits(lambda: cache[torch.tensor([1, 2])])
    assert waits(lambda: torch.zeros(3).to(on_a_device))
    assert waits(lambda: cache[0].copy_(torch.zeros(3)))
    assert not waits(lambda: torch.zeros(3).to(on_a_device, non_blocking=True))
    assert not waits(lambda: cache[torch.zeros(2, dtype=torch.long, device=on_a_device)])


def test_whole_requests_are_copied_without_waiting(on_a_device: torch.device) -> None:
    caches = [torch.zeros(BLOCKS, *SHAPE, device=on_a_device) for _ in range(3)]
    host = HostBlocks(caches, PLACES, Streams(torch.device("cpu")), 400)
    assert not waits(lambda: host.save([3, 1, 7, 2]))
    assert not waits(lambda: host.load([2, 0], [5, 4]))


def test_single_slots_are_copied_without_waiting(on_a_device: torch.device) -> None:
    pool = object.__new__(TwoEndedPool)
    pool._caches = [torch.zeros(BLOCKS, *SHAPE, device=on_a_device) for _ in range(2)]
    pool._slots = right_aligned_gpu.Slots()
    pool._host_slots = [torch.zeros(20, 2, 6, device=on_a_device) for _ in range(2)]
    source, target = np.array([3, 9, 17]), np.array([0, 4, 2])
    for way in (OUT, IN, WITHIN):
        assert not waits(lambda way=way: pool._carry_out(Copy(way, source, target)))


def test_new_tokens_get_their_slots_without_waiting(on_a_device: torch.device) -> None:
    rows = Rows()
    rows.allocate(8, on_a_device)
    buffer = SimpleNamespace(np=np.arange(32).reshape(8, 4), gpu=torch.zeros(8, 4, device=on_a_device))
    slots = SimpleNamespace(gpu=torch.zeros(40, dtype=torch.int64, device=on_a_device))
    tables = SimpleNamespace(block_tables=[SimpleNamespace(block_table=buffer, slot_mapping=slots, block_size=16)])
    runner = SimpleNamespace(query_start_loc=SimpleNamespace(np=np.arange(0, 27, 3)))
    rows.begin(runner, [RightAligned(5, 2, 3), RightAligned(1, 0, 16)])
    assert not waits(lambda: rows.write_slots(tables))
    assert rows._buffer.np[:2].tolist() == [[15, 5, 2, 3, 22 * 16 + 13], [3, 1, 0, 16, 4 * 16]]
