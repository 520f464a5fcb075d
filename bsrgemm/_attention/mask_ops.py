"""Operations of masks: and, or, not, and rectangles of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from .._backend import registry, structure
from .._backend.base import Array, named
from .mask_base import FULL, Grid, Line, MaskBase, check_stored, whole_kinds, with_whole

_INT32 = np.dtype(np.int32)


class Combinations(MaskBase):
    """Operators and `stack`. All of them wait for the GPU if the masks are on one."""

    #: NumPy leaves ``array & mask`` and ``array == mask`` to Python instead of trying them for each element.
    __array_ufunc__ = None

    @classmethod
    def stack(cls, masks: Sequence[Self], *, axis: str = "heads") -> Self:
        """Join masks into one that has a pattern for each head, or for each batch.

        Parameters
        ----------
        masks : sequence of BlockMask
            Masks of the same shape, block, numbers of patterns and device.
        axis : {"heads", "batch"}
            The dimension along which the patterns are joined.

        Returns
        -------
        BlockMask
            A mask with ``len(masks)`` times the patterns of the first along `axis`.

        Raises
        ------
        ValueError
            If `masks` is empty, `axis` is another word, or the shapes, blocks or numbers of patterns differ.
        TypeError
            If `masks` is not a sequence of masks, or the masks are on different devices.

        Notes
        -----
        If the mask is on a GPU, this waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> full = bg.BlockMask.full(32, block=16, device="cpu")
        >>> causal = bg.BlockMask.causal(32, block=16, device="cpu")
        >>> bg.BlockMask.stack([full, causal])
        <BlockMask 32 x 32, blocks 16 x 16, 1 x 2 patterns, 7 stored (5 whole), density 0.758>
        """
        if not isinstance(axis, str) or axis not in ("heads", "batch"):
            raise ValueError(f"axis: wanted 'heads' or 'batch', got {axis!r}")
        if not isinstance(masks, Sequence):
            raise TypeError(f"masks: wanted a list or tuple of BlockMask, got {type(masks).__name__}")
        if not masks:
            raise ValueError("masks: wanted at least one BlockMask, got an empty sequence")
        first = masks[0]
        for number, mask in enumerate(masks):
            if not isinstance(mask, Combinations):
                raise TypeError(f"masks[{number}]: wanted a BlockMask, got {type(mask).__name__}")
        for other in masks[1:]:
            first._check_alike(other, "masks")
            if other.heads != first.heads:
                raise ValueError(
                    f"masks: wanted masks with {first.heads} patterns, as the first has, got one with {other.heads}"
                )
        B, H = first.heads
        heads = (B, H * len(masks)) if axis == "heads" else (B * len(masks), H)
        backend, grid = first._backend, first._grid
        xp, (rows, cols) = backend.xp, grid.counts
        starts = np.cumsum([0, *(len(mask.indices) for mask in masks)])
        # First entry of each mask's table of element masks; entry 0 of a table is "whole".
        tables = np.cumsum([0, *(len(mask.bits) + 1 for mask in masks)]).tolist()
        parts = [mask.indptr[:-1] + start for mask, start in zip(masks, starts[:-1].tolist(), strict=True)]
        indptr = xp.concatenate([*parts, backend.from_host(starts[-1:])])
        key = structure.block_keys(backend, xp.concatenate([mask.indices for mask in masks]), indptr, cols)
        code = xp.concatenate([mask.kinds + (table + 1) for mask, table in zip(masks, tables[:-1], strict=True)])
        if axis == "heads" and B > 1:  # reorder from (mask, batch) to (batch, mask)
            size = max(1, H * rows * cols)
            batch = key // size
            key = key % size + (batch % B * len(masks) + batch // B) * size
            order = xp.argsort(key)
            key, code = key[order], code[order]

        def elements(xp: Any, code: Array, *bits: Array) -> Array:
            return xp.concatenate([with_whole(xp, x) for x in bits])[code]

        return cls._from_codes(grid, heads, key, code, tables[-1], [mask.bits for mask in masks], elements)

    def __and__(self, other: Any) -> Self:
        """``a & b`` allows the pairs of query and key that both masks allow. Waits for the GPU."""
        if not isinstance(other, Combinations):
            return _no_mask(other, "&")
        return self._combined(other, both=True)

    def __or__(self, other: Any) -> Self:
        """``a | b`` allows the pairs of query and key that at least one of the masks allows. Waits for the GPU."""
        if not isinstance(other, Combinations):
            return _no_mask(other, "|")
        return self._combined(other, both=False)

    def __rand__(self, other: Any) -> Any:
        """``array & a`` is refused."""
        return _no_mask(other, "&")

    def __ror__(self, other: Any) -> Any:
        """``array | a`` is refused."""
        return _no_mask(other, "|")

    def __invert__(self) -> Self:
        """``~a`` allows the pairs of query and key that `a` does not allow. Waits for the GPU."""
        xp, grid = self._backend.xp, self._grid
        rows, cols = grid.counts
        every = xp.full(self.heads[0] * self.heads[1] * rows * cols, len(self.bits), _INT32)
        every[self._keys()] = self.kinds
        key = xp.flatnonzero(every != FULL)  # synchronize!

        def elements(xp: Any, code: Array, bits: Array) -> Array:
            return ~xp.concatenate([bits, xp.zeros((1, *bits.shape[1:]), np.uint32)])[code]

        return self._from_codes(grid, self.heads, key, every[key], len(self.bits) + 1, [self.bits], elements)

    def _check_alike(self, other: Combinations, what: str) -> None:
        if other._backend is not self._backend:
            raise registry.elsewhere(other.indices, what, self._backend)
        if other.shape != self.shape or other.block != self.block:
            raise ValueError(
                f"{what}: masks of {self.shape} in blocks of {self.block} and of {other.shape} in blocks of "
                f"{other.block} do not go together; build both with the same lengths and the same block"
            )

    def _spread(self, heads: tuple[int, int]) -> Self:
        """The same mask with a separate pattern for each of `heads` batches and heads."""
        if heads == self.heads:
            return self
        backend, xp, rows, (B, H) = self._backend, self._backend.xp, self._grid.counts[0], self.heads
        pattern = np.arange(heads[0] * heads[1])
        source = backend.from_host(pattern // heads[1] % B * H + pattern % heads[1] % H)
        total = len(self.indices) * (len(pattern) // (B * H))
        check_stored(total, self.block)
        starts, ends = (x.reshape(B * H, rows)[source].reshape(-1) for x in (self.indptr[:-1], self.indptr[1:]))
        indptr = xp.zeros(len(starts) + 1, _INT32)
        indptr[1:] = xp.cumsum(ends - starts, dtype=_INT32)
        position = xp.arange(total) + (starts - indptr[:-1])[backend.expand(indptr, total)]
        arrays = (indptr, self.indices[position], self.kinds[position], self.bits)
        return type(self)(backend, self.shape, self.block, heads, *arrays)

    def _combined(self, other: Combinations, both: bool) -> Self:
        """The mask ``self & other`` if `both`, otherwise ``self | other``.

        Two element masks that share several blocks are combined only once.
        """
        self._check_alike(other, "&" if both else "|")
        try:
            heads = tuple(np.broadcast_shapes(self.heads, other.heads))
        except ValueError:
            raise ValueError(
                f"{'&' if both else '|'}: masks with {self.heads[0]} x {self.heads[1]} and with {other.heads[0]} x "
                f"{other.heads[1]} patterns do not go together; wanted equal numbers along the batch and along the "
                "heads, or 1"
            ) from None
        backend, xp, (rows, cols) = self._backend, self._backend.xp, self._grid.counts
        a, b = self._spread(heads), other._spread(heads)
        # An element mask is numbered by its index in `masks` of `elements` below; two masks in the same block make a
        # number of two digits.
        base = len(a.bits) + len(b.bits) + 3
        ends = backend.from_host(np.array([-1, heads[0] * heads[1] * rows * cols]) * base)
        parts = [a._keys() * base + (a.kinds + 2), b._keys() * base + (b.kinds + (len(a.bits) + 3)), ends]
        sorted_ = xp.sort(xp.concatenate(parts))
        key, digit = sorted_ // base, sorted_ % base
        again = key[1:] == key[:-1]
        code = xp.where(again[:-1], 0, digit[1:-1] + xp.where(again[1:], digit[2:], 0) * base)

        def elements(xp: Any, code: Array, a: Array, b: Array) -> Array:
            nothing = xp.zeros((1, *a.shape[1:]), np.uint32)
            masks = xp.concatenate([nothing, with_whole(xp, a), with_whole(xp, b)])
            x, y = masks[code % base], masks[code // base]
            return x & y if both else x | y

        return self._from_codes(self._grid, heads, key[1:-1], code, base * base, [a.bits, b.bits], elements)


def _no_mask(other: Any, sign: str) -> Any:
    """NotImplemented, so that Python asks the other operand; TypeError for arrays, which could be made masks."""
    if registry.backend_of(other) is None:
        return NotImplemented
    raise TypeError(
        f"{sign}: wanted a BlockMask, got {named(other)}; BlockMask.from_dense makes one of booleans, "
        "BlockMask.from_bsr of a BSR matrix"
    )


_INT32 = np.dtype(np.int32)
#: Ranges of queries or keys, in ascending order; each begins at a block, and ends at one or at the end of the mask.
Ranges = Sequence[tuple[int, int]]

Mask = TypeVar("Mask", bound=MaskBase)


class _Side(NamedTuple):
    """One side of a mask: its name in messages, its length and the length of a block."""

    name: str
    length: int
    block: int


class Rectangles(MaskBase):
    """Slices of masks. They wait for the GPU if the mask is on one."""

    @property
    def is_empty(self) -> bool:
        """Whether the mask allows nothing, for no batch and head. Known without work, and without waiting for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> mask = bg.BlockMask.causal(64, block=16, device="cpu")
        >>> mask[:32, 32:].is_empty, mask[32:, :32].is_empty
        (True, False)
        """
        return not len(self.indices)

    def __getitem__(self, key: Any) -> Self:
        """``mask[q0:q1, k0:k1]`` is the mask of these queries and keys; ``mask[batches, heads, q0:q1, k0:k1]`` chooses
        patterns too. Waits for the GPU.

        Both ends of a slice are multiples of the block, or the end of the mask. Along the batch and the heads, slices
        and integers are taken, which keep the dimension; one pattern that serves all stays.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> mask = bg.BlockMask.window(64, left=20, right=0, block=16, device="cpu")
        >>> mask[32:, 16:48]
        <BlockMask 32 x 32, blocks 16 x 16, 4 stored (0 whole), density 0.514>
        """
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) not in (2, 4):
            raise TypeError(  # an IndexError would end an iteration, as if the mask were a sequence without elements
                "mask[...]: wanted mask[queries, keys] or mask[batches, heads, queries, keys], "
                f"got {len(keys)} {'index' if len(keys) == 1 else 'indices'}"
            )
        rows = _range(keys[-2], _Side("queries", self.shape[0], self.block[0]))
        cols = _range(keys[-1], _Side("keys", self.shape[1], self.block[1]))
        if len(keys) == 2:
            return selected(self, [rows], [cols])
        chosen = [_chosen(x, name, n) for x, name, n in zip(keys[:2], ("batch", "head"), self.heads, strict=True)]
        return selected(self, [rows], [cols], (chosen[0], chosen[1]))


def selected(mask: Mask, rows: Ranges, cols: Ranges, patterns: tuple[range, range] | None = None) -> Mask:
    """The mask of some ranges of queries and of keys, one range after the other, of some batches and heads.

    Only the last range of a side may end at the end of the mask inside a block.
    """
    (bq, bk), (R, C), (B, H) = mask.block, mask._grid.counts, mask.heads
    batches, heads = patterns or (range(B), range(H))
    shape = (sum(b - a for a, b in rows), sum(b - a for a, b in cols))
    if shape == mask.shape and (batches, heads) == (range(B), range(H)):
        return mask
    backend, xp = mask._backend, mask._backend.xp
    row, col = _numbers(rows, bq), _numbers(cols, bk)
    pattern = np.add.outer(np.array(batches) * H, np.array(heads)).reshape(-1)
    count = len(pattern) * len(row)
    if not count or not len(col) or not len(mask.indices):
        arrays = (xp.zeros(count + 1, _INT32), xp.zeros(0, _INT32), xp.zeros(0, _INT32), mask.bits[:0])
        return type(mask)(backend, shape, mask.block, (len(batches), len(heads)), *arrays)
    chosen = backend.from_host(np.add.outer(pattern * R, row).reshape(-1))
    starts, ends = mask.indptr[:-1][chosen], mask.indptr[1:][chosen]
    indptr = xp.zeros(count + 1, np.int64)
    indptr[1:] = xp.cumsum(ends - starts, dtype=np.int64)
    total = int(indptr[-1])  # synchronize!
    row_of = backend.expand(indptr, total)
    position = xp.arange(total) + (starts - indptr[:-1])[row_of]
    indices, kinds = mask.indices[position], mask.kinds[position]
    if len(col) < C:
        table = np.full(C, -1, _INT32)  # the new number of each block column; -1 for those that are left out
        table[col] = np.arange(len(col))
        column = backend.from_host(table)[indices]
        kept = xp.flatnonzero(column >= 0)  # synchronize!
        indices, kinds, row_of = column[kept], kinds[kept], row_of[kept]
        indptr = xp.searchsorted(row_of, xp.arange(count + 1))
    # Element masks that no block uses any more are left out.
    used = xp.unique(kinds)  # synchronize!
    used = used[used >= 0]
    if len(used):
        kinds = xp.where(kinds < 0, _INT32.type(FULL), xp.searchsorted(used, kinds).astype(_INT32))
    else:
        kinds = whole_kinds(xp, len(kinds))
    arrays = (indptr.astype(_INT32), indices, kinds, mask.bits[used])
    return type(mask)(backend, shape, mask.block, (len(batches), len(heads)), *arrays)


def stored_columns(mask: MaskBase) -> np.ndarray[Any, Any]:
    """Whether each block column has a stored block in any pattern, on the host. Waits for the GPU."""
    found = np.zeros(mask._grid.counts[1], bool)
    found[mask._backend.to_host(mask.indices)] = True  # synchronize!
    return found


def banded(mask: Mask, place: int, left: int, right: int) -> Mask:
    """What a mask allows of a band: query i, at position ``i + place`` among the keys, sees the keys from `left` before
    its position to `right` after it.
    """
    grid = Grid(*mask.shape, mask.block, mask._backend.name)
    band: Any = type(mask)._from_lines(grid, Line(place - left), Line(place + right + 1))
    return band & mask


def _numbers(ranges: Ranges, block: int) -> np.ndarray[Any, Any]:
    """The numbers of the blocks in ranges of queries or keys."""
    return np.concatenate([np.arange(a // block, -(-b // block)) for a, b in ranges if a < b] or [np.arange(0)])


def _range(key: Any, side: _Side) -> tuple[int, int]:
    """The first position of a slice and the one after its last; ValueError if they are inside a block."""
    what = f"mask[...]: {side.name}"
    if not isinstance(key, slice):
        raise TypeError(f"{what}: wanted a slice such as 0:{side.block}, got {key!r}")
    if key.step not in (None, 1):
        raise ValueError(f"{what}: wanted a slice of neighbours, got the step {key.step!r}")
    try:
        start, stop, _ = key.indices(side.length)
    except TypeError:
        raise TypeError(f"{what}: wanted a slice of integers such as 0:{side.block}, got {key!r}") from None
    stop = max(start, stop)
    if any(x % side.block and x != side.length for x in (start, stop)):
        around = (start // side.block * side.block, min(side.length, -(-stop // side.block) * side.block))
        raise ValueError(
            f"{what}: wanted a slice of whole blocks of {side.block}, got {start}:{stop}. "
            f"Slice {around[0]}:{around[1]}, "
            "build the mask with a block that divides both ends, or go by BlockMask.from_dense(mask.to_dense()[...])"
        )
    return start, stop


def _chosen(key: Any, name: str, count: int) -> range:
    """The patterns that a slice or an integer chooses along the batch or the heads."""
    if isinstance(key, slice):
        if count == 1:  # one pattern serves all
            return range(1)
        found = range(count)[key]
        if not len(found):
            raise IndexError(f"mask[...]: {name}: wanted at least one of {count} patterns, got {key!r}")
        return found
    if isinstance(key, bool) or not isinstance(key, int | np.integer):
        raise TypeError(f"mask[...]: {name}: wanted a slice or an integer, got {key!r}")
    if count == 1:
        return range(1)
    if not -count <= key < count:
        raise IndexError(f"mask[...]: {name}: wanted 0 to {count - 1}, got {key}")
    return range(int(key) % count, int(key) % count + 1)
