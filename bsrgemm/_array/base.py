"""The base class of BSR matrices: operands, description and order, without products and conversions."""

from __future__ import annotations

import operator
from typing import Any, ClassVar, Self

import numpy as np

from .._backend import structure
from .._backend.base import Array, Blocks, class_of, public_class
from .._backend.registry import adopted, backend_of, elsewhere, foreign_backend, host, host_scalar
from .._plotting import Pattern, draw_matrix
from ..dtypes import BFLOAT16, check_dtype, result_dtype
from .arrays import BlockArrays

INT64_MAX = np.iinfo(np.int64).max
_OUR_NAMES = ("bsr_array", "bsr_matrix")
#: The attributes that define a matrix and are pickled. Data cached for kernels and references to transposes are not.
_STATE = frozenset(
    (*Blocks._fields, "_shape", "maxprint", "_has_sorted_indices", "_has_canonical_format", "_canonical_indices")
)


def kind_of(x: Any) -> str:
    """The class of an operand, for a message; that of another library that has a name of ours with its library."""
    name = public_class(x).__name__
    return class_of(x) if name in _OUR_NAMES and not isinstance(x, BsrBase) else name


def no_bsr(x: Any, name: str) -> str:
    """The class of an operand that is no BSR matrix, and how to make one of it, as the end of a message."""
    made = getattr(x, "ndim", None) == 2 or isinstance(x, list)
    return f"{kind_of(x)}; bsrgemm.bsr_array({name}) makes one" if made else kind_of(x)


