"""Rows whose last KV block is filled from the right (BROS 5.1): where their tokens go, and their device columns.

vLLM's worker assumes that a block is filled from the left. Three of its methods are wrapped: batches get changed
block tables, a new token gets its slot, and the attention reads such rows from the right. The last differs
between devices: `right_aligned_cpu.py`, `right_aligned_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

TOKEN, ROW, FULL, KEPT, SLOT, COLUMNS = range(6)


class RightAligned(NamedTuple):
    """A row of this step's batch that decodes one token.

    row: in the batch.
    full: its full blocks; the next one is its last.
    kept: tokens in the last block, with this step's.
    """

    row: int
    full: int
    kept: int


class Rows:
    """The right-aligned rows of this step, on the host and on the device.

    device: int32 (requests, COLUMNS): index of the row's token in the batch, row, full blocks, tokens in the last
        block, slot of the new token; zeros beyond the rows. Its address never changes, so a CUDA graph may read it.
    table: vLLM's block table on the device, int32 (requests, blocks).
    """

    def __init__(self) -> None:
        self.now: list[RightAligned] = []
        self.device: Any = None
        self.table: Any = None
        self._buffer: Any = None
        self._runner: Any = None
        self._used = 0

    def begin(self, runner: Any, now: list[RightAligned]) -> None:
        """Take the rows of a step, before vLLM prepares its inputs."""
        self._runner, self.now = runner, now

    def allocate(self, requests: int, device: Any) -> None:
        """Allocate the columns for so many requests."""
        import torch
        from vllm.v1.utils import CpuGpuBuffer

        self._buffer = CpuGpuBuffer(requests, COLUMNS, dtype=torch.int32, device=device)
        self.device = self._buffer.gpu

    def place(self, tables: Any) -> None:
        """Correct the slots of the new tokens, without waiting for the device."""
        table = tables.block_tables[0]
        self.table = table.block_table.gpu
        if not (self.now or self._used):
            return
        starts, columns = self._runner.query_start_loc.np, self._buffer.np
        columns[:] = 0
        for i, (row, full, kept) in enumerate(self.now):
            slot = int(table.block_table.np[row, full]) * table.block_size + table.block_size - kept
            columns[i] = starts[row], row, full, kept, slot
        self._used = len(self.now)
        self._buffer.copy_to_gpu()
        used = self.device[: self._used].long()
        table.slot_mapping.gpu[used[:, TOKEN]] = used[:, SLOT]


rows = Rows()


def install() -> None:
    """Wrap the methods of vLLM's worker in this process, once."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(GPUModelRunner, "_update_states", _update_states)
    wrap(MultiGroupBlockTable, "compute_slot_mapping", _compute_slot_mapping)


def wrap(kind: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around`, whose first argument is the stock function, in the place of a method, once."""
    stock = getattr(kind, name)
    if hasattr(stock, "headway"):
        return

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(stock, self, *args, **kwargs)

    wrapped.headway = stock  # type: ignore[attr-defined]
    setattr(kind, name, wrapped)


def _update_states(stock: Any, runner: Any, output: Any) -> Any:
    """Before stock builds the batch: rewrite changed block tables. After it: find the right-aligned rows."""
    metadata = output.kv_connector_metadata
    for id, table in getattr(metadata, "tables", {}).items():
        _rewrite(runner, id, table)
    result = stock(runner, output)
    at = runner.input_batch.req_id_to_index
    right = getattr(metadata, "right", ())
    rows.begin(runner, [RightAligned(at[id], full, kept) for id, full, kept in right if id in at])
    return result


def _rewrite(runner: Any, id: str, table: list[int]) -> None:
    runner.requests[id].block_ids = (list(table),)
    row = runner.input_batch.req_id_to_index.get(id)
    if row is not None:
        runner.input_batch.block_table.clear_row(row)
        runner.input_batch.block_table.add_row((table,), row)


def _compute_slot_mapping(stock: Any, tables: Any, count: int, starts: Any, positions: Any) -> None:
    stock(tables, count, starts, positions)
    rows.place(tables)
