"""Functions that all pictures of patterns use: shades, rectangles, the grid of blocks. They need matplotlib."""

from __future__ import annotations

from typing import Any

import numpy as np

#: A pattern with at most this many block rows and block columns is drawn as rectangles with grid lines between them.
FEW = 64
#: Three shades of one hue. Their order stays visible in print in black and white and to readers who are colour-blind.
LIGHT, MIDDLE, DARK = SHADES = ("#d0e1f2", "#3f83bf", "#08306b")
_LINES = "#b0b0b0"
#: The two sides of a matrix are drawn to scale unless one is more than this many times as long as the other.
_LONGEST = 8

Ints = np.ndarray[Any, Any]


def rectangles(ax: Any, x: tuple[Ints, Ints], y: tuple[Ints, Ints], color: str, label: str) -> None:
    """Draw rectangles from x[0] to x[1] and from y[0] to y[1], as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    across, down = np.stack([x[0], x[1], x[1], x[0], x[0]]), np.stack([y[0], y[0], y[1], y[1], y[0]])
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    corners = np.stack([across, down], axis=2).swapaxes(0, 1).reshape(-1, 2)
    path = Path(corners, np.tile(np.array(codes, Path.code_type), len(x[0])))
    ax.add_patch(PathPatch(path, facecolor=color, edgecolor="none", label=label))


def frame(ax: Any, shape: tuple[int, int], block: tuple[int, int]) -> bool:
    """Set the limits of the axes, put ticks at edges of blocks, and return whether the two sides are drawn to scale."""
    (M, N), (R, C) = shape, block
    ax.set(xlim=(0, max(1, N)), ylim=(max(1, M), 0))
    rows, cols = -(-M // R), -(-N // C)
    ax.set_xticks(np.arange(0, N + 1, C * max(1, -(-cols // 4))))
    ax.set_yticks(np.arange(0, M + 1, R * max(1, -(-rows // 4))))
    similar = max(M, N) <= _LONGEST * min(M, N)
    ax.set_aspect("equal" if similar else "auto")
    return similar


def grid(ax: Any, shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Draw lines between the blocks."""
    (M, N), (R, C) = shape, block
    ax.vlines(np.arange(C, N, C), 0, M, colors=_LINES, linewidth=0.4)
    ax.hlines(np.arange(R, M, R), 0, N, colors=_LINES, linewidth=0.4)
