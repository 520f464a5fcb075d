"""`attention` on the host, and on a fake card, against a dense softmax in float64 over the keys a query sees."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention

from .. import fake_cupy
from .dense_softmax import (
    DTYPES,
    F16,
    F32,
    F64,
    TILES,
    Problem,
    assert_near,
    eps,
    normal,
    problems,
    strided,
    there,
    tiles,
)


# ------------------------------------------------------------------------------------------------- values
@given(problem=problems(masks=False))
def test_bands_equal_a_dense_softmax(problem: Problem) -> None:
    problem.check()


@given(problem=problems(masks=True))
def test_masks_meet_bands_in_their_intersection(problem: Problem) -> None:
    problem.check()


@given(problem=problems())
def test_the_same_call_gives_the_same_bits_in_any_memory_layout(problem: Problem) -> None:
    with tiles(problem.tile):
        results = [
            attention(*(strided(x.copy(), how) for x in (problem.q, problem.k, problem.v)), **options)
            for how in ("plain", "plain", "every second")
            for options in [problem.options | {"layout": "bhsd"}]
        ]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "G"), [(1, 1), (2, 4), (1, 7), (8, 4)])
def test_lengths_beyond_a_tile_and_heads_that_share_one(dtype: Any, H: int, G: int) -> None:
    rng = np.random.default_rng(H * G)
    q, k, v = (normal(rng, (1, h, S, 24), dtype) for h, S in ((H * G, 150), (H, 1111), (H, 1111)))
    Problem(q, k, v, {"causal": True}).check()
    Problem(q, k, v).check()
    Problem(q[:, :, :1], k, v).check()
    Problem(q, k, v, {"window": (100, 30)}).check()


def two(keys: int, block: Any) -> int:
    """Two blocks in each block row, or one if there are no two."""
    return min(2, -(-keys // (block if isinstance(block, int) else block[1])))


MASKS: dict[str, Callable[[int, int, Any], BlockMask]] = {
    "full": lambda q, k, b: BlockMask.full(q, k, block=b, device="cpu"),
    "causal": lambda q, k, b: BlockMask.causal(q, k, block=b, device="cpu"),
    "top-left": lambda q, k, b: BlockMask.causal(q, k, align="top-left", block=b, device="cpu"),
    "window": lambda q, k, b: BlockMask.window(q, k, left=40, right=7, block=b, device="cpu"),
    "sinks": lambda q, k, b: BlockMask.sinks(q, k, count=5, block=b, device="cpu"),
    "prefix": lambda q, k, b: BlockMask.prefix(q, k, length=70, block=b, device="cpu"),
    "global": lambda q, k, b: BlockMask.global_tokens(q, k, tokens=[3, 4, 99], block=b, device="cpu"),
    "dilated": lambda q, k, b: BlockMask.dilated(q, k, count=9, dilation=5, block=b, device="cpu"),
    "random": lambda q, k, b: BlockMask.random(q, k, per_row=two(k, b), block=b, device="cpu"),
    "random heads": lambda q, k, b: BlockMask.random(q, k, per_row=two(k, b), heads=(2, 4), block=b, device="cpu"),
    "random kv heads": lambda q, k, b: BlockMask.random(q, k, per_row=two(k, b), heads=(1, 2), block=b, device="cpu"),
    "none": lambda q, k, b: ~BlockMask.full(q, k, block=b, device="cpu"),
}


@pytest.mark.parametrize("block", [16, (64, 32), 128], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_constructors_of_masks(name: str, block: Any) -> None:
    rng = np.random.default_rng(5)
    for S_q, S_k in ((201, 201), (130, 205), (150, 115)):
        q, k, v = (normal(rng, (2, h, S, 8), F32) for h, S in ((4, S_q), (2, S_k), (2, S_k)))
        mask = MASKS[name](S_q, S_k, block)
        Problem(q, k, v, {"mask": mask}).check()
        Problem(q, k, v, {"mask": mask, "causal": True, "window": (50, -1)}, TILES[4]).check()


def test_documents_as_a_mask_and_as_lengths_agree() -> None:
    rng = np.random.default_rng(6)
    bounds = [0, 37, 37, 100, 181]
    q, k, v = (normal(rng, (1, h, 181, 8), F32) for h in (4, 2, 2))
    mask = BlockMask.documents(bounds, block=32, device="cpu")
    Problem(q, k, v, {"mask": mask, "causal": True}).check()
    packed = attention(*(x[0].swapaxes(0, 1) for x in (q, k, v)), causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    np.testing.assert_allclose(
        packed.swapaxes(0, 1)[None], attention(q, k, v, mask=mask, causal=True), rtol=1e-5, atol=1e-6
    )


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5),
    heads=st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 3))),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.integers(-1, 9), st.integers(-1, 9))),
    align=st.sampled_from(("bottom-right", "top-left")),
    dtype=st.sampled_from(DTYPES),
    tile=st.sampled_from(TILES),
)
def test_each_sequence_of_its_own_length_sees_its_own_keys(
    seed: int,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    causal: bool,
    window: tuple[int, int] | None,
    align: str,
    dtype: Any,
    tile: tuple[int, int, int, int],
) -> None:
    rng = np.random.default_rng(seed)
    H, G = heads
    bounds = [np.cumsum([0, *(pair[side] for pair in lengths)]).astype(np.int32) for side in (0, 1)]
    q = normal(rng, (bounds[0][-1], H * G, 5), dtype)
    k, v = (normal(rng, (bounds[1][-1], H, width), dtype) for width in (5, 3))
    options: dict[str, Any] = {"causal": causal, "window": window, "align": align}
    with tiles(tile):
        out, lse = attention(
            q, k, v, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1].tolist(), return_lse=True, **options
        )
    assert out.shape == (len(q), H * G, 3)
    assert lse.shape == (H * G, len(q))
    for n in range(len(lengths)):
        here, there = (slice(b[n], b[n + 1]) for b in bounds)
        parts = [x[part].swapaxes(0, 1)[None] for x, part in ((q, here), (k, there), (v, there))]
        expected = Problem(*parts, options).expected()
        assert_near(out[here].swapaxes(0, 1)[None], expected.out, expected.out_bound)
        assert_near(lse[None, :, here], expected.lse, expected.lse_bound)


@pytest.mark.parametrize("zero", ["B", "H", "G", "S_q", "S_k", "D", "D_v"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_sizes_of_zero(zero: str, layout: str) -> None:
    n = {"B": 2, "H": 2, "G": 3, "S_q": 5, "S_k": 7, "D": 4, "D_v": 6} | {zero: 0}
    q = np.ones((n["B"], n["H"] * n["G"], n["S_q"], n["D"]), np.float32)
    k = np.ones((n["B"], n["H"], n["S_k"], n["D"]), np.float32)
    v = np.ones((n["B"], n["H"], n["S_k"], n["D_v"]), np.float32)
    Problem(q, k, v, {"layout": layout, "causal": True}).check()


# ------------------------------------------------------------------------------------------------- rows without keys
def test_rows_that_see_nothing_are_zero_whatever_the_operands_hold() -> None:
    q, k, v = (np.full((1, 1, n, 4), np.nan, np.float32) for n in (6, 3, 3))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out[0, 0, :3] == 0).all()
    assert (lse[0, 0, :3] == -np.inf).all()
    assert np.isnan(out[0, 0, 3:]).all()
    assert np.isnan(lse[0, 0, 3:]).all()


def test_rows_whose_keys_all_score_minus_infinity_are_no_rows_without_keys() -> None:
    k = np.full((1, 1, 3, 1), -np.inf)
    out, lse = attention(np.ones((1, 1, 3, 1)), k, np.ones((1, 1, 3, 1)), return_lse=True)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()
    k[0, 0, 1] = 2
    out, lse = attention(np.ones((1, 1, 3, 1)), k, np.ones((1, 1, 3, 1)), return_lse=True)
    assert (out == 1).all()
    assert (lse == 2).all()


# ------------------------------------------------------------------------------------------------- NaN and infinity
@given(problem=problems(), spots=st.lists(st.tuples(st.sampled_from("kkvvvq"), st.integers(0, 10**6)), max_size=6))
def test_nan_and_infinity_reach_the_queries_that_see_them_and_no_others(
    problem: Problem, spots: list[tuple[str, int]]
) -> None:
    for number, (name, at) in enumerate(spots):
        x = getattr(problem, name)
        x[np.unravel_index(at % x.size, x.shape)] = (np.nan, np.inf, -np.inf)[number % 3]
    problem.check()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_where_a_query_does_not_look_changes_none_of_its_bits(dtype: Any, value: float) -> None:
    rng = np.random.default_rng(8)
    S, first = (700, 333) if dtype == F32 else (280, 133)  # two tiles, or one
    q, k, v = (normal(rng, (1, h, S, 16), dtype) for h in (4, 2, 2))
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[:, :, first:] = bad_v[:, :, first:] = value
    even_queries_stop_early = (np.arange(S) < first) | (np.arange(S)[:, None] % 2 == 1)
    mask = BlockMask.from_dense((rng.random((S, S)) < 0.5) & even_queries_stop_early, block=64)
    blocks = BlockMask.random(S, per_row=3, block=16, device="cpu")
    for options in ({"causal": True}, {"window": (20, 30)}, {"mask": mask}, {"mask": blocks, "causal": True}):
        problem = Problem(q, k, v, options)
        looks = problem.seen()[0, 0, :, first:].any(axis=1)
        assert 0 < looks.sum() < S
        clean = attention(q, k, v, **options)
        for operands in ((q, bad_k, v), (q, k, bad_v)):
            out = attention(*operands, **options)
            np.testing.assert_array_equal(out[:, :, ~looks], clean[:, :, ~looks])
        assert not np.isfinite(attention(q, k, bad_v, **options)[:, :, looks].astype(np.float32)).any()


# ------------------------------------------------------------------------------------------------- adversarial scores
#: More than four tiles of 100.
KEYS = 440
RAMP = np.linspace(-1e4, 1e4, KEYS)
SCORES = {
    "a rising ramp": RAMP,
    "a falling ramp": RAMP[::-1],
    "a slow ramp": np.linspace(-30, 30, KEYS),
    "one huge key at the end": np.append(np.zeros(KEYS - 1), 1e4),
    "one huge key at the start": np.append(1e4, np.zeros(KEYS - 1)),
    "from -1e4 to 1e4": np.random.default_rng(1).uniform(-1e4, 1e4, KEYS),
    "steps of the dtype's own size": np.repeat([-80.0, 0, 80, 90], KEYS // 4),
    "constant": np.full(KEYS, 37.0),
    "constant and very low": np.full(KEYS, -1e4),
    "constant and very high": np.full(KEYS, 3e38),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("tile", [(256, 256, 64, 1 << 20), (64, 100, 16, 1 << 20)], ids=str)
def test_adversarial_scores_are_as_exact_as_any(name: str, dtype: Any, tile: tuple[int, int, int, int]) -> None:
    rng = np.random.default_rng(2)
    k = SCORES[name].astype(dtype).reshape(1, 1, -1, 1)
    q, v = np.ones((1, 2, KEYS, 1), dtype), normal(rng, (1, 1, KEYS, 4), dtype)
    for options in ({}, {"causal": True}, {"window": (200, 10)}):
        problem = Problem(q, k, v, {"scale": 1.0, **options})
        expected = problem.expected()
        with tiles(tile):
            out, lse = attention(q, k, v, scale=1.0, return_lse=True, **options)
        # Scores are exact: what is left is exp, whose argument is off by half a unit in its last place.
        exact = 200 * eps(dtype)
        np.testing.assert_allclose(out, expected.out, rtol=exact, atol=exact * abs(v).max())
        np.testing.assert_allclose(lse, expected.lse, rtol=exact, atol=exact)


def test_values_that_fill_float16_do_not_overflow_on_the_way() -> None:
    v = np.full((1, 1, 3000, 2), 65504, np.float16)
    q = k = np.zeros((1, 1, 3000, 2), np.float16)
    assert (attention(q, k, v) == 65504).all()


# ------------------------------------------------------------------------------------------------- memory
def peak(call: Callable[[], Any]) -> int:
    """Bytes that a call takes at most at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("how", ["window", "causal", "mask"])
