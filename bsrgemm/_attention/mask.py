"""`BlockMask`: M[b, h, i, j] is True where query i may attend to key j, stored by blocks of queries and keys.

A block is allowed whole, in part or not at all. The mask has one entry for each block that allows anything, and the
distinct element masks of blocks that are allowed in part, packed as bits. No array of S_q x S_k elements is made.
The code is written over ``backend.xp``; lines that wait for the GPU are marked ``# synchronize!``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any, Self

import numpy as np

from .._array.base import BsrBase
from .._array.construct import from_sparse
from .._array.leaves import leaf
from .._backend import registry, structure
from .._backend.base import Array, Backend
from .._plotting import mask_picture
from .mask_intervals import BlockRows, Line, distinct_rows, documents, flat, lines

_INT32 = np.dtype(np.int32)
_LEAST_BLOCK, _MOST_BLOCK = 16, 256
_ALIGNMENTS = ("bottom-right", "top-left")
#: Kind of a block in which every element is allowed.
FULL = -1
#: Kind of a block that allows nothing; such blocks are removed before the mask is complete.
_NOTHING = -2
#: If there are at most this many words and combinations, element masks are computed on the host: no kernel is launched.
_FEW = 1 << 16
#: Up to this many blocks are listed by the host, which is faster than calls to a GPU.
_FEW_BLOCKS = 1 << 18


class BlockMask:
    """Which keys each query may attend to, stored by blocks of queries and keys.

    Masks are built by the class methods. ``a & b`` allows what both masks allow, ``a | b`` what either allows, ``~a``
    what `a` does not allow. Patterns may differ by batch and head; one pattern of `a` serves all patterns of `b`.

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
        -1 for a block whose elements are all allowed, otherwise the index of its element mask in `bits`.
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
    On a GPU, ``&``, ``|``, ``~``, `density`, `allowed` and ``repr`` wait for the GPU.

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

    def __init__(
        self,
        backend: Backend,
        shape: tuple[int, int],
        block: tuple[int, int],
        heads: tuple[int, int],
        indptr: Array,
        indices: Array,
        kinds: Array,
        bits: Array,
    ) -> None:
        """Wrap arrays without checks; the class methods build masks from checked arguments."""
        self._backend = backend
        self.shape, self.block, self.heads = shape, block, heads
        self.indptr, self.indices, self.kinds, self.bits = indptr, indices, kinds, bits

    # ------------------------------------------------------------------------------------ parametric
    @classmethod
    def full(cls, queries: int, keys: int | None = None, *, block: Any = 128, device: str | None = None) -> Self:
        """Every query sees every key.

        Parameters
        ----------
        queries : int
            Number of queries, S_q.
        keys : int, optional
            Number of keys, S_k; `queries` by default.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        device : {"cpu", "cuda"}, optional
            Device that holds the mask; `default_device()` by default.

        Returns
        -------
        BlockMask
            A mask of shape (S_q, S_k) with one pattern for all batches and heads.

        Raises
        ------
        ValueError
            If an argument is out of range, or `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        The host computes the rows of blocks, and the device receives them. Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.full(32, 48, block=16, device="cpu")
        <BlockMask 32 x 48, blocks 16 x 16, 6 stored (6 whole), density 1.000>
        """
        grid = _Grid(queries, keys, block, device)
        return cls._from_lines(grid, flat(0), flat(grid.shape[1]))

    @classmethod
    def causal(
        cls,
        queries: int,
        keys: int | None = None,
        *,
        align: str = "bottom-right",
        block: Any = 128,
        device: str | None = None,
    ) -> Self:
        """The query at position i sees the keys 0 to i.

        Parameters
        ----------
        queries : int
            Number of queries, S_q.
        keys : int, optional
            Number of keys, S_k; `queries` by default.
        align : {"bottom-right", "top-left"}
            Position of query i among the keys: ``i + S_k - S_q``, so that the last query is at the last key, or i.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        device : {"cpu", "cuda"}, optional
            Device that holds the mask; `default_device()` by default.

        Returns
        -------
        BlockMask
            A mask of shape (S_q, S_k) with one pattern for all batches and heads.

        Raises
        ------
        ValueError
            If an argument is out of range, or `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        The host computes the rows of blocks, and the device receives them. Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.causal(32, block=16, device="cpu")
        <BlockMask 32 x 32, blocks 16 x 16, 3 stored (1 whole), density 0.516>
        >>> bg.BlockMask.causal(2, 4, block=16, device="cpu").to_dense().astype(int)
        array([[1, 1, 1, 0],
               [1, 1, 1, 1]])
        """
        grid = _Grid(queries, keys, block, device)
        return cls._from_lines(grid, flat(0), Line(grid.offset(align) + 1))

    @classmethod
    def window(
        cls,
        queries: int,
        keys: int | None = None,
        *,
        left: int = -1,
        right: int = -1,
        align: str = "bottom-right",
        block: Any = 128,
        device: str | None = None,
    ) -> Self:
        """The query at position i sees keys ``i - left`` to ``i + right``, both ends included.

        Parameters
        ----------
        queries : int
            Number of queries, S_q.
        keys : int, optional
            Number of keys, S_k; `queries` by default.
        left, right : int
            Keys that are seen before and after the position of the query; -1 means no bound.
        align : {"bottom-right", "top-left"}
            Position of query i among the keys: ``i + S_k - S_q``, so that the last query is at the last key, or i.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        device : {"cpu", "cuda"}, optional
            Device that holds the mask; `default_device()` by default.

        Returns
        -------
        BlockMask
            A mask of shape (S_q, S_k) with one pattern for all batches and heads.

        Raises
        ------
        ValueError
            If an argument is out of range, or `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        The host computes the rows of blocks, and the device receives them. Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.window(4, left=1, right=0, block=16, device="cpu").to_dense().astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
        """
        grid = _Grid(queries, keys, block, device)
        for name, side in (("left", left), ("right", right)):
            if isinstance(side, bool) or not isinstance(side, int | np.integer) or side < -1:
                raise ValueError(f"{name}: wanted an integer from -1 on, got {side!r}")
        offset = grid.offset(align)
        low = flat(0) if left < 0 else Line(offset - int(left))
        high = flat(grid.shape[1]) if right < 0 else Line(offset + int(right) + 1)
        return cls._from_lines(grid, low, high)

    @classmethod
    def sinks(
        cls, queries: int, keys: int | None = None, *, count: int, block: Any = 128, device: str | None = None
    ) -> Self:
        """Every query sees the first `count` keys.

        Attention sinks are this mask joined with a window by ``|`` and cut by ``& causal``.

        Parameters
        ----------
        queries : int
            Number of queries, S_q.
        keys : int, optional
            Number of keys, S_k; `queries` by default.
        count : int
            Number of keys that every query sees.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        device : {"cpu", "cuda"}, optional
            Device that holds the mask; `default_device()` by default.

        Returns
        -------
        BlockMask
            A mask of shape (S_q, S_k) with one pattern for all batches and heads.

        Raises
        ------
        ValueError
            If an argument is out of range, or `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        The host computes the rows of blocks, and the device receives them. Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> sinks = bg.BlockMask.sinks(4, count=1, block=16, device="cpu")
        >>> (sinks | bg.BlockMask.window(4, left=1, right=0, block=16, device="cpu")).to_dense().astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 0, 1, 1]])
        """
        grid = _Grid(queries, keys, block, device)
        return cls._from_lines(grid, flat(0), flat(_count("count", count)))

    @classmethod
    def prefix(
        cls,
        queries: int,
        keys: int | None = None,
        *,
        length: int,
        align: str = "bottom-right",
        block: Any = 128,
        device: str | None = None,
    ) -> Self:
        """Prefix language model: all queries see the first `length` keys, and the keys after these causally.

        Parameters
        ----------
        queries : int
            Number of queries, S_q.
        keys : int, optional
            Number of keys, S_k; `queries` by default.
        length : int
            Number of keys that every query sees.
        align : {"bottom-right", "top-left"}
            Position of query i among the keys: ``i + S_k - S_q``, so that the last query is at the last key, or i.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        device : {"cpu", "cuda"}, optional
            Device that holds the mask; `default_device()` by default.

        Returns
        -------
        BlockMask
            A mask of shape (S_q, S_k) with one pattern for all batches and heads.

        Raises
        ------
        ValueError
            If an argument is out of range, or `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        The host computes the rows of blocks, and the device receives them. Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.prefix(4, length=2, block=16, device="cpu").to_dense().astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
        """
        grid = _Grid(queries, keys, block, device)
        return cls._from_lines(grid, flat(0), Line(grid.offset(align) + 1, _count("length", length)))

    @classmethod
    def global_tokens(
        cls,
        queries: int,
        keys: int | None = None,
        *,
        tokens: Any,
        align: str = "bottom-right",
        block: Any = 128,
        device: str | None = None,
    ) -> Self:
        """Some tokens see all keys and are seen by all queries (for Longformer, join with ``| window``).

        Parameters
        ----------
        queries : int
            Number of queries, S_q.
        keys : int, optional
            Number of keys, S_k; `queries` by default.
        tokens : int or sequence of int
            An integer n selects the first n tokens; a sequence lists positions among the keys.
        align : {"bottom-right", "top-left"}
            Position of query i among the keys: ``i + S_k - S_q``, so that the last query is at the last key, or i.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        device : {"cpu", "cuda"}, optional
            Device that holds the mask; `default_device()` by default.

        Returns
        -------
        BlockMask
            A mask of shape (S_q, S_k) with one pattern for all batches and heads.

        Raises
        ------
        ValueError
            If an argument is out of range, or `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        If the mask is on a GPU, this waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.global_tokens(4, tokens=[1], block=16, device="cpu").to_dense().astype(int)
        array([[0, 1, 0, 0],
               [1, 1, 1, 1],
               [0, 1, 0, 0],
               [0, 1, 0, 0]])
        """
        grid = _Grid(queries, keys, block, device)
        offset, (S_q, S) = grid.offset(align), grid.shape
        if isinstance(tokens, int | np.integer) and not isinstance(tokens, bool):
            runs = [(0, min(_count("tokens", tokens), S))]
        else:
            chosen = np.unique(np.asarray(tokens))
            if chosen.ndim != 1 or (
                chosen.size and (chosen.dtype.kind not in "iu" or chosen[0] < 0 or chosen[-1] >= S)
            ):
                raise ValueError(f"tokens: wanted a number or places from 0 to {S - 1}, got {tokens!r}")
            starts = chosen[np.append(True, np.diff(chosen) > 1)] if chosen.size else chosen
            ends = chosen[np.append(np.diff(chosen) > 1, True)] if chosen.size else chosen
            runs = [(int(a), int(b) + 1) for a, b in zip(starts, ends, strict=True)]
        masks = [cls._from_lines(grid, flat(0), flat(0))] if not runs else []
        for first, last in runs:
            seeing = (max(0, first - offset), min(S_q, last - offset))
            masks.append(cls._from_lines(grid, flat(0), flat(S), seeing))
            masks.append(cls._from_lines(grid, flat(first), flat(last)))
        return reduce(lambda a, b: a | b, masks)

    @classmethod
    def documents(cls, cu_seqlens: Any, *, block: Any = 128, device: str | None = None) -> Self:
        """Packed documents: a token sees the tokens of its own document.

        Parameters
        ----------
        cu_seqlens : sequence of int
            Position at which each document begins, from 0, and the total length S at the end.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        device : {"cpu", "cuda"}, optional
            Device that holds the mask; `default_device()` by default.

        Returns
        -------
        BlockMask
            A mask of shape (S, S) with one pattern for all batches and heads.

        Raises
        ------
        ValueError
            If `cu_seqlens` does not climb from 0, `block` is out of range, or `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        The host computes the rows of blocks, and the device receives them. Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.documents([0, 1, 3], block=16, device="cpu").to_dense().astype(int)
        array([[1, 0, 0],
               [0, 1, 1],
               [0, 1, 1]])
        """
        bounds = np.asarray(cu_seqlens)
        if bounds.ndim != 1 or len(bounds) < 2 or bounds.dtype.kind not in "iu":
            raise ValueError(f"cu_seqlens: wanted the bounds of documents, 0 to S, got {cu_seqlens!r}")
        if bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ValueError(f"cu_seqlens: wanted bounds that climb from 0, got {cu_seqlens!r}")
        S = int(bounds[-1])
        grid = _Grid(S, S, block, device)
        return cls._from_rows(grid, documents(bounds.astype(np.int64), grid.block))

    @classmethod
    def dilated(
        cls,
        queries: int,
        keys: int | None = None,
        *,
        count: int,
        dilation: int,
        align: str = "bottom-right",
        block: Any = 128,
        device: str | None = None,
    ) -> Self:
        """The query at position i sees `count` keys: i, i - dilation, i - 2 dilation and so on.

        Parameters
        ----------
        queries : int
            Number of queries, S_q.
        keys : int, optional
            Number of keys, S_k; `queries` by default.
        count : int
            Number of keys that a query sees, fewer where they would be before key 0.
        dilation : int
            Distance from one of these keys to the next, at least 1.
        align : {"bottom-right", "top-left"}
            Position of query i among the keys: ``i + S_k - S_q``, so that the last query is at the last key, or i.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        device : {"cpu", "cuda"}, optional
            Device that holds the mask; `default_device()` by default.

        Returns
        -------
        BlockMask
            A mask of shape (S_q, S_k) with one pattern for all batches and heads.

        Raises
        ------
        ValueError
            If an argument is out of range, or `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        If the mask is on a GPU, this waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.dilated(5, count=2, dilation=2, block=16, device="cpu").to_dense().astype(int)
        array([[1, 0, 0, 0, 0],
               [0, 1, 0, 0, 0],
               [1, 0, 1, 0, 0],
               [0, 1, 0, 1, 0],
               [0, 0, 1, 0, 1]])
        """
        grid = _Grid(queries, keys, block, device)
        count, dilation = _count("count", count), _count("dilation", dilation, least=1)
        offset, (bq, bk) = grid.offset(align), grid.block
        band = cls._from_lines(grid, Line(offset - (count - 1) * dilation), Line(offset + 1) if count else flat(0))
        # Blocks have the same elements if the distances from their first key to their first query differ by a multiple
        # of the dilation.
        row, key = band._rows(), band._keys()
        distance = (row * (bq + grid.counts[1] * bk) - key * bk + offset) % dilation
        code = distance * (len(band.bits) + 1) + (band.kinds + 1)

        def elements(xp: Any, code: Array, bits: Array) -> Array:
            step = xp.arange(min(dilation, bk + 1))[:, None]  # the last row, without a key, is for dilations > bk
            steps = _pack(xp, (xp.arange(bk) % dilation == step)[None])[0]
            distance = (code // (len(bits) + 1))[:, None] + xp.arange(bq)
            return _with_whole(xp, bits)[code % (len(bits) + 1)] & steps[xp.minimum(distance % dilation, bk)]

        return cls._from_codes(grid, (1, 1), key, code, dilation * (len(band.bits) + 1), [band.bits], elements)

    @classmethod
    def random(
        cls,
        queries: int,
        keys: int | None = None,
        *,
        per_row: int,
        heads: tuple[int, int] = (1, 1),
        seed: int = 0,
        block: Any = 128,
        device: str | None = None,
    ) -> Self:
        """Each block row has `per_row` whole blocks at random block columns (BigBird).

        The block columns are divided into `per_row` strips of equal width, and one block is drawn from each strip.

        Parameters
        ----------
        queries : int
            Number of queries, S_q.
        keys : int, optional
            Number of keys, S_k; `queries` by default.
        per_row : int
            Whole blocks in each block row; no more than there are block columns.
        heads : (int, int)
            Numbers of patterns along the batch and along the heads; each pattern is drawn anew.
        seed : int
            The same seed gives the same mask on every device.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        device : {"cpu", "cuda"}, optional
            Device that holds the mask; `default_device()` by default.

        Returns
        -------
        BlockMask
            A mask of shape (S_q, S_k) with ``heads[0] * heads[1]`` patterns.

        Raises
        ------
        ValueError
            If an argument is out of range, or `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.random(64, per_row=2, block=16, device="cpu")
        <BlockMask 64 x 64, blocks 16 x 16, 8 stored (8 whole), density 0.500>
        """
        grid = _Grid(queries, keys, block, device)
        xp = grid.backend.xp
        rows, cols = grid.counts
        heads = _heads(heads)
        per_row = min(_count("per_row", per_row), cols)
        all_rows = heads[0] * heads[1] * rows
        strips = np.arange(per_row + 1, dtype=np.uint64) * np.uint64(cols) // np.uint64(max(1, per_row))
        first, width = grid.backend.from_host(np.stack([strips[:-1], strips[1:] - strips[:-1]]))
        number = xp.arange(all_rows * per_row, dtype=np.uint64) + np.uint64(int(seed) % 2**32 << 32)
        indices = _mixed(number).reshape(all_rows, per_row) % width + first
        indptr = grid.backend.from_host(np.arange(all_rows + 1, dtype=_INT32) * _INT32.type(per_row))
        kinds = xp.full(all_rows * per_row, FULL, _INT32)
        indices = indices.reshape(-1).astype(_INT32)
        return cls(grid.backend, grid.shape, grid.block, heads, indptr, indices, kinds, _no_bits(xp, grid.block))

    # ------------------------------------------------------------------------------------ from data
    @classmethod
    def from_dense(cls, allowed: Any, *, block: Any = 128) -> Self:
        """Build a mask from booleans, on the device that holds them.

        Parameters
        ----------
        allowed : array of bool, shape (S_q, S_k) or (batch, heads, S_q, S_k)
            True where a query may attend to a key; a NumPy or CuPy array.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.

        Returns
        -------
        BlockMask
            A mask with one pattern, or with a pattern for each batch and head.

        Raises
        ------
        TypeError
            If `allowed` is not a NumPy or CuPy array of booleans.
        ValueError
            If `allowed` has neither 2 nor 4 dimensions, or `block` is out of range.

        Notes
        -----
        If the mask is on a GPU, this waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> import numpy as np
        >>> bg.BlockMask.from_dense(np.eye(32, dtype=bool), block=16)
        <BlockMask 32 x 32, blocks 16 x 16, 2 stored (0 whole), density 0.031>
        """
        backend = registry.backend_of(allowed)
        if backend is None or not backend.is_dense(allowed):
            raise TypeError(f"allowed: wanted a NumPy or CuPy array, got {type(allowed).__name__}")
        if allowed.dtype != np.bool_:
            raise TypeError(f"allowed: wanted booleans, got dtype {allowed.dtype}")
        if allowed.ndim not in (2, 4):
            raise ValueError(f"allowed: wanted 2 or 4 dimensions, got {allowed.ndim}")
        grid = _Grid(allowed.shape[-2], allowed.shape[-1], block, backend.name)
        xp = backend.xp
        heads = _heads(allowed.shape[:2]) if allowed.ndim == 4 else (1, 1)
        (rows, cols), (bq, bk) = grid.counts, grid.block
        full = xp.zeros((heads[0] * heads[1], rows * bq, cols * bk), bool)
        full[:, : grid.shape[0], : grid.shape[1]] = allowed.reshape(-1, *grid.shape)
        tiles = full.reshape(-1, bq, cols, bk).transpose(0, 2, 1, 3)
        row, col = xp.nonzero(tiles.any(axis=(2, 3)))  # synchronize!
        return cls._from_masks(grid, heads, row * cols + col, _pack(xp, tiles[row, col]))

    @classmethod
    def from_bsr(cls, A: Any) -> Self:
        """Allow the stored blocks of a BSR matrix; if it is boolean, only their True elements.

        Parameters
        ----------
        A : bsr_array, bsr_matrix or a BSR matrix of SciPy
            Its shape is (S_q, S_k), its block size becomes that of the mask.

        Returns
        -------
        BlockMask
            A mask with one pattern, on the device of `A`.

        Raises
        ------
        TypeError
            If `A` is not in BSR format.
        ValueError
            If a side of the blocks is not a multiple of 16 from 16 to 256.

        Notes
        -----
        If the mask is on a GPU, this waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> import numpy as np
        >>> A = bg.from_dense(np.eye(32), blocksize=(16, 16))
        >>> bg.BlockMask.from_bsr(A)
        <BlockMask 32 x 32, blocks 16 x 16, 2 stored (2 whole), density 0.500>
        """
        if getattr(A, "format", None) != "bsr":
            raise TypeError(f"A: wanted a BSR matrix, got {type(A).__name__}")
        backend = registry.backend_of(A)
        assert backend is not None
        grid = _Grid(A.shape[0], A.shape[1], A.blocksize, backend.name)
        if A.dtype != np.bool_:
            return cls._from_whole(grid, (1, 1), A.indptr, A.indices)
        if not isinstance(A, BsrBase):  # a class of SciPy
            parts = from_sparse(backend, A, None, False, None)
            A = leaf(backend, True)((0, 0), dtype=A.dtype)._new(parts.blocks, parts.shape)
        data, indices, indptr = A._canonical()
        key = structure.block_keys(backend, indices, indptr, grid.counts[1])
        return cls._from_masks(grid, (1, 1), key, _pack(backend.xp, data))

    @classmethod
    def from_block_indices(
        cls, indptr: Any, indices: Any, *, shape: tuple[int, int], block: Any = 128, heads: tuple[int, int] = (1, 1)
    ) -> Self:
        """Allow whole blocks, which are given by the block columns of each block row.

        Parameters
        ----------
        indptr : array of int, shape (patterns * block rows + 1,)
            First entry of each block row in `indices`, counted through all patterns, and ``len(indices)`` at the end.
        indices : array of int
            Block columns in any order. A block that is listed twice counts once. The mask is on the device of this
            array.
        shape : (int, int)
            Numbers of queries and keys.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        heads : (int, int)
            Numbers of patterns along the batch and along the heads.

        Returns
        -------
        BlockMask
            A mask of shape `shape` with ``heads[0] * heads[1]`` patterns.

        Raises
        ------
        ValueError
            If `indptr` does not climb from 0 to ``len(indices)``, a block column is outside the mask, or another
            argument is out of range.

        Notes
        -----
        If the mask is on a GPU, this waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.from_block_indices([0, 1, 3], [0, 0, 1], shape=(32, 32), block=16)
        <BlockMask 32 x 32, blocks 16 x 16, 3 stored (3 whole), density 0.750>
        """
        backend = registry.backend_of(indices) or registry.host()
        xp = backend.xp
        indptr, indices = xp.asarray(indptr), xp.asarray(indices)
        if not indices.size:  # NumPy makes an empty list an array of floats
            indices = indices.astype(np.int64)
        grid = _Grid(shape[0], shape[1], block, backend.name)
        heads = _heads(heads)
        rows, cols = grid.counts
        wanted = heads[0] * heads[1] * rows + 1
        if indptr.ndim != 1 or len(indptr) != wanted or indptr.dtype.kind not in "iu":
            raise ValueError(f"indptr: wanted {wanted} integers, got {indptr.dtype} of shape {tuple(indptr.shape)}")
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueError(f"indices: wanted integers in one dimension, got {indices.dtype}, {indices.ndim}-D")
        good = bool((indptr[0] == 0) & (indptr[-1] == len(indices)) & (indptr[1:] >= indptr[:-1]).all())
        if not good:
            raise ValueError(f"indptr: wanted numbers that climb from 0 to {len(indices)}")
        if len(indices) and not bool((indices.min() >= 0) & (indices.max() < cols)):
            raise ValueError(f"indices: wanted block columns from 0 to {cols - 1}")
        return cls._from_whole(grid, heads, indptr.astype(np.int64), indices.astype(np.int64))

    @classmethod
    def stack(cls, masks: Sequence[BlockMask], *, axis: str = "heads") -> Self:
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
            If the masks are on different devices.

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
        if axis not in ("heads", "batch"):
            raise ValueError(f"axis: wanted 'heads' or 'batch', got {axis!r}")
        if not masks:
            raise ValueError("masks: wanted at least one")
        first = masks[0]
        for other in masks[1:]:
            first._check_alike(other, "masks")
            if other.heads != first.heads:
                raise ValueError(f"masks: wanted patterns of {first.heads} batches and heads, got {other.heads}")
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
            return xp.concatenate([_with_whole(xp, x) for x in bits])[code]

        return cls._from_codes(grid, heads, key, code, tables[-1], [mask.bits for mask in masks], elements)

    # ------------------------------------------------------------------------------------ combining
    def __and__(self, other: Any) -> Self:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._combined(other, both=True)

    def __or__(self, other: Any) -> Self:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._combined(other, both=False)

    def __invert__(self) -> Self:
        """Allow what this mask forbids; a block is stored for each one that is not allowed whole here. Waits for the
        GPU.
        """
        xp, grid = self._backend.xp, self._grid
        rows, cols = grid.counts
        every = xp.full(self.heads[0] * self.heads[1] * rows * cols, len(self.bits), _INT32)
        every[self._keys()] = self.kinds
        key = xp.flatnonzero(every != FULL)  # synchronize!

        def elements(xp: Any, code: Array, bits: Array) -> Array:
            return ~xp.concatenate([bits, xp.zeros((1, *bits.shape[1:]), np.uint32)])[code]

        return self._from_codes(grid, self.heads, key, every[key], len(self.bits) + 1, [self.bits], elements)

    # ------------------------------------------------------------------------------------ description
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
        counts = _counts(self._backend.xp, _with_whole(self._backend.xp, self.bits))
        return int(self._backend.xp.where(self.kinds < 0, size, counts[self.kinds + 1]).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the four arrays of the mask."""
        return int(sum(x.nbytes for x in (self.indptr, self.indices, self.kinds, self.bits)))

    @property
    def device(self) -> Any:
        """The device that holds the mask: "cpu", or the CuPy device."""
        return self._backend.device_of(self.indices)

    def __getstate__(self) -> dict[str, Any]:
        """Return the mask for a copy or a pickle, without lists and launches, which are made for one object alone."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_tiles", "_calls")}

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
        if kind == FULL:
            return self._backend.xp.ones(self.block, bool)
        return _unpack(self._backend.xp, self.bits[kind : kind + 1], self.block[1])[0]

    # ------------------------------------------------------------------------------------ conversion
    def to_dense(self) -> Array:
        """The mask as booleans, for small masks.

        Returns
        -------
        array of bool, shape (S_q, S_k), or (*heads, S_q, S_k) for several patterns
            True where a query may attend to a key, on the device of the mask.

        Notes
        -----
        The array takes S_q * S_k bytes for each pattern. Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.causal(3, block=16, device="cpu").to_dense()
        array([[ True, False, False],
               [ True,  True, False],
               [ True,  True,  True]])
        """
        xp = self._backend.xp
        (rows, cols), (bq, bk) = self._grid.counts, self.block
        patterns = self.heads[0] * self.heads[1]
        tiles = xp.zeros((patterns * rows, cols, bq, bk), bool)
        masks = xp.concatenate([_unpack(xp, self.bits, bk), xp.ones((1, bq, bk), bool)])
        tiles[self._rows(), self.indices] = masks[self.kinds]
        dense = tiles.reshape(patterns, rows, cols, bq, bk).transpose(0, 1, 3, 2, 4).reshape(patterns, rows * bq, -1)
        dense = dense[:, : self.shape[0], : self.shape[1]]
        return dense[0] if self.heads == (1, 1) else dense.reshape(*self.heads, *self.shape)

    def to_bsr(self) -> Any:
        """The mask as a boolean BSR array.

        Returns
        -------
        bsr_array of bool, shape (S_q, S_k)
            Its blocks are those of the mask, on the same device.

        Raises
        ------
        ValueError
            If the mask has several patterns, or a length is not a multiple of the block.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.causal(32, block=16, device="cpu").to_bsr().nnz
        768
        """
        if self.heads != (1, 1):
            raise ValueError(f"to_bsr: wanted one pattern, got {self.heads[0]} x {self.heads[1]}")
        if any(n % b for n, b in zip(self.shape, self.block, strict=True)):
            raise ValueError(
                f"to_bsr: {self.shape} is no multiple of the block {self.block}; to_dense() takes any length"
            )
        xp = self._backend.xp
        masks = xp.concatenate([_unpack(xp, self.bits, self.block[1]), xp.ones((1, *self.block), bool)])
        arrays = (masks[self.kinds], self.indices.copy(), self.indptr.copy())
        return leaf(self._backend, True)(arrays, shape=self.shape)

    def to_device(self, device: str) -> Self:
        """Move the mask to another device.

        Parameters
        ----------
        device : {"cpu", "cuda"}
            The name of the device.

        Returns
        -------
        BlockMask
            This mask if it is there already, otherwise a copy.

        Raises
        ------
        ValueError
            If `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.

        Notes
        -----
        A copy from the GPU waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> mask = bg.BlockMask.causal(32, block=16, device="cpu")
        >>> mask.to_device("cpu") is mask
        True
        """
        backend = registry.by_name(device)
        if backend is self._backend:
            return self
        mine = (self.indptr, self.indices, self.kinds, self.bits)
        indptr, indices, kinds, bits = (backend.from_host(self._backend.to_host(x)) for x in mine)
        return type(self)(backend, self.shape, self.block, self.heads, indptr, indices, kinds, bits)

    def get(self) -> Self:
        """The mask on the host.

        Returns
        -------
        BlockMask
            This mask if it is on the host already, otherwise a copy.

        Notes
        -----
        A copy from the GPU waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.causal(32, block=16).get().device
        'cpu'
        """
        return self.to_device("cpu")

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
        ImportError
            If matplotlib is not installed.

        Notes
        -----
        A mask on the GPU is copied to the host, which waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> ax = bg.BlockMask.causal(64, block=16, device="cpu").plot()  # doctest: +SKIP
        >>> ax.figure.savefig("mask.png")  # doctest: +SKIP
        """
        for name, value, count in (("batch", batch, self.heads[0]), ("head", head, self.heads[1])):
            if count > 1 and not 0 <= value < count:  # one pattern serves all
                raise IndexError(f"{name}: wanted 0 to {count - 1}, got {value}")
        mask = self._pattern(batch % self.heads[0] * self.heads[1] + head % self.heads[1])
        blocks = np.zeros(mask._grid.counts, np.uint8)
        blocks[mask._rows(), mask.indices] = np.where(mask.kinds < 0, mask_picture.WHOLE, mask_picture.PART)
        seen = mask.to_dense() if elements else None
        return mask_picture.draw(mask_picture.MaskPattern(mask.shape, mask.block, blocks, mask.density, seen), ax)

    # ------------------------------------------------------------------------------------ inside
    @property
    def _grid(self) -> _Grid:
        return _Grid(self.shape[0], self.shape[1], self.block, self._backend.name)

    def _pattern(self, number: int) -> BlockMask:
        """One pattern of the mask, on the host."""
        mask = self.get()
        rows = mask._grid.counts[0]
        indptr = mask.indptr[number * rows : (number + 1) * rows + 1]
        stored = slice(int(indptr[0]), int(indptr[-1]))
        arrays = (indptr - indptr[0], mask.indices[stored], mask.kinds[stored], mask.bits)
        return type(mask)(mask._backend, mask.shape, mask.block, (1, 1), *arrays)

    def _rows(self) -> Array:
        """The block row of every stored block, counted through all patterns."""
        return self._backend.expand(self.indptr.astype(np.int64), len(self.indices))

    def _keys(self) -> Array:
        """``block row * block columns + block column`` of every stored block, in ascending order."""
        return structure.block_keys(self._backend, self.indices, self.indptr, self._grid.counts[1])

    @classmethod
    def _from_lines(cls, grid: _Grid, low: Line, high: Line, queries: tuple[int, int] | None = None) -> Self:
        """Queries ``queries[0]`` to ``queries[1] - 1``, or all, see keys `low` to `high` - 1."""
        return cls._from_rows(grid, lines(grid.shape, grid.block, low, high, queries))

    @classmethod
    def _from_rows(cls, grid: _Grid, stored: BlockRows) -> Self:
        """A mask from rows of blocks that the host has computed. Nothing waits for the GPU."""
        backend, xp = grid.backend, grid.backend.xp
        total = int(stored.starts[-1])
        shifts = stored.first - stored.starts[:-1]
        if total <= _FEW_BLOCKS:
            shapes = (stored.starts.shape, (total,), (total,), stored.bits.shape)
            flat = np.empty(sum(map(math.prod, shapes)), _INT32)
            indptr, indices, kinds, bits = _cut(flat, shapes)
            indptr[...], kinds[...], bits[...] = stored.starts, FULL, stored.bits.view(_INT32)
            np.add(
                np.arange(total, dtype=_INT32), np.repeat(shifts.astype(_INT32), np.diff(stored.starts)), out=indices
            )
            kinds[stored.places] = stored.kinds
            if backend is not registry.host():
                indptr, indices, kinds, bits = _cut(backend.from_host(flat), shapes)
            return cls(backend, grid.shape, grid.block, (1, 1), indptr, indices, kinds, bits.view(np.uint32))
        arrays = (stored.starts, shifts, stored.places, stored.kinds, stored.bits.view(_INT32))
        moved = backend.from_host(np.concatenate([x.reshape(-1) for x in arrays], dtype=_INT32, casting="unsafe"))
        indptr, shifts, places, some, bits = _cut(moved, [x.shape for x in arrays])
        indices = xp.arange(total, dtype=_INT32) + shifts[backend.expand(indptr, total)]
        kinds = xp.full(total, FULL, _INT32)
        kinds[places] = some
        return cls(backend, grid.shape, grid.block, (1, 1), indptr, indices, kinds, bits.view(np.uint32))

    @classmethod
    def _from_whole(cls, grid: _Grid, heads: tuple[int, int], indptr: Array, indices: Array) -> Self:
        """A mask of whole blocks, which may come in any order and several times."""
        xp, (rows, cols) = grid.backend.xp, grid.counts
        key = xp.unique(structure.block_keys(grid.backend, indices, indptr, cols))  # synchronize!
        indices, indptr = structure.keys_to_index(grid.backend, key, heads[0] * heads[1] * rows, cols, _INT32)
        kinds = xp.full(len(key), FULL, _INT32)
        return cls(grid.backend, grid.shape, grid.block, heads, indptr, indices, kinds, _no_bits(xp, grid.block))

    @classmethod
    def _from_masks(cls, grid: _Grid, heads: tuple[int, int], key: Array, bits: Array) -> Self:
        """A mask of blocks whose keys (see `_keys`) ascend; each block has an element mask in `bits`."""
        code = grid.backend.xp.arange(len(bits))
        return cls._from_codes(grid, heads, key, code, max(1, len(bits)), [bits], lambda xp, code, bits: bits[code])

    @classmethod
    def _from_codes(
        cls,
        grid: _Grid,
        heads: tuple[int, int],
        key: Array,
        code: Array,
        bound: int,
        sources: Sequence[Array],
        elements: Callable[..., Array],
    ) -> Self:
        """A mask of blocks whose keys (see `_keys`) ascend; blocks with the same code have the same element mask.

        Codes are below `bound`. ``elements(xp, codes, *sources)`` computes the element masks of codes; elements that it
        allows beyond the last query or key are cleared. Blocks that allow nothing are left out, and equal masks are
        stored once.
        """
        backend, xp = grid.backend, grid.backend.xp
        (S_q, S_k), (bq, bk), (rows, cols) = grid.shape, grid.block, grid.counts
        if S_k % bk:
            code = code + (key % cols == cols - 1) * bound
        if S_q % bq:
            code = code + (key % (rows * cols) >= (rows - 1) * cols) * (2 * bound)
        few = 4 * bound + sum(x.size for x in sources) <= _FEW
        at = np if few else xp
        if few:
            flags = xp.zeros(4 * bound, np.uint32)
            flags[code] = 1
            moved = backend.to_host(xp.concatenate([flags, *(x.reshape(-1) for x in sources)]))  # synchronize!
            flags, *parts = np.split(moved, np.cumsum([4 * bound, *(x.size for x in sources)])[:-1])
            used = np.flatnonzero(flags)
            sources = [part.reshape(x.shape) for part, x in zip(parts, sources, strict=True)]
        else:
            used, code = xp.unique(code, return_inverse=True)  # synchronize!
        inside = _inside(at, grid)
        bits = elements(at, used % bound, *sources) & inside[used // bound]
        counts = _counts(at, bits)
        whole = counts == _counts(at, inside)[used // bound]
        part = at.flatnonzero((counts > 0) & ~whole)  # synchronize!
        table = at.where(whole, FULL, _NOTHING).astype(_INT32)
        chosen, table[part] = _distinct(at, bits[part])
        bits = bits[part[chosen]]
        dropped = bool((table == _NOTHING).any())  # synchronize!
        if few:
            kinds_of = np.zeros(4 * bound, _INT32)
            kinds_of[used] = table
            table, bits = backend.from_host(kinds_of), backend.from_host(bits)
        kinds = table[code.reshape(-1)]
        if dropped:
            kept = xp.flatnonzero(kinds != _NOTHING)  # synchronize!
            key, kinds = key[kept], kinds[kept]
        indices, indptr = structure.keys_to_index(backend, key, heads[0] * heads[1] * rows, cols, _INT32)
        return cls(backend, grid.shape, grid.block, heads, indptr, indices, kinds, bits)

    def _check_alike(self, other: BlockMask, what: str) -> None:
        if other._backend is not self._backend:
            raise registry.elsewhere(other.indices, what, self._backend)
        if other.shape != self.shape or other.block != self.block:
            raise ValueError(
                f"{what}: masks of {self.shape} in blocks of {self.block} and of {other.shape} in blocks of "
                f"{other.block} do not go together"
            )

    def _spread(self, heads: tuple[int, int]) -> BlockMask:
        """The same mask with a separate pattern for each of `heads` batches and heads."""
        if heads == self.heads:
            return self
        backend, xp, rows, (B, H) = self._backend, self._backend.xp, self._grid.counts[0], self.heads
        pattern = np.arange(heads[0] * heads[1])
        source = backend.from_host(pattern // heads[1] % B * H + pattern % heads[1] % H)
        total = len(self.indices) * (len(pattern) // (B * H))
        old, behind = (x.reshape(B * H, rows)[source].reshape(-1) for x in (self.indptr[:-1], self.indptr[1:]))
        indptr = xp.zeros(len(old) + 1, _INT32)
        indptr[1:] = xp.cumsum(behind - old, dtype=_INT32)
        place = xp.arange(total) + (old - indptr[:-1])[backend.expand(indptr, total)]
        arrays = (indptr, self.indices[place], self.kinds[place], self.bits)
        return BlockMask(backend, self.shape, self.block, heads, *arrays)

    def _combined(self, other: BlockMask, both: bool) -> Self:
        """Allow what both masks allow, or what either allows; each pair of element masks that shares a block is
        combined once.
        """
        self._check_alike(other, "&" if both else "|")
        heads = tuple(np.broadcast_shapes(self.heads, other.heads))
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
            masks = xp.concatenate([nothing, _with_whole(xp, a), _with_whole(xp, b)])
            x, y = masks[code % base], masks[code // base]
            return x & y if both else x | y

        return self._from_codes(self._grid, heads, key[1:-1], code, base * base, [a.bits, b.bits], elements)


class _Grid:
    """Checked lengths, block and backend of a mask."""

    def __init__(self, queries: Any, keys: Any, block: Any, device: str | None) -> None:
        keys = queries if keys is None else keys
        self.shape = (_count("queries", queries), _count("keys", keys))
        sides = (block, block) if isinstance(block, int | np.integer) else tuple(block)
        if len(sides) != 2 or not all(isinstance(b, int | np.integer) for b in sides):
            raise ValueError(f"block: wanted one or two integers, got {block!r}")
        if not all(_LEAST_BLOCK <= b <= _MOST_BLOCK and b % _LEAST_BLOCK == 0 for b in sides):
            raise ValueError(f"block: wanted multiples of {_LEAST_BLOCK} up to {_MOST_BLOCK}, got {block!r}")
        self.block = (int(sides[0]), int(sides[1]))
        self.backend = registry.by_name(registry.default_device() if device is None else device)
        self.counts = (-(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1]))

    def offset(self, align: str) -> int:
        """The position of the first query among the keys."""
        if align not in _ALIGNMENTS:
            raise ValueError(f"align: wanted 'bottom-right' or 'top-left', got {align!r}")
        return self.shape[1] - self.shape[0] if align == "bottom-right" else 0

    def sizes(self, row: Array, col: Array) -> Array:
        """Number of elements of each block that lie within the lengths."""
        xp, (S_q, S_k), (bq, bk) = self.backend.xp, self.shape, self.block
        rows = self.counts[0]
        height = xp.minimum(bq, S_q - row % max(1, rows) * bq)
        return height * xp.minimum(bk, S_k - col.astype(np.int64) * bk)


def _count(name: str, n: Any, least: int = 0) -> int:
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < least:
        raise ValueError(f"{name}: wanted an integer from {least} on, got {n!r}")
    return int(n)


def _heads(heads: Any) -> tuple[int, int]:
    sides = tuple(heads)
    if len(sides) != 2:
        raise ValueError(f"heads: wanted the numbers of batches and heads, got {heads!r}")
    return _count("heads", sides[0], 1), _count("heads", sides[1], 1)


def _cut(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Split a flat array into arrays of these shapes, which follow each other in it."""
    sizes = [math.prod(shape) for shape in shapes]
    ends = itertools.accumulate(sizes)
    return [flat[end - n : end].reshape(shape) for shape, n, end in zip(shapes, sizes, ends, strict=True)]


