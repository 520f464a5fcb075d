"""All that is promised of sampled_tiles, and of sampled products in tiles of its lists.

Which products have a list, how much memory it takes, when it is made, which tiles it has, and what the products are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels.card import Card
from bsrgemm._kernels.jit import MAX_GRID_YZ
from bsrgemm._products import block_products, lists, sampled
from bsrgemm._products.block_products import BlockProblem, BlockProductsSm90
from bsrgemm._products.lists import SampledTiles
from bsrgemm._products.sampled_dense import SampledDense
from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES

from ..devices import Device
from .products import BF16, F16, F32, numbers
from .tile_lists import tiles

ONE, LISTED, COPY = "block_products_sm90", "sampled_tiles", "rearrange"


@pytest.fixture(autouse=True)
def never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns are too small for a dense product, or too many of their blocks are stored."""
    monkeypatch.setattr(SampledDense, "served", False)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


# ------------------------------------------------------------------------------------------------ the rule
def chosen(
    R: int, N: int, K: int = 8192, blocks: int | None = None, shape: tuple[int, int] | None = None, **how: Any
) -> BlockProductsSm90 | None:
    """The kernel with a list for a pattern, by default one of 8192 x 8192 in which every fifth block is stored."""
    problem = BlockProblem("sm_90a", **{"a": F16, "b": F16, "out": F16, "order": "F", **how}, R=R, K=K, N=N)
    kernel = BlockProductsSm90.of(replace(problem, K=8192))
    assert kernel is not None
    rows, columns = shape or (8192 // R, 8192 // N)
    return kernel.by_list(problem, rows * columns // 5 if blocks is None else blocks, (rows, columns))


@pytest.mark.parametrize("R", [16, 32, 48, 64, 80, 128, 192])
@pytest.mark.parametrize("N", [16, 32, 48, 64, 96, 128, 256])
def test_blocks_that_fill_128_by_256_in_whole_numbers_have_a_list(R: int, N: int) -> None:
    found = chosen(R, N)
    assert (found is not None) == (R in (16, 32, 64) and N in (16, 32, 64, 128))
    if found is not None:
        assert (found.tile_m, found.row_parts * R, found.part_n * found.parts) == (128, 128, 256)
        assert found.part_n == N and found.types.index == "i32" and found.sampled


@pytest.mark.parametrize(("R", "least"), [(64, 0.06), (32, 0.02), (16, 0.02)])
def test_a_pattern_of_few_blocks_has_no_list(R: int, least: float) -> None:
    enough = int(np.ceil(least * 1000 * 1000))
    assert chosen(R, 64, blocks=enough, shape=(1000, 1000)) is not None
    assert chosen(R, 64, blocks=enough - 1, shape=(1000, 1000)) is None


@pytest.mark.parametrize(("R", "least"), [(64, 512), (32, 64), (16, 64)])
def test_a_product_of_few_columns_has_no_list(R: int, least: int) -> None:
    assert chosen(R, 32, K=least) is not None
    assert chosen(R, 32, K=least - 1) is None


@pytest.mark.parametrize(("R", "N"), [(64, 128), (32, 32), (16, 16)])
def test_a_small_pattern_has_no_list(R: int, N: int) -> None:
    """2^19 stored elements are the least."""
    enough = 2**19 // (R * N)
    shape = (enough, 2)
    assert chosen(R, N, blocks=enough, shape=shape) is not None
    assert chosen(R, N, blocks=enough - 1, shape=shape) is None


def test_windows_of_columns_are_counted_in_the_second_side_of_a_grid() -> None:
    most = MAX_GRID_YZ * SampledTiles(4, 16).columns
    assert chosen(32, 16, blocks=most, shape=(4, most)) is not None
    assert chosen(32, 16, blocks=most, shape=(4, most + 1)) is None


def test_every_kernel_of_the_rule_is_compiled_ahead_of_time() -> None:
    listed = {*BlockProductsSm90.every(DEVICE_DTYPES), *SampledTiles.every(DEVICE_DTYPES)}
    for R, N, (x_order, order), dtype in product((16, 32, 64), (16, 32, 64, 128), product("CF", "CF"), (F16, BFLOAT16)):
        for out in (dtype, F32):
            found = chosen(R, N, x_order=x_order, order=order, a=dtype, b=dtype, out=out)
            assert found is not None and found in listed and found.runs_on("sm_90a")
            for index in ("i32", "i64"):
                kernel = SampledTiles(found.row_parts, found.parts, index)
                assert kernel in listed
                assert kernel.runs_on("sm_90a") and not kernel.runs_on("sm_80")


# ------------------------------------------------------------------------------------------------ its memory
@pytest.mark.parametrize(("R", "N"), [(64, 64), (64, 128), (32, 32), (16, 16)])
@pytest.mark.parametrize(
    ("rows", "cols", "density"),
    [(9, 7, 0.4), (64, 600, 0.02), (70, 30, 0.01), (66, 40, 0.3), (3, 1100, 0.15), (1, 1, 1)],
)
def test_there_is_memory_for_all_tiles_of_a_pattern(R: int, N: int, rows: int, cols: int, density: float) -> None:
    rng = np.random.default_rng(rows * cols + R)
    config = SampledTiles(128 // R, 256 // N)
    there = rng.random((rows, cols)) < density
    indptr = np.concatenate([[0], np.cumsum(there.sum(1))])
    pattern = [{int(c): int(indptr[r]) + i for i, c in enumerate(np.flatnonzero(x))} for r, x in enumerate(there)]
    found = tiles(config, pattern)
    assert sum(p >= 0 for _, _, blocks in found for line in blocks for p in line) == there.sum()
    # All tiles, and those of every window of block rows, whose memory begins where that of the rows before ends.
    assert len(found) <= config.capacity(int(there.sum()), rows, cols)
    for top in range(0, rows, config.rows):
        first, last = int(indptr[top]), int(indptr[min(rows, top + config.rows)])
        inside = sum(top <= max(of_rows) < top + config.rows for of_rows, _, _ in found)
        across = config.grid(rows, cols)[1]
        groups = config.rows // config.group * across
        assert first // config.wide + inside <= last // config.wide + groups


def test_a_list_of_large_patterns_takes_16_24_or_39_bytes_a_block() -> None:
    """What the docstring of `sddmm` says, with the number of each tile."""
    for side, want in ((64, 16), (32, 24), (16, 39)):
        config, rows = SampledTiles(128 // side, 256 // side), 64 * 512
        blocks = rows * rows // 5
        assert 4 * (config.record + 1) * config.capacity(blocks, rows, rows) / blocks == pytest.approx(want, rel=0.03)


def test_a_window_is_as_large_as_the_struct_of_the_kernel() -> None:
    """`struct Window`: the number and a bit of each block, three ints, one for each row, and a byte for each tile."""
    assert SampledTiles(8, 16).shared_bytes == 64 * 512 * 4 + 64 * 16 * 4 + 12 + 64 * 4 + 2056 == 137_492
    assert SampledTiles(2, 4).shared_bytes == 64 * 128 * 4 + 64 * 4 * 4 + 12 + 64 * 4 + 2080 == 36_140
    assert [SampledTiles(group, 4).threads for group in (2, 4, 8)] == [1024, 512, 256]
    assert [SampledTiles(*sizes).record for sizes in ((2, 4), (4, 8), (8, 16))] == [14, 44, 152]
    assert SampledTiles(2, 4).grid(65, 128) == (2, 1) and SampledTiles(8, 16).grid(64, 513) == (1, 2)


# ------------------------------------------------------------------------------------------------ its tiles
def stored(
    rng: np.random.Generator, rows: int, cols: int, density: float, index: Any = np.int32
) -> tuple[Any, Any, list[dict[int, int]]]:
    """The index arrays of a random pattern, columns in any order, and the block of each column of each row."""
    by_row = [rng.permutation(np.flatnonzero(rng.random(cols) < density)) for _ in range(rows)]
    indptr = np.concatenate([[0], np.cumsum([len(x) for x in by_row])])
    pattern = [{int(c): int(indptr[r]) + i for i, c in enumerate(x)} for r, x in enumerate(by_row)]
    return np.concatenate(by_row).astype(index), indptr.astype(index), pattern


def tiles_of(device: Device, indices: Any, indptr: Any, cols: int, block: tuple[int, int]) -> list[Any]:
    """The tiles of a list in the form of the reference."""
    g, w = 128 // block[0], 256 // block[1]
    found = lists.listed(device.asarray(indices), device.asarray(indptr), cols, g, w)
    total, *windows = device.asnumpy(found.counts).tolist()
    assert total == sum(windows[::2])
    results = []
    for count, first in zip(windows[::2], windows[1::2], strict=True):
        # nobody has written the others
        places = device.asnumpy(found.order[first : first + count])
        assert sorted(places) == list(range(first, first + count))
        some = [
            (tuple(x[:g]), tuple(x[g : g + w]), tuple(map(tuple, np.reshape(x[g + w :], (g, w)).tolist())))
            for x in device.asnumpy(found.tiles[first : first + count])[places - first].tolist()
        ]
        lowest = [min(row for row in of_rows if row >= 0) for of_rows, _, _ in some]
        assert lowest == sorted(lowest)  # tiles with common rows run together
        results += some
    return results


PATTERNS = [(64, 64, 66, 30, 0.3), (32, 32, 64, 50, 0.25), (16, 16, 9, 600, 0.1), (64, 128, 5, 3, 0.9)]


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("R", "N", "rows", "cols", "density", "index"),
    [
        *((*case, index) for case, index in zip(PATTERNS, ("i4", "i4", "i8", "i8"), strict=True)),
        *(pytest.param(*case, "i4", marks=pytest.mark.large) for case in PATTERNS),
        *(
            pytest.param(*block, *size, index, marks=pytest.mark.large)
            for block in ((64, 64), (32, 32), (16, 16), (16, 64))
            for size in ((70, 40, 0.3), (9, 1100, 0.1), (130, 20, 0.02))
            for index in ("i4", "i8")
        ),
    ],
)
def test_tiles_are_those_of_the_reference(
    R: int, N: int, rows: int, cols: int, density: float, index: str, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_90a")
    indices, indptr, pattern = stored(rng, rows, cols, density, index)
    found = tiles_of(device, indices, indptr, cols, (R, N))
    assert sorted(found) == sorted(tiles(SampledTiles(128 // R, 256 // N), pattern))
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
    device.needs("sm_90a")
    columns = np.sort(rng.choice(100, 32, replace=False)).astype("i4")
    found = tiles_of(device, np.tile(columns, 16), np.arange(0, 513, 32, dtype="i4"), 100, (32, 32))
    assert len(found) == 16  # 512 blocks, 32 to a tile


@pytest.mark.sanitizer
def test_index_arrays_of_garbage_list_nothing_outside(device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_90a")
    indices, indptr, _ = stored(rng, 20, 30, 0.3)
    indices[::3] = np.resize([-1, 30, 2**31 - 1, -(2**31), 99], len(indices[::3]))
    indptr[7], indptr[12] = -5, 2**30
    found = tiles_of(device, indices, indptr, 30, (32, 32))
    assert found
    for rows, columns, blocks in found:
        assert all(-1 <= r < 20 for r in rows) and all(-1 <= c < 30 for c in columns)
        assert all(-1 <= p < len(indices) for line in blocks for p in line)


# ------------------------------------------------------------------------------------------------ its products
@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pattern of a kernel with a list has one."""
    monkeypatch.setattr(block_products, "_LEAST_ELEMENTS", 0)
    for table in (block_products._LEAST_DENSITY, block_products._LEAST_DEPTH):
        for side in table:
            monkeypatch.setitem(table, side, 0)


class Sampling:
    """A sampled product with a random pattern of blocks, and what it must give."""

    def __init__(
        self, device: Device, rng: np.random.Generator, block: tuple[int, int], K: int = 72, size: Any = (11, 13)
    ) -> None:
        self.device, self.block = device, block
        (R, N), (rows, cols) = block, size
        indices, indptr, self.by_row = stored(rng, rows, cols, 0.3)
        data = device.asarray(np.ones((len(indices), R, N), F16))
        self.P = bg.bsr_array((data, device.asarray(indices), device.asarray(indptr)), shape=(rows * R, cols * N))
        self.x, self.y = numbers(rng, (rows * R, K), F32), numbers(rng, (K, cols * N), F32)

    def operands(self, orders: str = "CF", dtype: Any = F16, K: int = 72) -> tuple[Any, Any]:
        X, Y = self.x[:, :K].astype(dtype), self.y[:K].astype(dtype)
        return self.device.lying(X, orders[0]), self.device.lying(Y, orders[1])

    def check(self, orders: str = "CF", dtype: Any = F16, K: int = 72, **how: Any) -> list[str]:
        """Compute it; the kernels that a launch was prepared for."""
        with self.device.kernels() as found:
            got = bg.sddmm(*self.operands(orders, dtype, K), self.P, **how)
        (R, N), blocks = self.block, self.device.asnumpy(got.data).astype(np.float64)
        want = self.x[:, :K].astype(np.float64) @ self.y[:K].astype(np.float64) * how.get("alpha", 1)
        for r, row in enumerate(self.by_row):
            for c, p in row.items():
                np.testing.assert_array_equal(blocks[p], want[r * R : r * R + R, c * N : c * N + N])
        return [name for name in found if name in (ONE, LISTED, COPY)]


BLOCKS = [(64, 64), (32, 32), (16, 16), (64, 128), (16, 64), (32, 16)]
ORDERS = ("CC", "CF", "FC", "FF")
FEW = [
    *(((64, 64), "FC", F16), ((32, 32), "FC", BF16), ((16, 16), "FF", BF16), ((16, 16), "FC", F16)),
    *(((64, 128), "CF", F16), ((32, 16), "CC", F16)),
]


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("block", "orders", "dtype"),
    [
        *FEW,
        *(
            pytest.param(block, orders, dtype, marks=pytest.mark.large)
            for block, orders, dtype in product(BLOCKS, ORDERS, (F16, BF16))
            if (block, orders, dtype) not in FEW
        ),
    ],
    ids=str,
)
def test_the_second_product_with_a_pattern_makes_a_list(
    block: Any,
    orders: str,
    dtype: Any,
    device: Device,
    rng: np.random.Generator,
    always: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device.needs("sm_90a")
    monkeypatch.setattr(sampled, "_COPY_RATE", 1e-30)
    one = Sampling(device, rng, block)
    found = [one.check(orders, dtype) for _ in range(4)]
    assert found == [[ONE], [LISTED, ONE], [], []]


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (16, 64)], ids=str)
def test_an_operand_whose_lines_are_short_is_copied_by_each_product_with_a_list(
    block: Any, orders: str, device: Device, rng: np.random.Generator, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs of 64 rows or columns have lines of 128 bytes, as long as along K."""
    device.needs("sm_90a")
    monkeypatch.setattr(block_products, "_LINE_CYCLES", 1e9)
    one = Sampling(device, rng, block)
    found = [sorted(one.check(orders)) for _ in range(3)]
    copies = (orders[0] == "F" and block[0] < 64) + (orders[1] == "C" and block[1] < 64)
    assert found == [sorted([ONE, *[COPY] * copies]), sorted([ONE, LISTED, *[COPY] * copies]), []]


def test_without_memory_for_copies_operands_are_read_as_they_lie(
    device: Device, rng: np.random.Generator, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.needs("sm_90a")
    monkeypatch.setattr(block_products, "_LINE_CYCLES", 1e9)
    one = Sampling(device, rng, (32, 32))
    for _ in range(2):
        one.check("FC")
    empty = device.cupy.empty

    def without_rooms(shape: Any, dtype: Any = float) -> Any:
        if tuple(shape)[1:] == (72,):  # lines along K
            raise MemoryError
        return empty(shape, dtype)

    monkeypatch.setattr(device.cupy, "empty", without_rooms)
    one.check("FC")


@pytest.mark.parametrize(
    ("block", "orders", "read"),
    [
        *(((128, 128), "FC", "FC"), ((64, 64), "FC", "FC"), ((64, 64), "CC", "CC")),
        *(((32, 32), "FC", "FF"), ((32, 32), "CC", "CF"), ((16, 16), "CC", "CF"), ((16, 16), "FC", "CF")),
    ],
    ids=str,
)
def test_operands_of_a_large_product_are_copied_only_where_blocks_are_small(block: Any, orders: str, read: str) -> None:
    """A product of 28672 x 4096 by 8192 at density .25, on the card that the rule was written for."""
    R, N = block
    rows, columns = 28672 // R, 4096 // N
    problem = BlockProblem("sm_90a", F16, F16, F16, R, 8192, N, orders[1], x_order=orders[0])
    found = sampled._as_read(problem, (rows * columns // 4,) * 2 + (rows, columns), Card("sm_90a", 132))
    assert (found.x_order, found.order) == tuple(read)


@pytest.mark.emulated
@pytest.mark.parametrize("block", [(64, 64), (64, 128)], ids=str)
def test_the_last_tiles_are_cut_if_all_ctas_then_have_one_piece_each(
    block: Any, device: Any, rng: np.random.Generator, always: None
) -> None:
    """Nothing is cut, all tiles are cut into 2, into 4 (2 if a part has 128 columns), or one in two."""
    device.needs("sm_90a")
    one = Sampling(device, rng, block, K=8)
    count = len(tiles(SampledTiles(128 // block[0], 256 // block[1]), one.by_row))
    assert count > 3
    for ctas in (count // 2 + 1, count, 2 * count, 4 * count, count - 1):
        device.becomes(ctas)
        one.P = one.P.copy()
        for _ in range(2):
            one.check(K=8)


@pytest.mark.emulated
@pytest.mark.parametrize(("block", "size"), [((16, 128), (3, 150)), ((64, 16), (130, 3))], ids=str)
def test_a_list_may_have_many_windows(
    block: Any, size: Any, device: Any, rng: np.random.Generator, always: None
) -> None:
    """Windows of 64 block columns, and of 64 block rows, the last ones of fewer."""
    device.needs("sm_90a")
    one = Sampling(device, rng, block, K=8, size=size)
    found = [one.check("FC", K=8) for _ in range(2)]
    assert LISTED in found[1]


CHANGES: dict[str, Callable[[Sampling], list[str]]] = {
    "operands elsewhere": lambda one: one.check(),
    "another depth": lambda one: one.check(K=64),
    "another dtype": lambda one: one.check(dtype=BF16),
    "into out": lambda one: one.check(out=one.P.copy()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_list_serves_all_operands(change: str, device: Device, rng: np.random.Generator, always: None) -> None:
    """It depends on the pattern alone, and the first product may have had other operands than the second."""
    device.needs("sm_90a")
    one, call = Sampling(device, rng, (32, 32)), CHANGES[change]
    found = [one.check(), call(one), call(one), one.check()]
    assert [LISTED in kernels for kernels in found] == [False, True, False, False]


def test_no_list_is_made_while_a_graph_is_captured(device: Device, rng: np.random.Generator, always: None) -> None:
    """Only the graph would fill it. A list that was made before serves the graph too."""
    device.needs("sm_90a")
    one = Sampling(device, rng, (32, 32))
    one.P.has_canonical_format = True  # to find that out waits for the card
    out = bg.sddmm(*one.operands(), one.P)
    X, Y = one.operands()
    assert len(out.indices) == len(out.data)  # read, and still known to be those of the pattern
    with device.kernels() as found:
        device.captured(lambda: bg.sddmm(X, Y, one.P, out=out))
    assert LISTED not in found
    assert LISTED in one.check()
    with device.kernels() as found:
        device.captured(lambda: bg.sddmm(X, Y, one.P, out=out))
    assert LISTED not in found


def test_a_list_that_could_not_be_made_is_not_made_in_a_capture(
    device: Device, rng: np.random.Generator, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.needs("sm_90a")
    one = Sampling(device, rng, (32, 32))
    one.P.has_canonical_format = True  # to find that out waits for the card
    X, Y = one.operands()
    out = bg.sddmm(X, Y, one.P)
    with monkeypatch.context() as short, pytest.raises(MemoryError):
        short.setattr(lists, "listed", lambda *_: (_ for _ in ()).throw(MemoryError))
        bg.sddmm(X, Y, one.P)
    with device.kernels() as found:
        device.captured(lambda: bg.sddmm(X, Y, one.P, out=out))
    assert LISTED not in found


def test_a_pattern_that_was_written_to_begins_again(device: Device, rng: np.random.Generator, always: None) -> None:
    device.needs("sm_90a")
    one = Sampling(device, rng, (32, 32))
    assert [LISTED in one.check() for _ in range(2)] == [False, True]
    first = int(device.asnumpy(one.P.indptr)[3])
    row = one.by_row[3]
    columns = [c for c in range(13) if c not in row or row[c] == first]
    one.by_row[3] = {columns[0] if p == first else c: p for c, p in row.items()}
    one.P.indices[first] = columns[0]
    assert [LISTED in one.check() for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize("how", [{}, {"alpha": 2}, {"out_dtype": F32}], ids=str)
def test_products_without_a_list_never_have_one(
    how: dict[str, Any], device: Device, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    """A pattern that the rule leaves out, and products that are scaled or wider."""
    device.needs("sm_90a")
    if how:
        request.getfixturevalue("always")
    one = Sampling(device, rng, (32, 32))
    assert not any(LISTED in one.check(**how) for _ in range(3))
