"""`PanelArray`: a Dask array whose chunks are `bsr_array`, with what such chunks can do and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NoReturn

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import List, Task, TaskRef
from dask.tokenize import tokenize

from ..._array.base import BsrBase, kind_of
from ..._array.construct import check_blocksize
from ..._backend.base import named
from ..._backend.registry import host_scalar
from ...bsr import bsr_array
from ...dtypes import accumulator_dtype, result_dtype, scalar_result_dtype
from . import tasks
from .base import PanelBase, empty_dense, tree_sum
from .products import matmul
from .tasks import Layout, check_sides, shortened

_WAY_OUT = (
    "A.map_panels(f) applies a function to each panel, A.toarray() is a dense Dask array, and A.compute() a bsr_array"
)


class _WithoutRefused(type):
    """The type of `PanelArray`: editors and the reference do not list what it refuses."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if not isinstance(cls.__dict__.get(name), _Refused)]


class PanelArray(PanelBase, metaclass=_WithoutRefused):
    """A block-sparse matrix in panels: a Dask array whose chunks are `bsr_array`.

    `from_bsr`, `from_delayed` and `from_panels` make one. A matrix is cut into panels of block rows; its transpose is
    cut into panels of block columns.

    It is a ``dask.array.Array``, so that Dask's schedulers, progress bars and ``dask.array.dot`` take it. Methods of
    Dask's arrays that are meant for dense chunks raise an error that says so.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> from bsrgemm.interop import dask as panels
    >>> A = panels.from_bsr(bg.eye(6, blocksize=(2, 2)), rows_per_chunk=4)
    >>> A
    PanelArray(shape=(6, 6), dtype=float64, blocksize=(2, 2), panels=2, device='cpu')
    >>> A.chunks
    ((4, 2), (6,))
    >>> (A @ np.arange(6.0)).compute()
    array([0., 1., 2., 3., 4., 5.])
    >>> (2 * A).sum().compute()
    np.float64(12.0)
    """

    __slots__ = ()
    # NumPy and Dask then leave an operator to this class.
    __array_ufunc__ = None

    # ---------------------------------------------------------------------------------- description
    @property
    def blocksize(self) -> tuple[int, int]:
        """The numbers of rows and columns of a block, (R, C)."""
        return self._layout.blocksize

    @property
    def device(self) -> str:
        """The device of the panels, "cpu" or "cuda": that of the worker which holds a panel."""
        return self._layout.device

    def __repr__(self) -> str:
        layout = self._layout
        return (
            f"PanelArray(shape={layout.shape}, dtype={layout.dtype}, blocksize={layout.blocksize}, "
            f"panels={layout.count}, device={layout.device!r})"
        )

    def _repr_html_(self) -> None:  # Dask's picture says how large the array would be if it were dense
        return None

    def to_dask_array(self) -> da.Array:
        """Return the same chunks as an array of Dask's own class, for code that needs exactly that.

        Returns
        -------
        dask.array.Array
            An array that shares the graph. Its operators are those of Dask, of which most fail for such chunks.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> type(panels.from_bsr(bg.eye(4, blocksize=(2, 2)), 2).to_dask_array()).__name__
        'Array'
        """
        return da.Array(self.dask, self.name, self.chunks, meta=self._meta)

    def toarray(self) -> da.Array:
        """Return a dense Dask array with one chunk for each panel.

        Returns
        -------
        dask.array.Array
            The array, on the device of the panels. Nothing is computed yet.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> panels.from_bsr(bg.eye(4, blocksize=(2, 2)), 2).toarray().mean(axis=0).compute()
        array([0.25, 0.25, 0.25, 0.25])
        """
        layout = self._layout
        name = f"bsr-toarray-{tokenize(self.name)}"
        keys = [layout.key(name, i) for i in range(layout.count)]
        layer = {key: Task(key, tasks.dense, panel) for key, panel in zip(keys, self._refs(), strict=True)}
        graph = HighLevelGraph.from_collections(name, layer, dependencies=[self])
        return da.Array(graph, name, layout.chunks, meta=empty_dense(layout.device, 2, layout.dtype))

    # -------------------------------------------------------------------------------- panel by panel
    def map_panels(self, func: Callable[[Any], Any], *, blocksize: Any = None, dtype: Any = None) -> PanelArray:
        """Apply a function to each panel.

        Parameters
        ----------
        func : callable
            Takes a `bsr_array` and returns one of the same shape, on the same device. It must not change its argument.
        blocksize : (R, C), optional
            The block size of the results, by default that of this matrix.
        dtype : dtype, optional
            The dtype of the results, by default that of this matrix.

        Returns
        -------
        PanelArray
            The results. Computing it raises ValueError if one of them has another shape, block size or dtype than was
            said.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> A = panels.from_bsr(bg.eye(4, blocksize=(2, 2)), 2)
        >>> A.map_panels(lambda panel: panel.power(2) * 3).compute().diagonal()
        array([3., 3., 3., 3.])
        """
        if not callable(func):
            raise TypeError(f"func: wanted a function of a panel, got {named(func)}")
        layout = replace(
            self._layout,
            blocksize=self.blocksize if blocksize is None else check_blocksize(blocksize, self.shape),
            dtype=self.dtype if dtype is None else np.dtype(dtype),
        )
        check_sides(layout.sides, layout.blocksize[layout.axis], "blocksize", layout.axis)
        return self._applied("bsr-map", func, layout)

    def _applied(self, prefix: str, func: Callable[..., Any], layout: Layout, *others: PanelArray) -> PanelArray:
        def task(key: Any, i: int, *panels: Any) -> Task:
            return Task(key, tasks.applied, *panels, func=func, number=i, layout=layout)

        return self._map(prefix, func, layout, task, others)

    def astype(self, dtype: Any) -> PanelArray:
        """Cast the elements.

        Parameters
        ----------
        dtype : dtype
            The new dtype, one that a `bsr_array` may have.

        Returns
        -------
        PanelArray
            The matrix in this dtype.

        Raises
        ------
        TypeError
            If a `bsr_array` cannot have the dtype.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> panels.from_bsr(bg.eye(4, blocksize=(2, 2)), 2).astype("float32").dtype
        dtype('float32')
        """
        dtype = bsr_array((0, 0), dtype=dtype, blocksize=(1, 1)).dtype
        layout = replace(self._layout, dtype=dtype)
        return self._applied("bsr-astype", operator.methodcaller("astype", dtype), layout)

    def to_device(self, device: str) -> PanelArray:
        """Move each panel to a device of the worker that holds it.

        Parameters
        ----------
        device : {"cpu", "cuda"}
            The device; "cuda" is the current CUDA device of the worker, to which dask-cuda gives one card each.

        Returns
        -------
        PanelArray
            The matrix there.

        Raises
        ------
        ValueError
            If there is no device of this name.

        Notes
        -----
        The client needs no GPU. Panels travel between workers through the memory of the hosts.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> panels.from_bsr(bg.eye(4, blocksize=(2, 2)), 2).to_device("cpu").device
        'cpu'
        """
        layout = replace(self._layout, device=device)
        return self._applied("bsr-to-device", operator.methodcaller("to_device", device), layout)

    @property
    def T(self) -> PanelArray:
        """The transpose, cut into panels along the other axis. ``A.T @ X`` reads the panels of A as they are."""
        return self._transposed()

    def transpose(self) -> PanelArray:
        """Return the transpose, like `T`.

        Returns
        -------
        PanelArray
            The transpose, cut into panels along the other axis.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> panels.from_bsr(bg.eye(4, blocksize=(2, 2)), 2).transpose().chunks
        ((4,), (2, 2))
        """
        return self._transposed()

    # ------------------------------------------------------------------------------------- operators
    def __matmul__(self, other: Any) -> Any:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return matmul(other, self)

    def dot(self, other: Any) -> Any:
        """Return the product with another operand, like ``A @ other``.

        Parameters
        ----------
        other : PanelArray, dask.array.Array, bsr_array or array
            The operand on the right, as in `matmul`.

        Returns
        -------
        dask.array.Array or PanelArray
            The product.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> panels.from_bsr(bg.eye(4, blocksize=(2, 2)), 2).dot(np.ones(4)).compute()
        array([1., 1., 1., 1.])
        """
        return matmul(self, other)

    def _scaled(self, number: Any, operation: Callable[[Any, Any], Any], what: str) -> PanelArray:
        if not host_scalar(number):
            raise TypeError(
                f"{what}: wanted a number, got {type(number).__name__}; A @ B is the matrix product, and "
                "element-wise operations with arrays are not served"
            )
        dtype = scalar_result_dtype(self.dtype, number)
        if operation is operator.truediv and dtype.kind in "biu":
            dtype = np.dtype(np.float64)
        return self._applied("bsr-scale", partial(_with_number, operation, number), replace(self._layout, dtype=dtype))

    def __mul__(self, other: Any) -> PanelArray:
        return self._scaled(other, operator.mul, "A * x")

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> PanelArray:
        return self._scaled(other, operator.truediv, "A / x")

    def __neg__(self) -> PanelArray:
        return self._applied("bsr-negative", operator.neg, self._layout)

    def _combined(self, other: Any, operation: Callable[[Any, Any], Any], what: str) -> PanelArray:
        if not isinstance(other, PanelArray):
            way_out = "from_bsr(B, rows_per_chunk) makes one" if isinstance(other, BsrBase) else _WAY_OUT
            raise TypeError(f"{what}: wanted a PanelArray, got {kind_of(other)}; {way_out}")
        one, two = self._layout, other._layout
        same = replace(two, dtype=one.dtype)
        if one != same:
            raise ValueError(
                f"{what}: wanted panels of the same sizes, blocks and device, got {self!r} with sides "
                f"{shortened(one.sides)} and {other!r} with sides {shortened(two.sides)}"
            )
        return self._applied("bsr-add", operation, replace(one, dtype=result_dtype(one.dtype, two.dtype)), other)

    def __add__(self, other: Any) -> PanelArray:
        return self._combined(other, operator.add, "A + B")

    def __sub__(self, other: Any) -> PanelArray:
        return self._combined(other, operator.sub, "A - B")

    # --------------------------------------------------------------------------------------- slices
    def __getitem__(self, index: Any) -> PanelArray:
        """Return rows and columns between block boundaries; panels that are not needed are not computed."""
        layout = self._layout
        both = index if isinstance(index, tuple) else (index, slice(None))
        if len(both) != 2 or not all(isinstance(one, slice) and one.step in (None, 1) for one in both):
            raise TypeError(
                f"index: wanted one or two slices without a step, such as A[r0:r1, c0:c1], got {index!r}; "
                "A.partitions[i] is one panel"
            )
        ranges = []
        for one, side, block, what in zip(both, layout.shape, layout.blocksize, ("rows", "columns"), strict=True):
            start, stop, _ = one.indices(side)
            if start % block or stop % block:
                raise ValueError(
                    f"index: {what} {start}:{stop} do not lie on the block boundaries, multiples of {block}; "
                    f"{start - start % block}:{stop + -stop % block} do"
                )
            ranges.append((start, max(start, stop)))
        first, last = ranges[layout.axis]
        pieces = [(i, max(first, a) - a, min(last, b) - a) for i, (a, b) in enumerate(layout.bounds)]
        pieces = [(i, a, b) for i, a, b in pieces if a < b] or [(0, 0, 0)]
        across = ranges[1 - layout.axis]
        result = replace(layout, sides=tuple(b - a for _, a, b in pieces), across=across[1] - across[0])
        name = f"bsr-getitem-{tokenize(self.name, ranges)}"
        refs = self._refs()

        def task(key: Any, number: int) -> Task:
            i, a, b = pieces[number]
            if (a, b) == (0, layout.sides[i]) and result.across == layout.across:
                return Task(key, tasks.given, refs[i])
            rows, columns = ((a, b), across) if layout.axis == 0 else (across, (a, b))
            return Task(key, tasks.cut, refs[i], rows=rows, columns=columns)

        return self._of_tasks(name, result, task, [self])

    @property
    def partitions(self) -> _Partitions:
        """The panels by their numbers: ``A.partitions[i]`` and ``A.partitions[i:j]`` are matrices of these panels."""
        return _Partitions(self)

    blocks = partitions

    def rechunk(self, chunks: Any) -> PanelArray:
        """Cut the matrix into other panels.

        Parameters
        ----------
        chunks : int, tuple or dict
            The new chunks, as in Dask: for example ``{0: 300}`` for panels of 300 rows. Panels consist of whole blocks,
            and the matrix stays cut along the axis along which it is cut.

        Returns
        -------
        PanelArray
            The same matrix.

        Raises
        ------
        ValueError
            If a panel would begin inside a block, or if the matrix would be cut along both axes.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> panels.from_bsr(bg.eye(8, blocksize=(2, 2)), 2).rechunk({0: 6}).chunks
        ((6, 2), (8,))
        """
        layout = self._layout
        if isinstance(chunks, dict):
            wanted = {axis % 2: sides for axis, sides in chunks.items()}
            chunks = tuple(wanted.get(axis, self.chunks[axis]) for axis in (0, 1))
        if isinstance(chunks, int) and chunks > 0:
            chunks = tuple(chunks if axis == layout.axis else -1 for axis in (0, 1))
        new = da.core.normalize_chunks(chunks, self.shape, dtype=self.dtype, previous_chunks=self.chunks)
        sides, others = new[layout.axis], new[1 - layout.axis]
        if len(others) > 1:
            raise ValueError(
                f"chunks: would cut {self!r} along axis {1 - layout.axis} too, into {len(others)} pieces, and panels "
                f"are cut along axis {layout.axis} only; an operand of dask.array.dot must be one chunk there, "
                "while A @ X takes any that begin on block boundaries"
            )
        check_sides(sides, layout.blocksize[layout.axis], "chunks", layout.axis)
        result = layout.with_sides(sides)
        name = f"bsr-rechunk-{tokenize(self.name, sides)}"
        old, new_bounds, refs = layout.bounds, result.bounds, self._refs()

        def task(key: Any, number: int) -> Task:
            start, stop = new_bounds[number]
            touched = [i for i, (a, b) in enumerate(old) if a < stop and start < b] or [0]
            cuts = [(max(start, a) - a, max(min(stop, b) - a, 0)) for a, b in (old[i] for i in touched)]
            return Task(key, tasks.regrouped, List(*(refs[i] for i in touched)), cuts=cuts, axis=layout.axis)

        return self._of_tasks(name, result, task, [self])

    # ----------------------------------------------------------------------------------------- sums
    def sum(self, axis: int | None = None) -> da.Array:
        """Add up the elements.

        Parameters
        ----------
        axis : {None, 0, 1, -1, -2}
            The axis along which to add; None for the sum of all elements.

        Returns
        -------
        dask.array.Array
            A dense array of one dimension, or of none for axis None. The dtype is that of ``bsr_array.sum``.

        Raises
        ------
        ValueError
            If `axis` is none of these.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> panels.from_bsr(bg.eye(4, blocksize=(2, 2)), 2).sum(axis=0).compute()
        array([1., 1., 1., 1.])
        """
        if axis not in (None, 0, 1, -1, -2):
            raise ValueError(f"axis: wanted None, 0 or 1, got {axis!r}")
        axis = None if axis is None else axis % 2
        layout = self._layout
        dtype = bsr_array(layout.blocksize, dtype=layout.dtype, blocksize=layout.blocksize).sum(axis=axis).dtype
        name = f"bsr-sum-{tokenize(self.name, axis)}"
        apart = axis is not None and axis != layout.axis  # each panel has sums of its own
        inner = dtype if apart or layout.count == 1 else accumulator_dtype(dtype)
        layer: dict[Any, Any] = {}
        parts = []
        for i, panel in enumerate(self._refs()):
            key = (name, i) if apart else (f"{name}-part", i)
            layer[key] = Task(key, tasks.panel_sum, panel, axis=axis, dtype=None if inner == dtype else inner)
            parts.append(TaskRef(key))
        chunks: tuple[tuple[int, ...], ...] = () if axis is None else (layout.chunks[1 - axis],)
        if not apart:
            layer |= tree_sum(name, (name,) if axis is None else (name, 0), parts, (inner, dtype))
        graph = HighLevelGraph.from_collections(name, layer, dependencies=[self])
        return da.Array(graph, name, chunks, meta=empty_dense(layout.device, len(chunks), dtype))

    # ------------------------------------------------------------------------------- what is refused
    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"a PanelArray does not become a NumPy array by itself; {_WAY_OUT}")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.dot and not kwargs:
            return matmul(*args)
        raise TypeError(f"numpy.{func.__name__} does not take a PanelArray; {_WAY_OUT}")

    def __dir__(self) -> list[str]:
        return dir(type(self))

    #: Public names of Dask's arrays that serve these chunks as well.
    _KEPT: ClassVar[frozenset[str]] = frozenset(
        (
            *("chunks", "chunksize", "compute", "dask", "dtype", "itemsize", "map_blocks", "name", "ndim"),
            *("npartitions", "numblocks", "persist", "shape", "size", "to_delayed", "visualize"),
        )
    )


