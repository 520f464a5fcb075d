"""Products whose result is blocks, on the tensor cores: BSR @ BSR and sampled dense products against float64."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend import registry, structure
from bsrgemm._kernels import element_types, jit
from bsrgemm._products import spgemm_pattern
from bsrgemm._products.block_products import BlockProblem, BlockProductsSm90
from bsrgemm._products.engine import ENGINES, ProductEngine
from bsrgemm.dtypes import BFLOAT16, HALF_DTYPES

from .marks import some_under_memcheck
from .product_cases import dense, device, pattern
from .repeats import differing

pytestmark = pytest.mark.gpu
F16, F32, F64 = (np.dtype(x) for x in (np.float16, np.float32, np.float64))
#: Rows, inner columns and columns of blocks: whole tiles, several of them, parts of them.
SHAPES = [
    (128, 128, 128),
    (64, 64, 64),
    (128, 64, 64),
    (64, 128, 128),
    (256, 72, 192),
    (48, 80, 112),
    (32, 32, 32),
    (16, 8, 16),
]


@pytest.fixture
def on_tensor_cores(monkeypatch) -> list[str]:
    """The names of the kernels that the test loads."""
    launched: list[str] = []
    load = jit.load

    def noting(spec: Any, *args: Any) -> Any:
        launched.append(spec.entry)
        return load(spec, *args)

    monkeypatch.setattr(jit, "load", noting)
    return launched


@pytest.fixture
def without_sm90(monkeypatch) -> None:
    """All products of blocks go to the kernel of older cards."""
    monkeypatch.setattr(BlockProductsSm90, "of", lambda *_: None)


def assert_served(launched: list[str], name: str = "block_products_sm90") -> None:
    """By that kernel alone. Only Hopper has block_products_sm90; cards before Ampere have neither."""
    if jit.device_target() == "sm_90a" or (
        name == "block_products_sm80" and element_types.tensor_arch(jit.device_target())
    ):
        assert name in launched and "spgemm_simt" not in launched


def engine() -> ProductEngine:
    """The products of the GPU."""
    return ENGINES.of(registry.cuda())


def assert_close(got: Any, want: np.ndarray, size: np.ndarray, terms: int, dtype: Any) -> None:
    """Rounded once, and sums as tensor cores make them."""
    if np.dtype(dtype) == F64:
        bound = (2 + terms) * 2.0**-53 * size
    else:
        unit = {F16: 2.0**-11, F32: 2.0**-24}.get(np.dtype(dtype), 2.0**-8)
        bound = unit * np.abs(want) + (4 + terms / 8) * 2.0**-23 * size + 2.0**-25
    error = np.abs(got.astype(np.float64) - want)
    assert (error <= bound).all(), float((error / bound).max())


# ------------------------------------------------------------------------------------------------- which blocks meet
def rows_of(rng: Any, rows: int, cols: int, most: int, index: Any = np.int32) -> structure.Blocks:
    """Rows of up to `most` blocks in any order, some of them twice."""
    import cupy

    lengths = rng.integers(0, most + 1, rows)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    arrays = (rng.integers(0, cols, indptr[-1]), indptr)
    return structure.Blocks(None, *(cupy.asarray(x.astype(index)) for x in arrays))


@pytest.mark.parametrize(
    ("rows", "inner", "cols", "most"),
    [
        pytest.param(50, 40, 60, 5, marks=pytest.mark.sanitizer),
        (1000, 800, 70_000, 40),  # found with a table for each warp
        (7, 2000, 100_000, 90),  # found with one table for the whole CTA
        (3000, 3000, 3000, 70),
        (300, 300, 300, 200),
    ],
)
def test_blocks_that_meet_are_those_of_a_sort(rows, inner, cols, most, rng) -> None:
    for index in ((np.int32, np.int32), (np.int64, np.int32)):
        a, b = rows_of(rng, rows, inner, most, index[0]), rows_of(rng, inner, cols, most, index[1])
        got, want = (
            spgemm_pattern.product_pattern(a, b, cols),
            ProductEngine.product_pattern(engine(), a, b, cols),
        )
        assert got is not None
        for name, mine, theirs in zip(got._fields, got, want, strict=True):
            np.testing.assert_array_equal(mine.get(), theirs.get(), err_msg=name)
        again = spgemm_pattern.product_pattern(a, b, cols)
        assert all(bool((x == y).all()) for x, y in zip(got, again, strict=True))


@pytest.mark.parametrize(
    ("rows", "inner", "cols", "most"),
    [
        pytest.param(70, 30, 33, 6, marks=pytest.mark.sanitizer),
        (64, 64, 64, 14),
        (9000, 30, 40, 6),  # rows wait for the sums of others
        (3, 500, 2048, 40),
    ],
)
def test_patterns_listed_at_once_and_in_steps_agree(rows, inner, cols, most, rng) -> None:
    for index in ((np.int32, np.int32), (np.int32, np.int64)):
        a, b = rows_of(rng, rows, inner, most, index[0]), rows_of(rng, inner, cols, most, index[1])
        listing = spgemm_pattern.begin(a, b, cols)
        assert listing is not None and listing.finish() is not None
        got = spgemm_pattern.product_pattern(a, b, cols)
        with patch.object(spgemm_pattern, "_MOST_ROOM", 0):
            want = spgemm_pattern.product_pattern(a, b, cols)
        for name, mine, theirs in zip(got._fields, got, want, strict=True):
            np.testing.assert_array_equal(mine.get(), theirs.get(), err_msg=name)


def test_more_pairs_than_there_is_memory_for_are_listed_in_steps(rng) -> None:
    """All blocks of B are stored three times."""
    import cupy

    a = rng.standard_normal((4, 16, 16)).astype(F16)
    b = rng.standard_normal((12, 16, 16)).astype(F16)
    A = bg.bsr_array(tuple(map(cupy.asarray, (a, np.array([0, 1, 0, 1]), np.array([0, 2, 4])))), shape=(32, 32))
    indices = np.array([0, 0, 0, 1, 1, 1] * 2)
    B = bg.bsr_array(tuple(map(cupy.asarray, (b, indices, np.array([0, 6, 12])))), shape=(32, 32))
    listing = spgemm_pattern.begin(A._blocks, B._blocks, 2)
    assert listing is not None and listing.finish() is None
    want = A.toarray().get().astype(np.float64) @ B.toarray().get().astype(np.float64)
    np.testing.assert_allclose((A @ B).toarray().get(), want, rtol=0, atol=0.1)


@pytest.mark.sanitizer
def test_indices_out_of_range_meet_nothing(rng) -> None:
    import cupy

    a, b = rows_of(rng, 60, 50, 9), rows_of(rng, 50, 70, 9)
    want = ProductEngine.product_pattern(engine(), a, b, 70)
    for spoiled in (-1, 70, 2**31 - 1, -(2**31)):
        a.indices[3] = b.indices[5] = spoiled
        found = engine().product_pattern(a, b, 70)
        assert len(found.indices) <= len(want.indices) and int(found.indptr[-1]) == len(found.indices)
        assert int(found.indices.min()) >= 0 and int(found.indices.max()) < 70
        left, right = (cupy.ones((len(x.indices), 2, 2)) for x in (a, b))
        data = engine().pair_products(left, found.left, right, found.right, found.starts, F64)
        assert bool(cupy.isfinite(data).all())


# ------------------------------------------------------------------------------------------------- BSR @ BSR
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("shape", some_under_memcheck(SHAPES, [(48, 80, 112), (128, 128, 128)]))
def test_sparse_product_on_the_tensor_cores(shape, dtype, rng, on_tensor_cores) -> None:
    check_sparse_product(shape, dtype, rng)
    assert_served(on_tensor_cores)


def check_sparse_product(shape: tuple[int, int, int], dtype: Any, rng: Any) -> None:
    R, K, N = shape
    for rows, inner, cols, density in ((6, 5, 7, 0.4), (3, 40, 9, 0.9), (30, 2, 30, 0.5)):
        A, B = pattern(rng, rows, inner, R, K, dtype, density=density), pattern(rng, inner, cols, K, N, dtype, np.int64)
        got = device(A) @ device(B)
        assert got.blocksize == (R, N) and got.dtype == dtype
        a, b = dense(A, np.float64), dense(B, np.float64)
        assert_close(got.toarray().get(), a @ b, np.abs(a) @ np.abs(b), inner * K, dtype)


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, F32, F64], ids=str)
@pytest.mark.parametrize("shape", some_under_memcheck(SHAPES, [(48, 80, 112), (16, 8, 16)]))
def test_sparse_product_on_the_tensor_cores_since_ampere(shape, dtype, rng, on_tensor_cores, without_sm90) -> None:
    check_sparse_product(shape, dtype, rng)
    assert_served(on_tensor_cores, "block_products_sm80")


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_pairs_that_are_garbage_add_nothing_and_touch_nothing(dtype, rng) -> None:
    import cupy

    a, b = (cupy.asarray(rng.standard_normal((5, 64, 64)).astype(np.float16)) for _ in range(2))
    ia, ib = np.array([0, 2**40, 3, -1, 4, 2]), np.array([1, 0, -(2**33), 3, 5, 2])
    starts = cupy.asarray([0, 2, 5])
    got = engine().pair_products(a, cupy.asarray(ia), b, cupy.asarray(ib), starts, dtype).get()
    want = [a[0].get().astype(float) @ b[1].get(), np.zeros((64, 64)), a[2].get().astype(float) @ b[2].get()]
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-2)
    spoiled = cupy.asarray([-5, 2**40, -(2**40)])
    engine().pair_products(a, cupy.asarray(ia), b, cupy.asarray(ib), spoiled, dtype)
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_spreads_only_through_pairs(value, rng) -> None:
    import cupy

    a, b = (cupy.asarray(rng.standard_normal((4, 48, 48)).astype(np.float16)) for _ in range(2))
    a[1, 5, 7] = b[2, 3, 9] = value
    starts, ia, ib = (cupy.asarray(x) for x in ([0, 1, 2, 3], [0, 1, 2, 3, 3], [0, 1, 2, 3, 0]))
    got = engine().pair_products(a, ia, b, ib, starts, F16)
    wrong = ~cupy.isfinite(got)
    want = cupy.zeros((4, 48, 48), bool)
    want[1, 5], want[2, :, 9] = True, True
    assert bool((wrong == want).all())


# ------------------------------------------------------------------------------------------------- sampled
def sampled_case(
    rng: Any, block: tuple[int, int], K: int, dtype: Any, rows: int = 7, cols: int = 9, density: float = 0.5
) -> Any:
    P = pattern(rng, rows, cols, *block, dtype, density=density)
    X = rng.standard_normal((rows * block[0], K)).astype(dtype)
    Y = rng.standard_normal((K, cols * block[1])).astype(dtype)
    return P, X, Y


def laid_out(x: np.ndarray, order: str) -> Any:
    import cupy

    on_card = cupy.asarray(x)
    if order == "F":
        return cupy.asfortranarray(on_card)
    if order == "gaps":
        room = cupy.full((x.shape[0], 2 * x.shape[1] + 3), np.nan, x.dtype)
        room[:, : 2 * x.shape[1] : 2] = on_card
        return room[:, : 2 * x.shape[1] : 2]
    return on_card


def check_sampled(case: Any, orders: Any, out: Any, **how: Any) -> None:
    P, X, Y = case
    on_card = device(P)
    on_card.sum_duplicates()
    got = bg.sddmm(laid_out(X, orders[0]), laid_out(Y, orders[1]), on_card, out_dtype=out, **how)
    x, y = X.astype(np.float64), Y.astype(np.float64)
    there = dense((np.ones_like(P[0]), *P[1:]), np.float64) > 0
    want, size = np.where(there, x @ y, 0), np.abs(x) @ np.abs(y)
    if how:
        assert float((np.abs(got.toarray().get() - want) / size).max()) < 2.0**-10
    else:
        assert_close(got.toarray().get(), want, size, X.shape[1], out or X.dtype)


@pytest.mark.parametrize("orders", ["CC", "CF", "FC", ("gaps", "gaps")], ids=str)
@pytest.mark.parametrize("block", some_under_memcheck([(r, n) for r, _, n in SHAPES], [(48, 112), (128, 128)]))
def test_sampled_product_on_the_tensor_cores(block, orders, rng, on_tensor_cores) -> None:
    for K, dtype, out in ((64, F16, None), (200, BFLOAT16, None), (8, F16, F32), (1000, F16, None)):
        check_sampled(sampled_case(rng, block, K, dtype), orders, out)
    assert_served(on_tensor_cores)


@pytest.mark.parametrize("orders", ["CC", "CF"])
@pytest.mark.parametrize("block", some_under_memcheck([(128, 128), (128, 64), (256, 192), (128, 16)], [(128, 64)]))
def test_sampled_products_of_long_rows(block, orders, rng, on_tensor_cores) -> None:
    """All numbers of blocks in a row, and more tiles than multiprocessors: wide ones, then narrow ones."""
    for K, rows, cols, density in ((64, 5, 70, 0.9), (72, 40, 33, 0.7), (1000, 12, 90, 0.6)):
        P, X, Y = sampled_case(rng, block, K, F16, rows, cols, density)
        check_sampled((P, X, Y), orders, None)
    assert_served(on_tensor_cores)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32, F64], ids=str)
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", ("gaps", "gaps")], ids=str)
@pytest.mark.parametrize("block", some_under_memcheck([(r, n) for r, _, n in SHAPES], [(48, 112), (128, 128)]))
def test_sampled_product_since_ampere(block, orders, dtype, rng, on_tensor_cores, without_sm90) -> None:
    for K in (64, 200, 8, 1000):
        case = sampled_case(rng, block, K, dtype)
        check_sampled(case, orders, F32 if K == 8 and dtype.itemsize == 2 else None)
        if dtype == F32:
            check_sampled(case, orders, None, precision="tf32")
    assert_served(on_tensor_cores, "block_products_sm80")


def check_repeats(rng: Any, block: tuple[int, int], dtype: Any, times: int) -> tuple[Any, Any, Any]:
    """Sampled and sparse products have the same bits each time; the pattern and the operands of the sampled one."""
    P, X, Y = sampled_case(rng, block, 512, dtype, 30, 30)
    on_card, x, y = device(P), laid_out(X, "C"), laid_out(Y, "C")
    on_card.sum_duplicates()
    square = device(pattern(rng, 30, 30, block[1], block[1], dtype))
    square.sum_duplicates()
    assert differing(lambda: bg.sddmm(x, y, on_card).data, bg.sddmm(x, y, on_card).data, times) == 0
    assert differing(lambda: (square @ square).data, (square @ square).data, times) == 0
    return on_card, x, y


@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
def test_blocks_since_ampere_take_garbage_and_repeat_bit_by_bit(dtype, rng, without_sm90) -> None:
    import cupy

    on_card, x, y = check_repeats(rng, (32, 48), dtype, 30)
    for name, damage in (("indices", -1), ("indices", 2**31 - 1), ("indptr", -7), ("indptr", 2**31 - 1)):
        spoiled = on_card.copy()
        getattr(spoiled, name)[1:3] = damage
        engine().sampled(x, y, spoiled.indices, spoiled.indptr, (32, 48), dtype)
    a, b = (cupy.asarray(rng.standard_normal((5, 32, 32)).astype(dtype)) for _ in range(2))
    ia, ib = np.array([0, 2**40, 3, -1, 4, 2]), np.array([1, 0, -(2**33), 3, 5, 2])
    starts = cupy.asarray([0, 2, 5])
    got = engine().pair_products(a, cupy.asarray(ia), b, cupy.asarray(ib), starts, dtype).get()
    pairs = [(a[i].get().astype(float), b[j].get().astype(float)) for i, j in ((0, 1), (2, 2))]
    (first, last), none = (x @ y for x, y in pairs), np.zeros((32, 32))
    (near_first, near_last) = (np.abs(x) @ np.abs(y) for x, y in pairs)
    assert_close(got, np.stack([first, none, last]), np.stack([near_first, none, near_last]), 32, dtype)
    engine().pair_products(a, cupy.asarray(ia), b, cupy.asarray(ib), cupy.asarray([-5, 2**40, -(2**40)]), dtype)
    cupy.cuda.Device().synchronize()


def test_sampled_product_takes_factors_and_an_out(rng) -> None:
    P, X, Y = sampled_case(rng, (64, 64), 128, F16)
    on_card = device(P)
    on_card.sum_duplicates()
    before = on_card.data.astype(np.float64)
    plain = bg.sddmm(laid_out(X, "C"), laid_out(Y, "C"), on_card, out_dtype=np.float32).data
    out = bg.sddmm(laid_out(X, "C"), laid_out(Y, "C"), on_card, alpha=0.5, beta=-2.0, out=on_card)
    assert out is on_card
    np.testing.assert_allclose(out.data.get(), (0.5 * plain - 2 * before).get(), rtol=2e-3, atol=2e-2)


def test_indices_overwritten_after_construction_read_nothing_outside(rng) -> None:
    import cupy

    for name, damage in (("indices", -1), ("indices", 2**31 - 1), ("indptr", -7), ("indptr", 2**31 - 1)):
        P, X, Y = sampled_case(rng, (64, 64), 64, F16)
        on_card = device(P)
        on_card.sum_duplicates()
        getattr(on_card, name)[1:3] = damage
        engine().sampled(laid_out(X, "C"), laid_out(Y, "C"), on_card.indices, on_card.indptr, (64, 64), F16)
        cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32)], ids=str)
def test_blocks_repeat_bit_by_bit(block, rng) -> None:
    check_repeats(rng, block, F16, 100)


@pytest.mark.parametrize("rows", [0, 16, 290, 3000])
def test_more_tiles_than_multiprocessors(rows, rng) -> None:
    import cupy

    n = 3000
    a, b = (cupy.asarray(rng.standard_normal((n, 16, 16)).astype(np.float16)) for _ in range(2))
    order = cupy.arange(n)
    got = engine().pair_products(a, order, b, order[::-1].copy(), order, F32, rows)
    want = a.astype(np.float64) @ b[::-1].astype(np.float64)
    assert float(cupy.abs(got - want).max()) < 1e-4


def test_every_config_is_listed() -> None:
    """Without one, block_products_sm90 leaves a product to another kernel."""
    problems = [
        BlockProblem("sm_90a", dtype, dtype, dtype, R, K, N, order)
        for (R, K, N), dtype, order in itertools.product(SHAPES, (F16, BFLOAT16), (None, "C", "F"))
    ]
    chosen = {BlockProductsSm90.of(problem) for problem in problems} - {None}
    assert chosen and chosen <= set(BlockProductsSm90.every((F16, BFLOAT16)))


def test_a_right_factor_of_more_than_2_to_31_elements() -> None:
    """2 GB: elements of a right factor are counted in 64 bits."""
    cupy, inner, columns = pytest.importorskip("cupy"), 2**11 + 1, 2**20
    one_block = np.ones((1, 1, columns), np.int8), np.zeros(1, np.int32), np.arange(2, dtype=np.int32)
    pattern = bg.bsr_array(tuple(map(cupy.asarray, one_block)), shape=(1, columns))
    Y = cupy.zeros((inner, columns), np.int8)
    Y[-1, 3], Y[0, -1] = 3, 5
    found = bg.sddmm(cupy.full((1, inner), 2, np.int8), Y, pattern).data
    assert found[0, 0, 3] == 6 and found[0, 0, -1] == 10 and int(found.astype(np.int64).sum()) == 16
