"""The GPU backend: CuPy arrays, the sparse classes of cupyx, and a few array primitives as kernels of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import cupy
import cupyx.scipy.sparse
import numpy as np
from cupyx.scipy.sparse import _base as cupyx_base

from .._kernels import graphs, jit, workspace
from .._kernels.launch import contiguous, run
from ..dtypes import DEVICE_DTYPES
from . import device_arrays, dlpack, structure
from .array_kernels import VECTOR_DTYPES, VECTOR_STEPS, segment, vector_step
from .base import Array, Backend, Blocks, ConjugateVectors, Csr, ListMaker, PatternFacts, Piece
from .index_arrays import plain_array, watched_class
from .recording import arrays_of

#: A null pointer tells the kernel of `segment_reduce` to take the rows in the order in which they are stored.
_NO_ORDER = np.uintp(0)
#: What DLPack calls no stream: the library of an array lets nothing wait for its work.
_NO_STREAM = -1
#: What a solver does with its vectors and factors in each iteration, in one launch each.
_SAFE_RATIO = cupy.ElementwiseKernel("T a, T b", "T c", "c = b == T(0) ? T(0) : a / b", "bsrgemm_safe_ratio")
_ADD_MULTIPLE = cupy.ElementwiseKernel("F f, X x", "Y y", "y += Y(f) * Y(x)", "bsrgemm_add_multiple")
_SUBTRACT_MULTIPLE = cupy.ElementwiseKernel("F f, X x", "Y y", "y -= Y(f) * Y(x)", "bsrgemm_subtract_multiple")
_MULTIPLY_AND_ADD = cupy.ElementwiseKernel("F f, X x", "Y y", "y = Y(f) * y + Y(x)", "bsrgemm_multiply_and_add")


def _allocation(x: Array) -> tuple[int, int] | None:
    """Return the device and the address of the allocation that holds an array; None for an empty array."""
    memory = x.data.mem
    return (memory.device_id, memory.ptr) if memory.ptr else None


def _check_real(y: Array, factor: Array, x: Array) -> None:
    """Raise TypeError where a sum would lose imaginary parts, as NumPy does; the kernels would not compile."""
    if y.dtype.kind != "c" and "c" in (factor.dtype.kind, x.dtype.kind):
        raise TypeError(f"A, M: wanted products of real numbers for real vectors, got {x.dtype} for {y.dtype}")


class VectorCall(NamedTuple):
    """The arrays of a launch of `vector_steps`, by the names that they have there; None where it has none."""

    operation: str
    u: Array
    v: Array
    x: Array = None
    p: Array = None
    a: Array = None
    b: Array = None
    sum: Array = None
    numbers: Array = None

    def supported(self) -> bool:
        """Whether there is a kernel for these arrays; it takes what lies together, at multiples of its elements."""
        dtype, shape = self.u.dtype, self.u.shape
        if len(shape) != 1 or dtype not in VECTOR_DTYPES or self.v.dtype not in VECTOR_DTYPES[dtype]:
            return False
        vectors = (self.u, self.v) if self.x is None else (self.u, self.v, self.x, self.p)
        factors = [x for x in (self.a, self.b, self.sum) if x is not None]
        if self.x is not None and self.v.dtype != dtype:
            return False
        return (
            all(x.shape == shape and x.flags.c_contiguous and not x.data.ptr % x.itemsize for x in vectors)
            and all(x.dtype == dtype for x in (*vectors[2:], *factors))
            and all(x.shape == () for x in factors)
        )


def launch_vector_step(call: VectorCall) -> None:
    """Launch `vector_steps` with arrays that it supports."""
    dtype, n = call.u.dtype, call.u.size
    config = vector_step(call.operation, dtype, call.v.dtype)
    grid = config.grid(n)
    places = {name: 0 if x is None else x.data.ptr for name, x in call._asdict().items() if name != "operation"}
    pack = config.pack_bytes // dtype.itemsize
    misplaced = (places["u"] | places["x"] | places["p"]) % config.pack_bytes
    aligned = not misplaced and not places["v"] % (pack * call.v.itemsize)
    _memory, partial, arrived = None, 0, 0
    if config.has_sum:
        _memory, partial, arrived = workspace.scratch(grid[0] * dtype.itemsize, 1)  # held until the launch returns
    packed = VECTOR_STEPS.pack(**places, partial=partial, arrived=arrived, n=n, aligned=aligned)
    run(config, grid, (jit.argument(packed),), uses=call[1:])


class CupyBackend(Backend):
    """The backend for arrays in the memory of a GPU."""

    name = "cuda"
    bring = "Bring it to the GPU with cupy.asarray(x), or the matrix to the CPU with A.get()."
    dtypes = DEVICE_DTYPES
    foreign_dtypes = tuple(np.dtype(c) for c in "?fdFD")
    array_priority = 101
    records = True
    index_class = watched_class(cupy.ndarray, _allocation)
    is_recording = staticmethod(graphs.is_capturing)
    #: The class itself makes arrays: the function `cupy.empty` does no more and takes the host 0.5 us longer.
    empty = cupy.ndarray

    @property
    def xp(self) -> ModuleType:
        return cupy

    def recording(self, *operands: Any) -> AbstractContextManager[None]:
        return graphs.memory(*arrays_of(self, operands)) if graphs.is_capturing() else nullcontext()

    @property
    def sparse(self) -> ModuleType:
        return cupyx.scipy.sparse

    def bases(self, is_array: bool) -> tuple[type, ...]:
        return (cupyx_base._spbase, cupyx_base.sparray if is_array else cupyx_base.spmatrix)

    def foreign(self, cls: Any, arrays: Any, shape: tuple[int, ...]) -> Any:
        unchecked = getattr(cls, "_from_parts", None)
        parts = arrays if len(arrays) == 3 else (arrays[0], *arrays[1])
        narrowed = not issubclass(cls, cupyx_base.sparray) and parts[-1].dtype == np.int64
        if unchecked is None or narrowed:
            return cls(arrays, shape=shape)
        if len(shape) == 1:  # a vector is kept as a row
            parts = (parts[0], cupy.zeros_like(parts[1]), parts[1])
        return unchecked(*parts, shape=shape)

    def is_dense(self, x: Any) -> bool:
        return isinstance(x, cupy.ndarray)

    def is_sparse(self, x: Any) -> bool:
        return isinstance(x, cupyx_base._spbase)

    def adopt(self, x: Any, writes: bool = False) -> Array | None:
        if isinstance(x, cupy.ndarray):
            return x
        kind = dlpack.device_kind(x)
        if kind in dlpack.ON_DEVICE:  # before the interface, which has no type for bfloat16 and no order of streams
            stream = _NO_STREAM if graphs.is_capturing() else None  # a replay has its own order
            return dlpack.read(x, cupy.from_dlpack, writes=writes, stream=stream)
        interface = None if kind in dlpack.ON_HOST else dlpack.cuda_interface(x)
        if interface is None:
            return None
        try:
            array = cupy.asarray(x)
        except dlpack.REFUSALS as error:
            dlpack.raise_if_cuda(error)
            raise dlpack.unreadable(x, error) from error
        if writes and interface["data"][1]:
            raise dlpack.read_only(x)
        return array

    def from_host(self, x: np.ndarray[Any, Any]) -> Array:
        if graphs.is_capturing():
            raise RuntimeError(
                f"numbers on the host of shape {np.shape(x)} cannot be brought to the GPU while a CUDA graph is "
                "captured; make an array of them on the GPU before, such as cupy.asarray([0, 5, 9]), and pass that"
            )
        return cupy.asarray(x)

    def to_host(self, x: Array) -> np.ndarray[Any, Any]:
        return x.get(order="A")

    def address(self, x: Array) -> int:
        return plain_array(x).data.ptr

    def device_of(self, x: Array) -> Any:
        return x.device

    def expand(self, indptr: Array, n: int) -> Array:
        return device_arrays.expand(indptr, n)

    def segment_reduce(self, op: str, values: Array, order: Array | None, starts: Array) -> Array:
        rows, segments = len(values), len(starts)
        width = int(np.prod(values.shape[1:]))
        out = cupy.empty((segments, *values.shape[1:]), values.dtype)
        if not out.size:
            return out
        entries = rows if order is None else len(order)
        config = segment(values.dtype, op, entries // segments, width)
        args = (
            contiguous(values),
            _NO_ORDER if order is None else contiguous(order.astype(np.int64, copy=False)),
            contiguous(starts.astype(np.int64, copy=False)),
            out,
            *(np.int64(v) for v in (segments, entries, rows, width)),
        )
        run(config, config.grid(segments), args)
        return out

    def inspect(self, indices: Array, indptr: Array) -> PatternFacts:
        return device_arrays.inspect(indices, indptr)

    def is_sorted(self, indices: Array, indptr: Array, *, strictly: bool) -> bool:
        facts = device_arrays.inspect(indices, indptr)
        return bool(facts.canonical if strictly else facts.in_order)

    def diagonal(self, blocks: Blocks, block_cols: int, k: int, count: int, canonical: bool) -> Array:
        return device_arrays.diagonal(blocks, k, count, canonical)

    def diagonal_blocks(self, blocks: Blocks, count: int, canonical: bool, turned: bool) -> tuple[Array, Array]:
        return device_arrays.diagonal_blocks(blocks, count, canonical, turned)

    def set_diagonal(self, blocks: Blocks, block_cols: int, k: int, values: Array, count: int) -> bool:
        return device_arrays.set_diagonal(blocks, k, values, count)

    def combine(
        self, op: Callable[[Any, Any], Any], a: Blocks, b: Blocks, block_cols: int, same: bool, zeros: bool = False
    ) -> Blocks:
        found = device_arrays.combine(op.__name__.removeprefix("cupy_"), a, b, same, zeros)
        return structure.combine(self, op, a, b, block_cols) if found is None else found

    def select_blocks(self, blocks: Blocks, keep: Array) -> Blocks:
        return device_arrays.select_blocks(blocks, keep)

    def flatnonzero(self, x: Array) -> Array:
        return device_arrays.flatnonzero(x)

    def count_nonzero(self, x: Array) -> int:
        return device_arrays.count_nonzero(x)

    def stack(self, pieces: Sequence[Piece], dtype: np.dtype[Any], index: np.dtype[Any]) -> Blocks | None:
        return device_arrays.stack(pieces, dtype, index)

    def blocks_of_csr(
        self, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int], canonical: Callable[[], bool]
    ) -> Blocks | None:
        return device_arrays.blocks_of_csr(csr, shape, blocksize, canonical)

    def count_blocks(self, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int]) -> int:
        return device_arrays.count_blocks(csr, shape, blocksize)

    def put_blocks(self, blocks: Blocks, out: Array) -> None:
        if device_arrays.at_elements(out):
            device_arrays.put_blocks(blocks, out)
        else:
            structure.add_to_dense(self, blocks, out)

    def take_blocks(self, blocks: Blocks, X: Array) -> Array:
        return device_arrays.take_blocks(blocks, X if device_arrays.at_elements(X) else X.copy())

    def by_column(self, indices: Array, indptr: Array, block_cols: int) -> tuple[Array, Array]:
        order, begins = structure.by_column(self, indices, block_cols)
        return order.astype(indices.dtype, copy=False), begins.astype(indices.dtype, copy=False)

    def reduce_lines(
        self,
        op: str,
        blocks: Blocks,
        by_column: ListMaker | None,
        block_cols: int,
        dtype: np.dtype[Any],
        only_stored: bool = False,
    ) -> Array:
        return device_arrays.reduce_lines(op, blocks, by_column, block_cols, dtype, only_stored)

    def kept(self, known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
        return workspace.kept_in(known, key, make).get()

    def safe_ratio(self, a: Array, b: Array) -> Array:
        return _SAFE_RATIO(a, b) if a.dtype == b.dtype else super().safe_ratio(a, b)

    def add_multiple(self, y: Array, factor: Array, x: Array, work: Array) -> None:
        _check_real(y, factor, x)
        _ADD_MULTIPLE(factor, x, y)

    def subtract_multiple(self, y: Array, factor: Array, x: Array, work: Array) -> None:
        _check_real(y, factor, x)
        _SUBTRACT_MULTIPLE(factor, x, y)

    def multiply_and_add(self, y: Array, factor: Array, x: Array) -> None:
        _check_real(y, factor, x)
        _MULTIPLY_AND_ADD(factor, x, y)

    def multiply_by_ratio_and_add(self, y: Array, a: Array, b: Array, x: Array) -> None:
        call = VectorCall("kDirection", y, x, a=a, b=b)
        if not call.supported():
            super().multiply_by_ratio_and_add(y, a, b, x)
        elif y.size:
            launch_vector_step(call)

    def inner_product(self, u: Array, v: Array, work: Array | None = None) -> Array:
        call = VectorCall("kInnerProduct", u, v)
        if not call.supported():
            return super().inner_product(u, v, work)
        out = cupy.empty((), u.dtype)
        launch_vector_step(call._replace(sum=out))
        return out

    def advance(
        self, vectors: ConjugateVectors, rz: Array, pq: Array, before: Array, numbers: Array, work: Array
    ) -> None:
        x, r, p, q = vectors
        call = VectorCall("kAdvance", r, q, x, p, rz, pq, before, numbers)
        if not call.supported():
            super().advance(vectors, rz, pq, before, numbers, work)
        else:
            launch_vector_step(call)

    def validated(self, blocks: Blocks, block_rows: int, block_cols: int) -> Blocks:
        return blocks  # reading the values would wait for the GPU; the kernels clamp indices instead

    def transpose(self, blocks: Blocks, block_cols: int, by_column: ListMaker | None = None) -> Blocks:
        lists = self.by_column(*blocks[1:], block_cols) if by_column is None else by_column()
        return Blocks(self.turned(blocks.data, lists[0]), *self.transposed_index(blocks, lists))

    def turned(self, data: Array, order: Array) -> Array:
        return device_arrays.turned(data, order)

    def to_csr(self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        return device_arrays.to_csr(blocks, block_cols, dtype)

    def to_coo(
        self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any], copy: bool = False
    ) -> tuple[Array, Array, Array]:
        return device_arrays.to_coo(blocks, block_cols, dtype, copy)
