"""Cases of indexing, assignment, diagonals, selection, assembly and of changes of the structure."""

from __future__ import annotations

from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.dtypes import BOOL

from ..strategies import INEXACT, Sample, magnitude, rounding, widened
from .case import Case, kind
from .samples import bsr, flavour, here, holds, like, sample, values


def _window(case: Case, side: int, block: int) -> slice:
    low, high = sorted(int(x) for x in case.rng.integers(0, side // block, 2, endpoint=True))
    return slice(low * block, high * block)


@kind("array.slices")
def slices(case: Case) -> None:
    a, cls = sample(case), flavour(case)
    A = bsr(case, a, cls)
    rows, cols = (_window(case, n, b) for n, b in zip(a.shape, a.blocksize, strict=True))
    key = case.pick(((rows, cols), (rows, slice(None)), (Ellipsis, cols)))
    case.same_matrix(f"A[{key}]", A[key], a.dense[key], a.bound[key])
    if cls is bg.bsr_matrix and holds(case, a.dtype):
        i, j = case.number_from(0, a.shape[0] - 1), case.number_from(0, a.shape[1] - 1)
        row = A.getrow(i)
        case.same("getrow", (row if case.place.is_host else row.get()).toarray(), a.dense[[i]], a.bound[[i]])
        if a.blocksize == (1, 1):
            case.same("getcol", A.getcol(j).toarray(), a.dense[:, [j]], a.bound[:, [j]])


@kind("array.assign")
def assign(case: Case) -> None:
    a = sample(case)
    A = bsr(case, a)
    key = tuple(_window(case, n, b) for n, b in zip(a.shape, a.blocksize, strict=True))
    stored = a.layers[key] > 0
    value = np.where(stored, values(case, stored.shape, a.dtype), np.zeros((), a.dtype)).astype(a.dtype)
    A[key] = here(case, value)
    want, bound = a.dense.copy(), a.bound.copy()
    want[key], bound[key] = widened(value), 0.0
    case.same_matrix("A[key] = X", A, want, bound)
    A[key] = 0
    want[key] = 0
    case.same_matrix("A[key] = 0", A, want, bound)


@kind("array.diagonal")
def diagonals(case: Case) -> None:
    a = sample(case)
    A, (M, N) = bsr(case, a), a.shape
    k = case.number_from(1 - M, N - 1)
    want = a.dense.diagonal(k)
    case.same(f"diagonal({k})", A.diagonal(k), want, a.bound.diagonal(k))
    weight, terms = a.weight.diagonal(k).sum(), int(a.layers.diagonal(k).sum()) + len(want) + 8
    off = rounding(a.dtype, weight, terms) if a.dtype in INEXACT else 0.0
    # 16-bit floats of a diagonal may be added up in their own dtype.
    coarse = 2**-7 * weight * terms if a.dtype.itemsize == 2 and a.dtype in INEXACT else 0.0
    case.same(f"trace({k})", A.trace(offset=k), want.sum(), max(off, coarse))
    v = values(case, (len(want),), a.dtype)
    A.setdiag(here(case, v), k=k)
    full, bound = a.dense.copy(), a.bound.copy()
    at = (np.arange(len(v)) - min(k, 0), np.arange(len(v)) + max(k, 0))
    full[at], bound[at] = widened(v), 0.0
    case.same_matrix(f"setdiag({k})", A, full, bound)


def _flat(tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    n, R, m, C = tiles.shape
    return tiles.reshape(n * R, m * C)


@kind("array.select")
def select(case: Case) -> None:
    a, cls = sample(case), flavour(case)
    (R, C), A = a.blocksize, bsr(case, a, cls)
    tiles = [x.reshape(a.shape[0] // R, R, a.shape[1] // C, C) for x in (a.dense, a.bound)]
    keys: list[Any] = []
    for n in (tiles[0].shape[0], tiles[0].shape[2]):
        chosen = case.rng.integers(-n, n, case.number_from(0, 6))
        keys.append(case.pick((chosen, None, case.rng.random(n) < 0.5, slice(None, None, 2))))
    rows, cols = (slice(None) if key is None else key for key in keys)
    want, off = (_flat(x[rows][:, :, cols]) for x in tiles)
    given = [here(case, key) if isinstance(key, np.ndarray) and case.chance(0.5) else key for key in keys]
    case.same_matrix("select_blocks", A.select_blocks(*given), want, off)


@kind("array.assemble", 2)
def assemble(case: Case) -> None:
    a = sample(case, messy=case.chance(0.2))
    A, n = bsr(case, a), 0 if not len(a.data) else case.number_from(0, 40)
    which = case.rng.integers(0, max(len(a.data), 1), n)
    row, col = a.block_rows[which] if n else which, a.indices[which] if n else which
    blocks = values(case, (n, *a.blocksize), a.dtype)
    more = Sample(
        blocks[np.argsort(row, kind="stable")],
        np.asarray(col)[np.argsort(row, kind="stable")].astype(a.indices.dtype),
        np.searchsorted(np.sort(row), np.arange(len(a.indptr))).astype(a.indptr.dtype),
        a.shape,
    )
    on_host = case.chance(0.3)
    places = [x if on_host else here(case, np.asarray(x)) for x in (row, col)]
    check = case.pick((None, True, False))
    case.true("assemble returns A", A.assemble(here(case, blocks), *places, check=check) is A)
    bound = 0.0
    if a.dtype in INEXACT:
        bound = rounding(a.dtype, a.weight + more.weight, a.layers + more.layers + 2) + a.bound
    case.same_matrix("assemble", A, a.dense + more.dense, bound)


@kind("array.order")
def order(case: Case) -> None:
    a = sample(case, messy=True)
    A = bsr(case, a)
    S = A.sorted_indices()
    case.true("sorted", case.place.blocks(S).is_sorted)
    case.same_matrix("sorted_indices", S, a.dense, a.bound)
    A.sort_indices()
    case.true("flag", A.has_sorted_indices)
    case.same_matrix("sort_indices", A, a.dense, a.bound)
    A.sum_duplicates()
    case.true("canonical", A.has_canonical_format and case.place.blocks(A).is_canonical)
    case.same_matrix("sum_duplicates", A, a.dense, a.bound)
    A.eliminate_zeros()
    case.same_matrix("eliminate_zeros", A, a.dense, a.bound)
    A.prune()
    case.same_matrix("prune", A, a.dense, a.bound)


@kind("array.shape")
def shape(case: Case) -> None:
    a = sample(case)
    A, (R, C), (M, N) = bsr(case, a), a.blocksize, a.shape
    if holds(case, a.dtype):
        rows = case.pick([k for k in range(1, 40) if M * N % k == 0])
        how = case.pick(("C", "F"))
        B = A.reshape(rows, -1, order=how)
        got = (B if case.place.is_host else B.get()).toarray() if rows != M else case.host(B.toarray())
        case.same("reshape", got, a.dense.reshape(rows, -1, order=how), a.bound.reshape(rows, -1, order=how))
    m, n = case.number_from(1, 8) * R, case.number_from(1, 8) * C
    A.resize(m, n)
    want, bound = np.zeros((m, n), a.dense.dtype), np.zeros((m, n))
    i, j = min(m, M), min(n, N)
    want[:i, :j], bound[:i, :j] = a.dense[:i, :j], a.bound[:i, :j]
    case.same_matrix("resize", A, want, bound)


@kind("array.block_diagonal")
def block_diagonals(case: Case) -> None:
    R = case.pick(case.pool.array_blocks)[0]
    dtype, n = case.pick(case.pool.arrays), case.number_from(1, 6)
    a = sample(case, dtype, (R, R), (n, n))
    A = bsr(case, a)
    i = np.arange(n)
    blocks, off = (x.reshape(n, R, n, R)[i, :, i] for x in (a.dense, a.bound))
    case.same("block_diagonal", A.block_diagonal(), blocks, off)
    D = values(case, ((n,), (n, R), (n, R, R))[case.number_from(0, 2)], dtype)
    full = widened(D)
    if D.ndim < 3:
        full = full.reshape(n, -1, 1) * np.eye(R, dtype=full.dtype)
    left = np.einsum("iab,ibjc->iajc", full, a.dense.reshape(n, R, n, R)).reshape(n * R, n * R)
    bound: Any = 0.0
    if dtype in INEXACT:
        weight = np.einsum("iab,ibjc->iajc", magnitude(full), a.weight.reshape(n, R, n, R)).reshape(n * R, n * R)
        bound = rounding(dtype, weight, a.layers.max(initial=0) * R + 8) * (1 + a.deepest)
    if dtype != BOOL:
        case.same_matrix("scale_block_rows", A.scale_block_rows(here(case, D)), left, bound)
        T = bsr(case, a.T)
        turned = D.transpose(0, 2, 1) if D.ndim == 3 else D
        got = T.scale_block_cols(here(case, np.ascontiguousarray(turned)))
        case.same_matrix("scale_block_cols", got, left.T, bound if np.ndim(bound) == 0 else bound.T)
    if dtype in INEXACT and dtype.itemsize > 2:
        E = A + bg.eye(n * R, blocksize=(R, R), dtype=dtype, device=case.place.backend.name) * 50
        inverse = case.host(E.inverse_block_diagonal().data)
        want = np.linalg.inv(widened(case.host(E.block_diagonal())))
        case.same("inverse_block_diagonal", inverse, want, 200 * R * float(np.finfo(dtype).eps))


@kind("array.twins", 0.5)
def twins(case: Case) -> None:
    """Two matrices that share index arrays: a change of one is no change of the other."""
    a = sample(case, messy=False)
    b = like(case, a)
    A = bsr(case, a)
    B = A.copy() if case.chance(0.5) else bg.bsr_array((A.data.copy(), A.indices, A.indptr), shape=a.shape)
    B.sum_duplicates()
    C = A + bsr(case, b)
    B.data[...] = B.data.copy()
    case.same_matrix("the twin", B, a.dense, a.bound)
    case.same_matrix("the first", A, a.dense, a.bound)
    case.true("the sum", C.shape == a.shape)
