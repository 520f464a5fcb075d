"""The CPU home: NumPy arrays, SciPy's sparse classes; products by BLAS on panels or by SciPy's compiled loops."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import numpy as np
import scipy.sparse
from scipy._lib._sparse import SparseABC
from scipy.sparse import _sparsetools

from . import structure
from .dtypes import BOOL, HALF_DTYPES, HOST_DTYPES, accumulator_dtype
from .home import Array, Home
from .structure import Blocks

#: From this many flops a block row on, BLAS on a gathered panel beats SciPy's loops (which do some 1.5 GFLOP/s).
_PANEL_FLOPS = 50_000
#: A gathered panel of B: small enough for the caches, wide enough for BLAS.
_PANEL_BYTES = 4 << 20
_LEAST_PANEL_COLUMNS = 64
#: Pairs of blocks multiplied at a time in a sparse product: bounds the gathered copies.
_PAIR_BYTES = 1 << 26


class NumpyHome(Home):
    """Data in main memory."""

    name = "cpu"
    bring = "Bring it to the CPU with .get(), or the matrix to the GPU with A.to_device('cuda')."
    dtypes = HOST_DTYPES
    foreign_dtypes = tuple(d for d in HOST_DTYPES if d not in HALF_DTYPES)
    array_priority = 10.1

    @property
    def xp(self) -> ModuleType:
        return np

    @property
    def sparse(self) -> ModuleType:
        return scipy.sparse

    def bases(self, is_array: bool) -> tuple[type, ...]:
        return (SparseABC, scipy.sparse.sparray if is_array else scipy.sparse.spmatrix)

    def is_dense(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def is_sparse(self, x: Any) -> bool:
        return scipy.sparse.issparse(x)

    def adopt(self, x: Any) -> Array | None:
        if isinstance(x, np.ndarray):
            return x
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError):
            return None

    def from_host(self, x: np.ndarray[Any, Any]) -> Array:
        return x.copy()

    def to_host(self, x: Array) -> np.ndarray[Any, Any]:
        return np.array(x)

    def address(self, x: Array) -> int:
        return x.__array_interface__["data"][0]

    def device_of(self, x: Array) -> str:
        return "cpu"

    def expand(self, indptr: Array, n: int) -> Array:
        rows = np.arange(len(indptr) - 1, dtype=indptr.dtype)
        return np.repeat(rows, np.diff(indptr))[:n]

    def segment_reduce(self, op: str, values: Array, order: Array | None, starts: Array) -> Array:
        if order is not None:
            values = values[order]
        if not len(starts):
            return np.empty((0, *values.shape[1:]), values.dtype)
        if op != "add":
            return getattr(np, op).reduceat(values, starts, axis=0)
        if values.dtype == BOOL:
            return np.logical_or.reduceat(values, starts, axis=0)
        acc = accumulator_dtype(values.dtype)
        return np.add.reduceat(values, starts, axis=0, dtype=acc).astype(values.dtype, copy=False)

    def spmm(self, A: Any, B: Array, out: Array, acc: np.dtype[Any], alpha: Any, beta: Any) -> None:
        direct = beta == 0 and out.dtype == acc and out.flags.c_contiguous
        product = out if direct else np.empty(out.shape, acc)
        self._product(A, B.astype(acc, copy=False), product)
        if alpha != 1:
            np.multiply(product, _number(acc, alpha), out=product)  # "and" for booleans
        if direct:
            return
        if beta == 0:
            out[...] = product
        elif acc == BOOL:
            out |= product
        else:
            out[...] = product + _number(acc, beta) * out.astype(acc, copy=False)

    def _product(self, A: Any, B: Array, out: Array) -> None:
        """``out = A @ B`` in the dtype of B and out."""
        (M, N), (R, C) = A.shape, A.blocksize
        data, indices, indptr = blocks = self.sound(A._blocks, M // R, N // C)
        work = 2 * data.size * B.shape[1] / max(1, M // R)  # flops of a block row
        if B.shape[1] > 1 and out.dtype.char in "fdFD" and work >= _PANEL_FLOPS:
            _multiply_panels(blocks, np.ascontiguousarray(B), out)
            return
        out[...] = 0
        flat = data.astype(out.dtype, copy=False).ravel(), B.ravel(), out.ravel()
        if B.shape[1] == 1:
            _sparsetools.bsr_matvec(M // R, N // C, R, C, indptr, indices, *flat)
        else:
            _sparsetools.bsr_matvecs(M // R, N // C, B.shape[1], R, C, indptr, indices, *flat)

    def pair_products(self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any]) -> Array:
        acc = accumulator_dtype(dtype)
        out = np.empty((len(starts), a.shape[1], b.shape[2]), dtype)
        bytes_per_pair = max(1, acc.itemsize * (a[:1].size + b[:1].size + a.shape[1] * b.shape[2]))
        pairs = max(1, _PAIR_BYTES // bytes_per_pair)
        ends = np.append(starts[1:], len(ia))
        first = 0
        while first < len(starts):  # whole segments, as many as fit
            last = max(first + 1, int(np.searchsorted(ends, starts[first] + pairs, side="right")))
            k = slice(int(starts[first]), int(ends[last - 1]))
            products = np.matmul(a[ia[k]].astype(acc, copy=False), b[ib[k]].astype(acc, copy=False))
            summed = self.segment_reduce("add", products, None, starts[first:last] - starts[first])
            out[first:last] = summed.astype(dtype, copy=False)
            first = last
        return out

    def sound(self, blocks: Blocks, block_rows: int, block_cols: int) -> Blocks:
        data, indices, indptr = blocks
        R, C = data.shape[1:]
        structure.check_arrays(data, indices, indptr, (block_rows * R, block_cols * C))
        if indices.dtype != indptr.dtype:
            index = np.result_type(indices.dtype, indptr.dtype)
            indices, indptr = indices.astype(index), indptr.astype(index)
        indices, indptr = np.ascontiguousarray(indices), np.ascontiguousarray(indptr)
        unsigned = indices.view(f"u{indices.itemsize}")  # a negative index is a very large one
        in_range = not len(indices) or unsigned.max() < block_cols
        if not in_range or indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
            structure.check_values(self, indices, indptr, block_cols)
            raise ValueError(f"indptr: last value {indptr[-1]} should be the number of blocks, {len(indices)}")
        return Blocks(np.ascontiguousarray(data), indices, indptr)

    # ------------------------------------------------- SciPy's compiled loops instead of sorts
    def transpose(self, blocks: Blocks, block_cols: int) -> Blocks:
        data, indices, indptr = self.sound(blocks, len(blocks.indptr) - 1, block_cols)
        n, R, C = data.shape
        out = np.empty((n, C, R), data.dtype)
        new_indices, new_indptr = np.empty(n, indices.dtype), np.empty(block_cols + 1, indptr.dtype)
        _sparsetools.bsr_transpose(
            len(indptr) - 1, block_cols, R, C, indptr, indices, _bits(data), new_indptr, new_indices, _bits(out)
        )
        return Blocks(out, new_indices, new_indptr)

    def to_csr(self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        data, indices, indptr = self.sound(blocks, len(blocks.indptr) - 1, block_cols)
        (_, R, C), rows = data.shape, len(indptr) - 1
        values = np.empty(data.size, data.dtype)
        new_indices, new_indptr = np.empty(data.size, dtype), np.empty(rows * R + 1, dtype)
        indptr, indices = indptr.astype(dtype, copy=False), indices.astype(dtype, copy=False)
        _sparsetools.bsr_tocsr(
            rows, block_cols, R, C, indptr, indices, _bits(data), new_indptr, new_indices, _bits(values)
        )
        return values, new_indices, new_indptr

    def multiply(self, a: Blocks, b: Blocks, block_cols: int, dtype: np.dtype[Any]) -> Blocks:
        if dtype not in self.foreign_dtypes:
            return super().multiply(a, b, block_cols, dtype)
        rows, inner_rows = len(a.indptr) - 1, len(b.indptr) - 1
        a, b = self.sound(a, rows, inner_rows), self.sound(b, inner_rows, block_cols)
        (R, inner), C = a.data.shape[1:], b.data.shape[2]
        index = np.result_type(a.indices.dtype, b.indices.dtype)
        pattern = [x.astype(index, copy=False) for x in (a.indptr, a.indices, b.indptr, b.indices)]
        count = _sparsetools.csr_matmat_maxnnz(rows, block_cols, *pattern)
        index = np.result_type(index, structure.index_dtype(count))
        a_indptr, a_indices, b_indptr, b_indices = (x.astype(index, copy=False) for x in pattern)
        indptr, indices = np.empty(rows + 1, index), np.empty(count, index)
        data = np.empty((count, R, C), dtype)
        _sparsetools.bsr_matmat(
            count, rows, block_cols, R, C, inner,
            a_indptr, a_indices, np.ravel(a.data), b_indptr, b_indices, np.ravel(b.data),
            indptr, indices, data.ravel(),
        )  # fmt: skip
        used = int(indptr[-1])  # sums that came out as zero are left out of 1 x 1 blocks
        return Blocks(data[:used], indices[:used], indptr)


def _multiply_panels(blocks: Blocks, B: Array, out: Array) -> None:
    """``out = A @ B`` by BLAS, one block row at a time: its blocks side by side times the rows of B that they meet.

    Beside the operands it holds one gathered panel of B and one row of A.
    """
    data, indices, indptr = blocks
    (_, R, C), (K, N) = data.shape, B.shape
    longest = int(np.diff(indptr).max(initial=0)) * C
    width = min(N, max(_LEAST_PANEL_COLUMNS, _PANEL_BYTES // max(1, longest * B.itemsize)))
    panel = np.empty(longest * width, B.dtype)
    bounds = indptr.tolist()
    for left in range(0, N, width):
        columns = np.ascontiguousarray(B[:, left : left + width])
        n = columns.shape[1]
        columns = columns.reshape(K // C, C * n)
        for i, (first, last) in enumerate(itertools.pairwise(bounds)):
            target = out[i * R : (i + 1) * R, left : left + n]
            if first == last:
                target[...] = 0
                continue
            k = (last - first) * C
            gathered = panel[: k * n]
            # "clip" writes straight into the panel; the indices are known to be in range
            np.take(columns, indices[first:last], axis=0, out=gathered.reshape(-1, C * n), mode="clip")
            row = data[first:last].transpose(1, 0, 2).reshape(R, k).astype(B.dtype, copy=False)
            np.matmul(row, gathered.reshape(k, n), out=target)


def _number(dtype: np.dtype[Any], x: Any) -> Any:
    """alpha or beta in the dtype of the sums; integers wrap as the sums do."""
    if dtype.kind not in "iu":
        return dtype.type(x)
    return np.array(int(x) % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)[()]


def _bits(x: Array) -> Array:
    """A flat view that SciPy's compiled loops can move: 16-bit floats as the integers that hold them."""
    return (x.view(np.uint16) if x.dtype in HALF_DTYPES else x).reshape(-1)


HOST = NumpyHome()
