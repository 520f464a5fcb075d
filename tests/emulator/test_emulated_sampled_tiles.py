"""sampled_tiles, and sampled products in tiles of its lists, on the CPU; see the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from bsrgemm._products.configs import BlockProductsSm90
from bsrgemm._products.list_configs import SampledTiles

from bsrgemm._kernels import device
from bsrgemm._products import block_products, sampled_tiles
from bsrgemm._products.work_list import Pattern
from bsrgemm.dtypes import BFLOAT16

from ..products.tile_lists import tiles
from . import emulator
from .emulator import laid_out, put

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    """Every product is computed in tiles of a list, by one multiprocessor unless a test says otherwise."""
    with (
        emulator.emulated(folder, arch="sm_90a"),
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


def some_of(cases: list[Any], few: list[Any]) -> list[Any]:
    """All cases; those that are not in `few` wait for the long profile."""
    assert all(case in cases for case in few)
    return [pytest.param(*case, marks=() if case in few else pytest.mark.long) for case in cases]


I32, I64 = np.int32, np.int64
PATTERNS = [(64, 64, 66, 30, 0.3), (32, 32, 64, 50, 0.25), (16, 16, 9, 600, 0.1), (64, 128, 5, 3, 0.9)]
PATTERNS += [(16, 64, 130, 20, 0.2)]


@pytest.mark.parametrize(
    ("R", "N", "rows", "cols", "density", "index"),
    some_of(
        [(*case, index) for case, index in product(PATTERNS, (I32, I64))],
        [(*case, index) for case, index in zip(PATTERNS, (I32, I32, I64, I64), strict=False)],
    ),
)
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


@pytest.mark.races
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


BLOCKS = [(64, 64), (32, 32), (16, 16), (64, 128), (16, 64), (32, 16)]
NARROW, WIDE = (F16, F16), (BFLOAT16, F32)
FEW = [(64, 64, "F", *NARROW), (32, 32, "C", *WIDE), (16, 16, "F", *WIDE), (16, 16, "C", *NARROW)]
FEW += [(64, 128, "F", *NARROW), (16, 64, "C", *NARROW)]


class Sampling:
    """A sampled product with a random pattern of 11 x 13 blocks, and what it must give."""

    def __init__(self, rng: np.random.Generator, block: tuple[int, int], K: int, order: str, dtype: Any) -> None:
        R, N = self.block = block
        rows, cols = 11, 13
        indices, indptr, by_row = stored(rng, rows, cols, 0.3)
        self.X = put(rng.integers(-2, 3, (rows * R, K)).astype(dtype))
        self.Y = laid_out(rng.integers(-2, 3, (K, cols * N)).astype(dtype), order)
        self.pattern, self.kept = Pattern(indices, indptr, rows, cols, False), {}  # type: ignore[var-annotated]
        x, y = (np.asarray(z).astype(np.float64) for z in (self.X, self.Y))
        self.want = np.empty((len(indices), R, N))
        for r, row in enumerate(by_row):
            for c, p in row.items():
                self.want[p] = x[r * R : (r + 1) * R] @ y[:, c * N : (c + 1) * N]

    def launch(self, out: Any) -> Any:
        def kept(key: Any, make: Any) -> Any:
            return self.kept[key] if key in self.kept else self.kept.setdefault(key, make())

        return block_products.sampled_launch(self.X, self.Y, self.pattern, self.block, out, False, kept)


@pytest.mark.parametrize(
    ("R", "N", "order", "dtype", "out"),
    some_of(
        [(*block, order, *dtypes) for block, order, dtypes in product(BLOCKS, "CF", (NARROW, WIDE))],
        FEW,
    ),
)
def test_a_sampled_product_in_tiles_of_a_list(R, N, order, dtype, out, rng) -> None:
    one = Sampling(rng, (R, N), 72, order, dtype)
    launches = [one.launch(out) for _ in range(2)]
    assert [x.lists.left is None for x in launches] == [True, False]  # a list is made when it is wanted again
    assert [x.lasting for x in launches] == [False, not (order == "C" and N == 16)]
    got = np.asarray(launches[1].start())
    np.testing.assert_array_equal(got, one.want.astype(out).astype(got.dtype))


@pytest.mark.parametrize(("R", "N"), [(64, 64), (64, 128)])
def test_the_last_tiles_are_cut_if_all_ctas_then_have_one_piece_each(R, N, rng) -> None:
    """Nothing is cut, all tiles are cut into 2, into 4 (2 if a part has 128 columns), or one in two."""
    one = Sampling(rng, (R, N), 8, "F", F16)
    for _ in range(2):
        launch = one.launch(F16)
    tiles_ = int(launch.lists.starts[0])
    assert tiles_ > 3
    for ctas in (tiles_ // 2 + 1, tiles_, 2 * tiles_, 4 * tiles_, tiles_ - 1):
        with patch.object(device, "multiprocessors", lambda ctas=ctas: ctas):
            launch = one.launch(F16)
        np.testing.assert_array_equal(np.asarray(launch.start()), one.want.astype(F16))