def _with_number(operation: Callable[[Any, Any], Any], number: Any, panel: Any) -> Any:
    return operation(panel, number)


class _Partitions:
    """``A.partitions[i]`` and ``A.partitions[i:j]``."""

    def __init__(self, matrix: PanelArray) -> None:
        self._matrix = matrix

    def __getitem__(self, index: Any) -> PanelArray:
        matrix, layout = self._matrix, self._matrix._layout
        numbers = range(layout.count)
        try:
            chosen = numbers[index] if isinstance(index, slice) else [numbers[operator.index(index)]]
        except (TypeError, IndexError):
            raise IndexError(
                f"partitions: wanted the number of a panel below {layout.count}, or a slice, got {index!r}"
            ) from None
        if not chosen:
            raise IndexError(f"partitions: {index!r} contains none of the {layout.count} panels")
        result = layout.with_sides(tuple(layout.sides[i] for i in chosen))
        name = f"bsr-partitions-{tokenize(matrix.name, list(chosen))}"
        refs = matrix._refs()
        return type(matrix)._of_tasks(name, result, lambda key, i: Task(key, tasks.given, refs[chosen[i]]), [matrix])


class _Refused:
    """A public name of Dask's arrays that a PanelArray does not have."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        raise AttributeError(f"a PanelArray has no {self.name!r}: its chunks are sparse; {_WAY_OUT}")


def _refused_operator(name: str) -> Callable[..., NoReturn]:
    def refused(self: Any, *args: Any) -> NoReturn:
        raise TypeError(f"a PanelArray has no operation {name}: its chunks are sparse; {_WAY_OUT}")

    return refused


def _refuse_the_rest() -> None:
    """Replace what Dask offers for dense chunks by errors: at compute time it would fail with less to say."""
    own = set(vars(PanelArray)) | set(vars(PanelBase))
    compare = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
    operators = (set(dir(int)) | {"__complex__", "__setitem__", "__iter__"}) - set(dir(object)) | compare
    for name in set(dir(da.Array)) - own - PanelArray._KEPT:
        if not name.startswith("_"):
            setattr(PanelArray, name, _Refused(name))
        elif name in operators:
            setattr(PanelArray, name, _refused_operator(name))


_refuse_the_rest()
