"""What the pages call missing raises an error; other tests of refusals have the rest of docs/limits.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm.interop import mpi

A = bg.bsr_array((np.ones((2, 2, 2)), ([0, 1], [0, 1])), shape=(4, 4))
BATCH: Any = bg.bsr_batch([A, 2 * A])
OVER_RANKS: Any = mpi.partition(2 * bg.eye(8, blocksize=(2, 2)))
Q = np.random.default_rng(0).standard_normal((1, 1, 32, 8))
FP8 = Q.astype(ml_dtypes.float8_e4m3fn)
MASK = bg.BlockMask.causal(32, block=16, device="cpu")

MISSING: dict[str, tuple[Callable[[], Any], type[Exception] | tuple[type[Exception], ...]]] = {
    "the transpose of a batch": (lambda: BATCH.T, AttributeError),
    "a slice of a batch": (lambda: BATCH[:1], TypeError),
    "a factor of a batch": (lambda: 2 * BATCH, TypeError),
    "a sum of batches": (lambda: BATCH + BATCH, TypeError),
    "a file of a batch": (lambda: bg.save_npz(Path("never"), BATCH), TypeError),
    "a matrix of fp8": (lambda: bg.bsr_array((2, 2), dtype=ml_dtypes.float8_e4m3fn), TypeError),
    "e5m2": (
        lambda: bg.matmul(A.astype("uint8"), np.ones((4, 1)).astype(ml_dtypes.float8_e5m2), scale_a=1.0), TypeError,
    ),
    "complex to real": (lambda: bg.matmul(A.astype("complex128"), np.ones(4), out_dtype="float64"), TypeError),
    "float to integer": (lambda: bg.matmul(A, np.ones(4), out_dtype="int64"), TypeError),
    "q and k of two dtypes": (lambda: bg.attention(Q, Q.astype(np.float32), Q), (TypeError, ValueError)),
    "masks of two shapes": (lambda: MASK & bg.BlockMask.causal(64, block=16, device="cpu"), ValueError),
    "masks of two blocks": (lambda: MASK & bg.BlockMask.causal(32, block=32, device="cpu"), ValueError),
    "gradients of fp8": (lambda: bg.attention_backward(Q, FP8, FP8, FP8, Q, Q[..., 0]), TypeError),
    "products of matrices over ranks": (lambda: OVER_RANKS @ OVER_RANKS, TypeError),
    "a direct solution over ranks": (lambda: bg.linalg.spsolve(OVER_RANKS, np.ones(8)), TypeError),
    "constraints over ranks": (lambda: bg.linalg.constrain(OVER_RANKS, np.ones(8), [0]), TypeError),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_refused(name: str) -> None:
    call, error = MISSING[name]
    with pytest.raises(error):
        call()
    assert not Path("never").exists()


@pytest.mark.parametrize(("dtype", "wide"), [(np.float16, np.float32), (np.float32, np.float32), (np.float64,) * 2])
def test_the_logarithms_of_attention_are_wide(dtype: Any, wide: Any) -> None:
    out, lse = bg.attention(*[Q.astype(dtype)] * 3, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, wide)
