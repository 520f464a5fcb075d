"""Products on the CPU: by BLAS on gathered panels, or by SciPy's compiled loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.sparse import _sparsetools

from .._backend import structure, threads
from .._backend.base import Array, Blocks
from .._backend.numpy_backend import HOST, as_movable
from ..dtypes import BOOL, FP8_VALUES, accumulator_dtype
from .call import ProductCall
from .engine import ProductEngine

#: From this many columns and flops a block row on, BLAS on a gathered panel beats SciPy's loops, which do 3 to 12
#: GFLOP/s on two cores. Of blocks with fewer rows it takes more: BLAS does less with a panel gathered for them.
_PANEL_WIDTH, _PANEL_FLOPS, _PANEL_ROWS = 8, 500_000, 32
#: A gathered panel of B: small enough for the caches, wide enough for BLAS.
_PANEL_BYTES = 4 << 20
_LEAST_PANEL_COLUMNS = 64
#: Columns of a batch multiplied at a time: enough for BLAS, and a copy of no more than that.
_BATCH_COLUMNS = 256
#: Values of A cast or transposed at a time for SciPy's loops.
_LOOP_BYTES = 4 << 20
#: From this many columns on, the loop of CSR is faster by more than putting the values in its order costs.
_CSR_WIDTH = 8
#: Elements times columns of SciPy's loops, and flops of BLAS, from which on threads pay: starting one takes 0.1 ms, and
#: one that finds its core taken (by a BLAS that waits for more work, say) is waited for. But threads that call BLAS for
#: fewer flops than the last at a time wait for the interpreter more than they multiply.
_LOOP_SHARED, _PANEL_SHARED, _CALL_SHARED = 4_000_000, 50_000_000, 2_000_000
_MOST_THREADS = 64
#: Pairs of blocks multiplied at a time in a sparse product: bounds the gathered copies.
_PAIR_BYTES = 1 << 26

_Cast = Callable[[Array], Array]


class HostProducts(ProductEngine):
    """Products of NumPy arrays."""

    def multiply_dense(self, call: ProductCall) -> None:
        A, B, out, acc = call.matrix, call.B, call.out, call.acc
        alpha, beta, transposed = call.alpha, call.beta, call.transposed
        (M, N), (_, R, C) = A._shape, A.data.shape
        blocks = self.backend.validated(A._blocks, M // R, N // C)

        def wide(x: Array) -> Array:
            """Stored values in the dtype of the sums."""
            return np.take(FP8_VALUES, x) if call.fp8 else x.astype(acc, copy=False)

        def multiply(B: Array, out: Array) -> None:
            """The product of one matrix, or of several: (K, n, N) times A gives (M, n, N)."""
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
                    np.multiply(out, _number(acc, beta), out=out)
                _multiply_loops(
                    blocks, (flat if alpha == 1 else -flat).ravel(), out.reshape(-1), width, transposed, wide
                )
                return
            direct = direct and beta == 0
            product = out if direct else np.empty(out.shape, acc)
            _multiply(blocks, flat, product.reshape(rows, width), transposed, wide)
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

        if B.ndim == 2:
            multiply(B, out)
            return
        together = max(1, _BATCH_COLUMNS // max(1, B.shape[2]))
        for first in range(0, len(B), together):
            batch = slice(first, first + together)
            multiply(B[batch].transpose(1, 0, 2), out[batch].transpose(1, 0, 2))

    def overlapping(self, out: Array, X: Array, A: Any) -> int | None:
        for number, array in enumerate((X, A.data, A.indices, A.indptr)):
            if np.may_share_memory(out, array):
                return number
        return None

    def pair_products(
        self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
    ) -> Array:
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
        """By BLAS, one block row at a time: its rows of X times the columns of Y that its blocks meet."""
        acc = accumulator_dtype(dtype)
        (R, C), K = block, X.shape[1]
        out = np.empty((len(indices), R, C), dtype)
        columns = np.ascontiguousarray(Y.T, acc).reshape(Y.shape[1] // C, C * K)
        together = max(1, _PANEL_BYTES // max(1, C * K * acc.itemsize))  # blocks of a panel

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

    def multiply_sparse(self, a: Blocks, b: Blocks, block_cols: int, dtype: np.dtype[Any]) -> Blocks:
        if dtype not in self.backend.foreign_dtypes:
            return super().multiply_sparse(a, b, block_cols, dtype)
        rows, inner_rows = len(a.indptr) - 1, len(b.indptr) - 1
        a, b = self.backend.validated(a, rows, inner_rows), self.backend.validated(b, inner_rows, block_cols)
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


def _multiply(blocks: Blocks, B: Array, out: Array, transposed: bool, wide: _Cast) -> None:
    """``out = A @ B`` or ``A.T @ B`` in the dtype of B and `out`, which is contiguous."""
    rows, width = out.shape
    if _by_loops(blocks, rows, width, out.dtype, transposed):
        out[...] = 0
        _multiply_loops(blocks, B.ravel(), out.reshape(-1), width, transposed, wide)
    else:
        _multiply_panels(blocks, np.ascontiguousarray(B), out, transposed, wide)


def _by_loops(blocks: Blocks, rows: int, width: int, dtype: np.dtype[Any], transposed: bool) -> bool:
    """Are SciPy's loops faster than BLAS on panels, or all there is?"""
    side = blocks.data.shape[2 if transposed else 1]
    flops = (4 if dtype.char in "FD" else 2) * blocks.data.size * width / max(1, rows // side)  # of a block row
    full = min(1, side / _PANEL_ROWS) ** 2
    return width < max(2, _PANEL_WIDTH) or dtype.char not in "fdFD" or flops * full < _PANEL_FLOPS


def _multiply_loops(blocks: Blocks, x: Array, y: Array, width: int, transposed: bool, wide: _Cast) -> None:
    """``y += A @ x`` or ``A.T @ x`` by SciPy's loops, `x` and `y` being matrices of `width` columns, flat.

    Values that must be cast, transposed or put in the order of CSR are so by a few block rows at a time.
    """
    data, indices, indptr = blocks
    block_rows = len(indptr) - 1
    _, R, C = data.shape
    block_cols = (len(y) if transposed else len(x)) // max(1, width * C)
    single = R == C == 1  # CSR, whose transpose is CSC with the same arrays
    plain = data.dtype == y.dtype
    if transposed and plain and single:
        _loop("csc", (block_cols, block_rows), (), width, indptr, indices, data.ravel(), x, y)
        return
    by_rows = width >= _CSR_WIDTH and not single and not transposed
    most = max(block_cols if transposed else 1, _LOOP_BYTES // (R * C * y.itemsize))

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

    def some(first: int, last: int, start: int, stop: int) -> None:
        """A few block rows."""
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
        else:
            turned, columns = np.empty_like(values), np.empty(block_cols + 1, indptr.dtype)
            rows = np.empty(stop - start, indices.dtype)
            _sparsetools.bsr_transpose(
                count, block_cols, R, C, *pattern, as_movable(values), columns, rows, as_movable(turned)
            )
            _loop("bsr", (block_cols, count), (C, R), width, columns, rows, wide(turned).ravel(), x[here], y)

    # What is transposed adds to all of y: it stays in one thread.
    worthwhile = not transposed and data.size * width >= _LOOP_SHARED
    threads.share(rows_of, indptr, most=_MOST_THREADS, worthwhile=worthwhile, blas=False)


def _as_csr(indptr: Array, indices: Array, values: Array, block_cols: int) -> tuple[Array, Array, Array]:
    """Blocks as CSR, whose loop over columns of B is the faster one."""
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
    """``out = A @ B`` by BLAS, one block row at a time: its blocks side by side times the rows of B that they meet.

    ``A.T @ B`` likewise, one block column of A at a time: BLAS reads its blocks, one below the other, transposed.
    Beside the operands each thread holds one gathered panel of B and one row or column of A.
    """
    data, indices, indptr = blocks
    (_, R, C), (K, N) = data.shape, B.shape
    order = None
    if transposed:
        order, indices, indptr = _by_column(blocks, len(out) // C)
        R, C = C, R
    longest = int(np.diff(indptr).max(initial=0)) * C
    width = min(N, max(_LEAST_PANEL_COLUMNS, _PANEL_BYTES // max(1, longest * B.itemsize)))
    # Together the panels take no more than the result.
    most = min(_MOST_THREADS, out.nbytes // max(1, longest * (width + R) * B.itemsize))

    def rows_of(first_row: int, end_row: int) -> None:
        """Some rows of `out`, in the columns from `left` to `left + n`."""
        panel = np.empty(longest * n, B.dtype)
        bounds = indptr[first_row : end_row + 1].tolist()
        for i, (first, last) in enumerate(itertools.pairwise(bounds), first_row):
            target = out[i * R : (i + 1) * R, left : left + n]
            if first == last:
                target[...] = 0
                continue
            k = (last - first) * C
            gathered = panel[: k * n]
            # "clip" writes straight into the panel; the indices are known to be in range
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
    """The blocks column by column: (their positions, their block rows, where each column begins)."""
    _, indices, indptr = blocks
    n = len(indices)
    order, rows, begins = np.empty(n, indices.dtype), np.empty(n, indices.dtype), np.empty(block_cols + 1, indptr.dtype)
    positions = np.arange(n, dtype=indices.dtype)
    _sparsetools.csr_tocsc(len(indptr) - 1, block_cols, indptr, indices, positions, begins, rows, order)
    return order, rows, begins


def _number(dtype: np.dtype[Any], x: Any) -> Any:
    """alpha or beta in the dtype of the sums; integers wrap as the sums do."""
    if dtype.kind not in "iu":
        return dtype.type(x)
    return np.array(int(x) % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)[()]


ENGINE = HostProducts(HOST)
