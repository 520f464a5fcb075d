"""The checks of ``python -m bsrgemm verify``: results on fresh random data, and what they have to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .._array.arrays import leaf
from .._attention.attention import attention
from .._attention.decode import attention_decode
from .._attention.gradients import attention_backward
from .._attention.kv_cache import KVCache
from .._attention.mask import BlockMask
from .._backend.array_kernels import OPERATIONS
from .._backend.base import Backend
from .._backend.registry import host
from .._products.matmul import matmul
from .._products.sddmm import sddmm
from ..dtypes import (
    BFLOAT16,
    BOOL,
    DEVICE_DTYPES,
    FLOAT8,
    HALF_DTYPES,
    accumulator_dtype,
    is_float,
    result_dtype,
)

HostArray = np.ndarray[Any, Any]


class Case(NamedTuple):
    """One comparison: the result, the expected result, and how far a correct computation may differ."""

    label: str
    got: HostArray
    #: the exact result, or the result in a wider dtype
    want: HostArray
    #: sum of the absolute values of the terms of each element; None: `got` must equal `want`
    size: HostArray | None = None
    #: largest number of terms that are summed in one element
    terms: int = 1
    #: dtype that `got` must have; None: the dtype that is checked
    dtype: np.dtype[Any] | None = None


@dataclass(frozen=True)
class Check:
    """A line of the report: `cases(trial)` for every dtype for which `applies(backend, dtype)`."""

    name: str
    cases: Callable[[Trial], Iterable[Case]]
    applies: Callable[[Backend, np.dtype[Any]], bool] = lambda backend, dtype: True


# -------------------------------------------------------------------------------------- data
def _wide(x: HostArray) -> HostArray:
    """The same values in a dtype whose sums are exact (integers modulo 2^64, booleans as counts) or more precise."""
    if x.dtype.kind == "c":
        return x.astype(np.result_type(x.dtype, np.complex128))
    if is_float(x.dtype):
        return x.astype(np.float64 if x.dtype == BFLOAT16 else np.result_type(x.dtype, np.float64))
    return x.astype(np.uint64)


def _size(x: HostArray) -> HostArray:
    return abs(_wide(x)).astype(np.float64)


class Blocks(NamedTuple):
    """A random matrix as its blocks, on the host."""

    data: HostArray
    row: HostArray
    col: HostArray
    grid: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.grid[0] * self.data.shape[1], self.grid[1] * self.data.shape[2]

    def on(self, backend: Backend, index: type[Any] = np.int32) -> Any:
        """The BSR array of these blocks in `backend`, with the same order and duplicates."""
        indptr = np.searchsorted(self.row, np.arange(self.grid[0] + 1))
        arrays = (self.data, self.col.astype(index), indptr.astype(index))
        return leaf(backend, True)(tuple(backend.from_host(a) for a in arrays), shape=self.shape)

    def dense(self) -> HostArray:
        """The dense matrix, in a wide dtype."""
        return self._sum(_wide(self.data))

    def dense_size(self) -> HostArray:
        """The dense matrix of sums of absolute values."""
        return self._sum(_size(self.data))

    def _sum(self, data: HostArray) -> HostArray:
        out = np.zeros((self.grid[0], self.grid[1], *data.shape[1:]), data.dtype)
        np.add.at(out, (self.row, self.col), data)
        return out.transpose(0, 2, 1, 3).reshape(self.shape)

    def row_terms(self) -> int:
        """The largest number of stored elements in a row."""
        return int(np.max(np.bincount(self.row))) * self.data.shape[2]

    def column_terms(self) -> int:
        """The largest number of stored elements in a column."""
        return int(np.max(np.bincount(self.col))) * self.data.shape[1]


class Trial(NamedTuple):
    """What a check works with: where it computes, where its numbers come from, and the dtype that is checked."""

    backend: Backend
    rng: np.random.Generator
    dtype: np.dtype[Any]

    def put(self, x: HostArray) -> Any:
        """The array where it is computed with."""
        return self.backend.from_host(x)

    def get(self, x: Any) -> HostArray:
        """A result, on the host."""
        return self.backend.to_host(x)

    def values(self, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> HostArray:
        """Random values: integers of the full range (sums wrap), floats of either sign, 0.5 to 2 in magnitude."""
        rng, dtype = self.rng, dtype or self.dtype
        if dtype == BOOL:
            return rng.random(shape) < 0.2
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        real = rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape)
        if dtype.kind == "c":
            return (real + 1j * rng.uniform(-2, 2, shape)).astype(dtype)
        return real.astype(dtype)

    def blocks(
        self,
        block: tuple[int, int],
        grid: tuple[int, int] = (11, 7),
        messy: bool = False,
        dtype: np.dtype[Any] | None = None,
    ) -> Blocks:
        """Random blocks with an empty and a full row; if `messy`, unsorted, and a third of them stored twice."""
        kept = self.rng.random(grid) < 0.4
        kept[0], kept[-1] = False, True
        row, col = np.nonzero(kept)
        if messy:
            again = self.rng.random(len(row)) < 0.3
            row, col = np.append(row, row[again]), np.append(col, col[again])
            order = self.rng.permutation(len(row))
            order = order[np.argsort(row[order], kind="stable")]
            row, col = row[order], col[order]
        return Blocks(self.values((len(row), *block), dtype), row, col, grid)


def _poison(dtype: np.dtype[Any], shape: tuple[int, ...]) -> HostArray:
    """Values that reveal a read, or a missing write: NaN, the largest integer, True."""
    value = True if dtype == BOOL else np.iinfo(dtype).max if dtype.kind in "iu" else np.nan
    return np.full(shape, value, dtype)


def _product(label: str, got: HostArray, A: Blocks, B: HostArray, dtype: np.dtype[Any] | None = None) -> Case:
    return Case(label, got, A.dense() @ _wide(B), A.dense_size() @ _size(B), A.row_terms(), dtype)


# ----------------------------------------------------------------------------- dense products
#: Block sizes for which a thread of gemm_simt computes 1, 2, 4 and 8 rows at a time, with rows left over.
_NARROW, _WIDE = ((1, 3), (5, 4)), ((3, 3), (17, 5))


def _times_vector(t: Trial, blocks: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    for block in blocks:
        A = t.blocks(block)
        x = t.values(A.shape[1:])
        yield _product(f"block {block}", t.get(A.on(t.backend) @ t.put(x)), A, x)
        spread = np.repeat(x, 3)
        strided = t.put(spread)[::3]
        yield _product(f"block {block}, every third element of x", t.get(A.on(t.backend) @ strided), A, x)


def _times_columns(
    t: Trial,
    columns: tuple[int, ...],
    blocks: tuple[tuple[int, int], ...],
    messy: bool = False,
    index: type[Any] = np.int32,
) -> Iterator[Case]:
    for block in blocks:
        A = t.blocks(block, messy=messy)
        for n in columns:
            B = t.values((A.shape[1], n))
            yield _product(f"block {block}, N = {n}", t.get(A.on(t.backend, index) @ t.put(B)), A, B)


def _strided(t: Trial) -> Iterator[Case]:
    A = t.blocks((5, 3))
    rows, columns = slice(None, None, 2), slice(None, None, -3)
    full = t.values((2 * A.shape[1], 3 * 19))
    got = A.on(t.backend) @ t.put(full)[rows, columns]
    yield _product("rows 2 apart, columns -3 apart", t.get(got), A, full[rows, columns])
    B = np.ascontiguousarray(full[rows, columns])
    memory = _poison(t.dtype, (2 * A.shape[0], 3 * 19))
    target = t.put(memory)
    matmul(A.on(t.backend), t.put(B), out=target[rows, columns])
    got = t.get(target)
    yield _product("out: rows 2 apart, columns -3 apart", got[rows, columns], A, B)
    got[rows, columns] = memory[rows, columns]
    yield Case("out: what lies between", got, memory)


def _column_major(t: Trial) -> Iterator[Case]:
    A = t.blocks((4, 6))
    B = t.values((A.shape[1], 21))
    by_columns = t.put(np.ascontiguousarray(B.T)).T
    yield _product("B", t.get(A.on(t.backend) @ by_columns), A, B)
    out = t.put(_poison(t.dtype, (21, A.shape[0]))).T
    matmul(A.on(t.backend), by_columns, out=out)
    yield _product("B and out", t.get(out), A, B)


def _from_the_left(t: Trial) -> Iterator[Case]:
    A = t.blocks((3, 5))
    for shape in ((A.shape[0],), (23, A.shape[0])):
        B = t.values(shape)
        want, size = _wide(B) @ A.dense(), _size(B) @ A.dense_size()
        got = t.get(t.put(B) @ A.on(t.backend))
        yield Case(f"{len(shape)}-D", got, want, size, A.column_terms())


def _transposed(t: Trial) -> Iterator[Case]:
    A = t.blocks((6, 3), messy=True)
    for shape in ((A.shape[0],), (A.shape[0], 20)):
        B = t.values(shape)
        want, size = A.dense().T @ _wide(B), A.dense_size().T @ _size(B)
        got = t.get(A.on(t.backend).T @ t.put(B))
        yield Case(f"{len(shape)}-D", got, want, size, A.column_terms())


def _tensor_blocks(t: Trial) -> Iterator[Case]:
    """Products with blocks that suit the tensor cores: plain, transposed and in batches."""
    for block in ((16, 16), (32, 32), (48, 80), (64, 16), (64, 64), (128, 48)):
        A = t.blocks(block, (7, 5))
        a = A.on(t.backend)
        B = t.values((A.shape[1], 72))
        yield _product(f"block {block}", t.get(a @ t.put(B)), A, B)
        X = t.values((A.shape[0], 72))
        want, size = A.dense().T @ _wide(X), A.dense_size().T @ _size(X)
        yield Case(f"block {block}, A.T", t.get(a.T @ t.put(X)), want, size, A.column_terms())
        got = t.get(a @ t.put(np.stack([B, -B])))
        yield _product(f"block {block}, batch", got[1], A, -B)


def _as_tf32(t: Trial) -> Iterator[Case]:
    for block in ((32, 32), (64, 40)):
        A = t.blocks(block)
        B = t.values((A.shape[1], 40))
        for label, b in (("rows", t.put(B)), ("columns", t.put(np.ascontiguousarray(B.T)).T)):
            case = _product(f"block {block}, B by {label}", t.get(matmul(A.on(t.backend), b, precision="tf32")), A, B)
            # The two factors are rounded to 11 bits instead of 24.
            yield case._replace(terms=case.terms + 2**14)


def _as_fp8(t: Trial) -> Iterator[Case]:
    float32 = np.dtype(np.float32)
    for block in ((16, 16), (64, 32), (128, 128)):
        A = t.blocks(block, dtype=float32)
        B = t.values((A.shape[1], 48), float32).astype(FLOAT8)
        rounded = A._replace(data=A.data.astype(FLOAT8))
        bytes_ = rounded._replace(data=rounded.data.view(np.uint8))
        exact = rounded._replace(data=rounded.data.astype(np.float32))
        got = matmul(bytes_.on(t.backend), t.put(B.view(np.uint8)), scale_a=2.0, scale_b=0.25)
        case = _product(f"block {block}", t.get(got) * 2, exact, B.astype(np.float32), float32)
        # Hopper's tensor cores keep about 13 bits of each fp8 product.
        yield case._replace(terms=case.terms + 2**13)


def _factors(t: Trial) -> Iterator[Case]:
    alpha, beta = {"c": (0.5 - 2j, 1 + 1j), "i": (3, -2), "u": (3, 2), "b": (1, 1)}.get(t.dtype.kind, (-0.5, 3))
    for columns in ((), (9,), (70,)):
        A = t.blocks((4, 4))
        B, C = (t.values((n, *columns)) for n in (A.shape[1], A.shape[0]))
        a, b = A.on(t.backend), t.put(B)
        out = t.put(C)
        matmul(a, b, out=out, alpha=alpha, beta=beta)
        product, size = A.dense() @ _wide(B), A.dense_size() @ _size(B)
        modulo = product.dtype.kind == "u"  # uint64, which NumPy cannot multiply by a negative factor
        product, old = (x.astype(np.int64) if modulo else x for x in (product, _wide(C)))
        want, size = alpha * product + beta * old, abs(alpha) * size + abs(beta) * _size(C)
        label = f"N = {(*columns, 1)[0]}"
        yield Case(label, t.get(out), want, size, A.row_terms() + 3)
        out = t.put(_poison(t.dtype, C.shape))
        matmul(a, b, out=out)
        yield _product(f"{label}, out not read", t.get(out), A, B)


_WIDER = {
    "int8": "int32",
    "uint8": "uint32",
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float64",
}


def _wider_result(t: Trial) -> Iterator[Case]:
    wider = np.dtype(_WIDER[str(t.dtype)])
    for columns in (1, 12):
        A = t.blocks((4, 2))
        B = t.values((A.shape[1], columns))
        got = t.get(matmul(A.on(t.backend), t.put(B), out_dtype=wider))
        yield _product(f"{wider}, N = {columns}", got, A, B, wider)


def _mixed(t: Trial) -> Iterator[Case]:
    A = t.blocks((2, 3), dtype=np.dtype(np.int8))
    B = t.values((A.shape[1], 6))
    exact = A._replace(data=A.data.astype(np.float64))
    result = result_dtype(A.data.dtype, t.dtype)
    yield _product(f"{result}", t.get(A.on(t.backend) @ t.put(B)), exact, B, result)


def _repeated(t: Trial) -> Iterator[Case]:
    A = t.blocks((8, 8), grid=(40, 30)).on(t.backend)
    for columns in (1, 33):
        B = t.put(t.values((A.shape[1], columns)))
        first, second = (t.get(A @ B) for _ in range(2))
        yield Case(f"N = {columns}", first, second)


# ------------------------------------------------------------------------------ sparse results
#: Result blocks have 1 to 256 elements: spgemm_simt uses 1 to 128 threads for each.
_PAIRS = ((1, 1, 1), (1, 2, 2), (2, 3, 2), (2, 2, 3), (3, 3, 3), (5, 5, 5), (6, 7, 8), (16, 3, 16))


def _sparse_product(t: Trial, pairs: tuple[tuple[int, int, int], ...] = _PAIRS) -> Iterator[Case]:
    for R, K, C in pairs:
        A = t.blocks((R, K), messy=R == 3)
        B = t.blocks((K, C), grid=(A.grid[1], 6))
        got = (A.on(t.backend) @ B.on(t.backend)).toarray()
        want, size = A.dense() @ B.dense(), A.dense_size() @ B.dense_size()
        yield Case(f"blocks ({R}, {K}) and ({K}, {C})", t.get(got), want, size, A.row_terms())


def _sampled(t: Trial) -> Iterator[Case]:
    for block in ((3, 2), (16, 16), (64, 32)):
        S = t.blocks(block, (7, 5))
        X, Y = t.values((S.shape[0], 48)), t.values((48, S.shape[1]))
        stored = np.zeros(S.grid, bool)
        stored[S.row, S.col] = True
        stored = stored.repeat(block[0], 0).repeat(block[1], 1)
        want, size = (np.where(stored, x @ y, x.dtype.type(0)) for x, y in ((_wide(X), _wide(Y)), (_size(X), _size(Y))))
        pattern = S.on(t.backend)
        for turn in ("first", "second"):  # which may have other kernels
            got = sddmm(t.put(X), t.put(Y), pattern).toarray()
            yield Case(f"block {block}, {turn} product with the pattern", t.get(got), want, size, 48)


def _sums(t: Trial) -> Iterator[Case]:
    for block in ((1, 1), (5, 3)):
        A = t.blocks(block)
        for axis in (0, 1):
            got = t.get(A.on(t.backend).sum(axis=axis))
            terms = (A.column_terms, A.row_terms)[axis]()
            yield Case(f"block {block}, axis {axis}", got, A.dense().sum(axis), A.dense_size().sum(axis), terms)
        yield Case(f"block {block}, diagonal", t.get(A.on(t.backend).diagonal()), A.dense().diagonal())


def _sparse_sum(t: Trial) -> Iterator[Case]:
    A, B = t.blocks((4, 3)), t.blocks((4, 3))
    got = (A.on(t.backend) + B.on(t.backend)).toarray()
    yield Case("same blocks", t.get(got), A.dense() + B.dense(), A.dense_size() + B.dense_size(), 2)


def _transpose(t: Trial) -> Iterator[Case]:
    for block in ((1, 1), (5, 3)):
        A = t.blocks(block)
        yield Case(f"block {block}", t.get(A.on(t.backend).T.toarray()), A.dense().T)


def _order(t: Trial) -> Iterator[Case]:
    blocks = t.blocks((3, 2), messy=True)
    A, index = blocks.on(t.backend), np.dtype(np.int32)
    A.sort_indices()
    order = np.lexsort((blocks.col, blocks.row))
    yield Case("columns sorted", t.get(A.indices), blocks.col[order], dtype=index)
    yield Case("blocks sorted", t.get(A.data), blocks.data[order])
    A.sum_duplicates()
    once = np.unique(blocks.row * blocks.grid[1] + blocks.col) % blocks.grid[1]
    yield Case("columns once", t.get(A.indices), once, dtype=index)
    yield Case("blocks added", t.get(A.toarray()), blocks.dense(), blocks.dense_size(), 2)


def _through_csr(t: Trial) -> Iterator[Case]:
    for block in ((1, 1), (2, 2), (4, 3)):
        A = t.blocks(block)
        X = A.dense()
        X = (X != 0) if t.dtype == BOOL else X.astype(t.dtype)
        row, col = np.nonzero(X)
        indptr = np.searchsorted(row, np.arange(X.shape[0] + 1)).astype(np.int32)
        arrays = tuple(t.put(a) for a in (X[row, col], col.astype(np.int32), indptr))
        S = t.backend.sparse.csr_matrix(arrays, shape=X.shape)
        B = leaf(t.backend, True)(S, blocksize=block)
        yield Case(f"csr -> bsr, block {block}", t.get(B.toarray()), X)
        C = B.tocsr()
        values, columns, indptr = (t.get(a) for a in (C.data, C.indices, C.indptr))
        Y = np.zeros_like(X)
        Y[np.repeat(np.arange(X.shape[0]), np.diff(indptr)), columns] = values
        yield Case(f"bsr -> csr, block {block}", Y, X)


def _through_coo(t: Trial) -> Iterator[Case]:
    shape, block = (33, 35), (3, 5)
    row, col = (t.rng.integers(0, side, 200) for side in shape)  # some positions occur twice or more
    values = t.values((200,))
    arrays = tuple(t.put(a) for a in (values, row, col))
    A = leaf(t.backend, True)((arrays[0], arrays[1:]), shape=shape, blocksize=block)
    want, size = np.zeros(shape, _wide(values).dtype), np.zeros(shape)
    np.add.at(want, (row, col), _wide(values))
    np.add.at(size, (row, col), _size(values))
    terms = int(np.max(np.bincount(row * shape[1] + col)))
    yield Case("elements added up", t.get(A.toarray()), want, size, terms)


def _through_dense(t: Trial) -> Iterator[Case]:
    X = t.values((24, 36)) * (t.rng.random((24, 36)) < 0.1)
    X = X.astype(t.dtype)
    A = leaf(t.backend, True)(t.put(X), blocksize=(4, 3))
    yield Case("blocks (4, 3)", t.get(A.toarray()), X)
    yield Case("blocks (6, 9)", t.get(A.tobsr((6, 9)).toarray()), X)


# ------------------------------------------------------------------------------- segments, rows
def _segments(t: Trial, op: str) -> Iterator[Case]:
    # Short segments of narrow and wide rows use one thread for an element, long ones one warp.
    for average, shape in ((3, ()), (3, (3, 3)), (3, (5, 9)), (70, (2,))):
        starts, entries = np.unique(np.append(0, t.rng.integers(1, 20 * average, 19))), 20 * average
        values = t.values((entries + 5, *shape))
        if op != "add" and (is_float(t.dtype) or t.dtype.kind == "c"):
            values[t.rng.random(values.shape) < 0.05] = np.nan
        order = t.rng.permutation(len(values))[:entries]
        got = t.backend.segment_reduce(op, *(t.put(a) for a in (values, order, starts)))
        label = f"{len(starts)} segments of {entries} rows of {shape}"
        wide = (_wide(values) if op == "add" or t.dtype == BFLOAT16 else values)[order]
        want = getattr(np, op).reduceat(wide, starts, axis=0)
        size = np.add.reduceat(_size(values)[order], starts, axis=0) if op == "add" else None
        yield Case(label, t.get(got), want, size, int(np.diff(starts, append=entries).max()))


def _expand(t: Trial) -> Iterator[Case]:
    for rows, most in ((1, 9), (1000, 4), (7, 5000)):
        counts = t.rng.integers(0, most, rows)
        indptr = np.append(0, np.cumsum(counts)).astype(t.dtype)
        got = t.backend.expand(t.put(indptr), int(indptr[-1]))
        yield Case(f"{rows} rows", t.get(got), np.repeat(np.arange(rows), counts))


def _inner_product(t: Trial) -> Iterator[Case]:
    for n in (1, 1000, 50_001):
        u, v = t.values((n,)), t.values((n,))
        got = np.asarray(t.get(t.backend.inner_product(t.put(u), t.put(v))))
        yield Case(f"{n} elements", got, np.asarray(np.vdot(_wide(u), _wide(v))), _size(u) @ _size(v), terms=n)


def _softmax(q: HostArray, k: HostArray, v: HostArray, seen: HostArray) -> tuple[HostArray, HostArray]:
    """Attention in float64, and the sums of the absolute values of its terms."""
    group = q.shape[1] // k.shape[1]
    q, k, v = _wide(q), _wide(k).repeat(group, 1), _wide(v).repeat(group, 1)
    scores = np.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]), -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    return weights @ v, weights @ abs(v)


def _attention(t: Trial) -> Iterator[Case]:
    S_q, S_k = 150, 200
    place, key = np.arange(S_q)[:, None] + S_k - S_q, np.arange(S_k)
    blocks = BlockMask.random(S_q, S_k, per_row=2, block=32, device=t.backend.name)
    kinds: dict[str, tuple[HostArray, dict[str, Any]]] = {
        "full": (key >= 0, {}),
        "causal": (key <= place, {"causal": True}),
        "window": ((key >= place - 20) & (key <= place + 3), {"window": (20, 3)}),
        "mask": (t.get(t.backend.xp.asarray(blocks.to_dense())), {"mask": blocks}),
    }
    for D in (64, 128, 36):
        q = (t.values((2, 4, S_q, D)) / 8).astype(t.dtype)
        k, v = (t.values((2, 2, S_k, D)) for _ in range(2))
        there = [t.put(x) for x in (q, k, v)]
        for label, (seen, options) in kinds.items():
            want, size = _softmax(q, k, v, seen)
            got = t.get(attention(*there, **options))
            yield Case(f"{label}, heads of {D}", got, want, size, terms=8 * S_k)


def _gradients(t: Trial) -> Iterator[Case]:
    S = 100
    # Tensor cores round weights, and their gradients, to the dtype before they multiply them.
    terms = 8 * S + round(4 * float(ml_dtypes.finfo(t.dtype).eps / np.finfo(accumulator_dtype(t.dtype)).eps))
    blocks = BlockMask.random(S, per_row=2, block=32, device=t.backend.name)
    kinds: dict[str, tuple[HostArray, dict[str, Any]]] = {
        "full": (np.ones((S, S), bool), {}),
        "causal": (np.tri(S, dtype=bool), {"causal": True}),
        "mask": (t.get(t.backend.xp.asarray(blocks.to_dense())), {"mask": blocks}),
    }
    for D in (64, 256, 36):
        q, dout = ((t.values((1, 4, S, D)) / 8).astype(t.dtype) for _ in range(2))
        k, v = ((t.values((1, 2, S, D)) / 2).astype(t.dtype) for _ in range(2))
        there = t.put(q), t.put(k), t.put(v)
        for label, (seen, options) in kinds.items():
            out, lse = attention(*there, return_lse=True, **options)
            found = attention_backward(t.put(dout), *there, out, lse, **options)
            for name, got, (want, size) in zip(("dq", "dk", "dv"), found, _slopes(q, k, v, dout, seen), strict=True):
                yield Case(f"{name}, {label}, heads of {D}", t.get(got), want, size, terms)


def _slopes(q: HostArray, k: HostArray, v: HostArray, dout: HostArray, seen: HostArray) -> list[Any]:
    """dq, dk and dv of attention in float64, each with the sums of the absolute values of its terms."""
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    q, k, v, dout = _wide(q), _wide(k).repeat(group, 1), _wide(v).repeat(group, 1), _wide(dout)
    scores = np.where(seen, scale * q @ k.swapaxes(2, 3), -np.inf)
    p = np.exp(scores - scores.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    pairs = []
    for of in (lambda x: x, abs):  # the gradients, and what bounds them
        dp = of(dout) @ of(v).swapaxes(2, 3)
        delta = (p * dp).sum(axis=3, keepdims=True)
        ds = scale * p * (dp + delta if of is abs else dp - delta)
        every = ds @ of(k), ds.swapaxes(2, 3) @ of(q), p.swapaxes(2, 3) @ of(dout)
        pairs.append([every[0], *(x.reshape(len(x), -1, group, *x.shape[2:]).sum(axis=2) for x in every[1:])])
    return list(zip(*pairs, strict=True))


def _attention_fp8(t: Trial) -> Iterator[Case]:
    S_q, S_k = 150, 200
    float32 = np.dtype(np.float32)
    place, key = np.arange(S_q)[:, None] + S_k - S_q, np.arange(S_k)
    # Tensor cores round weights to 3 bits of mantissa, an error of at most 1/17, and keep about 13 bits of scores and
    # sums.
    terms = 8 * S_k + (2**20 if t.backend.name == "cuda" else 0)
    for D in (64, 128, 36):
        q, k, v = (t.values((2, h, S, D), float32) for h, S in ((4, S_q), (2, S_k), (2, S_k)))
        q = q / 8
        coded = [x.astype(FLOAT8) for x in (q, k, v)]
        scales = [t.rng.uniform(0.5, 2, x.shape[:2]).astype(np.float32) for x in (q, k, v)]
        wide = [_wide(x.astype(np.float32)) * s[:, :, None, None] for x, s in zip(coded, scales, strict=True)]
        there = [t.put(x.view(np.uint8)) for x in coded]
        given: dict[str, Any] = {f"{name}_scale": t.put(s) for name, s in zip("qkv", scales, strict=True)}
        for label, seen in (("full", key >= 0), ("causal", key <= place)):
            want, size = _softmax(wide[0], wide[1], wide[2], seen)
            got = t.get(attention(there[0], there[1], there[2], causal=label == "causal", **given))
            yield Case(f"{label}, heads of {D}", got, want, size, terms, float32)


def _decode(t: Trial) -> Iterator[Case]:
    for page in (None, 16):
        lengths = (300, 17)
        cache = KVCache(2, 2, 320, 64, dtype=t.dtype, page=page, device=t.backend.name)
        q = (t.values((2, 8, 1, 64)) / 8).astype(t.dtype)
        k, v = (t.values((2, 2, max(lengths), 64)) for _ in range(2))
        cache.append(t.put(k), t.put(v), lengths)
        seen = (np.arange(max(lengths)) < np.array(lengths)[:, None])[:, None, None]
        want, size = _softmax(q, k, v, seen)
        got = t.get(attention_decode(t.put(q), cache))
        yield Case(f"pages of {page}", got, want, size, terms=8 * max(lengths))


#: Values of N for which gemm_simt puts 2, 4, 8, 16 and 32 threads side by side, and 1, 2 and 4 columns in each.
_COLUMNS = {
    2: _NARROW,
    3: _WIDE,
    7: _NARROW,
    13: _WIDE,
    32: _NARROW,
    40: _WIDE,
    300: _NARROW + _WIDE,
}


def _on_tensor_cores(backend: Backend, dtype: np.dtype[Any]) -> bool:
    """Floats and complex numbers, but long doubles: where these are computed by software, they would take too long."""
    return dtype in DEVICE_DTYPES and (is_float(dtype) or dtype.kind == "c")


def _attends(backend: Backend, dtype: np.dtype[Any]) -> bool:
    return is_float(dtype) and dtype.char != "g"


CHECKS: tuple[Check, ...] = (
    Check("A @ x, small blocks", partial(_times_vector, blocks=((1, 1), (2, 7), (3, 3), (8, 2)))),
    Check("A @ x, large blocks", partial(_times_vector, blocks=((9, 2), (12, 5), (16, 16), (20, 17)))),
    *(Check(f"A @ B, N = {n}", partial(_times_columns, columns=(n,), blocks=_COLUMNS[n])) for n in _COLUMNS),
    Check("A @ B, blocks for tensor cores", _tensor_blocks, _on_tensor_cores),
    Check(
        "A @ B, few columns",
        partial(_times_columns, columns=(1, 3, 8), blocks=((16, 32), (64, 64))),
        lambda backend, dtype: dtype in HALF_DTYPES,
    ),
    Check("A @ B as tf32", _as_tf32, lambda backend, dtype: dtype.char == "f"),
    Check("A @ B of fp8", _as_fp8, lambda backend, dtype: dtype.char == "B"),
    Check("A @ B, strided", _strided),
    Check("A @ B, column-major", _column_major),
    Check("A @ B, int64 indices", partial(_times_columns, columns=(1, 10), blocks=((3, 2),), index=np.int64)),
    Check("A @ B, duplicate blocks", partial(_times_columns, columns=(1, 10), blocks=((3, 4),), messy=True)),
    Check("A @ B, same bits twice", _repeated),
    Check("B @ A", _from_the_left),
    Check("A.T @ B", _transposed),
    Check("alpha, beta, out", _factors),
    Check("out_dtype", _wider_result, lambda backend, dtype: str(dtype) in _WIDER),
    Check("int8 A @ B", _mixed, lambda backend, dtype: is_float(dtype)),
    Check("A @ A2", _sparse_product),
    Check("A @ A2, tensor cores", partial(_sparse_product, pairs=((16, 16, 16), (64, 32, 64))), _on_tensor_cores),
    Check("sddmm", _sampled, _on_tensor_cores),
    Check("sums, diagonal", _sums, _on_tensor_cores),
    Check("A + A2", _sparse_sum),
    Check("A.T", _transpose),
    Check("sort, sum_duplicates", _order),
    Check("csr -> bsr -> csr", _through_csr, lambda backend, dtype: dtype in backend.foreign_dtypes),
    Check("coo -> bsr", _through_coo),
    Check("dense -> bsr -> dense", _through_dense),
    *(Check(f"segment {op}", partial(_segments, op=op)) for op in OPERATIONS),
    Check("attention", _attention, _attends),
    Check(
        "gradients of attention",
        _gradients,
        lambda backend, dtype: (backend.name == "cuda" or backend is host()) and _attends(backend, dtype),
    ),
    Check("attention of fp8", _attention_fp8, lambda backend, dtype: dtype.char == "B"),
    Check(
        "attention_decode",
        _decode,
        lambda backend, dtype: (
            (backend.name == "cuda" and dtype in HALF_DTYPES) or (backend is host() and _attends(backend, dtype))
        ),
    ),
    Check("inner products", _inner_product, lambda backend, dtype: dtype.char in "fdFD"),
    Check("expand", _expand, lambda backend, dtype: dtype.char in "il"),
)
