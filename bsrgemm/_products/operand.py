"""What a matrix keeps for its products on the GPU: its arrays as kernels read them, its lists, and known calls.

Every list is made on the device by the first product that needs it, without waiting for the GPU. All of it is valid for
the three arrays from which it was made, until somebody writes into the index arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array, Backend
from .._backend.index_arrays import plain_array
from .._kernels import element_types, graphs, overlapping, workspace
from .._kernels.card import card
from .._kernels.kernel import Kernel
from .._kernels.launch import Calls, contiguous
from .._kernels.workspace import StreamOrdered
from . import lists, work_list
from .call import Problem, ProductCall, unevenness
from .engine import Prepared
from .work_list import Groups, Items, LongRows, Pattern


class Operand:
    """The arrays of a BSR matrix in the form that kernels read, and everything that was prepared for its products.

    `whole` is the shape of the matrix, or None if an array had to be copied because it was not contiguous or because
    the index arrays had different dtypes. `longest` has the blocks of the longest block row; 0 if unknown.
    """

    __slots__ = (
        *("__weakref__", "_entries", "array_type", "arrays", "backend", "blocks", "calls", "extents", "longest"),
        *("indices_dtype", "pointer", "shape", "source", "unwritten", "whole"),
    )  # fmt: skip

    def __init__(self, A: Any) -> None:
        self.unwritten = A._state()
        self.source = (A.data, *A._index)
        data, indices, indptr = given = (A.data, *map(plain_array, A._index))
        if indices.dtype != indptr.dtype:
            indptr = indptr.astype(indices.dtype)
        self.backend: Backend = A._backend
        self.array_type = type(data)
        self.arrays = tuple(contiguous(x) for x in (data, indices, indptr))
        self.blocks, self.shape = len(data), A._shape
        since = A._canonical_since
        self.longest = since.pattern.longest if since is not None and since.holds_for(A) else 0
        self.indices_dtype = indices.dtype
        self.pointer = self.arrays[0].data.ptr
        self.extents = tuple(self.backend.extent(x) for x in given)
        self.whole = A._shape if all(a is b for a, b in zip(self.arrays, given, strict=True)) else None
        self._entries: dict[Any, StreamOrdered] = {}
        #: what is known of kinds of calls: those that were checked, and launches
        self.calls = Calls()

    def derived(self, data: Any, indices: Array, indptr: Array, shape: tuple[int, int]) -> Operand:
        """A matrix of other blocks and another pattern, which are copied for each product; `data` says how they lie."""
        found = Operand.__new__(Operand)
        found.source = found.arrays = (data, indices, indptr)
        found.backend, found.array_type, found.blocks, found.shape = self.backend, self.array_type, len(data), shape
        found.indices_dtype, found.pointer, found.whole = indices.dtype, 0, None
        found._entries, found.calls, found.longest = {}, Calls(), 0
        return found

    def fits(self, A: Any) -> bool:
        """Return whether the matrix still has these arrays, this pattern and this shape, and no array was copied."""
        return self.source[0] is A.data and self.whole == A._shape and self.unwritten.holds_for(A)

    def call_key(self, A: Any, x: Array, out: Array | None, options: tuple[Any, ...]) -> Any:
        """Return the key in `calls` for the arguments of `matmul`, or None if this does not fit A any more.

        All that `matmul` checks follows from the key, but whether `out` overlaps an operand.
        """
        if type(x) is not self.array_type or not self.fits(A):
            return None
        kernels = Kernel.forced, overlapping.thread.active
        key = (options, x.shape, x.strides, x.dtype, x.data.ptr % 16, kernels, cupy.cuda.runtime.getDevice())
        if out is None:
            return key
        return (key, out.shape, out.strides, out.dtype, out.data.ptr % 16) if type(out) is self.array_type else None

    def sampled_key(self, A: Any, X: Array, Y: Array, out_dtype: Any, precision: str | None) -> Any:
        """Return the key in `calls` for `sddmm` with the pattern A, or None if this does not fit A any more.

        `out_dtype` is the dtype of `out`, or None if there is none. The structure of `out` is not a part of the key.
        """
        kind = self.array_type
        if type(X) is not kind or type(Y) is not kind or not self.fits(A):
            return None
        dense = (X.shape, X.strides, X.dtype, X.data.ptr % 16, Y.shape, Y.strides, Y.dtype, Y.data.ptr % 16)
        return ("sampled", dense, out_dtype, precision, Kernel.forced, cupy.cuda.runtime.getDevice())

    def pattern(self, block_cols: int, transposed: bool) -> Pattern:
        """Return the structure of the matrix, or of its transpose; the stored matrix has `block_cols` block columns."""
        _, indices, indptr = self.arrays
        return Pattern(indices, indptr, len(indptr) - 1, block_cols, transposed)

    def index(self, block_cols: int, transposed: bool) -> tuple[Array, ...]:
        """Return the index arrays of the operand for kernels without a work list: (indices, indptr, places).

        `places` maps each entry of the transposed index to its stored block; it is None without a transpose.
        """
        if not transposed:
            return (*self.arrays[1:], None)
        groups = self.groups(self.pattern(block_cols, True), 1, 1)
        return groups.columns, groups.bounds, groups.blocks

    def row_shares(
        self, block_cols: int, transposed: bool, longest: int, piece: int, count: int
    ) -> tuple[LongRows, Array | None]:
        """Return the pieces, of at most `piece` blocks, of block rows with more than `longest` blocks, and bounds.

        The bounds are where each of `count` ranges of neighbouring block rows begins, and where the last one ends; None
        if `count` is 0.
        """
        indptr = self.index(block_cols, transposed)[1]
        key = ("row shares", block_cols, transposed, longest, piece, count)
        return self.remembered(key, lambda: lists.row_shares(indptr, self.blocks, longest, piece, count))

    def groups(self, pattern: Pattern, per_row: int, per_group: int) -> Groups:
        """Return groups of row tiles; a block row has `per_row` row tiles, and a group has `per_group`."""
        key = ("groups", pattern.block_cols, pattern.transposed, per_row, per_group)
        return self.remembered(key, lambda: self._groups(pattern, per_row, per_group))

    def _groups(self, pattern: Pattern, per_row: int, per_group: int) -> Groups:
        if per_group == 1:
            return lists.single(pattern, per_row) or work_list.single(self.backend, pattern, per_row)
        order = lists.matched(pattern, per_row, per_group)
        groups = lists.merged(pattern, per_row, per_group, order)
        return groups or work_list.merged(self.backend, pattern, per_row, per_group, order)

    def whole_items(self, pattern: Pattern, per_row: int, per_group: int) -> Items:
        """Return the work items for `groups` with the same arguments: whole groups, longest first."""
        groups = self.groups(pattern, per_row, per_group)
        key = ("whole items", pattern.block_cols, pattern.transposed, per_row, per_group)
        return self.remembered(key, lambda: lists.items(groups) or work_list.whole(self.backend, groups))

    def split_items(self, pattern: Pattern, per_row: int, per_group: int, share: work_list.Share) -> Items:
        """Return work items that are pieces of groups if a group could exceed a CTA's fair share, else whole groups."""
        groups = self.groups(pattern, per_row, per_group)
        if not work_list.may_split(groups, pattern, share):
            return self.whole_items(pattern, per_row, per_group)
        key = ("split items", pattern.block_cols, pattern.transposed, per_row, per_group, share)
        return self.remembered(key, lambda: lists.items(groups, share) or work_list.split(self.backend, groups, share))

    def remembered(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returned when this key was first requested.

        The key must contain everything on which the result of `make` depends.
        """
        return workspace.kept_in(self._entries, key, make).get()


@dataclass(frozen=True)
class Kind:
    """A kind of product: what decides the kernel, the matrix with its lists, and how B and the result lie."""

    problem: Problem
    operand: Operand
    B: Any
    out: Any
    #: whether a launch takes the blocks of A from a copy, whose address follows those of B and the result
    copied: bool = False
    #: how that copy lies, if its shape and dtype are not those of the operand's blocks
    lie: Any = None

    @property
    def blocks(self) -> Any:
        """The blocks of A, or how their copy lies."""
        return self.operand.source[0] if self.lie is None else self.lie

    @property
    def stored_columns(self) -> int:
        """The number of block columns of the matrix as it is stored."""
        return self.problem.block_rows if self.problem.transposed else self.problem.block_cols


def problem_of(operand: Operand, call: ProductCall, orders: tuple[str, str] = ("C", "C")) -> Problem:
    """Return the properties of a call that decide its kernel; `orders` are those of B and of the result."""
    data, shape, transposed = operand.source[0], call.matrix._shape, call.transposed
    sides, counts = data.shape[1:], (shape[0] // data.shape[1], shape[1] // data.shape[2])
    if transposed:
        sides, counts = sides[::-1], counts[::-1]
    index = np.dtype(np.int32) if transposed else operand.indices_dtype
    names = element_types.types(data.dtype, call.B.dtype, call.out.dtype, call.acc, index)
    return Problem(
        arch=card().arch,
        types=element_types.scaled(names) if call.fp8 else names,
        R=sides[0],
        K=sides[1],
        N=call.columns,
        batches=call.batches,
        block_rows=counts[0],
        block_cols=counts[1],
        blocks=operand.blocks,
        transposed=transposed,
        b_order=orders[0],
        c_order=orders[1],
        overwrite=bool(call.beta == 0),
        aligned=operand.pointer % 16 == 0,
        tf32=call.tf32,
        parts=call.parts,
        uneven=1 if transposed else unevenness(operand.longest, operand.blocks, counts[0]),
    )


class PreparedLaunches(Prepared):
    """The state of a matrix on the GPU: its arrays, which kernels are asked for, what is known of its calls."""

    def __init__(self, A: Any) -> None:
        super().__init__(A)
        self._choice = self._choice_of(A)

    def holds_for(self, A: Any) -> bool:
        return super().holds_for(A) and self._choice_of(A) == self._choice

    @staticmethod
    def _choice_of(A: Any) -> tuple[Any, ...]:
        """What decides the kernels of a matrix beside its arrays; `tune` lets it forget its calls."""
        known = getattr(A._source()[0], "_memo", None)
        cleared = None if known is None else known.calls.cleared
        return Kernel.forced, overlapping.thread.active, cleared


def operand_of(A: Any) -> Operand:
    """Return what is kept of a matrix, or a new one if its arrays, its pattern or its shape have changed."""
    found: Operand | None = getattr(A, "_memo", None)
    if found is None or not found.fits(A):
        with graphs.memory():  # copies of arrays, which are made anew for each call
            found = A._memo = Operand(A)
    return found
