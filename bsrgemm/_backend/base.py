"""The interface that an array module must offer, on the host (NumPy, SciPy) or on the GPU (CuPy, cupyx)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from ..dtypes import BFLOAT16
from . import index_arrays


def public_class(x: Any) -> type:
    """The class of `x`, or the nearest of its bases whose name is not private."""
    found = next(kind for kind in type(x).__mro__ if not kind.__name__.startswith("_"))
    return type(x) if found is object or found.__module__ in ("abc", "typing") else found


def class_of(x: Any) -> str:
    """The class of `x` after the name of its library, such as "numpy ndarray"; a class of Python alone: "list"."""
    kind = public_class(x)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library == "builtins" else f"{library} {kind.__name__}"


def named(x: Any) -> str:
    """`class_of`, with an article before a class of Python: "a list"; None is itself."""
    if x is None:
        return "None"
    name = class_of(x)
    if " " in name:
        return name
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


#: Steps that NumPy may take to find out whether two arrays with strides share memory.
_OVERLAP_WORK: Any = 10_000

#: An array of whichever module the backend uses.
Array = Any


class Blocks(NamedTuple):
    """The three arrays of a BSR matrix: data (blocks, R, C), indices (blocks,) and indptr (block rows + 1,)."""

    data: Any
    indices: Any
    indptr: Any


class Piece(NamedTuple):
    """A matrix to be copied into another one: its blocks, the block column of the other one at which it begins, and the
    number that its `indptr` has for its first block."""

    blocks: Blocks
    left: int
    begin: int = 0


class Csr(NamedTuple):
    """The three arrays of a matrix in CSR: data (elements,), indices (elements,) and indptr (rows + 1,)."""

    data: Any
    indices: Any
    indptr: Any


class PatternFacts(NamedTuple):
    """What tells whether index arrays are valid; see `structure.check_values`."""

    #: The first and the last entry of `indptr`, and whether it falls anywhere.
    start: int
    stop: int
    falls: bool
    #: The least and the largest of the indices; 0 if there are none.
    low: int
    high: int
    #: Whether the indices of each row are in order, and without duplicates; None if that was not looked at.
    in_order: bool | None = None
    canonical: bool | None = None
    #: The entries of the longest row; 0 if that was not looked at.
    longest: int = 0


class ConjugateVectors(NamedTuple):
    """The vectors (n,) of conjugate gradients: the solution, its residual, the direction, and ``q = A @ p``."""

    x: Any
    r: Any
    p: Any
    q: Any


#: Makes the list of blocks by block column, see `Backend.by_column`, when it is needed.
ListMaker = Callable[[], tuple[Any, Any]]


class Backend(ABC):
    """An array module together with the device on which its arrays are stored and processed."""

    #: The name of the device: "cpu" or "cuda".
    name: str
    #: A sentence for error messages that tells the user how to move an array to this backend.
    bring: str
    #: The dtypes that a BSR matrix may have in this backend.
    dtypes: tuple[np.dtype[Any], ...]
    #: The dtypes that the sparse classes of the other formats (CSR, COO, ...) may have in this backend.
    foreign_dtypes: tuple[np.dtype[Any], ...]
    #: Whether work may be recorded in CUDA graphs.
    records = False
    #: The `__array_priority__` of BSR matrices. It is above that of arrays (0 for NumPy), so that the operators of an
    #: array defer to those of the matrix.
    array_priority: float
    #: Compiled loops that are faster than the array module, see `loops.HostLoops`; None where there are none.
    loops: Any = None
    #: The class of index arrays that count writes, see `index_arrays.watched_class`; None where writes are not counted.
    index_class: type[Any] | None = None

    @property
    @abstractmethod
    def xp(self) -> ModuleType:
        """The array module: NumPy, or a module with its interface."""

    @property
    @abstractmethod
    def sparse(self) -> ModuleType:
        """The module of the sparse classes: scipy.sparse or cupyx.scipy.sparse."""

    @abstractmethod
    def bases(self, is_array: bool) -> tuple[type, ...]:
        """Return the base classes by which the library of this backend recognises a sparse array or matrix."""

    def foreign(self, cls: Any, arrays: Any, shape: tuple[int, ...]) -> Any:
        """Return a matrix in CSR, CSC or COO of valid arrays, as its constructor takes them.

        On the GPU it is made without the check of the constructor, which waits, where cupyx can do so.
        """
        return cls(arrays, shape=shape)

    @abstractmethod
    def is_dense(self, x: Any) -> bool:
        """Tell whether `x` is a dense array of this backend's array module."""

    @abstractmethod
    def is_sparse(self, x: Any) -> bool:
        """Tell whether `x` is a sparse array or matrix of this backend, including BSR matrices of this package."""

    @abstractmethod
    def adopt(self, x: Any, writes: bool = False) -> Array | None:
        """Return `x` as an array of this backend without a copy, or None if it is not in this backend's memory.

        `dlpack.Unreadable`, a TypeError, says why an array in this backend's memory cannot be read, `dlpack.ReadOnly`,
        a ValueError, that it `writes` to one which its library does not let others write to.
        """

    @abstractmethod
    def from_host(self, x: np.ndarray[Any, Any]) -> Array:
        """Copy a NumPy array to this backend."""

    @abstractmethod
    def to_host(self, x: Array) -> np.ndarray[Any, Any]:
        """Copy an array of this backend to a NumPy array, after waiting for the work that produces it."""

    @abstractmethod
    def address(self, x: Array) -> int:
        """Return the memory address of the first element of an array."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array in row-major order whose elements are not set."""
        return self.xp.empty(shape, dtype)

    def is_recording(self) -> bool:
        """Tell whether work becomes a part of a CUDA graph that is being captured, instead of being done now."""
        return False

    def recording(self, *operands: Any) -> AbstractContextManager[None]:
        """While a CUDA graph is captured, let it keep what the operands lead to, and what is allocated within."""
        return nullcontext()

    def extent(self, x: Array) -> tuple[int, int]:
        """Return the address of the first byte of an array, and the address after its last byte."""
        start = self.address(x)
        if x.flags.c_contiguous:
            return start, start + x.nbytes
        if not x.size:
            return start, start
        reach = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        return start + low, start + high + x.itemsize

    def overlap(self, x: Array, y: Array) -> bool:
        """Return whether two arrays share a byte. Columns of one array lie between each other and share none."""
        (first, last), (start, stop) = self.extent(x), self.extent(y)
        if start >= last or first >= stop:
            return False
        try:
            return np.shares_memory(self._placed(x), self._placed(y), max_work=_OVERLAP_WORK)
        except np.exceptions.TooHardError:
            return True

    def _placed(self, x: Array) -> np.ndarray[Any, Any]:
        """Return an array of NumPy at the address of `x`, which is on any device: nothing may read it."""
        about = {"shape": x.shape, "strides": x.strides, "typestr": f"|V{x.itemsize}", "data": (self.address(x), True)}
        return np.asarray(SimpleNamespace(__array_interface__=about | {"version": 3}))

    def watched(self, x: Array) -> Array:
        """Return an index array of a matrix as an array that counts writes, where this backend counts them."""
        return x if self.index_class is None else index_arrays.watched(self.index_class, x)

    def own(self, x: Array) -> Array:
        """Return a copy of an index array to which a user may write unseen, where this backend counts writes."""
        return x if self.index_class is None else index_arrays.unshared(self.index_class, x)

    @abstractmethod
    def device_of(self, x: Array) -> Any:
        """Return the value of the property `device` of a matrix with this array."""

    @abstractmethod
    def expand(self, indptr: Array, n: int) -> Array:
        """Return the row of each of `n` entries: ``out[e] = i`` where ``indptr[i] <= e < indptr[i + 1]``."""

    @abstractmethod
    def segment_reduce(self, op: str, values: Array, order: Array | None, starts: Array) -> Array:
        """Reduce segments of rows in a fixed order.

        ``out[s] = op(values[order[k]] for k in starts[s] .. starts[s + 1] - 1)``. The last segment ends at the end of
        `order`. If `order` is None, the rows of `values` are taken as they are stored. No segment may be empty. `op` is
        "add", "maximum", "minimum", "fmax" or "fmin". Booleans are added by logical or; 16-bit floats are summed in
        float32 and rounded once.
        """

    @abstractmethod
    def inspect(self, indices: Array, indptr: Array) -> PatternFacts:
        """Return what tells whether index arrays are valid. Waits for the GPU once."""

    @abstractmethod
    def is_sorted(self, indices: Array, indptr: Array, *, strictly: bool) -> bool:
        """Tell whether the indices of each row are in order; `strictly` also excludes duplicates. Waits for the GPU."""

    @abstractmethod
    def diagonal(self, blocks: Blocks, block_cols: int, k: int, count: int, canonical: bool) -> Array:
        """Return the `count` elements ``A[i, i + k]`` that lie in the matrix; duplicates are added up in order.

        With `canonical` the caller knows that the blocks are in canonical format.
        """

    @abstractmethod
    def diagonal_blocks(self, blocks: Blocks, count: int, canonical: bool, turned: bool) -> tuple[Array, Array]:
        """Return blocks (i, i), transposed if `turned`, and whether each is stored; duplicates are added up."""

    @abstractmethod
    def set_diagonal(self, blocks: Blocks, block_cols: int, k: int, values: Array, count: int) -> bool:
        """Write ``A[i, i + k] = values[i]`` for i below `count`, or one number, into blocks in canonical format.

        False, and nothing is written, if one of these blocks is not stored. Waits for the GPU.
        """

    @abstractmethod
    def combine(
        self, op: Callable[[Any, Any], Any], a: Blocks, b: Blocks, block_cols: int, same: bool, zeros: bool = False
    ) -> Blocks:
        """Return ``op(a, b)`` on the union of two patterns, without blocks in which all elements are zero.

        Both matrices are in canonical format; with `same` the caller knows that they have the same pattern. With
        `zeros` blocks of zeros may stay.
        """

    @abstractmethod
    def select_blocks(self, blocks: Blocks, keep: Array) -> Blocks:
        """Return the blocks for which a vector is not zero. Waits for the GPU."""

    def flatnonzero(self, x: Array) -> Array:
        """Return the places of the elements of an array that are not zero, in order. Waits for the GPU."""
        return self.xp.flatnonzero(x)

    def count_nonzero(self, x: Array) -> int:
        """Return how many elements of an array are not zero. Waits for the GPU."""
        return int(self.xp.count_nonzero(x != 0 if x.dtype == BFLOAT16 else x))

    def stack(self, pieces: Sequence[Piece], dtype: np.dtype[Any], index: np.dtype[Any]) -> Blocks | None:
        """Return copies of matrices one below the other, or None if there is no kernel for it."""
        return None

    @abstractmethod
    def blocks_of_csr(
        self, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int], canonical: Callable[[], bool]
    ) -> Blocks | None:
        """Return a matrix in CSR as blocks in canonical format, or None if there is no code for it.

        Its arrays may say anything until `canonical` is called, which raises ValueError unless they are valid, and
        tells whether rows are in order, without duplicates: on a device it is called unless all blocks are full. Waits
        for the GPU.
        """

    @abstractmethod
    def count_blocks(self, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int]) -> int:
        """Return how many blocks the elements of a valid matrix in CSR are in; on a device it has no duplicates."""

    @abstractmethod
    def put_blocks(self, blocks: Blocks, out: Array) -> None:
        """Write blocks, which have no duplicates, to their places in a dense matrix of any strides."""

    @abstractmethod
    def take_blocks(self, blocks: Blocks, X: Array) -> Array:
        """Return the elements of a dense matrix of any strides at the places of blocks, in the order of `data`."""

    @abstractmethod
    def by_column(self, indices: Array, indptr: Array, block_cols: int) -> tuple[Array, Array]:
        """Return the positions of the blocks sorted by block column, and where each block column begins among them."""

    @abstractmethod
    def reduce_lines(
        self,
        op: str,
        blocks: Blocks,
        by_column: ListMaker | None,
        block_cols: int,
        dtype: np.dtype[Any],
        only_stored: bool = False,
    ) -> Array:
        """Reduce the elements of each row, or of each column if `by_column` makes the list of their blocks.

        `op` is "add", "count" (of elements other than zero), "maximum", "minimum", "fmax" or "fmin", and `dtype` that
        of the result, in which elements are added. Elements that are not stored join an extreme as 0, unless
        `only_stored`. Lines without stored elements are 0.
        """

    def kept(self, known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
        """Return an entry of a dictionary, which is made if it is new, for the current stream of work."""
        if key not in known:
            known[key] = make()
        return known[key]

    def safe_ratio(self, a: Array, b: Array) -> Array:
        """Return ``a / b``, and 0 where b is 0."""
        zero = b == 0
        found: Array = self.xp.where(zero, 0, a / self.xp.where(zero, 1, b))
        return found

    def add_multiple(self, y: Array, factor: Array, x: Array, work: Array) -> None:
        """Compute ``y += factor * x``; `work` is a vector like x that may be written to."""
        y += self.xp.multiply(x, factor, out=work)

    def subtract_multiple(self, y: Array, factor: Array, x: Array, work: Array) -> None:
        """Compute ``y -= factor * x``; `work` is a vector like x that may be written to."""
        y -= self.xp.multiply(x, factor, out=work)

    def multiply_and_add(self, y: Array, factor: Array, x: Array) -> None:
        """Compute ``y = factor * y + x`` in place."""
        y *= factor
        y += x

    def multiply_by_ratio_and_add(self, y: Array, a: Array, b: Array, x: Array) -> None:
        """Compute ``y = a / b * y + x`` in place, with a factor of 0 where b is 0."""
        self.multiply_and_add(y, self.safe_ratio(a, b), x)

    def inner_product(self, u: Array, v: Array, work: Array | None = None) -> Array:
        """Return ``sum(conj(u) * v)`` of two vectors (n,); `work` is a vector like v that may be written to."""
        if u.dtype.kind == "c":
            u = self.xp.conj(u, out=work)
        product = u * v if work is None else self.xp.multiply(u, v, out=work)
        found: Array = product.sum(axis=0)
        return found

    def advance(
        self, vectors: ConjugateVectors, rz: Array, pq: Array, before: Array, numbers: Array, work: Array
    ) -> None:
        """Make the step of conjugate gradients along a direction: ``x += alpha * p``, ``r -= alpha * q``.

        ``alpha = rz / pq``, and 0 if pq is 0. Then ``before = rz`` and ``numbers = (norm(r), pq.real, rz.real)``. The
        numbers rz, pq and before have shape (), and `work` is a vector like x that may be written to.
        """
        x, r, p, q = vectors
        alpha = self.safe_ratio(rz, pq)
        self.add_multiple(x, alpha, p, work)
        self.subtract_multiple(r, alpha, q, work)
        before[...] = rz
        self.xp.sqrt(self.inner_product(r, r).real, out=numbers[0, ...])
        numbers[1], numbers[2] = pq.real, rz.real

    @abstractmethod
    def validated(self, blocks: Blocks, block_rows: int, block_cols: int) -> Blocks:
        """Return the blocks after a check of their index arrays, to which a user may have written.

        The host raises ValueError for invalid indices. On the GPU a check would synchronise, so the blocks are returned
        unchecked and the kernels clamp the indices instead.
        """

    @abstractmethod
    def transpose(self, blocks: Blocks, block_cols: int, by_column: ListMaker | None = None) -> Blocks:
        """Return the blocks of the transposed matrix: each block is transposed, and block columns are sorted.

        On a device `by_column` may know the list of the blocks by block column.
        """

    def transposed_index(self, blocks: Blocks, by_column: tuple[Any, Any]) -> tuple[Array, Array]:
        """Return (indices, indptr) of the transposed matrix, given the list of its blocks by block column."""
        (_, indices, indptr), (order, begins) = blocks, by_column
        rows = self.expand(indptr, len(indices))[order]
        return rows.astype(indices.dtype, copy=False), begins.astype(indptr.dtype, copy=False)

    def turned(self, data: Array, order: Array) -> Array:
        """Return blocks in this order, each of them transposed."""
        return self.xp.ascontiguousarray(data[order].transpose(0, 2, 1))

    @abstractmethod
    def to_csr(self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        """Return (data, indices, indptr) in CSR, with index arrays of `dtype`.

        The result has every element of each stored block. Blocks keep their order within a block row, and duplicates
        are kept. It shares no memory with the blocks.
        """

    @abstractmethod
    def to_coo(
        self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any], copy: bool = False
    ) -> tuple[Array, Array, Array]:
        """Return (data, row, col) of every stored element, in the order of `data`; `dtype` is that of the indices.

        The elements share memory with the blocks, unless `copy`.
        """


Engine = TypeVar("Engine")


class EngineTable(Generic[Engine]):
    """The engines of one family of operations, by the name of the backend.

    Parameters
    ----------
    package : str
        The package that contains the modules.
    **modules : str
        For each backend, the module of `package` whose `ENGINE` serves it. The module is imported when its engine is
        first needed, so that work on the CPU never imports CuPy.
    """

    def __init__(self, package: str, **modules: str) -> None:
        self._package = package
        self._modules = modules
        self._engines: dict[str, Engine] = {}

    def of(self, backend: Backend) -> Engine:
        """Return the engine that works on arrays of this backend."""
        engine = self._engines.get(backend.name)
        return self._load(backend.name) if engine is None else engine

    def register(self, name: str, engine: Engine) -> None:
        """Add the engine for a further backend, by the name of that backend."""
        self._engines[name] = engine

    def _load(self, name: str) -> Engine:
        module: Any = import_module(f"{self._package}.{self._modules[name]}")
        return self._engines.setdefault(name, cast(Engine, module.ENGINE))
