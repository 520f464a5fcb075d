"""Cases of construction and conversion: every way into a matrix and out of it gives the values that went in."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.dtypes import BOOL, HALF_DTYPES

from ..strategies import INEXACT, Sample, random_values, result_dtype, rounding, widened
from .case import Case, kind
from .samples import bsr, flavour, here, holds, like, operand, refused, sample, values


def _divisor(case: Case, n: int) -> int:
    return int(case.pick([k for k in range(1, 18) if n % k == 0]))


@kind("array.describe")
def describe(case: Case) -> None:
    a, cls = sample(case), flavour(case)
    A = bsr(case, a, cls)
    A.check_format(full_check=case.chance(0.5))
    case.true("attributes", (A.shape, A.blocksize, A.dtype, A.ndim) == (a.shape, a.blocksize, a.dtype, 2))
    case.true("counts", A.nnz == A.size == a.data.size and A.format == "bsr")
    blocks = (a.shape[0] // a.blocksize[0]) * (a.shape[1] // a.blocksize[1])
    case.same("density", A.density, len(a.data) / blocks, 1e-12)
    case.true("bytes", A.nbytes == A.data.nbytes + A.indices.nbytes + A.indptr.nbytes)
    case.true("module", bg.get_array_module(A.data) is case.place.xp and A.device is not None)
    case.true("text", "Block" in repr(A) and len(str(A)) >= 0)
    case.true("device", bg.default_device() in ("cpu", "cuda"))
    if a.shape == (1, 1):
        case.true("truth", bool(A) == (A.nnz != 0))  # as in scipy, a zero that is stored counts
    else:
        refused(case, ValueError, lambda: bool(A))
    if cls is bg.bsr_matrix:
        case.true("names", A.getformat() == "bsr" and A.getmaxprint() > 0 and A.get_shape() == a.shape)
        case.true("stored", A.getnnz() == A.nnz)
        A.set_shape(a.shape)
        case.same_matrix("asfptype", A.asfptype(), a.dense, a.bound)
        case.same_matrix("getH", A.getH(), a.dense.conj().T, a.bound.T)
    else:
        refused(case, TypeError, lambda: len(A))


@kind("array.blocks")
def from_blocks(case: Case) -> None:
    a = sample(case, messy=True)
    order = case.rng.permutation(len(a.data))
    parts = [here(case, x[order]) for x in (a.data, a.block_rows, a.indices)]
    A = flavour(case)((parts[0], (parts[1], parts[2])), shape=a.shape)
    case.same_matrix("blocks and their places", A, a.dense, a.bound)


@kind("array.elements")
def from_elements(case: Case) -> None:
    dtype, (R, C) = case.pick(case.pool.arrays), case.pick(case.pool.array_blocks)
    shape, n = (R * case.number_from(1, 6), C * case.number_from(1, 6)), case.number_from(0, 60)
    row, col = case.rng.integers(0, shape[0], n), case.rng.integers(0, shape[1], n)
    v = values(case, (n,), dtype)
    A = bg.bsr_array((here(case, v), (here(case, row), here(case, col))), shape=shape, blocksize=(R, C))
    want, weight = np.zeros(shape, widened(v).dtype), np.zeros(shape)
    np.add.at(want, (row, col), widened(v))
    np.add.at(weight, (row, col), abs(v.astype(np.complex128)))
    case.same_matrix("elements", A, want, rounding(dtype, weight, 60) if dtype in INEXACT else 0.0)


@kind("array.dense")
def from_dense(case: Case) -> None:
    a = sample(case)
    x = operand(case, a.shape, a.dtype)
    X = case.place.operand(x)
    case.same_matrix("dense", flavour(case)(X, blocksize=a.blocksize), widened(x.values))
    kept = bg.from_dense(X, a.blocksize, threshold=0.75)
    (R, C), wide = a.blocksize, widened(x.values)
    tall = abs(wide.reshape(a.shape[0] // R, R, a.shape[1] // C, C)) > 0.75
    stays = np.repeat(np.repeat(tall.any(axis=(1, 3)), R, 0), C, 1)
    case.same_matrix("threshold", kept, np.where(stays, wide, np.zeros((), wide.dtype)))
    A = bsr(case, a)
    order = case.pick((None, "C", "F"))
    case.same("toarray", A.toarray(order=order), a.dense, a.bound)
    case.same("todense", A.todense(), a.dense, a.bound)
    out = case.place.operand(operand(case, a.shape, a.dtype))
    case.true("out", A.toarray(out=out) is out)
    case.same("toarray(out=)", out, a.dense, a.bound)


@kind("array.formats")
def other_formats(case: Case) -> None:
    a = sample(case)
    if not holds(case, a.dtype):
        a = Sample(random_values(case.rng, a.data.shape, np.dtype(np.float32)), a.indices, a.indptr, a.shape)
    cls = flavour(case)
    A = bsr(case, a, cls)
    names = ["csr", "csc", "coo"] + (["dia", "lil", "dok"] if case.place.is_host else [])
    name = case.pick(names)
    S = A.asformat(name) if case.chance(0.3) else getattr(A, f"to{name}")()
    case.same(f"to{name}", np.asarray((S if case.place.is_host else S.get()).toarray()), a.dense, a.bound)
    if name in ("csr", "csc", "coo"):
        block = (_divisor(case, a.shape[0]), _divisor(case, a.shape[1]))
        case.same_matrix(f"from {name} in blocks of {block}", cls(S, blocksize=block), a.dense, a.bound)


@kind("array.copies")
def copies(case: Case) -> None:
    a = sample(case)
    A = bsr(case, a, flavour(case))
    block = (_divisor(case, a.shape[0]), _divisor(case, a.shape[1]))
    case.same_matrix(f"tobsr({block})", A.tobsr(block), a.dense, a.bound)
    ways = (A.copy, lambda: copy.copy(A), lambda: copy.deepcopy(A), lambda: pickle.loads(pickle.dumps(A)))
    B = case.pick(ways)()
    before = case.host(A.data).copy()
    B.data[...] = 0
    case.same("a copy", B.toarray(), np.zeros_like(a.dense))
    case.same("what was copied", A.data, widened(before))
    G = A.get()
    case.same("get", G.toarray(), a.dense, a.bound)
    case.same_matrix("to_device", G.to_device(case.place.backend.name), a.dense, a.bound)
    dtype = case.pick([d for d in case.pool.arrays if a.dtype.kind != "c" or d.kind in "c"])
    if a.is_canonical and dtype.kind not in "iu" and a.dtype != BOOL:
        want = widened(a.dense.astype(a.dtype).astype(dtype))
        case.same_matrix(f"astype({dtype})", A.astype(dtype), want)


@kind("array.files")
def files(case: Case) -> None:
    a = sample(case)
    A = bsr(case, a)
    file = io.BytesIO()
    bg.save_npz(file, A, compressed=case.chance(0.2))
    file.seek(0)
    B = bg.load_npz(file, device=case.place.backend.name)
    case.true("dtype", B.dtype == a.dtype and B.blocksize == a.blocksize)
    case.same_matrix("load_npz(save_npz)", B, a.dense, a.bound)


@kind("array.create")
def create(case: Case) -> None:
    dtype, (R, C), device = case.pick(case.pool.arrays), case.pick(case.pool.array_blocks), case.place.backend.name
    m, n, k = case.number_from(1, 6), case.number_from(1, 6), case.number_from(-4, 4)
    E = bg.eye(m * R, n * C, k=k, blocksize=(R, C), dtype=dtype, device=device)
    case.same_matrix("eye", E, widened(np.eye(m * R, n * C, k).astype(dtype)))
    A = bg.random(m * R, n * C, blocksize=(R, C), density=0.4, seed=case.number, dtype=dtype, device=device)
    B = bg.random(m * R, n * C, blocksize=(R, C), density=0.4, seed=case.number, dtype=dtype)
    case.same_matrix("random", A, widened(B.toarray()))
    case.true("random: blocks", len(A.data) == len(B.data) == round(0.4 * m * n))
    offsets = case.rng.permutation(np.arange(1 - m, m))[: case.number_from(1, 3)]
    diagonals = [values(case, (m - abs(int(o)), R, C), dtype) for o in offsets]
    D = bg.diags([here(case, d) for d in diagonals], offsets=[int(o) for o in offsets], shape=(m * R, m * C))
    want = np.zeros((m, m, R, C), widened(diagonals[0]).dtype)
    for offset, blocks in zip(offsets.tolist(), diagonals, strict=True):
        i = np.arange(len(blocks)) - min(offset, 0)
        want[i, i + offset] = widened(blocks)
    case.same_matrix("diags", D, want.transpose(0, 2, 1, 3).reshape(m * R, m * C))


@kind("array.stack")
def stack(case: Case) -> None:
    a = sample(case)
    b, c = like(case, a), like(case, a)
    A, B, C = (bsr(case, x) for x in (a, b, c))
    case.same_matrix("vstack", bg.vstack([A, B]), np.vstack([a.dense, b.dense]), np.vstack([a.bound, b.bound]))
    case.same_matrix("hstack", bg.hstack([A, B]), np.hstack([a.dense, b.dense]), np.hstack([a.bound, b.bound]))
    zero = np.zeros_like(a.dense)
    grid = np.block([[a.dense, zero], [b.dense, c.dense]])
    off = np.block([[a.bound, zero.real * 0.0], [b.bound, c.bound]])
    case.same_matrix("block_array", bg.block_array([[A, None], [B, C]]), grid, off)
    both = np.block([[a.dense, zero], [zero, b.dense]])
    off = np.block([[a.bound, zero.real * 0.0], [zero.real * 0.0, b.bound]])
    case.same_matrix("block_diag", bg.block_diag([A, B]), both, off)
    X = values(case, (2, 2), a.dtype)
    dtype = result_dtype(a.dtype, X.dtype)
    bound = np.kron(a.bound, abs(X.astype(np.complex128))) if dtype in INEXACT else 0.0
    if dtype in HALF_DTYPES:
        bound = bound + rounding(dtype, np.kron(a.weight, abs(X.astype(np.float64))), 4)
    case.same_matrix("kron", bg.kron(A, here(case, X)), np.kron(a.dense, widened(X)), bound)


@kind("array.transpose")
def transposes(case: Case) -> None:
    a = sample(case)
    A = bsr(case, a)
    ways: dict[str, Any] = {
        "T": lambda: A.T,
        "mT": lambda: A.mT,
        "transpose": lambda: A.transpose(copy=case.chance(0.5)),
    }
    name = case.pick(list(ways))
    T = ways[name]()
    case.same_matrix(name, T, a.dense.T, a.bound.T)
    case.same_matrix("H", A.H if hasattr(A, "H") else A.conj().T, a.dense.conj().T, a.bound.T)
    case.same_matrix("twice", T.T, a.dense, a.bound)
    case.same_matrix("conj", A.conj(), a.dense.conj(), a.bound)
    case.same_matrix("conjugate", A.conjugate(copy=False), a.dense.conj(), a.bound)
    case.same_matrix("real", A.real, a.dense.real, a.bound)
    case.same_matrix("imag", A.imag, a.dense.imag, a.bound)
