"""Everyday operations on the CPU beside those of scipy's bsr_array and csr_array: one row for each operation.

A mesh with 3 x 3 blocks, a matrix of wide blocks, and a tiny one, where the cost of a call is all that counts, in CPU
time: set OPENBLAS_NUM_THREADS=1, or all threads of BLAS count. The peer is the faster of scipy's two formats. What a
matrix of scipy has remembered of its indices is forgotten before each call, because bsrgemm looks at them each time.
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg

import bsrgemm as bg

from ..data import as_scipy
from ..measure import Row, Run
from ..report import Column, duration, times
from ..study import Study

#: name: (block rows, side of a block, blocks in a row, dtype)
MATRICES = {"mesh": (32_667, 3, 26, "float64"), "wide": (64, 64, 14, "float32"), "tiny": (4, 3, 2, "float64")}
#: Runs of each, and seconds after which no further run is begun
_RUNS, _MOST_SECONDS = 7, 1.0
#: Seconds of a run: shorter calls are repeated
_LEAST_RUN = 2e-4


def matrix(rows: int, side: int, each: int, dtype: str, seed: int) -> Any:
    """Random values on a pattern of bands, the same pattern for every seed."""
    columns = (np.arange(rows)[:, None] + np.arange(each) * max(1, rows // 4700)) % rows
    data = np.random.default_rng(seed).standard_normal((rows * each, side, side)).astype(dtype)
    indptr = (np.arange(rows + 1) * each).astype(np.int32)
    A = bg.bsr_array((data, np.sort(columns, axis=1).reshape(-1).astype(np.int32), indptr), shape=(rows * side,) * 2)
    A.sum_duplicates()
    return A


def cpu_seconds(call: Callable[[], Any]) -> float:
    """The least CPU time of several runs."""
    call()
    begin = time.process_time()
    call()
    once = time.process_time() - begin
    repeats = max(1, int(_LEAST_RUN / max(once, 1e-7)))
    least, spent = float("inf"), 0.0
    for _ in range(_RUNS):
        begin = time.process_time()
        for _ in range(repeats):
            call()
        run = time.process_time() - begin
        least, spent = min(least, run / repeats), spent + run
        if spent > _MOST_SECONDS and least < float("inf") and _ >= 2:
            break
    return least


_SCIPY = {
    name: SimpleNamespace(
        make=make, norm=scipy.sparse.linalg.norm, vstack=partial(sp.vstack, format="bsr"),
        hstack=partial(sp.hstack, format="bsr"),
    )
    for name, make in (("scipy bsr", sp.bsr_array), ("scipy csr", sp.csr_array))
}  # fmt: skip
_OURS = SimpleNamespace(make=bg.bsr_array, norm=bg.norm, vstack=bg.vstack, hstack=bg.hstack)
#: The operands of one kind of matrix, and `of`: the functions of its library that are no methods
Case = Any


_BSR = ("scipy bsr",)
_BOTH = ("scipy bsr", "scipy csr")
#: what: (call, peers that do the same work)
OPERATIONS: dict[str, tuple[Callable[[Case], Any], tuple[str, ...]]] = {
    "A @ x": (lambda c: c.A @ c.x, _BOTH),
    "A @ X, 8 columns": (lambda c: c.A @ c.X, _BOTH),
    "A.T @ x": (lambda c: c.A.T @ c.x, _BOTH),
    "A.T @ X, 8 columns": (lambda c: c.A.T @ c.X, _BOTH),
    "x @ A": (lambda c: c.x @ c.A, _BOTH),
    "A @ A": (lambda c: c.A @ c.A, _BOTH),
    "A + B": (lambda c: c.A + c.B, _BOTH),
    "A - B": (lambda c: c.A - c.B, _BOTH),
    "A.multiply(B)": (lambda c: c.A.multiply(c.B), _BOTH),
    "A.maximum(B)": (lambda c: c.A.maximum(c.B), _BSR),
    "A != B": (lambda c: c.A != c.B, _BSR),
    "A < B": (lambda c: c.A < c.B, _BSR),
    "A * 2": (lambda c: c.A * 2.0, _BOTH),
    "A / 2": (lambda c: c.A / 2.0, _BOTH),
    "A / 3": (lambda c: c.A / 3.0, _BOTH),
    "-A": (lambda c: -c.A, _BOTH),
    "abs(A)": (lambda c: abs(c.A), _BOTH),
    "A.power(2)": (lambda c: c.A.power(2), _BOTH),
    "A > 0.5": (lambda c: c.A > 0.5, _BSR),
    "A.sin()": (lambda c: c.A.sin(), _BOTH),
    "round(A, 1)": (lambda c: round(c.A, 1), _BOTH),
    "A + dense": (lambda c: c.A + c.dense, _BOTH),
    "A.multiply(dense)": (lambda c: c.A.multiply(c.dense), _BOTH),
    "A.sum()": (lambda c: c.A.sum(), _BOTH),
    "A.sum(0)": (lambda c: c.A.sum(0), _BOTH),
    "A.sum(1)": (lambda c: c.A.sum(1), _BOTH),
    "A.mean(0)": (lambda c: c.A.mean(0), _BOTH),
    "A.max()": (lambda c: c.A.max(), _BOTH),
    "A.max(0)": (lambda c: c.A.max(0), _BOTH),
    "A.max(1)": (lambda c: c.A.max(1), _BOTH),
    "A.argmax()": (lambda c: c.A.argmax(), _BOTH),
    "A.argmax(0)": (lambda c: c.A.argmax(0), _BOTH),
    "A.argmax(1)": (lambda c: c.A.argmax(1), _BOTH),
    "A.count_nonzero()": (lambda c: c.A.count_nonzero(), _BOTH),
    "A.count_nonzero(0)": (lambda c: c.A.count_nonzero(0), ("scipy csr",)),
    "A.nonzero()": (lambda c: c.A.nonzero(), _BSR),
    "A.diagonal()": (lambda c: c.A.diagonal(), _BOTH),
    "A.diagonal(1)": (lambda c: c.A.diagonal(1), _BOTH),
    "A.trace()": (lambda c: c.A.trace(), _BOTH),
    "norm(A)": (lambda c: c.of.norm(c.A), _BOTH),
    "norm(A, 1)": (lambda c: c.of.norm(c.A, 1), _BOTH),
    "norm(A, axis=1)": (lambda c: c.of.norm(c.A, axis=1), _BOTH),
    "A.copy()": (lambda c: c.A.copy(), _BOTH),
    "A.astype(complex)": (lambda c: c.A.astype("complex128"), _BOTH),
    "A.conj()": (lambda c: c.A.conj(), _BOTH),
    "A.T.copy()": (lambda c: c.A.T.copy(), _BSR),
    "A.tocsr()": (lambda c: c.A.tocsr(), _BSR),
    "A.tocsc()": (lambda c: c.A.tocsc(), _BOTH),
    "A.tocoo()": (lambda c: c.A.tocoo(), _BSR),
    "A.tobsr((1, 1))": (lambda c: c.A.tobsr(blocksize=(1, 1)), _BSR),
    "A.toarray()": (lambda c: c.A.toarray(), _BOTH),
    "A.reshape": (lambda c: c.A.reshape((c.A.shape[0] // 3, -1) if c.side == 3 else (c.A.shape[0] // 2, -1)), _BSR),
    "A[: half]": (lambda c: c.A[: c.A.shape[0] // c.side // 2 * c.side].copy(), ("scipy csr",)),
    "A[:, : half]": (lambda c: c.A[:, : c.A.shape[1] // c.side // 2 * c.side].copy(), ("scipy csr",)),
    "vstack([A, B])": (lambda c: c.of.vstack([c.A, c.B]), _BSR),
    "hstack([A, B])": (lambda c: c.of.hstack([c.A, c.B]), _BSR),
    "eliminate_zeros": (lambda c: c.A.copy().eliminate_zeros(), _BSR),
    "sum_duplicates": (lambda c: c.A.copy().sum_duplicates(), _BOTH),
    "setdiag": (lambda c: c.A.copy().setdiag(1.0), ("scipy csr",)),
    "from CSR": (lambda c: c.of.make(c.csr, blocksize=c.block), _BSR),
    "from CSR, guessed blocks": (lambda c: c.of.make(c.csr), _BSR),
    "from COO": (lambda c: c.of.make(c.coo, blocksize=c.block), _BSR),
    "from CSC": (lambda c: c.of.make(c.csr.T, blocksize=c.block), _BSR),
    "from dense": (lambda c: c.of.make(c.dense, blocksize=c.block), _BSR),
    "pickle": (lambda c: pickle.loads(pickle.dumps(c.A)), _BOTH),
    "str(A)": (lambda c: str(c.A), _BOTH),
    "repr(A)": (lambda c: repr(c.A), _BOTH),
}
#: Operations that take too long, or too much memory, on some matrices
_WITHOUT = {("mesh", "A @ A"), ("mesh", "A.toarray()"), ("mesh", "from dense"), ("mesh", "A + dense")}
_WITHOUT |= {("mesh", "A.multiply(dense)"), ("mesh", "A.reshape")}


def cases(name: str) -> dict[str, Case]:
    """The operands of one matrix, for us and for scipy's two formats."""
    rows, side, each, dtype = MATRICES[name]
    ours = [matrix(rows, side, each, dtype, seed) for seed in (0, 1)]
    rng, n = np.random.default_rng(2), ours[0].shape[1]
    theirs = [as_scipy(A) for A in ours]
    for S in theirs:
        S.has_canonical_format = True
    csr = theirs[0].tocsr()
    common = {
        "x": rng.standard_normal(n).astype(dtype), "X": rng.standard_normal((n, 8)).astype(dtype), "side": side,
        "block": (side, side), "csr": csr, "coo": csr.tocoo(), "dense": ours[0].toarray() if n <= 8192 else None,
    }  # fmt: skip
    every = {"bsrgemm": ours, "scipy bsr": theirs, "scipy csr": [S.tocsr() for S in theirs]}
    return {kind: SimpleNamespace(of=_SCIPY.get(kind, _OURS), A=A, B=B, **common) for kind, (A, B) in every.items()}


