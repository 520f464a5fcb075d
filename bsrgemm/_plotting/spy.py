"""The picture of a block-sparse matrix: which blocks are stored, and how many in each block row.

The memory that it needs grows with the number of stored blocks and of cells in the picture, never with the number of
all positions that a block could have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .drawing import DARK, FEW, MIDDLE, SHADES, Ints, frame, grid, rectangles

#: The smallest and the largest number of cells along a side of an image, and the share of the axes that the image keeps
#: when a colour bar is drawn beside it.
_LEAST_CELLS, _MOST_CELLS, _LEFT_BY_BAR = 64, 2048, 0.85
#: The largest number of bars in a histogram, and the ratio of the highest to the lowest bar from which the scale of the
#: heights is logarithmic.
_MOST_BARS, _UNEVEN = 60, 100


class Pattern(NamedTuple):
    """The shape of a matrix, the shape of its blocks, and the positions of the stored blocks."""

    shape: tuple[int, int]
    blocksize: tuple[int, int]
    #: The block row and the block column of every stored block.
    row: Ints
    col: Ints

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of block rows and block columns."""
        (M, N), (R, C) = self.shape, self.blocksize
        return M // R, N // C


def draw(pattern: Pattern, ax: Any, histogram: bool) -> Any:
    """Draw a pattern and return the axes; see `bsr_array.spy`."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.axes import Axes
    except ImportError as error:
        raise ImportError('spy draws with matplotlib: pip install "bsrgemm[bench]"') from error
    if ax is not None and not isinstance(ax, Axes):
        raise TypeError(f"ax: wanted a matplotlib.axes.Axes or None, got {type(ax).__name__}")
    if ax is not None:
        return _blocks(pattern, ax)
    if not histogram:
        return _blocks(pattern, plt.subplots(figsize=(5.6, 5), layout="constrained")[1])
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8), width_ratios=(3, 2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
    return _blocks(pattern, left), _histogram(right, np.bincount(pattern.row, minlength=pattern.counts[0]))


# ---------------------------------------------------------------------------------------- pattern
def _blocks(pattern: Pattern, ax: Any) -> Any:
    (M, N), (R, C), row, col = pattern
    rows, cols = pattern.counts
    found = np.unique(row * max(1, cols) + col)  # a block that is stored twice is drawn once
    title = f"{M:,} x {N:,}, blocks {R} x {C}\n{len(row):,} blocks"
    if len(found) < len(row):
        title += f" at {len(found):,} places"
    similar = frame(ax, (M, N), (R, C))
    ax.set(xlabel="column", ylabel="row")
    ax.set_title(f"{title}, density {len(row) * R * C / max(1, M * N):.3g}", fontsize="medium")
    row, col = np.divmod(found, max(1, cols))
    if max(rows, cols) <= FEW:
        rectangles(ax, (col * C, (col + 1) * C), (row * R, (row + 1) * R), DARK, "stored block")
        grid(ax, (M, N), (R, C))
    elif len(found):
        _image(ax, row, col, (rows, cols), (R, C), _cells(ax, (M, N), similar))
    return ax


def _cells(ax: Any, shape: tuple[int, int], similar: bool) -> tuple[int, int]:
    """Return how many cells an image may have down and across: at most one per pixel, so that each is visible."""
    box = ax.get_window_extent()
    pixels = _LEFT_BY_BAR * np.array([box.height, box.width])
    if similar:
        pixels = np.min(pixels / shape) * np.array(shape)
    down, across = np.clip(pixels.astype(int), _LEAST_CELLS, _MOST_CELLS).tolist()
    return down, across


def _image(
    ax: Any, row: Ints, col: Ints, counts: tuple[int, int], block: tuple[int, int], most: tuple[int, int]
) -> None:
    """Draw cells of one or several blocks; a cell is as dark as the share of its blocks that is stored, or white."""
    from matplotlib.colors import LinearSegmentedColormap

    (rows, cols), (R, C) = counts, block
    down, across = (-(-n // cells) for n, cells in zip(counts, most, strict=True))  # blocks in a cell
    height, width = -(-rows // down), -(-cols // across)
    stored = np.bincount(row // down * width + col // across, minlength=height * width).reshape(height, width)
    tall, wide = np.minimum(rows - np.arange(height) * down, down), np.minimum(cols - np.arange(width) * across, across)
    share = stored / np.multiply.outer(tall, wide)
    # The last row and column of cells may have fewer blocks. If such a cell is full, it must not make the others pale:
    # the scale of the shades is taken from complete cells.
    most_stored = float(share[: rows // down, : cols // across].max() or share.max())
    image = ax.imshow(
        np.ma.masked_equal(share, 0), cmap=LinearSegmentedColormap.from_list("blocks", SHADES), vmin=0,
        vmax=most_stored, aspect=ax.get_aspect(), extent=(0, width * across * C, height * down * R, 0),
        interpolation="nearest",
    )  # fmt: skip
    ax.set(xlim=(0, cols * C), ylim=(rows * R, 0))
    if down > 1 or across > 1:
        ax.figure.colorbar(
            image, ax=ax, label=f"stored of {down} x {across} blocks",
            location="right" if cols * C <= 2 * rows * R else "bottom",
            extend="max" if share.max() > most_stored else "neither",
        )  # fmt: skip


# -------------------------------------------------------------------------------------- histogram
def _histogram(ax: Any, counts: Ints) -> Any:
    """Draw how many block rows have each number of blocks."""
    low, high = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
    step = -(-(high - low + 1) // _MOST_BARS)  # how many consecutive numbers of blocks share a bar
    bars = np.bincount((counts - low) // step, minlength=1)
    seen = bars[bars > 0]
    uneven = len(seen) > 0 and int(seen.max()) >= _UNEVEN * int(seen.min())
    left = low + np.arange(len(bars)) * step - 0.5
    ax.bar(left, bars, step, align="edge", color=MIDDLE, edgecolor="white", linewidth=0.4, log=uneven)
    title = f"{high:,} blocks in every block row" if len(counts) else "no block rows"
    if low < high:
        title = f"{low:,} to {high:,} blocks in a block row\n{counts.mean():.3g} on average"
        title += f", {int((counts == 0).sum()):,} of {len(counts):,} empty" if low == 0 else ""
    ax.set_title(title, fontsize="medium")
    ax.set(xlabel="blocks in a block row", ylabel="block rows")
    if high - low < 4:  # a few bars: widen the axis, so that it has ticks on both sides of them
        ax.set_xlim(max(-0.7, low - 2), high + 2)
    ax.set_ylim(bottom=0.5 if uneven else 0, top=None if len(counts) else 1)
    for axis in (ax.xaxis,) if uneven else (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return ax