def test_nothing_of_the_size_of_the_scores_is_ever_held(dtype: Any, how: str) -> None:
    S = 8192
    q, k, v = (np.zeros((1, h, S, 32), dtype) for h in (2, 1, 1))
    out, few = np.empty_like(q), q[:, :, :256]
    window = BlockMask.window(S, left=255, right=0, device="cpu")
    calls: dict[str, Callable[[], Any]] = {
        "window": lambda: attention(q, k, v, window=(256, 0), out=out),
        "causal": lambda: attention(few, k, v, causal=True, out=out[:, :, :256]),
        "mask": lambda: attention(q, k, v, mask=window, out=out),
    }
    assert peak(calls[how]) < 4 << 20 < S * S


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_operands_are_not_copied(layout: str, dtype: Any) -> None:
    q = np.zeros((1, 16, 1, 64), dtype)
    k = np.zeros((1, 8, 20_000, 64), dtype)
    if layout == "bshd":
        q, k = q.swapaxes(1, 2).copy(), k.swapaxes(1, 2).copy()
    assert peak(lambda: attention(q, k, k, layout=layout)) < k.nbytes / 2 < 20 << 20


# ------------------------------------------------------------------------------------------------- out
@given(problem=problems(), how=st.sampled_from(("plain", "turned", "columns", "every second", "reversed")))
def test_out_of_any_strides_is_written_whole(problem: Problem, how: str) -> None:
    options = problem.options | {"layout": "bhsd"}
    operands = (problem.q, problem.k, problem.v)
    with tiles(problem.tile):
        expected = attention(*operands, **options)
        out = strided(np.full(expected.shape, np.nan, expected.dtype), how)
        options.pop("out_dtype")
        assert attention(*operands, out=out, **options) is out
    np.testing.assert_array_equal(out, expected)


