"""Attention on the plain cores as it is, launched as it is, on the CPU: bands, masks by tiles, sequences, results.

In float64: exponentials of float32 are assembly. Few queries and keys, since a thread of a warp is a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention.call import AttentionCall
from bsrgemm._attention.host import ENGINE
from bsrgemm.dtypes import FLOAT8

from . import emulator


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


class Emulated:
    """`bsrgemm.attention` on NumPy arrays, once by the host and once by the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.calls = 0

    def _forward(self, call: AttentionCall) -> None:
        emulator.run_attention(call)
        self.calls += 1

    def check(self, q: Any, k: Any, v: Any, error: float = 1e-12, **options: Any) -> None:
        want, want_lse = bg.attention(q, k, v, return_lse=True, **options)
        with self.monkeypatch.context() as patched:
            patched.setattr(ENGINE, "forward", lambda call: self._forward(call))
            out = np.full_like(want, 77)
            got, lse = bg.attention(q, k, v, return_lse=True, out=out, **options)
        assert self.calls
        np.testing.assert_allclose(got, want, rtol=error, atol=error)
        np.testing.assert_allclose(lse, want_lse, rtol=error, atol=error)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Emulated]:
    with emulator.emulated(folder):
        yield Emulated(monkeypatch)


def operands(
    rng: np.random.Generator, S_q: int, S_k: int, D: int = 8, D_v: int = 8, heads: tuple[int, int] = (2, 1)
) -> tuple[Any, ...]:
    shapes = ((1, heads[0], S_q, D), (1, heads[1], S_k, D), (1, heads[1], S_k, D_v))
    return tuple(rng.standard_normal(shape) for shape in shapes)


@pytest.mark.parametrize("lengths", [(1, 1), (5, 9), (9, 5)], ids=str)
def test_bands(lengths: tuple[int, int], emulated: Emulated, rng: np.random.Generator) -> None:
    q, k, v = operands(rng, *lengths)
    for options in ({}, {"causal": True}, {"window": (2, 1)}, {"window": (3, 0), "align": "top-left"}):
        emulated.check(q, k, v, **options)


def test_odd_columns_softcap_and_scales(emulated: Emulated, rng: np.random.Generator) -> None:
    q, k, v = operands(rng, 4, 7, 5, 33)
    for options in ({"softcap": 2.0}, {"scale": -0.7}, {"scale": 0.0, "causal": True}):
        emulated.check(q, k, v, **options)


def test_masks_by_blocks_and_elements(emulated: Emulated, rng: np.random.Generator) -> None:
    S = 37  # blocks of 16 by 16 in tiles of the kernel, the last ones cut
    q, k, v = operands(rng, S, S, heads=(1, 1))
    dense = rng.random((S, S)) < 0.1
    dense[3] = False
    emulated.check(q, k, v, mask=bg.BlockMask.from_dense(dense, block=16))
    emulated.check(q, k, v, mask=bg.BlockMask.random(S, per_row=1, block=16) & bg.BlockMask.causal(S, block=16))


def test_patterns_per_head_and_a_band_on_top(emulated: Emulated, rng: np.random.Generator) -> None:
    S = 20
    q, k, v = operands(rng, S, S, heads=(2, 2))
    emulated.check(q, k, v, mask=bg.BlockMask.random(S, per_row=1, block=16, heads=(1, 2)), window=(6, 2))
    q, k, v = (np.concatenate([x, -x]) for x in operands(rng, S, S, heads=(4, 2)))
    mask = bg.BlockMask.random(S, per_row=1, block=16, heads=(2, 2), seed=3)  # two heads share a pattern
    emulated.check(q, k, v, mask=mask)


def test_sequences_of_different_lengths(emulated: Emulated, rng: np.random.Generator) -> None:
    lengths = [0, 3, 1, 6, 0]
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    q, k, v = (rng.standard_normal((10, heads, 8)) for heads in (2, 1, 1))
    emulated.check(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True)


def test_batches_strides_and_no_logarithms(emulated: Emulated, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((2, n, heads, 9))[..., :8].swapaxes(1, 2) for n, heads in ((7, 4), (9, 2), (9, 2)))
    emulated.check(q, k, v, causal=True)
    room = np.full((2, 7, 4, 19), 77.0)
    with emulated.monkeypatch.context() as patched:
        patched.setattr(ENGINE, "forward", lambda call: emulator.run_attention(call, emulator.guarded))
        bg.attention(q, k, v, out=room[..., 1:17:2].swapaxes(1, 2))
    np.testing.assert_allclose(room[..., 1:17:2].swapaxes(1, 2), bg.attention(q, k, v), rtol=1e-12, atol=1e-12)
    room[..., 1:17:2] = 77
    assert (room == 77).all()


def test_nan_and_infinity_reach_those_who_see_them(emulated: Emulated, rng: np.random.Generator) -> None:
    q, k, v = operands(rng, 6, 6, heads=(1, 1))
    v[0, 0, 4] = np.nan
    k[0, 0, 5] = np.inf
    emulated.check(q, k, v, causal=True)


def test_fp8(emulated: Emulated, rng: np.random.Generator) -> None:
    """As the host computes it from the same bytes, but for sums of float32."""
    q, k, v = (x.astype(FLOAT8).view(np.uint8) for x in operands(rng, 5, 9))
    emulated.check(q, k, v, 2e-6, q_scale=0.5, k_scale=2.0, v_scale=3.0, out_dtype=np.float32)
