"""The portable kernel for gradients of attention in one pass: heads of 97 to 128 columns, sums of dq in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels.forced_kernel import force_kernel
from bsrgemm.dtypes import BFLOAT16

from . import backward_cases
from .attention_cases import F16

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    with force_kernel("BackwardFused"):
        yield


def operands(rng: np.random.Generator, S_q: int, S_k: int, D: int = 128, **how: Any) -> list[Any]:
    return backward_cases.operands(rng, S_q, S_k, D, **how)


def check(some: list[Any], **options: Any) -> None:
    backward_cases.check(some, deterministic=False, **options)


@pytest.mark.parametrize("S", [1, 63, pytest.param(129, marks=pytest.mark.sanitizer), 515])
@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
def test_bands_at_odd_lengths(S: int, dtype: Any, rng: Any) -> None:
    for band in ({}, {"causal": True}, {"window": (S, 30)}):
        check(operands(rng, S, S, dtype=dtype), **band)
    check(operands(rng, S, 2 * S, 100, heads=(4, 2), B=2, dtype=dtype), causal=True, scale=-0.1)
    check(operands(rng, 2 * S, S, heads=(3, 3), dtype=dtype), causal=True)  # the first rows see nothing


@pytest.mark.parametrize("block", [16, 64, 128])
def test_random_blocks_and_elements(block: int, rng: Any) -> None:
    some = operands(rng, 500, 700, heads=(4, 2), B=2)
    check(some, mask=bg.BlockMask.random(500, 700, per_row=2, block=block, heads=(2, 4), seed=1, device="cpu"))
    dense = rng.random((500, 700)) < 0.3
    dense[7], dense[:, 9] = False, False  # a query that sees nothing, a key that nobody sees
    check(some, mask=bg.BlockMask.from_dense(dense, block=block), causal=True)


def test_sequences_of_different_lengths(rng: Any) -> None:
    bounds = {"cu_seqlens_q": [0, 130, 130, 400], "cu_seqlens_k": [0, 270, 290, 540]}
    some = [rng.standard_normal((n, h, 128)).astype(F16) for n, h in ((400, 2), (540, 1), (540, 1), (400, 2))]
    check(some, causal=True, **bounds)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(name: str, rng: Any) -> None:
    import cupy

    some = dict(zip(("q", "k", "v", "dout"), operands(rng, 100, 200), strict=True))
    some[name][:, :, 33, 5] = np.nan
    q, k, v, dout = (some[key].astype(np.float64) for key in ("q", "k", "v", "dout"))
    out, lse = bg.attention(q, k, v, causal=True, return_lse=True)
    want = bg.attention_backward(dout, q, k, v, out, lse, causal=True)
    there = [cupy.asarray(some[key]) for key in ("dout", "q", "k", "v")]
    saved = (cupy.asarray(out.astype(F16)), cupy.asarray(lse.astype(np.float32)))
    got = bg.attention_backward(*there, *saved, causal=True, deterministic=False)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(x.get()), np.isnan(y))


def test_default_order_is_refused(rng: Any) -> None:
    import cupy

    q, k, v, dout = (cupy.asarray(x) for x in operands(rng, 64, 64))
    out, lse = bg.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="BackwardFused cannot compute these gradients"):
        bg.attention_backward(dout, q, k, v, out, lse)
