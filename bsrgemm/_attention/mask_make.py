"""Masks from rules: causal, windows, documents, prefixes, patterns of blocks, and those that are drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from textwrap import indent
from typing import Any, Self, TypeVar

import numpy as np

from .._backend.base import Array
from .checks import host_array
from .mask_base import (
    Grid,
    Line,
    MaskBase,
    check_count,
    check_heads,
    check_stored,
    documents,
    flat,
    mixed,
    no_bits,
    pack,
    whole_kinds,
    with_whole,
)
from .mask_ops import Combinations

_Maker = TypeVar("_Maker", bound=Callable[..., Any])
_ERRORS_OF_DEVICES = """ImportError
    If `device` is "cuda" and CuPy cannot be imported.
RuntimeError
    If `device` is "cuda" and CuPy finds no GPU."""
#: Entries of docstrings that several constructors share, by the name that stands for them in angle brackets.
_ENTRIES = {
    "lengths": """queries : int
    Number of queries, S_q.
keys : int, optional
    Number of keys, S_k; `queries` by default.""",
    "align": """align : {"bottom-right", "top-left"}
    Position of query i among the keys: ``i + S_k - S_q``, so that the last query is at the last key, or i.""",
    "block": """block : int or (int, int)
    Queries and keys of a block: multiples of 16 up to 256.
device : {"cpu", "cuda"}, optional
    Device that holds the mask; `default_device()` by default.""",
    "one pattern": """BlockMask
    A mask of shape (S_q, S_k) with one pattern for all batches and heads.""",
    "errors": f"""ValueError
    If an argument is out of range, or `device` is not the name of a device.
{_ERRORS_OF_DEVICES}""",
    "errors of devices": _ERRORS_OF_DEVICES,
    "no wait": "The host computes the rows of blocks, and the device receives them. Nothing waits for the GPU.",
}


def _described(make: _Maker) -> _Maker:
    """Write the entries into the docstring of a constructor."""
    make.__doc__ = re.sub(
        "^( *)<([a-z ]+)>$", lambda found: indent(_ENTRIES[found[2]], found[1]), make.__doc__ or "", flags=re.MULTILINE
    )
    return make


class IntervalMasks(MaskBase):
    """Constructors of masks of intervals. The host computes them, and nothing waits for the GPU."""

    @classmethod
    @_described
    def full(cls, queries: int, keys: int | None = None, *, block: Any = 128, device: str | None = None) -> Self:
        """Every query sees every key.

        Parameters
        ----------
        <lengths>
        <block>

        Returns
        -------
        <one pattern>

        Raises
        ------
        <errors>

        Notes
        -----
        <no wait>

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.full(32, 48, block=16, device="cpu")
        <BlockMask 32 x 48, blocks 16 x 16, 6 stored (6 whole), density 1.000>
        """
        grid = Grid(queries, keys, block, device)
        return cls._from_lines(grid, flat(0), flat(grid.shape[1]))

    @classmethod
    @_described
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
        <lengths>
        <align>
        <block>

        Returns
        -------
        <one pattern>

        Raises
        ------
        <errors>

        Notes
        -----
        <no wait>

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
    @_described
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
        <lengths>
        left, right : int
            Keys that are seen before and after the position of the query; -1 means no bound. They are given by name:
            the second number of ``window(128, 31)`` is `keys`, and without bounds all of these keys are seen.
        <align>
        <block>

        Returns
        -------
        <one pattern>

        Raises
        ------
        <errors>

        Notes
        -----
        The window is exact to the key for any block size. One that is narrower than a block is stored as blocks in
        part, and the work is that of whole blocks: take a smaller `block` for it.

        <no wait>

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
    @_described
    def sinks(
        cls, queries: int, keys: int | None = None, *, count: int, block: Any = 128, device: str | None = None
    ) -> Self:
        """Every query sees the first `count` keys.

        Attention sinks are this mask joined with a window by ``|`` and cut by ``& causal``.

        Parameters
        ----------
        <lengths>
        count : int
            Number of keys that every query sees.
        <block>

        Returns
        -------
        <one pattern>

        Raises
        ------
        <errors>

        Notes
        -----
        <no wait>

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
    @_described
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
        <lengths>
        length : int
            Number of keys that every query sees.
        <align>
        <block>

        Returns
        -------
        <one pattern>

        Raises
        ------
        <errors>

        Notes
        -----
        <no wait>

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
    @_described
    def documents(cls, cu_seqlens: Any, *, block: Any = 128, device: str | None = None) -> Self:
        """Packed documents: a token sees the tokens of its own document.

        Parameters
        ----------
        cu_seqlens : sequence of int
            Position at which each document begins, from 0, and the total length S at the end.
        <block>

        Returns
        -------
        BlockMask
            A mask of shape (S, S) with one pattern for all batches and heads.

        Raises
        ------
        ValueError
            If `cu_seqlens` does not climb from 0, `block` is out of range, or `device` is not the name of a device.
        <errors of devices>

        Notes
        -----
        <no wait>

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


_INT32 = np.dtype(np.int32)


class PatternMasks(Combinations):
    """Constructors of masks with gaps."""

    @classmethod
    @_described
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
        <lengths>
        tokens : int or sequence of int
            An integer n selects the first n tokens; a sequence lists positions among the keys.
        <align>
        <block>

        Returns
        -------
        <one pattern>

        Raises
        ------
        <errors>

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
    @_described
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
        <lengths>
        count : int
            Number of keys that a query sees, fewer where they would be before key 0.
        dilation : int
            Distance from one of these keys to the next, at least 1.
        <align>
        <block>

        Returns
        -------
        <one pattern>

        Raises
        ------
        <errors>

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
    @_described
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
        <lengths>
        per_row : int
            Whole blocks in each block row; no more than there are block columns.
        heads : (int, int)
            Numbers of patterns along the batch and along the heads; each pattern is drawn anew.
        seed : int
            The same seed gives the same mask on every device.
        <block>

        Returns
        -------
        BlockMask
            A mask of shape (S_q, S_k) with ``heads[0] * heads[1]`` patterns.

        Raises
        ------
        ValueError
            If an argument is out of range, for example `per_row` above the number of block columns, or `device` is not
            the name of a device.
        <errors of devices>

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
