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
from .attention import F16, Emulated, operands


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Emulated]:
    with emulator.emulated(folder, emulator.guarded, arch="sm_80"):
        yield Emulated(monkeypatch, "attention_sm80", lambda call: emulator.run_attention(call, emulator.guarded))


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
        ((70, 90), (32, 128), {}),  # the result is wider than the queries whose memory it takes
        ((5, 2300), (64, 64), {"causal": True}),  # more tiles of keys than one warp looks up at once
    ],
    ids=str,
)
def test_bands_at_odd_lengths_and_head_dims(lengths, dims, options, emulated, rng) -> None:
    emulated.check(*operands(rng, *lengths, *dims), **options)


def test_bfloat16_groups_and_results_of_float32(emulated, rng) -> None:
    q, k, v = operands(rng, 70, 90, 64, heads=(6, 2), dtype=BFLOAT16)
    emulated.check(q, k, v, causal=True)
    emulated.check(q, k, v, out_dtype=np.float32)


@pytest.mark.parametrize("out_dtype", [F16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize(("pitch", "step"), [(64, 1), (65, 1), (128, 2)])
def test_batches_strides_and_no_logarithms(pitch, step, out_dtype, emulated, rng) -> None:
    """Heads between rows; results in lines of any length, and nothing beside them; rows that are not finite."""
    q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in operands(rng, 40, 70, heads=(4, 2), batch=2))
    v[1, 1, 65, 5] = np.inf
    room = np.full((2, 40, 4, pitch), 77, out_dtype)
    out = room[..., : 64 * step : step].swapaxes(1, 2)
    with emulated.monkeypatch.context() as patched:
        patched.setattr(ENGINE, "forward", lambda call: emulator.run_attention(call, emulator.guarded))
        bg.attention(q, k, v, causal=True, out=out)
    assert {plan.config.spec().entry for plan in attention_launch._plans.values()} == {"attention_sm80"}
    want = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert not np.isfinite(want).all()
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=2e-3 * 5)
    assert (room[..., 64:] == 77).all() if step == 1 else (room[..., 1::2] == 77).all()


def test_masks_by_blocks_and_elements(emulated, rng) -> None:
    q, k, v = operands(rng, 150, 200)
    emulated.check(q, k, v, mask=bg.BlockMask.random(150, 200, per_row=2, block=32, seed=1))
    dense = rng.random((150, 200)) < 0.3
    dense[7] = False  # a row that sees nothing
    emulated.check(q, k, v, mask=bg.BlockMask.from_dense(dense, block=64), causal=True)
    emulated.check(q, k, v, mask=bg.BlockMask.random(150, 200, per_row=1, block=16, heads=(1, 2)), window=(60, 20))
    q, k, v = operands(rng, 100, 130, heads=(4, 2), batch=2)  # two heads share a pattern
    emulated.check(q, k, v, mask=bg.BlockMask.random(100, 130, per_row=2, block=32, heads=(2, 2), seed=3))


def test_ordinary_queries_are_not_computed_twice(emulated, folder, rng) -> None:
    """A wrong sum that is not finite, or 0, would be mended by the care that is taken of infinity and NaN."""
    with emulator.forbidden(folder, "repair(redo);"):
        emulated.check(*operands(rng, 70, 150), causal=True)
        emulated.check(*operands(rng, 64, 200, dtype=BFLOAT16), softcap=3.0)
        q, k, v = operands(rng, 64, 200)
        for key in (38, 97, 120, 183):  # one key that outweighs all others, at an even place or at an odd one
            q[...], k[...] = 1, 0
            k[:, :, key] = 3.5
            emulated.check(q, k, v)


def test_sequences_of_different_lengths(emulated, rng) -> None:
    q, k, v = (rng.standard_normal((n, h, 64)).astype(F16) for n, h in ((100, 2), (140, 1), (140, 1)))
    emulated.check(q, k, v, cu_seqlens_q=[0, 30, 30, 100], cu_seqlens_k=[0, 70, 90, 140], causal=True)


