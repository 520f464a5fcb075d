"""block_products_sm90 and block_products_sm80 as they are, launched as they are, on the CPU; see the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bsrgemm._kernels import device
from bsrgemm._products import block_products
from bsrgemm.dtypes import BFLOAT16

from . import emulator
from .emulator import guarded, laid_out, put

F16, F32, F64 = (np.dtype(x) for x in (np.float16, np.float32, np.float64))
LARGE = [float(np.float32(x)) for x in (3.4020e38, np.finfo(np.float32).max, np.finfo(np.float32).min)]
SHAPES = [(64, 64, 64), (128, 128, 128), (64, 72, 128), (128, 64, 64), (48, 80, 112), (16, 8, 16)]


@pytest.fixture(params=["sm_90a", "sm_80"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def emulated(folder: Path, arch: str) -> Iterator[None]:
    """One multiprocessor: many tiles for one CTA."""
    stand_in = SimpleNamespace(
        empty=lambda shape, dtype: put(np.full(shape, 77, dtype)),
        ascontiguousarray=lambda x: put(np.ascontiguousarray(x)),
        asfortranarray=lambda x: put(np.ascontiguousarray(x.T)).T,
    )
    with (
        emulator.emulated(folder, arch=arch),
        patch.object(block_products, "cupy", stand_in),
        patch.object(device, "multiprocessors", lambda: 1),
        patch.object(device, "l2_bytes", lambda: 0),
    ):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = F16) -> np.ndarray[Any, Any]:
    return rng.integers(-2, 3, shape).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_are_multiplied_and_added_up(shape, rng) -> None:
    R, K, N = shape
    a, b = put(integers(rng, (7, R, K))), put(integers(rng, (7, K, N)))
    ia, ib = np.array([0, 1, 2, 3, 4, 5, 6, 0, 1, 2]), np.array([6, 5, 4, 3, 2, 1, 0, 6, 2**40, -3])
    starts = np.array([0, 3, 4, 4, 8])  # one of them has no pair, two pairs are garbage
    got = block_products.pair_products(a, put(ia), b, put(ib), put(starts), F32)
    want = np.zeros((5, R, N))
    for s, (first, last) in enumerate(zip(starts, [*starts[1:], len(ia)], strict=True)):
        for k in range(first, last):
            if 0 <= ib[k] < 7:
                want[s] += a[ia[k]].astype(np.float64) @ b[ib[k]].astype(np.float64)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("arch", ["sm_80"], indirect=True)
@pytest.mark.parametrize("fill", [np.inf, -np.inf, np.nan, *LARGE, 2.0**-149])
def test_float32_of_any_size_is_what_float32_arithmetic_gives(fill, rng) -> None:
    a, b = np.diag(np.full(32, 0.5, F32)), rng.standard_normal((32, 32)).astype(F32)
    a[3] = rng.integers(1, 3, 32)  # every number meets all that are not finite
    b[3, 5] = b[7] = fill
    one, bounds = np.zeros(1, np.int64), np.array([0, 1])
    pairs = block_products.pair_products(put(a[None]), put(one), put(b[None]), put(one), put(one), F32)
    samples = block_products.sampled(put(a), put(b), put(one), put(bounds), (32, 32), F32)
    with np.errstate(all="ignore"):
        want = sum(np.where(a[:, [k]] == 0, 0, a[:, [k]].astype(F64) * b[k]) for k in range(32)).astype(F32)
        meets = (a[:, :, None] == 0) & ~np.isfinite(b)
        want[meets.any(axis=1)] = np.nan  # 0 times infinity
    for got in (pairs, samples):
        np.testing.assert_allclose(np.asarray(got)[0], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("seeds", [range(4), range(4, 32)], ids=["few", "many"])
def test_many_blocks_without_pairs_between_others(seeds, rng) -> None:
    """A lane that is slow to look at a tile must find it, though nothing in the tile holds the other lanes up."""
    a, b = put(integers(rng, (6, 64, 64))), put(integers(rng, (6, 64, 64)))
    lengths = np.zeros(60, int)
    lengths[[0, 9, 10, 31, 47, 59]] = 1
    starts = np.cumsum(lengths) - lengths
    lists = put(np.arange(6)), put(np.arange(6)[::-1].copy()), put(starts)
    want = np.zeros((60, 64, 64))
    want[lengths > 0] = a.astype(np.float64) @ b[::-1].astype(np.float64)
    for seed in seeds:
        with patch.dict("os.environ", BSRGEMM_EMULATOR_SEED=str(seed)):
            got = block_products.pair_products(a, lists[0], b, lists[1], lists[2], F32)
        np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("rows", [0, 1, 16, 18, 40, 100])
def test_pairs_in_many_tiles(rows, rng) -> None:
    """Warpgroups take turns, over more stages than the ring has; in strips of 16 rows of one block to three."""
    a, b = put(integers(rng, (40, 64, 200), BFLOAT16)), put(integers(rng, (40, 200, 64), BFLOAT16))
    order = put(np.arange(40))
    got = block_products.pair_products(a, order, b, put(np.arange(40)[::-1].copy()), order, F32, rows)
    np.testing.assert_array_equal(np.asarray(got), a.astype(np.float64) @ b[::-1].astype(np.float64))


@pytest.mark.races
@pytest.mark.parametrize(
    ("block", "order"),
    [
        *(((64, 64), "C"), ((128, 128), "C"), ((128, 128), "F"), ((128, 64), "F"), ((48, 80), "C")),
        *(((32, 32), "F"), ((32, 32), "C"), ((16, 16), "F"), ((64, 16), "C")),
    ],
    ids=str,
)
def test_sampled_products(block, order, rng) -> None:
    (R, C), K, rows, cols = block, 136, 3, 7
    there = rng.random((rows, cols)) < 0.7
    there[1] = False
    row, col = np.nonzero(there)
    X, Y = put(integers(rng, (rows * R, K))), laid_out(integers(rng, (K, cols * C)), order)
    indptr = put(np.searchsorted(row, np.arange(rows + 1)).astype(np.int32))
    got = block_products.sampled(X, Y, put(col.astype(np.int32)), indptr, block, F16)
    product = (np.asarray(X).astype(np.float64) @ np.asarray(Y).astype(np.float64)).reshape(rows, R, cols, C)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), product.swapaxes(1, 2)[row, col])


@pytest.mark.races
@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(("block", "cols"), [((64, 64), 30), ((128, 128), 20)], ids=str)
def test_one_cta_has_more_tiles_and_stages_than_it_holds(block, cols, rng) -> None:
    """What comes next takes the places of what all lanes have read."""
    (R, C), K = block, 64
    X, Y = put(integers(rng, (R, K))), put(integers(rng, (K, cols * C)))
    got = block_products.sampled(X, Y, put(np.arange(cols, dtype="i4")), put(np.array([0, cols], "i4")), block, F16)
    product = (np.asarray(X).astype(np.float64) @ np.asarray(Y).astype(np.float64)).reshape(R, cols, C)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), product.swapaxes(0, 1))


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("block", [(128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("lengths", [(5, 2), (6, 1, 3), (2, 0, 5), (1, 2, 3, 1), (3, 3, 3, 2), (7,)], ids=str)
def test_sampled_rows_that_begin_and_end_anywhere_in_wide_and_narrow_tiles(lengths, block, rng) -> None:
    (R, C), K, rows, cols = block, 64, len(lengths), 7
    row = np.repeat(np.arange(rows), lengths)
    col = np.concatenate([np.sort(rng.permutation(cols)[:n]) for n in lengths])
    X, Y = put(integers(rng, (rows * R, K))), put(integers(rng, (K, cols * C)))
    indptr = put(np.searchsorted(row, np.arange(rows + 1)).astype(np.int32))
    got = block_products.sampled(X, Y, put(col.astype(np.int32)), indptr, block, F16)
    product = (np.asarray(X).astype(np.float64) @ np.asarray(Y).astype(np.float64)).reshape(rows, R, cols, C)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), product.swapaxes(1, 2)[row, col])


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
def test_sampled_rows_far_from_each_other(rng) -> None:
    """More block rows without blocks between two others than a warp looks at together; rows have whole tiles."""
    R, C, K, rows = 64, 64, 64, 150
    there = [0, 40, 41, 149]
    X, Y = put(integers(rng, (rows * R, K))), put(integers(rng, (K, 5 * C)))
    indptr = np.searchsorted(np.repeat(there, 5), np.arange(rows + 1)).astype("i4")
    got = block_products.sampled(X, Y, put(np.tile(np.arange(5), 4).astype("i4")), put(indptr), (R, C), F16)
    product = (np.asarray(X).astype(np.float64) @ np.asarray(Y).astype(np.float64)).reshape(rows, R, 5, C)
    want = product[there].swapaxes(1, 2).reshape(20, R, C)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want)


@pytest.mark.parametrize("arch", ["sm_80"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "block", "order"),
    [(F32, (32, 32), "C"), (F32, (16, 48), "F"), (F64, (16, 16), "C"), (F64, (64, 32), "F"), (F32, (128, 128), "C")],
    ids=str,
)
def test_floats_of_32_and_64_bits(dtype, block, order, rng) -> None:
    """Sampled, by one product of tf32 and by three; and pairs, also where the last step along K is not whole."""
    (R, C), K, rows, cols = block, 44, 2, 5
    col, indptr = put(np.array([0, 2, 4, 1])), put(np.array([0, 3, 4]))
    X, Y = put(integers(rng, (rows * R, K), dtype)), laid_out(integers(rng, (K, cols * C), dtype), order)
    product = (np.asarray(X) @ np.asarray(Y)).reshape(rows, R, cols, C).swapaxes(1, 2)[[0, 0, 0, 1], np.asarray(col)]
    for tf32 in (False, True):
        got = block_products.sampled(X, Y, col, indptr, block, dtype, tf32=tf32)
        np.testing.assert_array_equal(np.asarray(got), product)
    a, b = put(integers(rng, (3, R, K), dtype)), put(integers(rng, (3, K, C), dtype))
    got = block_products.pair_products(
        a, put(np.array([0, 1, 2])), b, put(np.array([2, 0, 9])), put(np.array([0, 2])), dtype
    )
    want = np.asarray(a[0]) @ np.asarray(b[2]) + np.asarray(a[1]) @ np.asarray(b[0])
    np.testing.assert_array_equal(np.asarray(got), [want, 0 * want])


@pytest.mark.parametrize("garbage", [-7, 3, 2**31 - 1, -(2**31), 2**40])
@pytest.mark.parametrize("which", ["indices", "indptr"])
@pytest.mark.parametrize("block", [(64, 64), (16, 16)], ids=str)
def test_sampled_products_of_spoiled_index_arrays_touch_nothing_outside(block, which, garbage, rng) -> None:
    """Whatever is read or written outside of the arrays ends the process; a block without a column is zero."""
    (R, C), K = block, 64
    X, Y = guarded(integers(rng, (2 * R, K))), guarded(integers(rng, (K, 3 * C)))
    lists = {"indices": guarded(np.array([0, 2, 1])), "indptr": guarded(np.array([0, 2, 3]))}
    lists[which][1] = garbage
    with patch.object(block_products.cupy, "empty", lambda shape, dtype: guarded(np.full(shape, 77, dtype))):
        got = block_products.sampled(X, Y, *lists.values(), block, F16)
    product = (np.asarray(X).astype(np.float64) @ np.asarray(Y).astype(np.float64)).reshape(2, R, 3, C).swapaxes(1, 2)
    if which == "indices":
        want = [product[0, 0], np.zeros(block), product[1, 1]]
        np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("garbage", [-7, 2**31 - 1, -(2**31), 2**40])
@pytest.mark.parametrize("which", ["left", "right", "starts"])
@pytest.mark.parametrize("shape", [(64, 64, 64), (16, 16, 16)], ids=str)
def test_pairs_that_were_spoiled_touch_nothing_outside_and_add_nothing(shape, which, garbage, rng) -> None:
    R, K, N = shape
    a, b = guarded(integers(rng, (3, R, K))), guarded(integers(rng, (4, K, N)))
    lists = {"left": [0, 1, 2, 0, 1], "right": [3, 2, 1, 0, 3], "starts": [0, 2, 4]}
    lists[which][1] = garbage
    placed = {name: guarded(np.array(x)) for name, x in lists.items()}
    with patch.object(block_products.cupy, "empty", lambda shape, dtype: guarded(np.full(shape, 77, dtype))):
        got = block_products.pair_products(a, placed["left"], b, placed["right"], placed["starts"], F32)
    bounds = np.clip([*lists["starts"], 5], 0, 5)
    for s in range(3):
        want = np.zeros((R, N))
        for p in range(bounds[s], bounds[s + 1]):
            if 0 <= lists["left"][p] < 3 and 0 <= lists["right"][p] < 4:
                want += a[lists["left"][p]].astype(np.float64) @ b[lists["right"][p]].astype(np.float64)
        np.testing.assert_array_equal(got[s], want)
