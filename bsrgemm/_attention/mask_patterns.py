"""Masks with gaps between the keys that a query sees: global tokens, dilated windows and random blocks."""

from __future__ import annotations

from functools import reduce
from typing import Any, Self

import numpy as np

from .._backend.base import Array
from .checks import host_array
from .mask_bits import mixed, no_bits, pack, whole_kinds, with_whole
from .mask_combine import Combinations
from .mask_grid import Grid, check_count, check_heads, check_stored
from .mask_intervals import Line, flat

_INT32 = np.dtype(np.int32)


class PatternMasks(Combinations):
    """Constructors of masks with gaps."""

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
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

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
        grid = Grid(queries, keys, block, device)
        offset, (S_q, S) = grid.offset(align), grid.shape
        if isinstance(tokens, int | np.integer) and not isinstance(tokens, bool):
            runs = [(0, min(check_count("tokens", tokens), S))]
        else:
            wanted = f"a number or places from 0 to {S - 1}"
            given = host_array("tokens", tokens, wanted)
            if given.size and given.dtype.kind not in "iu":
                raise ValueError(f"tokens: wanted {wanted}, got {tokens!r}")
            chosen = np.unique(given)
            if chosen.size and (chosen[0] < 0 or chosen[-1] >= S):
                raise ValueError(f"tokens: wanted {wanted}, got {tokens!r}")
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
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

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
        grid = Grid(queries, keys, block, device)
        count, dilation = check_count("count", count), check_count("dilation", dilation, least=1)
        offset, (bq, bk) = grid.offset(align), grid.block
        dilation = min(dilation, sum(grid.shape) + bq + bk)  # more than any distance from a key to a query
        band = cls._from_lines(grid, Line(offset - (count - 1) * dilation), Line(offset + 1) if count else flat(0))
        # Blocks have the same elements if the distances from their first key to their first query differ by a multiple
        # of the dilation.
        row, key = band._rows(), band._keys()
        distance = (row * (bq + grid.counts[1] * bk) - key * bk + offset) % dilation
        code = distance * (len(band.bits) + 1) + (band.kinds + 1)

        def elements(xp: Any, code: Array, bits: Array) -> Array:
            step = xp.arange(min(dilation, bk + 1))[:, None]  # the last row, without a key, is for dilations > bk
            steps = pack(xp, (xp.arange(bk) % dilation == step)[None])[0]
            distance = (code // (len(bits) + 1))[:, None] + xp.arange(bq)
            return with_whole(xp, bits)[code % (len(bits) + 1)] & steps[xp.minimum(distance % dilation, bk)]

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
            If an argument is out of range, for example `per_row` above the number of block columns, or `device` is not
            the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

        Notes
        -----
        Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.random(64, per_row=2, block=16, device="cpu")
        <BlockMask 64 x 64, blocks 16 x 16, 8 stored (8 whole), density 0.500>
        """
        grid = Grid(queries, keys, block, device)
        xp = grid.backend.xp
        rows, cols = grid.counts
        heads = check_heads(heads)
        per_row = check_count("per_row", per_row)
        if per_row > cols:
            raise ValueError(f"per_row: wanted at most {cols}, the number of block columns, got {per_row}")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise ValueError(f"seed: wanted an integer, got {seed!r}")
        all_rows = heads[0] * heads[1] * rows
        check_stored(all_rows * per_row, grid.block)
        strips = np.arange(per_row + 1, dtype=np.uint64) * np.uint64(cols) // np.uint64(max(1, per_row))
        first, width = grid.backend.from_host(np.stack([strips[:-1], strips[1:] - strips[:-1]]))
        number = xp.arange(all_rows * per_row, dtype=np.uint64) + np.uint64(int(seed) % 2**32 << 32)
        indices = mixed(number).reshape(all_rows, per_row) % width + first
        indptr = grid.backend.from_host(np.arange(all_rows + 1, dtype=_INT32) * _INT32.type(per_row))
        kinds = whole_kinds(xp, all_rows * per_row)
        indices = indices.reshape(-1).astype(_INT32)
        return cls(grid.backend, grid.shape, grid.block, heads, indptr, indices, kinds, no_bits(xp, grid.block))
