"""Merged parts of attention, rectangles of masks and gradients of parts on a card, beside those of the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm.dtypes import BFLOAT16

pytestmark = pytest.mark.gpu

F16, F32, F64 = (np.dtype(x) for x in ("float16", "float32", "float64"))
DTYPES = (F16, BFLOAT16, F32, F64)
#: By how much weights are rounded on the way, of the largest number of a result.
FAR = {F16: 4e-3, BFLOAT16: 3e-2, F32: 3e-5, F64: 1e-11}
BLOCK, S_Q, S_K = 32, 96, 160
WHERE: dict[str, Any] = {"block": BLOCK, "device": "cpu"}
MASKS: dict[str, Callable[[], BlockMask]] = {
    "full": lambda: BlockMask.full(S_Q, S_K, **WHERE),
    "causal": lambda: BlockMask.causal(S_Q, S_K, **WHERE),
    "window": lambda: BlockMask.window(S_Q, S_K, left=40, right=3, **WHERE),
    "dilated": lambda: BlockMask.dilated(S_Q, S_K, count=9, dilation=5, **WHERE),
    "random": lambda: BlockMask.random(S_Q, S_K, per_row=1, heads=(2, 4), **WHERE),
    "elements": lambda: BlockMask.from_dense(
        np.random.default_rng(0).random((1, 2, S_Q, S_K)) < 0.03, block=(BLOCK, 2 * BLOCK)
    ),
}


def pieces(*cuts: int) -> Iterator[slice]:
    return (slice(a, b) for a, b in itertools.pairwise(cuts))


def states(dtype: Any, count: int, shape: tuple[int, ...] = (2, 3, 37, 40)) -> tuple[list[Any], list[Any]]:
    """Parts on the host; some of them see nothing."""
    rng = np.random.default_rng(count)
    outs = [rng.standard_normal(shape).astype(dtype) for _ in range(count)]
    lses = [rng.standard_normal(shape[:-1]).astype(F64 if dtype == F64 else F32) for _ in range(count)]
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        hidden = rng.random(lse.shape) < 0.3
        hidden[..., 0] = True  # the first query sees nothing in any part
        lse[hidden] = -np.inf
        out[hidden] = np.nan if number % 2 else 0
    return outs, lses


def near(got: Any, want: Any, off: float, what: str = "") -> None:
    assert type(got).__module__ != "numpy" and got.dtype == want.dtype
    np.testing.assert_allclose(got.get().astype(F64), want.astype(F64), rtol=0, atol=off, err_msg=what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merges_and_their_gradients(dtype: Any, count: int, layout: str) -> None:
    import cupy

    outs, lses = states(dtype, count)
    if layout == "bshd":
        outs = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in outs]
    there = [cupy.asarray(x) for x in outs], [cupy.asarray(x) for x in lses]
    want, pull = bg.vjp(bg.merge_states, outs, lses, layout=layout)
    got, pull_there = bg.vjp(bg.merge_states, *there, layout=layout)
    unit = float(ml_dtypes.finfo(dtype).eps)
    small = float(np.finfo(lses[0].dtype).eps)
    near(got[0], want[0], 4 * unit + 16 * small)
    near(got[1], want[1], 16 * small)
    dout, dlse = want[0] * want[0].dtype.type(0.5), np.where(np.isfinite(want[1]), want[1], 0)
    found, gradients = pull_there(cupy.asarray(dout), cupy.asarray(dlse)), pull(dout, dlse)
    for number in range(count):
        near(found[0][number], gradients[0][number], 4 * unit + 32 * small, "douts")
        near(found[1][number], gradients[1][number], 400 * small, "dlses")


@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32], ids=str)
def test_out_and_out_dtype(dtype: Any) -> None:
    import cupy

    outs, lses = states(dtype, 3)
    there = [cupy.asarray(x) for x in outs], [cupy.asarray(x) for x in lses]
    want, _ = bg.merge_states(outs, lses, out_dtype="float32")
    got, _ = bg.merge_states(*there, out_dtype="float32")
    near(got, want, 1e-5)
    memory = cupy.asarray(np.full((2, 3, 37, 48), 7, dtype))
    bg.merge_states(*there, out=memory[..., 4:44])
    near(memory[..., 4:44], want.astype(dtype), 4 * float(ml_dtypes.finfo(dtype).eps))
    assert (memory[..., :4].get() == 7).all() and (memory[..., 44:].get() == 7).all()


@pytest.mark.parametrize("name", MASKS)
def test_rectangles_of_masks(name: str) -> None:
    mask = MASKS[name]()
    there = mask.to_device("cuda")
    for rows, keys in itertools.product(pieces(0, 64, S_Q), pieces(0, 64, 128, S_K)):
        want, got = mask[rows, keys], there[rows, keys]
        assert got.get() == want and got.is_empty == want.is_empty and got.heads == mask.heads
    if mask.heads[1] > 1:
        assert there[0, 1:, 0:32, :].get() == mask[0, 1:, 0:32, :]
    assert there[:, :] is there


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_parts_of_the_keys_make_the_whole_and_have_exact_gradients(name: str, dtype: Any) -> None:
    """Attention over rectangles of the mask, merged; then gradients of each part from the merged result."""
    import cupy

    rng = np.random.default_rng(7)
    shapes = ((2, 4, S_Q, 64), (2, 2, S_K, 64), (2, 2, S_K, 64), (2, 4, S_Q, 64))
    some = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    mask = MASKS[name]()
    q, k, v, dout = (x.astype(F64) for x in some)
    want, want_lse = bg.attention(q, k, v, mask=mask, return_lse=True)
    gradients = bg.attention_backward(dout, q, k, v, want, want_lse, mask=mask)
    q, k, v, dout = (cupy.asarray(x) for x in some)
    there = mask.to_device("cuda")
    acc = F64 if dtype == F64 else F32
    parts = list(pieces(0, 64, S_K))
    found = [
        bg.attention(q, k[:, :, keys], v[:, :, keys], mask=there[:, keys], return_lse=True, out_dtype=acc)
        for keys in parts
    ]
    out, lse = bg.merge_states(*zip(*found, strict=True), out_dtype=dtype)
    near(out, want.astype(dtype), FAR[dtype])
    near(lse, want_lse.astype(acc), FAR[dtype])
    shares = [
        bg.attention_backward(dout, q, k[:, :, keys], v[:, :, keys], out, lse, mask=there[:, keys]) for keys in parts
    ]
    dq = sum(share[0].astype(acc) for share in shares)
    joined = (dq, *(cupy.concatenate([share[i].astype(acc) for share in shares], axis=2) for i in (1, 2)))
    for what, x, y in zip(("dq", "dk", "dv"), joined, gradients, strict=True):
        near(x, y.astype(acc), FAR[dtype] * max(1, abs(y).max()), what)
