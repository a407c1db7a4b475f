"""Requests whose last KV block is filled from the right (BROS 5.1): their slots, and columns for the GPU's kernels.

vLLM's worker assumes that every block is filled from the left. Two of its methods are wrapped here: one rewrites
changed block tables, the other gives each new token its slot. `right_aligned_cpu.py` and `right_aligned_gpu.py`
extend the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

TOKEN, SLOT, COLUMNS = 0, 4, 5  # columns of `Rows.columns`, and their number


class RightAligned(NamedTuple):
    """A request of this step's batch that decodes one token into a block filled from the right.

    row: its row in vLLM's input batch.
    full: number of its full blocks, which is also the index of its last block.
    kept: number of its tokens in the last block, including this step's.
    """

    row: int
    full: int
    kept: int


class Rows:
    """The right-aligned rows of this step, on the host and on the device.

    columns: int32 (max requests, COLUMNS) on the device: index of the row's token in the batch, row, full blocks,
        tokens in the last block, slot of the new token. Zeros until the first of them.
    table: vLLM's block table on the device, int32 (requests, blocks).
    """

    def __init__(self) -> None:
        self.current: list[RightAligned] = []
        self.columns: Any = None
        self.table: Any = None
        self._buffer: Any = None
        self._runner: Any = None

    def begin(self, runner: Any, current: list[RightAligned]) -> None:
        """Take the rows of a step, before vLLM prepares its inputs."""
        self._runner, self.current = runner, current

    def allocate(self, requests: int, device: Any) -> None:
        """Allocate the columns for at most this number of requests."""
        import torch
        from vllm.v1.utils import CpuGpuBuffer

        self._buffer = CpuGpuBuffer(requests, COLUMNS, dtype=torch.int32, device=device)
        self.columns = self._buffer.gpu

    def write_slots(self, tables: Any) -> None:
        """Overwrite vLLM's slot mapping for the new tokens of these rows, without blocking the CPU thread."""
        table = tables.block_tables[0]
        self.table = table.block_table.gpu
        if not self.current:
            return
        starts, host, count = self._runner.query_start_loc.np, self._buffer.np, len(self.current)
        for i, (row, full, kept) in enumerate(self.current):
            slot = int(table.block_table.np[row, full]) * table.block_size + table.block_size - kept
            host[i] = starts[row], row, full, kept, slot
        self._buffer.copy_to_gpu(count)
        used = self.columns[:count].long()
        table.slot_mapping.gpu[used[:, TOKEN]] = used[:, SLOT]


rows = Rows()


def install() -> None:
    """Wrap the methods of vLLM's worker in this process, once."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(GPUModelRunner, "_update_states", _update_states)
    wrap(MultiGroupBlockTable, "compute_slot_mapping", _compute_slot_mapping)


def wrap(kind: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by one that calls `around(stock method, self, ...)`; do nothing if it is replaced already."""
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
    rows.write_slots(tables)
