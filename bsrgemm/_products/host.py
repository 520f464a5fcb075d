"""Products on the CPU, either by BLAS on gathered panels of B or by SciPy's compiled loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.sparse import _sparsetools

from .._backend import structure, threads
from .._backend.base import Array, Blocks
from .._backend.numpy_backend import HOST
from ..dtypes import BOOL, FP8_VALUES, accumulator_dtype, number_of
from .call import ProductCall, UnlistedPattern
from .engine import ProductEngine

#: BLAS on a gathered panel is faster than SciPy's loops from this many columns and from this many flops per block row
#: on. SciPy's loops reach 3 to 12 GFLOP/s on two cores of the CPU on which this was measured. Blocks with fewer rows
#: than the third number need more flops, because BLAS does less work with each panel that is gathered for them.
_PANEL_WIDTH, _PANEL_FLOPS, _PANEL_ROWS = 8, 500_000, 32
#: Size of a gathered panel of B in bytes, small enough for the caches and wide enough for BLAS.
_PANEL_BYTES = 4 << 20
_LEAST_PANEL_COLUMNS = 64
#: Number of columns of a batch that are copied and multiplied at a time: enough for BLAS, and a small copy.
_BATCH_COLUMNS = 256
#: Number of bytes of A that are cast or transposed at a time for SciPy's loops.
_LOOP_BYTES = 4 << 20
#: From this many columns on, SciPy's CSR loop saves more time than the conversion of the blocks to CSR takes.
_CSR_WIDTH = 8
#: Least work for which several threads are faster than one: elements of A times columns of B for SciPy's loops, and
#: flops for BLAS. Starting a thread takes 0.1 ms, and a thread whose core is busy (for example with a BLAS that waits
#: for more work) delays the result. The third number is the least flops per call of BLAS: threads that make smaller
#: calls spend more time waiting for Python's interpreter lock than multiplying.
_LOOP_SHARED, _PANEL_SHARED, _CALL_SHARED = 4_000_000, 50_000_000, 2_000_000
_MOST_THREADS = 64
#: A product with at most this many elements of A times columns of B takes less time than its checks.
_QUICK = 4096
#: From this many columns of a block on, the transpose times a vector adds up rows of blocks; below it goes by CSR.
_WIDE_ROW = 3
#: From this many columns of a block on, that is also faster for each of a few columns of B than CSR for all of them.
_WIDER_ROW, _FEW_COLUMNS = 16, 16
#: Up to this many rows of a block, its column is written for one row after the other, which NumPy repeats more slowly.
_FEW_ROWS = 8
#: The transpose of blocks with at least so many rows, and not more columns than rows, is multiplied by SciPy's sparse
#: product: up to this many columns of x, and of a block, for real and for complex numbers. Its loop reads a block by
#: columns, so that adding the rows of wider blocks is faster.
_SPARSE_LEAST_ROWS = 3
_SPARSE_WIDTHS, _SPARSE_WIDTHS_COMPLEX = (3, 8), (1, 4)
#: Size in bytes of the pairs of blocks that a sparse product copies and multiplies at a time.
_PAIR_BYTES = 1 << 26
#: From this many flops per pair of blocks on, BLAS multiplies the pairs of a sparse product faster than SciPy's loops.
_PAIR_FLOPS = 32_768
#: From this many products of numbers per pair of blocks on, one call of BLAS for each block of the result is faster.
_SINGLE_FLOPS = 16_384
#: Indices of blocks that are looked at at a time: what is read for them stays in the cache.
_INDICES_AT_A_TIME = 1 << 16

_Cast = Callable[[Array], Array]


class HostProducts(ProductEngine):
    """The engine for products of NumPy arrays."""

    def multiply_dense(self, call: ProductCall) -> None:
        A, B, out, acc = call.matrix, call.B, call.out, call.acc
        alpha, beta, transposed = call.alpha, call.beta, call.transposed
        (M, N), (_, R, C) = A._shape, A.data.shape
        blocks = self.backend.validated(A._blocks, M // R, N // C)

        def wide(x: Array) -> Array:
            """Return stored values in the dtype of the accumulator."""
            return np.take(FP8_VALUES, x) if call.fp8 else x.astype(acc, copy=False)

        def multiply(B: Array, out: Array) -> None:
            """Multiply A by one matrix, or by n matrices at once: a B of shape (K, n, N) gives (M, n, N)."""
            rows, width = len(out), math.prod(out.shape[1:])
            direct = out.dtype == acc and out.flags.c_contiguous
            flat = wide(B).reshape(len(B), width)
            if (
                direct
                and beta != 0
                and alpha in (1, -1)
                and acc != BOOL
                and _by_loops(blocks, rows, width, acc, transposed)
            ):
                if beta != 1:
                    np.multiply(out, number_of(acc, beta), out=out)
                _multiply_loops(
                    blocks, (flat if alpha == 1 else -flat).ravel(), out.reshape(-1), width, transposed, wide
                )
                return
            direct = direct and beta == 0
            product = out if direct else np.empty(out.shape, acc)
            _multiply(blocks, flat, product.reshape(rows, width), transposed, wide)
            if alpha != 1:
                np.multiply(product, number_of(acc, alpha), out=product)  # for booleans this is a logical and
            if direct:
                return
            if beta == 0:
                out[...] = product
            elif acc == BOOL:
                out |= product
            else:
                out[...] = product + number_of(acc, beta) * out.astype(acc, copy=False)

        if B.ndim == 2:
            multiply(B, out)
            return
        together = max(1, _BATCH_COLUMNS // max(1, B.shape[2]))
        for first in range(0, len(B), together):
            batch = slice(first, first + together)
            multiply(B[batch].transpose(1, 0, 2), out[batch].transpose(1, 0, 2))

    def quick(self, A: Any, x: Array) -> Array | None:
        data, (M, K) = A.data, A._shape
        dtype, sides = data.dtype, x.shape
        if x.dtype != dtype or dtype.char not in "fdFD" or not 1 <= len(sides) <= 2 or sides[0] != K:
            return None
        width = 1 if len(sides) == 1 else sides[1]
        if data.size * width > _QUICK or not x.flags.c_contiguous:
            return None
        _, R, C = data.shape
        data, indices, indptr = self.backend.validated(A._blocks, M // R, K // C)
        out = np.zeros((M, *sides[1:]), dtype)
        _loop("bsr", (M // R, K // C), (R, C), width, indptr, indices, data.reshape(-1), x.reshape(-1), out.reshape(-1))
        return out

    def pair_products(
        self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
    ) -> Array:
        acc = accumulator_dtype(dtype)
        out = np.empty((len(starts), a.shape[1], b.shape[2]), dtype)
        if a.dtype == b.dtype == dtype and dtype.char in "fdFD" and a[:1].size * b.shape[2] >= _SINGLE_FLOPS:
            _multiply_pairs(a, ia, b, ib, starts, out)
            return out
        bytes_per_pair = max(1, acc.itemsize * (a[:1].size + b[:1].size + a.shape[1] * b.shape[2]))
        pairs = max(1, _PAIR_BYTES // bytes_per_pair)
        ends = np.append(starts[1:], len(ia))
        first = 0
        while first < len(starts):  # each step takes as many whole segments as fit
            last = max(first + 1, int(np.searchsorted(ends, starts[first] + pairs, side="right")))
            k = slice(int(starts[first]), int(ends[last - 1]))
            products = np.matmul(a[ia[k]].astype(acc, copy=False), b[ib[k]].astype(acc, copy=False))
            summed = self.backend.segment_reduce("add", products, None, starts[first:last] - starts[first])
            out[first:last] = summed.astype(dtype, copy=False)
            first = last
        return out

    def sampled(
        self,
        X: Array,
        Y: Array,
        indices: Array,
        indptr: Array,
        block: tuple[int, int],
        dtype: np.dtype[Any],
        tf32: bool = False,
    ) -> Array:
        """Compute one block row at a time by BLAS: its rows of X times the columns of Y at its blocks."""
        acc = accumulator_dtype(dtype)
        (R, C), K = block, X.shape[1]
        out = np.empty((len(indices), R, C), dtype)
        columns = np.ascontiguousarray(Y.T, acc).reshape(Y.shape[1] // C, C * K)
        together = max(1, _PANEL_BYTES // max(1, C * K * acc.itemsize))  # number of blocks of a panel

        def rows_of(first_row: int, end_row: int) -> None:
            for i in range(first_row, end_row):
                row = np.ascontiguousarray(X[i * R : (i + 1) * R], acc)
                for first in range(int(indptr[i]), int(indptr[i + 1]), together):
                    last = min(first + together, int(indptr[i + 1]))
                    panel = columns[indices[first:last]].reshape((last - first) * C, K)
                    out[first:last] = (row @ panel.T).reshape(R, last - first, C).transpose(1, 0, 2)

        flops = 2 * out.size * K
        worthwhile = flops >= max(_PANEL_SHARED, _CALL_SHARED * (len(indptr) - 1))
        threads.share(rows_of, indptr, most=_MOST_THREADS, worthwhile=worthwhile, blas=True)
        return out

    def planned_pattern(self, a: Blocks, b: Blocks, block_cols: int, in_order: bool = True) -> UnlistedPattern:
        """Find the blocks of the result by SciPy's loop; listing and sorting all pairs takes four times as long.

        The pattern keeps the index arrays, to which nobody may write.
        """
        rows = len(a.indptr) - 1
        pairs = _pair_count(a.indices, np.diff(b.indptr))
        most = min(pairs, rows * block_cols)
        arrays = _as_one_index(a, b, most)
        indptr, indices, found = (
            np.empty(rows + 1, arrays[0].dtype),
            np.empty(most, arrays[0].dtype),
            np.empty(most, bool),
        )
        filled = [np.ones(len(x.indices), bool) for x in (a, b)]
        _sparsetools.csr_matmat(
            rows, block_cols, *arrays[:2], filled[0], *arrays[2:], filled[1], indptr, indices, found
        )
        count = int(indptr[-1])
        indices = indices[:count].copy()
        order = None
        if in_order or self._by_pairs(a, b, a.data.dtype):
            order = np.arange(count, dtype=indices.dtype)
            _sparsetools.csr_sort_indices(rows, indptr, indices, order)
        index = structure.index_dtype(count, a.indices, b.indices)
        indices, indptr = (x.astype(index, copy=False) for x in (indices, indptr))
        return UnlistedPattern(indices, indptr, pairs, lambda: self.product_pattern(a, b, block_cols), order)

    def multiply_planned(self, a: Blocks, b: Blocks, pattern: Any, cols: int, dtype: np.dtype[Any]) -> Array:
        if self._by_pairs(a, b, dtype):
            return super().multiply_planned(a, b, pattern, cols, dtype)
        # SciPy's loop for the whole product is faster than pairs, and its blocks are put into the order of the pattern.
        found = self._multiply_by_loop(a, b, cols, dtype, len(pattern.indices))
        if isinstance(pattern, UnlistedPattern) and len(found.indices) == len(pattern.indices):  # no sum was zero
            order = pattern.order
            if np.array_equal(found.indices if order is None else found.indices.take(order), pattern.indices):
                return found.data if order is None else found.data.take(order, axis=0)
        out = np.zeros((len(pattern.indices), *found.data.shape[1:]), dtype)
        rows = self.backend.expand(found.indptr, len(found.indices))
        planned = Blocks(out, pattern.indices, pattern.indptr)
        out[self.backend.loops.positions(planned, cols, rows, found.indices)] = found.data
        return out

    def _by_pairs(self, a: Blocks, b: Blocks, dtype: np.dtype[Any]) -> bool:
        """Tell whether BLAS on pairs of blocks is faster than SciPy's loop, or the loop does not support the dtype."""
        flops = 2 * a.data.shape[1] * a.data.shape[2] * b.data.shape[2]
        return dtype not in self.backend.foreign_dtypes or (dtype.char in "fdFD" and flops >= _PAIR_FLOPS)

    def multiply_sparse(
        self, a: Blocks, b: Blocks, block_cols: int, dtype: np.dtype[Any], matrices: tuple[Any, Any] | None = None
    ) -> Blocks:
        if self._by_pairs(a, b, dtype):
            return super().multiply_sparse(a, b, block_cols, dtype)
        return self._multiply_by_loop(a, b, block_cols, dtype)

    def _multiply_by_loop(
        self, a: Blocks, b: Blocks, block_cols: int, dtype: np.dtype[Any], count: int | None = None
    ) -> Blocks:
        """Return the blocks of ``A @ B`` by SciPy's loop, without an order; `count` is their number if it is known."""
        rows, inner_rows = len(a.indptr) - 1, len(b.indptr) - 1
        a, b = self.backend.validated(a, rows, inner_rows), self.backend.validated(b, inner_rows, block_cols)
        (R, inner), C = a.data.shape[1:], b.data.shape[2]
        if count is None:
            count = _sparsetools.csr_matmat_maxnnz(rows, block_cols, *_as_one_index(a, b))
        a_indptr, a_indices, b_indptr, b_indices = _as_one_index(a, b, count)
        indptr, indices = np.empty(rows + 1, a_indptr.dtype), np.empty(count, a_indptr.dtype)
        data = np.empty((count, R, C), dtype)
        _sparsetools.bsr_matmat(
            count, rows, block_cols, R, C, inner,
            a_indptr, a_indices, np.ravel(a.data), b_indptr, b_indices, np.ravel(b.data),
            indptr, indices, data.ravel(),
        )  # fmt: skip
        used = int(indptr[-1])  # SciPy drops 1 x 1 blocks whose sum is zero
        return Blocks(data[:used], indices[:used], indptr)


