"""What is known about a matrix in panels before any panel is computed, the functions that run in workers, and what Dask
is told about `bsr_array`.

Every graph names a function of this module, so that a worker imports it before the first panel arrives: only then does
Dask know how to put panels together and how much memory they take.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from dask.array.dispatch import concatenate_lookup, tensordot_lookup
from dask.sizeof import sizeof

from ..._array.assemble import hstack, vstack
from ..._array.base import BsrBase, kind_of
from ..._products.matmul import matmul
from ...bsr import bsr_array
from ...dtypes import accumulator_dtype


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


# ------------------------------------------------------------------------------------------ panels
def device_of(panel: BsrBase) -> str:
    """Return "cpu" or "cuda": the number of a GPU is that of a worker, and differs between workers."""
    return panel._backend.name


def given(panel: Any) -> Any:
    """Return a panel that the graph holds."""
    return panel


def checked(panel: Any, number: int, layout: Layout) -> Any:
    """Return `panel`; raise unless it is the matrix that the layout says."""
    where = f"panel {number}"
    if not isinstance(panel, bsr_array):
        raise TypeError(f"{where}: wanted a bsr_array, got {kind_of(panel)}; bsrgemm.bsr_array converts it")
    found = (panel.shape, panel.blocksize, panel.dtype, device_of(panel))
    wanted = (layout.shape_of(number), layout.blocksize, layout.dtype, layout.device)
    for what, one, other in zip(("shape", "block size", "dtype", "device"), found, wanted, strict=True):
        if one != other:
            raise ValueError(f"{where}: wanted {what} {other}, got {one}; all panels of a matrix are of one kind")
    return panel


def loaded(store: Any, number: int, layout: Layout) -> Any:
    """Return a panel from disk, on the device that the layout says."""
    try:
        panel = bsr_array(store.read(number)).to_device(layout.device)
        return checked(panel, number, layout)
    except ValueError as error:
        raise ValueError(f"{store.name_of(number)!r}: {error}") from error


def written(panel: Any, store: Any, number: int) -> None:
    store.write(number, panel)


def all_done(results: Sequence[None]) -> None:
    """A task that is ready when others are."""


def applied(panel: Any, *others: Any, func: Callable[..., Any], number: int, layout: Layout) -> Any:
    """Return ``func(panel, ...)``, which must be the panel that the layout says."""
    return checked(func(panel, *others), number, layout)


def transposed(panel: Any) -> Any:
    return panel.T


def cut(panel: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    return panel[slice(*rows), slice(*columns)]


def regrouped(panels: Sequence[Any], cuts: Sequence[tuple[int, int]], axis: int) -> Any:
    """Return one panel that is made of pieces of several: of panel i, the rows (or columns) of ``cuts[i]``."""
    pieces = []
    for panel, (start, stop) in zip(panels, cuts, strict=True):
        whole = (start, stop) == (0, panel.shape[axis])
        pieces.append(panel if whole else panel[start:stop] if axis == 0 else panel[:, start:stop])
    return pieces[0] if len(pieces) == 1 else _concatenate(pieces, axis)


def dense(panel: Any) -> Any:
    return panel.toarray()


def together(panels: Any, axis: int) -> Any:
    """Return the matrix that panels are cut from; `panels` is nested as the keys of a Dask array are."""
    flat = [panel for row in panels for panel in row]
    return flat[0].copy() if len(flat) == 1 else _concatenate(flat, axis)


# ---------------------------------------------------------------------------------------- products
def product_of_chunks(
    panel: Any, chunks: Sequence[Any], bounds: Sequence[tuple[int, int]], left: bool, dtype: np.dtype[Any]
) -> Any:
    """Return ``panel @ X``, or ``X @ panel`` if `left`, for an X that comes in pieces along the axis of the sums."""
    if len(chunks) == 1:
        return product(panel, chunks[0], left, dtype)
    total = None
    for X, (start, stop) in zip(chunks, bounds, strict=True):
        piece = panel[start:stop] if left else panel[:, start:stop]
        part = product(piece, X, left, accumulator_dtype(dtype))
        if total is None:
            total = part
        else:
            total += part
    return _cast(total, dtype)


def product(panel: Any, X: Any, left: bool, dtype: np.dtype[Any]) -> Any:
    """Return ``panel @ X``, or ``X @ panel`` if `left`."""
    return matmul(X, panel, out_dtype=dtype) if left else matmul(panel, X, out_dtype=dtype)


def sparse_product(A: Any, B: Any) -> Any:
    return A @ B


def plus_sparse_product(total: Any, A: Any, B: Any, bounds: tuple[int, int]) -> Any:
    """Return ``total + A[:, start:stop] @ B``; the first of a sum has no total yet."""
    start, stop = bounds
    part = (A if (start, stop) == (0, A.shape[1]) else A[:, start:stop]) @ B
    return part if total is None else total + part


def added(parts: Sequence[Any], dtype: np.dtype[Any]) -> Any:
    """Return the sum of arrays or matrices, in their order."""
    total = parts[0]
    for part in parts[1:]:  # not in place: the parts belong to other tasks
        total = total + part
    return _cast(total, dtype)


def _cast(x: Any, dtype: np.dtype[Any]) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


def panel_sum(panel: Any, axis: int | None, dtype: np.dtype[Any] | None) -> Any:
    return panel.sum(axis=axis, dtype=dtype)


# ------------------------------------------------------------------------------- what Dask is told
def _concatenate(panels: Sequence[Any], axis: int = 0, **_: Any) -> Any:
    """Put matrices above each other (axis 0) or side by side (axis 1)."""
    return (vstack if axis == 0 else hstack)(list(panels))


def _tensordot(a: Any, b: Any, axes: tuple[Sequence[int], Sequence[int]]) -> Any:
    """Return the product along one axis of `a` and one of `b`, for ``dask.array.dot`` and ``tensordot``."""
    if len(axes[0]) != 1:
        raise NotImplementedError(f"tensordot of a bsr_array: wanted one axis of each operand, got axes={axes!r}")
    (of_a,), (of_b,) = axes
    a = a.T if a.ndim == 2 and of_a % 2 == 0 else a
    b = b.T if b.ndim == 2 and of_b % 2 == 1 else b
    return a @ b


concatenate_lookup.register(BsrBase, _concatenate)
tensordot_lookup.register(BsrBase, _tensordot)
sizeof.register(BsrBase, lambda A: A.nbytes)
