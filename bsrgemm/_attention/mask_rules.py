"""Masks in which every query sees an interval of keys: complete, causal, window, sinks, prefix and documents."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from .checks import host_array
from .mask_base import MaskBase
from .mask_grid import Grid, check_count
from .mask_intervals import Line, documents, flat


class IntervalMasks(MaskBase):
    """Constructors of masks of intervals. The host computes them, and nothing waits for the GPU."""

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
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

        Notes
        -----
        The host computes the rows of blocks, and the device receives them. Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.full(32, 48, block=16, device="cpu")
        <BlockMask 32 x 48, blocks 16 x 16, 6 stored (6 whole), density 1.000>
        """
        grid = Grid(queries, keys, block, device)
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
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

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
        grid = Grid(queries, keys, block, device)
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
            Keys that are seen before and after the position of the query; -1 means no bound. They are given by name:
            the second number of ``window(128, 31)`` is `keys`, and without bounds all of these keys are seen.
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
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

        Notes
        -----
        The window is exact to the key for any block size. One that is narrower than a block is stored as blocks in
        part, and the work is that of whole blocks: take a smaller `block` for it.

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
        grid = Grid(queries, keys, block, device)
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
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

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
        grid = Grid(queries, keys, block, device)
        return cls._from_lines(grid, flat(0), flat(check_count("count", count)))

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
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

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
        grid = Grid(queries, keys, block, device)
        return cls._from_lines(grid, flat(0), Line(grid.offset(align) + 1, check_count("length", length)))

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
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

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
        wanted = "the bounds of documents, 0 to S"
        bounds = host_array("cu_seqlens", cu_seqlens, wanted)
        if bounds.ndim != 1 or len(bounds) < 2 or bounds.dtype.kind not in "iu":
            raise ValueError(f"cu_seqlens: wanted {wanted}, got {cu_seqlens!r}")
        if bounds[0] != 0 or (bounds[1:] < bounds[:-1]).any():  # differences of unsigned numbers are never negative
            raise ValueError(f"cu_seqlens: wanted bounds that climb from 0, got {cu_seqlens!r}")
        S = int(bounds[-1])
        grid = Grid(S, S, block, device)
        return cls._from_rows(grid, documents(bounds.astype(np.int64), grid.block))
