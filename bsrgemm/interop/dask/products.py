"""Products of a matrix in panels, ``C[i] = A[i] @ B`` or, along the axis that is cut, ``C = sum_i A[i] @ B[i]``."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import List, Task, TaskRef
from dask.tokenize import tokenize

from ..._array.base import BsrBase, kind_of
from ..._backend.registry import adopted, backend_of, foreign_backend
from ...bsr import bsr_array
from ...dtypes import accumulator_dtype, check_dtype, result_dtype
from . import tasks
from .base import PanelBase, empty_dense, tree_sum
from .tasks import Layout, bounds_of, shortened


def matmul(A: Any, B: Any) -> Any:
    """Return the product ``A @ B`` as a Dask collection; at least one operand is a matrix in panels.

    Parameters
    ----------
    A, B : PanelArray, dask.array.Array, bsr_array or array
        At least one `PanelArray`. The other operand may be one too, a `bsr_array`, a dense vector or matrix in memory,
        or a dense Dask array of one or two dimensions.

    Returns
    -------
    dask.array.Array or PanelArray
        A dense Dask array if one operand is dense, otherwise a `PanelArray`. Nothing is computed yet.

    Raises
    ------
    TypeError
        If no operand is a `PanelArray`, if the other one is not one of those above, if its dtype is not supported, or
        if it is on another device.
    ValueError
        If the shapes do not agree, if chunks of the dense operand begin inside a block or do not fit the panels, or if
        both operands are cut so that the result would have panels along both axes.

    Notes
    -----
    One task multiplies one panel with one column of chunks of a dense `B`, so a worker holds one panel of `A`, these
    chunks, and their product. If `A` is cut along the axis of the sums, as in ``A.T @ X`` and ``X @ A``, one task
    multiplies one panel with the chunk of its rows, and a tree of tasks adds up the products.

    Sums of 16-bit floats over several chunks are kept in float32 and rounded once. The same graph gives the same bits,
    whatever the scheduler and the number of workers.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> from bsrgemm.interop import dask as panels
    >>> A = bg.bsr_array(np.diag([1.0, 2.0, 3.0, 4.0]), blocksize=(2, 2))
    >>> y = panels.matmul(panels.from_bsr(A, 2), np.ones(4))
    >>> y.chunks, y.compute()
    (((2, 2),), array([1., 2., 3., 4.]))
    """
    if isinstance(A, PanelBase):
        if isinstance(B, PanelBase | BsrBase):
            return _sparse(A, B if isinstance(B, PanelBase) else _single(A, bsr_array(B)))
        return _dense(A, B, left=False, what="B")
    if isinstance(B, PanelBase):
        if isinstance(A, BsrBase):
            return _sparse(_columns_like(bsr_array(A), B), B)
        return _dense(B, A, left=True, what="A")
    raise TypeError(
        f"A, B: wanted a PanelArray among the operands, got {kind_of(A)} and {kind_of(B)}; "
        "from_bsr(A, rows_per_chunk) makes one"
    )


# ------------------------------------------------------------------------------------ dense operands
def _dense(A: PanelBase, x: Any, left: bool, what: str) -> da.Array:
    """Return ``A @ x``, or ``x @ A`` if `left`; `what` is the name of x in error messages."""
    layout = A._layout
    along = 0 if left else 1
    summed = layout.axis == along
    X = _operand(x, layout, left, what)
    inner = X.ndim - 1 if left else 0
    if summed and X.chunks[inner] != layout.sides:
        raise ValueError(
            f"{what}: wanted chunks {shortened(layout.sides)} along axis {inner}, as the panels have, "
            f"got {shortened(X.chunks[inner])}; "
            f"{what}.rechunk({{{inner}: {_matrix(left)}.chunks[{along}]}}) makes them so"
        )
    block = layout.blocksize[along]
    bounds = bounds_of(X.chunks[inner])
    for start, _ in bounds:
        if start % block:
            raise ValueError(
                f"{what}: a chunk begins at {start} of axis {inner}, inside a block: wanted multiples of {block}; "
                f"{what}.rechunk({{{inner}: -1}}) makes one chunk"
            )
    dtype = result_dtype(layout.dtype, X.dtype)
    name = f"bsr-matmul-{tokenize(A.name, X.name, left)}"
    others: tuple[int, ...] | None = None if X.ndim == 1 else X.chunks[1 - inner]

    def place(i: int, j: int) -> tuple[int, ...]:
        """The place of a chunk, i along the axis that the panels share and j along the other one."""
        return (i,) if others is None else (j, i) if left else (i, j)

    layer: dict[Any, Any] = {}
    refs = A._refs()
    for j in range(1 if others is None else len(others)):
        chunks = [TaskRef((X.name, *place(k, j))) for k in range(len(bounds))]
        if not summed:
            for i, panel in enumerate(refs):
                key = (name, *place(i, j))
                layer[key] = Task(
                    key, tasks.product_of_chunks, panel, List(*chunks), bounds=bounds, left=left, dtype=dtype
                )
            continue
        sums = accumulator_dtype(dtype) if len(refs) > 1 else dtype
        parts = []
        for i, (panel, chunk) in enumerate(zip(refs, chunks, strict=True)):
            key = (f"{name}-part", i, j)
            layer[key] = Task(key, tasks.product, panel, chunk, left=left, dtype=sums)
            parts.append(TaskRef(key))
        layer |= tree_sum(name, (name, *place(0, j)), parts, (sums, dtype))
    free = (layout.shape[1 - along],) if summed else layout.sides
    sides = (free,) if others is None else (others, free) if left else (free, others)
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[A, X])
    return da.Array(graph, name, sides, meta=empty_dense(layout.device, len(sides), dtype))


def _operand(x: Any, layout: Layout, left: bool, what: str) -> da.Array:
    """Return a dense operand as a Dask array; raise if it does not fit the matrix."""
    known = x
    if isinstance(x, da.Array):
        known = x._meta
        if isinstance(known, BsrBase):
            raise TypeError(
                f"{what}: its chunks are bsr_array, and it is not a PanelArray; from_delayed makes one of its chunks"
            )
        if np.isnan([side for sides in x.chunks for side in sides]).any():
            raise ValueError(f"{what}: has chunks of unknown sizes; {what}.compute_chunk_sizes() finds them")
    elif isinstance(x, list | tuple):
        x = known = np.asarray(x)
    backend = backend_of(known)
    if backend is None and (foreign := foreign_backend(x)) is not None:
        x, backend = adopted(foreign, x, what), foreign
    if backend is None or backend.is_sparse(known):
        raise TypeError(
            f"{what}: wanted a PanelArray, a bsr_array, or a dense array of NumPy, CuPy or Dask, "
            f"got {kind_of(x)}; bsrgemm.bsr_array makes a bsr_array of a matrix of scipy"
        )
    check_dtype(x.dtype, backend.dtypes, what)
    if backend.name != layout.device:
        raise TypeError(
            f"{what}: is on {backend.name!r} and the panels are on {layout.device!r}; "
            f"{_matrix(left)}.to_device({backend.name!r}) moves them, from_panels(folder, device=...) reads them there"
        )
    side = layout.shape[0 if left else 1]
    if x.ndim not in (1, 2) or x.shape[x.ndim - 1 if left else 0] != side:
        wanted = f"({side},) or (n, {side})" if left else f"({side},) or ({side}, n)"
        raise ValueError(f"{what}: wanted shape {wanted}, got {x.shape}")
    if isinstance(x, da.Array):
        return x
    inner = x.ndim - 1 if left else 0
    return _in_graph(x, inner, layout.sides if layout.axis == (0 if left else 1) else (side,))


def _matrix(left: bool) -> str:
    """The name of the matrix in error messages about a dense operand."""
    return "B" if left else "A"


def _in_graph(x: Any, axis: int, sides: tuple[int, ...]) -> da.Array:
    """Return an array in memory as a Dask array, cut along one axis."""
    # A token of an array on a GPU would need a copy on the host.
    name = f"operand-{tokenize(x, axis, sides) if isinstance(x, np.ndarray) else uuid4().hex}"
    layer = {}
    for k, (start, stop) in enumerate(bounds_of(sides)):
        key = (name, *(k if a == axis else 0 for a in range(x.ndim)))
        piece = x[(slice(None),) * axis + (slice(start, stop),)]
        layer[key] = Task(key, tasks.given, piece)
    chunks = tuple(sides if a == axis else (x.shape[a],) for a in range(x.ndim))
    return da.Array(HighLevelGraph.from_collections(name, layer), name, chunks, meta=x[(slice(0),) * x.ndim])


# ----------------------------------------------------------------------------------- sparse operands
def _sparse(A: Any, B: Any) -> Any:
    """Return the product of two matrices in panels."""
    a, b = A._layout, B._layout
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"A, B: shapes {a.shape} and {b.shape} do not fit: {a.shape[1]} columns, {b.shape[0]} rows")
    if a.device != b.device:
        raise TypeError(f"A, B: are on {a.device!r} and {b.device!r}; A.to_device({b.device!r}) moves A")
    if (a.axis, b.axis) == (0, 1):
        if b.count == 1:
            return _sparse(A, B._with_axis(0))
        if a.count == 1:
            return _sparse(A._with_axis(1), B)
        raise ValueError(
            f"A, B: {a.count} panels of rows times {b.count} panels of columns would be a grid, and a PanelArray is "
            "cut along one axis; B.rechunk({1: -1}) makes one panel of B"
        )
    if (a.axis, b.axis) == (1, 1):
        return _sparse(B._transposed(), A._transposed())._transposed()
    dtype, blocksize = result_dtype(a.dtype, b.dtype), (a.blocksize[0], b.blocksize[1])
    if a.axis == 1:
        return _summed(A, B, Layout((a.shape[0],), b.shape[1], blocksize, dtype, a.device))
    _check_rows(b.bounds, a.blocksize[1])
    layout = Layout(a.sides, b.shape[1], blocksize, dtype, a.device)
    name = f"bsr-matmul-{tokenize(A.name, B.name)}"
    layer: dict[Any, Any] = {}
    for i, panel in enumerate(A._refs()):
        total: Any = None
        for k, (other, bounds) in enumerate(zip(B._refs(), b.bounds, strict=True)):
            key = layout.key(name, i) if k == b.count - 1 else (f"{name}-part", i, k)
            layer[key] = Task(key, tasks.plus_sparse_product, total, panel, other, bounds=bounds)
            total = TaskRef(key)
    return type(A)(HighLevelGraph.from_collections(name, layer, dependencies=[A, B]), name, layout)


def _check_rows(bounds: tuple[tuple[int, int], ...], block: int) -> None:
    """Raise ValueError unless the panels of B begin where block columns of A do."""
    for start, _ in bounds:
        if start % block:
            raise ValueError(
                f"B: a panel begins at row {start}, inside a block column of A: wanted multiples of {block}"
            )


def _summed(A: Any, B: Any, layout: Layout) -> Any:
    """Return ``sum_i A[i] @ B[i]``, as one panel."""
    a, b = A._layout, B._layout
    if a.sides != b.sides:
        raise ValueError(
            f"A, B: the panels along the axis of the sums differ: A has {shortened(a.sides)} columns, "
            f"B has {shortened(b.sides)} rows; cut both alike"
        )
    name = f"bsr-matmul-{tokenize(A.name, B.name)}"
    layer: dict[Any, Any] = {}
    parts = []
    for i, (panel, other) in enumerate(zip(A._refs(), B._refs(), strict=True)):
        key = (f"{name}-part", i)
        layer[key] = Task(key, tasks.sparse_product, panel, other)
        parts.append(TaskRef(key))
    layer |= tree_sum(name, layout.key(name, 0), parts, (layout.dtype, layout.dtype))
    return type(A)(HighLevelGraph.from_collections(name, layer, dependencies=[A, B]), name, layout)


def _single(like: PanelBase, B: Any) -> Any:
    """A matrix in memory as one panel."""
    return _panels(like, [B], Layout((B.shape[0],), B.shape[1], B.blocksize, B.dtype, tasks.device_of(B)))


def _columns_like(A: Any, B: PanelBase) -> Any:
    """A matrix in memory that is to be multiplied by `B`, cut along its columns where B is cut along its rows."""
    layout = B._layout
    sides = layout.sides if layout.axis == 0 else (layout.across,)
    if sum(sides) != A.shape[1]:
        sides = (A.shape[1],)  # the shapes do not fit, which is said later
    _check_rows(bounds_of(sides), A.blocksize[1])
    pieces = [A] if len(sides) == 1 else [A[:, start:stop] for start, stop in bounds_of(sides)]
    return _panels(B, pieces, Layout(sides, A.shape[0], A.blocksize, A.dtype, tasks.device_of(A), axis=1))


def _panels(like: PanelBase, pieces: list[Any], layout: Layout) -> Any:
    name = f"operand-{uuid4().hex}"
    return type(like)._of_tasks(name, layout, lambda key, i: Task(key, tasks.given, pieces[i]))
