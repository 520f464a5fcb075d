"""`attention` on the host, and through a fake device, against a dense softmax in float64 over the keys a query sees."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bsrgemm import BlockMask
from bsrgemm._attention import host_tiles
from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import BFLOAT16, FLOAT8

from ..fake_device import install
from ..gpu.test_attention_fp8 import by_columns

Array = np.ndarray[Any, Any]
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
U8 = np.dtype(np.uint8)
DTYPES = (F16, BFLOAT16, F32, F64)
#: Tiles (rows, keys, least queries, gathered elements): the real ones, and some that small problems do not fit into.
TILES = ((512, 512, 64, 1 << 20), (8, 5, 2, 1 << 20), (3, 1, 1, 1), (16, 16, 16, 64), (40, 24, 1, 1000))


@contextmanager
def tiles(sizes: tuple[int, int, int, int]) -> Iterator[None]:
    names = ("_TILE_ROWS", "_TILE_KEYS", "_LEAST_QUERIES", "_GATHERED")
    with mock.patch.multiple(host_tiles, **dict(zip(names, sizes, strict=True))):
        yield


def eps(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def seen_keys(
    S_q: int, S_k: int, causal: bool = False, window: tuple[int, int] | None = None, align: str = "bottom-right"
) -> Array:
    """Booleans (S_q, S_k) from the definitions."""
    place = np.arange(S_q)[:, None] + (S_k - S_q if align == "bottom-right" else 0)
    key = np.arange(S_k)
    left, right = window or (-1, -1)
    seen = np.ones((S_q, S_k), bool)
    if causal:
        seen &= key <= place
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    return seen


def mask_for_heads(mask: BlockMask, H_q: int) -> Array:
    """The mask as booleans (B or 1, H_q or 1, S_q, S_k)."""
    dense = mask.to_dense()
    if dense.ndim == 2:
        return dense[None, None]
    return dense if dense.shape[1] in (1, H_q) else np.repeat(dense, H_q // dense.shape[1], axis=1)


@dataclass
class Expected:
    out: Array
    lse: Array
    out_bound: Array
    lse_bound: Array


def reference(q: Array, k: Array, v: Array, seen: Array, scale: float, softcap: float | None, acc: Any) -> Expected:
    """Dense softmax of "bhsd" operands in float64, and how far a computation in `acc` may be from it."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    G = q.shape[1] // max(1, k.shape[1])
    k, v = np.repeat(k, G, axis=1), np.repeat(v, G, axis=1)
    seen = np.broadcast_to(seen, (*q.shape[:3], k.shape[2]))
    with np.errstate(all="ignore"):
        s = scale * (q @ k.swapaxes(2, 3))
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        s = np.where(seen, s, -np.inf)
        top = s.max(axis=3, keepdims=True, initial=-np.inf)
        p = np.where(seen, np.exp(s - top), 0)  # NaN where `top` is infinite and the key is seen
        weight = p.sum(axis=3, keepdims=True)
        p = np.where(seen, p / weight, 0)
        finite = np.isfinite(v).all()
        out = p @ v if finite else np.where(seen[..., None], p[..., None] * v[:, :, None], 0).sum(axis=3)
        lse = (top + np.log(weight))[..., 0]
        empty = ~seen.any(axis=3)
        lse[empty] = -np.inf
        # Rounded: D products of a score, its place under the maximum, S_k sums; the rest is a margin for NumPy's exp.
        finite = [np.nan_to_num(x, nan=0, posinf=0, neginf=0) for x in (q, k, v)]
        size = abs(scale) * (abs(finite[0]) @ abs(finite[1]).swapaxes(2, 3))
        size = np.where(seen, size, 0).max(axis=3, initial=0)
        if softcap is not None:
            size += softcap
        unit, n = eps(acc), k.shape[2]
        wrong = 4 * unit * ((q.shape[3] + 4) * size + n + 8)
        spread = np.nan_to_num(p, nan=0) @ abs(finite[2])
        least = float(np.finfo(acc).tiny) * n * (1 + abs(finite[2]).max(initial=0))
        out_bound = np.minimum(wrong, 2.0)[..., None] * spread + least
        return Expected(out, lse, out_bound, wrong + unit * abs(np.nan_to_num(lse, neginf=0)))


def assert_near(actual: Array, expected: Array, bound: Array) -> None:
    """Equal where not finite, otherwise within the bound and the rounding of the result's own dtype."""
    info = ml_dtypes.finfo(actual.dtype)
    assert actual.shape == expected.shape
    values = actual.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(values[~finite], expected[~finite])
    with np.errstate(invalid="ignore"):
        allowed = bound + float(info.eps) * abs(expected) + float(info.smallest_subnormal)
        wrong = finite & ~(abs(values - expected) <= allowed)
    assert not wrong.any(), (values[wrong][:5], expected[wrong][:5], np.broadcast_to(bound, values.shape)[wrong][:5])


