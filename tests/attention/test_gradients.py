"""Gradients of attention on the CPU against a dense backward pass in float64, and against differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import host_tiles

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Gradients(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


def numbers(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float64) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def operands(B: int, heads: tuple[int, int], lengths: tuple[int, int], columns: tuple[int, int] = (8, 8)) -> list[Any]:
    """q, k, v and dout in float64."""
    (H, H_kv), (S_q, S_k), (D, D_v) = heads, lengths, columns
    shapes = ((B, H, S_q, D), (B, H_kv, S_k, D), (B, H_kv, S_k, D_v), (B, H, S_q, D_v))
    return [numbers(shape, seed) for seed, shape in enumerate(shapes)]


def seen(S_q: int, S_k: int, causal: bool = False, window: Any = None, align: str = "bottom-right") -> Any:
    place = np.arange(S_q)[:, None] + (S_k - S_q if align == "bottom-right" else 0)
    left, right = (-1, -1) if window is None else window
    key = np.arange(S_k)
    found = np.ones((S_q, S_k), bool)
    if left >= 0:
        found &= key >= place - left
    if causal or right >= 0:
        found &= key <= place + (0 if causal else right)
    return found


def dense(q: Any, k: Any, v: Any, dout: Any, visible: Any, *, scale: Any = None, cap: Any = None, dlse: Any = 0) -> Any:
    """The gradients by matrices of all scores, in float64."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    B, H_kv = k.shape[:2]
    G = q.shape[1] // H_kv
    wide_k, wide_v = np.repeat(k, G, axis=1), np.repeat(v, G, axis=1)
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    raw = scale * q @ wide_k.swapaxes(-1, -2)
    scores = np.where(visible, raw if cap is None else cap * np.tanh(raw / cap), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    e = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = e.sum(axis=-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    delta = (dout * (p @ wide_v)).sum(axis=-1, keepdims=True) - (dlse if np.isscalar(dlse) else dlse[..., None])
    ds = p * (dout @ wide_v.swapaxes(-1, -2) - delta)
    if cap is not None:
        ds = ds * (1 - np.tanh(raw / cap) ** 2)
    dk, dv = scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
    return Gradients(scale * ds @ wide_k, *(x.reshape(B, H_kv, G, *x.shape[2:]).sum(axis=2) for x in (dk, dv)))


def close(got: Any, want: Any, atol: float = 1e-12) -> None:
    for name, x, y in zip(Gradients._fields, got, want, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=atol, err_msg=name)


def backward(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> Gradients:
    dlse = options.pop("dlse", None)
    out, lse = bg.attention(q, k, v, return_lse=True, **options)
    return Gradients(*bg.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options))


@pytest.fixture(params=["one tile", "small tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small tiles":
        for name, value in (("_TILE_ROWS", 24), ("_TILE_KEYS", 20), ("_LEAST_QUERIES", 4)):
            monkeypatch.setattr(host_tiles, name, value)


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (7, 7), (14, 2), (8, 1)])
@pytest.mark.parametrize("lengths", [(1, 1), (33, 47), (47, 33), (5, 130)])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_and_lengths(tiles: None, heads: tuple[int, int], lengths: tuple[int, int], causal: bool) -> None:
    q, k, v, dout = operands(2, heads, lengths, (8, 6))
    dlse = numbers(q.shape[:3], 9)
    got = backward(q, k, v, dout, causal=causal, dlse=dlse)
    close(got, dense(q, k, v, dout, seen(*lengths, causal), dlse=dlse))


@pytest.mark.parametrize("window", [(3, 9), (0, 0), (-1, 2), (40, -1), (0, 60)])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_softcap(tiles: None, window: tuple[int, int], align: str, softcap: float | None) -> None:
    q, k, v, dout = operands(1, (4, 2), (50, 70))
    got = backward(q, k, v, dout, window=window, align=align, softcap=softcap, scale=0.7)
    close(got, dense(q, k, v, dout, seen(50, 70, window=window, align=align), scale=0.7, cap=softcap))


MASKS: dict[str, Callable[[int, int], bg.BlockMask]] = {
    "random": lambda q, k: bg.BlockMask.random(q, k, per_row=2, block=16, seed=1),
    "per head": lambda q, k: bg.BlockMask.random(q, k, per_row=2, block=16, seed=1, heads=(1, 4)),
    "per head of keys": lambda q, k: bg.BlockMask.random(q, k, per_row=2, block=16, seed=1, heads=(1, 2)),
    "per batch and head": lambda q, k: bg.BlockMask.random(q, k, per_row=2, block=16, seed=1, heads=(2, 4)),
    "elements": lambda q, k: bg.BlockMask.from_dense(numbers((q, k)) > 0.8, block=16),
    "oblong": lambda q, k: bg.BlockMask.from_dense(numbers((q, k)) > 1.5, block=(16, 32)),
    "nothing": lambda q, k: bg.BlockMask.from_dense(np.zeros((q, k), bool), block=16),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_masks(tiles: None, name: str, causal: bool) -> None:
    lengths = (70, 90)
    mask = MASKS[name](*lengths)
    q, k, v, dout = operands(2, (4, 2), lengths)
    visible = np.broadcast_to(mask.to_dense(), (*mask.heads, *lengths))
    visible = np.repeat(visible, 4 // visible.shape[1], axis=1) & seen(*lengths, causal)
    got = backward(q, k, v, dout, mask=mask, causal=causal, dlse=np.ones(q.shape[:3]))
    close(got, dense(q, k, v, dout, visible, dlse=np.ones(q.shape[:3])))
    unseen_keys = ~visible.reshape(visible.shape[0], 2, -1, lengths[1]).any(axis=2)
    for x in (got.dk, got.dv):
        assert not x[np.broadcast_to(unseen_keys, x.shape[:3])].any()
    assert not got.dq[np.broadcast_to(~visible.any(axis=-1), got.dq.shape[:3])].any()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_given_arrays(layout: str) -> None:
    q, k, v, dout = operands(2, (4, 2), (21, 30))
    want = backward(q, k, v, dout)
    turned = [x if layout == "bhsd" else x.swapaxes(1, 2) for x in (q, k, v, dout)]
    out, lse = bg.attention(*turned[:3], layout=layout, return_lse=True)
    results = [np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan)[..., ::2] for x in turned[:3]]
    dq, dk, dv = results
    got = bg.attention_backward(turned[3], *turned[:3], out, lse, layout=layout, dq=dq, dk=dk, dv=dv)
    for x, y, z in zip(got, results, want, strict=True):
        assert x is y
        np.testing.assert_array_equal(x if layout == "bhsd" else x.swapaxes(1, 2), z)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_sequences_of_different_lengths(causal: bool, align: str) -> None:
    queries, keys = [0, 3, 3, 20, 31], [0, 5, 9, 9, 40]
    q, k, v, dout = (x[0].swapaxes(0, 1) for x in operands(1, (4, 2), (31, 40)))
    options: dict[str, Any] = {"cu_seqlens_q": queries, "cu_seqlens_k": keys, "causal": causal, "align": align}
    dlse = numbers((4, 31))
    got = backward(q, k, v, dout, dlse=dlse, **options)
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True):
        parts = [x[a:b].swapaxes(0, 1)[None] for x, a, b in ((q, q0, q1), (k, k0, k1), (v, k0, k1), (dout, q0, q1))]
        if q1 == q0 or k1 == k0:
            assert not got.dq[q0:q1].any() and not got.dk[k0:k1].any() and not got.dv[k0:k1].any()
            continue
        visible = seen(q1 - q0, k1 - k0, causal, align=align)
        want = dense(*parts, visible, dlse=dlse[None, :, q0:q1])
        mine = [x[a:b].swapaxes(0, 1)[None] for x, a, b in zip(got, (q0, k0, k0), (q1, k1, k1), strict=True)]
        close(mine, want)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
def test_narrow_dtypes_are_summed_in_float32(dtype: Any) -> None:
    q, k, v, dout = (x.astype(dtype) for x in operands(1, (4, 2), (100, 600), (16, 16)))
    got = backward(q, k, v, dout, causal=True)
    want = dense(q, k, v, dout, seen(100, 600, True))
    # Beside the rounding of the results there is that of `out`, from which delta is computed.
    step = float(ml_dtypes.finfo(dtype).eps)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == dtype
        error = np.abs(x.astype(np.float64) - y)
        assert error.max() <= (64 if dtype is np.float32 else 4) * step * max(1.0, np.abs(y).max())


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=str)
def test_the_result_and_its_gradient_may_be_float32(dtype: Any) -> None:
    q, k, v, dout = operands(1, (2, 1), (40, 50), (16, 16))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    out, lse = bg.attention(q, k, v, return_lse=True, out_dtype=np.float32)
    got = bg.attention_backward(dout.astype(np.float32), q, k, v, out, lse)
    want = dense(q, k, v, dout.astype(np.float32), seen(40, 50))
    for x, y in zip(got, want, strict=True):
        assert np.abs(x.astype(np.float64) - y).max() <= float(ml_dtypes.finfo(dtype).eps) * max(1.0, np.abs(y).max())


def test_delta_takes_the_place_of_the_result() -> None:
    q, k, v, dout = operands(1, (4, 2), (21, 30))
    out, lse = bg.attention(q, k, v, return_lse=True)
    want = bg.attention_backward(dout, q, k, v, out, lse)
    close(bg.attention_backward(dout, q, k, v, None, lse, delta=(dout * out).sum(axis=-1)), want)
    assert not np.allclose(bg.attention_backward(dout, q, k, v, out, lse, delta=np.zeros_like(lse))[0], want[0])


def test_parts_of_the_keys_give_their_shares() -> None:
    q, k, v, dout = operands(1, (4, 2), (21, 60))
    whole = bg.attention(q, k, v, return_lse=True)
    want = bg.attention_backward(dout, q, k, v, *whole)
    parts = [bg.attention_backward(dout, q, k[:, :, a:b], v[:, :, a:b], *whole) for a, b in ((0, 7), (7, 40), (40, 60))]
    dk, dv = (np.concatenate([part[i] for part in parts], axis=2) for i in (1, 2))
    close((sum(part[0] for part in parts), dk, dv), want)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}, {"window": (2, 2)}], ids=str)
