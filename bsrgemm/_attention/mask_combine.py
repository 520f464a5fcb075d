"""Masks from masks: ``a & b``, ``a | b``, ``~a``, and several patterns stacked into one mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from .._backend import registry, structure
from .._backend.base import Array
from .._backend.names import named
from .mask_base import MaskBase
from .mask_bits import FULL, with_whole
from .mask_grid import check_stored

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
