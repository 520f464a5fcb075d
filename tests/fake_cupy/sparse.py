"""COO, CSR, CSC and DIA as cupyx.scipy.sparse has them."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import scipy.sparse

from . import streams
from .arrays import _operand, _placed, ndarray

#: The dtypes that cuSPARSE holds.
DTYPES = tuple(np.dtype(c) for c in "?fdFD")


class _spbase:
    """What `sparse.issparse` recognises."""

    __array_priority__ = 101


class sparray:
    """Marks the array flavour."""


class spmatrix:
    """Marks the matrix flavour."""


def _issparse(x: Any) -> bool:
    return isinstance(x, _spbase)


def _moved(host: Any) -> Any:
    """The same matrix of scipy with its arrays in memory of the card."""
    for name in ("data", "indices", "indptr", "offsets"):
        if name in vars(host):
            setattr(host, name, _placed(getattr(host, name)))
    if "coords" in vars(host):
        host.coords = tuple(map(_placed, host.coords))
    return host


class Foreign(_spbase):
    """A scipy matrix whose arrays lie in memory of the card."""

    format: str
    _host_class: type

    def __init__(self, arg1: Any, shape: Any = None, dtype: Any = None, copy: bool = False) -> None:
        if isinstance(arg1, _spbase):
            if self.format == "dia" and not isinstance(arg1, Foreign):
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
        self._host = _moved(self._host_class(arg1, shape=shape, dtype=dtype, copy=copy))
        if self.format != "dia" and self._host.dtype not in DTYPES:
            raise ValueError("Only bool, float32, float64, complex64 and complex128 are supported")

    @classmethod
    def _around(cls, host: Any) -> Foreign:
        new = object.__new__(CLASSES[type(host).__name__])
        new._host = _moved(host)
        return new

    def get(self, stream: Any = None) -> Any:
        streams.wait("get of a sparse matrix")
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
    def asformat(self, format: str | None) -> Foreign:
        return self if format in (None, self.format) else getattr(self, f"to{format}")()

    def tocsr(self, copy: bool = False) -> Foreign:
        return self._around(self._host.tocsr(copy=copy))

    def tocsc(self, copy: bool = False) -> Foreign:
        return self._around(self._host.tocsc(copy=copy))

    def tocoo(self, copy: bool = False) -> Foreign:
        return self._around(self._host.tocoo(copy=copy))

    def todia(self, copy: bool = False) -> Foreign:
        if self.format != "dia":
            raise NotImplementedError  # cupyx has no such conversion
        return self

    def tolil(self, copy: bool = False) -> NoReturn:
        raise NotImplementedError  # cupyx has none of these formats

    tobsr = todok = tolil

    def toarray(self, order: Any = None, out: Any = None) -> ndarray:
        return ndarray(np.asarray(self._host.toarray(order=order)))

    def transpose(self, axes: Any = None, copy: bool = False) -> Foreign:
        return self._around(self._host.transpose(axes, copy=copy))

    T = property(lambda self: self.transpose())

    def copy(self) -> Foreign:
        return self._around(self._host.copy())

    def astype(self, dtype: Any, copy: bool = True) -> Foreign:
        return self._around(self._host.astype(dtype, copy=copy))

    # -------------------------------------------------------------------------------- arithmetic
    def multiply(self, other: Any) -> Foreign:
        if isinstance(other, _spbase):
            other = other.tocsr()._host
        elif isinstance(other, ndarray):
            other = other._memory if other.ndim else other.item()
        else:
            other = _operand(other)
        product = self._host.multiply(other).tocsr()
        if product.dtype not in DTYPES:
            product = product.astype(np.float64)
        return self._around(product)

    def __mul__(self, other: Any) -> Foreign:
        if isinstance(self, spmatrix) and np.ndim(other):  # a matrix product there, which no code of ours asks for
            return NotImplemented
        return self.multiply(other)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> Foreign:
        return self._around(self._host[key])


def _device_tuple(part: Any) -> Any:
    """Device arrays of a constructor's tuple as memory; NumPy arrays and lists are refused."""
    if isinstance(part, tuple | list):
        return tuple(_device_tuple(x) for x in part)
    if not isinstance(part, ndarray):
        raise ValueError("data, indices, and indptr must be 1-D cupy arrays")
    return part._memory


CLASSES: dict[str, type[Foreign]] = {}
for _format in ("coo", "csr", "csc", "dia"):
    for _flavour, _mark in (("array", sparray), ("matrix", spmatrix)):
        _name = f"{_format}_{_flavour}"
        _body = {"format": _format, "_host_class": getattr(scipy.sparse, _name), "__module__": "cupyx.scipy.sparse"}
        CLASSES[_name] = type(_name, (Foreign, _mark), _body)
#: What `cupyx.scipy.sparse` has, by its names.
OFFERED: dict[str, Any] = {**CLASSES, "issparse": _issparse, "sparray": sparray, "spmatrix": spmatrix}