def _pair_count(columns: Array, lengths: Array) -> int:
    """The sum of the lengths of the rows of B at these columns of A, some at a time, which stay in the cache."""
    if len(lengths) and (lengths == lengths[0]).all():
        return len(columns) * int(lengths[0])
    parts = (columns[k : k + _INDICES_AT_A_TIME] for k in range(0, len(columns), _INDICES_AT_A_TIME))
    return sum(int(lengths.take(part).sum(dtype=np.int64)) for part in parts)


def _as_one_index(a: Blocks, b: Blocks, most: int = 0) -> list[Array]:
    """The row pointers and columns of A, and those of B, in one dtype that can also count so many blocks."""
    index = np.result_type(a.indices.dtype, b.indices.dtype, structure.index_dtype(most))
    return [x.astype(index, copy=False) for x in (a.indptr, a.indices, b.indptr, b.indices)]


def _multiply_pairs(a: Array, ia: Array, b: Array, ib: Array, starts: Array, out: Array) -> None:
    """Compute each sum of `pair_products` by one call of BLAS: left blocks side by side, right blocks stacked."""
    (_, R, inner), C = a.shape, b.shape[2]

    def some(first: int, last: int) -> None:
        for s in range(first, last):
            k = slice(bounds[s], bounds[s + 1])
            left = a[ia[k]].transpose(1, 0, 2).reshape(R, -1)
            np.matmul(left, b[ib[k]].reshape(-1, C), out=out[s])

    bounds = [*starts.tolist(), len(ia)]
    flops = 2 * R * inner * C * len(ia)
    threads.share(some, np.array(bounds), most=_MOST_THREADS, worthwhile=flops >= _PANEL_SHARED, blas=True)


