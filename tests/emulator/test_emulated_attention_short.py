"""attention_short_sm90 as it is, launched as it is, on the CPU; what is emulated says tests/kernels.

Compared with attention in float64 on the host. Exponentials are those of the CPU: nothing is said of their last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import heuristics
from bsrgemm._attention.host import ENGINE
from bsrgemm.dtypes import BFLOAT16

from . import emulator
from .attention import F16, Emulated, climbing, operands

#: Those of the rule for heads of 64 columns: two shares of the keys, tiles of 128 keys, and two groups of rows.
SHAPES = [shape for _, shape in heuristics.SHORT_SHAPES[64]]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture
def shape() -> tuple[int, ...]:
    return SHAPES[0]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, folder: Path, shape) -> Iterator[Emulated]:
    monkeypatch.setattr(heuristics, "_short_shape", lambda problem: shape)
    with emulator.emulated(folder, arch="sm_90a"):
        yield Emulated(monkeypatch, "attention_short_sm90", emulator.run_attention)


@every_shape
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((20, 30), {}),
        ((64, 720), {}),  # more tiles of keys than slots
        ((70, 150), {"causal": True}),
        ((130, 70), {"causal": True}),  # the first rows see nothing
        ((64, 300), {"window": (40, 3)}),
    ],
    ids=str,
)
def test_bands_at_odd_lengths(lengths, options, emulated, rng) -> None:
    emulated.check(*operands(rng, *lengths), **options)


@pytest.mark.parametrize("shape", [shape for _, shape in heuristics.SHORT_SHAPES[128]], ids=str)
def test_heads_of_128_columns_in_bfloat16(emulated, rng) -> None:
    emulated.check(*operands(rng, 70, 330, 128, heads=(4, 2), dtype=BFLOAT16, batch=2), causal=True)


@pytest.mark.parametrize("pitch", [64, 72])
def test_batches_strides_and_no_logarithms(pitch, emulated, rng) -> None:
    """Heads between rows; results in lines of any length, and nothing beside them; rows that are not finite."""
    q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in operands(rng, 70, 90, heads=(4, 2), batch=2))
    v[1, 1, 65, 5] = np.inf
    room = np.full((2, 70, 4, pitch), 77, F16)
    out = room[..., :64].swapaxes(1, 2)
    with emulated.monkeypatch.context() as patched:
        patched.setattr(ENGINE, "forward", lambda call: emulator.run_attention(call, emulator.guarded))
        bg.attention(q, k, v, causal=True, out=out)
    want = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert not np.isfinite(want).all()
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=2e-3 * 5)
    assert (room[..., 64:] == 77).all()


@every_shape
def test_ordinary_queries_are_not_computed_twice(emulated, folder, rng) -> None:
    """A wrong sum that is not finite, or 0, would be mended by the care that is taken of infinity and NaN."""
    with emulator.forbidden(folder, "repair(upper, lower);"):
        emulated.check(*operands(rng, 70, 150), causal=True)
        emulated.check(*operands(rng, 64, 184), causal=True)  # the first 8 of 16 rows see nothing of the first tile
        q, k, v = operands(rng, 64, 400)
        for some in climbing(q, k):
            emulated.check(some, k, v)
        for key in (38, 97, 383):  # one key that outweighs all others, at an even place or at an odd one
            q[...], k[...] = 1, 0
            k[:, :, key] = 3.5
            emulated.check(q, k, v)


def test_scores_that_are_all_minus_infinity_give_nan(emulated, rng) -> None:
    """A query whose keys all have no weight has no softmax; where it sees one more key, that one counts."""
    q, k, v = operands(rng, 100, 100)
    q[..., 0], k[:, :, :50, 0] = -1, np.inf
    want = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert np.isnan(want[:, :, :50]).all() and np.isfinite(want[:, :, 50:]).all()
    out, lse = emulated.run(q, k, v, causal=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-3 * np.abs(v.astype(np.float64)).max())
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want[..., 0]))


@pytest.mark.races
def test_nan_reaches_those_who_see_it_and_nobody_else(emulated, rng) -> None:
    q, k, v = operands(rng, 20, 150, heads=(1, 1))
    v[:, :, 142, 3] = np.nan
    out, _ = emulated.run(q, k, v, causal=True)
    spoiled = np.zeros(out.shape, bool)
    spoiled[:, :, 12:, 3] = True
    np.testing.assert_array_equal(np.isnan(out), spoiled)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
def test_a_weight_that_outweighs_all_others_is_one_however_large_its_score(dtype, emulated, rng) -> None:
    """A huge maximum is rounded, and the largest weight is not 1; its error cancels out."""
    q, k, v = operands(rng, 64, 130, heads=(1, 1), dtype=dtype)
    q, k = (60 * q).astype(dtype), (60 * k).astype(dtype)
    out, _ = emulated.run(q, k, v)
    scores = q[0, 0].astype(np.float64) @ k[0, 0].astype(np.float64).T / 8
    first, second = np.sort(scores, axis=1)[:, -1], np.sort(scores, axis=1)[:, -2]
    clear = first - second > 40
    assert clear.sum() > 18 and first[clear].min() > 2000
    np.testing.assert_array_equal(out[0, 0, clear], v[0, 0, scores.argmax(axis=1)[clear]].astype(np.float64))


@pytest.mark.parametrize("rows", [slice(0, None, 16), slice(8, None, 16)], ids=["upper", "lower"])
def test_a_large_maximum_of_some_rows_is_noticed_by_their_warp(rows, emulated, folder, rng) -> None:
    """In one row of sixteen, one key outweighs all others by far; its weight, which is not 1, cancels out."""
    q, k, v = operands(rng, 64, 256, heads=(1, 1))
    q[...], k[...] = 0.01, 29.25
    # For these queries the weight lies halfway between two numbers of 16 bits.
    q[:, :, rows] = np.array([107.375, 93.3125, 115.9375, 96.375])[:, None]
    k[:, :, 255] = 30
    v[:, :, 255] = 1 + np.linspace(0, 1, 64, endpoint=False)
    with emulator.forbidden(folder, "repair(upper, lower);"):
        out, _ = emulated.run(q, k, v)
    np.testing.assert_array_equal(out[0, 0, rows], np.broadcast_to(v[0, 0, 255], (4, 64)).astype(np.float64))


def test_maxima_that_climb_beyond_all_bounds_are_computed_again(emulated, rng) -> None:
    """Weights that no float32 holds: the first tile, of the last keys, has scores far below those that follow."""
    q, k, v = operands(rng, 20, 200, heads=(1, 1))
    q[...], k[...] = 1, np.linspace(20, 0, 200)[:, None]
    emulated.check(q, k, v)