@dataclass
class Problem:
    """Operands in "bhsd", and the keywords of a call."""

    q: Array
    k: Array
    v: Array
    options: dict[str, Any] = field(default_factory=dict)
    tile: tuple[int, int, int, int] = TILES[0]

    def seen(self) -> Array:
        """Booleans (B or 1, H_q or 1, S_q, S_k)."""
        (_, H_q, S_q, _), S_k, o = self.q.shape, self.k.shape[2], self.options
        seen = seen_keys(S_q, S_k, o.get("causal", False), o.get("window"), o.get("align", "bottom-right"))
        return seen[None, None] if o.get("mask") is None else seen & mask_for_heads(o["mask"], H_q)

    def expected(self) -> Expected:
        scale, D = self.options.get("scale"), self.q.shape[3]
        scale = (1 / math.sqrt(D) if D else 1.0) if scale is None else scale
        return reference(self.q, self.k, self.v, self.seen(), scale, self.options.get("softcap"), self.dtypes()[1])

    def dtypes(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """That of the result, and the one that is computed in."""
        wanted = self.options.get("out_dtype")
        dtype = self.q.dtype if wanted is None else wanted
        return dtype, F64 if F64 in (self.q.dtype, dtype) else F32

    def check(self) -> None:
        options = self.options
        turn = options.get("layout") == "bshd"
        q, k, v = (x.swapaxes(1, 2) if turn else x for x in (self.q, self.k, self.v))
        with tiles(self.tile):
            out, lse = attention(q, k, v, return_lse=True, **options)
        expected = self.expected()
        assert (out.dtype, lse.dtype) == self.dtypes()
        assert_near(out.swapaxes(1, 2) if turn else out, expected.out, expected.out_bound)
        assert_near(lse, expected.lse, expected.lse_bound)


# ------------------------------------------------------------------------------------------------- drawing problems
def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def strided(x: Array, how: str) -> Array:
    """The same values, lying otherwise."""
    if how == "turned":
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if how == "columns":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if how == "every second":
        spaced = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        spaced[..., ::2] = x
        return spaced[..., ::2]
    if how == "reversed":
        return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]
    return x


def random_mask(rng: np.random.Generator, heads: tuple[int, int], S_q: int, S_k: int, block: tuple[int, int]) -> Any:
    """Blocks that are empty, whole or random, of 16 x 16 at least."""
    grid = (*heads, -(-S_q // block[0]), -(-S_k // block[1]))
    fill = np.repeat(np.repeat(rng.choice([0.0, 0.0, 1.0, 1.0, 0.5, 0.1], grid), block[0], axis=2), block[1], axis=3)
    allowed = rng.random((*heads, S_q, S_k)) < fill[:, :, :S_q, :S_k]
    return BlockMask.from_dense(allowed, block=block)


@st.composite
def problems(draw: st.DrawFn, masks: bool | None = None, dtypes: tuple[Any, ...] = DTYPES) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    B, H, G = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 4)))
    lengths = st.one_of(st.integers(1, 20), st.integers(1, 90))
    S_q, S_k = draw(lengths), draw(lengths)
    D, D_v = draw(st.sampled_from((1, 3, 8, 17))), draw(st.sampled_from((1, 2, 8, 13)))
    dtype = draw(st.sampled_from(dtypes))
    how = st.sampled_from(("plain", "turned", "columns", "every second", "reversed"))
    shapes = ((B, H * G, S_q, D), (B, H, S_k, D), (B, H, S_k, D_v))
    q, k, v = (strided(normal(rng, shape, dtype), draw(how)) for shape in shapes)
    side = st.one_of(st.just(-1), st.integers(0, 8), st.integers(0, 200))
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(side, side))),
        "align": draw(st.sampled_from(("bottom-right", "top-left"))),
        "layout": draw(st.sampled_from(("bhsd", "bshd"))),
        "scale": draw(st.sampled_from((None, 0.5, 0.0, -1.25))),
        "softcap": draw(st.sampled_from((None, None, 0.7, 30))),
        "out_dtype": draw(st.sampled_from((None, None, None, *DTYPES))),
    }
    if draw(st.booleans()) if masks is None else masks:
        heads = (draw(st.sampled_from((1, B))), draw(st.sampled_from((1, H, H * G))))
        block = draw(st.sampled_from(((16, 16), (32, 16), (16, 48), (128, 64))))
        options["mask"] = random_mask(rng, heads, S_q, S_k, block)
    return Problem(q, k, v, options, draw(st.sampled_from(TILES)))


# ------------------------------------------------------------------------------------------------- values
@given(problem=problems(masks=False))
def test_bands_equal_a_dense_softmax(problem: Problem) -> None:
    problem.check()


@given(problem=problems(masks=True))
def test_masks_meet_bands_in_their_intersection(problem: Problem) -> None:
    problem.check()


@settings(max_examples=20)
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


# ------------------------------------------------------------------------------------------------- fp8
def fp8_bytes(x: Array) -> Array:
    return x.astype(FLOAT8).view(np.uint8)


def per_head(scale: Any) -> Any:
    """A scale as a factor of operands in "bhsd"."""
    return scale[..., None, None] if np.ndim(scale) else np.float32(scale)


