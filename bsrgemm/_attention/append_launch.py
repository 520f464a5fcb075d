"""Launch of cuda/kv_append.cu, and the engine that appends tokens to a cache on the GPU by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .._backend.base import Array
from .._kernels import device, graphs, jit, overlapping, workspace
from .._kernels.element_types import element
from .._kernels.launching import start
from .append import AppendCall, AppendEngine
from .arguments import KV_APPEND
from .decode_config import KvAppend


class CudaAppend(AppendEngine):
    """Appends to caches in memory of CuPy; the kernel runs on the current stream."""

    def is_capturing(self) -> bool:
        return graphs.is_capturing()

    def append(self, call: AppendCall) -> None:
        batch, heads, tokens, key_dim = call.k.shape
        value_dim = call.v.shape[3]
        config = KvAppend(element(call.to_k.dtype))
        spec = replace(config.spec(), overlaps=overlapping.thread.active)
        kernel = jit.load(spec, jit.device_target())
        grid = config.grid(heads * tokens, batch, device.multiprocessors())
        # Counters are the only memory that is allocated here: if there is none, the table has not changed yet.
        arrived = workspace.counters(batch) if grid[0] > 1 else None
        if call.table is not None and call.new_table is not None:
            call.table[...] = call.new_table
        packed = KV_APPEND.pack(
            k=call.k.data.ptr,
            v=call.v.data.ptr,
            to_k=call.to_k.data.ptr,
            to_v=call.to_v.data.ptr,
            lengths=call.lengths.data.ptr,
            refused=call.refused.data.ptr,
            table=_pointer(call.table),
            takes=_pointer(call.takes),
            arrived=_pointer(arrived),
            **_strides("k", call.k),
            **_strides("v", call.v),
            batch=batch,
            heads=heads,
            tokens=tokens,
            key_dim=key_dim,
            value_dim=value_dim,
            capacity=call.capacity,
            pages=len(call.to_k),
            page=call.to_k.shape[2],
            table_width=0 if call.table is None else call.table.shape[1],
            wide=int(_is_wide(call.k) and _is_wide(call.v)),
        )
        uses = (call.k, call.v, call.to_k, call.to_v, call.lengths, call.refused, call.table, call.takes, arrived)
        start(kernel, grid, (config.threads,), (jit.argument(packed),), uses)


def _strides(name: str, x: Array) -> dict[str, int]:
    axes = ("batch", "head", "row", "col")
    return {f"{name}_{axis}": step // x.itemsize for axis, step in zip(axes, x.strides, strict=True)}


def _is_wide(x: Array) -> bool:
    """Return whether the rows of keys or values can be read and written in pieces of 16 bytes."""
    steps = [step for step, n in zip(x.strides[:3], x.shape[:3], strict=True) if n > 1]
    return x.strides[3] == x.itemsize and not np.bitwise_or.reduce([x.data.ptr, x.shape[3] * x.itemsize, *steps]) % 16


def _pointer(x: Array | None) -> int:
    return 0 if x is None else x.data.ptr


ENGINE = CudaAppend()
