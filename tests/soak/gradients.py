"""Cases of gradients: of products, of sampled products and of attention."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import bsrgemm as bg

from ..strategies import INEXACT, magnitude, rounding, wide, widened
from .attend import length, normal, options_of
from .case import Case, kind
from .references import exact
from .samples import bsr, here, operand, sample


@kind("gradient.products", 4)
def products(case: Case) -> None:
    """The pullbacks of ``x @ A``, or ``x @ A.T``, and of a sampled product."""
    dtype, _, block, _ = case.pick(case.pool.products)
    if dtype not in INEXACT:
        dtype = np.dtype(np.float32)
    a = sample(case, dtype, block, (case.number_from(1, 5), case.number_from(1, 5)), messy=False, most=12)
    A, n = bsr(case, a), case.pick((1, 5, 16))
    if case.chance(0.5):
        A, a = A.T, a.T
    x, dy = operand(case, (n, a.shape[0]), dtype), operand(case, (n, a.shape[1]), dtype)
    X, dY = case.place.operand(x), case.place.operand(dy)
    _, pullback = bg.vjp(bg.matmul, X, A)
    dX, dA = pullback(dY)
    terms = int(a.layers.sum(axis=1).max(initial=0)) + 8
    want = widened(dy.values) @ a.dense.astype(wide(dtype)).conj().T
    bound = rounding(dtype, magnitude(dy.values) @ a.weight.T, terms) + magnitude(dy.values) @ a.bound.T
    case.same(f"dx of x @ A, {block} {dtype}", dX, want, bound)
    want = np.where(a.layers > 0, widened(x.values).conj().T @ widened(dy.values), 0)
    case.same_matrix("dA of x @ A", dA, want, rounding(dtype, magnitude(x.values).T @ magnitude(dy.values), n + 8))
    y = operand(case, (a.shape[1], n), dtype)
    Y = case.place.operand(y)
    S = bg.sddmm(case.place.operand(x).T, case.place.operand(dy), A)
    dense = widened(case.host(S.toarray()))
    dL, dR = bg.sddmm_backward(S, X.T, Y.T, A)
    size = magnitude(case.host(S.toarray()))
    case.same("dX of sddmm", dL, dense @ widened(y.values).conj(), rounding(dtype, size @ magnitude(y.values), terms))
    want = widened(x.values).conj() @ dense
    case.same("dY of sddmm", dR, want, rounding(dtype, magnitude(x.values) @ size, a.shape[0] + 8))


@kind("gradient.attention", 4)
def attention(case: Case) -> None:
    dtype, D, D_v = case.pick(case.pool.heads)
    B, H, group = case.pick((1, 2)), case.pick((1, 2)), case.pick((1, 2, 4))
    S_q, S_k = length(case), length(case)
    shapes = ((B, H * group, S_q, D), (B, H, S_k, D), (B, H, S_k, D_v), (B, H * group, S_q, D_v))
    q, k, v, dout = (normal(case, shape, dtype) for shape in shapes)
    options, seen = options_of(case, S_q, S_k)
    softcap = case.pick((None, None, None, 5.0))
    there = [here(case, x) for x in (q, k, v)]
    out, lse = bg.attention(*there, softcap=softcap, return_lse=True, **options)
    try:
        got = bg.attention_backward(here(case, dout), *there, out, lse, softcap=softcap, **options)
    except NotImplementedError:
        case.true("refused on a card alone", not case.place.is_host)
        return
    want = _backward(q, k, v, dout, seen, softcap)
    unit, least = (float(getattr(ml_dtypes.finfo(dtype), name)) for name in ("eps", "smallest_subnormal"))
    for name, x, (exactly, size) in zip(("dq", "dk", "dv"), got, want, strict=True):
        bound = 64 * unit * size + 5 * least  # weights and results below the smallest number of the dtype become 0
        case.same(f"{name} {dtype} {D, D_v} {S_q, S_k} {sorted(options)}", x, exactly, bound)


@kind("gradient.merge", 2)
def merge(case: Case) -> None:
    """Parts of the keys, merged, and the gradients through the merge."""
    dtype, D, D_v = case.pick(case.pool.heads)
    B, H, S_q, S_k = case.pick((1, 2)), case.pick((1, 2)), length(case), length(case)
    q, k, v = (normal(case, shape, dtype) for shape in ((B, H, S_q, D), (B, H, S_k, D), (B, H, S_k, D_v)))
    cuts = np.sort(case.rng.integers(0, S_k + 1, case.number_from(0, 3)))
    there = [here(case, x) for x in (q, k, v)]
    parts = [
        bg.attention(there[0], there[1][:, :, a:b], there[2][:, :, a:b], return_lse=True)
        for a, b in zip([0, *cuts], [*cuts, S_k], strict=True)
    ]
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    out, lse = bg.merge_states(outs, lses)
    unit, small = float(ml_dtypes.finfo(dtype).eps), float(ml_dtypes.finfo(lses[0].dtype).eps)
    want = exact(q, k, v, np.ones((S_q, S_k), bool), None, None)
    far = 64 * (1 + want.size.max(initial=0))
    case.same(f"merge {dtype} {len(parts)}", out, want.out, far * unit * (want.spread + 1e-30))
    case.same("merge: lse", lse, want.lse, far * small * (1 + abs(want.lse)))
    douts, dlses = bg.merge_states_backward(out, lse, outs, lses)
    weights = [np.exp(widened(case.host(x)) - want.lse) for x in lses]
    for weight, got in zip(weights, douts, strict=True):
        share = weight[..., None] * widened(case.host(out))
        case.same("merge: douts", got, share, far * (unit + small) * (abs(share) + 1e-6))
    case.true("merge: dlses", all(x.shape == lse.shape and x.dtype == lse.dtype for x in dlses))


def _backward(q: Any, k: Any, v: Any, dout: Any, seen: Any, softcap: float | None) -> list[tuple[Any, Any]]:
    """The gradients in float64, and for each the sum of the absolute values of what it consists of, and of 1."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    B, H = k.shape[:2]
    group, scale = q.shape[1] // H, 1 / np.sqrt(q.shape[3])
    wide_k, wide_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    found = exact(q, k, v, seen, None, softcap)
    raw = scale * (q @ wide_k.swapaxes(2, 3))
    slope = np.ones_like(raw) if softcap is None else 1 - np.tanh(raw / softcap) ** 2
    scores = raw if softcap is None else softcap * np.tanh(raw / softcap)
    some = np.isfinite(found.lse)[..., None]
    p = np.where(seen, np.exp(np.where(seen & some, scores - np.where(some, found.lse[..., None], 0), -np.inf)), 0)
    delta, reach = (dout * found.out).sum(axis=3), (abs(dout) * found.spread).sum(axis=3)
    ds = p * (dout @ wide_v.swapaxes(2, 3) - delta[..., None]) * slope
    large = p * (abs(dout) @ abs(wide_v).swapaxes(2, 3) + reach[..., None])

    def joined(x: Any) -> Any:
        return x.reshape(B, H, group, *x.shape[2:]).sum(axis=2)

    factor = 1 + found.size.max(initial=0)  # errors of the scores are relative errors of the weights
    return [
        (scale * ds @ wide_k, factor * scale * large @ abs(wide_k)),
        (joined(scale * ds.swapaxes(2, 3) @ q), factor * joined(scale * large.swapaxes(2, 3) @ abs(q))),
        (joined(p.swapaxes(2, 3) @ dout), factor * joined(p.swapaxes(2, 3) @ abs(dout))),
    ]
