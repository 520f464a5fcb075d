"""sampled_tiles, and sampled products in tiles of its lists, on the CPU; see the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bsrgemm._kernels import device
from bsrgemm._products import block_products, sampled_tiles
from bsrgemm._products.configs import BlockProductsSm90
from bsrgemm._products.list_configs import SampledTiles
from bsrgemm._products.work_list import Pattern
from bsrgemm.dtypes import BFLOAT16

from ..products.tile_lists import tiles
from . import emulator
from .emulator import put
from .test_emulated_tensor_cores import laid_out

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    """Memory that nobody has written is 77; one multiprocessor; every product is computed in tiles of a list."""
    stand_in = SimpleNamespace(
        empty=lambda shape, dtype: put(np.full(shape, 77, dtype)),
        zeros=lambda shape, dtype: put(np.zeros(shape, dtype)),
        ascontiguousarray=lambda x: put(np.ascontiguousarray(x)),
        asfortranarray=lambda x: put(np.ascontiguousarray(x.T)).T,
    )
    with (
        emulator.emulated(folder, arch="sm_90a"),
        patch.object(block_products, "cupy", stand_in),
        patch.object(sampled_tiles, "cupy", stand_in),
        patch.object(sampled_tiles, "_LEAST_ELEMENTS", 0),
        patch.dict(sampled_tiles._LEAST_DENSITY, {64: 0, 32: 0, 16: 0}),
        patch.dict(sampled_tiles._LEAST_DEPTH, {64: 0, 32: 0, 16: 0}),
        patch.object(device, "multiprocessors", lambda: 1),
    ):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def stored(
    rng: np.random.Generator, rows: int, cols: int, density: float, index: Any = np.int32
) -> tuple[Any, Any, list[dict[int, int]]]:
    """The index arrays of a random pattern, columns in any order, and the block of each column of each row."""
    by_row = [rng.permutation(np.flatnonzero(rng.random(cols) < density)) for _ in range(rows)]
    indptr = np.concatenate([[0], np.cumsum([len(x) for x in by_row])])
    pattern = [{int(c): int(indptr[r]) + i for i, c in enumerate(x)} for r, x in enumerate(by_row)]
    return put(np.concatenate(by_row).astype(index)), put(indptr.astype(index)), pattern


def config_of(R: int, N: int) -> BlockProductsSm90:
    return BlockProductsSm90("f16", "f16", True, True, 128, N, 256 // N, "i32", 128 // R)


def rows_of(found: sampled_tiles.TileList, config: BlockProductsSm90) -> list[Any]:
    """The tiles of a list in the form of the reference."""
    g, w = config.row_parts, config.parts
    total, *windows = np.asarray(found.counts).tolist()
    assert total == sum(windows[::2])
    all_tiles = np.asarray(found.tiles).tolist()
    return [
        (tuple(x[:g]), tuple(x[g : g + w]), tuple(map(tuple, np.reshape(x[g + w :], (g, w)).tolist())))
        for count, first in zip(windows[::2], windows[1::2], strict=True)
        for x in all_tiles[first : first + count]
    ]


@pytest.mark.parametrize(
    ("R", "N", "rows", "cols", "density"),
    [
        (64, 64, 70, 40, 0.3),
        (32, 32, 64, 50, 0.25),
        (16, 16, 9, 600, 0.1),
        (64, 128, 5, 3, 0.9),
        (16, 64, 130, 20, 0.2),
    ],
)
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_tiles_are_those_of_the_reference(R, N, rows, cols, density, index, rng) -> None:
    indices, indptr, pattern = stored(rng, rows, cols, density, index)
    config = config_of(R, N)
    found = rows_of(sampled_tiles.listed(indices, indptr, cols, config), config)
    want = tiles(SampledTiles(config.row_parts, config.parts), pattern)
    assert sorted(found) == sorted(want)
    places = [
        (row, column, block)
        for of_rows, of_columns, blocks in found
        for row, line in zip(of_rows, blocks, strict=True)
        for column, block in zip(of_columns, line, strict=True)
        if block >= 0
    ]
    assert sorted(places) == [(r, c, p) for r, x in enumerate(pattern) for c, p in sorted(x.items())]


def test_equal_rows_fill_their_tiles(rng) -> None:
    columns = np.sort(rng.choice(100, 32, replace=False)).astype(np.int32)
    indices, indptr = put(np.tile(columns, 16)), put(np.arange(0, 513, 32, dtype=np.int32))
    found = sampled_tiles.listed(indices, indptr, 100, config_of(32, 32))
    assert int(found.counts[0]) == 16  # 512 blocks, 32 to a tile


def test_index_arrays_of_garbage_list_nothing_outside(rng) -> None:
    indices, indptr, _ = stored(rng, 20, 30, 0.3)
    indices[::3] = [-1, 30, 2**31 - 1, -(2**31)] * (len(indices[::3]) // 4) + [99] * (len(indices[::3]) % 4)
    indptr[7], indptr[12] = -5, 2**30
    config = config_of(32, 32)
    found = rows_of(sampled_tiles.listed(indices, indptr, 30, config), config)
    assert found
    for rows, columns, blocks in found:
        assert all(-1 <= r < 20 for r in rows) and all(-1 <= c < 30 for c in columns)
        assert all(-1 <= p < len(indices) for line in blocks for p in line)


@pytest.mark.parametrize(("R", "N"), [(64, 64), (32, 32), (16, 16), (64, 128), (16, 64), (32, 16)])
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize(("dtype", "out"), [(F16, F16), (BFLOAT16, F32)])
def test_a_sampled_product_in_tiles_of_a_list(R, N, order, dtype, out, rng) -> None:
    rows, cols, K = 11, 13, 72
    indices, indptr, pattern = stored(rng, rows, cols, 0.3)
    X = put(rng.integers(-2, 3, (rows * R, K)).astype(dtype))
    Y = laid_out(rng.integers(-2, 3, (K, cols * N)).astype(dtype), order)
    kept: dict[Any, Any] = {}
    launches = [
        block_products.sampled_launch(
            X, Y, Pattern(indices, indptr, rows, cols, False), (R, N), out, False,
            lambda key, make: kept[key] if key in kept else kept.setdefault(key, make()),
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [x.lists.left is None for x in launches] == [True, False]  # a list is made when it is wanted again
    assert [x.lasting for x in launches] == [False, not (order == "C" and N == 16)]
    launch = launches[1]
    got = np.asarray(launch.start())
    x, y = np.asarray(X).astype(np.float64), np.asarray(Y).astype(np.float64)
    want = np.empty((len(indices), R, N))
    for r, row in enumerate(pattern):
        for c, p in row.items():
            want[p] = x[r * R : (r + 1) * R] @ y[:, c * N : (c + 1) * N]
    np.testing.assert_array_equal(got, want.astype(out).astype(got.dtype))
