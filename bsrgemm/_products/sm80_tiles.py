"""The shape of the tiles of gemm_sm80, by the kind of product and the shared memory of the card."""

from __future__ import annotations

from collections.abc import Iterator


def sm80_tiles(kind: str, row_tile_height: int, shared_kb: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield possible tiles as (row tiles, columns, warps along the rows, threads, stages), the preferred one first.

    Tiles of a single row tile are the fastest where each instruction is slow, since no warp waits for the row tiles of
    another warp. On an H200, with blocks of 32 x 32 at density 0.22, they reach 109 TFLOP/s in tf32, where tiles of
    four row tiles reach 82, and 45 TFLOP/s instead of 33 in float64, with blocks of 64 x 64 49 instead of 37. 16-bit
    types are faster with several row tiles, which share what is read of B.
    """
    alone = row_tile_height == 64 and kind == "MMA_F64"
    if alone and shared_kb > 99:
        yield 1, 256, 2, 512, 4 if shared_kb > 163 else 3
    if row_tile_height < 64 and kind in ("MMA_TF32", "MMA_F64") and shared_kb > 99:
        yield max(1, 32 // row_tile_height), 256, 1, 256, 3 if shared_kb > 163 else 2
    if kind == "MMA_3XTF32" and row_tile_height < 128:
        yield 64 // row_tile_height, 128, 1, 128, 4 if shared_kb > 99 else 3
    if kind not in ("MMA_3XTF32", "MMA_F64") and shared_kb > 99:
        yield 128 // row_tile_height, 256, 2, 256, 4 if shared_kb > 163 else 3
    yield 1 if alone else 128 // row_tile_height, 128, 2, 256, 3