def test_gradients_match_differences(options: dict[str, Any]) -> None:
    q, k, v, dout = operands(1, (2, 1), (6, 7), (4, 3))
    dlse = numbers((1, 2, 6), 5)

    def loss() -> float:
        out, lse = bg.attention(q, k, v, return_lse=True, **options)
        return float((out * dout).sum() + (lse * dlse).sum())

    step = 1e-5
    for operand, gradient in zip((q, k, v), backward(q, k, v, dout, dlse=dlse, **options), strict=True):
        for place in np.ndindex(operand.shape):
            before = operand[place]
            operand[place] = before + step
            above = loss()
            operand[place] = before - step
            below = loss()
            operand[place] = before
            assert gradient[place] == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(
    tiles: None, value: float, where: str, masked: bool
) -> None:
    """Row 5 of a query or of a key is broken; by the band or by the mask some do not see it."""
    q, k, v, dout = operands(1, (4, 2), (30, 30))
    mask = bg.BlockMask.from_dense(seen(30, 30, window=(2, 3)), block=16) if masked else None
    options: dict[str, Any] = {"mask": mask} if masked else {"window": (2, 3)}
    visible = seen(30, 30, window=(2, 3))
    {"q": q, "k": k, "v": v, "dout": dout}[where][0, 0, 5] = value
    got = backward(q, k, v, dout, **options)
    # Heads 0 and 1 of the queries read head 0 of the keys.
    queries = visible[:, 5] if where in "kv" else np.arange(30) == 5
    keys = visible[queries].any(axis=0)
    clean = [got.dq[0, :, ~queries], got.dk[0, 0, ~keys], got.dv[0, 0, ~keys], got.dk[0, 1], got.dv[0, 1]]
    for x in clean:
        assert np.isfinite(x).all()
    assert np.isfinite(got.dq[0, 2:]).all()
    assert not np.isfinite(got.dq[0, 0, queries]).all()


