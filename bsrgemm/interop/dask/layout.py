"""What is known about a matrix in panels before any panel is computed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layout:
    """A matrix cut along one axis: ``A = vstack(panels)`` for axis 0, ``A = hstack(panels)`` for axis 1."""

    #: The rows of each panel for axis 0, the columns of each for axis 1. There is at least one panel.
    sides: tuple[int, ...]
    #: The other side of all panels.
    across: int
    blocksize: tuple[int, int]
    dtype: np.dtype[Any]
    #: Where the panels are: "cpu", "cuda" or the name of another registered backend.
    device: str = "cpu"
    axis: int = 0

    @property
    def count(self) -> int:
        return len(self.sides)

    @property
    def chunks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.sides, (self.across,)) if self.axis == 0 else ((self.across,), self.sides)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.chunks
        return sum(rows), sum(columns)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each panel begins and ends along the axis."""
        return bounds_of(self.sides)

    def shape_of(self, panel: int) -> tuple[int, int]:
        side = self.sides[panel]
        return (side, self.across) if self.axis == 0 else (self.across, side)

    def key(self, name: str, panel: int) -> tuple[str, int, int]:
        """The key of a panel in a graph, as Dask's arrays have it."""
        return (name, panel, 0) if self.axis == 0 else (name, 0, panel)

    def transposed(self) -> Layout:
        return replace(self, axis=1 - self.axis, blocksize=self.blocksize[::-1])

    def with_sides(self, sides: tuple[int, ...]) -> Layout:
        return replace(self, sides=sides)


def bounds_of(sides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each of several pieces that lie one after another."""
    stops = tuple(itertools.accumulate(sides))
    return tuple(zip((0, *stops[:-1]), stops, strict=True))


def check_sides(sides: tuple[int, ...], block: int, what: str, axis: int = 0) -> None:
    """Raise ValueError unless every panel consists of whole blocks, of `block` rows or, for axis 1, columns each."""
    unit = ("rows", "columns")[axis]
    for number, side in enumerate(sides):
        if side < 0 or side % block:
            raise ValueError(
                f"{what}: panel {number} has {side} {unit}, which is not a multiple of the {block} {unit} of a block; "
                f"{side - side % block} and {side - side % block + block} are"
            )


def shortened(sides: tuple[Any, ...]) -> str:
    """Return a tuple for an error message, without its middle if it is long."""
    return str(sides) if len(sides) <= 6 else f"({', '.join(map(str, sides[:4]))}, ... {len(sides)} in all)"
