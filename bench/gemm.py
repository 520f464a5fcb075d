"""A @ B in 16-bit floats on tensor cores, beside dense cuBLAS on the same (filled-up) matrix in the same run.

M = K = N = 8192 unless said, uniform random blocks; effective rate = 2 * stored elements * N / time, and its ratio to
the rate of dense cuBLAS on random data. Candidates are interleaved with 0.4 s of idling before each timing: the card
throttles at its power limit and remembers what ran before. Needs a GPU.
"""

from __future__ import annotations

import argparse

import numpy as np
from harness import Table, has_gpu, time_gpu

import bsrgemm as bg

#: (n, block rows, block columns, density, N, dtype)
CASES = [
    (8192, 128, 128, 0.22, 8192, "float16"),
    (8192, 64, 64, 0.22, 8192, "float16"),
    (8192, 128, 128, 1.0, 8192, "float16"),
    (8192, 128, 128, 0.05, 8192, "float16"),
    (8192, 64, 64, 0.5, 8192, "float16"),
    (8192, 64, 64, 0.05, 8192, "float16"),
    (8192, 256, 128, 0.22, 8192, "float16"),
    (8192, 128, 64, 0.22, 8192, "float16"),
    (8192, 128, 128, 0.22, 8192, "bfloat16"),
    (8192, 64, 64, 0.22, 256, "float16"),
    (16384, 128, 128, 0.1, 16384, "float16"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    options = parser.parse_args()
    if not has_gpu():
        raise SystemExit("bench/gemm.py measures tensor cores: it needs a GPU; bench/matmul.py runs anywhere")
    import cupy
    from ml_dtypes import bfloat16

    table = Table("gemm_cuda", "16-bit A @ B")
    for n, R, C, density, N, name in CASES[: options.cases]:
        dtype = np.dtype(bfloat16 if name == "bfloat16" else name)
        rng = cupy.random.default_rng(0)
        stored = np.random.default_rng(0).random((n // R, n // C)) < density
        i, j = np.nonzero(stored)
        data = rng.standard_normal((len(i), R, C), dtype=np.float32).astype(dtype)
        A = bg.bsr_array((data, (cupy.asarray(i), cupy.asarray(j))), shape=(n, n))
        B = rng.standard_normal((n, N), dtype=np.float32).astype(dtype)
        out = cupy.empty((n, N), dtype)
        bg.matmul(A, B, out=out)
        exact = A.astype(np.float32).toarray()[: 2 * R] @ B.astype(np.float32)
        error = float(cupy.linalg.norm(out[: 2 * R].astype(np.float32) - exact) / cupy.linalg.norm(exact))
        seconds = time_gpu(lambda A=A, B=B, out=out: bg.matmul(A, B, out=out), idle=0.4)
        rate = 2 * A.nnz * N / seconds / 1e12
        # CuPy multiplies no bfloat16: the card's rate is the same for float16.
        D = rng.standard_normal((n, n), dtype=np.float32).astype(np.float16)
        E = B.astype(np.float16)
        dense = 2 * n * n * N / time_gpu(lambda D=D, E=E: cupy.matmul(D, E), idle=0.4) / 1e12
        table.add(
            f"{n:6} {R:4}x{C:<4} {A.density:5.3f} N={N:<6} {name:8} | {seconds * 1e3:8.3f} ms {rate:6.1f} TFLOP/s | "
            f"cuBLAS dense {dense:6.1f} | ratio {rate / dense:5.3f} | error {error:.1e}",
            n=n, block=(R, C), density=A.density, columns=N, dtype=name, seconds=seconds, tflops=rate,
            dense_tflops=dense, error=error,
        )  # fmt: skip
    table.write()


if __name__ == "__main__":
    main()
