"""Tiles of a list for sampled products: which products have one, how much memory it takes, and when it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._products.configs import BlockProductsSm90
from bsrgemm._products.heuristics import BlockProblem
from bsrgemm._products.list_configs import SampledTiles

import bsrgemm as bg
from bsrgemm._backend.base import Blocks
from bsrgemm._kernels.jit import MAX_GRID_YZ
from bsrgemm._products import arguments, block_products, heuristics, sampled_tiles
from bsrgemm.dtypes import BFLOAT16

from ..emulator.emulator import put
from .test_launch import started  # noqa: F401
from .test_repeats import WATCHED
from .tile_lists import tiles

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


# ------------------------------------------------------------------------------------------------ the rule
def chosen(
    R: int, N: int, K: int = 8192, blocks: int | None = None, shape: tuple[int, int] | None = None, **how: Any
) -> BlockProductsSm90 | None:
    """The kernel with a list for a pattern, by default one of 8192 x 8192 in which every fifth block is stored."""
    problem = BlockProblem("sm_90a", **{"a": F16, "b": F16, "out": F16, "order": "F", **how}, R=R, K=K, N=N)
    config = heuristics.block_products_sm90(replace(problem, K=8192))
    assert config is not None
    rows, columns = shape or (8192 // R, 8192 // N)
    return sampled_tiles.config_of(config, problem, rows * columns // 5 if blocks is None else blocks, (rows, columns))


@pytest.mark.parametrize("R", [16, 32, 48, 64, 80, 128, 192])
@pytest.mark.parametrize("N", [16, 32, 48, 64, 96, 128, 256])
def test_blocks_that_fill_128_by_256_in_whole_numbers_have_a_list(R: int, N: int) -> None:
    found = chosen(R, N)
    assert (found is not None) == (R in (16, 32, 64) and N in (16, 32, 64, 128))
    if found is not None:
        assert (found.tile_m, found.row_parts * R, found.part_n * found.parts) == (128, 128, 256)
        assert found.part_n == N and found.index == "i32" and found.sampled


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
    most = MAX_GRID_YZ * SampledTiles.columns
    assert chosen(32, 16, blocks=most, shape=(4, most)) is not None
    assert chosen(32, 16, blocks=most, shape=(4, most + 1)) is None


def test_every_kernel_of_the_rule_is_compiled_ahead_of_time() -> None:
    listed = set(heuristics.every_config())
    for R, N, order, dtype in product((16, 32, 64), (16, 32, 64, 128), "CF", (F16, BFLOAT16)):
        for out in (dtype, F32):
            if order == "C" and N == 16:  # Y is copied, so that it is column-major
                continue
            found = chosen(R, N, order=order, a=dtype, b=dtype, out=out)
            assert found is not None and found in listed and heuristics.runs_on(found, "sm_90a")
            for index in ("i32", "i64"):
                kernel = SampledTiles(found.row_parts, found.parts, index)
                assert kernel in listed
                assert heuristics.runs_on(kernel, "sm_90a") and not heuristics.runs_on(kernel, "sm_80")


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


def test_a_list_of_large_patterns_takes_14_22_or_38_bytes_a_block() -> None:
    """What the docstring of `sddmm` says."""
    for side, want in ((64, 14), (32, 22), (16, 38)):
        config, rows = SampledTiles(128 // side, 256 // side), 64 * 512
        blocks = rows * rows // 5
        assert 4 * config.record * config.capacity(blocks, rows, rows) / blocks == pytest.approx(want, rel=0.1)


def test_a_window_is_as_large_as_the_struct_of_the_kernel() -> None:
    """`struct Window`: the number and a bit of each block, and an int."""
    assert SampledTiles.shared_bytes == 64 * 512 * 4 + 64 * 16 * 4 + 4 == 135_172
    assert [SampledTiles(group, 4).threads for group in (2, 4, 8)] == [1024, 512, 256]
    assert [SampledTiles(*sizes).record for sizes in ((2, 4), (4, 8), (8, 16))] == [14, 44, 152]
    assert SampledTiles(2, 4).grid(65, 512) == (2, 1) and SampledTiles(8, 16).grid(64, 513) == (1, 2)


# ------------------------------------------------------------------------------------------------ when it is made
@pytest.fixture
def always() -> Iterator[None]:
    """Every pattern of a kernel with a list has one."""
    none = {64: 0, 32: 0, 16: 0}
    with (
        patch.object(sampled_tiles, "_LEAST_ELEMENTS", 0),
        patch.object(sampled_tiles, "_LEAST_DENSITY", none),
        patch.object(sampled_tiles, "_LEAST_DEPTH", none),
    ):
        yield


def pattern_of(side: int) -> Any:
    """Three block rows of four block columns."""
    data = put(np.ones((6, side, side), F16))
    indices, indptr = (put(np.array(x, np.int32)) for x in ([0, 1, 0, 3, 1, 2], [0, 2, 4, 6]))
    return object.__new__(WATCHED)._set(Blocks(data, indices, indptr), (3 * side, 4 * side), canonical=True)


def operands(side: int, K: int = 64, dtype: Any = F16) -> tuple[Any, Any]:
    return put(np.ones((3 * side, K), dtype)), put(np.ones((4 * side, K), dtype)).T


def kernels(launches: list[Any]) -> list[str]:
    """The kernels that were started, and with how many block rows to a tile of a list."""
    names = []
    for name, *_ in launches:
        kernel = name.split(":")[1].split()[0]
        names.append(kernel if "ROW_PARTS" not in name else f"{kernel} {name.split('ROW_PARTS=')[1].split()[0]}")
    return names


@pytest.mark.parametrize(("side", "rows"), [(64, 2), (32, 4), (16, 8)])
def test_the_second_product_with_a_pattern_makes_a_list(side: int, rows: int, started: Any, always: None) -> None:  # noqa: F811
    P, (X, Y) = pattern_of(side), operands(side)
    for _ in range(4):
        bg.sddmm(X, Y, P)
    one, two = "block_products_sm90 0", f"block_products_sm90 {rows}"
    assert kernels(started) == [one, "sampled_tiles", two, two, two]
    listing, (_, grid, threads, shared, argument) = started[1], started[2]
    config = SampledTiles(rows, 256 // side)
    assert listing[1:4] == ((1, 1), (config.threads,), config.shared_bytes)
    assert grid == (2,) and threads == (384,) and shared > 0
    fields, made = arguments.SAMPLED_TILES, arguments.BLOCK_PRODUCTS_SM90
    numbers = np.frombuffer(listing[4], np.int64, 4, fields.offsets["rows"])
    assert numbers.tolist() == [3, 4, 6, config.capacity(6, 3, 4)]
    tiles_at, counts_at = np.frombuffer(listing[4], np.uint64, 2, fields.offsets["tiles"])
    for field, place in (("left", tiles_at), ("right", tiles_at), ("starts", counts_at)):
        assert np.frombuffer(argument, np.uint64, 1, made.offsets[field])[0] == place
    assert np.frombuffer(argument, np.int64, 2, made.offsets["blocks"]).tolist() == [6, config.capacity(6, 3, 4)]


def test_no_list_is_made_while_a_graph_is_captured(started: Any, always: None, monkeypatch: Any) -> None:  # noqa: F811
    """Only the graph would fill it. A list that was made before serves the graph too."""
    P, (X, Y) = pattern_of(32), operands(32)
    for capturing in (False, True, True, False, True):
        monkeypatch.setattr(block_products, "is_capturing", lambda found=capturing: found)
        bg.sddmm(X, Y, P)
    one, two = "block_products_sm90 0", "block_products_sm90 4"
    assert kernels(started) == [one, one, one, "sampled_tiles", two, two]


def test_a_list_that_could_not_be_made_is_not_made_in_a_capture(started: Any, always: None, monkeypatch: Any) -> None:  # noqa: F811
    P, (X, Y) = pattern_of(32), operands(32)
    bg.sddmm(X, Y, P)
    with monkeypatch.context() as short, pytest.raises(MemoryError):
        short.setattr(sampled_tiles, "listed", lambda *_: (_ for _ in ()).throw(MemoryError))
        bg.sddmm(X, Y, P)
    monkeypatch.setattr(block_products, "is_capturing", lambda: True)
    bg.sddmm(X, Y, P)
    assert "sampled_tiles" not in kernels(started)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "operands elsewhere": lambda P: bg.sddmm(*operands(32), P),
    "another depth": lambda P: bg.sddmm(*operands(32, 128), P),
    "another dtype": lambda P: bg.sddmm(*operands(32, dtype=BFLOAT16), P),
    "into out": lambda P: bg.sddmm(*operands(32), P, out=pattern_of(32)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_list_serves_all_operands(change: str, started: Any, always: None) -> None:  # noqa: F811
    """It depends on the pattern alone, and the first product may have had other operands than the second."""
    P, call = pattern_of(32), CHANGES[change]
    bg.sddmm(*operands(32), P)
    for _ in range(2):
        call(P)
    bg.sddmm(*operands(32), P)
    two = "block_products_sm90 4"
    assert kernels(started) == ["block_products_sm90 0", "sampled_tiles", two, two, two]


def test_a_pattern_that_was_written_to_begins_again(started: Any, always: None) -> None:  # noqa: F811
    P, (X, Y) = pattern_of(32), operands(32)
    for write in (False, True):
        if write:
            P.indices[0] = 2
        for _ in range(2):
            bg.sddmm(X, Y, P)
    assert kernels(started) == 2 * ["block_products_sm90 0", "sampled_tiles", "block_products_sm90 4"]


@pytest.mark.parametrize("side", [64, 32, 16])
def test_a_pattern_without_a_list_by_the_rule_never_has_one(side: int, started: Any) -> None:  # noqa: F811
    P, (X, Y) = pattern_of(side), operands(side)
    for _ in range(3):
        bg.sddmm(X, Y, P)
    assert kernels(started) == 3 * ["block_products_sm90 0"]


@pytest.mark.parametrize("how", [{"alpha": 2}, {"out_dtype": F32}], ids=str)
def test_a_product_that_is_scaled_or_wider_has_no_list(how: dict[str, Any], started: Any, always: None) -> None:  # noqa: F811
    P, (X, Y) = pattern_of(32), operands(32)
    for _ in range(3):
        bg.sddmm(X, Y, P, **how)
    assert kernels(started) == 3 * ["block_products_sm90 0"]


def test_a_list_counts_the_tiles_of_every_64_block_rows(started: Any) -> None:  # noqa: F811
    config = chosen(32, 16)
    assert config is not None
    indices, indptr = put(np.zeros(130, np.int64)), put(np.arange(131))
    found = sampled_tiles.listed(indices, indptr, 600, config)
    kernel = SampledTiles(4, 16, "i64")
    ((name, grid, threads, *_),) = started
    assert name == str(kernel.spec()) and grid == (3, 2) and threads == (512,)
    assert found.tiles.shape == (130 // 16 + 3 * 2 * 16, 4 + 16 + 64) and found.tiles.dtype == np.int32
    assert found.counts.shape == (1 + 2 * 3,) and found.counts.dtype == np.int32 and not found.counts.any()
