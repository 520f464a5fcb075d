"""The sparse formats of the fake device, its backend, and its engines of products and attention."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import scipy.sparse

from bsrgemm._attention import host as attention_host
from bsrgemm._attention.call import AttentionCall, BackwardCall, DecodeCall
from bsrgemm._attention.engine import ENGINES as ATTENTION_ENGINES
from bsrgemm._attention.engine import AttentionEngine
from bsrgemm._attention.kv_cache import APPEND_ENGINES, AppendCall, AppendEngine, HostAppend
from bsrgemm._backend import dlpack, registry, structure
from bsrgemm._backend.base import Backend, Blocks, Csr, PatternFacts
from bsrgemm._backend.index_arrays import watched_class
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import host as products_host
from bsrgemm._products.call import ProductCall
from bsrgemm._products.engine import ENGINES as PRODUCT_ENGINES
from bsrgemm._products.engine import ProductEngine
from bsrgemm.dtypes import DEVICE_DTYPES

from .arrays import _array, _compute, _from_host, _operand, ndarray, xp


# --------------------------------------------------------------------------- the sparse formats
class _spbase:
    """What `sparse.issparse` recognises."""

    __array_priority__ = 101


class sparray:
    """Marks the array flavour."""


class spmatrix:
    """Marks the matrix flavour."""


sparse = types.ModuleType("fake.sparse", "COO, CSR, CSC and DIA as cupyx.scipy.sparse has them.")


def _issparse(x: Any) -> bool:
    return isinstance(x, _spbase)


class _Foreign(_spbase):
    """A scipy matrix on the device: its arrays are fake arrays over its own memory."""

    format: str
    _host_class: type

    def __init__(self, arg1: Any, shape: Any = None, dtype: Any = None, copy: bool = False) -> None:
        if isinstance(arg1, _spbase):
            if self.format == "dia" and not isinstance(arg1, _Foreign):
                raise ValueError("unrecognized form for dia_matrix constructor")
            arg1 = arg1.asformat(self.format)._host
        elif scipy.sparse.issparse(arg1):
            arg1 = arg1.copy()
        elif isinstance(arg1, ndarray):
            arg1 = arg1._memory
        elif isinstance(arg1, tuple) and not all(isinstance(n, int | np.integer) for n in arg1):
            arg1 = tuple(_device_tuple(part) for part in arg1)
        elif not isinstance(arg1, tuple):
            raise TypeError("invalid input format")
        self._host = self._host_class(arg1, shape=shape, dtype=dtype, copy=copy)
        if self.format != "dia" and self._host.dtype not in FakeBackend.foreign_dtypes:
            raise ValueError("Only bool, float32, float64, complex64 and complex128 are supported")

    @classmethod
    def _around(cls, host: Any) -> _Foreign:
        new = object.__new__(_CLASSES[type(host).__name__])
        new._host = host
        return new

    def get(self, stream: Any = None) -> Any:
        return self._host.copy()

    # ------------------------------------------------------------------------------- description
    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    nnz = property(lambda self: self._host.nnz)
    data = property(lambda self: ndarray(self._host.data))
    indices = property(lambda self: ndarray(self._host.indices))
    indptr = property(lambda self: ndarray(self._host.indptr))
    row = property(lambda self: ndarray(self._host.row))
    col = property(lambda self: ndarray(self._host.col))
    offsets = property(lambda self: ndarray(self._host.offsets))
    has_canonical_format = property(lambda self: bool(self._host.has_canonical_format))
    has_sorted_indices = property(lambda self: bool(self._host.has_sorted_indices))

    # ------------------------------------------------------------------------------- conversions
    def asformat(self, format: str | None) -> _Foreign:
        return self if format in (None, self.format) else getattr(self, f"to{format}")()

    def tocsr(self, copy: bool = False) -> _Foreign:
        return self._around(self._host.tocsr(copy=copy))

    def tocsc(self, copy: bool = False) -> _Foreign:
        return self._around(self._host.tocsc(copy=copy))

    def tocoo(self, copy: bool = False) -> _Foreign:
        return self._around(self._host.tocoo(copy=copy))

    def todia(self, copy: bool = False) -> _Foreign:
        if self.format != "dia":
            raise NotImplementedError  # cupyx has no such conversion
        return self

    def tolil(self, copy: bool = False) -> NoReturn:
        raise NotImplementedError  # cupyx has none of these formats

    tobsr = todok = tolil

    def toarray(self, order: Any = None, out: Any = None) -> ndarray:
        return ndarray(np.asarray(self._host.toarray(order=order)))

    def transpose(self, axes: Any = None, copy: bool = False) -> _Foreign:
        return self._around(self._host.transpose(axes, copy=copy))

    T = property(lambda self: self.transpose())

    def copy(self) -> _Foreign:
        return self._around(self._host.copy())

    def astype(self, dtype: Any, copy: bool = True) -> _Foreign:
        return self._around(self._host.astype(dtype, copy=copy))

    # -------------------------------------------------------------------------------- arithmetic
    def multiply(self, other: Any) -> _Foreign:
        if isinstance(other, _spbase):
            other = other.tocsr()._host
        elif isinstance(other, ndarray):
            other = other._memory if other.ndim else other.item()
        else:
            other = _operand(other)
        product = self._host.multiply(other).tocsr()
        if product.dtype not in FakeBackend.foreign_dtypes:
            product = product.astype(np.float64)
        return self._around(product)

    def __mul__(self, other: Any) -> _Foreign:
        if isinstance(self, spmatrix) and np.ndim(other):  # a matrix product there, which no code of ours asks for
            return NotImplemented
        return self.multiply(other)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> _Foreign:
        return self._around(self._host[key])


def _device_tuple(part: Any) -> Any:
    """Device arrays of a constructor's tuple as memory; NumPy arrays and lists are refused."""
    if isinstance(part, tuple | list):
        return tuple(_device_tuple(x) for x in part)
    if not isinstance(part, ndarray):
        raise ValueError("data, indices, and indptr must be 1-D cupy arrays")
    return part._memory