class BsrBase(BlockArrays):
    """The base class of all BSR matrices: what describes them, and the order of their blocks."""

    _is_array: ClassVar[bool]
    #: The name of the format, as scipy has it: always "bsr".
    format = "bsr"
    #: The number of dimensions, which is always 2.
    ndim = 2
    __hash__ = None  # type: ignore[assignment]

    # ---------------------------------------------------------------------------------- operands
    def _is_scalar(self, x: Any) -> bool:
        return x.ndim == 0 if self._backend.is_dense(x) else host_scalar(x)

    def _operand(self, other: Any, what: str = "other") -> Any:
        """Return `other` as a dense array or sparse matrix of this backend, or None if it is neither.

        An operand of another backend raises a TypeError whose message says how to move it.
        """
        if self._backend.is_dense(other):
            return other
        backend = backend_of(other)
        if backend is self._backend:
            return other
        if backend is None:
            backend = foreign_backend(other)
            if backend is self._backend:
                return adopted(backend, other, what)
            if backend is None:
                if self._backend is not host() and not isinstance(other, list | tuple):
                    return None
                if getattr(other, "__array_ufunc__", other) is None:  # NumPy's sign that operators are left to `other`
                    return None
                array = np.asanyarray(other)
                if array.ndim == 0 and array.dtype == np.object_:
                    return None
                if self._backend is host():
                    return array
        raise elsewhere(other, what, self._backend)

    def _promoted(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Cast two arrays to their common dtype if one is bfloat16; NumPy promotes all other dtypes by itself."""
        if BFLOAT16 in (a.dtype, b.dtype) and a.dtype != b.dtype:
            dtype = result_dtype(a.dtype, b.dtype)
            return a.astype(dtype), b.astype(dtype)
        return a, b

    # ----------------------------------------------------------------------------- description
    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements. Setting it reinterprets the bytes of `data`, as in scipy."""
        return self._source()[0].data.dtype if self._origin is not None else self.data.dtype

    @dtype.setter
    def dtype(self, newtype: Any) -> None:
        new = check_dtype(newtype, self._backend.dtypes)
        row = self.blocksize[1] * self.dtype.itemsize
        if row % new.itemsize:
            raise ValueError(f"dtype: rows of a block have {row} bytes, no multiple of the size of {new}")
        self.data = self.data.view(new)

    @property
    def nnz(self) -> int:
        """The number of stored elements. Every element of a stored block counts, even if it is zero."""
        return self._getnnz()

    size = nnz

    def _getnnz(self, axis: int | None = None) -> int:
        if axis is not None:
            raise NotImplementedError("getnnz over an axis is not implemented for BSR format")
        R, C = self.blocksize
        return len(self._source()[0].indices) * R * C

    @property
    def density(self) -> float:
        """The number of stored elements divided by the number of all elements; 0 if the matrix has no elements."""
        M, N = self._shape
        return self.nnz / (M * N) if M and N else 0.0

    @property
    def device(self) -> Any:
        """The device of the data: "cpu" or a `cupy.cuda.Device`."""
        return self._backend.device_of(self._source()[0].data)

    def spy(self, ax: Any = None, *, histogram: bool = True) -> Any:
        """Draw which blocks are stored, and how many there are in each block row, with matplotlib.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            The axes to draw the pattern on, without a histogram. By default a new figure is made.
        histogram : bool
            In a new figure, also draw how many block rows have each number of blocks, beside the pattern.

        Returns
        -------
        matplotlib.axes.Axes, or two of them
            The axes of the pattern, or ``(pattern, histogram)`` if a histogram was drawn.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If `ax` is not a matplotlib.axes.Axes.

        Notes
        -----
        A pattern of at most 64 x 64 blocks is drawn as rectangles, a larger one as an image. If there are more blocks
        than pixels, a cell of the image represents several blocks: it is as dark as the share of them that is stored,
        and it is white only if none is. Stored blocks of zeros are drawn. A block that is stored several times is drawn
        once, but each time counts in the histogram, in the number of blocks and in the density.

        If the matrix is on the GPU, `indptr` and `indices` are copied to the host but the values are not; this waits
        for the GPU. For a transpose the arrays of the original matrix are read.

        Examples
        --------
        >>> import bsrgemm as bg, numpy as np
        >>> import matplotlib.pyplot as plt
        >>> A = bg.bsr_array((np.ones((3, 4, 4)), ([0, 1, 1], [2, 0, 1])), shape=(12, 12))
        >>> pattern, rows = A.spy()
        >>> print(pattern.get_title())
        12 x 12, blocks 4 x 4
        3 blocks, density 0.333
        >>> [int(bar.get_height()) for bar in rows.patches]  # block rows with 0, 1 and 2 blocks
        [1, 1, 1]
        >>> plt.close(pattern.figure)
        """
        row, col = self._places()
        pattern = Pattern(self._shape, self.blocksize, row, col)
        return draw_matrix(pattern, ax, histogram)

    def _places(self) -> tuple[Any, Any]:
        """Return the block row and block column of every stored block, on the host; a transpose is not built for it."""
        stored, transposed = self._source()
        structure.check_arrays(*stored._blocks, stored._shape)
        indices, indptr = (stored._backend.to_host(x) for x in (stored.indices, stored.indptr))  # synchronize!
        count = structure.check_values(host(), indices, indptr, stored._block_shape[1])
        row, col = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)), indices[:count].astype(np.int64, copy=False)
        return (col, row) if transposed else (row, col)

    def __repr__(self) -> str:
        kind = "array" if self._is_array else "matrix"
        R, C = self.blocksize
        return (
            f"<Block Sparse Row sparse {kind} of dtype '{self.dtype}'\n"
            f"\twith {self.nnz} stored elements (blocksize={R}x{C}) and shape {self._shape}>"
        )

    def __str__(self) -> str:
        if not self.nnz:
            return repr(self)
        half = self.maxprint // 2
        if self.nnz <= self.maxprint:
            body = self._printed(0, self.nnz)
        else:
            last = self._printed(self.nnz - (self.maxprint - half), self.nnz)
            body = f"{self._printed(0, half)}\n  :\t:\n{last}"
        return f"{self!r}\n  Coords\tValues\n{body}"

    def _printed(self, first: int, last: int) -> str:
        """Return one line for each of some stored elements: where it is, and its value."""
        R, C = self.blocksize
        blocks = slice(first // (R * C), -(-last // (R * C)))
        some = (self.data[blocks], self.indices[blocks], self.indptr)
        data, indices, indptr = (self._backend.to_host(x) for x in some)  # synchronize!
        rows = np.searchsorted(indptr, np.arange(blocks.start, blocks.stop), side="right") - 1
        lines = []
        for place in range(first, last):
            block, within = divmod(place - blocks.start * R * C, R * C)
            i, j = divmod(within, C)
            lines.append(f"  {(int(rows[block]) * R + i, int(indices[block]) * C + j)}\t{data[block, i, j]}")
        return "\n".join(lines)

    def __bool__(self) -> bool:
        if self._shape == (1, 1):
            return self.nnz != 0
        raise ValueError("The truth value of an array with more than one element is ambiguous. Use a.any() or a.all().")

    def __len__(self) -> int:
        raise TypeError("sparse array length is ambiguous; use shape[0] or nnz")

    def __getstate__(self) -> dict[str, Any]:
        self._build()
        self._hand_out()
        return {name: value for name, value in self.__dict__.items() if name in _STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # -------------------------------------------------------------------------------- order
    @property
    def has_sorted_indices(self) -> bool:
        """Whether the block columns of each block row are in order.

        If this is not known yet, reading the property checks the indices, which waits for the GPU; the answer is kept.
        """
        if self._has_sorted_indices is None and self._known_canonical:
            self._has_sorted_indices = True
        if self._has_sorted_indices is None:
            _, indices, indptr = self._blocks
            self._has_sorted_indices = self._backend.is_sorted(indices, indptr, strictly=False)
        return self._has_sorted_indices

    @has_sorted_indices.setter
    def has_sorted_indices(self, value: bool) -> None:
        self._has_sorted_indices = bool(value)

    @property
    def has_canonical_format(self) -> bool:
        """Whether the indices are sorted and without duplicates.

        If this is not known yet, reading the property checks the indices, which waits for the GPU; the answer is kept.
        """
        if self._has_sorted_indices is False:
            self._has_canonical_format = False
        elif self._has_canonical_format is None:
            _, indices, indptr = self._blocks
            canonical = self._known_canonical or self._backend.is_sorted(indices, indptr, strictly=True)
            self.has_canonical_format = canonical
        return bool(self._has_canonical_format)

    @has_canonical_format.setter
    def has_canonical_format(self, value: bool) -> None:
        self._has_canonical_format = bool(value)
        if value:
            self._has_sorted_indices = True
            self._note_canonical()

    def sort_indices(self) -> None:
        """Sort the blocks of each block row by block column, in place; duplicates keep their order.

        Notes
        -----
        Does nothing if the indices are known to be sorted. Otherwise the call waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array((np.ones((2, 1, 1)), [1, 0], [0, 2]), shape=(1, 2))
        >>> A.sort_indices()
        >>> A.indices.tolist()
        [0, 1]
        """
        if not self.has_sorted_indices:
            self._hand_out()
            self._replace(structure.sort_blocks(self._backend, self._blocks, self._block_shape[1]))
            self._has_sorted_indices = True

    def sorted_indices(self) -> Self:
        """Return a copy in which the blocks of each block row are sorted by block column.

        Returns
        -------
        bsr_array or bsr_matrix

        Notes
        -----
        On the GPU the call waits if the indices are not known to be sorted.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array((np.ones((2, 1, 1)), [1, 0], [0, 2]), shape=(1, 2))
        >>> A.sorted_indices().indices.tolist(), A.indices.tolist()
        ([0, 1], [1, 0])
        """
        A = self.copy()
        A.sort_indices()
        return A

    def sum_duplicates(self) -> None:
        """Add up the blocks that are stored at the same position, in place, and sort the indices.

        Raises
        ------
        ValueError
            On the CPU, if the index arrays are invalid.

        Notes
        -----
        Does nothing if the matrix is known to be in canonical format. Otherwise the call waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array((np.ones((3, 1, 1)), [1, 0, 1], [0, 3]), shape=(1, 2))
        >>> A.sum_duplicates()
        >>> A.indices.tolist(), A.data.ravel().tolist()
        ([0, 1], [1.0, 2.0])
        """
        if not self.has_canonical_format:
            self._replace(structure.sum_duplicates(self._backend, self._validated, self._block_shape[1]))
            self.has_canonical_format = True

    @property
    def _has_duplicates(self) -> bool:
        blocks = self._validated
        if self._is_canonical(blocks):
            return False
        return structure.has_duplicates(self._backend, blocks.indices, blocks.indptr, self._block_shape[1])

    def _canonical(self) -> Blocks:
        """Return sorted blocks without duplicates; this matrix does not change."""
        blocks = self._validated
        if self._is_canonical(blocks):
            return blocks
        return structure.sum_duplicates(self._backend, blocks, self._block_shape[1])

    def _is_canonical(self, blocks: Blocks) -> bool:
        """Tell whether the blocks of this matrix, which were validated, are in canonical format.

        A user may have written to the indices since this was last known. The host checks them each time. On the GPU a
        check waits, so they are checked only if they were written to.
        """
        loops = self._backend.loops
        if loops is None:
            if self._canonical_since is None or self._canonical_since.holds_for(self):
                return self.has_canonical_format
            if not self._backend.is_sorted(blocks.indices, blocks.indptr, strictly=True):
                return False
            self._canonical_indices = self._index[0]
            self._note_canonical()
            return True
        canonical = bool(loops.is_canonical(blocks.indices, blocks.indptr))
        if canonical and self._has_canonical_format is None and self._has_sorted_indices is not False:
            self.has_canonical_format = True
        return canonical

    def _make_canonical(self) -> None:
        """Add up duplicates in place; on the host, also those that were written to the indices in place."""
        if not self._is_canonical(self._validated):
            self.has_canonical_format = False
            self.sum_duplicates()

    def eliminate_zeros(self) -> None:
        """Remove the blocks in which every element is zero, in place.

        Notes
        -----
        Zeros inside other blocks stay stored, and duplicates are not added up. Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array((np.array([[[1.0, 0]], [[0, 0]]]), ([0, 0], [0, 1])), shape=(1, 4))
        >>> A.eliminate_zeros()
        >>> A.nnz
        2
        """
        if len(self.data):
            keep = structure.nonzero_blocks(self._backend, self.data)
            self._replace(self._backend.select_blocks(self._blocks, keep))

    def prune(self) -> None:
        """Shorten `data` and `indices`, in place, to the number of blocks that `indptr` names.

        Raises
        ------
        ValueError
            If the arrays do not fit each other, or if `indptr` names more blocks than there are.

        Notes
        -----
        The shortened arrays are views of the old ones. Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2], [0, 3]]), blocksize=(1, 2))
        >>> A.indptr[-1] = 1
        >>> A.prune()
        >>> A.data.shape
        (1, 1, 2)
        """
        structure.check_arrays(*self._blocks, self._shape)
        stop = int(self.indptr[-1])  # synchronize!
        if stop > len(self.indices):
            raise ValueError(f"indices array has too few elements: {len(self.indices)}, wanted {stop}")
        self.data, self.indices = self.data[:stop], self.indices[:stop]

    def check_format(self, full_check: bool = True) -> None:
        """Raise ValueError unless the arrays are those of a BSR matrix.

        Parameters
        ----------
        full_check : bool
            Whether to check the values too: `indptr` must start at 0 and never decrease, and `indices` must be in
            range. This waits for the GPU, and it shortens `data` and `indices` to the number of blocks that `indptr`
            names. Without it, only dtypes and shapes are checked.

        Raises
        ------
        ValueError
            If a check fails; the message names the array.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.eye(2), blocksize=(1, 1))
        >>> A.check_format()
        >>> A.indices[0] = 7
        >>> A.check_format()
        Traceback (most recent call last):
            ...
        ValueError: indices: column index values must be < 2 (now max 7)
        """
        for name in ("indices", "indptr"):
            kind = getattr(self, name).dtype.kind
            if kind != "i":
                raise ValueError(f"{name}: wanted integers, got dtype {getattr(self, name).dtype}")
        structure.check_arrays(*self._blocks, self._shape)
        if full_check:
            stop = structure.check_values(self._backend, self.indices, self.indptr, self._block_shape[1])
            self.data, self.indices = self.data[:stop], self.indices[:stop]

    def resize(self, *shape: Any) -> None:
        """Change the shape in place; blocks outside of the new shape are dropped.

        Parameters
        ----------
        *shape : int or tuple of int
            The new numbers of rows and columns, as two integers or as one pair. They must be multiples of the block
            size.

        Raises
        ------
        ValueError
            If the block size does not divide the new shape, or if the shape is not two non-negative integers.

        Notes
        -----
        Waits for the GPU if the number of rows or columns becomes smaller.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(4.0).reshape(2, 2), blocksize=(1, 1))
        >>> A.resize(3, 1)
        >>> A.toarray()
        array([[0.],
               [2.],
               [0.]])
        """
        M, N = check_shape(shape[0] if len(shape) == 1 else shape)
        self._build()
        R, C = self.blocksize
        if M % R or N % C:
            raise ValueError(f"shape must be divisible into {self.blocksize} blocks. Got {(M, N)}")
        xp = self._backend.xp
        old_rows, old_cols = self._block_shape
        rows = M // R
        if rows < old_rows:
            self.indptr = self.indptr[: rows + 1]
            stop = int(self.indptr[-1])  # synchronize!
            self.data, self.indices = self.data[:stop], self.indices[:stop]
        elif rows > old_rows:
            indptr = self._blocks.indptr
            more = xp.broadcast_to(indptr[-1:], (rows - old_rows,))
            self.indptr = xp.concatenate([indptr, more])
        if old_cols > N // C:
            self._replace(self._backend.select_blocks(self._blocks, self._blocks.indices < N // C))
        self._shape = (M, N)


def check_integer(x: Any, what: str) -> int:
    """Return `x` as an int; raise TypeError unless it is an integer. A bool is none."""
    if isinstance(x, bool):
        raise TypeError(f"{what}: wanted an integer, got {x!r}")
    try:
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{what}: wanted an integer, got {x!r}") from None


def check_shape(shape: Any, what: str = "shape") -> tuple[int, int]:
    """Return `shape` as two ints; raise ValueError unless it is two non-negative integers."""
    try:
        sides = tuple(check_integer(n, what) for n in shape)
    except TypeError:
        raise ValueError(f"{what}: wanted two integers, got {shape!r}") from None
    if len(sides) != 2 or min(sides) < 0:
        raise ValueError(f"{what}: wanted two non-negative integers, got {shape!r}")
    if max(sides) > INT64_MAX or sides[0] * sides[1] > INT64_MAX:
        raise ValueError(f"{what}: {sides} has more elements than a 64-bit integer can count")
    return sides