def test_a_query_whose_scores_are_all_minus_infinity_has_no_gradient() -> None:
    q, k, v, dout = operands(1, (1, 1), (2, 3), (1, 1))
    k[...], q[0, 0, 0] = -np.inf, 1.0
    out, lse = bg.attention(q, k, v, return_lse=True)
    assert np.isnan(lse[0, 0, 0])
    assert np.isnan(bg.attention_backward(dout, q, k, v, out, lse)[0][0, 0, 0]).all()


def test_nothing_at_all() -> None:
    for lengths in ((0, 5), (5, 0), (0, 0)):
        q, k, v, dout = operands(2, (4, 2), lengths)
        got = backward(q, k, v, dout)
        assert [x.shape for x in got] == [x.shape for x in (q, k, v)]
        assert not any(x.any() for x in got)
    empty = np.ones((0, 4, 5, 8))
    assert [x.shape for x in backward(empty, empty, empty, empty)] == [empty.shape] * 3


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = operands(2, (4, 2), (64, 200))
    want = backward(q, k, v, dout, causal=True)
    monkeypatch.setattr(host_tiles, "_SHARED", 0)
    got = backward(q, k, v, dout, causal=True)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_operands_are_not_changed() -> None:
    q, k, v, dout = operands(1, (2, 1), (20, 30))
    out, lse = bg.attention(q, k, v, causal=True, window=(2, 0), return_lse=True)
    before = [x.copy() for x in (q, k, v, dout, out, lse)]
    bg.attention_backward(dout, q, k, v, out, lse, causal=True, window=(2, 0), dlse=np.ones_like(lse))
    for x, y in zip(before, (q, k, v, dout, out, lse), strict=True):
        np.testing.assert_array_equal(x, y)