_CLASSES: dict[str, type[_Foreign]] = {}
for _format in ("coo", "csr", "csc", "dia"):
    for _flavour, _mark in (("array", sparray), ("matrix", spmatrix)):
        _name = f"{_format}_{_flavour}"
        _body = {"format": _format, "_host_class": getattr(scipy.sparse, _name), "__module__": __name__}
        _CLASSES[_name] = type(_name, (_Foreign, _mark), _body)
        setattr(sparse, _name, _CLASSES[_name])
sparse.issparse = _issparse  # type: ignore[attr-defined]
sparse.sparray, sparse.spmatrix = sparray, spmatrix  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------- the backend
class Tensor:
    """An array of another library on the fake device, such as torch's on a card; see `FakeBackend.adopt`."""

    def __init__(self, memory: np.ndarray[Any, Any], writable: bool = True) -> None:
        self.memory, self.writable, self.shape = memory, writable, memory.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, 0

    def __dlpack__(self, **options: Any) -> NoReturn:
        raise AssertionError("the backend of the fake device reads these")


class FakeBackend(Backend):
    """A device whose memory is NumPy's; the work that has a code of its own is done by the host's."""

    name = "fake"
    bring = "Bring it to the fake device with from_host."
    dtypes = DEVICE_DTYPES
    foreign_dtypes = tuple(np.dtype(c) for c in "?fdFD")
    array_priority = 101

    @property
    def xp(self) -> types.ModuleType:
        return xp

    @property
    def sparse(self) -> types.ModuleType:
        return sparse

    def bases(self, is_array: bool) -> tuple[type, ...]:
        return (_spbase, sparray if is_array else spmatrix)

    def is_dense(self, x: Any) -> bool:
        return isinstance(x, ndarray)

    def is_sparse(self, x: Any) -> bool:
        return isinstance(x, _spbase)

    def adopt(self, x: Any, writes: bool = False) -> ndarray | None:
        if isinstance(x, Tensor):
            if writes and not x.writable:
                raise dlpack.read_only(x)
            return ndarray(x.memory)
        return x if isinstance(x, ndarray) else None

    def from_host(self, x: np.ndarray[Any, Any]) -> ndarray:
        return _from_host(x)

    def to_host(self, x: Any) -> np.ndarray[Any, Any]:
        _array(x)
        return x.get()

    def address(self, x: Any) -> int:
        return HOST.address(_array(x))

    def device_of(self, x: Any) -> str:
        return f"{self.name}:0"

    def expand(self, indptr: Any, n: int) -> ndarray:
        return ndarray(HOST.expand(_array(indptr), n))

    def segment_reduce(self, op: str, values: Any, order: Any, starts: Any) -> ndarray:
        order = None if order is None else _array(order)
        return ndarray(_compute(HOST.segment_reduce, op, _array(values), order, _array(starts)))

    def _done(self, method: Callable[..., Any], blocks: Blocks, *args: Any) -> Any:
        """What a method of the host makes of blocks, as arrays of the fake device."""
        found = _compute(method, Blocks(*map(_array, blocks)), *args)
        made = map(ndarray, found)
        return Blocks(*made) if isinstance(found, Blocks) else tuple(made)

    def validated(self, blocks: Blocks, block_rows: int, block_cols: int) -> Blocks:
        return blocks

    def transpose(self, blocks: Blocks, block_cols: int, by_column: Any = None) -> Blocks:
        return self._done(HOST.transpose, blocks, block_cols)

    def to_csr(self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Any, Any, Any]:
        return self._done(HOST.to_csr, blocks, block_cols, dtype)

    def to_coo(self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any], copy: bool = False) -> tuple[Any, Any, Any]:
        values = blocks.data.reshape(-1)
        return (values.copy() if copy else values, *self._done(HOST.to_coo, blocks, block_cols, dtype)[1:])

    def inspect(self, indices: Any, indptr: Any) -> PatternFacts:
        return structure.inspect(self, indices, indptr)

    def is_sorted(self, indices: Any, indptr: Any, *, strictly: bool) -> bool:
        return structure.is_sorted(self, indices, indptr, strictly=strictly)

    def combine(self, op: Any, a: Blocks, b: Blocks, block_cols: int, same: bool, zeros: bool = False) -> Blocks:
        return structure.combine(self, op, a, b, block_cols)

    def select_blocks(self, blocks: Blocks, keep: Any) -> Blocks:
        return structure.select_blocks(self, blocks, keep)

    def blocks_of_csr(self, csr: Csr, shape: Any, blocksize: Any, canonical: Callable[[], bool]) -> Blocks | None:
        found = HOST.blocks_of_csr(Csr(*map(_array, csr)), shape, blocksize, canonical)
        return None if found is None else Blocks(*map(ndarray, found))

    def count_blocks(self, csr: Csr, shape: Any, blocksize: Any) -> int:
        return HOST.count_blocks(Csr(*map(_array, csr)), shape, blocksize)

    def put_blocks(self, blocks: Blocks, out: Any) -> None:
        HOST.put_blocks(Blocks(*map(_array, blocks)), _array(out))

    def take_blocks(self, blocks: Blocks, X: Any) -> Any:
        return ndarray(HOST.take_blocks(Blocks(*map(_array, blocks)), _array(X)))

    def by_column(self, indices: Any, indptr: Any, block_cols: int) -> tuple[Any, Any]:
        return structure.by_column(self, indices, block_cols)

    def reduce_lines(self, *args: Any) -> Any:
        return structure.reduce_lines(self, *args)

    def diagonal(self, blocks: Blocks, block_cols: int, k: int, count: int, canonical: bool) -> Any:
        return structure.diagonal(self, blocks, block_cols, k, count, canonical)

    def diagonal_blocks(self, blocks: Blocks, count: int, canonical: bool, turned: bool) -> tuple[Any, Any]:
        return structure.diagonal_blocks(self, blocks, count, turned)

    def set_diagonal(self, blocks: Blocks, block_cols: int, k: int, values: Any, count: int) -> bool:
        return HOST.set_diagonal(Blocks(*map(_array, blocks)), block_cols, k, _array(values), count)


