"""Attention over parts of the keys, merged: the same as attention over all of them, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg

from .. import fake_cupy
from .test_gradients import dense

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ("float16", BFLOAT16, "float32", "float64")
CUTS = ([0, 96], [0, 32, 96], [0, 0, 16, 80, 96, 96])


def numbers(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float64) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def operands(heads: tuple[int, int] = (4, 2), keys: int = 96, dtype: Any = np.float64) -> list[Any]:
    """q, k, v and dout for 64 queries."""
    shapes = ((2, heads[0], 64, 16), (2, heads[1], keys, 16), (2, heads[1], keys, 8), (2, heads[0], 64, 8))
    return [numbers(shape, seed, dtype) for seed, shape in enumerate(shapes)]


def pieces(cuts: list[int]) -> Iterator[slice]:
    return (slice(a, b) for a, b in itertools.pairwise(cuts))


def states(q: Any, k: Any, v: Any, cuts: list[int], **options: Any) -> tuple[list[Any], list[Any]]:
    """The results of parts of the keys."""
    found = [bg.attention(q, k[:, :, part], v[:, :, part], return_lse=True, **options) for part in pieces(cuts)]
    return [out for out, _ in found], [lse for _, lse in found]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_the_keys_make_the_whole(cuts: list[int], dtype: Any) -> None:
    q, k, v, _ = operands(dtype=dtype)
    outs, lses = states(q, k, v, cuts)
    out, lse = bg.merge_states(outs, lses)
    want, want_lse = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), return_lse=True)
    assert out.dtype == dtype and lse.dtype == lses[0].dtype
    off = 4 * float(ml_dtypes.finfo(out.dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=off)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-12 if lse.dtype == np.float64 else 1e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sequences"])
def test_layouts(layout: str) -> None:
    outs, lses = states(*operands()[:3], [0, 32, 96])
    want, want_lse = bg.merge_states(outs, lses)
    if layout == "sequences":  # the first batch alone, (length, heads, columns)
        got, lse = bg.merge_states([x[0].swapaxes(0, 1) for x in outs], [x[0] for x in lses])
        np.testing.assert_array_equal(got.swapaxes(0, 1), want[0])
        np.testing.assert_array_equal(lse, want_lse[0])
        return
    turned = [x if layout == "bhsd" else x.swapaxes(1, 2) for x in outs]
    got, lse = bg.merge_states(turned, lses, layout=layout)
    np.testing.assert_array_equal(got if layout == "bhsd" else got.swapaxes(1, 2), want)
    np.testing.assert_array_equal(lse, want_lse)


@pytest.mark.fake
@pytest.mark.parametrize("name", ["numpy", "cuda"])
def test_a_part_that_sees_nothing_adds_nothing_whatever_it_holds(name: str) -> None:
    outs = [np.full((1, 1, 3, 2), x, np.float32) for x in (1.0, np.nan, 3.0)]
    lses = [np.zeros((1, 1, 3), np.float32), np.full((1, 1, 3), -np.inf, np.float32), np.zeros((1, 1, 3), np.float32)]
    for x in lses:
        x[0, 0, 2] = -np.inf  # a query that sees nothing at all
    lses[0][0, 0, 1] = -np.inf
    place = fake_cupy.backend() if name == "cuda" else None
    if place is not None:
        outs, lses = [place.from_host(x) for x in outs], [place.from_host(x) for x in lses]
    out, lse = bg.merge_states(outs, lses)
    douts, dlses = bg.merge_states_backward(out, lse, outs, lses)
    if place is not None:
        out, lse, *rest = (x.get() for x in (out, lse, *douts, *dlses))
        douts, dlses = rest[:3], rest[3:]
    np.testing.assert_array_equal(out[0, 0], [[2, 2], [3, 3], [0, 0]])
    np.testing.assert_array_equal(lse[0, 0], np.array([np.log(2), 0, -np.inf], np.float32))
    for x in (*douts, *dlses):
        assert np.isfinite(x).all()
    assert not douts[1].any() and not dlses[1].any() and not douts[0][0, 0, 1:].any() and douts[2][0, 0, :2].all()


def test_parts_that_are_not_finite_stay_so_where_they_are_seen() -> None:
    outs = [np.array([[[[np.nan], [1.0]]]]), np.array([[[[0.0], [0.0]]]])]
    out, lse = bg.merge_states(outs, [np.zeros((1, 1, 2)), np.array([[[2000.0, 0.0]]])])
    assert np.isnan(out[0, 0, 0, 0]) and out[0, 0, 1, 0] == 0.5  # the weight of the first part underflows to 0
    assert lse[0, 0, 0] == 2000.0
    _, lse = bg.merge_states(outs, [np.full((1, 1, 2), np.nan), np.zeros((1, 1, 2))])
    assert np.isnan(lse).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_logarithms_neither_overflow_nor_lose_the_sum_of_the_weights(dtype: Any) -> None:
    wide = np.float64 if dtype == "float64" else np.float32
    largest = float(ml_dtypes.finfo(dtype).max) / (2 if dtype == wide else 1)
    outs = [np.full((1, 1, 2, 4), largest).astype(dtype)] * 3
    for height in (1e4, -1e4, 1e30):
        out, lse = bg.merge_states(outs, [np.full((1, 1, 2), height, wide)] * 3)
        np.testing.assert_allclose(out.astype(wide), outs[0].astype(wide), rtol=2 * np.finfo(wide).eps)
        np.testing.assert_allclose(lse, wide(height) + np.log(wide(3)), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
def test_the_result_is_rounded_once(dtype: Any) -> None:
    outs, lses = [numbers((1, 2, 33, 5), p, dtype) for p in range(5)], [numbers((1, 2, 33), p, "f4") for p in range(5)]
    wide, _ = bg.merge_states([x.astype(np.float32) for x in outs], lses)
    out, _ = bg.merge_states(outs, lses)
    np.testing.assert_array_equal(out, wide.astype(dtype))
    kept, _ = bg.merge_states(outs, lses, out_dtype="float32")
    assert kept.dtype == np.float32
    np.testing.assert_array_equal(kept, wide)
    exact, exact_lse = bg.merge_states(outs, lses, out_dtype="float64")
    assert exact.dtype == exact_lse.dtype == np.float64
    np.testing.assert_allclose(wide, exact, atol=1e-6)


def test_one_part_is_returned_unchanged_and_steps_give_the_same_as_one() -> None:
    outs, lses = [numbers((1, 2, 33, 5), p, "f4") for p in range(4)], [numbers((1, 2, 33), p, "f4") for p in range(4)]
    out, lse = bg.merge_states(outs[:1], lses[:1])
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, lses[0])
    assert out is not outs[0]
    want, want_lse = bg.merge_states(outs, lses)
    state = (outs[0], lses[0])
    for x, own in zip(outs[1:], lses[1:], strict=True):
        state = bg.merge_states([state[0], x], [state[1], own])
    np.testing.assert_allclose(state[0], want, atol=1e-6)
    np.testing.assert_allclose(state[1], want_lse, atol=1e-6)
    stacked = bg.merge_states(np.stack(outs), np.stack(lses))
    np.testing.assert_array_equal(stacked[0], want)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sequences"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_gradients_are_those_of_differences(layout: str, count: int) -> None:
    heads, queries = 2, 3
    shape = {"bhsd": (1, heads, queries, 4), "bshd": (1, queries, heads, 4), "sequences": (queries, heads, 4)}[layout]
    rows = (heads, queries) if layout == "sequences" else (1, heads, queries)
    outs, lses = [numbers(shape, p) for p in range(count)], [numbers(rows, p + 9) for p in range(count)]
    if count > 2:
        lses[1][..., 0] = -np.inf
    dout, dlse = numbers(shape, 20), numbers(rows, 21)
    options = {} if layout == "sequences" else {"layout": layout}

    def loss(outs: Any, lses: Any) -> float:
        out, lse = bg.merge_states(outs, lses, **options)
        return float((out * dout).sum() + (lse * dlse).sum())

    result, pullback = bg.vjp(bg.merge_states, outs, lses, **options)
    douts, dlses = pullback(dout, dlse)
    np.testing.assert_array_equal(result[0], bg.merge_states(outs, lses, **options)[0])
    step = 1e-5
    for given, got in ((outs, douts), (lses, dlses)):
        for part, gradient in zip(given, got, strict=True):
            for place in np.ndindex(part.shape):
                kept = part[place]
                if kept == -np.inf:
                    assert gradient[place] == 0
                    continue
                part[place] = kept + step
                above = loss(outs, lses)
                part[place] = kept - step
                below = loss(outs, lses)
                part[place] = kept
                assert abs((above - below) / (2 * step) - gradient[place]) < 1e-8
    without, _ = pullback(dout)
    np.testing.assert_array_equal(without[0], douts[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_dtypes_of_the_parts(dtype: Any) -> None:
    outs, lses = [numbers((1, 2, 9, 5), p, dtype) for p in range(3)], [numbers((1, 2, 9), p, "f4") for p in range(3)]
    dout = numbers((1, 2, 9, 5), 7, dtype)
    douts, dlses = bg.merge_states_backward(dout, None, outs, lses)
    wide = [x.astype(np.float64) for x in outs]
    want = bg.merge_states_backward(dout.astype(np.float64), None, wide, lses)
    for x, y in zip(douts, want[0], strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(x.astype(np.float64), y, atol=2 * float(ml_dtypes.finfo(dtype).eps))
    for x, y in zip(dlses, want[1], strict=True):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("through", ["parts", "whole"])
def test_gradients_of_attention_through_a_merge(through: str) -> None:
    """Backward through the merge, and backward of each part with the merged result, give the same."""
    q, k, v, dout = operands()
    dlse = numbers(q.shape[:3], 9)
    cuts = [0, 32, 96]
    outs, lses = states(q, k, v, cuts)
    out, lse = bg.merge_states(outs, lses)
    if through == "whole":
        arguments: list[Any] = [(dout, out, lse, dlse)] * 2
    else:
        douts, dlses = bg.merge_states_backward(dout, dlse, outs, lses)
        arguments = list(zip(douts, outs, lses, dlses, strict=True))
    got = [
        bg.attention_backward(d, q, k[:, :, part], v[:, :, part], o, s, dlse=ds)
        for part, (d, o, s, ds) in zip(pieces(cuts), arguments, strict=True)
    ]
    want = dense(q, k, v, dout, np.True_, dlse=dlse)
    np.testing.assert_allclose(got[0][0] + got[1][0], want.dq, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([x[1] for x in got], axis=2), want.dk, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([x[2] for x in got], axis=2), want.dv, atol=1e-12)


def test_out_is_written_and_must_not_overlap() -> None:
    outs, lses = [numbers((1, 2, 9, 5), p, "f4") for p in range(2)], [numbers((1, 2, 9), p, "f4") for p in range(2)]
    want, _ = bg.merge_states(outs, lses)
    memory = np.full((1, 2, 9, 7), np.nan, np.float32)
    out, _ = bg.merge_states(outs, lses, out=memory[..., 1:6])
    np.testing.assert_array_equal(memory[..., 1:6], want)
    assert np.isnan(memory[..., [0, 6]]).all() and out.base is memory
    with pytest.raises(ValueError, match=r"out: overlaps outs\[1\]"):
        bg.merge_states(outs, lses, out=outs[1])
    half = np.empty((1, 2, 9, 5), np.float16)
    bg.merge_states(outs, lses, out=half)
    np.testing.assert_array_equal(half, want.astype(np.float16))


def test_no_queries() -> None:
    out, lse = bg.merge_states([np.zeros((1, 2, 0, 4))] * 2, [np.zeros((1, 2, 0))] * 2)
    assert out.shape == (1, 2, 0, 4) and lse.shape == (1, 2, 0)
    douts, dlses = bg.merge_states_backward(out, lse, [out, out], [lse, lse])
    assert douts[1].shape == out.shape and dlses[1].shape == lse.shape


OUT, LSE = np.zeros((1, 2, 9, 5)), np.zeros((1, 2, 9))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: bg.merge_states([], []), ValueError, "outs: wanted at least one part, got none"),
        (lambda: bg.merge_states([OUT], []), ValueError, "lses: wanted 1 arrays, one for each of outs, got 0"),
        (lambda: bg.merge_states(3, [LSE]), TypeError, "outs: wanted a sequence of arrays, got an int"),
        (lambda: bg.merge_states([OUT], iter([LSE])), TypeError, "lses: wanted a sequence of arrays"),
        (lambda: bg.merge_states(["a"], [LSE]), TypeError, r"outs\[0\]: wanted a NumPy or CuPy array, got"),
        (lambda: bg.merge_states([OUT, "a"], [LSE] * 2), TypeError, r"outs\[1\]: wanted a dense array on 'cpu'"),
        (lambda: bg.merge_states([OUT, OUT[..., :3]], [LSE] * 2), ValueError, r"outs\[1\]: wanted shape"),
        (lambda: bg.merge_states([OUT[0, 0]], [LSE]), ValueError, r"outs\[0\]: wanted 4 dimensions, or 3 for"),
        (lambda: bg.merge_states([OUT], [LSE[:, 0]]), ValueError, r"lses\[0\]: wanted shape \(1, 2, 9\), a number"),
        (lambda: bg.merge_states([OUT], [LSE], layout="bshd"), ValueError, r"wanted shape \(1, 9, 2\).*layout 'bshd'"),
        (lambda: bg.merge_states([OUT], [LSE], layout="sbhd"), ValueError, "layout: wanted 'bhsd' or 'bshd'"),
        (lambda: bg.merge_states([OUT.astype(int)], [LSE]), TypeError, r"outs\[0\]: does not support dtype int64"),
        (lambda: bg.merge_states([OUT], [LSE.astype("f2")]), TypeError, r"lses\[0\]: does not support dtype float16"),
        (lambda: bg.merge_states([OUT], [LSE], out_dtype=int), TypeError, "out_dtype: does not support dtype int64"),
        (lambda: bg.merge_states([OUT], [LSE], out=3), TypeError, "out: wanted a dense array on 'cpu'"),
        (lambda: bg.merge_states([OUT], [LSE], out=OUT[..., :2]), ValueError, "out: wanted float64 of shape"),
        (lambda: bg.merge_states_backward(OUT[:, :1], None, [OUT], [LSE]), ValueError, "dout: wanted shape"),
        (lambda: bg.merge_states_backward(OUT, OUT, [OUT], [LSE]), ValueError, "dlse: wanted shape"),
        (lambda: bg.merge_states_backward(None, LSE, [OUT], [LSE]), TypeError, "dout: wanted a dense array"),
        (lambda: bg.vjp(bg.merge_states, [OUT], [LSE], out=OUT), TypeError, "out: has no gradient; call merge_states"),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


# ------------------------------------------------------------------- gradients of one part with the merged result
def elements(heads: tuple[int, int], density: float = 0.1) -> Any:
    return np.random.default_rng(3).random((*heads, 64, 96)) < density


MASKS: dict[str, Callable[[], bg.BlockMask]] = {
    "full": lambda: bg.BlockMask.full(64, 96, block=16),
    "causal": lambda: bg.BlockMask.causal(64, 96, block=16),
    "causal, top-left": lambda: bg.BlockMask.causal(64, 96, align="top-left", block=16),
    "window": lambda: bg.BlockMask.window(64, 96, left=20, right=3, block=16),
    "prefix": lambda: bg.BlockMask.prefix(64, 96, length=10, block=16),
    "sinks": lambda: bg.BlockMask.sinks(64, 96, count=3, block=16) | bg.BlockMask.causal(64, 96, block=16),
    "global": lambda: bg.BlockMask.global_tokens(64, 96, tokens=[2, 40], block=16),
    "dilated": lambda: bg.BlockMask.dilated(64, 96, count=7, dilation=3, block=16),
    "random": lambda: bg.BlockMask.random(64, 96, per_row=2, block=16),
    "per head": lambda: bg.BlockMask.random(64, 96, per_row=2, block=16, heads=(1, 4)),
    "per head of keys": lambda: bg.BlockMask.random(64, 96, per_row=2, block=16, heads=(1, 2)),
    "per batch and head": lambda: bg.BlockMask.random(64, 96, per_row=1, block=16, heads=(2, 4)),
    "elements": lambda: bg.BlockMask.from_dense(elements((1, 1))[0, 0], block=16),
    "elements per batch and head": lambda: bg.BlockMask.from_dense(elements((2, 4), 0.02), block=(16, 32)),
    "nothing": lambda: bg.BlockMask.from_dense(np.zeros((64, 96), bool), block=16),
}


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("name", MASKS)
def test_the_keys_of_one_part_get_exact_gradients_from_the_merged_result(name: str, softcap: float | None) -> None:
    """Queries are cut too: dk and dv of a part are the sums over the queries of all pieces."""
    mask = MASKS[name]()
    q, k, v, dout = operands()
    dlse = numbers(q.shape[:3], 9)
    options: dict[str, Any] = {"softcap": softcap, "scale": 0.4}
    seen = mask.to_dense().reshape(*mask.heads, 64, 96)
    seen = np.repeat(seen, 4 // mask.heads[1], axis=1)
    want = dense(q, k, v, dout, seen, scale=0.4, cap=softcap, dlse=dlse)
    got = [np.zeros_like(x) for x in (q, k, v)]
    for rows in pieces([0, 32, 64]):
        some = q[:, :, rows]
        outs, lses = [], []
        for keys in pieces([0, 32, 64, 96]):
            part = {"mask": mask[rows, keys], "return_lse": True, **options}
            out, lse = bg.attention(some, k[:, :, keys], v[:, :, keys], **part)
            outs.append(out)
            lses.append(lse)
        out, lse = bg.merge_states(outs, lses)
        delta = (dout[:, :, rows] * out).sum(axis=-1)
        for number, keys in enumerate(pieces([0, 32, 64, 96])):
            given: tuple[Any, Any] = (out, None) if number else (None, delta)
            dq, dk, dv = bg.attention_backward(
                dout[:, :, rows], some, k[:, :, keys], v[:, :, keys], given[0], lse, delta=given[1],
                dlse=dlse[:, :, rows], mask=mask[rows, keys], **options,
            )  # fmt: skip
            got[0][:, :, rows] += dq
            got[1][:, :, keys] += dk
            got[2][:, :, keys] += dv
    for what, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12, err_msg=what)


@pytest.mark.parametrize("heads", [(1, 1), (6, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_heads_and_dtypes_of_one_part(heads: tuple[int, int], dtype: Any) -> None:
    q, k, v, dout = operands(heads, dtype=dtype)
    wide = [x.astype(np.float64) for x in (q, k, v, dout)]
    want = dense(*wide, bg.BlockMask.causal(64, 96, block=16).to_dense())
    mask = bg.BlockMask.causal(64, 96, block=16)
    cuts = [0, 48, 96]
    found = [
        bg.attention(q, k[:, :, keys], v[:, :, keys], mask=mask[:, keys], return_lse=True, out_dtype=float)
        for keys in pieces(cuts)
    ]
    out, lse = bg.merge_states(*zip(*found, strict=True), out_dtype=dtype)
    acc = np.float64 if dtype == "float64" else np.float32
    got = [
        bg.attention_backward(dout, q, k[:, :, keys], v[:, :, keys], out, lse.astype(acc), mask=mask[:, keys])
        for keys in pieces(cuts)
    ]
    joined = (
        got[0][0].astype(float) + got[1][0].astype(float),
        *(np.concatenate([x[i] for x in got], axis=2).astype(float) for i in (1, 2)),
    )
    for what, x, y in zip(("dq", "dk", "dv"), joined, want, strict=True):
        assert got[0][0].dtype == dtype
        bound = 8 * float(ml_dtypes.finfo(dtype).eps) * abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=bound, err_msg=what)
