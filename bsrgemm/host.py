"""The CPU home: NumPy arrays, SciPy's sparse classes, SciPy's compiled products."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import scipy.sparse
from scipy._lib._sparse import SparseABC
from scipy.sparse import _sparsetools

from .dtypes import BOOL, HALF_DTYPES, HOST_DTYPES, accumulator_dtype
from .homes import Array, Home

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
        product = self._product(A, B.astype(acc, copy=False), acc)
        if acc != BOOL and alpha != 1:
            product *= acc.type(alpha)
        if beta == 0:
            out[...] = product
        elif acc == BOOL:
            out |= product
        else:
            out[...] = product + acc.type(beta) * out.astype(acc, copy=False)

    @staticmethod
    def _product(A: Any, B: Array, acc: np.dtype[Any]) -> Array:
        (M, N), (R, C) = A.shape, A.blocksize
        out = np.zeros((M, B.shape[1]), acc)
        index = np.result_type(A.indptr.dtype, A.indices.dtype)
        indptr, indices = A.indptr.astype(index, copy=False), A.indices.astype(index, copy=False)
        data = A.data.astype(acc, copy=False)
        if out.size and N and data.size:
            _sparsetools.bsr_matvecs(
                M // R, N // C, B.shape[1], R, C, indptr, indices, data.ravel(), B.ravel(), out.ravel()
            )
        return out

    def pair_products(
        self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any]
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
            summed = self.segment_reduce("add", products, None, starts[first:last] - starts[first])
            out[first:last] = summed.astype(dtype, copy=False)
            first = last
        return out


HOST = NumpyHome()