class FakeProducts(ProductEngine):
    """The products of the host on the memory of the fake device; what is generic runs on the fake device itself."""

    def multiply_dense(self, call: ProductCall) -> None:
        arrays = {"matrix": call.matrix.get(), "B": _array(call.B), "out": _array(call.out)}
        _compute(products_host.ENGINE.multiply_dense, replace(call, **arrays))

    def pair_products(
        self, a: Any, ia: Any, b: Any, ib: Any, starts: Any, dtype: np.dtype[Any], rows: int = 0
    ) -> ndarray:
        arrays = (_array(x) for x in (a, ia, b, ib, starts))
        return ndarray(_compute(products_host.ENGINE.pair_products, *arrays, dtype))


class FakeAttention(AttentionEngine):
    """The attention of the host on the memory of the fake device."""

    def forward(self, call: AttentionCall) -> None:
        def on_host(x: Any) -> Any:
            return None if x is None else _array(x)

        arrays = {name: on_host(getattr(call, name)) for name in ("q", "k", "v", "out", "lse")}
        mask = None if call.mask is None else call.mask.get()
        bounds = None if call.bounds is None else tuple(map(on_host, call.bounds))
        scales = tuple(map(on_host, call.scales))
        _compute(attention_host.ENGINE.forward, replace(call, **arrays, mask=mask, bounds=bounds, scales=scales))

    def backward(self, call: BackwardCall) -> NoReturn:
        raise TypeError("attention_backward: wanted arrays on 'cpu', got 'fake'")

    def decode(self, call: DecodeCall) -> NoReturn:
        raise TypeError("cache: wanted one on 'cpu' or 'cuda', got 'fake'")


class FakeAppend(AppendEngine):
    """Appends to a cache as the host does, in the memory of the fake device."""

    def __init__(self) -> None:
        self.capturing = False

    def is_capturing(self) -> bool:
        return self.capturing

    def append(self, call: AppendCall) -> None:
        names = ("k", "v", "to_k", "to_v", "lengths", "refused", "table", "new_table", "takes")
        arrays = {name: getattr(call, name) for name in names}
        on_host = replace(call, **{name: None if x is None else _array(x) for name, x in arrays.items()})
        HostAppend().append(on_host)


def _allocation(x: ndarray) -> int:
    """What the memory of an array is known by: the array of NumPy that owns it."""
    memory: Any = x._memory
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return id(memory)


_installed: FakeBackend | None = None


def install() -> FakeBackend:
    """The one fake backend, registered so that its arrays are recognised."""
    global _installed
    if _installed is None:
        FakeBackend.index_class = watched_class(ndarray, _allocation)
        _installed = FakeBackend()
        registry.register(_installed)
        PRODUCT_ENGINES.register(_installed.name, FakeProducts(_installed))
        ATTENTION_ENGINES.register(_installed.name, FakeAttention(_installed))
        APPEND_ENGINES.register(_installed.name, FakeAppend())
    return _installed
