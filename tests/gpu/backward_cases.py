"""Operands for tests of the gradients of attention on a card, and their comparison with those of the host."""

from __future__ import annotations

from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16

from .attention_cases import F16, F32, F64

#: By how much weights and their gradients are rounded, of the largest gradient.
ROUNDING = {F16: 3e-3, BFLOAT16: 2.4e-2, F32: 2e-5, F64: 1e-11}
NAMES = ("dq", "dk", "dv")


def operands(
    rng: np.random.Generator, S_q: int, S_k: int, D: int, D_v: int = 0, *, B: int = 1, heads: tuple[int, int] = (2, 1),
    dtype: Any = F16,
) -> list[Any]:  # fmt: skip
    """q, k, v and dout on the host."""
    D_v = D_v or D
    shapes = ((heads[0], S_q, D), (heads[1], S_k, D), (heads[1], S_k, D_v), (heads[0], S_q, D_v))
    return [rng.standard_normal((B, *shape)).astype(dtype) for shape in shapes]


def check(some: list[Any], *, mask: Any = None, deterministic: bool = True, **options: Any) -> None:
    """The gradients on the card against those of the host in float64; written over what was there."""
    import cupy

    wide = [x.astype(np.float64) for x in some]
    out, lse = bg.attention(*wide[:3], return_lse=True, mask=mask, **options)
    want = bg.attention_backward(wide[3], *wide[:3], out, lse, mask=mask, **options)
    q, k, v, dout = (cupy.asarray(x) for x in some)
    if mask is not None:
        options["mask"] = mask.to_device("cuda")
    o, e = bg.attention(q, k, v, return_lse=True, **options)
    results = {name: cupy.full_like(x, 113) for name, x in zip(NAMES, (q, k, v), strict=True)}
    got = bg.attention_backward(dout, q, k, v, o, e, deterministic=deterministic, **options, **results)
    for name, x, y in zip(NAMES, got, want, strict=True):
        bound = ROUNDING[some[0].dtype] * max(1.0, np.abs(y).max(initial=0))
        np.testing.assert_allclose(x.get().astype(np.float64), y, rtol=0, atol=bound, err_msg=name)
