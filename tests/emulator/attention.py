"""Attention by emulated kernels beside the host in float64, and operands for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.host import ENGINE
from bsrgemm._kernels import workspace
from bsrgemm.dtypes import BFLOAT16

F16 = np.dtype(np.float16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
#: By how much weights are rounded, of the largest value.
ROUNDING = {F16: 2e-3, BFLOAT16: 1.6e-2, FLOAT8: 8e-2}


class Emulated:
    """`bsrgemm.attention` on NumPy arrays by a kernel, which `forward` runs, beside that of the host in float64."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: str, forward: Callable[[Any], Any]) -> None:
        self.monkeypatch, self.kernel, self.forward = monkeypatch, kernel, forward

    def run(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        with self.monkeypatch.context() as patched:
            patched.setattr(ENGINE, "forward", self.forward)
            out, lse = bg.attention(q, k, v, return_lse=True, **options)
        assert {plan.config.spec().entry for plan in attention_launch._plans.values()} == {self.kernel}
        assert not any(counters.any() for counters in workspace._zeroed.values())  # as the next launch wants them
        return out.astype(np.float64), lse.astype(np.float64)

    def check(self, q: Any, k: Any, v: Any, wide: Any = None, **options: Any) -> None:
        kind = FLOAT8 if wide is not None else q.dtype
        wide = [x.astype(np.float64) for x in (q, k, v)] if wide is None else wide
        plain = {name: x for name, x in options.items() if not name.endswith("_scale") and name != "out_dtype"}
        want, want_lse = bg.attention(*wide, return_lse=True, **plain)
        out, lse = self.run(q, k, v, **options)
        np.testing.assert_allclose(out, want, rtol=0, atol=ROUNDING[kind] * np.abs(wide[2]).max())
        seen = np.isfinite(want_lse)
        assert (np.isneginf(lse) == ~seen).all()
        np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=1e-5, atol=1e-3 if kind == FLOAT8 else 2e-5)


def operands(
    rng: np.random.Generator, S_q: int, S_k: int, D: int = 64, D_v: int = 0, heads: tuple[int, int] = (2, 1),
    dtype: Any = F16, batch: int = 1,
) -> tuple[Any, ...]:  # fmt: skip
    shapes = ((batch, heads[0], S_q, D), (batch, heads[1], S_k, D), (batch, heads[1], S_k, D_v or D))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def climbing(q: Any, k: Any) -> Iterator[Any]:
    """Set q and k so that maxima climb by far, from tile to tile or at once, and yield queries of which some do so.

    These are all of them, the first of each 16 rows, or the ninth. Keys are walked from the last one on.
    """
    keys = k.shape[2]
    q[...] = np.sign(q[:, :1, :1])
    for ramp in (np.linspace(3, 0, keys), np.where(np.arange(keys) < keys // 2, 3, 0)):
        k[...] = np.sign(q[:, :1, :1]) * ramp[:, None]
        for rows in (slice(None), slice(0, None, 16), slice(8, None, 16)):
            some = (q * 0.01).astype(q.dtype)
            some[:, :, rows] = q[:, :, rows]
            yield some
