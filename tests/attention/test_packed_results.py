"""Results may be views of one packed array, as frameworks keep q, k and v; they must not share an element."""

from __future__ import annotations

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.registry import host

B, H, S, D = 2, 3, 10, 8
RNG = np.random.default_rng(5)
QKV = RNG.standard_normal((B, S, 3, H, D))
Q, K, V = QKV.transpose(2, 0, 3, 1, 4)
OUT, LSE = bg.attention(Q, K, V, causal=True, return_lse=True)
DOUT = RNG.standard_normal(OUT.shape)


def test_gradients_may_be_parts_of_one_array() -> None:
    want = bg.attention_backward(DOUT, Q, K, V, OUT, LSE, causal=True)
    packed = np.full_like(QKV, np.nan)
    dq, dk, dv = packed.transpose(2, 0, 3, 1, 4)
    bg.attention_backward(DOUT, Q, K, V, OUT, LSE, causal=True, dq=dq, dk=dk, dv=dv)
    for part, x in enumerate(want):
        np.testing.assert_array_equal(packed[:, :, part].transpose(0, 2, 1, 3), x)


def test_a_result_may_lie_between_the_rows_of_an_operand() -> None:
    both = np.full((B, H, S, 2, D), np.nan)
    both[..., 0, :] = Q
    bg.attention(both[..., 0, :], K, V, causal=True, out=both[..., 1, :])
    np.testing.assert_array_equal(both[..., 1, :], OUT)
    np.testing.assert_array_equal(both[..., 0, :], Q)


def test_parts_that_share_an_element_are_refused() -> None:
    packed = np.empty((B, S, 3, H, D))
    dq, _, dv = packed.transpose(2, 0, 3, 1, 4)
    with pytest.raises(ValueError, match="dk: overlaps dq"):
        bg.attention_backward(DOUT, Q, K, V, OUT, LSE, dq=dq, dk=dq[:, ::-1], dv=dv)
    wide = np.empty((B, H, S, D + 4))
    with pytest.raises(ValueError, match="dv: overlaps dk"):
        bg.attention_backward(DOUT, Q, K, V, OUT, LSE, dk=wide[..., :D], dv=wide[..., 4:])


@pytest.mark.parametrize("dtype", ["f2", "f8", "c16"])
def test_arrays_overlap_if_they_share_a_byte(dtype: str) -> None:
    flat = np.zeros(96, dtype)
    grid, backend = flat.reshape(8, 12), host()
    apart = [(grid[:, :6], grid[:, 6:]), (flat[::2], flat[1::2]), (flat[:40], flat[40:]), (grid[::2], grid[1::2])]
    shared = [(grid[:, :7], grid[:, 6:]), (flat[::2], flat[3::3]), (grid, grid.T), (flat[::-1], flat[95:])]
    for x, y in apart:
        assert not backend.overlap(x, y) and not backend.overlap(y, x)
    for x, y in shared:
        assert backend.overlap(x, y) and backend.overlap(y, x)
    assert not backend.overlap(flat[:0], flat) and not backend.overlap(flat, flat[5:5])
    assert backend.overlap(flat.view(np.uint8)[1:2], flat[:1])
