"""Random BSR matrices and dense operands, their exact dense values, and how far a result may be from those.

Everything is made with NumPy; a `Place` moves it to a backend and brings results back. Structure is drawn by
hypothesis, so that it shrinks; values come from a generator whose seed is drawn.

Values are exact for integers, bool and single floats, and within a bound made of the dtype's eps and of the
absolute values summed otherwise. scipy tells the format, block size and flavour of a result, not its values:
it is wrong in bsr_matrix.sum, nonzero, astype(bool) and setdiag.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm._backend.registry import Backend, by_name, host
from bsrgemm.dtypes import BFLOAT16, BOOL, DEVICE_DTYPES, HALF_DTYPES, result_dtype

from .conftest import BACKENDS

DTYPES = DEVICE_DTYPES
REAL_DTYPES = tuple(d for d in DTYPES if d.kind != "c")
INTEGERS = tuple(d for d in DTYPES if d.kind in "iu")
FLOATS = tuple(d for d in DTYPES if d.kind == "f" or d == BFLOAT16)
COMPLEX = tuple(d for d in DTYPES if d.kind == "c")
INEXACT = FLOATS + COMPLEX
NUMBERS = tuple(d for d in DTYPES if d != BOOL)
FLAVOURS = (bg.bsr_array, bg.bsr_matrix)

#: Numbers of columns of a dense operand: none, one, around warps and tiles.
WIDTHS = (0, 1, 2, 3, 5, 17, 33)


# ------------------------------------------------------------------------------------ exact values
def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Where a reference is computed: float64 or complex128; integers and bool in themselves, exactly."""
    if dtype.kind in "biu":
        return dtype
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def widened(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x.astype(wide(x.dtype))


def magnitude(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """|x| in float64, which also holds the absolute value of the smallest int64."""
    return np.abs(x.astype(np.complex128 if x.dtype.kind == "c" else np.float64))


def eps(dtype: np.dtype[Any]) -> float:
    """Spacing of the dtype's numbers at 1; 0 for integers and bool."""
    return 0.0 if dtype.kind in "biu" else float(ml_dtypes.finfo(dtype).eps)


def smallest(dtype: np.dtype[Any]) -> float:
    """What may get lost near zero: GPU code flushes float32 denormals."""
    if dtype.kind in "biu":
        return 0.0
    return max(float(ml_dtypes.finfo(dtype).smallest_subnormal), float(np.finfo(np.float32).tiny))


def rounding(dtype: np.dtype[Any], weight: np.ndarray[Any, Any], additions: Any) -> Any:
    """Error bound of a sum delivered in `dtype`.

    `weight` is the sum of the absolute values of what is added up, `additions` how many roundings that takes.
    16-bit floats are summed in float32 and rounded once.
    """
    inner = eps(np.dtype(np.float32)) if dtype in HALF_DTYPES else eps(dtype)
    return (additions * inner + eps(dtype)) * weight + smallest(dtype)


def assert_values(actual: np.ndarray[Any, Any], expected: Any, bound: Any = 0.0) -> None:
    """Equal, NaN and infinities included; finite inexact values within `bound`, element by element."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    if actual.dtype.kind in "biu" and expected.dtype.kind in "biu":
        np.testing.assert_array_equal(actual, expected)
        return
    kind = np.complex128 if "c" in (actual.dtype.kind, expected.dtype.kind) else np.float64
    actual, expected = actual.astype(kind), expected.astype(kind)
    finite = np.isfinite(actual) & np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    off = np.abs(np.where(finite, actual, 0) - np.where(finite, expected, 0))
    wrong = ~same & ~(finite & (off <= bound))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.ndim else ()
        limit = np.broadcast_to(bound, wrong.shape)[at]
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.size} values are wrong, first at {at}: "
            f"got {actual[at]!r}, wanted {expected[at]!r} within {limit}"
        )


# ------------------------------------------------------------------------------------------ samples
@dataclass(frozen=True)
class Sample:
    """The arrays of a BSR matrix in NumPy, and what they mean."""

    data: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]
    indptr: np.ndarray[Any, Any]
    shape: tuple[int, int]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.data.dtype

    @property
    def blocksize(self) -> tuple[int, int]:
        return self.data.shape[1:]  # type: ignore[return-value]

    @property
    def block_rows(self) -> np.ndarray[Any, Any]:
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    @property
    def keys(self) -> np.ndarray[Any, Any]:
        """One number per block that orders blocks by row, then column."""
        return self.block_rows * (self.shape[1] // self.blocksize[1] + 1) + self.indices

    @property
    def is_sorted(self) -> bool:
        return bool((np.diff(self.keys) >= 0).all())

    @property
    def is_canonical(self) -> bool:
        return bool((np.diff(self.keys) > 0).all())

    def _spread(self, blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Blocks written into a dense array, those at the same place added up in order."""
        R, C = self.blocksize
        out = np.zeros(self.shape, blocks.dtype)
        for block, i, j in zip(blocks, self.block_rows, self.indices, strict=True):
            out[i * R : (i + 1) * R, j * C : (j + 1) * C] += block
        return out

    @cached_property
    def dense(self) -> np.ndarray[Any, Any]:
        """The values, in float64, complex128 or the dtype itself where that is exact (integers wrap)."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self._spread(widened(self.data))

    @cached_property
    def weight(self) -> np.ndarray[Any, Any]:
        """Sum of the absolute values stored for each element."""
        return self._spread(magnitude(self.data))

    @cached_property
    def layers(self) -> np.ndarray[Any, Any]:
        """How many values are stored for each element."""
        return self._spread(np.ones(self.data.shape, np.int64))

    @property
    def deepest(self) -> int:
        return int(self.layers.max(initial=0))

    @property
    def bound(self) -> np.ndarray[Any, Any]:
        """Error bound of the dense values: none where at most one value is stored."""
        return np.where(self.layers > 1, rounding(self.dtype, self.weight, self.layers), 0.0)

    @property
    def T(self) -> Sample:
        """The transpose, built."""
        order = np.argsort(self.indices, kind="stable")
        bounds = np.arange(self.shape[1] // self.blocksize[1] + 1)
        indptr = np.searchsorted(self.indices[order], bounds).astype(self.indptr.dtype)
        rows = self.block_rows[order].astype(self.indices.dtype)
        return Sample(self.data[order].transpose(0, 2, 1).copy(), rows, indptr, self.shape[::-1])

    def merged(self) -> Sample:
        """The same values, rounded to the dtype, in canonical format."""
        R, C = self.blocksize
        keys = np.unique(self.keys)
        rows, cols = np.divmod(keys, self.shape[1] // C + 1)
        dense = self.dense.astype(self.dtype)
        blocks = [dense[i * R : (i + 1) * R, j * C : (j + 1) * C] for i, j in zip(rows, cols, strict=True)]
        data = np.array(blocks, self.dtype).reshape(-1, R, C)
        indptr = np.searchsorted(rows, np.arange(len(self.indptr))).astype(self.indptr.dtype)
        return Sample(data, cols.astype(self.indices.dtype), indptr, self.shape)

    def scipy(self, flavour: type = bg.bsr_array) -> Any:
        """scipy's own matrix with the same structure, for types and formats; 16-bit floats as float32."""
        data = self.data.astype(np.float32) if self.dtype in HALF_DTYPES else self.data.copy()
        cls = sp.bsr_array if flavour is bg.bsr_array else sp.bsr_matrix
        return cls((data, self.indices.copy(), self.indptr.copy()), shape=self.shape)


@dataclass(frozen=True)
class Operand:
    """A dense array as a view of another one, so that every backend gets the same strides."""

    base: np.ndarray[Any, Any]
    transposed: bool
    key: tuple[slice, ...]

    def view(self, base: Any) -> Any:
        return (base.T if self.transposed else base)[self.key]

    @property
    def values(self) -> np.ndarray[Any, Any]:
        return self.view(self.base)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.base.dtype


# -------------------------------------------------------------------------------------------- places
class Place:
    """A backend found when it is first needed, and the way there and back."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Place({self.name!r})"

    @cached_property
    def backend(self) -> Backend:
        return by_name(self.name)

    @property
    def is_host(self) -> bool:
        return self.backend is host()

    @property
    def is_fake(self) -> bool:
        """Is it the card of tests/fake_cupy?"""
        return not self.is_host and not hasattr(self.xp, "__file__")

    @property
    def xp(self) -> Any:
        return self.backend.xp

    # ------------------------------------------------------------------------------------- there
    def put(self, x: Any) -> Any:
        """A NumPy array, here."""
        return self.backend.from_host(np.asarray(x))

    def operand(self, operand: Operand) -> Any:
        """A dense operand here, with its strides."""
        return operand.view(self.put(operand.base))

    def bsr(self, sample: Sample, flavour: type = bg.bsr_array) -> Any:
        """The sample as one of our matrices, here."""
        arrays = tuple(self.put(x) for x in (sample.data, sample.indices, sample.indptr))
        return flavour(arrays, shape=sample.shape)

    def sparse(self, format: str, S: Any) -> Any:
        """A scipy matrix as this backend's own class of that format and of S's flavour."""
        S = S.asformat(format)
        if self.is_host:
            return S
        cls = getattr(self.backend.sparse, f"{format}_{'array' if isinstance(S, sp.sparray) else 'matrix'}")
        if format == "coo":
            arrays: Any = (self.put(S.data), (self.put(S.row), self.put(S.col)))
        else:
            arrays = tuple(self.put(x) for x in (S.data, S.indices, S.indptr))
        return cls(arrays, shape=S.shape)

    def holds(self, dtype: np.dtype[Any]) -> bool:
        """Do the sparse classes of other formats hold this dtype here?"""
        return dtype in self.backend.foreign_dtypes

    @contextmanager
    def refuses(self, dtype: np.dtype[Any]) -> Iterator[None]:
        """Inside, a result in another format is asked for: a TypeError that names the cast, or fine."""
        if self.holds(dtype):
            yield
        else:
            with pytest.raises(TypeError, match=r"astype\('float(32|64)'\)"):
                yield

    # -------------------------------------------------------------------------------------- back
    def dense(self, x: Any, matrix: bool = False) -> np.ndarray[Any, Any]:
        """A dense result: it must be an array of this backend, np.matrix only for `matrix` on the host."""
        assert self.backend.is_dense(x), f"{type(x)} is not a dense array of {self.name}"
        assert isinstance(x, np.matrix) == (matrix and self.is_host)
        return np.asarray(self.backend.to_host(x))

    def number(self, x: Any) -> np.ndarray[Any, Any]:
        """A single number: NumPy's or Python's on the host, a 0-d array on a device."""
        if self.backend.is_dense(x) and not self.is_host:
            assert x.ndim == 0
            return self.backend.to_host(x)
        assert np.ndim(x) == 0 and isinstance(x, np.generic | int | float | complex | bool)
        return np.asarray(x)

    def blocks(self, A: Any, flavour: type | None = None) -> Sample:
        """One of our matrices, with all that its arrays and flags promise checked."""
        assert isinstance(A, flavour or FLAVOURS) and self.backend.is_sparse(A)
        assert A.format == "bsr" and A.ndim == 2
        for array in (A.data, A.indices, A.indptr):
            assert self.backend.is_dense(array)
        data, indices, indptr = (np.asarray(self.backend.to_host(x)) for x in (A.data, A.indices, A.indptr))
        assert data.ndim == 3 and data.shape[1:] == A.blocksize and data.dtype == A.dtype
        assert A.nnz == data.size
        assert indices.dtype == indptr.dtype and indices.dtype in (np.int32, np.int64)
        (M, N), (R, C) = A.shape, A.blocksize
        assert M % R == 0 and N % C == 0 and indptr.shape == (M // R + 1,)
        assert indptr[0] == 0 and (np.diff(indptr) >= 0).all()
        assert indptr[-1] == len(indices) == len(data)
        assert ((indices >= 0) & (indices < N // C)).all()
        sample = Sample(data, indices, indptr, (M, N))
        assert sample.is_sorted or not A.has_sorted_indices
        assert sample.is_canonical or not A.has_canonical_format
        return sample

    def foreign(self, S: Any, format: str, flavour: type = bg.bsr_array) -> Any:
        """A result in another format, checked and as scipy's matrix."""
        assert self.backend.is_sparse(S) and S.format == format
        mark = "sparray" if flavour is bg.bsr_array else "spmatrix"
        assert isinstance(S, getattr(self.backend.sparse, mark))
        H = S if self.is_host else S.get()
        if hasattr(H, "check_format"):
            H.check_format(full_check=True)
        return H


PLACES = [
    pytest.param(Place(param.values[0]), id=param.id, marks=param.marks)  # type: ignore[arg-type]
    for param in BACKENDS
]
each_place = pytest.mark.parametrize("place", PLACES)


def assert_form(ours: Any, theirs: Any) -> None:
    """The format, block size, shape and flavour of a sparse result are scipy's."""
    assert ours.format == theirs.format
    assert tuple(ours.shape) == tuple(theirs.shape)
    if theirs.format == "bsr":
        assert ours.blocksize == theirs.blocksize
        assert isinstance(ours, bg.bsr_array) == isinstance(theirs, sp.sparray)


@contextmanager
def quietly() -> Iterator[None]:
    """Without NumPy's floating-point warnings and scipy's remarks on efficiency."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


# ---------------------------------------------------------------------------------------- strategies
dtypes = st.sampled_from(DTYPES)
flavours = st.sampled_from(FLAVOURS)
seeds = st.integers(0, 2**20)
blocksizes = st.one_of(
    st.tuples(st.integers(1, 4), st.integers(1, 4)), st.tuples(st.integers(1, 17), st.integers(1, 17))
)
grids = st.tuples(st.integers(0, 6), st.integers(0, 6))


def random_values(
    rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any], spread: str = "small"
) -> np.ndarray[Any, Any]:
    """Random numbers of a dtype.

    "small": few values around 0 that floats hold and sum exactly, so that sums cancel and elements tie;
    "wide": integers over their whole range, so that they wrap, and normally distributed floats;
    "special": "small" with NaN, infinities and negative zeros in between.
    """
    if dtype == BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if spread == "wide":
            return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        return rng.integers(max(limits.min, -3), 4, shape).astype(dtype)
    if dtype.kind == "c":
        parts = (random_values(rng, shape, np.dtype(np.float64), spread) for _ in range(2))
        real, imag = parts
        return (real + 1j * np.where(np.isfinite(imag), imag, 0)).astype(dtype)
    if spread == "wide":
        return rng.standard_normal(shape).astype(dtype)
    x = rng.integers(-3, 4, shape) / 2
    if spread == "special":
        odd = np.array([np.nan, np.inf, -np.inf, -0.0])
        x = np.where(rng.random(shape) < 0.2, odd[rng.integers(0, len(odd), shape)], x)
    return x.astype(dtype)


@st.composite
def samples(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[np.dtype[Any]] = DTYPES,
    grid: tuple[int, int] | None = None,
    blocksize: tuple[int, int] | None = None,
    spreads: Sequence[str] = ("small", "wide"),
    duplicates: bool | None = None,
) -> Sample:
    """A BSR matrix: any block, any pattern, empty rows, unsorted, with duplicates unless told."""
    R, C = blocksize or draw(blocksizes)
    rows, cols = grid or draw(grids)
    dtype = draw(st.sampled_from(dtypes))
    duplicates = draw(st.booleans()) if duplicates is None else duplicates
    places: list[int] = []
    if rows and cols:
        places = draw(st.lists(st.integers(0, rows * cols - 1), max_size=20, unique=not duplicates))
        if not duplicates and draw(st.booleans()):
            places.sort()
    index = draw(st.sampled_from((np.int32, np.int64)))
    block_row, block_col = np.divmod(np.array(places, np.int64), max(cols, 1))
    order = np.argsort(block_row, kind="stable")
    indptr = np.searchsorted(block_row[order], np.arange(rows + 1)).astype(index)
    rng = np.random.default_rng(draw(seeds))
    data = random_values(rng, (len(places), R, C), dtype, draw(st.sampled_from(spreads)))
    data[rng.random(len(places)) < 0.15] = 0  # blocks that are stored and all zero
    return Sample(data, block_col[order].astype(index), indptr, (rows * R, cols * C))


@st.composite
def twins(draw: st.DrawFn, *, spreads: tuple[str, ...] = ("small",), **options: Any) -> tuple[Sample, Sample]:
    """Two matrices of one shape; the block of the second is the same or any that divides."""
    a = draw(samples(spreads=spreads, **options))
    if draw(st.booleans()):
        blocksize = a.blocksize
    else:
        (M, N) = a.shape
        sides = ([k for k in range(1, 18) if n % k == 0] for n in (M, N))
        blocksize = tuple(draw(st.sampled_from(side)) for side in sides)  # type: ignore[assignment]
    grid = (a.shape[0] // blocksize[0], a.shape[1] // blocksize[1])
    b = draw(samples(blocksize=blocksize, grid=grid, spreads=spreads, **options))
    return a, b


@st.composite
def operands(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    *,
    dtypes: Sequence[np.dtype[Any]] = DTYPES,
    spreads: Sequence[str] = ("small", "wide"),
) -> Operand:
    """A dense array of a shape in any layout: C, Fortran, every second or third element, backwards."""
    steps = tuple(draw(st.sampled_from((1, 1, 2, 3, -1, -2))) for _ in shape)
    transposed = draw(st.booleans())
    key = tuple(slice(None, None, step) for step in steps)
    full = tuple(max(n * abs(step) - (abs(step) - 1), 0) for n, step in zip(shape, steps, strict=True))
    rng = np.random.default_rng(draw(seeds))
    dtype = draw(st.sampled_from(dtypes))
    base = random_values(rng, full[::-1] if transposed else full, dtype, draw(st.sampled_from(tuple(spreads))))
    operand = Operand(base, transposed, key)
    assert operand.values.shape == shape
    return operand


@st.composite
def dense_operands(draw: st.DrawFn, length: int, *, first: bool = True, **options: Any) -> Operand:
    """A vector or a matrix with a side of `length` (the first, or else the last) to multiply with."""
    if draw(st.integers(0, 3)) == 0:
        return draw(operands((length,), **options))
    width = draw(st.sampled_from(WIDTHS))
    return draw(operands((length, width) if first else (width, length), **options))


def spreads_for(*dtypes: np.dtype[Any]) -> tuple[str, ...]:
    """Whole-range integers only where their products do not overflow a 16-bit float."""
    integers = any(d.kind in "iu" for d in dtypes)
    return ("small",) if integers and any(d in HALF_DTYPES for d in dtypes) else ("small", "wide")


# ---------------------------------------------------------------------------------------- products
def in_common_dtype(a: Any, b: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    return a.astype(wide(dtype)), b.astype(wide(dtype))


def product_bound(a: Sample, x: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> Any:
    """Error bound of ``a @ x`` in `dtype`: as many additions as a row stores values."""
    if dtype.kind in "biu":
        return 0.0
    additions = int(a.layers.sum(axis=1).max(initial=0)) + 8  # 8: rounding of the factors, complex products
    # Duplicates may be added up in their own dtype first, which has its own error.
    return rounding(dtype, a.weight @ magnitude(x), additions) + a.bound @ magnitude(x)


def check_product(place: Place, result: Any, a: Sample, x: np.ndarray[Any, Any], **kind: bool) -> None:
    dtype = result_dtype(a.dtype, x.dtype)
    assert result.dtype == dtype
    dense, factor = in_common_dtype(a.dense, x, dtype)
    with quietly():
        expected, bound = dense @ factor, product_bound(a, x, dtype)
    assert_values(place.dense(result, **kind), expected, bound)


@st.composite
def products(draw: st.DrawFn, first: bool = True) -> tuple[Sample, Operand]:
    """A matrix and a dense operand of any two dtypes, for A @ B or (not `first`) B @ A."""
    a_dtype, x_dtype = draw(dtypes), draw(dtypes)
    spreads = spreads_for(a_dtype, x_dtype)
    a = draw(samples(dtypes=(a_dtype,), spreads=spreads))
    side = a.shape[1] if first else a.shape[0]
    return a, draw(dense_operands(side, first=first, dtypes=(x_dtype,), spreads=spreads))


__all__ = [
    "COMPLEX",
    "DTYPES",
    "FLAVOURS",
    "FLOATS",
    "INEXACT",
    "INTEGERS",
    "NUMBERS",
    "PLACES",
    "REAL_DTYPES",
    "WIDTHS",
    "Operand",
    "Place",
    "Sample",
    "assert_form",
    "assert_values",
    "blocksizes",
    "check_product",
    "dense_operands",
    "dtypes",
    "each_place",
    "eps",
    "flavours",
    "grids",
    "in_common_dtype",
    "magnitude",
    "operands",
    "product_bound",
    "products",
    "quietly",
    "random_values",
    "result_dtype",
    "rounding",
    "samples",
    "seeds",
    "smallest",
    "spreads_for",
    "wide",
    "widened",
]
