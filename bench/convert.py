"""Changing format on the GPU, beside the way through the host: copy down, SciPy, copy back (cupy issue 7177).

1,000,000 blocks of 3 x 3 in float64, 27 a block row. Needs a GPU.
"""

from __future__ import annotations

import argparse

import numpy as np
from harness import Table, has_gpu

import bsrgemm as bg
from bsrgemm._benchmark.timing import time_cpu, time_gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    options = parser.parse_args()
    if not has_gpu():
        raise SystemExit("bench/convert.py compares the GPU with the way through the host: it needs a GPU")
    import cupy
    import cupyx.scipy.sparse as cusparse
    import scipy.sparse

    each = 27
    rows = options.blocks // each + 1
    rng = np.random.default_rng(0)
    cols = (np.arange(rows)[:, None] + rng.integers(-2000, 2000, (rows, each))) % rows
    cols = np.sort(cols, axis=1).reshape(-1)
    data = rng.standard_normal((rows * each, 3, 3))
    A = bg.bsr_array((data, (np.repeat(np.arange(rows), each), cols)), shape=(rows * 3, rows * 3), device="cuda")
    A.sum_duplicates()
    shuffled = bg.bsr_array((A.data, A.indices, A.indptr), shape=A.shape)  # flags unknown: each call looks for itself
    S = A.tocsr()
    S.has_canonical_format = True
    COO = A.tocoo()
    assert bool((bg.bsr_array(S, blocksize=(3, 3)).data == A.data).all())

    def host(convert):
        def call():
            H = convert()
            cupy.cuda.Device().synchronize()
            return H

        return call

    def upload(H):
        return [cupy.asarray(x) for x in (H.data, H.indices, H.indptr)]

    def csr_host():
        return upload(S.get().tobsr(blocksize=(3, 3)))

    def coo_host():
        return upload(COO.get().tobsr(blocksize=(3, 3)))

    def scipy_bsr():
        return scipy.sparse.bsr_array(tuple(x.get() for x in (A.data, A.indices, A.indptr)), shape=A.shape)

    cases = {
        "csr -> bsr": (lambda: bg.bsr_array(S, blocksize=(3, 3)), csr_host),
        "coo -> bsr": (lambda: bg.bsr_array(COO, blocksize=(3, 3)), coo_host),
        "bsr -> csr": (A.tocsr, lambda: cusparse.csr_matrix(scipy_bsr().tocsr())),
        "transpose": (A.transpose, lambda: upload(scipy_bsr().T)),
        "sort_indices": (shuffled.sorted_indices, lambda: upload(scipy_bsr().sorted_indices())),
        "A + A": (lambda: A + A, lambda: upload((lambda H: H + H)(scipy_bsr()))),
    }
    table = Table("convert_cuda", f"{len(A.data):,} blocks of 3 x 3 float64")
    for name, (ours, through_host) in cases.items():
        seconds = time_gpu(ours, repeats=10)
        peer = time_cpu(host(through_host), repeats=3)
        table.add(
            f"{name:14} | {seconds * 1e3:8.2f} ms | through the host {peer * 1e3:9.1f} ms | {peer / seconds:6.1f} x",
            case=name, blocks=len(A.data), seconds=seconds, through_host=peer,
        )  # fmt: skip
    table.write()


if __name__ == "__main__":
    main()
