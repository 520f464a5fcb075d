"""All that is promised of sampled_tiles: lists of the tiles of a sampled product, and products in these tiles."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from bsrgemm._products.configs import BlockProductsSm90
from bsrgemm._products.list_configs import SampledTiles

pytest.importorskip("cupy")

from bsrgemm._products import block_products, sampled_tiles
from bsrgemm._products.work_list import Pattern

from ..devices import Device, Emulated
from ..products.tile_lists import tiles
from .products import BF16, F16, F32, numbers


@pytest.fixture(autouse=True)
def every_product_in_tiles(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product is computed in tiles of a list, by one multiprocessor where there is a choice."""
    device.needs("sm_90a")
    monkeypatch.setattr(sampled_tiles, "_LEAST_ELEMENTS", 0)
    for least in (sampled_tiles._LEAST_DENSITY, sampled_tiles._LEAST_DEPTH):
        for side in (64, 32, 16):
            monkeypatch.setitem(least, side, 0)
    if isinstance(device, Emulated):
        device.becomes(1)


def stored(
    rng: np.random.Generator, rows: int, cols: int, density: float, index: Any = np.int32
) -> tuple[Any, Any, list[dict[int, int]]]:
    """The index arrays of a random pattern, columns in any order, and the block of each column of each row."""
    by_row = [rng.permutation(np.flatnonzero(rng.random(cols) < density)) for _ in range(rows)]
    indptr = np.concatenate([[0], np.cumsum([len(x) for x in by_row])])
    pattern = [{int(c): int(indptr[r]) + i for i, c in enumerate(x)} for r, x in enumerate(by_row)]
    return np.concatenate(by_row).astype(index), indptr.astype(index), pattern


def config_of(R: int, N: int) -> BlockProductsSm90:
    return BlockProductsSm90("f16", "f16", True, True, 128, N, 256 // N, "i32", 128 // R)


def listed(device: Device, indices: Any, indptr: Any, cols: int, config: BlockProductsSm90) -> list[Any]:
    """The tiles of a list in the form of the reference."""
    found = sampled_tiles.listed(device.asarray(indices), device.asarray(indptr), cols, config)
    g, w = config.row_parts, config.parts
    total, *windows = device.asnumpy(found.counts).tolist()
    assert total == sum(windows[::2])
    all_tiles = device.asnumpy(found.tiles).tolist()
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
def test_tiles_are_those_of_the_reference(
    R: int, N: int, rows: int, cols: int, density: float, index: Any, device: Device, rng: np.random.Generator
) -> None:
    indices, indptr, pattern = stored(rng, rows, cols, density, index)
    config = config_of(R, N)
    found = listed(device, indices, indptr, cols, config)
    assert sorted(found) == sorted(tiles(SampledTiles(config.row_parts, config.parts), pattern))
    places = [
        (row, column, block)
        for of_rows, of_columns, blocks in found
        for row, line in zip(of_rows, blocks, strict=True)
        for column, block in zip(of_columns, line, strict=True)
        if block >= 0
    ]
    assert sorted(places) == [(r, c, p) for r, x in enumerate(pattern) for c, p in sorted(x.items())]


@pytest.mark.races
def test_equal_rows_fill_their_tiles(device: Device, rng: np.random.Generator) -> None:
    columns = np.sort(rng.choice(100, 32, replace=False)).astype(np.int32)
    found = listed(device, np.tile(columns, 16), np.arange(0, 513, 32, dtype=np.int32), 100, config_of(32, 32))
    assert len(found) == 16  # 512 blocks, 32 to a tile


@pytest.mark.before
@pytest.mark.sanitizer
def test_index_arrays_of_garbage_list_nothing_outside(device: Device, rng: np.random.Generator) -> None:
    indices, indptr, _ = stored(rng, 20, 30, 0.3)
    indices[::3] = np.resize([-1, 30, 2**31 - 1, -(2**31), 99], len(indices[::3]))
    indptr[7], indptr[12] = -5, 2**30
    found = listed(device, indices, indptr, 30, config_of(32, 32))
    assert found
    for rows, columns, blocks in found:
        assert all(-1 <= r < 20 for r in rows) and all(-1 <= c < 30 for c in columns)
        assert all(-1 <= p < len(indices) for line in blocks for p in line)


BLOCKS = [(64, 64), (32, 32), (16, 16), (64, 128), (16, 64), (32, 16)]
NARROW, WIDE = (F16, F16), (BF16, F32)
FEW = [(64, 64, "F", *NARROW), (32, 32, "C", *WIDE), (16, 16, "F", *WIDE), (16, 16, "C", *NARROW)]
FEW += [(64, 128, "F", *NARROW), (16, 64, "C", *NARROW)]


class Sampling:
    """A sampled product with a random pattern of 11 x 13 blocks, and what it must give."""

    def __init__(
        self, device: Device, rng: np.random.Generator, block: tuple[int, int], K: int, order: str, dtype: Any
    ) -> None:
        R, N = self.block = block
        rows, cols = 11, 13
        indices, indptr, by_row = stored(rng, rows, cols, 0.3)
        x, y = numbers(rng, (rows * R, K), dtype), numbers(rng, (K, cols * N), dtype)
        self.X, self.Y = device.asarray(x), device.lying(y, order)
        self.pattern = Pattern(device.asarray(indices), device.asarray(indptr), rows, cols, False)
        self.kept: dict[Any, Any] = {}
        self.want = np.empty((len(indices), R, N))
        for r, row in enumerate(by_row):
            for c, p in row.items():
                self.want[p] = x[r * R : (r + 1) * R].astype(float) @ y[:, c * N : (c + 1) * N].astype(float)

    def launch(self, out: Any) -> Any:
        def kept(key: Any, make: Any) -> Any:
            return self.kept[key] if key in self.kept else self.kept.setdefault(key, make())

        return block_products.sampled_launch(self.X, self.Y, self.pattern, self.block, out, False, kept)


@pytest.mark.parametrize(
    ("R", "N", "order", "dtype", "out"),
    some_of([(*block, order, *dtypes) for block, order, dtypes in product(BLOCKS, "CF", (NARROW, WIDE))], FEW),
)
def test_a_sampled_product_in_tiles_of_a_list(
    R: int, N: int, order: str, dtype: Any, out: Any, device: Device, rng: np.random.Generator
) -> None:
    one = Sampling(device, rng, (R, N), 72, order, dtype)
    launches = [one.launch(out) for _ in range(2)]
    assert [x.lists.left is None for x in launches] == [True, False]  # a list is made when it is wanted again
    assert [x.lasting for x in launches] == [False, not (order == "C" and N == 16)]
    np.testing.assert_array_equal(device.asnumpy(launches[1].start()), one.want.astype(out))


@pytest.mark.emulated
@pytest.mark.parametrize(("R", "N"), [(64, 64), (64, 128)])
def test_the_last_tiles_are_cut_if_all_ctas_then_have_one_piece_each(
    R: int, N: int, device: Any, rng: np.random.Generator
) -> None:
    """Nothing is cut, all tiles are cut into 2, into 4 (2 if a part has 128 columns), or one in two."""
    one = Sampling(device, rng, (R, N), 8, "F", F16)
    for _ in range(2):
        launch = one.launch(F16)
    count = int(launch.lists.starts[0])
    assert count > 3
    for ctas in (count // 2 + 1, count, 2 * count, 4 * count, count - 1):
        device.becomes(ctas)
        np.testing.assert_array_equal(device.asnumpy(one.launch(F16).start()), one.want.astype(F16))