def once(call: Callable[[Case], Any], case: Case) -> Callable[[], Any]:
    """The call to measure: what a matrix of scipy knows of its indices is dropped, as if they had been written to."""

    def forgetful() -> Any:
        if case.of is not _OURS:
            case.A.__dict__.pop("_has_canonical_format", None)
            case.A.__dict__.pop("_has_sorted_indices", None)
        return call(case)

    return forgetful


def everyday(run: Run) -> Iterator[Row]:
    """All operations, each on every matrix; a quick run has the tiny one alone."""
    names = run.place.some(list(MATRICES), ["tiny"])
    operands = {name: cases(name) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, (call, peers) in OPERATIONS.items():
            row: Row = {"what": what}
            for name in names:
                if (name, what) not in _WITHOUT:
                    row[name] = _beside_scipy(operands[name], call, peers)
            yield row


def _beside_scipy(operands: dict[str, Case], call: Callable[[Case], Any], peers: tuple[str, ...]) -> dict[str, Any]:
    """CPU seconds of ours, and of scipy's formats that have this operation."""
    found = {"bsrgemm": cpu_seconds(once(call, operands["bsrgemm"]))}
    for kind in peers:
        try:
            found[kind] = cpu_seconds(once(call, operands[kind]))
        except (NotImplementedError, TypeError, ValueError):
            continue
    return found


def _seconds(name: str) -> Column:
    return Column(f"{name}, time", lambda row: duration(row[name]["bsrgemm"]) if name in row else "")


def _factor(name: str) -> Column:
    """How many times as long scipy takes."""

    def cell(row: Row) -> str:
        theirs = [seconds for who, seconds in row.get(name, {}).items() if who != "bsrgemm"]
        return times(min(theirs) / row[name]["bsrgemm"]) if theirs else ""

    return Column(f"{name}, scipy", cell)


STUDIES = (
    Study("everyday", "everyday operations on the CPU, beside the faster of scipy's bsr and csr", everyday,
          tuple(make(name) for name in MATRICES for make in (_seconds, _factor)), devices=("cpu",)),
)  # fmt: skip