Q, K, V, DOUT = operands(1, (2, 1), (4, 5))
OUT, LSE = bg.attention(Q, K, V, return_lse=True)
DELTA = np.zeros_like(LSE)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"lse": None}, TypeError, "lse: wanted an array on 'cpu', where q is, got None"),
        ({"lse": LSE[0]}, ValueError, r"lse: wanted float64 of shape \(1, 2, 4\), got float64 of shape \(2, 4\)"),
        ({"lse": LSE.astype("float32")}, TypeError, "lse: wanted float64 of shape"),
        ({"out": None}, ValueError, "out: wanted the result of attention, or delta instead, got None for both"),
        ({"out": OUT[:, :1]}, ValueError, r"out: wanted float64 of shape \(1, 2, 4, 8\), got"),
        ({"dout": DOUT.astype("float32")}, TypeError, "dout: wanted float64 of shape"),
        ({"dout": DOUT[..., :4]}, ValueError, "dout: wanted float64 of shape"),
        ({"dout": "x"}, TypeError, "dout: wanted a dense array on 'cpu'"),
        ({"delta": DELTA[0]}, ValueError, "delta: wanted float64 of shape"),
        ({"dlse": DELTA.astype("float32")}, TypeError, "dlse: wanted float64 of shape"),
        ({"q": Q.astype("int8")}, TypeError, "q: "),
        ({"k": K.astype("float32")}, TypeError, "k: wanted float64 as q has"),
        ({"dq": Q[:, :1].copy()}, ValueError, "dq: wanted float64 of shape"),
        ({"dk": K}, ValueError, "dk: overlaps k"),
        ({"dv": "x"}, TypeError, "dv: wanted a dense array on 'cpu', where q is, got a str"),
        ({"dk": DELTA}, ValueError, "dk: wanted float64 of shape"),
        ({"layout": "sbhd"}, ValueError, "layout: wanted 'bhsd' or 'bshd'"),
        ({"align": "left"}, ValueError, "align: wanted"),
        ({"causal": 2}, TypeError, "causal: wanted True or False"),
        ({"deterministic": "no"}, TypeError, "deterministic: wanted True or False"),
        ({"window": 3}, TypeError, "window: wanted two integers"),
        ({"softcap": -1.0}, ValueError, "softcap: wanted a finite number above 0"),
        ({"mask": np.ones((4, 5), bool)}, TypeError, "mask: wanted a BlockMask"),
        ({"mask": bg.BlockMask.full(4, 4, block=16)}, ValueError, r"mask: wanted shape \(4, 5\)"),
        ({"cu_seqlens_q": [0, 4]}, ValueError, "q: wanted 3 dimensions"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_nothing_is_written(change: dict[str, Any], error: type[Exception], text: str) -> None:
    results = {"dq": np.full_like(Q, 7), "dk": np.full_like(K, 7), "dv": np.full_like(V, 7)}
    call = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE, **results, **change}
    with pytest.raises(error, match=text):
        bg.attention_backward(**call)
    for x in results.values():
        assert (x == 7).all()


def test_results_may_not_overlap_each_other() -> None:
    both = np.empty((1, 1, 10, 8))
    with pytest.raises(ValueError, match="dv: overlaps dk"):
        bg.attention_backward(DOUT, Q, K, V, OUT, LSE, dk=both[:, :, :5], dv=both[:, :, 4:9])