@st.composite
def fp8_problems(draw: st.DrawFn) -> tuple[Problem, list[Array], dict[str, Any]]:
    """A problem of the numbers that bytes and scales stand for, the bytes, and the scales."""
    problem = draw(problems(dtypes=(F32,)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if problem.options["out_dtype"] == F64:
        problem.options["out_dtype"] = None
    scales: dict[str, Any] = {}
    operands = []
    for name in "qkv":
        x = getattr(problem, name)
        coded = strided(fp8_bytes(x), draw(st.sampled_from(("plain", "turned", "columns", "every second", "reversed"))))
        sizes = draw(st.sampled_from((None, (), x.shape[1:2], x.shape[:2])))
        if sizes is None and name == "v" and not scales:
            sizes = ()
        wide = coded.view(FLOAT8).astype(np.float32)
        if sizes is not None:
            scale = rng.uniform(0.2, 3, sizes).astype(np.float32)
            scales[f"{name}_scale"] = scale if sizes else float(scale)
            wide = wide * per_head(scale)
        setattr(problem, name, wide)
        operands.append(coded.view(FLOAT8) if draw(st.booleans()) else coded)
    return problem, operands, scales


@given(drawn=fp8_problems(), how=st.sampled_from(("plain", "turned", "columns", "every second", "reversed")))
def test_fp8_is_the_attention_of_the_numbers_it_stands_for(
    drawn: tuple[Problem, list[Array], dict[str, Any]], how: str
) -> None:
    problem, operands, scales = drawn
    turn = problem.options["layout"] == "bshd"
    q, k, v = (x.swapaxes(1, 2) if turn else x for x in operands)
    with tiles(problem.tile):
        out, lse = attention(q, k, v, return_lse=True, **scales, **problem.options)
        into = strided(np.full(out.shape, np.nan, out.dtype), how)
        assert attention(q, k, v, out=into, **scales, **problem.options) is into
    assert (out.dtype, lse.dtype) == problem.dtypes()
    np.testing.assert_array_equal(into, out)
    expected = problem.expected()
    assert_near(out.swapaxes(1, 2) if turn else out, expected.out, expected.out_bound)
    assert_near(lse, expected.lse, expected.lse_bound)


@pytest.mark.parametrize("sizes", ["number", "heads", "batch and heads"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 2), "softcap": 2.0}], ids=str)
def test_fp8_sequences_of_different_lengths(sizes: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    coded = [fp8_bytes(rng.standard_normal(shape)) for shape in ((40, 4, 8), (50, 2, 8), (50, 2, 6))]
    scales = {
        f"{name}_scale": rng.uniform(0.5, 2, {"number": (), "heads": x.shape[1:2]}.get(sizes, (1, x.shape[1]))).astype(
            F32
        )
        for name, x in zip("qkv", coded, strict=True)
    }
    wide = [
        x.view(FLOAT8).astype(np.float32) * scale.reshape(-1, 1)
        for x, scale in zip(coded, scales.values(), strict=True)
    ]
    bounds: dict[str, Any] = {"cu_seqlens_q": [0, 9, 9, 40], "cu_seqlens_k": [0, 0, 20, 50]}
    found = attention(*coded, return_lse=True, **bounds, **scales, **options)
    expected = attention(*wide, return_lse=True, **bounds, **options)
    for x, want in zip(found, expected, strict=True):
        assert x.dtype == F32
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)


