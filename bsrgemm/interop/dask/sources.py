"""Matrices in panels from a matrix in memory and from delayed panels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import Task, TaskRef
from dask.tokenize import tokenize

from ..._array.base import BsrBase, check_shape, kind_of
from ..._array.construct import check_blocksize
from ...bsr import bsr_array
from ...dtypes import HOST_DTYPES, check_dtype
from . import tasks
from .array import PanelArray
from .layout import Layout, check_sides


def from_bsr(A: Any, rows_per_chunk: int) -> PanelArray:
    """Cut a matrix in memory into panels of block rows.

    Parameters
    ----------
    A : bsr_array or bsr_matrix
        The matrix, on any device.
    rows_per_chunk : int
        The rows of each panel but the last, which may have fewer: a multiple of the rows of a block.

    Returns
    -------
    PanelArray
        The matrix in panels. They share the blocks with `A`; values that are written into `A` later are seen by what
        is computed later.

    Raises
    ------
    TypeError
        If `A` is not a BSR matrix of this package.
    ValueError
        If `rows_per_chunk` is not a positive multiple of the rows of a block.

    Notes
    -----
    The panels are part of the graph. With Dask's distributed scheduler they travel to the workers through the
    scheduler; ``persist()`` makes them do so once, and `from_panels` lets the workers read them from disk.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> from bsrgemm.interop import dask as panels
    >>> panels.from_bsr(bg.eye(10, blocksize=(2, 2)), rows_per_chunk=4).chunks
    ((4, 4, 2), (10,))
    """
    if not isinstance(A, BsrBase):
        raise TypeError(f"A: wanted a bsr_array or bsr_matrix, got {kind_of(A)}; bsrgemm.bsr_array(A) makes one")
    matrix: Any = bsr_array(A)
    (M, N), (R, C) = matrix.shape, matrix.blocksize
    rows = _positive(rows_per_chunk, "rows_per_chunk")
    if rows % R:
        raise ValueError(
            f"rows_per_chunk: wanted a multiple of the {R} rows of a block, got {rows}; "
            f"{max(rows - rows % R, R)} and {max(rows - rows % R, R) + R} are"
        )
    sides = (rows,) * (M // rows) + ((M % rows,) if M % rows or not M else ())
    layout = Layout(sides, N, (R, C), matrix.dtype, tasks.device_of(matrix))
    name = f"bsr-from-bsr-{tokenize(matrix, rows)}"
    layer = {}
    for i, (start, stop) in enumerate(layout.bounds):
        key = layout.key(name, i)
        layer[key] = Task(key, tasks.given, _rows(matrix, start // R, stop // R))
    return PanelArray(HighLevelGraph.from_collections(name, layer), name, layout)


def from_delayed(
    panels: Iterable[Delayed], rows: Iterable[int], columns: int, *, blocksize: Any, dtype: Any, device: str = "cpu"
) -> PanelArray:
    """Make a matrix of panels that are computed later, each by a task of its own.

    Parameters
    ----------
    panels : sequence of dask.delayed.Delayed
        The panels of block rows from top to bottom. Each is computed to a `bsr_array`.
    rows : sequence of int
        The rows of each panel, multiples of the rows of a block.
    columns : int
        The columns of the matrix, which all panels have.
    blocksize : (R, C)
        The block size of all panels.
    dtype : dtype
        The dtype of all panels.
    device : {"cpu", "cuda"}
        The device on which the panels are computed.

    Returns
    -------
    PanelArray
        The matrix. Computing a panel that has another shape, block size, dtype or device than was said raises
        ValueError, and one that is not a `bsr_array` raises TypeError; the messages name the panel.

    Raises
    ------
    ValueError
        If there are no panels or not as many as `rows`, or if the sizes are not multiples of the block size.
    TypeError
        If a panel is not delayed, or if a `bsr_array` cannot have the dtype.

    Examples
    --------
    >>> import dask, bsrgemm as bg
    >>> from bsrgemm.interop import dask as panels
    >>> @dask.delayed
    ... def assemble(part):
    ...     return bg.random(4, 8, blocksize=(2, 2), density=0.5, seed=part)
    >>> A = panels.from_delayed([assemble(0), assemble(1)], rows=[4, 4], columns=8, blocksize=(2, 2), dtype="float64")
    >>> A.shape, A.compute().blocksize
    ((8, 8), (2, 2))
    """
    panels = list(panels)
    for number, panel in enumerate(panels):
        if not isinstance(panel, Delayed):
            raise TypeError(
                f"panels: wanted delayed panels, got {type(panel).__name__} as panel {number}; use from_bsr"
            )
    sides = tuple(_size(side, f"rows[{number}]") for number, side in enumerate(rows))
    if not panels or len(sides) != len(panels):
        raise ValueError(f"rows: wanted one number for each of {len(panels)} panels, at least 1, got {len(sides)}")
    shape = check_shape((sum(sides), columns))
    block = check_blocksize(blocksize)
    if shape[1] % block[1]:
        raise ValueError(f"columns: wanted a multiple of the {block[1]} columns of a block, got {columns}")
    check_sides(sides, block[0], "rows")
    layout = Layout(sides, shape[1], block, check_dtype(dtype, HOST_DTYPES), device)
    name = f"bsr-from-delayed-{tokenize([panel.key for panel in panels], layout)}"
    layer = {}
    for i, panel in enumerate(panels):
        key = layout.key(name, i)
        layer[key] = Task(key, tasks.checked, TaskRef(panel.key), number=i, layout=layout)
    return PanelArray(HighLevelGraph.from_collections(name, layer, dependencies=panels), name, layout)


def _rows(A: Any, first: int, last: int) -> Any:
    """Return block rows of a matrix whose blocks are views of those of `A`."""
    start, stop = (int(n) for n in (A.indptr[first], A.indptr[last]))  # synchronize!
    arrays = (A.data[start:stop], A.indices[start:stop], A.indptr[first : last + 1] - start)
    return bsr_array(arrays, shape=((last - first) * A.blocksize[0], A.shape[1]))


def _size(number: Any, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
        raise ValueError(f"{what}: wanted an integer that is not negative, got {number!r}")
    return int(number)


def _positive(number: Any, what: str) -> int:
    if _size(number, what) == 0:
        raise ValueError(f"{what}: wanted a positive number, got 0")
    return int(number)
