"""`BlockMask`: M[b, h, i, j] is True where query i may attend to key j, stored by blocks of queries and keys.

A block is allowed whole, in part or not at all. The mask has one entry for each block that allows anything, and the
distinct element masks of blocks that are allowed in part, packed as bits. No array of S_q x S_k elements is made.
Constructors, operators and conversions are in the modules of the base classes; here are description and picture.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from .._backend.base import Array
from .._plotting import PART, WHOLE, MaskPattern, draw_mask
from .mask_base import FULL, Limits, counts_of, unpack, with_whole
from .mask_convert import Conversions
from .mask_make import IntervalMasks, PatternMasks
from .mask_ops import Rectangles

#: If there are at most this many words and combinations, element masks are computed on the host: no kernel is launched.
_FEW = 1 << 16
#: Up to this many blocks are listed by the host, which is faster than calls to a GPU.
_FEW_BLOCKS = 1 << 18


class BlockMask(IntervalMasks, PatternMasks, Conversions, Rectangles):
    """Which keys each query may attend to, stored by blocks of queries and keys.

    Masks are built by the class methods. ``a & b`` allows what both masks allow, ``a | b`` what either allows, ``~a``
    what `a` does not allow. Patterns may differ by batch and head; one pattern of `a` serves all patterns of `b`.
    ``mask[q0:q1, k0:k1]`` is the mask of some queries and keys, in whole blocks; `is_empty` tells whether it allows
    nothing.

    ``a == b`` is True if both masks have the same shape, block and numbers of patterns and allow the same pairs,
    however they were made; masks on different devices cannot be compared. Masks can be members of sets and keys of
    dictionaries, where equal masks are the same key.

    Parameters
    ----------
    backend : Backend
        Array module that holds the arrays. The constructor checks nothing: use the class methods instead of it.
    shape, block, heads, indptr, indices, kinds, bits
        The attributes of the same names, see below.

    Attributes
    ----------
    shape : (int, int)
        Numbers of queries and keys, (S_q, S_k).
    block : (int, int)
        Queries and keys of a block.
    heads : (int, int)
        Numbers of patterns along the batch and along the heads; 1 where one pattern serves all.
    indptr : array of int32, shape (patterns * block rows + 1,)
        First stored block of each block row, counted through all patterns, and the number of stored blocks at the end.
    indices : array of int32, shape (stored blocks,)
        Block column of each stored block, sorted within a block row.
    kinds : array of int32, shape (stored blocks,)
        -1 for a block whose elements are all allowed, otherwise the index of its element mask in `bits`. If all blocks
        are whole, all of it is one number in memory (its stride is 0).
    bits : array of uint32, shape (masks, block[0], ceil(block[1] / 32))
        Element masks: key j of a block is bit ``j % 32`` of word ``j // 32``. Elements beyond the last query or key are
        not allowed.

    Raises
    ------
    ValueError
        By the class methods, if an argument is out of range: a length is negative, or a side of `block` is not a
        multiple of 16 from 16 to 256.

    Notes
    -----
    On a GPU, ``&``, ``|``, ``~``, slices, ``==``, `density`, `allowed` and ``repr`` wait for the GPU.

    Write nothing into the arrays of a mask, and assign nothing to its attributes: kernels read lists that were made
    from them once. Build another mask instead.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> mask = bg.BlockMask.causal(64, block=16, device="cpu")
    >>> mask = mask & bg.BlockMask.window(64, left=20, block=16, device="cpu")
    >>> mask
    <BlockMask 64 x 64, blocks 16 x 16, 9 stored (0 whole), density 0.277>
    >>> mask.to_dense()[:3, :4].astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0]])
    """

    @property
    def density(self) -> float:
        """Allowed pairs of query and key divided by all pairs, averaged over batches and heads. Waits for the GPU."""
        S_q, S_k = self.shape
        pairs = S_q * S_k * self.heads[0] * self.heads[1]
        return self.allowed / pairs if pairs else 0.0

    @property
    def allowed(self) -> int:
        """Pairs of query and key that are allowed, over all batches and heads. Waits for the GPU."""
        if not len(self.indices):
            return 0
        size = self._grid.sizes(self._rows(), self.indices)
        counts = counts_of(self._backend.xp, with_whole(self._backend.xp, self.bits))
        return int(self._backend.xp.where(self.kinds < 0, size, counts[self.kinds + 1]).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the four arrays of the mask. If all blocks are whole, their kinds take the memory of one."""
        repeated = self.kinds.strides == (0,)
        kinds = self.kinds[:1] if repeated else self.kinds
        return int(sum(x.nbytes for x in (self.indptr, self.indices, kinds, self.bits)))

    @property
    def device(self) -> Any:
        """The device that holds the mask: "cpu", or the CuPy device."""
        return self._backend.device_of(self.indices)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self is other:
            return True
        if other._backend is not self._backend:
            raise TypeError(
                f"==: masks on {self._backend.name!r} and {other._backend.name!r} cannot be compared: nothing is moved "
                "silently. Compare a.get() == b.get()"
            )
        if (self.shape, self.block, self.heads) != (other.shape, other.block, other.heads):
            return False
        if len(self.indices) != len(other.indices):
            return False
        xp = self._backend.xp
        pairs = ((self.indptr, other.indptr), (self.indices, other.indices), (self.kinds < 0, other.kinds < 0))
        if not all(bool((a == b).all()) for a, b in pairs):  # synchronize!
            return False
        part = xp.flatnonzero(self.kinds >= 0)  # synchronize!
        # Masks number their element masks differently; each pair of numbers that meets in a block is compared once.
        codes = xp.unique(self.kinds[part].astype(np.int64) * max(len(other.bits), 1) + other.kinds[part])
        a, b = codes // max(len(other.bits), 1), codes % max(len(other.bits), 1)
        return bool((self.bits[a] == other.bits[b]).all())  # synchronize!

    def __hash__(self) -> int:
        """Return a number that is the same for equal masks; nothing waits for the GPU."""
        return hash((self.shape, self.block, self.heads, len(self.indices)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the mask for a copy or a pickle, without lists and launches, which are made for one object alone."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_tiles", "_calls", "_plans")}

    def __repr__(self) -> str:
        whole = int((self.kinds < 0).sum())
        patterns = "" if self.heads == (1, 1) else f", {self.heads[0]} x {self.heads[1]} patterns"
        return (
            f"<BlockMask {self.shape[0]} x {self.shape[1]}, blocks {self.block[0]} x {self.block[1]}{patterns}, "
            f"{len(self.indices)} stored ({whole} whole), density {self.density:.3f}>"
        )

    def elements(self, kind: int) -> Array:
        """Unpack the element mask of the blocks of one kind.

        Parameters
        ----------
        kind : int
            An entry of `kinds`: -1 for whole blocks, otherwise an index of `bits`.

        Returns
        -------
        array of bool, shape `block`
            True where an element is allowed, on the device of the mask.

        Raises
        ------
        IndexError
            If `bits` has no such mask.
        TypeError
            If `kind` is not an integer.

        Notes
        -----
        Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> mask = bg.BlockMask.causal(16, block=16, device="cpu")
        >>> mask.elements(0)[:2, :3].astype(int)
        array([[1, 0, 0],
               [1, 1, 0]])
        """
        if isinstance(kind, bool) or not isinstance(kind, int | np.integer):
            raise TypeError(f"kind: wanted an integer, an entry of kinds, got {kind!r}")
        if kind == FULL:
            return self._backend.xp.ones(self.block, bool)
        if not 0 <= kind < len(self.bits):
            raise IndexError(f"kind: wanted -1, or the number of one of {len(self.bits)} element masks, got {kind}")
        return unpack(self._backend.xp, self.bits[kind : kind + 1], self.block[1])[0]

    def plot(self, ax: Any = None, *, batch: int = 0, head: int = 0, elements: bool = False) -> Any:
        """Draw the blocks of one pattern with matplotlib: whole blocks dark, blocks allowed in part light.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Axes to draw into; a new figure by default.
        batch, head : int
            The pattern to draw; ignored along a dimension that has one pattern for all.
        elements : bool
            If True, also mark the allowed elements of blocks allowed in part. For small masks, like `to_dense`.

        Returns
        -------
        ax : matplotlib.axes.Axes
            Up to 64 blocks a side are drawn as shapes, which are labelled for ``ax.legend()``; more are drawn as an
            image.

        Raises
        ------
        IndexError
            If the mask has no such pattern.
        TypeError
            If `batch` or `head` is not an integer.
        ImportError
            If matplotlib is not installed.

        Notes
        -----
        A mask on the GPU is copied to the host, which waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> import matplotlib.pyplot as plt
        >>> ax = bg.BlockMask.causal(64, block=16, device="cpu").plot()
        >>> print(ax.get_title())
        50.8% of the pairs, blocks 16 x 16
        >>> plt.close(ax.figure)  # or ax.figure.savefig("mask.png")
        """
        for name, value, count in (("batch", batch, self.heads[0]), ("head", head, self.heads[1])):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name}: wanted an integer, got {value!r}")
            if count > 1 and not 0 <= value < count:  # one pattern serves all
                raise IndexError(f"{name}: wanted 0 to {count - 1}, got {value}")
        mask = self._pattern(batch % self.heads[0] * self.heads[1] + head % self.heads[1])
        blocks = np.zeros(mask._grid.counts, np.uint8)
        blocks[mask._rows(), mask.indices] = np.where(mask.kinds < 0, WHOLE, PART)
        seen = mask.to_dense() if elements else None
        return draw_mask(MaskPattern(mask.shape, mask.block, blocks, mask.density, seen), ax)

    def _pattern(self, number: int) -> Self:
        """One pattern of the mask, on the host."""
        mask = self.get()
        rows = mask._grid.counts[0]
        indptr = mask.indptr[number * rows : (number + 1) * rows + 1]
        stored = slice(int(indptr[0]), int(indptr[-1]))
        arrays = (indptr - indptr[0], mask.indices[stored], mask.kinds[stored], mask.bits)
        return type(mask)(mask._backend, mask.shape, mask.block, (1, 1), *arrays)

    @classmethod
    def _limits(cls) -> Limits:
        return Limits(_FEW, _FEW_BLOCKS)
