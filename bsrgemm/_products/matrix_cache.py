"""What is worth remembering of a matrix for its products on the GPU: pointers, work lists, kernels with their launches.

Everything here is made on the device and without a wait, on the first product that needs it, and belongs to the three
arrays it was made from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array, Backend
from .._kernels import jit
from . import configs, measured, work_list, work_list_launch
from .work_list import Groups, Items, LongRows, Pattern

#: Different widths and dtypes of B remembered per matrix.
_MOST_PLANS = 64
#: Names of launches remembered per matrix: two for each place of operands.
_MOST_LAUNCHES = 512
#: Rows of bits that are compared to find rows which go well together, in bytes; beyond it neighbours share a group.
_MOST_PATTERN_BYTES = 64 << 20
#: Slots as they come.
_NO_ORDER = np.uintp(0)


class StreamOrdered:
    """Something made on a stream; another stream that asks for it waits until it is there."""

    __slots__ = ("__weakref__", "_event", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._event = cupy.cuda.get_current_stream().record()

    def get(self) -> Any:
        if self._event is not None:
            if self._event.done:
                self._event = None
            else:
                cupy.cuda.get_current_stream().wait_event(self._event)
        return self.value


class MatrixCache:
    """A BSR matrix as kernels see it.

    `whole` is the matrix's shape, or None if an array had to be copied to be read as one piece.
    """

    __slots__ = (
        *("_backend", "_kept", "_made", "blocks", "extents", "indices_dtype", "launches"),
        *("plans", "pointer", "source", "whole", "wide"),
    )  # fmt: skip

    def __init__(self, backend: Backend, A: Any) -> None:
        data, indices, indptr = self.source = (A.data, A.indices, A.indptr)
        if indices.dtype != indptr.dtype:
            indptr = indptr.astype(indices.dtype)
        self._backend = backend
        self._kept = tuple(flat(x) for x in (data, indices, indptr))
        self.blocks = len(data)
        self.indices_dtype = indices.dtype
        self.pointer = self._kept[0].data.ptr
        self.extents = tuple(backend.extent(x) for x in self.source)
        self.whole = A._shape if all(a is b for a, b in zip(self._kept, self.source, strict=True)) else None
        self._made: dict[Any, StreamOrdered] = {}
        self.plans: dict[Any, StreamOrdered] = {}
        #: what launch.py knows of operands in one place, by itself and by `call`; points to plans, does not keep them
        self.launches: dict[Any, Any] = {}
        #: of complex matrices: real ones that stand for them, see as_real.py
        self.wide: dict[int, Any] = {}

    def fits(self, A: Any) -> bool:
        """Are these still the shape and the arrays of the matrix, read where they are and not from a copy?"""
        data, indices, indptr = self.source
        return data is A.data and indices is A.indices and indptr is A.indptr and self.whole == A._shape

    def call(self, A: Any, x: Array, out: Array, how: tuple[Any, ...]) -> Any:
        """The key of `launches` for a product as its caller asks for it, or None if this is not of A as it is now.

        What is checked of operands follows from it: dtypes, shapes and, by places and strides, that none overlap.
        """
        if not type(x) is type(out) is type(self.source[0]) or not self.fits(A):
            return None
        return (
            how, x.data.ptr, x.shape, x.strides, x.dtype, out.data.ptr, out.shape, out.strides, out.dtype,
            measured.forced,
        )  # fmt: skip

    def remember(self, key: Any, launch: Any) -> None:
        if len(self.launches) >= _MOST_LAUNCHES:
            self.launches.clear()
        self.launches[key] = launch

    def plan(self, key: Any, make: Callable[[], Any]) -> StreamOrdered:
        """The plan of that key, made when it is first asked for."""
        made = self.plans.get(key)
        if made is None:
            if len(self.plans) >= _MOST_PLANS:
                self.plans.clear()
            made = self.plans[key] = StreamOrdered(make())
        return made

    def pattern(self, block_cols: int, transposed: bool) -> Pattern:
        _, indices, indptr = self._kept
        return Pattern(indices, indptr, len(indptr) - 1, block_cols, transposed)

    def index(self, block_cols: int, transposed: bool) -> tuple[Array, ...]:
        """(indices, indptr, places) of the operand as the plain kernels read it."""
        if not transposed:
            return (*self._kept[1:], None)
        groups = self.groups(self.pattern(block_cols, True), 1, 1)
        bounds = self._remember(("bounds", block_cols), lambda: cupy.concatenate([groups.first, groups.last[-1:]]))
        return groups.columns, bounds, groups.blocks

    def long_rows(self, block_cols: int, transposed: bool, longest: int) -> LongRows:
        """Pieces of block rows with more than `longest` blocks."""
        indptr = self.index(block_cols, transposed)[1]
        key = ("long rows", block_cols, transposed, longest)
        return self._remember(key, lambda: work_list.long_rows(self._backend, indptr, self.blocks, longest))

    def groups(self, pattern: Pattern, per_row: int, per_group: int) -> Groups:
        """Slots in groups, `per_row` slots to a block row and `per_group` to a group."""
        key = ("groups", pattern.block_cols, pattern.transposed, per_row, per_group)
        return self._remember(key, lambda: self._groups(pattern, per_row, per_group))

    def _groups(self, pattern: Pattern, per_row: int, per_group: int) -> Groups:
        if per_group == 1:
            return work_list.single(self._backend, pattern, per_row)
        order = _matched(pattern, per_row, per_group)
        groups = work_list_launch.merged(pattern, per_row, per_group, order)
        return work_list.merged(self._backend, pattern, per_row, per_group, order) if groups is None else groups

    def items(self, pattern: Pattern, groups: Groups, K: int = 0, column_tiles: int = 0, ctas: int = 0) -> Items:
        """What is to be done: whole groups, or pieces of them for so many tiles side by side on so many CTAs."""
        key = ("items", pattern.block_cols, pattern.transposed, id(groups))
        if not ctas or not work_list.may_split(groups, pattern, K, column_tiles, ctas):
            return self._remember(key, lambda: work_list_launch.whole(groups) or work_list.whole(self._backend, groups))
        return self._remember(
            (*key, column_tiles, ctas), lambda: work_list.split(self._backend, groups, K, column_tiles, ctas)
        )

    def _remember(self, key: Any, make: Callable[[], Any]) -> Any:
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = StreamOrdered(make())
        return made.get()


def prepare(backend: Backend, A: Any) -> MatrixCache:
    """What the matrix remembers for its kernels, made anew when its arrays are others."""
    prepared: MatrixCache | None = getattr(A, "_matrix_cache", None)
    if prepared is None or not prepared.fits(A):
        prepared = A._matrix_cache = MatrixCache(backend, A)
    return prepared


def _matched(pattern: Pattern, per_row: int, per_group: int) -> Array | None:
    """An order of the slots in which those of a group have many columns in common: pairs, pairs of pairs and so on."""
    rows, cols = pattern.shape
    padded = -(-rows * per_row // per_group) * per_group
    words = -(-cols // 32)
    if padded <= per_group or padded * words * 4 > _MOST_PATTERN_BYTES or not len(pattern.indices):
        return None
    window, side = configs.RowMatching.window, configs.RowMatching.side
    config = configs.RowMatching("row_bits", configs.element(pattern.indices.dtype))
    bits = cupy.zeros((padded, words), np.uint32)
    stored = jit.argument(work_list_launch.stored(pattern))
    run(config, config.grid(len(pattern.indices)), (stored, bits, np.int32(per_row), np.int32(words)))
    order: Any = _NO_ORDER
    nodes, members = min(window, padded), 1
    overlap = cupy.empty((-(-padded // nodes), nodes, nodes), np.uint16)  # later rounds need a quarter
    while members < per_group:
        all_nodes = padded // members
        windows, tiles = -(-all_nodes // nodes), -(-nodes // side)
        counts = (np.int32(nodes), np.int32(all_nodes))
        run(configs.RowMatching("overlaps"), (tiles, tiles, windows), (bits, overlap, *counts, np.int32(words)))
        merged = cupy.empty((all_nodes // 2, words), np.uint32)
        new_order = cupy.empty(padded, np.int32)
        args = (overlap, bits, merged, order, new_order, *counts, np.int32(members), np.int32(words))
        run(configs.RowMatching("match_rows"), (windows,), args, threads=window)
        bits, order = merged, new_order
        nodes, members = nodes // 2, members * 2
    return order


def run(config: configs.Config, grid: tuple[int, ...], args: tuple[Any, ...], threads: int | None = None) -> None:
    """Start a kernel with separate arguments on CuPy's current device and stream."""
    jit.load(config.spec(), jit.device_target())(grid, (threads or config.threads,), args)


def flat(x: Array) -> Array:
    """Kernels read these arrays as one piece of memory."""
    return x if x.flags.c_contiguous else cupy.ascontiguousarray(x)
