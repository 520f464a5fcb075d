"""Operands of fp8 for tests of attention on a card, the reference in float64, and bounds of their errors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from bsrgemm.dtypes import FLOAT8

from .attention_cases import (
    F32,
    SIMT,
    SM90,
    Expected,
    assert_near,
    attend,
    kernels_used,
    operand_shapes,
    seen_by,
    softmax,
)
from .marks import on_hopper

VALUES = "attention_values"
SOME_BANDS = [{}, {"causal": True}, {"window": (100, 3)}]


def served_by(name: str) -> bool:
    """Did all calls so far run on that kernel? On other cards than Hopper it is not asked."""
    return kernels_used() == {name} or not on_hopper()


# ------------------------------------------------------------------------------------------------- operands
def fp8(x: np.ndarray) -> Any:
    """The bytes of the nearest fp8 numbers, on the card."""
    import cupy

    return cupy.asarray(np.ascontiguousarray(x, np.float32).astype(FLOAT8).view(np.uint8))


def normal(rng: np.random.Generator, sizes: tuple[int, ...]) -> Any:
    return fp8(rng.standard_normal(sizes, np.float32))


def operands(rng: np.random.Generator, *sizes: int, **how: Any) -> list[Any]:
    """q, k and v in "bhsd", of the sizes of `operand_shapes`."""
    return [normal(rng, shape) for shape in operand_shapes(*sizes, **how)]


@cache
def _numbers() -> Any:
    import cupy

    return cupy.asarray(np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float64))


def widened(x: Any, scale: Any = None) -> Any:
    """Bytes in "bhsd" as float64, times the scale of each head."""
    import cupy

    wide = _numbers()[x.astype(np.int32)]
    if scale is None:
        return wide
    scale = cupy.asarray(scale, np.float64)
    return wide * (scale if scale.ndim == 0 else cupy.broadcast_to(scale, x.shape[:2])[:, :, None, None])


# ------------------------------------------------------------------------------------------------- reference
@dataclass
class Exact:
    """In float64, what `fp8_bound` wants to know of each element or row."""

    out: Any
    lse: Any
    #: ``weights @ abs(v)``, and the root of ``weights**2 @ v**2``
    spread: Any
    sigma: Any
    #: the highest weight of a row, the keys that it sees, and the sum of their abs(v)
    top: Any
    count: Any
    reach: Any
    #: the largest sum of absolute products of a row's scores
    size: Any


def exact(q: Any, k: Any, v: Any, seen: Any, scale: float | None = None, softcap: float | None = None) -> Exact:
    """Attention of float64 operands in "bhsd"."""
    import cupy

    k, v = (cupy.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    found = softmax(q, k, seen, scale, softcap)
    weights = found.weights
    return Exact(
        out=weights @ v,
        lse=found.lse,
        spread=weights @ cupy.abs(v),
        sigma=cupy.sqrt((weights * weights) @ (v * v)),
        top=weights.max(axis=3, keepdims=True),
        count=found.seen.sum(axis=3, keepdims=True),
        reach=found.seen.astype(np.float64) @ cupy.abs(v),
        size=cupy.where(found.seen, found.size, 0).max(axis=3),
    )


def score_bound(want: Exact) -> Any:
    """How far a row's scores may be off.

    The tensor cores line up the 32 products of a step and the sum so far at the largest of them and cut each 13 bits
    below. Emulated on random numbers that costs up to 2**-11.8 of the sum of the absolute products.
    """
    return 2**-10 * want.size + 1e-5


def fp8_bound(want: Exact, dtype: Any, *, independent: bool = True) -> Any:
    """How far each element may be off.

    1. The weights of keys are rounded to 3 bits of mantissa: each is off by up to 2**-4 / (1 + 2**-4) = 1/17 of itself.
    2. The highest weight is at least 2**5, and those below 2**-6 are rounded to multiples of 2**-9: each is off by up
       to 2**-15 of the highest.
    3. Scores are off (see `score_bound`), which their sum repeats.
    4. Sums of values are cut as scores are: each product of `count` by up to 2**-13 of the sum so far, which on the way
       is half of the last one.

    Where weights and values have nothing to do with each other (`independent`), errors of 1 and 3 add up as random
    numbers do: to 1/17 of `sigma` at most, of which 6 are allowed, and 4 follows the sum and not its absolute terms.
    """
    import cupy

    wrong, cut = score_bound(want)[..., None], 2**-14 * (want.count + 32)
    bound = (1 / 17 + cupy.expm1(2 * wrong) + cut) * want.spread + 2**-15 * want.top * want.reach
    if independent:
        likely = (6 / 17 + wrong) * want.sigma + cut * cupy.abs(want.out)
        bound = cupy.minimum(bound, likely + 2**-15 * want.top * want.reach)
    info = ml_dtypes.finfo(dtype)
    return bound + float(info.eps) * cupy.abs(want.out) + float(info.smallest_subnormal) + 2e-7 * want.spread


def rms(x: Any, axis: Any = (2, 3)) -> Any:
    import cupy

    return cupy.sqrt((x * x).mean(axis=axis))


def assert_close(out: Any, lse: Any, want: Exact, *, independent: bool = True, varied: bool = True) -> None:
    """Within what rounding explains, each element and all of a head; rows that see nothing are 0 and -inf."""
    import cupy

    nothing = want.lse == -np.inf
    got = out.astype(np.float64)
    assert bool((got == 0).all(axis=3)[nothing].all())
    assert bool(((lse == -np.inf) == nothing).all())
    error, bound = cupy.abs(got - want.out), fp8_bound(want, out.dtype, independent=independent)
    assert bool((error <= bound).all()), (float(cupy.nanmax(error / bound)), int(cupy.isnan(got).sum()))
    lse_error = cupy.abs(cupy.where(nothing, 0, lse) - cupy.where(nothing, 0, want.lse))
    lse_bound = score_bound(want) + 1e-4 + 4e-7 * cupy.abs(cupy.where(nothing, 0, want.lse))
    assert bool((lse_error <= lse_bound).all()), (float(lse_error.max()), float((lse_error / lse_bound).max()))
    if independent and out.size:
        # Emulated: 0.028 of sigma. Few rows, or weights that are alike, may have the worst luck with those that count.
        most = 0.045 if varied and out.shape[2] >= 64 else 1 / 17
        cut = 2**-14 * (want.count + 32) * want.out
        allowed = most * rms(want.sigma) + rms(cut) + float(ml_dtypes.finfo(out.dtype).eps) * rms(want.out) + 1e-12
        smallest = float(ml_dtypes.finfo(out.dtype).smallest_subnormal)
        assert bool((rms(error) <= allowed + smallest).all()), float((rms(error) / allowed).max())
        off = rms(lse_error, 2)
        assert bool((off <= 3e-4 * rms(want.size, 2) + 1e-5).all()), float((off / rms(want.size, 2)).max())


SCALES: dict[str, Any] = {"q_scale": 1.0}


def check(
    q: Any,
    k: Any,
    v: Any,
    *,
    on: str = SM90,
    scales: dict[str, Any] | None = None,
    out: Any = None,
    out_dtype: Any = F32,
    independent: bool = True,
    varied: bool = True,
    **options: Any,
) -> Any:
    """Attention of bytes in "bhsd" into a poisoned result, compared with float64; the result in "bhsd"."""
    scales = SCALES if scales is None else scales
    out, lse = attend(q, k, v, out, out_dtype, **scales, **options)
    assert lse.dtype == F32
    assert served_by(on)
    wide = [widened(x, scales.get(f"{name}_scale")) for name, x in zip("qkv", (q, k, v), strict=True)]
    want = exact(*wide, seen_by(q, k, **options), options.get("scale"), options.get("softcap"))
    if on == SIMT:
        assert_plain(out, lse, want, wide[2], q.shape[3])
    else:
        assert_close(out, lse, want, independent=independent, varied=varied)
    return out


def assert_plain(out: Any, lse: Any, want: Exact, v: Any, D: int) -> None:
    """The plain cores compute in float32 throughout."""
    assert_near(out, lse, Expected(want.out, want.lse, want.spread, want.size), v, D, F32, SIMT)


def scale_array(rng: np.random.Generator, sizes: tuple[int, ...], low: float = 0.3, high: float = 3.0) -> Any:
    import cupy

    return cupy.asarray(rng.uniform(low, high, sizes).astype(np.float32))


def by_columns(v: np.ndarray) -> np.ndarray:
    """Values (batch, heads, keys, columns) as the kernel wants them, from the definition."""
    B, H, S, D = v.shape
    room = np.zeros((B, H, -(-S // 16) * 16, D), np.uint8)
    room[:, :, :S] = v
    t, i = np.divmod(np.arange(16), 4)
    places = 2 * t + i + np.where(i > 1, 6, 0)
    return room.reshape(B, H, -1, 16, D)[:, :, :, places].reshape(room.shape).swapaxes(2, 3)
