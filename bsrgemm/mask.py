"""`BlockMask`: which keys a query may attend to, as blocks that are allowed whole, in part or not at all.

Never an array of S_q x S_k: a mask holds one entry per block that allows anything, and the element masks of blocks that
are allowed in part, bit-packed and each kept once. Written over ``home.xp``; building one waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Self

import numpy as np

from . import homes
from .home import Array, Home

_INT32 = np.dtype(np.int32)
_LEAST_BLOCK, _MOST_BLOCK = 16, 256
_ALIGNMENTS = ("bottom-right", "top-left")
#: Kind of a block whose elements are all allowed.
FULL = -1


class BlockMask:
    """Which keys each query may attend to, by blocks.

    Built by its class methods, combined by ``&``, ``|`` and ``~``. Patterns may differ by batch and head.

    Attributes
    ----------
    shape : (int, int)
        Queries and keys.
    block : (int, int)
        Queries and keys of a block.
    heads : (int, int)
        Patterns along batch and heads; 1 where one serves all.
    indptr, indices : array of int32
        Block columns of each block row, those of all patterns one after the other, sorted within a row.
    kinds : array of int32
        Per stored block: -1 if all of its elements are allowed, otherwise a number of `bits`.
    bits : array of uint32, shape (masks, block[0], ceil(block[1] / 32))
        Element masks: bit ``j % 32`` of word ``j // 32``. Elements beyond the last query or key are not allowed.

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
        home: Home,
        shape: tuple[int, int],
        block: tuple[int, int],
        heads: tuple[int, int],
        indptr: Array,
        indices: Array,
        kinds: Array,
        bits: Array,
    ) -> None:
        """Around arrays that are known to be good; see the class methods."""
        self._home = home
        self.shape, self.block, self.heads = shape, block, heads
        self.indptr, self.indices, self.kinds, self.bits = indptr, indices, kinds, bits

    # ------------------------------------------------------------------------------------ parametric
    @classmethod
    def full(cls, queries: int, keys: int | None = None, *, block: Any = 128, device: str | None = None) -> Self:
        """Every query sees every key."""
        grid = _Grid(queries, keys, block, device)
        return cls._from_intervals(grid, 0, grid.shape[1])

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
        """A query sees the keys up to its own place.

        With as many keys as queries, query i has place i. Otherwise the last query has the place of the last key
        (``align="bottom-right"``), or the first that of the first (``"top-left"``).
        """
        grid = _Grid(queries, keys, block, device)
        return cls._from_intervals(grid, 0, grid.places(align) + 1)

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
        """A query at place i sees keys ``i - left`` to ``i + right``, both ends included; -1 is without bound."""
        grid = _Grid(queries, keys, block, device)
        for name, side in (("left", left), ("right", right)):
            if isinstance(side, bool) or not isinstance(side, int | np.integer) or side < -1:
                raise ValueError(f"{name}: wanted an integer from -1 on, got {side!r}")
        places = grid.places(align)
        low = 0 if left < 0 else places - int(left)
        high = grid.shape[1] if right < 0 else places + int(right) + 1
        return cls._from_intervals(grid, low, high)

    @classmethod
    def sinks(
        cls, queries: int, keys: int | None = None, *, count: int, block: Any = 128, device: str | None = None
    ) -> Self:
        """Every query sees the first `count` keys: to be joined by ``|`` with a window, and cut by ``& causal``."""
        grid = _Grid(queries, keys, block, device)
        return cls._from_intervals(grid, 0, _count("count", count))

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
        """Prefix language model: the first `length` keys are seen by all, those behind them causally."""
        grid = _Grid(queries, keys, block, device)
        return cls._from_intervals(grid, 0, grid.home.xp.maximum(grid.places(align) + 1, _count("length", length)))

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
        """Some tokens see all and are seen by all (Longformer: ``| window``).

        Parameters
        ----------
        tokens : int or sequence of int
            The first so many, or their places among the keys.
        """
        grid = _Grid(queries, keys, block, device)
        places = grid.places(align)
        xp, S = grid.home.xp, grid.shape[1]
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
        mask = cls._from_intervals(grid, 0, 0)
        for first, last in runs:
            inside = (places >= first) & (places < last)
            mask = mask | cls._from_intervals(grid, xp.where(inside, 0, first), xp.where(inside, S, last))
        return mask

    @classmethod
    def documents(cls, cu_seqlens: Any, *, block: Any = 128, device: str | None = None) -> Self:
        """Packed documents: a token sees the tokens of its own document.

        Parameters
        ----------
        cu_seqlens : sequence of int
            Where documents begin, and the end: 0, ..., S.
        """
        bounds = np.asarray(cu_seqlens)
        if bounds.ndim != 1 or len(bounds) < 2 or bounds.dtype.kind not in "iu":
            raise ValueError(f"cu_seqlens: wanted the bounds of documents, 0 to S, got {cu_seqlens!r}")
        if bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ValueError(f"cu_seqlens: wanted bounds that climb from 0, got {cu_seqlens!r}")
        S = int(bounds[-1])
        grid = _Grid(S, S, block, device)
        xp = grid.home.xp
        moved = grid.home.from_host(bounds.astype(np.int64))
        document = xp.searchsorted(moved, xp.arange(S), side="right") - 1
        return cls._from_intervals(grid, moved[document], moved[document + 1])

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
        """A query at place i sees keys i, i - dilation, i - 2 dilation...: `count` of them."""
        grid = _Grid(queries, keys, block, device)
        count, dilation = _count("count", count), _count("dilation", dilation, least=1)
        reach = (count - 1) * dilation
        places = grid.places(align)
        band = cls._from_intervals(grid, places - reach, places + 1) if count else cls._from_intervals(grid, 0, 0)
        offset = grid.offset(align)

        def allowed(place: Array, key: Array) -> Array:
            return (place - key) % dilation == 0

        return band._thinned(lambda query, key: allowed(query + offset, key), dilation)

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
        """`per_row` whole blocks in each block row (BigBird), one at random in each of so many equal strips.

        The same seed gives the same mask on every device.
        """
        grid = _Grid(queries, keys, block, device)
        xp = grid.home.xp
        rows, cols = grid.counts
        heads = _heads(heads)
        per_row = min(_count("per_row", per_row), cols)
        all_rows = heads[0] * heads[1] * rows
        strip = xp.arange(all_rows * per_row, dtype=np.int64) % max(1, per_row)
        number = xp.arange(all_rows * per_row, dtype=np.uint64) + np.uint64(int(seed) % 2**32 << 32)
        first, last = strip * cols // max(1, per_row), (strip + 1) * cols // max(1, per_row)
        indices = first + (_mixed(number) % (last - first).astype(np.uint64)).astype(np.int64)
        indptr = xp.arange(all_rows + 1, dtype=np.int64) * per_row
        kinds = xp.full(len(indices), FULL, _INT32)
        indptr, indices = indptr.astype(_INT32), indices.astype(_INT32)
        return cls(grid.home, grid.shape, grid.block, heads, indptr, indices, kinds, _no_bits(xp, grid.block))

    # ------------------------------------------------------------------------------------ from data
    @classmethod
    def from_dense(cls, allowed: Any, *, block: Any = 128) -> Self:
        """From booleans of shape (queries, keys), or (batch, heads, queries, keys), where they are."""
        home = homes.home_of(allowed)
        if home is None or not home.is_dense(allowed):
            raise TypeError(f"allowed: wanted a NumPy or CuPy array, got {type(allowed).__name__}")
        if allowed.dtype != np.bool_:
            raise TypeError(f"allowed: wanted booleans, got dtype {allowed.dtype}")
        if allowed.ndim not in (2, 4):
            raise ValueError(f"allowed: wanted 2 or 4 dimensions, got {allowed.ndim}")
        grid = _Grid(allowed.shape[-2], allowed.shape[-1], block, home.name)
        xp = home.xp
        heads = _heads(allowed.shape[:2]) if allowed.ndim == 4 else (1, 1)
        (rows, cols), (bq, bk) = grid.counts, grid.block
        full = xp.zeros((heads[0] * heads[1], rows * bq, cols * bk), bool)
        full[:, : grid.shape[0], : grid.shape[1]] = allowed.reshape(-1, *grid.shape)
        tiles = full.reshape(-1, bq, cols, bk).transpose(0, 2, 1, 3)
        row, col = xp.nonzero(tiles.any(axis=(2, 3)))  # synchronize!
        return cls._canonical(grid, heads, row, col, xp.arange(len(row)), _pack(xp, tiles[row, col]))

    @classmethod
    def from_bsr(cls, A: Any) -> Self:
        """The stored blocks of a BSR matrix are allowed; of a boolean matrix only their True elements."""
        if getattr(A, "format", None) != "bsr":
            raise TypeError(f"A: wanted a BSR matrix, got {type(A).__name__}")
        home = homes.home_of(A)
        assert home is not None
        grid = _Grid(A.shape[0], A.shape[1], A.blocksize, home.name)
        row = home.expand(A.indptr, len(A.indices))
        if A.dtype != np.bool_:
            return cls._canonical(
                grid, (1, 1), row, A.indices, home.xp.full(len(row), FULL), _no_bits(home.xp, grid.block)
            )
        return cls._canonical(grid, (1, 1), row, A.indices, home.xp.arange(len(row)), _pack(home.xp, A.data))

    @classmethod
    def from_block_indices(
        cls, indptr: Any, indices: Any, *, shape: tuple[int, int], block: Any = 128, heads: tuple[int, int] = (1, 1)
    ) -> Self:
        """Whole blocks, given by the block columns of each block row (those of all patterns one after the other)."""
        home = homes.home_of(indices) or homes.host()
        xp = home.xp
        indptr, indices = xp.asarray(indptr), xp.asarray(indices)
        grid = _Grid(shape[0], shape[1], block, home.name)
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
        row = home.expand(indptr.astype(np.int64), len(indices))
        return cls._canonical(grid, heads, row, indices, xp.full(len(row), FULL), _no_bits(xp, grid.block))

    @classmethod
    def stack(cls, masks: Sequence[BlockMask], *, axis: str = "heads") -> Self:
        """One mask for several heads, or for several batches (``axis="batch"``), each with a pattern of its own."""
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
        xp, (rows, _) = first._home.xp, first._grid.counts
        row, col, kinds, bits = [], [], [], []
        shift = 0
        for k, mask in enumerate(masks):
            r = mask._rows()
            pattern, within = r // rows, r % rows
            b, h = pattern // H, pattern % H
            pattern = b * heads[1] + k * H + h if axis == "heads" else (k * B + b) * H + h
            row.append(pattern * rows + within)
            col.append(mask.indices)
            kinds.append(xp.where(mask.kinds < 0, FULL, mask.kinds + shift))
            bits.append(mask.bits)
            shift += len(mask.bits)
        return cls._canonical(first._grid, heads, *(xp.concatenate(x) for x in (row, col, kinds, bits)))

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
        """What is not allowed; holds a block for every one that is not allowed whole here."""
        xp, grid = self._home.xp, self._grid
        rows, cols = grid.counts
        every = xp.full(self.heads[0] * self.heads[1] * rows * cols, len(self.bits), np.int64)
        every[self._keys()] = self.kinds
        key = xp.flatnonzero(every != FULL)  # synchronize!
        nothing = xp.zeros((1, *self.bits.shape[1:]), np.uint32)
        bits = ~xp.concatenate([self.bits, nothing])
        row, col = key // cols, key % cols
        kinds, bits = self._within_edges(row, col, every[key], bits)
        return self._canonical(grid, self.heads, row, col, kinds, bits)

    # ------------------------------------------------------------------------------------ description
    @property
    def density(self) -> float:
        """Allowed pairs over all pairs, averaged over batches and heads."""
        S_q, S_k = self.shape
        pairs = S_q * S_k * self.heads[0] * self.heads[1]
        return self.allowed / pairs if pairs else 0.0

    @property
    def allowed(self) -> int:
        """Pairs of query and key that are allowed, over all batches and heads. Waits for the GPU."""
        if not len(self.indices):
            return 0
        size = self._grid.sizes(self._rows(), self.indices)
        counts = _counts(self._home.xp, self.bits)
        return int(self._home.xp.where(self.kinds < 0, size, counts[self.kinds]).sum())

    @property
    def nbytes(self) -> int:
        """Memory that the mask takes."""
        return int(sum(x.nbytes for x in (self.indptr, self.indices, self.kinds, self.bits)))

    @property
    def device(self) -> Any:
        """Where it is: "cpu", or the CuPy device."""
        return self._home.device_of(self.indices)

    def __repr__(self) -> str:
        whole = int((self.kinds < 0).sum())
        patterns = "" if self.heads == (1, 1) else f", {self.heads[0]} x {self.heads[1]} patterns"
        return (
            f"<BlockMask {self.shape[0]} x {self.shape[1]}, blocks {self.block[0]} x {self.block[1]}{patterns}, "
            f"{len(self.indices)} stored ({whole} whole), density {self.density:.3f}>"
        )

    def elements(self, kind: int) -> Array:
        """The element mask of blocks of that kind: booleans of the shape of a block."""
        if kind == FULL:
            return self._home.xp.ones(self.block, bool)
        return _unpack(self._home.xp, self.bits[kind : kind + 1], self.block[1])[0]

    # ------------------------------------------------------------------------------------ conversion
    def to_dense(self) -> Array:
        """Booleans (queries, keys), or (batch, heads, queries, keys) where patterns differ. For small masks."""
        xp = self._home.xp
        (rows, cols), (bq, bk) = self._grid.counts, self.block
        patterns = self.heads[0] * self.heads[1]
        tiles = xp.zeros((patterns * rows, cols, bq, bk), bool)
        masks = xp.concatenate([_unpack(xp, self.bits, bk), xp.ones((1, bq, bk), bool)])
        tiles[self._rows(), self.indices] = masks[self.kinds]
        dense = tiles.reshape(patterns, rows, cols, bq, bk).transpose(0, 1, 3, 2, 4).reshape(patterns, rows * bq, -1)
        dense = dense[:, : self.shape[0], : self.shape[1]]
        return dense[0] if self.heads == (1, 1) else dense.reshape(*self.heads, *self.shape)

    def to_bsr(self) -> Any:
        """A boolean BSR array of one pattern whose lengths are multiples of the block."""
        from .bsr import leaf

        if self.heads != (1, 1):
            raise ValueError(f"to_bsr: wanted one pattern, got {self.heads[0]} x {self.heads[1]}")
        if any(n % b for n, b in zip(self.shape, self.block, strict=True)):
            raise ValueError(
                f"to_bsr: {self.shape} is no multiple of the block {self.block}; to_dense() takes any length"
            )
        xp = self._home.xp
        masks = xp.concatenate([_unpack(xp, self.bits, self.block[1]), xp.ones((1, *self.block), bool)])
        arrays = (masks[self.kinds], self.indices.copy(), self.indptr.copy())
        return leaf(self._home, True)(arrays, shape=self.shape)

    def to_device(self, device: str) -> Self:
        """This mask on "cpu" or "cuda": itself if it is there already, otherwise a copy."""
        home = homes.by_name(device)
        if home is self._home:
            return self
        mine = (self.indptr, self.indices, self.kinds, self.bits)
        indptr, indices, kinds, bits = (home.from_host(self._home.to_host(x)) for x in mine)
        return type(self)(home, self.shape, self.block, self.heads, indptr, indices, kinds, bits)

    def get(self) -> Self:
        """A mask on the host."""
        return self.to_device("cpu")

    def plot(self, ax: Any = None, *, batch: int = 0, head: int = 0) -> Any:
        """Draw the blocks of one pattern with matplotlib: whole ones dark, those allowed in part lighter."""
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap

        B, H = self.heads
        pattern = batch % B * H + head % H
        rows, cols = self._grid.counts
        row, col, kinds = (self._home.to_host(x) for x in (self._rows(), self.indices, self.kinds))
        mine = row // rows == pattern
        picture = np.zeros((rows, cols), np.uint8)
        picture[row[mine] % rows, col[mine]] = np.where(kinds[mine] < 0, 2, 1)
        if ax is None:
            _, ax = plt.subplots()
        extent = (0, cols * self.block[1], rows * self.block[0], 0)
        colors = ListedColormap(["white", "#9ecae1", "#08519c"])
        ax.imshow(picture, cmap=colors, vmin=0, vmax=2, extent=extent, interpolation="nearest")
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        ax.set_title(f"{self.density:.1%} of the pairs, blocks {self.block[0]} x {self.block[1]}")
        return ax

    # ------------------------------------------------------------------------------------ inside
    @property
    def _grid(self) -> _Grid:
        return _Grid(self.shape[0], self.shape[1], self.block, self._home.name)

    def _rows(self) -> Array:
        """The block row of every stored block, counted through all patterns."""
        return self._home.expand(self.indptr.astype(np.int64), len(self.indices))

    def _keys(self) -> Array:
        """Block row and block column as one number: they climb."""
        return self._rows() * self._grid.counts[1] + self.indices

    @classmethod
    def _from_intervals(cls, grid: _Grid, low: Any, high: Any) -> Self:
        """Query i sees the keys from ``low[i]`` up to, not including, ``high[i]``."""
        xp = grid.home.xp
        (S_q, S_k), (bq, bk), (rows, cols) = grid.shape, grid.block, grid.counts
        low = xp.broadcast_to(_between(xp, low, S_k), (S_q,))
        high = xp.broadcast_to(_between(xp, high, S_k), (S_q,))
        empty = low >= high
        low, high = xp.where(empty, S_k, low), xp.where(empty, 0, high)

        def by_rows(x: Array, beyond: int) -> Array:
            padded = xp.full(rows * bq, beyond, np.int64)
            padded[:S_q] = x
            return padded.reshape(rows, bq)

        # A row of blocks reaches from its first to its last key; what all of its queries see makes blocks whole.
        first, last = by_rows(low, S_k).min(axis=1) // bk, -(-by_rows(high, 0).max(axis=1) // bk)
        all_low, all_high = by_rows(low, 0).max(axis=1), by_rows(high, S_k).min(axis=1)
        whole_first, whole_last = -(-all_low // bk), xp.where(all_high >= S_k, cols, all_high // bk)
        indptr = xp.zeros(rows + 1, np.int64)
        indptr[1:] = xp.cumsum(xp.maximum(last - first, 0))
        total = int(indptr[-1])  # synchronize!
        row = grid.home.expand(indptr, total)
        col = first[row] + xp.arange(total) - indptr[row]
        kinds = xp.full(total, FULL, np.int64)
        part = xp.flatnonzero((col < whole_first[row]) | (col >= whole_last[row]))  # synchronize!
        begin = _between(xp, by_rows(low, S_k)[row[part]] - col[part, None] * bk, bk)
        end = xp.maximum(_between(xp, by_rows(high, 0)[row[part]] - col[part, None] * bk, bk), begin)
        ends = xp.where(begin == end, 0, begin * (bk + 1) + end)  # (blocks, bq): the interval of each query as a number
        representatives, same = _distinct(xp, ends)
        kinds[part] = same
        begin, end = begin[representatives], end[representatives]
        key = xp.arange(bk)
        bits = _pack(xp, (key >= begin[..., None]) & (key < end[..., None]))
        return cls._canonical(grid, (1, 1), row, col, kinds, bits)

    @classmethod
    def _canonical(cls, grid: _Grid, heads: tuple[int, int], row: Array, col: Array, kinds: Array, bits: Array) -> Self:
        """A mask of these blocks: sorted, several at a place joined, empty ones left out, equal masks kept once."""
        xp = grid.home.xp
        rows, cols = grid.counts
        key = row.astype(np.int64) * cols + col
        order = xp.argsort(key, kind="stable")
        key, kinds = key[order], kinds[order].astype(np.int64)
        while len(key) > 1 and bool((key[1:] == key[:-1]).any()):  # synchronize!
            key, kinds, bits = _joined(xp, key, kinds, bits, both=False)
        counts = _counts(xp, bits)
        whole = (kinds < 0) | (counts[kinds] == grid.sizes(key // max(1, cols), key % max(1, cols)))
        kept = xp.flatnonzero(whole | (counts[kinds] > 0))  # synchronize!
        key, kinds = key[kept], xp.where(whole, FULL, kinds)[kept]
        part = xp.flatnonzero(kinds >= 0)  # synchronize!
        used, number = xp.unique(kinds[part], return_inverse=True)
        representatives, same = _distinct(xp, bits[used].reshape(len(used), bits.shape[1] * bits.shape[2]))
        kinds[part] = same[number.reshape(-1)]
        bits = bits[used[representatives]]
        indptr = xp.searchsorted(key, xp.arange(heads[0] * heads[1] * rows + 1, dtype=np.int64) * cols)
        indptr, indices, kinds = (x.astype(_INT32) for x in (indptr, key % max(1, cols), kinds))
        return cls(grid.home, grid.shape, grid.block, heads, indptr, indices, kinds, bits)

    def _thinned(self, allowed: Callable[[Array, Array], Array], period: int) -> Self:
        """Only the elements that `allowed` (query, key) names, which repeats every `period` along both."""
        xp = self._home.xp
        (bq, bk), row, col = self.block, self._rows(), self.indices.astype(np.int64)
        # Blocks that start at the same places of the period have the same elements.
        place = (row * bq % period) * period + col * bk % period
        kind = xp.where(self.kinds < 0, len(self.bits), self.kinds)
        pairs, number = xp.unique(place * (len(self.bits) + 1) + kind, return_inverse=True)
        old, place = pairs % (len(self.bits) + 1), pairs // (len(self.bits) + 1)
        masks = xp.concatenate([self.bits, xp.full((1, *self.bits.shape[1:]), 0xFFFFFFFF, np.uint32)])[old]
        query = (place // period)[:, None, None] + xp.arange(bq)[:, None]
        key = (place % period)[:, None, None] + xp.arange(bk)
        bits = masks & _pack(xp, allowed(query, key))
        kinds, bits = self._within_edges(row, col, number.reshape(-1), bits)
        return self._canonical(self._grid, self.heads, row, col, kinds, bits)

    def _within_edges(self, row: Array, col: Array, kinds: Array, bits: Array) -> tuple[Array, Array]:
        """The same with nothing allowed beyond the last query and key: blocks at an edge get masks of their own."""
        xp = self._home.xp
        (rows, cols), (bq, bk) = self._grid.counts, self.block
        below, right = row % rows == rows - 1, col == cols - 1
        pairs, number = xp.unique((kinds * 2 + below) * 2 + right, return_inverse=True)
        height, width = (n - (count - 1) * b for n, count, b in zip(self.shape, (rows, cols), (bq, bk), strict=True))
        inside = xp.ones((4, bq, bk), bool)
        inside[2:, height:] = False
        inside[1::2, :, width:] = False
        return number.reshape(-1), bits[pairs // 4] & _pack(xp, inside)[pairs % 4]

    def _check_alike(self, other: BlockMask, what: str) -> None:
        if other._home is not self._home:
            raise homes.elsewhere(other.indices, what, self._home)
        if other.shape != self.shape or other.block != self.block:
            raise ValueError(
                f"{what}: masks of {self.shape} in blocks of {self.block} and of {other.shape} in blocks of "
                f"{other.block} do not go together"
            )

    def _spread(self, heads: tuple[int, int]) -> tuple[Array, Array]:
        """(row, place) of every block where one pattern serves several batches or heads."""
        xp = self._home.xp
        rows = self._grid.counts[0]
        row = self._rows()
        if heads == self.heads:
            return row, xp.arange(len(row))
        B, H = self.heads
        pattern = xp.arange(heads[0] * heads[1])
        source = pattern // heads[1] % B * H + pattern % heads[1] % H
        lengths = (self.indptr[1:] - self.indptr[:-1]).astype(np.int64).reshape(-1, rows)[source].reshape(-1)
        indptr = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(lengths)])
        new_row = self._home.expand(indptr, int(indptr[-1]))
        old_row = source[new_row // rows] * rows + new_row % rows
        return new_row, self.indptr.astype(np.int64)[old_row] + xp.arange(len(new_row)) - indptr[new_row]

    def _combined(self, other: BlockMask, both: bool) -> Self:
        """Blocks in `both`, or in either; where two masks meet in a block, their elements are combined once a pair."""
        self._check_alike(other, "&" if both else "|")
        heads = tuple(np.broadcast_shapes(self.heads, other.heads))
        xp, cols = self._home.xp, self._grid.counts[1]
        (row_a, at_a), (row_b, at_b) = self._spread(heads), other._spread(heads)
        key_a, key_b = row_a * cols + self.indices[at_a], row_b * cols + other.indices[at_b]
        a = xp.where(self.kinds < 0, FULL, self.kinds)[at_a].astype(np.int64)
        b = xp.where(other.kinds < 0, FULL, other.kinds + len(self.bits))[at_b].astype(np.int64)
        bits = xp.concatenate([self.bits, other.bits])
        key, kinds = xp.concatenate([key_a, key_b]), xp.concatenate([a, b])
        order = xp.argsort(key, kind="stable")
        key, kinds, bits = _joined(xp, key[order], kinds[order], bits, both=both)
        return self._canonical(self._grid, heads, key // cols, key % cols, kinds, bits)


class _Grid:
    """Lengths, blocks and home of a mask, checked."""

    def __init__(self, queries: Any, keys: Any, block: Any, device: str | None) -> None:
        keys = queries if keys is None else keys
        self.shape = (_count("queries", queries), _count("keys", keys))
        sides = (block, block) if isinstance(block, int | np.integer) else tuple(block)
        if len(sides) != 2 or not all(isinstance(b, int | np.integer) for b in sides):
            raise ValueError(f"block: wanted one or two integers, got {block!r}")
        if not all(_LEAST_BLOCK <= b <= _MOST_BLOCK and b % _LEAST_BLOCK == 0 for b in sides):
            raise ValueError(f"block: wanted multiples of {_LEAST_BLOCK} up to {_MOST_BLOCK}, got {block!r}")
        self.block = (int(sides[0]), int(sides[1]))
        self.home = homes.by_name(homes.default_device() if device is None else device)
        self.counts = (-(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1]))

    def offset(self, align: str) -> int:
        """The place of the first query among the keys."""
        if align not in _ALIGNMENTS:
            raise ValueError(f"align: wanted 'bottom-right' or 'top-left', got {align!r}")
        return self.shape[1] - self.shape[0] if align == "bottom-right" else 0

    def places(self, align: str) -> Array:
        """The place of every query among the keys."""
        return self.home.xp.arange(self.shape[0], dtype=np.int64) + self.offset(align)

    def sizes(self, row: Array, col: Array) -> Array:
        """Elements of blocks that are inside the lengths."""
        xp, (S_q, S_k), (bq, bk) = self.home.xp, self.shape, self.block
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


def _no_bits(xp: Any, block: tuple[int, int]) -> Array:
    return xp.zeros((0, block[0], -(-block[1] // 32)), np.uint32)


def _pack(xp: Any, masks: Array) -> Array:
    """Booleans (n, bq, bk) as bits."""
    n, bq, bk = masks.shape
    words = -(-bk // 32)
    padded = xp.zeros((n, bq, words * 32), np.uint32)
    padded[..., :bk] = masks
    return (padded.reshape(n, bq, words, 32) << xp.arange(32, dtype=np.uint32)).sum(axis=3, dtype=np.uint32)


def _unpack(xp: Any, bits: Array, bk: int) -> Array:
    n, bq, words = bits.shape
    return (bits[..., None] >> xp.arange(32, dtype=np.uint32) & np.uint32(1)).reshape(n, bq, words * 32)[..., :bk] != 0


def _counts(xp: Any, bits: Array) -> Array:
    """Elements that each mask allows, and a 0 for blocks that have none (whose kind, -1, names the last)."""
    table = xp.asarray(_ones_of_16_bits())
    halves = xp.ascontiguousarray(bits).view(np.uint16)
    return xp.concatenate([table[halves].sum(axis=(1, 2), dtype=np.int64), xp.zeros(1, np.int64)])


def _between(xp: Any, x: Any, most: int) -> Array:
    return xp.minimum(xp.maximum(xp.asarray(x, dtype=np.int64), 0), most)


@cache
def _ones_of_16_bits() -> np.ndarray[Any, Any]:
    numbers = np.arange(1 << 16, dtype=np.uint16)
    return np.unpackbits(numbers.view(np.uint8).reshape(-1, 2), axis=1).sum(axis=1, dtype=np.uint8)


def _mixed(x: Array) -> Array:
    """64 bits well stirred: the same on every device."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _distinct(xp: Any, rows: Array) -> tuple[Array, Array]:
    """(places of distinct rows of a 2-D array of integers, for every row the number of the one that it equals).

    Rows are compared by a hash, and the outcome with the rows themselves.
    """
    if not len(rows):
        return xp.zeros(0, np.int64), xp.zeros(0, np.int64)
    for seed in range(1, 100):
        weights = _mixed(xp.arange(rows.shape[1], dtype=np.uint64) + np.uint64(seed << 32)) | np.uint64(1)
        hashes = _mixed((rows.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64))
        _, places, same = xp.unique(hashes, return_index=True, return_inverse=True)
        same = same.reshape(-1)
        if bool((rows == rows[places[same]]).all()):
            return places, same
    raise AssertionError("a hundred hashes in a row collided")


def _joined(xp: Any, key: Array, kinds: Array, bits: Array, both: bool) -> tuple[Array, Array, Array]:
    """Sorted keys, each twice at most where `both` is asked for: the blocks of equal keys, two by two, as one.

    `both`: only keys that come twice, with the elements that both allow; otherwise what either allows.
    """
    # Within a run of equal keys, even places lead and odd ones follow.
    leads = (xp.arange(len(key)) - xp.searchsorted(key, key)) % 2 == 0
    second = xp.zeros(len(key), bool)
    second[:-1] = leads[:-1] & ~leads[1:]
    if both:
        leads = second
    lead = xp.flatnonzero(leads)  # synchronize!
    paired = second[lead]
    a = kinds[lead]
    b = kinds[xp.minimum(lead + 1, len(key) - 1)] if len(key) else a
    meet = paired & (a >= 0) & (b >= 0)
    pairs, number = xp.unique(xp.where(meet, a * (len(bits) + 1) + b, -1), return_inverse=True)
    shift = len(bits)
    known = pairs >= 0
    x, y = xp.where(known, pairs // (shift + 1), 0), xp.where(known, pairs % (shift + 1), 0)
    new = (bits[x] & bits[y] if both else bits[x] | bits[y]) if shift else bits[:0]
    one_whole = xp.where(a < 0, b, a) if both else xp.full(len(a), FULL, a.dtype)
    kinds = xp.where(~paired, a, xp.where(meet, number.reshape(-1) + shift, one_whole))
    return key[lead], kinds, xp.concatenate([bits, new])
