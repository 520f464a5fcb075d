"""Selection: slices and index arrays of whole blocks, and block rows and columns by number."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from .._backend import structure
from .._backend.base import Array, Backend, Blocks
from .._backend.registry import backend_of, elsewhere, foreign_backend, host
from .convert import Conversions

INT64 = np.dtype(np.int64)


class Selection(Conversions):
    """Sub-matrices by slices and by index arrays of whole blocks."""

    def _pair(self, key: Any) -> tuple[Any, Any]:
        """Return the indices of rows and of columns that a key consists of."""
        pair = key if isinstance(key, tuple) else (key,)
        if sum(part is Ellipsis for part in pair) > 1:
            raise IndexError("an index can only have a single ellipsis ('...')")
        if len(pair) > 2 and not (len(pair) == 3 and any(part is Ellipsis for part in pair)):
            raise IndexError(f"index: wanted at most two parts, for rows and columns, got {len(pair)}")
        if any(part is Ellipsis for part in pair):
            at = next(k for k, part in enumerate(pair) if part is Ellipsis)
            pair = (*pair[:at], *[slice(None)] * (3 - len(pair)), *pair[at + 1 :])
        rows, cols = (*pair, slice(None), slice(None))[:2]
        return rows, cols

    def _window(self, key: Any) -> tuple[int, int, int, int]:
        """Return the block rows and columns that a pair of slices selects: (top, bottom, left, right), without ends."""
        (top, bottom), (left, right) = (self._range(part, axis) for axis, part in enumerate(self._pair(key)))
        return top, bottom, left, right

    def _range(self, part: Any, axis: int) -> tuple[int, int]:
        """Return the first block of a slice and the one after its last block, along an axis."""
        side, block = self._shape[axis], self.blocksize[axis]
        if not isinstance(part, slice):
            raise NotImplementedError(
                f"index: BSR takes slices along block boundaries, got {type(part).__name__}; "
                "use A.tocsr() for single elements"
            )
        start, stop, step = part.indices(side)
        stop = max(start, stop)
        if step != 1 or start % block or (stop % block and stop != side):
            raise NotImplementedError(
                f"index: {start}:{stop}:{step} does not lie on the block boundaries, multiples of {block}"
                + structure.way_to_slice(start, stop, step, block, side)
            )
        return start // block, -(-stop // block)

    def _in_rows(self, top: int, bottom: int) -> slice:
        """Return the range of the blocks in some block rows."""
        ends = self._blocks.indptr[top : bottom + 1 : max(bottom - top, 1)]
        ends = self._backend.to_host(ends)  # synchronize!
        return slice(int(ends[0]), int(ends[-1]))

    def __getitem__(self, key: Any) -> Self:
        """Return the sub-matrix of slices or index arrays that cover whole blocks, as BSR with values of its own.

        Slices begin and end on block boundaries. An array or a list of integers or booleans selects rows or columns in
        groups, each of which is one whole block in order: ``A[I]``, ``A[:, J]``, ``A[I, :]``, ``A[np.ix_(I, J)]``.
        Blocks may come in any order and several times. Everything else raises NotImplementedError, for which
        ``A.tocsr()`` is the way out, or IndexError if it is out of range. Waits for the GPU once, and once more for
        each boolean array on the GPU.
        """
        parts = self._pair(key)
        if any(is_index(part) for part in parts):
            return self._at(parts)
        top, bottom, left, right = self._window(key)
        (data, indices, indptr), own = self._blocks, self._in_rows(top, bottom)
        blocks = Blocks(data[own], indices[own], indptr[top : bottom + 1] - indptr[top])
        if (left, right) == (0, self._block_shape[1]):
            blocks = blocks._replace(data=blocks.data.copy(), indices=blocks.indices.copy())
        else:
            inside = (blocks.indices >= left) & (blocks.indices < right)
            blocks = self._backend.select_blocks(blocks, inside)
            blocks = blocks._replace(indices=(blocks.indices - left).astype(indices.dtype, copy=False))
        R, C = self.blocksize
        return self._new(
            blocks,
            ((bottom - top) * R, (right - left) * C),
            canonical=self._known_canonical or None,
            sorted_=self._has_sorted_indices or None,
        )

    def _at(self, parts: tuple[Any, Any]) -> Self:
        """Return the blocks of rows and columns, at least one of which is an index array."""
        if all(is_index(part) for part in parts):
            rows, cols = (part if hasattr(part, "ndim") else np.asarray(part) for part in parts)
            if rows.ndim != 2 or cols.ndim != 2 or rows.shape[1] != 1 or cols.shape[0] != 1:
                raise NotImplementedError(
                    f"index: two index arrays of shapes {tuple(rows.shape)} and {tuple(cols.shape)} select single "
                    "elements; use A[np.ix_(I, J)] or A[I][:, J] for rows and columns, and A.tocsr()[I, J] for elements"
                )
            parts = rows.reshape(-1), cols.reshape(-1)
        indices = []
        for number, (part, name) in enumerate(zip(parts, ("row", "column"), strict=True)):
            axis = Axis("index", name, self._block_shape[number], self.blocksize[number])
            if is_index(part):
                indices.append((part, axis))
            else:
                start, stop = self._range(part, number)
                everything = (start, stop) == (0, axis.blocks)
                indices.append((None if everything else slice(start, stop), axis._replace(block=1)))
        return self._selected(*indices)

    def _selected(self, rows: tuple[Any, Axis], cols: tuple[Any, Axis]) -> Self:
        """Return the blocks in some block rows and block columns; an index of None selects all."""
        backend = self._backend
        picks = [None if index is None else chosen(backend, index, axis) for index, axis in (rows, cols)]
        blocks, was_sorted = gather(backend, self._validated, picks[0], picks[1], (rows[1], cols[1]))
        sides = [
            size if pick is None else len(pick.numbers) * block
            for size, pick, block in zip(self._shape, picks, self.blocksize, strict=True)
        ]
        canonical = self._known_canonical or None
        # A column that is chosen twice puts copies of a block that is stored twice out of order.
        kept = self._has_sorted_indices and (picks[1] is None or picks[1].increasing or canonical)
        return self._new(blocks, (sides[0], sides[1]), canonical=canonical, sorted_=was_sorted or kept or None)

    def select_blocks(self, rows: Any = None, cols: Any = None) -> Self:
        """Return the sub-matrix of some block rows and block columns, in the order in which they are named.

        Parameters
        ----------
        rows, cols : integers, booleans or slice, optional
            The numbers of block rows and of block columns: an array, a list, or one number. Negative ones count from
            the end, and a number may come several times. Booleans, one for each block row or block column, select those
            that are true. By default all are selected.

        Returns
        -------
        bsr_array or bsr_matrix
            A matrix of the same class with values of its own. Block (i, j) of it is block ``(rows[i], cols[j])`` of
            this matrix.

        Raises
        ------
        IndexError
            If a number is out of range, or if the number of booleans is wrong.
        TypeError
            If the matrix is on the CPU and an index is on the GPU.

        Notes
        -----
        Duplicates are kept. If the matrix is known to be in canonical format, the result is too.

        The index arrays may be on the host or on the device of the matrix. The call waits for the GPU once, to allocate
        the result, and once more for each boolean array that is on the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(16).reshape(4, 4), blocksize=(2, 2))
        >>> A.select_blocks(rows=[1, 0], cols=[-1]).toarray()
        array([[10, 11],
               [14, 15],
               [ 2,  3],
               [ 6,  7]])
        >>> A.select_blocks(cols=[False, True]).shape
        (4, 2)
        """
        row_axis, col_axis = (
            Axis(argument, f"block {name}", count, 1)
            for argument, name, count in zip(("rows", "cols"), ("row", "column"), self._block_shape, strict=True)
        )
        if rows is None and cols is None:
            return self.copy()
        return self._selected((rows, row_axis), (cols, col_axis))

    def __iter__(self) -> Any:
        raise NotImplementedError("iteration over single rows is not implemented for BSR; use A.tocsr()")


class Axis(NamedTuple):
    """One side of a matrix, and what error messages call it and its entries."""

    #: the argument, and what one entry of the index is: "row", "column", "block row" or "block column"
    argument: str
    entry: str
    #: the number of blocks, and the number of entries of an index that are one block
    blocks: int
    block: int


class Chosen(NamedTuple):
    """Block numbers in the backend of a matrix, each in range.

    The two flags are bools if they are known on the host, and 0-d arrays otherwise.
    """

    numbers: Array
    #: whether the numbers never decrease
    rising: Any
    #: whether the index was wrong, so that these are not its numbers
    wrong: Any
    #: the index that was given, for the error message
    given: Any
    #: whether the numbers are known to increase, so that none comes twice
    increasing: bool = False


def is_index(x: Any) -> bool:
    """Tell whether `x` is a list or an array of indices, as opposed to a slice or a single index."""
    if isinstance(x, list | tuple | range):
        return True
    return not isinstance(x, slice | np.generic) and getattr(x, "ndim", 0) > 0


def chosen(backend: Backend, index: Any, axis: Axis) -> Chosen:
    """Return the block numbers of an index: integers, booleans or a slice of block numbers."""
    if isinstance(index, slice):
        index = np.arange(axis.blocks, dtype=INT64)[index]
    source = backend_of(index) or foreign_backend(index)
    if source is not None and source is not host() and source is not backend:
        raise elsewhere(index, axis.argument, backend)
    if source is not None and source.is_sparse(index):
        raise NotImplementedError(
            f"{axis.argument}: wanted a list or a dense array, got a sparse {type(index).__name__}; use A.tocsr() for "
            "single elements"
        )
    if source is None or source is host():
        index = _on_host(index, axis)
        numbers, wrong = _numbers(np, index, axis)
        if wrong:
            raise _error(index, axis)
        increasing = bool((numbers[1:] > numbers[:-1]).all())
        return Chosen(backend.from_host(numbers), increasing or bool(_rising(numbers)), False, index, increasing)
    index = backend.adopt(index)
    _check_form(index, axis)
    numbers, wrong = _numbers(backend.xp, index, axis)
    return Chosen(numbers, _rising(numbers), wrong, index)


def _on_host(index: Any, axis: Axis) -> Array:
    try:
        array = np.asarray(index)
    except ValueError:
        raise IndexError(f"{axis.argument}: wanted integers or booleans, got a ragged {type(index).__name__}") from None
    if not array.size and not isinstance(index, np.ndarray):
        array = array.astype(INT64)  # NumPy makes floats of an empty list
    array = array.reshape(-1) if array.ndim == 0 else array
    _check_form(array, axis)
    return array


def _check_form(index: Array, axis: Axis) -> None:
    """Raise IndexError or NotImplementedError for an index of the wrong dtype or shape; no value is read."""
    side = axis.blocks * axis.block
    if index.dtype.kind not in "biu":
        raise IndexError(f"{axis.argument}: wanted integers or booleans, got dtype {index.dtype}")
    if index.ndim != 1:
        raise NotImplementedError(
            f"{axis.argument}: wanted a 1-D index of {axis.entry}s, got shape {tuple(index.shape)}; "
            "use A[np.ix_(I, J)] for rows and columns, and A.tocsr() for single elements"
        )
    if index.dtype.kind == "b" and len(index) != side:
        raise IndexError(f"{axis.argument}: wanted {side} booleans, one for each {axis.entry}, got {len(index)}")
    if index.dtype.kind != "b" and len(index) % axis.block:
        raise NotImplementedError(
            f"{axis.argument}: {len(index)} {axis.entry}s are no whole number of blocks of {axis.block} "
            f"{axis.entry}s; {_way_out(axis)}"
        )
    if index.dtype.kind != "b" and len(index) and not side:
        raise IndexError(f"{axis.argument}: got {len(index)} {axis.entry}s of a matrix that has none")


def _numbers(xp: Any, index: Array, axis: Axis) -> tuple[Array, Any]:
    """Return the block number of each group of entries, and whether a group is no block; numbers are in range."""
    if index.dtype.kind == "b":
        groups = index.reshape(axis.blocks, axis.block)
        whole = groups.all(axis=1)
        return xp.flatnonzero(whole), (groups.any(axis=1) != whole).any()  # synchronize!
    side = axis.blocks * axis.block
    if index.dtype == np.uint64:
        index = xp.minimum(index, side)  # which is out of range, and fits into an int64
    groups = index.astype(INT64, copy=False).reshape(-1, axis.block)
    groups = xp.where(groups < 0, groups + side, groups)
    numbers = groups[:, 0] // axis.block
    wanted = numbers[:, None] * axis.block + xp.arange(axis.block, dtype=INT64)
    wrong = ((groups != wanted).any(axis=1) | (numbers < 0) | (numbers >= axis.blocks)).any()
    return xp.minimum(xp.maximum(numbers, 0), max(axis.blocks - 1, 0)), wrong


def _rising(numbers: Array) -> Any:
    return (numbers[1:] >= numbers[:-1]).all()


def _error(index: Any, axis: Axis) -> Exception:
    """Return the error for a host index that is out of range or does not cover whole blocks."""
    side, (argument, entry, _, block) = axis.blocks * axis.block, axis
    if index.dtype.kind == "b":
        groups = index.reshape(axis.blocks, block)
        k = int(np.flatnonzero(groups.any(axis=1) != groups.all(axis=1))[0])
        return NotImplementedError(
            f"{argument}: the booleans select {int(groups[k].sum())} of the {block} {entry}s of block {k} "
            f"({entry}s {k * block} to {(k + 1) * block - 1}); wanted all or none of them; {_way_out(axis)}"
        )
    outside = np.flatnonzero((index < -side) | (index >= side))
    if len(outside):
        return IndexError(f"{argument}: {entry} {index[outside[0]]} is out of range for {side} {entry}s")
    groups = np.where(index < 0, index.astype(INT64) + side, index).astype(INT64).reshape(-1, block)
    bad = (groups != groups[:, :1] // block * block + np.arange(block)).any(axis=1)
    k = int(np.flatnonzero(bad)[0])
    got = ", ".join(map(str, index[k * block : (k + 1) * block][:4])) + (", ..." if block > 4 else "")
    return NotImplementedError(
        f"{argument}: entries {k * block} to {(k + 1) * block - 1} are the {entry}s {got}; wanted one whole block "
        f"there, {block} consecutive {entry}s from a multiple of {block}; {_way_out(axis)}"
    )


def _way_out(axis: Axis) -> str:
    selection = "A.tocsr()[I]" if axis.entry == "row" else "A.tocsr()[:, J]"
    return f"use {selection} for single {axis.entry}s, or A.select_blocks for block numbers"


def gather(
    backend: Backend, blocks: Blocks, rows: Chosen | None, cols: Chosen | None, axes: tuple[Axis, Axis]
) -> tuple[Blocks, bool]:
    """Return the blocks in the chosen block rows and block columns, and whether those of each row had to be sorted.

    None chooses all. The blocks of each row have the order in which they are stored if the columns never decrease, and
    are sorted by column otherwise. Duplicates keep their order. Waits for the GPU once.
    """
    xp = backend.xp
    take = xp.take  # NumPy's indexing by an array takes twice as long
    data, indices, indptr = blocks
    bounds = indptr.astype(INT64, copy=False)
    if cols is not None:
        # A stored block is copied once for each time that its column is chosen: copies before[e] to before[e + 1] - 1.
        by_column = xp.argsort(cols.numbers, kind="stable")
        first = xp.searchsorted(take(cols.numbers, by_column), xp.arange(axes[1].blocks + 1, dtype=INT64)).astype(INT64)
        before = _starts(xp, take(xp.diff(first), indices))
        bounds = take(before, bounds)
    counts, begins = xp.diff(bounds), bounds[:-1]
    if rows is not None:
        counts, begins = take(counts, rows.numbers), take(begins, rows.numbers)
    starts = _starts(xp, counts)
    total, copies, rising = _checked(backend, starts, None if cols is None else before, (rows, cols), axes)
    width = axes[1].blocks if cols is None else len(cols.numbers)
    index = structure.index_dtype(max(total, width, len(counts)), indices, indptr)
    new_indptr = starts.astype(index, copy=False)
    row = backend.expand(new_indptr, total)
    place = xp.arange(total, dtype=INT64)
    if rows is not None:
        place += take(begins - starts[:-1], row)
    if cols is None:
        return Blocks(take(data, place, axis=0), take(indices, place).astype(index, copy=False), new_indptr), False
    stored = backend.expand(before, copies)
    if rows is not None:
        stored = take(stored, place)
    place -= take(before, stored)
    place += take(first, take(indices, stored))
    column = take(by_column.astype(index, copy=False), place)
    if not rising:
        order = _sorted_order(backend, column, new_indptr, row, width)
        stored, column = take(stored, order), take(column, order)
    return Blocks(take(data, stored, axis=0), column, new_indptr), not rising


def _starts(xp: Any, counts: Array) -> Array:
    """Return where each of some segments begins, and where the last one ends."""
    return xp.concatenate([xp.zeros(1, INT64), xp.cumsum(counts, dtype=INT64)])


def _checked(
    backend: Backend,
    starts: Array,
    before: Array | None,
    picks: tuple[Chosen | None, Chosen | None],
    axes: tuple[Axis, Axis],
) -> tuple[int, int, bool]:
    """Return the numbers of selected blocks and of copies, and whether the columns never decrease.

    Raises the error of an index that was wrong. Everything is copied to the host together.
    """
    xp = backend.xp
    cols = picks[1]
    values = [starts[-1], starts[-1] if before is None else before[-1]]
    flags = [True if cols is None else cols.rising, *(False if pick is None else pick.wrong for pick in picks)]
    unknown = [k for k, flag in enumerate(flags) if not isinstance(flag, bool)]
    values += [flags[k] for k in unknown]
    found = backend.to_host(xp.stack([xp.asarray(v).astype(INT64) for v in values]))  # synchronize!
    for k, value in zip(unknown, found[2:], strict=True):
        flags[k] = bool(value)
    for pick, wrong, axis in zip(picks, flags[1:], axes, strict=True):
        if pick is not None and wrong:
            raise _error(backend.to_host(pick.given), axis)  # synchronize!
    return int(found[0]), int(found[1]), bool(flags[0])


def _sorted_order(backend: Backend, column: Array, indptr: Array, row: Array, width: int) -> Array:
    """Return the order that sorts the blocks of each row by column; duplicates keep their order."""
    if backend.loops is None or not backend.loops.fits((len(indptr), width), len(column)):
        return backend.xp.argsort(structure.block_keys(backend, column, indptr, width), kind="stable")
    down, begins = backend.loops.by_column(column, indptr, width)  # two stable sorts in linear time
    across, _ = backend.loops.by_column(np.take(row, down), begins, len(indptr) - 1)
    return np.take(down, across)