def test_fp8_nan_reaches_the_queries_that_see_it_and_no_others() -> None:
    rng = np.random.default_rng(9)
    q, k, v = (fp8_bytes(rng.standard_normal((1, 2, 90, 8))) for _ in range(3))
    clean, clean_lse = attention(q, k, v, causal=True, return_lse=True, q_scale=1.0)
    k[:, :, 50:, 3] = 0x7F
    v[:, :, 60:] = 0xFF
    out, lse = attention(q, k, v, causal=True, return_lse=True, q_scale=1.0)
    np.testing.assert_array_equal(out[:, :, :50], clean[:, :, :50])
    np.testing.assert_array_equal(lse[:, :, :50], clean_lse[:, :, :50])
    assert np.isnan(out[:, :, 50:]).all() and np.isnan(lse[:, :, 50:]).all()
    nobody = ~BlockMask.full(90, 90, device="cpu")
    out, lse = attention(q, k, v, mask=nobody, return_lse=True, q_scale=1.0)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_fp8_scales_from_tiny_to_huge() -> None:
    rng = np.random.default_rng(10)
    q, k, v = (fp8_bytes(rng.standard_normal((2, 3, 20, 16))) for _ in range(3))
    q_scale, k_scale, v_scale = (np.array(x, np.float32) for x in ([1e-6, 1e4, 1], [1e6, 1e-4, 1], [1e4, 1e-6, 1e-30]))
    found = attention(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    expected = attention(q, k, v, q_scale=1.0)
    np.testing.assert_allclose(found / v_scale[:, None, None], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("out_dtype", [None, F16, BFLOAT16, F32], ids=str)
def test_fp8_on_a_device_stays_there_and_gives_the_same_bits(out_dtype: Any) -> None:
    fake = install()
    rng = np.random.default_rng(11)
    operands = [fp8_bytes(rng.standard_normal((2, h, 30, 8))) for h in (4, 2, 2)]
    scales = {"q_scale": rng.uniform(1, 2, 4).astype(F32), "v_scale": rng.uniform(1, 2, (2, 2)).astype(F32)}
    expected = attention(*operands, k_scale=0.5, out_dtype=out_dtype, return_lse=True, **scales)
    there_ = {name: fake.from_host(x) for name, x in scales.items()}
    found = attention(*map(fake.from_host, operands), k_scale=0.5, out_dtype=out_dtype, return_lse=True, **there_)
    for x, want in zip(found, expected, strict=True):
        assert fake.is_dense(x) and x.dtype == want.dtype
        np.testing.assert_array_equal(fake.to_host(x), want)


def test_fp8_weights_meet_their_own_keys_in_the_tensor_cores() -> None:
    """The registers of a step of 32 keys, as attention_sm90 packs them, times values as attention_values lays them."""
    rng = np.random.default_rng(12)
    weights, v = rng.integers(0, 9, (16, 32)), rng.integers(0, 9, (1, 1, 32, 5), dtype=np.uint8)
    a = np.zeros((16, 32), int)  # as the instruction has it: register r of thread 4 row + t, byte i
    for row, t, r, i in np.ndindex(8, 4, 4, 4):
        line = row + r % 2 * 8
        score = 16 * (r // 2) + 2 * t + (i if i < 2 else i + 6)  # the scores 8 j + 2 t and + 1 of even and odd j
        a[line, 16 * (r // 2) + 4 * t + i] = weights[line, score]
    np.testing.assert_array_equal(a @ by_columns(v)[0, 0].T.astype(int), weights @ v[0, 0].astype(int))
    assert by_columns(v[:, :, :17]).shape == (1, 1, 5, 32) and not by_columns(v[:, :, :17])[..., 17:].all()


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
@settings(max_examples=40)
@given(problem=problems(), how=st.sampled_from(("plain", "turned", "every second", "reversed")))
def test_arrays_on_a_device_stay_there_and_give_the_same_bits(problem: Problem, how: str) -> None:
    fake = install()
    options, turn = dict(problem.options), problem.options["layout"] == "bshd"
    operands = [x.swapaxes(1, 2) if turn else x for x in (problem.q, problem.k, problem.v)]
    with tiles(problem.tile):
        expected = attention(*operands, return_lse=True, **options)
        if "mask" in options:
            options["mask"] = options["mask"].to_device(fake.name)
        moved = [fake.from_host(x) for x in operands]
        out = fake.from_host(strided(np.full(expected[0].shape, np.nan, expected[0].dtype), how))
        found = attention(*moved, return_lse=True, **options)
        options.pop("out_dtype")
        written = attention(*moved, out=out, **options)
    assert written is out
    for x, want in zip((*found, written), (*expected, expected[0]), strict=True):
        assert fake.is_dense(x) and x.dtype == want.dtype
        np.testing.assert_array_equal(fake.to_host(x), want)


@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("place", ["host", "device", "list"])
def test_bounds_of_sequences_on_a_device_or_the_host(place: str, index: Any) -> None:
    fake = install()
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
        assert fake.is_dense(x)
        np.testing.assert_array_equal(fake.to_host(x), want)


def test_sizes_of_zero_on_a_device() -> None:
    out, lse = attention(there(1, 2, 3, 4), there(1, 1, 0, 4), there(1, 1, 0, 5), return_lse=True)
    assert (install().to_host(out) == 0).all() and out.shape == (1, 2, 3, 5)
    assert (install().to_host(lse) == -np.inf).all()
    none = there(1, dtype=int)
    empty = attention(there(0, 2, 4), there(0, 1, 4), there(0, 1, 5), cu_seqlens_q=none, cu_seqlens_k=none)
    assert empty.shape == (0, 2, 5)


# ------------------------------------------------------------------------------------------------- bad input
def zeros(*shape: int, dtype: Any = F32) -> Array:
    return np.zeros(shape, dtype)


def attempt(**changes: Any) -> Any:
    """A good call with some of its arguments replaced."""
    good = {"q": zeros(2, 4, 5, 8), "k": zeros(2, 2, 7, 8), "v": zeros(2, 2, 7, 3)}
    arguments = good | changes
    return attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def packed(**changes: Any) -> Any:
    """A good call with sequences of different lengths, with some of its arguments replaced."""
    bounds = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 3, 7]}
    return attempt(**{"q": zeros(5, 4, 8), "k": zeros(7, 2, 8), "v": zeros(7, 2, 3), **bounds, **changes})


def read_only() -> Array:
    out = zeros(2, 4, 5, 3)
    out.flags.writeable = False
    return out


def overlapping(name: str) -> Any:
    x = {"q": zeros(2, 4, 5, 8), "k": zeros(2, 2, 7, 8), "v": zeros(2, 2, 7, 3)}
    longer = zeros(2 * 4 * 5 * 3 + x[name].size)
    x[name] = longer[: x[name].size].reshape(x[name].shape)
    at = x[name].size - 1
    return attempt(**x, out=longer[at : at + 120].reshape(2, 4, 5, 3))


def there(*shape: int, dtype: Any = F32) -> Any:
    return install().from_host(zeros(*shape, dtype=dtype))


def on_device(**changes: Any) -> Any:
    """A good call on the fake device with some of its arguments replaced."""
    return attempt(**{"q": there(2, 4, 5, 8), "k": there(2, 2, 7, 8), "v": there(2, 2, 7, 3), **changes})


def packed_on_device(**changes: Any) -> Any:
    return packed(**{"q": there(5, 4, 8), "k": there(7, 2, 8), "v": there(7, 2, 3), **changes})


def fp8(**changes: Any) -> Any:
    """A good call of fp8 with some of its arguments replaced."""
    good = {"q": zeros(2, 4, 5, 8, dtype=U8), "k": zeros(2, 2, 7, 8, dtype=U8), "v": zeros(2, 2, 7, 3, dtype=U8)}
    return attempt(**{**good, "q_scale": 1.0, **changes})


def fp8_on_device(**changes: Any) -> Any:
    good = {"q": there(2, 4, 5, 8, dtype=U8), "k": there(2, 2, 7, 8, dtype=U8), "v": there(2, 2, 7, 3, dtype=U8)}
    return fp8(**{**good, **changes})


def four(*values: float, dtype: Any = F32) -> Array:
    return np.array(values, dtype)


class OnTheGPU:
    """Looks as the array of a library without CuPy does."""

    def __dlpack__(self) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


class Foreign:
    """An array of another library, in the memory of the host."""

    def __init__(self, x: Any) -> None:
        self.x = np.asarray(x)

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def mask(q: int = 5, k: int = 7, heads: tuple[int, int] = (1, 1)) -> BlockMask:
    return BlockMask.random(q, k, per_row=1, heads=heads, block=16, device="cpu")


WINDOW = "window: wanted two integers (left, right) from -1 on, got"
BYTES, ABOVE_0 = "wanted fp8 numbers as uint8, since a scale is given, got", "wanted a finite number above 0"
SIZES = "wanted a number or float32 of shape"
REFUSED: list[tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    # operands
    (lambda: attempt(q=zeros(4, 5, 8)), ValueError, ("q: wanted 4 dimensions", "bhsd", "(4, 5, 8)")),
    (lambda: attempt(v=zeros(2, 2, 7, 3, 1)), ValueError, ("v: wanted 4 dimensions", "(2, 2, 7, 3, 1)")),
    (lambda: attempt(q=[[[[1.0]]]]), TypeError, ("q: wanted a NumPy or CuPy array, got builtins list",)),
    (lambda: attempt(q=None), TypeError, ("q: wanted a NumPy or CuPy array, got builtins NoneType",)),
    (lambda: attempt(k=None), TypeError, ("k: wanted a dense array on 'cpu', where q is, got builtins NoneType",)),
    (lambda: attempt(v=[[[[1.0]]]]), TypeError, ("v: wanted a dense array on 'cpu'", "got builtins list")),
    (lambda: attempt(k=zeros(3, 2, 7, 8)), ValueError, ("k: wanted a batch of 2", "got 3")),
    (lambda: attempt(v=zeros(1, 2, 7, 3)), ValueError, ("v: wanted a batch of 2", "got 1")),
    (lambda: attempt(k=zeros(2, 3, 7, 8), v=zeros(2, 3, 7, 3)), ValueError, ("k: wanted a number of heads", "4", "3")),
    (lambda: attempt(k=zeros(2, 0, 7, 8), v=zeros(2, 0, 7, 3)), ValueError, ("k: wanted a number of heads", "got 0")),
    (lambda: attempt(k=zeros(2, 8, 7, 8), v=zeros(2, 8, 7, 3)), ValueError, ("k: wanted a number of heads", "got 8")),
    (lambda: attempt(v=zeros(2, 4, 7, 3)), ValueError, ("v: wanted 2 heads as k has, got 4",)),
    (lambda: attempt(v=zeros(2, 2, 6, 3)), ValueError, ("v: wanted length 7 as k has, got 6",)),
    (lambda: attempt(k=zeros(2, 2, 7, 9)), ValueError, ("k: wanted head dim 8 as q has, got 9",)),
    (lambda: attempt(layout="bshd"), ValueError, ("k: wanted a number of heads", "5", "7")),
    (lambda: attempt(k=zeros(2, 2, 7, 8, dtype=F16)), TypeError, ("k: wanted float32 as q has, got float16",)),
    (lambda: attempt(v=zeros(2, 2, 7, 3, dtype=F64)), TypeError, ("v: wanted float32 as q has, got float64",)),
    (lambda: attempt(q=zeros(2, 4, 5, 8, dtype=int)), TypeError, ("q: does not support dtype int64", "float16")),
    (lambda: attempt(q=zeros(2, 4, 5, 8, dtype=complex)), TypeError, ("q: does not support dtype complex128",)),
    # places
    (
        lambda: attempt(q=there(2, 4, 5, 8)),
        TypeError,
        ("k: wanted a dense array on 'fake'", "got numpy ndarray", "moved"),
    ),
    (
        lambda: attempt(k=there(2, 2, 7, 8)),
        TypeError,
        ("k: wanted a dense array on 'cpu'", "ndarray", "moved silently"),
    ),
    (lambda: attempt(v=OnTheGPU()), TypeError, ("v: wanted a dense array on 'cpu', where q is, got tests OnTheGPU",)),
    (lambda: attempt(out=OnTheGPU()), TypeError, ("out: wanted a dense array on 'cpu', where q is", "OnTheGPU")),
    (lambda: attempt(out=there(2, 4, 5, 3)), TypeError, ("out: wanted a dense array on 'cpu', where q is, got tests",)),
    (lambda: on_device(out=zeros(2, 4, 5, 3)), TypeError, ("out: wanted a dense array on 'fake'", "got numpy ndarray")),
    (lambda: on_device(k=zeros(2, 2, 7, 8)), TypeError, ("k: wanted a dense array on 'fake'", "got numpy ndarray")),
    (lambda: on_device(v=OnTheGPU()), TypeError, ("v: wanted a dense array on 'fake'", "OnTheGPU")),
    (
        lambda: attempt(mask=mask().to_device(install().name)),
        TypeError,
        ("mask: wanted a mask on 'cpu', where q is, got one on 'fake'", "mask.to_device('cpu') brings it there"),
    ),
    (
        lambda: on_device(mask=mask()),
        TypeError,
        ("mask: wanted a mask on 'fake', where q is, got one on 'cpu'", "mask.to_device('fake') brings it there"),
    ),
    (
        lambda: packed(cu_seqlens_q=install().from_host(np.array([0, 2, 5]))),
        TypeError,
        ("cu_seqlens_q: wanted a dense array on 'cpu', where q is",),
    ),
    # masks
    (lambda: attempt(mask=np.ones((5, 7), bool)), TypeError, ("mask: wanted a BlockMask, got ndarray", "from_dense")),
    (lambda: attempt(mask=mask(7, 5)), ValueError, ("mask: wanted shape (5, 7)", "got (7, 5)")),
    (lambda: attempt(mask=mask(heads=(3, 1))), ValueError, ("mask: wanted one pattern or 2 along the batch, got 3",)),
    (lambda: attempt(mask=mask(heads=(1, 3))), ValueError, ("mask: wanted 1 or 2 or 4 patterns", "heads, got 3")),
    (lambda: packed(mask=mask()), ValueError, ("mask: got one together with cu_seqlens_q",)),
    # options
    (lambda: attempt(layout="sbhd"), ValueError, ("layout: wanted 'bhsd' or 'bshd', got 'sbhd'",)),
    (lambda: attempt(layout=["bhsd"]), ValueError, ("layout: wanted 'bhsd' or 'bshd', got ['bhsd']",)),
    (lambda: attempt(align="center"), ValueError, ("align: wanted 'bottom-right' or 'top-left', got 'center'",)),
    (lambda: attempt(causal=1), TypeError, ("causal: wanted True or False, got 1",)),
    (lambda: attempt(return_lse="yes"), TypeError, ("return_lse: wanted True or False, got 'yes'",)),
    (lambda: attempt(window=(3,)), ValueError, (WINDOW, "(3,)")),
    (lambda: attempt(window=(1, 2, 3)), ValueError, (WINDOW, "(1, 2, 3)")),
    (lambda: attempt(window=(-2, 3)), ValueError, (WINDOW, "(-2, 3)")),
    (lambda: attempt(window=(3, -2)), ValueError, (WINDOW, "(3, -2)")),
    (lambda: attempt(window=()), ValueError, (WINDOW, "()")),
    (lambda: attempt(window=5), TypeError, (WINDOW, "5")),
    (lambda: attempt(window=(1.0, 2)), TypeError, (WINDOW, "(1.0, 2)")),
    (lambda: attempt(window=(True, 2)), TypeError, (WINDOW, "(True, 2)")),
    (lambda: attempt(window=(None, 2)), TypeError, (WINDOW, "(None, 2)")),
    (lambda: attempt(scale=math.inf), ValueError, ("scale: wanted a finite number that float32 can hold, got inf",)),
    (lambda: attempt(scale=math.nan), ValueError, ("scale: wanted a finite number", "nan")),
    (lambda: attempt(scale=1e39), ValueError, ("scale: wanted a finite number that float32 can hold, got 1e+39",)),
    (lambda: attempt(scale=10**400), ValueError, ("scale: wanted a finite number",)),
    (lambda: attempt(scale="1"), TypeError, ("scale: wanted a finite number", "'1'")),
    (lambda: attempt(scale=True), TypeError, ("scale: wanted a finite number", "True")),
    (lambda: attempt(scale=1j), TypeError, ("scale: wanted a finite number", "1j")),
    (lambda: attempt(scale=np.ones(2)), TypeError, ("scale: wanted a finite number",)),
    (lambda: attempt(softcap=0), ValueError, ("softcap: wanted a finite number above 0", "got 0")),
    (lambda: attempt(softcap=-1.0), ValueError, ("softcap: wanted a finite number above 0", "got -1.0")),
    (lambda: attempt(softcap=math.inf), ValueError, ("softcap: wanted a finite number above 0", "inf")),
    (lambda: attempt(softcap=1e-50), ValueError, ("softcap: wanted a finite number above 0", "float32", "1e-50")),
    (lambda: attempt(softcap="30"), TypeError, ("softcap: wanted a finite number above 0", "'30'")),
    # lengths
    (lambda: packed(cu_seqlens_k=None), ValueError, ("cu_seqlens_k: wanted together", "None")),
    (lambda: packed(cu_seqlens_q=None), ValueError, ("cu_seqlens_q: wanted together", "None")),
    (lambda: packed(q=zeros(1, 5, 4, 8)), ValueError, ("q: wanted 3 dimensions", "total length", "(1, 5, 4, 8)")),
    (lambda: packed(cu_seqlens_q=[0, 2, 4]), ValueError, ("cu_seqlens_q: wanted 5, the length of q", "got 4")),
    (lambda: packed(cu_seqlens_k=[0, 3, 8]), ValueError, ("cu_seqlens_k: wanted 7, the length of k", "got 8")),
    (
        lambda: packed(cu_seqlens_q=[1, 2, 5]),
        ValueError,
        ("cu_seqlens_q: wanted bounds that climb from 0", "[1, 2, 5]"),
    ),
    (lambda: packed(cu_seqlens_q=[0, 6, 5]), ValueError, ("cu_seqlens_q: wanted bounds that climb", "[0, 6, 5]")),
    (lambda: packed(cu_seqlens_q=[[0, 2, 5]]), ValueError, ("cu_seqlens_q: wanted", "one dimension", "(1, 3)")),
    (lambda: packed(cu_seqlens_q=[]), ValueError, ("cu_seqlens_q: wanted", "(0,)")),
    (lambda: packed(cu_seqlens_q=[0.0, 2.0, 5.0]), TypeError, ("cu_seqlens_q: wanted integers", "float64")),
    (lambda: packed(cu_seqlens_q=5), TypeError, ("cu_seqlens_q: wanted", "got builtins int")),
    (lambda: packed(cu_seqlens_q=Foreign([0, 6, 5])), ValueError, ("cu_seqlens_q: wanted bounds that climb from 0",)),
    (lambda: packed(cu_seqlens_k=Foreign([0, 3, 8])), ValueError, ("cu_seqlens_k: wanted 7, the length of k", "8")),
    (
        lambda: packed_on_device(cu_seqlens_q=[0, 2, 4]),
        ValueError,
        ("cu_seqlens_q: wanted 5, the length of q", "got 4"),
    ),
    (lambda: packed_on_device(cu_seqlens_k=[0, 7]), ValueError, ("cu_seqlens_k: wanted 3 numbers", "got 2")),
    (lambda: packed_on_device(cu_seqlens_q=there(3)), TypeError, ("cu_seqlens_q: wanted integers, got dtype float32",)),
    (
        lambda: packed_on_device(cu_seqlens_q=there(1, dtype=int), cu_seqlens_k=there(1, dtype=int)),
        ValueError,
        ("cu_seqlens_q: wanted",),
    ),
    (lambda: packed(cu_seqlens_k=[0, 7]), ValueError, ("cu_seqlens_k: wanted 3 numbers", "got 2")),
    # out
    (lambda: attempt(out=zeros(2, 4, 5, 8)), ValueError, ("out: wanted float32 of shape (2, 4, 5, 3)", "(2, 4, 5, 8)")),
    (lambda: attempt(out=zeros(2, 4, 5, 3), out_dtype=F16), ValueError, ("out: wanted float16", "got float32")),
    (lambda: attempt(out=zeros(2, 4, 5, 3, dtype=int)), TypeError, ("out: does not support dtype int64",)),
    (lambda: attempt(out=[0.0]), TypeError, ("out: wanted a dense array on 'cpu', where q is, got builtins list",)),
    (lambda: attempt(out=read_only()), ValueError, ("out: array is read-only",)),
    (lambda: attempt(out_dtype=int), TypeError, ("out_dtype: does not support dtype int64",)),
    (lambda: overlapping("q"), ValueError, ("out: overlaps q",)),
    (lambda: overlapping("k"), ValueError, ("out: overlaps k",)),
    (lambda: overlapping("v"), ValueError, ("out: overlaps v",)),
    (
        lambda: attempt(out=np.lib.stride_tricks.as_strided(zeros(3), (2, 4, 5, 3), (0, 0, 0, 4), writeable=True)),
        ValueError,
        ("out: elements share memory",),
    ),
    # fp8
    (lambda: fp8(q_scale=None), TypeError, ("q: does not support dtype uint8", "float16")),
    (lambda: fp8(q=zeros(2, 4, 5, 8, dtype=FLOAT8), q_scale=None), TypeError, ("q: does not support dtype float8",)),
    (lambda: attempt(q_scale=1.0), TypeError, (f"q: {BYTES} float32",)),
    (lambda: fp8(k=zeros(2, 2, 7, 8, dtype=F16)), TypeError, (f"k: {BYTES} float16",)),
    (lambda: fp8(v=zeros(2, 2, 7, 3, dtype=np.int8)), TypeError, (f"v: {BYTES} int8",)),
    (lambda: fp8(q_scale=None, v_scale=2.0, v=zeros(2, 2, 7, 3)), TypeError, (f"v: {BYTES} float32",)),
    (lambda: fp8(q=zeros(4, 5, 8, dtype=U8)), ValueError, ("q: wanted 4 dimensions", "(4, 5, 8)")),
    (lambda: fp8(q_scale=0), ValueError, (f"q_scale: {ABOVE_0}", "got 0")),
    (lambda: fp8(k_scale=-1.5), ValueError, (f"k_scale: {ABOVE_0}", "got -1.5")),
    (lambda: fp8(v_scale=math.nan), ValueError, (f"v_scale: {ABOVE_0}", "got nan")),
    (lambda: fp8(v_scale=math.inf), ValueError, (f"v_scale: {ABOVE_0}", "got inf")),
    (lambda: fp8(v_scale=1e39), ValueError, (f"v_scale: {ABOVE_0}", "got 1e+39")),
    (lambda: fp8(v_scale=1e-60), ValueError, (f"v_scale: {ABOVE_0}", "got 1e-60")),
    (lambda: fp8(q_scale="1"), TypeError, (f"q_scale: {ABOVE_0}", "got '1'")),
    (lambda: fp8(q_scale=True), TypeError, (f"q_scale: {ABOVE_0}", "got True")),
    (lambda: fp8(q_scale=1j), TypeError, (f"q_scale: {ABOVE_0}", "got 1j")),
    (lambda: fp8(k_scale=[1.0, 2.0]), TypeError, (f"k_scale: {ABOVE_0}", "[1.0, 2.0]")),
    (lambda: fp8(q_scale=four(1, 2, 3)), ValueError, (f"q_scale: {SIZES} (4,) or (2, 4)", "got float32 of shape (3,)")),
    (lambda: fp8(k_scale=four(1, 2, 3, 4)), ValueError, (f"k_scale: {SIZES} (2,) or (2, 2)", "shape (4,)")),
    (lambda: fp8(v_scale=np.ones((1, 2), F32)), ValueError, (f"v_scale: {SIZES} (2,) or (2, 2)", "shape (1, 2)")),
    (lambda: fp8(v_scale=np.ones((2, 2, 1, 1), F32)), ValueError, (f"v_scale: {SIZES} (2,)", "shape (2, 2, 1, 1)")),
    (lambda: fp8(q_scale=four(1, 2, 3, 4, dtype=F64)), ValueError, (f"q_scale: {SIZES} (4,)", "got float64")),
    (lambda: fp8(q_scale=four(1, 2, 3, 4, dtype=int)), ValueError, (f"q_scale: {SIZES} (4,)", "got int64")),
    *(
        (lambda bad=bad: fp8(q_scale=four(1, 2, bad, 4)), ValueError, ("q_scale: wanted", "above 0", f"{bad:g}"))
        for bad in (0.0, -3.0, math.nan, math.inf)
    ),
    (lambda: fp8(q_scale=there(4)), TypeError, ("q_scale: wanted a number or a dense array on 'cpu', where q is",)),
    (lambda: fp8(k_scale=OnTheGPU()), TypeError, ("k_scale: wanted a", "OnTheGPU")),
    (
        lambda: fp8_on_device(v_scale=four(1, 2)),
        TypeError,
        ("v_scale: wanted a number or a dense array on 'fake', where q is, got numpy ndarray",),
    ),
    (lambda: fp8_on_device(v_scale=there(4)), ValueError, (f"v_scale: {SIZES} (2,) or (2, 2)", "shape (4,)")),
    (lambda: fp8_on_device(v_scale=there(2, dtype=F64)), ValueError, (f"v_scale: {SIZES} (2,)", "got float64")),
    (
        lambda: fp8(out_dtype=F64),
        TypeError,
        ("out_dtype: does not support dtype float64", "float32, float16, bfloat16"),
    ),
    (lambda: fp8(out_dtype=U8), TypeError, ("out_dtype: does not support dtype uint8",)),
    (lambda: fp8(out=zeros(2, 4, 5, 3, dtype=F64)), TypeError, ("out: does not support dtype float64",)),
    (lambda: fp8(out=zeros(2, 4, 5, 3), out_dtype=F16), ValueError, ("out: wanted float16", "got float32")),
    (lambda: fp8(out=zeros(2, 4, 5, 8)), ValueError, ("out: wanted float32 of shape (2, 4, 5, 3)", "(2, 4, 5, 8)")),
    (lambda: fp8(out=[0.0]), TypeError, ("out: wanted a dense array on 'cpu', where q is, got builtins list",)),
]


@pytest.mark.parametrize(("call", "error", "texts"), REFUSED, ids=[f"{n}: {r[2][0]}" for n, r in enumerate(REFUSED)])
def test_bad_input_is_refused_by_name(call: Callable[[], Any], error: type[Exception], texts: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        call()
    for text in texts:
        assert text in str(raised.value)


def test_the_good_calls_that_bad_ones_are_made_from_are_good() -> None:
    assert attempt().shape == (2, 4, 5, 3)
    assert fp8().dtype == fp8_on_device().dtype == F32
    assert fp8(q_scale=np.ones(4, F32), k_scale=np.array(2), v_scale=np.ones((2, 2), F32)).shape == (2, 4, 5, 3)
    assert packed().shape == (5, 4, 3)
    assert packed(cu_seqlens_q=Foreign([0, 2, 5])).shape == (5, 4, 3)
    assert install().is_dense(on_device()) and install().is_dense(packed_on_device())
    assert (
        attempt(mask=mask(heads=(2, 4)), scale=np.float32(2), softcap=np.array(3), window=[np.int64(1), 2]).any() == 0
    )


def test_refused_calls_write_nothing() -> None:
    out = np.full((2, 4, 5, 3), 7, np.float32)
    for options in ({"window": (3,)}, {"softcap": 0}, {"mask": mask(7, 5)}, {"scale": math.inf}):
        with pytest.raises(ValueError, match="wanted"):
            attempt(out=out, **options)
    assert (out == 7).all()


def test_refused_calls_of_fp8_write_nothing() -> None:
    out = np.full((2, 4, 5, 3), 7, np.float32)
    for options in ({"q_scale": -1.0}, {"k_scale": "1"}, {"v_scale": four(1, np.nan)}, {"q": zeros(2, 4, 5, 8)}):
        with pytest.raises((TypeError, ValueError), match="wanted"):
            fp8(out=out, **options)
    with pytest.raises(TypeError, match="out_dtype"):
        fp8(out=out, out_dtype=F64)
    assert (out == 7).all()
