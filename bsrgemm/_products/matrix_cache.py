"""What is worth remembering of a matrix for its products on the GPU: pointers, work lists, kernels with their launches.

Everything here is made on the device and without a wait, on the first product that needs it, and belongs to the three
arrays it was made from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from .._backend.base import Array, Backend
from .._kernels import forced_kernel
from .._kernels.launching import contiguous
from .._kernels.workspace import StreamOrdered
from . import row_matching, work_list, work_list_launch
from .work_list import Groups, Items, LongRows, Pattern

#: Different widths and dtypes of B remembered per matrix.
_MOST_PLANS = 64
#: Keys of launches remembered per matrix: two for each set of operand addresses.
_MOST_LAUNCHES = 512


class MatrixCache:
    """A BSR matrix as kernels see it.

    `whole` is the matrix's shape, or None if an array had to be copied to be read as one piece.
    """

    __slots__ = (
        *("_backend", "_kept", "_made", "blocks", "extents", "indices_dtype", "launches"),
        *("plans", "pointer", "source", "whole", "wide"),
    )  # fmt: skip

    def __init__(self, A: Any) -> None:
        data, indices, indptr = self.source = (A.data, A.indices, A.indptr)
        if indices.dtype != indptr.dtype:
            indptr = indptr.astype(indices.dtype)
        self._backend: Backend = A._backend
        self._kept = tuple(contiguous(x) for x in (data, indices, indptr))
        self.blocks = len(data)
        self.indices_dtype = indices.dtype
        self.pointer = self._kept[0].data.ptr
        self.extents = tuple(self._backend.extent(x) for x in self.source)
        self.whole = A._shape if all(a is b for a, b in zip(self._kept, self.source, strict=True)) else None
        self._made: dict[Any, StreamOrdered] = {}
        self.plans: dict[Any, StreamOrdered] = {}
        #: launches by the addresses of their operands, and by `call_key`; they point to plans and do not keep them
        self.launches: dict[Any, Any] = {}
        #: for a complex matrix the real ones that stand for it, see complex_gemm.py
        self.wide: dict[int, Any] = {}

    def fits(self, A: Any) -> bool:
        """Are these still the shape and the arrays of the matrix, read where they are and not from a copy?"""
        data, indices, indptr = self.source
        return data is A.data and indices is A.indices and indptr is A.indptr and self.whole == A._shape

    def call_key(self, A: Any, x: Array, out: Array, options: tuple[Any, ...]) -> Any:
        """The key of `launches` for a product as its caller asks for it, or None if this is not of A as it is now.

        Everything that is checked of operands follows from it: dtypes, shapes and, by addresses and strides, that none
        overlap.
        """
        if not type(x) is type(out) is type(self.source[0]) or not self.fits(A):
            return None
        return (
            options, x.data.ptr, x.shape, x.strides, x.dtype, out.data.ptr, out.shape, out.strides, out.dtype,
            forced_kernel.name,
        )  # fmt: skip

    def remember(self, key: Any, launch: Any) -> None:
        """Keep a launch under its key; all are forgotten when there are too many."""
        if len(self.launches) >= _MOST_LAUNCHES:
            self.launches.clear()
        self.launches[key] = launch

    def plan(self, key: Any, make: Callable[[], Any]) -> StreamOrdered:
        """The plan of that key, made when it is first asked for."""
        made = self.plans.get(key)
        if made is None:
            if len(self.plans) >= _MOST_PLANS:
                self.plans.clear()
            made = self.plans.setdefault(key, StreamOrdered(make()))
        return made

    def pattern(self, block_cols: int, transposed: bool) -> Pattern:
        """The structure of the matrix, or of its transpose, which has `block_cols` block columns as it is stored."""
        _, indices, indptr = self._kept
        return Pattern(indices, indptr, len(indptr) - 1, block_cols, transposed)

    def index(self, block_cols: int, transposed: bool) -> tuple[Array, ...]:
        """(indices, indptr, places) of the operand as the plain kernels read it."""
        if not transposed:
            return (*self._kept[1:], None)
        groups = self.groups(self.pattern(block_cols, True), 1, 1)
        bounds = self.remembered(("bounds", block_cols), lambda: cupy.concatenate([groups.first, groups.last[-1:]]))
        return groups.columns, bounds, groups.blocks

    def long_rows(self, block_cols: int, transposed: bool, longest: int) -> LongRows:
        """Pieces of block rows with more than `longest` blocks."""
        indptr = self.index(block_cols, transposed)[1]
        key = ("long rows", block_cols, transposed, longest)
        return self.remembered(key, lambda: work_list.long_rows(self._backend, indptr, self.blocks, longest))

    def shares(self, block_cols: int, transposed: bool, longest: int, count: int) -> Array:
        """Where `count` shares of neighbouring block rows begin, and where the last one ends."""
        indptr = self.index(block_cols, transposed)[1]
        key = ("shares", block_cols, transposed, longest, count)
        return self.remembered(key, lambda: work_list.shares(self._backend, indptr, longest, count))

    def groups(self, pattern: Pattern, per_row: int, per_group: int) -> Groups:
        """Row tiles in groups, `per_row` of them to a block row and `per_group` to a group."""
        key = ("groups", pattern.block_cols, pattern.transposed, per_row, per_group)
        return self.remembered(key, lambda: self._groups(pattern, per_row, per_group))

    def _groups(self, pattern: Pattern, per_row: int, per_group: int) -> Groups:
        if per_group == 1:
            return work_list.single(self._backend, pattern, per_row)
        order = row_matching.matched(pattern, per_row, per_group)
        groups = work_list_launch.merged(pattern, per_row, per_group, order)
        return work_list.merged(self._backend, pattern, per_row, per_group, order) if groups is None else groups

    def whole_items(self, pattern: Pattern, per_row: int, per_group: int) -> Items:
        """What is to be done of `groups` with the same arguments: whole groups, longest first."""
        groups = self.groups(pattern, per_row, per_group)
        key = ("whole items", pattern.block_cols, pattern.transposed, per_row, per_group)
        return self.remembered(key, lambda: work_list_launch.whole(groups) or work_list.whole(self._backend, groups))

    def split_items(self, pattern: Pattern, per_row: int, per_group: int, share: work_list.Share) -> Items:
        """The same in pieces, where a group could be longer than the fair share of a CTA; whole groups otherwise."""
        groups = self.groups(pattern, per_row, per_group)
        if not work_list.may_split(groups, pattern, share):
            return self.whole_items(pattern, per_row, per_group)
        key = ("split items", pattern.block_cols, pattern.transposed, per_row, per_group, share)
        return self.remembered(key, lambda: work_list.split(self._backend, groups, share))

    def remembered(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned when that key was first asked for. The key names everything that `make` depends on."""
        made = self._made.get(key)
        if made is None:
            made = self._made.setdefault(key, StreamOrdered(make()))
        return made.get()


def matrix_cache_of(A: Any) -> MatrixCache:
    """What the matrix remembers for its kernels, made anew when its arrays are others."""
    cache: MatrixCache | None = getattr(A, "_matrix_cache", None)
    if cache is None or not cache.fits(A):
        cache = A._matrix_cache = MatrixCache(A)
    return cache