def test_out_with_return_lse_and_variable_lengths() -> None:
    rng = np.random.default_rng(3)
    q = normal(rng, (9, 2, 4), F32)
    out = np.empty_like(q)
    options: dict[str, Any] = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": np.array([0, 4, 9]), "return_lse": True}
    written, _ = attention(q, q, q, out=out, **options)
    assert written is out
    np.testing.assert_array_equal(out, attention(q, q, q, **options)[0])


# ------------------------------------------------------------------------------------------------- on a device
@pytest.mark.fake
@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("place", ["host", "device", "list"])
def test_bounds_of_sequences_on_a_device_or_the_host(place: str, index: Any) -> None:
    fake = fake_cupy.backend()
    rng = np.random.default_rng(4)
    q, k, v = (normal(rng, shape, F32) for shape in ((40, 4, 8), (50, 2, 8), (50, 2, 6)))
    bounds = {"cu_seqlens_q": np.array([0, 9, 9, 40], index), "cu_seqlens_k": np.array([0, 0, 20, 50], index)}
    expected = attention(q, k, v, causal=True, return_lse=True, **bounds)
    given = {
        name: fake.from_host(x) if place == "device" else x.tolist() if place == "list" else x
        for name, x in bounds.items()
    }
    found = attention(*map(fake.from_host, (q, k, v)), causal=True, return_lse=True, **given)
    for x, want in zip(found, expected, strict=True):
        assert fake.is_dense(x) and x.dtype == want.dtype
        np.testing.assert_allclose(fake.to_host(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.fake
def test_sizes_of_zero_on_a_device() -> None:
    out, lse = attention(there(1, 2, 3, 4), there(1, 1, 0, 4), there(1, 1, 0, 5), return_lse=True)
    assert (fake_cupy.backend().to_host(out) == 0).all() and out.shape == (1, 2, 3, 5)
    assert (fake_cupy.backend().to_host(lse) == -np.inf).all()
    none = there(1, dtype=int)
    empty = attention(there(0, 2, 4), there(0, 1, 4), there(0, 1, 5), cu_seqlens_q=none, cu_seqlens_k=none)
    assert empty.shape == (0, 2, 5)