@pytest.mark.parametrize("bad", [-1, 3, 1000, 2**31 - 1, -(2**31)])
def test_masks_and_bounds_that_were_spoiled_touch_nothing_outside(bad, emulated, rng) -> None:
    """Whatever is read or written outside of the arrays ends the process; rows of other tiles are as they were."""
    q, k, v = operands(rng, 70, 200, heads=(1, 1))
    mask = bg.BlockMask.from_dense(rng.random((70, 200)) < 0.3, block=16)
    good, tiles = emulated.run(q, k, v, mask=mask)[0], attention_launch.mask_tiles.tiles
    for name in ("first", "columns", "parts", "kinds", "order"):

        def spoiled(*args: Any, name: str = name) -> Any:
            found = tiles(*args)
            getattr(found, name)[[0, -1] if name != "first" else [1]] = bad
            return found

        attention_launch._plans.clear()
        with emulated.monkeypatch.context() as patched:
            patched.setattr(attention_launch.mask_tiles, "tiles", spoiled)
            out = emulated.run(q, k, v, mask=mask, window=(180, 100) if name == "columns" else (-1, -1))[0]
        if name == "kinds":
            same = [np.array_equal(x, y) for x, y in zip(out[0, 0], good[0, 0], strict=True)]
            assert 16 <= sum(same) < 70
    narrow = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    forward = emulator.run_attention

    def with_bounds(call: Any) -> None:
        call.bounds[which][1] = bad
        forward(call, emulator.guarded)

    for which in range(2):
        attention_launch._plans.clear()
        with emulated.monkeypatch.context() as patched:
            patched.setattr(ENGINE, "forward", with_bounds)
            out = bg.attention(*narrow, cu_seqlens_q=[0, 30, 70], cu_seqlens_k=[0, 70, 200])
        assert np.isfinite(out[30:].astype(np.float64)).all() or which == 0


def test_maxima_that_climb_from_tile_to_tile(emulated, rng) -> None:
    q, k, v = operands(rng, 64, 300)
    ramp = np.linspace(0, 30, 300)[None, None, :, None]
    k = (0.8 * np.sign(q[:, :1, :1]) * ramp / 8).astype(F16)
    emulated.check(np.broadcast_to(np.sign(q[:, :1, :1]), q.shape).astype(F16, order="C"), k, v)


@pytest.mark.races
def test_queries_beside_a_nan_that_they_do_not_see_are_computed_again(emulated, rng) -> None:
    q, k, v = operands(rng, 20, 90, heads=(1, 1))
    v[:, :, 82, 3] = np.nan
    out, _ = emulated.run(q, k, v, causal=True)
    spoiled = np.zeros(out.shape, bool)
    spoiled[:, :, 12:, 3] = True
    np.testing.assert_array_equal(np.isfinite(out), ~spoiled)


def test_nan_and_infinity_reach_those_who_see_them(emulated, rng) -> None:
    """In a column of each of the four lanes that have a row."""
    q, k, v = operands(rng, 100, 150)
    for bad, column in ((np.nan, 0), (np.inf, 3), (np.nan, 5), (np.inf, 7)):
        spoiled_v = v.copy()
        spoiled_v[:, :, 90, column] = bad
        out, _ = emulated.run(q, k, spoiled_v, causal=True)
        spoiled = np.zeros(out.shape, bool)
        spoiled[:, :, np.arange(100) + 50 >= 90, column] = True
        np.testing.assert_array_equal(np.isfinite(out), ~spoiled)


def test_scores_that_are_all_minus_infinity_give_nan(emulated, rng) -> None:
    """A query whose keys all have no weight has no softmax; where it sees one more key, that one counts."""
    q, k, v = operands(rng, 100, 100)
    q[..., 0], k[:, :, :50, 0] = -1, np.inf
    want = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert np.isnan(want[:, :, :50]).all() and np.isfinite(want[:, :, 50:]).all()
    out, lse = emulated.run(q, k, v, causal=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-3 * np.abs(v.astype(np.float64)).max())
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want[..., 0]))


def test_nothing_in_front_of_arrays_is_touched(emulated, folder, rng) -> None:
    def put(x: Any) -> emulator.Array:
        return emulator.guarded(x, before=True)

    q, k, v = operands(rng, 70, 150)
    mask = bg.BlockMask.random(70, 150, per_row=2, block=32, seed=1)
    for options in ({"mask": mask}, {"mask": mask, "window": (40, 3)}, {"causal": True}):
        want = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), **options)
        with emulator.emulated(folder, put, arch="sm_80"), emulated.monkeypatch.context() as patched:
            patched.setattr(ENGINE, "forward", lambda call: emulator.run_attention(call, put))
            out = bg.attention(q, k, v, **options)
        np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=1e-2)