def _multiply(blocks: Blocks, B: Array, out: Array, transposed: bool, wide: _Cast) -> None:
    """Compute ``out = A @ B`` or ``A.T @ B`` in the common dtype of B and `out`; `out` is contiguous."""
    rows, width = out.shape
    if _by_loops(blocks, rows, width, out.dtype, transposed):
        out[...] = 0
        _multiply_loops(blocks, B.ravel(), out.reshape(-1), width, transposed, wide)
    else:
        _multiply_panels(blocks, np.ascontiguousarray(B), out, transposed, wide)


def _by_loops(blocks: Blocks, rows: int, width: int, dtype: np.dtype[Any], transposed: bool) -> bool:
    """Return whether SciPy's loops are faster than BLAS on panels, or BLAS does not support the dtype."""
    side = blocks.data.shape[2 if transposed else 1]
    flops = (4 if dtype.char in "FD" else 2) * blocks.data.size * width / max(1, rows // side)  # per block row
    full = min(1, side / _PANEL_ROWS) ** 2
    return width < max(2, _PANEL_WIDTH) or dtype.char not in "fdFD" or flops * full < _PANEL_FLOPS


def _multiply_loops(blocks: Blocks, x: Array, y: Array, width: int, transposed: bool, wide: _Cast) -> None:
    """Compute ``y += A @ x`` or ``y += A.T @ x`` by SciPy's loops; `x` and `y` are flattened, with `width` columns.

    If the values must be cast, transposed or converted to CSR, this is done for a few block rows at a time.
    """
    data, indices, indptr = blocks
    block_rows = len(indptr) - 1
    _, R, C = data.shape
    block_cols = (len(y) if transposed else len(x)) // max(1, width * C)
    single = R == C == 1  # 1 x 1 blocks are CSR, and the same arrays are the transpose in CSC
    plain = data.dtype == y.dtype
    if transposed and plain and single:
        _loop("csc", (block_cols, block_rows), (), width, indptr, indices, data.ravel(), x, y)
        return
    by_rows = width >= _CSR_WIDTH and not single and not transposed
    sparse = transposed and _by_sparse_product(R, C, width, y.dtype)
    most = max(block_cols if transposed else 1, _LOOP_BYTES // (R * C * y.itemsize))
    if sparse and plain:  # nothing is copied
        most = len(indices)

    def rows_of(first: int, end: int) -> None:
        if plain and not transposed and not by_rows:
            here = slice(first * R * width, end * R * width)
            shape = (end - first, block_cols)
            _loop("bsr", shape, (R, C), width, indptr[first : end + 1], indices, data.ravel(), x, y[here])
            return
        while first < end:
            start = int(indptr[first])
            last = max(first + 1, min(end, int(np.searchsorted(indptr, start + most, side="right")) - 1))
            some(first, last, start, int(indptr[last]))
            first = last

    numbers = np.empty(0, indices.dtype)

    def counted(n: int) -> Array:
        """Return the numbers 0 to n - 1; all pieces share an array."""
        nonlocal numbers
        if len(numbers) < n:
            numbers = np.arange(n, dtype=indices.dtype)
        return numbers[:n]

    def some(first: int, last: int, start: int, stop: int) -> None:
        """Multiply the block rows from `first` to `last`, which hold the blocks from `start` to `stop`."""
        count = last - first
        pattern, values = (indptr[first : last + 1] - indptr[first], indices[start:stop]), data[start:stop]
        here = slice(first * R * width, last * R * width)
        if by_rows:
            _loop(
                "csr", (count * R, block_cols * C), (), width, *_as_csr(*pattern, wide(values), block_cols), x, y[here]
            )
        elif not transposed:
            _loop("bsr", (count, block_cols), (R, C), width, *pattern, wide(values).ravel(), x, y[here])
        elif single:
            _loop("csc", (block_cols, count), (), width, *pattern, wide(values).ravel(), x[here], y)
        elif sparse:
            _add_transposed_product(pattern, wide(values), x[here], y, width)
        elif width == 1 and C >= _WIDE_ROW:
            _add_transposed(pattern, wide(values), x[here], y, counted(values.shape[0] * R + 1))
        elif width <= _FEW_COLUMNS and C >= _WIDER_ROW:
            cast = wide(values)
            for column in range(width):
                one = np.zeros(len(y) // width, y.dtype)
                one_column = np.ascontiguousarray(x[here][column::width])
                _add_transposed(pattern, cast, one_column, one, counted(values.shape[0] * R + 1))
                y[column::width] += one
        else:  # the arrays in CSR are those of the transpose in CSC
            arrays = _as_csr(*pattern, wide(values), block_cols)
            _loop("csc", (block_cols * C, count * R), (), width, *arrays, x[here], y)

    # Every block row of a transposed product can add to all of y, so the product runs in one thread.
    worthwhile = not transposed and data.size * width >= _LOOP_SHARED
    threads.share(rows_of, indptr, most=_MOST_THREADS, worthwhile=worthwhile, blas=False)


def _add_transposed(pattern: tuple[Array, Array], values: Array, x: Array, y: Array, numbers: Array) -> None:
    """Compute ``y += A.T @ x``: row r of a block in block row i, times ``x[i, r]``, is added to a row of y.

    SciPy's product of a matrix in CSC with several columns does that, with a column of the matrix for each row of a
    block, and the blocks as the columns. `numbers` are 0 to the number of rows of blocks.
    """
    (indptr, indices), (n, R, C) = pattern, values.shape
    factors = np.repeat(x.reshape(-1, R), np.diff(indptr), axis=0)
    columns = np.empty((n, R), indices.dtype)
    if R <= _FEW_ROWS:
        for r in range(R):
            columns[:, r] = indices
    else:
        columns[...] = indices[:, None]
    _sparsetools.csc_matvecs(len(y) // C, n * R, C, numbers, columns, factors, values, y)


def _by_sparse_product(R: int, C: int, width: int, dtype: np.dtype[Any]) -> bool:
    """Return whether ``A.T @ x`` is fastest by SciPy's product of two matrices in BSR."""
    columns, widest = _SPARSE_WIDTHS_COMPLEX if dtype.kind == "c" else _SPARSE_WIDTHS
    return width <= columns and widest >= C and max(C, _SPARSE_LEAST_ROWS) <= R


def _add_transposed_product(pattern: tuple[Array, Array], values: Array, x: Array, y: Array, width: int) -> None:
    """Compute ``y += A.T @ x`` as ``x.T @ A``: x.T is a matrix of one block row, whose blocks have `width` rows.

    Each block is read once, in order, and is multiplied into its block of the result; blocks of the result are in the
    order in which their columns are met.
    """
    (indptr, indices), (n, R, C) = pattern, values.shape
    rows, cols = len(indptr) - 1, len(y) // (C * width)
    index = np.result_type(indptr, indices)
    most = min(n, cols)
    ends, columns, sums = np.empty(2, index), np.empty(most, index), np.empty((most, width, C), y.dtype)
    left = x if width == 1 else np.ascontiguousarray(x.reshape(rows, R, width).swapaxes(1, 2)).reshape(-1)
    _sparsetools.bsr_matmat(
        most, 1, cols, width, C, R,
        np.array([0, rows], index), np.arange(rows, dtype=index), left, indptr, indices, values.reshape(-1),
        ends, columns, sums.reshape(-1),
    )  # fmt: skip
    columns, sums, to = columns[: ends[1]], sums[: ends[1]].swapaxes(1, 2), y.reshape(cols, C, width)
    if not HOST.loops.add_at(to, sums, columns):  # faster than NumPy
        to[columns] += sums


def _as_csr(indptr: Array, indices: Array, values: Array, block_cols: int) -> tuple[Array, Array, Array]:
    """Return the blocks as CSR arrays, for which SciPy's loop over the columns of B is faster than for BSR."""
    (_, R, C), rows = values.shape, len(indptr) - 1
    index = indices.dtype if max(values.size, block_cols * C) <= np.iinfo(indices.dtype).max else np.dtype(np.int64)
    starts, columns, flat = (
        np.empty(rows * R + 1, index),
        np.empty(values.size, index),
        np.empty(values.size, values.dtype),
    )
    indptr, indices = indptr.astype(index, copy=False), indices.astype(index, copy=False)
    _sparsetools.bsr_tocsr(rows, block_cols, R, C, indptr, indices, values.ravel(), starts, columns, flat)
    return starts, columns, flat


def _loop(format: str, shape: tuple[int, int], block: tuple[int, ...], width: int, *arrays: Array) -> None:
    if width == 1:
        getattr(_sparsetools, f"{format}_matvec")(*shape, *block, *arrays)
    else:
        getattr(_sparsetools, f"{format}_matvecs")(*shape, width, *block, *arrays)


def _multiply_panels(blocks: Blocks, B: Array, out: Array, transposed: bool, wide: _Cast) -> None:
    """Compute ``out = A @ B`` by BLAS, one block row at a time.

    The blocks of a block row, side by side, are multiplied by a panel: the rows of B at their block columns, gathered
    into one array. ``A.T @ B`` is computed one block column of A at a time; its blocks, stacked, are passed to BLAS as
    a transposed matrix. Each thread needs temporary memory for one panel and for one block row or block column of A.
    """
    data, indices, indptr = blocks
    (_, R, C), (K, N) = data.shape, B.shape
    order = None
    if transposed:
        order, indices, indptr = _by_column(blocks, len(out) // C)
        R, C = C, R
    longest = int(np.diff(indptr).max(initial=0)) * C
    width = min(N, max(_LEAST_PANEL_COLUMNS, _PANEL_BYTES // max(1, longest * B.itemsize)))
    # The number of threads is limited so that all their panels together take no more memory than the result.
    most = min(_MOST_THREADS, out.nbytes // max(1, longest * (width + R) * B.itemsize))

    def rows_of(first_row: int, end_row: int) -> None:
        """Compute some block rows of `out`, in the columns from `left` to `left + n`."""
        panel = np.empty(longest * n, B.dtype)
        bounds = indptr[first_row : end_row + 1].tolist()
        for i, (first, last) in enumerate(itertools.pairwise(bounds), first_row):
            target = out[i * R : (i + 1) * R, left : left + n]
            if first == last:
                target[...] = 0
                continue
            k = (last - first) * C
            gathered = panel[: k * n]
            # mode="clip" makes NumPy write directly into the panel; the indices are known to be in range
            np.take(columns, indices[first:last], axis=0, out=gathered.reshape(-1, C * n), mode="clip")
            if order is None:
                row = wide(data[first:last].transpose(1, 0, 2).reshape(R, k))
            else:
                row = wide(data[order[first:last]]).reshape(k, R).T
            np.matmul(row, gathered.reshape(k, n), out=target)

    for left in range(0, N, width):
        columns = np.ascontiguousarray(B[:, left : left + width])
        n = columns.shape[1]
        columns = columns.reshape(K // C, C * n)
        flops = 2 * data.size * n
        worthwhile = flops >= max(_PANEL_SHARED, _CALL_SHARED * (len(indptr) - 1))
        threads.share(rows_of, indptr, most=most, worthwhile=worthwhile, blas=True)


def _by_column(blocks: Blocks, block_cols: int) -> tuple[Array, Array, Array]:
    """Return the blocks sorted by block column: their positions, their block rows, and where each column begins."""
    _, indices, indptr = blocks
    n = len(indices)
    order, rows, begins = np.empty(n, indices.dtype), np.empty(n, indices.dtype), np.empty(block_cols + 1, indptr.dtype)
    positions = np.arange(n, dtype=indices.dtype)
    _sparsetools.csr_tocsc(len(indptr) - 1, block_cols, indptr, indices, positions, begins, rows, order)
    return order, rows, begins


ENGINE = HostProducts(HOST)
