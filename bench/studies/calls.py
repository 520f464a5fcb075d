"""What a call costs beside its kernel: host time, first calls, masks; conversions beside the host's."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse

import bsrgemm as bg

from .. import internals
from ..measure import Row, Run, reason_of
from ..place import Call, Place
from ..report import TIME, Column, Peers, duration, field, times
from ..study import Study

#: Operands that are remembered, and more than there are addresses and tensor maps that are
_IN_TURN, _NEW_OPERANDS = 16, 1500


def host_calls(place: Place) -> dict[str, Call]:
    """Calls on operands so small that only the host's time matters; results are allocated unless `out` is said."""
    xp, device = place.xp, place.device

    def matrix(block: int, dtype: str) -> Any:
        return bg.bsr_array(np.ones((2 * block, 2 * block), dtype), blocksize=(block, block), device=device)

    A, blocks = matrix(64, "float16"), matrix(3, "float64")
    B, x, out = xp.ones((128, 64), np.float16), xp.ones(6), xp.empty((128, 64), np.float16)
    few, many = (itertools.cycle(list(xp.ones((n, 128, 64), np.float16))) for n in (_IN_TURN, _NEW_OPERANDS))
    q, k, v = (xp.ones((1, 2, 256, 128), np.float16) for _ in range(3))
    masks = [bg.BlockMask.random(256, per_row=256 // b // 2, block=b, device=device) for b in (128, 64)]
    store = bg.KVCache(1, 2, 256, 128, dtype=np.float16, device=device)
    store.append(k, v)
    token = xp.ones((1, 2, 1, 128), np.float16)
    X, Y = (xp.ones((128, 128), np.float16) for _ in range(2))
    return {
        "A @ B, 64 x 64 float16": lambda: A @ B,
        "the same, out": partial(bg.matmul, A, B, out=out),
        "A @ B, 16 operands in turn": lambda: A @ next(few),
        "A @ B, new operands each call": lambda: A @ next(many),
        "A @ x, 3 x 3 float64": lambda: blocks @ x,
        "attention, causal": partial(bg.attention, q, k, v, causal=True),
        "attention, window": partial(bg.attention, q, k, v, window=(100, 0)),
        "attention, mask": partial(bg.attention, q, k, v, mask=masks[0]),
        "attention, mask of 64-blocks": partial(bg.attention, q, k, v, mask=masks[1]),
        "attention_decode": partial(bg.attention_decode, token, store),
        "sddmm, 64 x 64 float16": partial(bg.sddmm, X, Y, A),
    }


def add_seconds(place: Place) -> float:
    """Host seconds of ``cupy.add(x, x)`` (numpy's on the CPU) for 512 float64: the unit of host times."""
    one = place.xp.ones(512)
    return place.host_seconds(lambda: place.xp.add(one, one))


def overhead(run: Run) -> Iterator[Row]:
    """Host times as multiples of an addition, since hosts differ by a factor of two; then first calls."""
    place = run.place
    for name, call in host_calls(place).items():
        row: Row = {"what": name}
        try:
            row["seconds"] = place.host_seconds(call)
            row["adds"] = row["seconds"] / add_seconds(place)
        except Exception as error:
            row["failed"] = reason_of(error)
        yield row
    if not place.on_gpu or place.quick:
        return
    for kernel, dtype, block, N in _FIRST:
        with tempfile.TemporaryDirectory() as folder:
            cold = _first_call(folder, dtype, block, N)
            warm = min(_first_call(folder, dtype, block, N) for _ in range(3))
        yield {"what": f"first call, {kernel}, cold cache", "seconds": cold}
        yield {"what": f"first call, {kernel}, warm cache", "seconds": warm}


#: (kernel, dtype, block, columns) of a first product
_FIRST = (("spmv", "float32", 3, 1), ("gemm_simt", "float32", 3, 64), ("gemm_sm80", "float32", 32, 64),
          ("gemm_sm90", "float16", 64, 64))  # fmt: skip
_START = """
import time, numpy as np, cupy
cupy.zeros(4).sum().get()
import bsrgemm as bg
A = bg.bsr_array(np.ones((2 * {block},) * 2, np.{dtype}), blocksize=({block}, {block}), device="cuda")
B = cupy.ones((2 * {block}, {N}), np.{dtype})
cupy.cuda.Device().synchronize()
start = time.perf_counter()
(A @ B)
cupy.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""


def _first_call(folder: str, dtype: str, block: int, N: int) -> float:
    """Seconds of the first product of a fresh process with this cache folder, CuPy's context not counted."""
    code = _START.format(dtype=dtype, block=block, N=N)
    env = {**os.environ, "CUPY_CACHE_DIR": folder}
    return float(
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    )


def masks(run: Run) -> Iterator[Row]:
    """Making a mask, listing its tiles, and its bytes."""
    place, M = run.place, bg.BlockMask
    device: dict[str, Any] = {"device": place.device}
    made: dict[str, Callable[[], bg.BlockMask]] = {
        "window 2048 at 524288": lambda: M.window(524288, left=2047, right=0, **device),
        "causal at 16384": lambda: M.causal(16384, **device),
        "random, 16 heads at 16384": lambda: M.random(16384, per_row=26, heads=(1, 16), **device),
        "random 64-blocks at 16384": lambda: M.random(16384, per_row=51, block=64, **device),
        "window and sinks at 131072": lambda: (
            M.window(131072, left=2047, right=0, **device) | M.sinks(131072, count=64, **device)
        ),
    }
    for name, make in made.items():
        row: Row = {"what": name}
        try:
            mask = make()
            row |= {"seconds": place.waited_seconds(make, 5), "bytes": mask.nbytes}
            row["listing"] = place.waited_seconds(internals.mask_listing(mask), 5)
        except Exception as error:
            row["failed"] = reason_of(error)
        yield row


def conversions(run: Run) -> Iterator[Row]:
    """Changing format on the GPU, beside the way through the host: copy down, SciPy, copy back (cupy issue 7177)."""
    place, each = run.place, 27
    rows = (100_000 if place.quick else 1_000_000) // each + 1
    rng = np.random.default_rng(0)
    columns = (np.arange(rows)[:, None] + rng.integers(-2000, 2000, (rows, each))) % rows
    coo = (np.repeat(np.arange(rows), each), np.sort(columns, axis=1).reshape(-1))
    A = bg.bsr_array((rng.standard_normal((rows * each, 3, 3)), coo), shape=(rows * 3, rows * 3), device="cuda")
    A.sum_duplicates()
    for name, (ours, through_host) in _conversions(A).items():
        row: Row = {"what": f"{name}, {len(A.data):,} blocks of 3 x 3 float64", "peers": {}}
        row["seconds"] = place.seconds(ours)
        seconds = place.waited_seconds(through_host, 3)
        row["peers"]["through the host"] = {"seconds": seconds, "ratio": seconds / row["seconds"]}
        yield row


def _conversions(A: Any) -> dict[str, tuple[Call, Call]]:
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


STUDIES: tuple[Study, ...] = (
    Study("overhead", "what a call costs beside its kernel: host time, first call of a process", overhead,
          (TIME, field("times cupy.add", "adds", times))),
    Study("masks", "masks of blocks: made, and listed for the kernels", masks,
          (TIME, field("listing", "listing", duration), Column("MB", lambda row: f"{row['bytes'] / 1e6:.2f}"))),
    Study("conversions", "changing format on the GPU, beside the way through the host", conversions,
          (TIME, Peers()), devices=("cuda",)),
)  # fmt: skip
