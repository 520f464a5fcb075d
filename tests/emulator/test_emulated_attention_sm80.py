"""attention_sm80 as it is, launched as it is, on the CPU, beside attention in float64 on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.host import ENGINE
from bsrgemm.dtypes import BFLOAT16

from . import emulator

F16 = np.dtype(np.float16)
#: By how much weights are rounded, of the largest value.
ROUNDING = {F16: 2e-3, BFLOAT16: 1.6e-2}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


class Emulated:
    """`bsrgemm.attention` on NumPy arrays by the kernel, beside that of the host in float64."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def run(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        with self.monkeypatch.context() as patched:
            patched.setattr(ENGINE, "forward", lambda call: emulator.run_attention(call, emulator.guarded))
            out, lse = bg.attention(q, k, v, return_lse=True, **options)
        names = {plan.config.spec().entry for plan in attention_launch._plans.values()}
        assert names == {"attention_sm80"}
        return out.astype(np.float64), lse.astype(np.float64)

    def check(self, q: Any, k: Any, v: Any, **options: Any) -> None:
        wide = [x.astype(np.float64) for x in (q, k, v)]
        want, want_lse = bg.attention(
            *wide, return_lse=True, **{name: x for name, x in options.items() if name != "out_dtype"}
        )
        out, lse = self.run(q, k, v, **options)
        np.testing.assert_allclose(out, want, rtol=0, atol=ROUNDING[q.dtype] * np.abs(wide[2]).max())
        seen = np.isfinite(want_lse)
        assert (np.isneginf(lse) == ~seen).all()
        np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=1e-5, atol=2e-5)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Emulated]:
    with emulator.emulated(folder, emulator.guarded, arch="sm_80"):
        yield Emulated(monkeypatch)


def operands(
    rng: np.random.Generator, S_q: int, S_k: int, D: int = 64, D_v: int = 0, heads: tuple[int, int] = (2, 1),
    dtype: Any = F16,
) -> tuple[Any, ...]:  # fmt: skip
    shapes = ((1, heads[0], S_q, D), (1, heads[1], S_k, D), (1, heads[1], S_k, D_v or D))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


@pytest.mark.parametrize(
    ("lengths", "dims", "options"),
    [
        ((1, 1), (64, 64), {}),
        ((20, 30), (64, 64), {}),
        ((70, 150), (64, 64), {"causal": True}),
        ((130, 70), (64, 64), {"causal": True}),  # the first rows see nothing
        ((64, 300), (64, 64), {"window": (40, 3)}),
        ((33, 65), (128, 128), {"softcap": 3.0, "scale": -0.2}),
        ((70, 90), (32, 32), {"causal": True, "align": "top-left"}),
        ((30, 90), (256, 256), {}),
        ((30, 90), (40, 24), {"causal": True}),  # tiles of which not all columns are there
    ],
    ids=str,
)
def test_bands_at_odd_lengths_and_head_dims(lengths, dims, options, emulated, rng) -> None:
    emulated.check(*operands(rng, *lengths, *dims), **options)


def test_bfloat16_groups_and_results_of_float32(emulated, rng) -> None:
    q, k, v = operands(rng, 70, 90, 64, heads=(6, 2), dtype=BFLOAT16)
    emulated.check(q, k, v, causal=True)
    emulated.check(q, k, v, out_dtype=np.float32)


def test_masks_by_blocks_and_elements(emulated, rng) -> None:
    q, k, v = operands(rng, 150, 200)
    emulated.check(q, k, v, mask=bg.BlockMask.random(150, 200, per_row=2, block=32, seed=1))
    dense = rng.random((150, 200)) < 0.3
    dense[7] = False  # a row that sees nothing
    emulated.check(q, k, v, mask=bg.BlockMask.from_dense(dense, block=64), causal=True)
    emulated.check(q, k, v, mask=bg.BlockMask.random(150, 200, per_row=1, block=16, heads=(1, 2)), window=(60, 20))


def test_sequences_of_different_lengths(emulated, rng) -> None:
    q, k, v = (rng.standard_normal((n, h, 64)).astype(F16) for n, h in ((100, 2), (140, 1), (140, 1)))
    emulated.check(q, k, v, cu_seqlens_q=[0, 30, 30, 100], cu_seqlens_k=[0, 70, 90, 140], causal=True)


def test_maxima_that_climb_from_tile_to_tile(emulated, rng) -> None:
    q, k, v = operands(rng, 64, 300)
    ramp = np.linspace(0, 30, 300)[None, None, :, None]
    k = (0.8 * np.sign(q[:, :1, :1]) * ramp / 8).astype(F16)
    emulated.check(np.broadcast_to(np.sign(q[:, :1, :1]), q.shape).astype(F16), k, v)


def test_nan_and_infinity_reach_those_who_see_them(emulated, rng) -> None:
    q, k, v = operands(rng, 100, 150)
    for bad in (np.nan, np.inf):
        v[:, :, 90, 5] = bad
        out, _ = emulated.run(q, k, v, causal=True)
        spoiled = np.zeros(out.shape, bool)
        spoiled[:, :, np.arange(100) + 50 >= 90, 5] = True
        np.testing.assert_array_equal(np.isfinite(out), ~spoiled)
