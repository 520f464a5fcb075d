"""Pictures of patterns, drawn with matplotlib from plain arrays: the stored blocks of a matrix, and an attention mask.

The memory that the picture of a matrix needs grows with the number of stored blocks and of cells in the picture, never
with the number of all positions that a block could have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

#: A pattern with at most this many block rows and block columns is drawn as rectangles with grid lines between them.
_FEW = 64
#: Three shades of one hue. Their order stays visible in print in black and white and to readers who are colour-blind.
_LIGHT, _MIDDLE, _DARK = _SHADES = ("#d0e1f2", "#3f83bf", "#08306b")
_LINES = "#b0b0b0"
#: The two sides of a matrix are drawn to scale unless one is more than this many times as long as the other.
_LONGEST = 8

Ints = np.ndarray[Any, Any]
#: The smallest and the largest number of cells along a side of an image, and the share of the axes that the image keeps
#: when a colour bar is drawn beside it.
_LEAST_CELLS, _MOST_CELLS, _LEFT_BY_BAR = 64, 2048, 0.85
#: The largest number of bars in a histogram, and the ratio of the highest to the lowest bar from which the scale of the
#: heights is logarithmic.
_MOST_BARS, _UNEVEN = 60, 100
#: The states of a block: some of its pairs are allowed, or all of them; 0 means none.
PART, WHOLE = 1, 2


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


def draw_matrix(pattern: Pattern, ax: Any, histogram: bool) -> Any:
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
    similar = _frame(ax, (M, N), (R, C))
    ax.set(xlabel="column", ylabel="row")
    ax.set_title(f"{title}, density {len(row) * R * C / max(1, M * N):.3g}", fontsize="medium")
    row, col = np.divmod(found, max(1, cols))
    if max(rows, cols) <= _FEW:
        _rectangles(ax, (col * C, (col + 1) * C), (row * R, (row + 1) * R), _DARK, "stored block")
        _grid(ax, (M, N), (R, C))
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
        np.ma.masked_equal(share, 0), cmap=LinearSegmentedColormap.from_list("blocks", _SHADES), vmin=0,
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
    ax.bar(left, bars, step, align="edge", color=_MIDDLE, edgecolor="white", linewidth=0.4, log=uneven)
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


# ------------------------------------------------------------------------------------------- masks
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


def draw_mask(pattern: MaskPattern, ax: Any) -> Any:
    """Draw one pattern and return the axes; see `BlockMask.plot`."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    (S_q, S_k), (bq, bk), blocks = pattern.shape, pattern.block, pattern.blocks
    rows, cols = blocks.shape
    if ax is None:
        _, ax = plt.subplots()
    _frame(ax, pattern.shape, pattern.block)
    if max(rows, cols) <= _FEW:
        _fill(ax, blocks == WHOLE, pattern.block, pattern.shape, _DARK, "whole block")
        _fill(ax, blocks == PART, pattern.block, pattern.shape, _LIGHT, "block in part")
        _grid(ax, pattern.shape, pattern.block)
    else:
        extent, colors = (0, cols * bk, rows * bq, 0), ListedColormap(["white", _LIGHT, _DARK])
        aspect = ax.get_aspect()
        ax.imshow(blocks, cmap=colors, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect=aspect)
        ax.set(xlim=(0, max(1, S_k)), ylim=(max(1, S_q), 0))
    if pattern.elements is not None:
        part = (blocks == PART).repeat(bq, axis=0).repeat(bk, axis=1)[:S_q, :S_k]
        _fill(ax, pattern.elements & part, (1, 1), pattern.shape, _MIDDLE, "seen of it")
    ax.set(xlabel="key", ylabel="query", title=f"{pattern.density:.1%} of the pairs, blocks {bq} x {bk}")
    return ax


def _fill(ax: Any, cells: Ints, cell: tuple[int, int], shape: tuple[int, int], color: str, label: str) -> None:
    """Draw one rectangle for each horizontal run of cells that are true."""
    (height, width), (S_q, S_k) = cell, shape
    steps = np.diff(np.pad(cells, ((0, 0), (1, 1))).view(np.int8), axis=1)
    (top, left), (_, right) = np.nonzero(steps > 0), np.nonzero(steps < 0)
    across = (np.minimum(left * width, S_k), np.minimum(right * width, S_k))
    down = (np.minimum(top * height, S_q), np.minimum((top + 1) * height, S_q))
    _rectangles(ax, across, down, color, label)


# ------------------------------------------------------------------------------ of all pictures
def _rectangles(ax: Any, x: tuple[Ints, Ints], y: tuple[Ints, Ints], color: str, label: str) -> None:
    """Draw rectangles from x[0] to x[1] and from y[0] to y[1], as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    across, down = np.stack([x[0], x[1], x[1], x[0], x[0]]), np.stack([y[0], y[0], y[1], y[1], y[0]])
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    corners = np.stack([across, down], axis=2).swapaxes(0, 1).reshape(-1, 2)
    path = Path(corners, np.tile(np.array(codes, Path.code_type), len(x[0])))
    ax.add_patch(PathPatch(path, facecolor=color, edgecolor="none", label=label))


def _frame(ax: Any, shape: tuple[int, int], block: tuple[int, int]) -> bool:
    """Set the limits of the axes, put ticks at edges of blocks, and return whether the two sides are drawn to scale."""
    (M, N), (R, C) = shape, block
    ax.set(xlim=(0, max(1, N)), ylim=(max(1, M), 0))
    rows, cols = -(-M // R), -(-N // C)
    ax.set_xticks(np.arange(0, N + 1, C * max(1, -(-cols // 4))))
    ax.set_yticks(np.arange(0, M + 1, R * max(1, -(-rows // 4))))
    similar = max(M, N) <= _LONGEST * min(M, N)
    ax.set_aspect("equal" if similar else "auto")
    return similar


def _grid(ax: Any, shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Draw lines between the blocks."""
    (M, N), (R, C) = shape, block
    ax.vlines(np.arange(C, N, C), 0, M, colors=_LINES, linewidth=0.4)
    ax.hlines(np.arange(R, M, R), 0, N, colors=_LINES, linewidth=0.4)
