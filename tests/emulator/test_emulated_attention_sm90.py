"""attention_sm90 as it is, launched as it is, on the CPU; what is emulated says tests/kernels.

Compared with attention in float64 on the host. Exponentials are those of the CPU: nothing is said of their last bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import heuristics, mask_tiles
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.host import ENGINE
from bsrgemm.dtypes import BFLOAT16

from . import emulator
from .attention import F16, FLOAT8, Emulated, climbing, operands


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Emulated]:
    monkeypatch.setattr(heuristics, "SHORT_KEYS", 0)
    with emulator.emulated(folder, arch="sm_90a"):
        yield Emulated(monkeypatch, "attention_sm90", emulator.run_attention)


@pytest.mark.parametrize(
    ("lengths", "D", "options"),
    [
        ((20, 30), 64, {}),
        ((70, 150), 64, {"causal": True}),
        ((130, 70), 64, {"causal": True}),  # the first rows see nothing
        ((64, 300), 64, {"window": (40, 3)}),
        ((130, 140), 256, {}),
        ((70, 150), 128, {"softcap": 3.0, "scale": -0.2}),
    ],
    ids=str,
)
def test_bands_at_odd_lengths(lengths, D, options, emulated, rng) -> None:
    emulated.check(*operands(rng, *lengths, D), **options)


def test_bfloat16_and_results_of_float32(emulated, rng) -> None:
    q, k, v = operands(rng, 70, 90, heads=(4, 2), dtype=BFLOAT16)
    emulated.check(q, k, v, causal=True)
    emulated.check(q, k, v, out_dtype=np.float32)


def test_masks_by_blocks_and_elements(emulated, rng) -> None:
    q, k, v = operands(rng, 150, 200)
    emulated.check(q, k, v, mask=bg.BlockMask.random(150, 200, per_row=2, block=32, seed=1))
    emulated.check(q, k, v, mask=bg.BlockMask.from_dense(rng.random((150, 200)) < 0.3, block=64), causal=True)
    q, k, v = operands(rng, 100, 130, heads=(4, 2), batch=2)  # two heads share a pattern
    emulated.check(q, k, v, mask=bg.BlockMask.random(100, 130, per_row=2, block=32, heads=(2, 2), seed=3))


@pytest.mark.parametrize(("pitch", "out_dtype"), [(64, F16), (65, F16), (72, F16), (65, np.dtype(np.float32))], ids=str)
def test_batches_strides_and_no_logarithms(pitch, out_dtype, emulated, rng) -> None:
    """Heads between rows; results in lines of any length, and nothing beside them; rows that are not finite."""
    q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in operands(rng, 40, 70, heads=(4, 2), batch=2))
    v[1, 1, 65, 5] = np.inf
    room = np.full((2, 40, 4, pitch), 77, out_dtype)
    out = room[..., :64].swapaxes(1, 2)
    with emulated.monkeypatch.context() as patched:
        patched.setattr(ENGINE, "forward", lambda call: emulator.run_attention(call, emulator.guarded))
        bg.attention(q, k, v, causal=True, out=out)
    assert {plan.config.spec().entry for plan in attention_launch._plans.values()} == {"attention_sm90"}
    want = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert not np.isfinite(want).all()
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=2e-3 * 5)
    assert (room[..., 64:] == 77).all()


def test_tiles_that_see_nothing_without_logarithms(emulated, rng) -> None:
    q, k, v = operands(rng, 500, 70)
    with emulated.monkeypatch.context() as patched:
        patched.setattr(ENGINE, "forward", lambda call: emulator.run_attention(call, emulator.guarded))
        out = bg.attention(q, k, v, causal=True).astype(np.float64)
    want = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert (out[:, :, :430] == 0).all() and (want[:, :, :430] == 0).all()
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-3 * 5)


def test_scores_that_are_all_minus_infinity_give_nan(emulated, rng) -> None:
    """A query whose keys all have no weight has no softmax; where it sees one more key, that one counts."""
    q, k, v = operands(rng, 100, 100)
    q[..., 0], k[:, :, :50, 0] = -1, np.inf
    want = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert np.isnan(want[:, :, :50]).all() and np.isfinite(want[:, :, 50:]).all()
    out, lse = emulated.run(q, k, v, causal=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-3 * np.abs(v.astype(np.float64)).max())
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want[..., 0]))


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1, -(2**31)])
def test_masks_that_were_spoiled_touch_nothing_outside(bad, emulated, rng) -> None:
    """Whatever is read or written outside of the arrays ends the process."""
    q, k, v = operands(rng, 70, 200, heads=(1, 1))
    mask = bg.BlockMask.from_dense(rng.random((70, 200)) < 0.3, block=16)
    tiles = attention_launch.mask_tiles.tiles
    for name in ("first", "columns", "parts", "kinds", "order"):

        def spoiled(*args: Any, name: str = name) -> Any:
            found = tiles(*args)
            getattr(found, name)[[0, -1] if name != "first" else [1]] = bad
            return mask_tiles.Tiles(*(emulator.guarded(x) if isinstance(x, np.ndarray) else x for x in found))

        attention_launch._plans.clear()
        with emulated.monkeypatch.context() as patched:
            patched.setattr(attention_launch.mask_tiles, "tiles", spoiled)
            emulated.run(q, k, v, mask=mask, window=(180, 100) if name == "columns" else (-1, -1))


def test_whole_blocks_have_one_kind_in_memory_and_no_other_is_read(emulated, rng) -> None:
    """Reading a second kind ends the process."""
    mask = bg.BlockMask.random(200, 300, per_row=2, block=64)
    tiles = attention_launch.mask_tiles.tiles
    listed = []

    def guarded(*args: Any) -> Any:
        found = tiles(*args)
        listed.append(found.kinds)
        return found._replace(kinds=emulator.guarded(found.kinds[:1]))

    emulated.monkeypatch.setattr(attention_launch.mask_tiles, "tiles", guarded)
    emulated.check(*operands(rng, 200, 300, 128), mask=mask, causal=True)
    assert mask.kinds.strides == (0,) and [len(kinds) for kinds in listed] == [len(mask.kinds)]  # a block is a tile


def test_ordinary_queries_are_not_computed_twice(emulated, folder, rng) -> None:
    """A wrong sum that is not finite, or 0, would be mended by the care that is taken of infinity and NaN."""
    with emulator.forbidden(folder, "repair(x, rows, lower);"):
        emulated.check(*operands(rng, 70, 150), causal=True)
        emulated.check(*operands(rng, 64, 200, dtype=BFLOAT16), softcap=3.0)
        q, k, v = operands(rng, 64, 400)
        for some in climbing(q, k):
            emulated.check(some, k, v)
        for key in (38, 97, 120, 383):  # one key that outweighs all others, at an even place or at an odd one
            q[...], k[...] = 1, 0
            k[:, :, key] = 3.5
            emulated.check(q, k, v)
        narrow = [x.astype(FLOAT8) for x in operands(rng, 64, 200, heads=(1, 1))]
        scales = {name: 1.0 for name in ("q_scale", "k_scale", "v_scale")}
        wide = [x.astype(np.float64) for x in narrow]
        emulated.check(*(x.view(np.uint8) for x in narrow), wide, causal=True, out_dtype=np.float32, **scales)


@pytest.mark.races
def test_sequences_of_different_lengths(emulated, rng) -> None:
    q, k, v = (rng.standard_normal((n, h, 64)).astype(F16) for n, h in ((100, 2), (140, 1), (140, 1)))
    emulated.check(q, k, v, cu_seqlens_q=[0, 30, 30, 100], cu_seqlens_k=[0, 70, 90, 140], causal=True)


def test_maxima_that_climb_are_repaired(emulated, rng) -> None:
    q, k, v = operands(rng, 64, 400)
    ramp = np.linspace(30, 0, 400)[None, None, :, None]  # the walk begins with the last keys
    k = (np.abs(q).mean() * np.sign(q[:, :1, :1]) * ramp / 8).astype(F16)
    q = np.broadcast_to(np.sign(q[:, :1, :1]), q.shape).astype(F16, order="C")
    emulated.check(q, k, v)


def _steps(q: Any, keys: int, heights: Sequence[float], scale: float = 8.0) -> Any:
    """Keys whose scores, for queries of ones, are a height for each stretch of as many; the last stretch is met first.

    Queries become ones and minus ones, by which keys are multiplied, so that all scores of a stretch are equal.
    """
    q[...] = np.sign(q[:, :1, :1])
    steps = np.repeat(np.asarray(heights), -(-keys // len(heights)))[:keys, None]
    return (np.sign(q[:, :1, :1]) * steps * scale / q.shape[3]).astype(q.dtype)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
def test_maxima_that_rise_within_bounds_only_scale_weights(dtype, emulated, folder, rng) -> None:
    """Scores that rise by 20 to 60 make weights of up to 2^87: large, but finite. Rows rise together or alone."""
    q, k, v = operands(rng, 64, 400, dtype=dtype)
    k[...] = _steps(q, 400, [110, 60, 85, 25, 0])
    with emulator.forbidden(folder, "repeat_scores(e);", "repair(x, rows, lower);"):
        for rows in (slice(None), slice(3, None, 16), slice(12, None, 16)):
            some = (q * 0.01).astype(q.dtype)
            some[:, :, rows] = q[:, :, rows]
            emulated.check(some, k, v)


@pytest.mark.parametrize("warpgroups", [1, 3])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=str)
def test_infinite_weights_are_computed_again(heads, warpgroups, emulated, folder, rng) -> None:
    """One warpgroup reads the keys from memory, since their slot may have others, three read them from their slot.

    Other batches, heads and sequences have other keys.
    """
    if warpgroups == 3:
        emulated.monkeypatch.setattr(heuristics, "_FEW_ROWS", 0)
        emulated.monkeypatch.setattr(heuristics, "_FEW_KEYS", 0)
    q, k, v = operands(rng, 70, 333, heads=heads, batch=2)
    k[...] = _steps(q[:1, :1], 333, [400, 0, 150, -60, -200])
    k[1] *= np.linspace(0.6, 1, 333)[:, None].astype(q.dtype)
    q[...] = q[:1, :1, :1]
    q[:, :, ::3] *= F16.type(-0.5)
    with emulator.forbidden(folder, "repair(x, rows, lower);"):
        emulated.check(q, k, v)
        emulated.check(q, k, v, causal=True)
        emulated.check(q, k, v, window=(90, 0))
        emulated.check(q, k, v, mask=bg.BlockMask.from_dense(rng.random((70, 333)) < 0.5, block=64))
        emulated.check(q, k, v, softcap=300.0)
        flat = [np.ascontiguousarray(np.concatenate(list(x.swapaxes(1, 2)))) for x in (q, k, v)]
        emulated.check(*flat, cu_seqlens_q=[0, 60, 60, 140], cu_seqlens_k=[0, 300, 310, 666], causal=True)


@pytest.mark.parametrize(
    ("q_scale", "calls"),
    [(8.0, ["repair(x, rows, lower);"]), (0.5, ["repair(x, rows, lower);", "repeat_scores(e);"])],
    ids=["infinite", "finite"],
)
def test_maxima_of_fp8_rise_by_scaling_or_from_the_keys_in_memory(q_scale, calls, emulated, folder, rng) -> None:
    q, k, v = operands(rng, 70, 300, heads=(1, 1))
    k[...] = _steps(q, 300, [30, 12, 20, 0])
    narrow = [x.astype(FLOAT8) for x in (q, k, v)]
    wide = [x.astype(np.float64) for x in narrow]
    wide[0] *= q_scale
    with emulator.forbidden(folder, *calls):
        emulated.check(
            *(x.view(np.uint8) for x in narrow), wide, out_dtype=np.float32, q_scale=q_scale, k_scale=1.0, v_scale=1.0
        )


def test_infinite_weights_of_heads_that_are_not_whole_words(emulated, rng) -> None:
    """Lines of keys are read by words of four bytes; heads of 71 columns of 16 bits end within one."""
    q, k, v = operands(rng, 20, 200, 72)
    k[...] = _steps(q, 200, [300, 0])
    emulated.check(q[..., :71], k[..., :71], v[..., :71])


def test_queries_that_see_nothing_of_their_first_tile_are_not_computed_again(emulated, folder, rng) -> None:
    with emulator.forbidden(folder, "repeat_scores(e);", "repair(x, rows, lower);"):
        emulated.check(*operands(rng, 64, 184), causal=True)  # the upper rows of each warp begin with the second tile
        emulated.check(*operands(rng, 130, 300), window=(100, 0))


def test_scores_beyond_what_weights_can_say(emulated, rng) -> None:
    q, k, v = operands(rng, 40, 200)
    out, _ = emulated.run(100 * q, 100 * k, v)
    want = bg.attention(*(x.astype(np.float64) for x in (100 * q, 100 * k, v)))
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-2 * np.abs(v).max())


@pytest.mark.races
def test_queries_beside_a_nan_that_they_do_not_see_are_computed_again(emulated, rng) -> None:
    q, k, v = operands(rng, 20, 150)
    v[:, :, 142, 3] = np.nan
    out, _ = emulated.run(q, k, v, causal=True)
    spoiled = np.zeros(out.shape, bool)
    spoiled[:, :, 12:, 3] = True
    np.testing.assert_array_equal(np.isnan(out), spoiled)


def test_nan_reaches_those_who_see_it(emulated, rng) -> None:
    q, k, v = operands(rng, 100, 150)
    v[:, :, 90, 5] = np.nan
    out, _ = emulated.run(q, k, v, causal=True)
    spoiled = np.zeros(out.shape, bool)
    spoiled[:, :, np.arange(100) + 50 >= 90, 5] = True
    np.testing.assert_array_equal(np.isnan(out), spoiled)
    q, k, v = operands(rng, 5, 150)  # all in the upper half of the rows of a warp
    v[:, :, 148, 3] = np.nan
    np.testing.assert_array_equal(np.isnan(emulated.run(q, k, v, causal=True)[0][0, 0, :, 3]), np.arange(5) >= 3)


@pytest.mark.parametrize("how", ["heads", "sequences"])
def test_fp8(how, emulated, rng) -> None:
    narrow = [x.astype(FLOAT8) for x in operands(rng, 70, 150, heads=(2, 2))]
    scales = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0}
    options: dict[str, Any] = {"causal": True, "out_dtype": np.float32}
    if how == "sequences":
        narrow = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in narrow]
        options |= {"cu_seqlens_q": [0, 30, 70], "cu_seqlens_k": [0, 45, 150]}
    wide = [x.astype(np.float64) * s for x, s in zip(narrow, scales.values(), strict=True)]
    emulated.check(*(x.view(np.uint8) for x in narrow), wide, **options, **scales)
    if how == "heads":  # large scores are small ones
        emulated.check(*(x.view(np.uint8) for x in narrow), wide, **options, **scales, scale=-0.1)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
def test_a_weight_that_outweighs_all_others_is_one_however_large_its_score(dtype, emulated, rng) -> None:
    """A huge maximum is rounded, and the largest weight is not 1; its error cancels out."""
    q, k, v = operands(rng, 64, 130, heads=(1, 1), dtype=dtype)
    q, k = (60 * q).astype(dtype), (60 * k).astype(dtype)
    for small in ([], np.arange(64) % 16 >= 8, np.arange(64) % 16 < 8):  # the other half of the rows has small ones
        some = q.copy()
        some[0, 0, small] = 0
        out, _ = emulated.run(some, k, v, out_dtype=np.float32)
        scores = some[0, 0].astype(np.float64) @ k[0, 0].astype(np.float64).T / 8
        first, second = np.sort(scores, axis=1)[:, -1], np.sort(scores, axis=1)[:, -2]
        clear = first - second > 40
        assert clear.sum() > 18 and first[clear].min() > 2000
        want = v[0, 0, scores.argmax(axis=1)[clear]].astype(np.float64)
        np.testing.assert_allclose(out[0, 0, clear], want, rtol=2e-6)


@pytest.mark.parametrize("climbs", [0, 1, -1])
def test_sums_of_fp8_that_are_kept_apart_every_1024_keys(climbs, emulated, rng) -> None:
    """Those of more than 2048 keys, also where keys that are met later weigh more and what was kept fades."""
    q, k, v = operands(rng, 64, 2500, heads=(1, 1))
    if climbs:
        q = np.broadcast_to(np.sign(q[:, :, :1]), q.shape)
        k = np.sign(q[:, :, :1]) * np.linspace(0.1, 2, 2500)[::climbs, None]
    v = v + np.linspace(0, 2, 2500)[None, None, :, None]  # so that early keys and late ones give different results
    narrow = [np.ascontiguousarray(x).astype(FLOAT8) for x in (q, k, v)]
    wide = [x.astype(np.float64) for x in narrow]
    scales = {name: 1.0 for name in ("q_scale", "k_scale", "v_scale")}
    emulated.check(*(x.view(np.uint8) for x in narrow), wide, out_dtype=np.float32, **scales)


@pytest.mark.races
@pytest.mark.parametrize("bounds", [[0, -9, 40], [0, 2**31 - 1, 40], [30, 7, 2**31 - 1], [-(2**31), 20, -1]], ids=str)
def test_values_between_bounds_that_were_spoiled_touch_nothing_outside(bounds, folder, rng) -> None:
    """16 places of a sequence are its keys, in the order of the kernel, or 0; keys lie inside."""
    with emulator.emulated(folder, emulator.guarded, arch="sm_90a"):
        v = emulator.guarded(rng.integers(1, 250, (1, 2, 40, 64)).astype(np.uint8))
        got = attention_launch._by_columns(v, emulator.guarded(np.array(bounds, np.int32)))
    held = np.clip(bounds, 0, 40)
    place = [-(-x // 16) + s for s, x in enumerate(held)]
    want = np.zeros(got.shape, np.uint8)
    for group in range(got.shape[3] // 16):
        sequence = 1 if place[1] <= group else 0  # the last one that begins at or before it
        first = held[sequence] + 16 * (group - place[sequence])
        for at in range(16):
            key = first + 2 * (at // 4) + at % 4 + (6 if at % 4 > 1 else 0)
            if 0 <= key < held[sequence + 1]:
                want[0, :, :, 16 * group + at] = v[0, :, key]
    np.testing.assert_array_equal(got, want)
