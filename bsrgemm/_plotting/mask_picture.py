"""The picture of a mask: which blocks of one pattern are allowed, whole or in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .drawing import DARK, FEW, LIGHT, MIDDLE, Ints, frame, grid, rectangles

if TYPE_CHECKING:
    from .._attention.mask import BlockMask

#: Of a block: not allowed, allowed in part, whole
_PART, _WHOLE = 1, 2


def draw(mask: BlockMask, ax: Any, batch: int, head: int, elements: bool) -> Any:
    """Draw one pattern; see `BlockMask.plot`."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    for name, value, count in (("batch", batch, mask.heads[0]), ("head", head, mask.heads[1])):
        if count > 1 and not 0 <= value < count:  # one pattern stands for all
            raise IndexError(f"{name}: wanted 0 to {count - 1}, got {value}")
    mask = _pattern(mask, batch % mask.heads[0] * mask.heads[1] + head % mask.heads[1])
    (S_q, S_k), (bq, bk) = mask.shape, mask.block
    rows, cols = mask._grid.counts
    blocks = np.zeros((rows, cols), np.uint8)
    blocks[mask._rows(), mask.indices] = np.where(mask.kinds < 0, _WHOLE, _PART)
    if ax is None:
        _, ax = plt.subplots()
    frame(ax, mask.shape, mask.block)
    if max(rows, cols) <= FEW:
        _fill(ax, blocks == _WHOLE, mask.block, mask.shape, DARK, "whole block")
        _fill(ax, blocks == _PART, mask.block, mask.shape, LIGHT, "block in part")
        grid(ax, mask.shape, mask.block)
    else:
        extent, colors = (0, cols * bk, rows * bq, 0), ListedColormap(["white", LIGHT, DARK])
        aspect = ax.get_aspect()
        ax.imshow(blocks, cmap=colors, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect=aspect)
        ax.set(xlim=(0, max(1, S_k)), ylim=(max(1, S_q), 0))
    if elements:
        part = (blocks == _PART).repeat(bq, axis=0).repeat(bk, axis=1)[:S_q, :S_k]
        _fill(ax, mask.to_dense() & part, (1, 1), mask.shape, MIDDLE, "seen of it")
    ax.set(xlabel="key", ylabel="query", title=f"{mask.density:.1%} of the pairs, blocks {bq} x {bk}")
    return ax


def _pattern(mask: BlockMask, number: int) -> BlockMask:
    """One pattern of a mask, on the host."""
    mask = mask.get()
    rows = mask._grid.counts[0]
    indptr = mask.indptr[number * rows : (number + 1) * rows + 1]
    stored = slice(int(indptr[0]), int(indptr[-1]))
    arrays = (indptr - indptr[0], mask.indices[stored], mask.kinds[stored], mask.bits)
    return type(mask)(mask._backend, mask.shape, mask.block, (1, 1), *arrays)


def _fill(ax: Any, cells: Ints, cell: tuple[int, int], shape: tuple[int, int], color: str, label: str) -> None:
    """Rectangles, one for each run of cells side by side."""
    (height, width), (S_q, S_k) = cell, shape
    steps = np.diff(np.pad(cells, ((0, 0), (1, 1))).view(np.int8), axis=1)
    (top, left), (_, right) = np.nonzero(steps > 0), np.nonzero(steps < 0)
    across = (np.minimum(left * width, S_k), np.minimum(right * width, S_k))
    down = (np.minimum(top * height, S_q), np.minimum((top + 1) * height, S_q))
    rectangles(ax, across, down, color, label)
