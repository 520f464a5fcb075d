"""A @ B for a block-sparse A: bsrgemm beside what NumPy, SciPy and CuPy users have today.

Runs on the GPU if there is one, otherwise the same on the CPU, smaller. Peers: SciPy's BSR product on the CPU;
cupyx's CSR product and dense cuBLAS on the GPU. Effective rate = 2 * stored elements * columns / time.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import machine, provenance
from ..cases.small_blocks import as_scipy
from ..runner import Bench
from ..table import Table
from ..timing import Call

#: (n, block, density, columns, dtype), for the CPU and for the GPU
CASES = {
    "cuda": [
        *((900_000, 3, 27 / 300_000, columns, "float64") for columns in (1, 16)),
        *((8192, block, 0.22, 512, "float32") for block in (16, 32, 64)),
        (8192, 64, 0.22, 512, "float16"),
        (8192, 128, 0.05, 512, "float64"),
    ],
    "cpu": [
        *((90_000, 3, 27 / 30_000, columns, "float64") for columns in (1, 16)),
        *((1024, block, 0.22, 128, "float32") for block in (16, 64)),
        (1024, 64, 0.22, 128, "float16"),
    ],
}
#: Rows up to which a dense product is a peer
_DENSE_MOST = 16384


def random_matrix(n: int, block: int, density: float, dtype: str) -> bg.bsr_array:
    """Uniform random blocks on the host, the same number in every block row."""
    rng = np.random.default_rng(0)
    rows = n // block
    each = max(1, round(density * rows))
    near = (np.arange(rows)[:, None] + np.sort(rng.integers(-2048, 2048, (rows, each)), axis=1)) % rows
    if each > 64:
        near = np.sort([rng.choice(rows, each, replace=False) for _ in range(rows)], axis=1)
    data = rng.standard_normal((rows * each, block, block)).astype(dtype)
    indptr = np.arange(rows + 1) * each
    A = bg.bsr_array((data, near.reshape(-1).astype(np.int32), indptr.astype(np.int32)), shape=(n, n))
    A.sum_duplicates()
    return A


def relative_error(A: bg.bsr_array, B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> float:
    """max |C - A B| / (|A| |B|) in long double over a few block rows."""
    worst = 0.0
    R = A.blocksize[0]
    for i in np.linspace(0, A.shape[0] // R - 1, 5).astype(int):
        rows = A[i * R : (i + 1) * R, :]
        cols = (rows.indices[:, None] * R + np.arange(R)).reshape(-1)
        a = rows.data.transpose(1, 0, 2).reshape(R, -1).astype(np.longdouble)
        b = B[cols].astype(np.longdouble).reshape(len(cols), -1)
        exact, size = a @ b, np.abs(a) @ np.abs(b)
        got = C[i * R : (i + 1) * R].astype(np.longdouble).reshape(exact.shape)
        worst = max(worst, float(np.max(np.abs(got - exact) / size)))
    return worst


def peers_of(device: str, A: Any, B: Any) -> dict[str, Call]:
    """The peers that can multiply these operands."""
    if device == "cpu":
        if A.dtype == np.float16:
            A, B = A.astype("float32"), B.astype("float32")
        return {"scipy bsr": partial(operator.matmul, as_scipy(A), B)}
    found: dict[str, Call] = {}
    if A.dtype.char in "fd":
        found["cupyx csr"] = partial(operator.matmul, A.tocsr(), B)
    if A.shape[0] <= _DENSE_MOST:
        found["dense cuBLAS"] = partial(operator.matmul, A.toarray(), B)
    return found


def line(bench: Bench, table: Table, case: tuple[int, int, float, int, str]) -> None:
    """One product beside its peers, all timed in turn."""
    n, block, density, N, dtype = case
    A = random_matrix(n, block, density, dtype)
    B = np.random.default_rng(1).standard_normal((n, N)).astype(dtype)
    B = B[:, 0] if N == 1 else B
    a, b = (A.to_device("cuda"), bench.xp.asarray(B)) if bench.on_gpu else (A, B)
    C = a @ b
    error = relative_error(A, B, C.get() if bench.on_gpu else C)
    times = bench.interleaved({"bsrgemm": partial(operator.matmul, a, b)} | peers_of(bench.device, a, b), str(case))
    seconds = times.pop("bsrgemm")
    peer = min(times, key=times.__getitem__)
    rate = 2 * A.nnz * N / seconds / 1e9
    table.add(
        f"{n:7} {block:5} {A.density:8.5f} {N:5} {dtype:8} | {seconds * 1e3:8.3f} ms | "
        f"{peer:>14} {times[peer] * 1e3:8.3f} ms | {times[peer] / seconds:5.2f} | {error:.1e}  ({rate:,.0f} GFLOP/s)",
        n=n, block=block, density=A.density, columns=N, dtype=dtype, seconds=seconds, peers=times,
        gflops=rate, error=error,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if machine.has_gpu() else "cpu")
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    bench = Bench(device=options.device)
    with provenance.recording() as launched:
        table = Table(f"matmul_{options.device}", "A @ B", launched)
        table.note(
            f"{'n':>7} {'block':>5} {'density':>8} {'N':>5} {'dtype':8} | {'ours':>11} | {'best peer':>26} | "
            "ratio | error"
        )
        for case in CASES[options.device]:
            line(bench, table, case)
    if options.keep:
        table.write()
