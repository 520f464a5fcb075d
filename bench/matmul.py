"""A @ B for a block-sparse A: bsrgemm beside what NumPy, SciPy and CuPy users have today.

Runs on the GPU if there is one, otherwise the same on the CPU, smaller. Peers: SciPy's BSR product on the CPU;
cupyx's CSR product and dense cuBLAS on the GPU. Effective rate = 2 * stored elements * columns / time.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import scipy.sparse
from harness import Table, has_gpu

import bsrgemm as bg
from bsrgemm._benchmark.timing import time_cpu, time_gpu

#: (n, block, density, columns, dtype)
GPU_CASES = [
    (300_000 * 3, 3, 27 / 300_000, 1, "float64"),
    (300_000 * 3, 3, 27 / 300_000, 16, "float64"),
    (8192, 16, 0.22, 512, "float32"),
    (8192, 32, 0.22, 512, "float32"),
    (8192, 64, 0.22, 512, "float32"),
    (8192, 64, 0.22, 512, "float16"),
    (8192, 128, 0.05, 512, "float64"),
]
CPU_CASES = [
    (30_000 * 3, 3, 27 / 30_000, 1, "float64"),
    (30_000 * 3, 3, 27 / 30_000, 16, "float64"),
    (1024, 16, 0.22, 128, "float32"),
    (1024, 64, 0.22, 128, "float32"),
    (1024, 64, 0.22, 128, "float16"),
]


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


def relative_error(A: bg.bsr_array, B: np.ndarray, C: np.ndarray) -> float:
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


def peers_cpu(A: Any, B: np.ndarray) -> dict[str, float]:
    if A.dtype == np.float16:
        A, B = A.astype("float32"), B.astype("float32")
    S = scipy.sparse.bsr_array((A.data, A.indices, A.indptr), shape=A.shape)
    return {"scipy bsr": time_cpu(lambda: S @ B)}


def peers_gpu(A: Any, B: Any) -> dict[str, float]:
    import cupy

    times = {}
    if A.dtype.char in "fd":
        S = A.tocsr()
        times["cupyx csr"] = time_gpu(lambda: S @ B)
    if A.shape[0] <= 16384:
        D = A.toarray()
        times["dense cuBLAS"] = time_gpu(lambda: cupy.matmul(D, B))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    table = Table(f"matmul_{options.device}", "A @ B")
    print(
        f"{'n':>7} {'block':>5} {'density':>8} {'N':>5} {'dtype':8} | {'ours':>11} | {'best peer':>26} | ratio | error"
    )
    for n, block, density, N, dtype in GPU_CASES if on_gpu else CPU_CASES:
        A = random_matrix(n, block, density, dtype)
        B = np.random.default_rng(1).standard_normal((n, N)).astype(dtype)
        B = B[:, 0] if N == 1 else B
        if on_gpu:
            import cupy

            dA, dB = A.to_device("cuda"), cupy.asarray(B)
            error = relative_error(A, B, (dA @ dB).get())
            seconds, peers = time_gpu(lambda dA=dA, dB=dB: dA @ dB), peers_gpu(dA, dB)
        else:
            error = relative_error(A, B, A @ B)
            seconds, peers = time_cpu(lambda A=A, B=B: A @ B), peers_cpu(A, B)
        peer = min(peers, key=peers.__getitem__)
        rate = 2 * A.nnz * N / seconds / 1e9
        ratio = peers[peer] / seconds
        table.add(
            f"{n:7} {block:5} {A.density:8.5f} {N:5} {dtype:8} | {seconds * 1e3:8.3f} ms | "
            f"{peer:>14} {peers[peer] * 1e3:8.3f} ms | {ratio:5.2f} | {error:.1e}  ({rate:,.0f} GFLOP/s)",
            n=n, block=block, density=A.density, columns=N, dtype=dtype, seconds=seconds, peers=peers,
            gflops=rate, error=error,
        )  # fmt: skip
    if options.keep:
        table.write()


if __name__ == "__main__":
    main()