def _no_bits(xp: Any, block: tuple[int, int]) -> Array:
    return xp.zeros((0, block[0], -(-block[1] // 32)), np.uint32)


def _with_whole(xp: Any, bits: Array) -> Array:
    """`bits` after a first element mask that allows everything."""
    return xp.concatenate([xp.full((1, *bits.shape[1:]), 0xFFFFFFFF, np.uint32), bits])


def _inside(xp: Any, grid: _Grid) -> Array:
    """Four element masks of what lies within the lengths: blocks not at an end, at the end of keys, of queries, of
    both.
    """
    (S_q, S_k), (bq, bk) = grid.shape, grid.block
    inside = xp.ones((4, bq, bk), bool)
    inside[2:, S_q % bq or bq :] = False
    inside[1::2, :, S_k % bk or bk :] = False
    return _pack(xp, inside)


def _pack(xp: Any, masks: Array) -> Array:
    """Pack booleans (n, bq, bk) into words of 32 bits, (n, bq, ceil(bk / 32))."""
    n, bq, bk = masks.shape
    words = -(-bk // 32)
    padded = xp.zeros((n, bq, words * 32), np.uint32)
    padded[..., :bk] = masks
    return (padded.reshape(n, bq, words, 32) << xp.arange(32, dtype=np.uint32)).sum(axis=3, dtype=np.uint32)


def _unpack(xp: Any, bits: Array, bk: int) -> Array:
    n, bq, words = bits.shape
    return (bits[..., None] >> xp.arange(32, dtype=np.uint32) & np.uint32(1)).reshape(n, bq, words * 32)[..., :bk] != 0


def _counts(xp: Any, bits: Array) -> Array:
    """Number of elements that each mask allows."""
    table = xp.asarray(_ones_of_16_bits())
    halves = xp.ascontiguousarray(bits).view(np.uint16)
    return table[halves].sum(axis=(1, 2), dtype=np.int64)


@cache
def _ones_of_16_bits() -> np.ndarray[Any, Any]:
    numbers = np.arange(1 << 16, dtype=np.uint16)
    return np.unpackbits(numbers.view(np.uint8).reshape(-1, 2), axis=1).sum(axis=1, dtype=np.uint8)


def _mixed(x: Array) -> Array:
    """A hash of 64-bit numbers that is the same on every device."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _distinct(xp: Any, bits: Array) -> tuple[Array, Array]:
    """(indices of distinct element masks, for every mask the number of the distinct mask that it equals).

    On the GPU masks are compared by a hash; then the result is compared with the masks themselves.
    """
    if xp is np:
        return distinct_rows(bits)
    if not len(bits):
        return xp.zeros(0, np.int64), xp.zeros(0, np.int64)
    rows = bits.reshape(len(bits), -1)
    for seed in range(1, 100):
        weights = _mixed(xp.arange(rows.shape[1], dtype=np.uint64) + np.uint64(seed << 32)) | np.uint64(1)
        hashes = (rows.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
        _, places, same = xp.unique(hashes, return_index=True, return_inverse=True)  # synchronize!
        same = same.reshape(-1)
        if bool((rows == rows[places[same]]).all()):  # synchronize!
            return places, same
    raise AssertionError("a hundred hashes in a row collided")
