"""Sampled products of small blocks in tiles of a list, on the card: lists against the reference, products exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from bsrgemm._products.configs import BlockProductsSm90
from bsrgemm._products.list_configs import SampledTiles

import bsrgemm as bg
from bsrgemm._products import sampled_tiles
from bsrgemm.dtypes import BFLOAT16

from ..products.tile_lists import tiles
from .marks import some_under_memcheck
from .product_cases import device, pattern

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

F16 = np.dtype(np.float16)
BLOCKS = [(64, 64), (32, 32), (16, 16), (64, 128), (16, 64), (32, 16)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By the rule, small or sparse patterns have no list."""
    monkeypatch.setattr(sampled_tiles, "_LEAST_ELEMENTS", 0)
    for table in (sampled_tiles._LEAST_DENSITY, sampled_tiles._LEAST_DEPTH):
        for side in table:
            monkeypatch.setitem(table, side, 0)
    yield


def has_list(P: Any) -> bool:
    return any(key[0] == "tiles" for key in P._matrix_cache._entries if isinstance(key, tuple))


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(
    "size", some_under_memcheck([(70, 40, 0.3), (9, 1100, 0.1), (130, 20, 0.02)], [(9, 1100, 0.1)])
)
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (16, 16), (16, 64)], ids=str)
def test_tiles_of_a_list_are_those_of_the_reference(block, size, index, rng) -> None:
    import cupy

    rows, cols, density = size
    there = rng.random((rows, cols)) < density
    indptr = np.concatenate([[0], np.cumsum(there.sum(1))]).astype(index)
    indices = np.nonzero(there)[1].astype(index)
    config = BlockProductsSm90("f16", "f16", True, True, 128, block[1], 256 // block[1], "i32", 128 // block[0])
    found = sampled_tiles.listed(cupy.asarray(indices), cupy.asarray(indptr), cols, config)
    stored = [{int(c): int(indptr[r] + i) for i, c in enumerate(np.flatnonzero(x))} for r, x in enumerate(there)]
    g, w = config.row_parts, config.parts
    total, *windows = found.counts.get().tolist()
    got = [
        (tuple(x[:g]), tuple(x[g : g + w]), tuple(map(tuple, np.reshape(x[g + w :], (g, w)).tolist())))
        for count, first in zip(windows[::2], windows[1::2], strict=True)
        for x in found.tiles[first : first + count].get().tolist()  # nobody has written the others
    ]
    assert sorted(got) == sorted(tiles(SampledTiles(g, w), stored)) and len(got) == total


@pytest.mark.parametrize("orders", ["CC", "CF", "FC"])
@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("block", some_under_memcheck(BLOCKS, [(32, 16), (64, 64)]))
def test_products_in_tiles_of_a_list_are_right(block, dtype, orders, rng, always) -> None:
    import cupy

    put = {"C": cupy.ascontiguousarray, "F": cupy.asfortranarray}
    for rows, cols, K, density in ((7, 9, 72, 0.5), (70, 90, 64, 0.2), (3, 200, 200, 0.3)):
        data, indices, indptr, shape = pattern(rng, rows, cols, *block, dtype, density=density)
        P = device((data, indices, indptr, shape))
        P.sum_duplicates()
        X, Y = (rng.integers(-2, 3, s).astype(dtype) for s in ((shape[0], K), (K, shape[1])))
        x, y = (put[o](cupy.asarray(z)) for o, z in zip(orders, (X, Y), strict=True))
        first = bg.sddmm(x, y, P)
        assert not has_list(P)
        for _ in range(2):
            again = bg.sddmm(x, y, P)
            assert has_list(P) and bool((again.data == first.data).all())
        want = X.astype(np.float64) @ Y.astype(np.float64)
        host = P.get()
        at = np.repeat(np.arange(rows), np.diff(host.indptr))
        for p in range(0, len(host.indices), 1 + len(host.indices) // 50):
            r, c = at[p] * block[0], host.indices[p] * block[1]
            np.testing.assert_array_equal(
                again.data[p].get().astype(np.float64), want[r : r + block[0], c : c + block[1]]
            )


def test_a_list_is_made_by_the_rule_and_again_after_the_pattern_was_written_to(rng) -> None:
    import cupy

    P = device(pattern(rng, 64, 64, 32, 32, F16, density=0.2))
    P.sum_duplicates()
    X, Y = (cupy.asarray(rng.integers(-2, 3, s).astype(F16)) for s in ((2048, 64), (64, 2048)))
    for _ in range(2):
        found = bg.sddmm(X, Y, P)
    assert has_list(P)
    row = slice(int(P.indptr[3]), int(P.indptr[4]))
    P.indices[row] = cupy.arange(row.stop - row.start, dtype=P.indices.dtype)
    for _ in range(3):
        found = bg.sddmm(X, Y, P)
        want = X[96:128].astype(np.float32) @ Y[:, :32].astype(np.float32)
        assert bool((found.data[row.start] == want).all())
    few = P[:32]
    for _ in range(2):
        bg.sddmm(X[:32], Y, few)
    assert not has_list(few)
