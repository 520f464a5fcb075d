"""The picture of an attention mask: which blocks of one pattern are allowed, completely or in part."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .drawing import DARK, FEW, LIGHT, MIDDLE, Ints, frame, grid, rectangles

#: The states of a block: some of its pairs are allowed, or all of them; 0 means none.
PART, WHOLE = 1, 2


class MaskPattern(NamedTuple):
    """The arrays from which one pattern of a mask is drawn."""

    shape: tuple[int, int]
    block: tuple[int, int]
    #: (block rows, block columns): 0, `PART` or `WHOLE`.
    blocks: Ints
    #: The share of the pairs of a query and a key that is allowed, from 0 to 1.
    density: float
    #: Booleans in the shape of the mask, or None if single elements are not drawn.
    elements: Ints | None = None


def draw(pattern: MaskPattern, ax: Any) -> Any:
    """Draw one pattern and return the axes; see `BlockMask.plot`."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    (S_q, S_k), (bq, bk), blocks = pattern.shape, pattern.block, pattern.blocks
    rows, cols = blocks.shape
    if ax is None:
        _, ax = plt.subplots()
    frame(ax, pattern.shape, pattern.block)
    if max(rows, cols) <= FEW:
        _fill(ax, blocks == WHOLE, pattern.block, pattern.shape, DARK, "whole block")
        _fill(ax, blocks == PART, pattern.block, pattern.shape, LIGHT, "block in part")
        grid(ax, pattern.shape, pattern.block)
    else:
        extent, colors = (0, cols * bk, rows * bq, 0), ListedColormap(["white", LIGHT, DARK])
        aspect = ax.get_aspect()
        ax.imshow(blocks, cmap=colors, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect=aspect)
        ax.set(xlim=(0, max(1, S_k)), ylim=(max(1, S_q), 0))
    if pattern.elements is not None:
        part = (blocks == PART).repeat(bq, axis=0).repeat(bk, axis=1)[:S_q, :S_k]
        _fill(ax, pattern.elements & part, (1, 1), pattern.shape, MIDDLE, "seen of it")
    ax.set(xlabel="key", ylabel="query", title=f"{pattern.density:.1%} of the pairs, blocks {bq} x {bk}")
    return ax


def _fill(ax: Any, cells: Ints, cell: tuple[int, int], shape: tuple[int, int], color: str, label: str) -> None:
    """Draw one rectangle for each horizontal run of cells that are true."""
    (height, width), (S_q, S_k) = cell, shape
    steps = np.diff(np.pad(cells, ((0, 0), (1, 1))).view(np.int8), axis=1)
    (top, left), (_, right) = np.nonzero(steps > 0), np.nonzero(steps < 0)
    across = (np.minimum(left * width, S_k), np.minimum(right * width, S_k))
    down = (np.minimum(top * height, S_q), np.minimum((top + 1) * height, S_q))
    rectangles(ax, across, down, color, label)
