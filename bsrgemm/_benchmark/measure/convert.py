"""Changing format on the GPU, beside the way through the host: copy down, SciPy, copy back (cupy issue 7177).

1,000,000 blocks of 3 x 3 in float64, 27 a block row. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse

import bsrgemm as bg

from .. import machine, provenance
from ..runner import Bench
from ..table import Table, writing
from ..timing import time_cpu

#: Blocks of a block row
EACH = 27


def matrix(blocks: int) -> bg.bsr_array:
    """About so many random blocks near the diagonal, on the GPU, each position once."""
    rows = blocks // EACH + 1
    rng = np.random.default_rng(0)
    cols = (np.arange(rows)[:, None] + rng.integers(-2000, 2000, (rows, EACH))) % rows
    cols = np.sort(cols, axis=1).reshape(-1)
    data = rng.standard_normal((rows * EACH, 3, 3))
    A = bg.bsr_array((data, (np.repeat(np.arange(rows), EACH), cols)), shape=(rows * 3, rows * 3), device="cuda")
    A.sum_duplicates()
    return A


def cases(A: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name -> (the conversion on the GPU, the same through the host)."""
    import cupy
    import cupyx.scipy.sparse as cusparse

    # flags unknown, so that each call checks the order itself
    shuffled = bg.bsr_array((A.data, A.indices, A.indptr), shape=A.shape)
    S, COO = A.tocsr(), A.tocoo()
    S.has_canonical_format = True
    assert bool((bg.bsr_array(S, blocksize=(3, 3)).data == A.data).all())

    def upload(H: Any) -> list[Any]:
        return [cupy.asarray(x) for x in (H.data, H.indices, H.indptr)]

    def download() -> Any:
        return scipy.sparse.bsr_array(tuple(x.get() for x in (A.data, A.indices, A.indptr)), shape=A.shape)

    return {
        "csr -> bsr": (lambda: bg.bsr_array(S, blocksize=(3, 3)), lambda: upload(S.get().tobsr(blocksize=(3, 3)))),
        "coo -> bsr": (lambda: bg.bsr_array(COO, blocksize=(3, 3)), lambda: upload(COO.get().tobsr(blocksize=(3, 3)))),
        "bsr -> csr": (A.tocsr, lambda: cusparse.csr_matrix(download().tocsr())),
        "transpose": (A.transpose, lambda: upload(download().T)),
        "sort_indices": (shuffled.sorted_indices, lambda: upload(download().sorted_indices())),
        "A + A": (lambda: A + A, lambda: upload((lambda H: H + H)(download()))),
    }


def _waited(bench: Bench, call: Callable[[], Any]) -> None:
    call()
    bench.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    if not machine.has_gpu():
        raise SystemExit("bench/run/convert.py compares the GPU with the way through the host: it needs a GPU")
    bench = Bench()
    with provenance.recording() as launched:
        A = matrix(options.blocks)
        table = Table("convert_cuda", f"{len(A.data):,} blocks of 3 x 3 float64", launched)
        with writing(table):
            for name, (ours, through_host) in cases(A).items():
                seconds = bench.seconds(ours)
                peer = time_cpu(partial(_waited, bench, through_host), repeats=3)
                table.add(
                    f"{name:14} | {seconds * 1e3:8.2f} ms | through the host {peer * 1e3:9.1f} ms | "
                    f"{peer / seconds:6.1f} x",
                    case=name, blocks=len(A.data), seconds=seconds, through_host=peer,
                )  # fmt: skip
