"""The gradients of attention on Hopper, and the kernels before and after those that make all gradients in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import cupy
import numpy as np

from .._kernels import jit
from .._kernels.card import Card, reaches
from .._kernels.element_types import element
from .._kernels.kernel import Kernel
from .._kernels.launch import Chain, run
from .._kernels.tensor_map import Layout
from .._kernels.workspace import StreamOrdered, kept_in
from ..dtypes import HALF_DTYPES
from . import arguments, mask_tiles
from .backward_kernel import NOTHING_CUT, OF_KEYS_AND_VALUES, OF_QUERIES, BackwardProblem, Gradients, Lists, places_of
from .call import BackwardCall
from .forward import CAPPED, SIGNED, has_large_shared, layout_of, pointer_of, share_of_blocks, strides_of
from .mask import BlockMask

#: The smallest softcap for the kernels for Hopper. They recover the slope of a score from the logarithm of its weight,
#: with an error of about 1e-6 / softcap.
LEAST_SOFTCAP = 0.5
#: Columns that the kernels for Hopper are compiled for: in one pass, and in one for keys and one for queries.
_NARROW, _WIDE = (64, 128), (192, 256)
#: The share of blocks up to which their order matters: of more blocks, the tiles of keys follow each other anyway.
_LARGEST_SHARE = 0.75
#: Macros that follow from the fields of all kernels here, and those of the kernels that multiply on Hopper.
_ALL = "element_o sum value_dim tile_q role"
_HOPPER = f"{_ALL} mma_type mma_k"


class Rows(Gradients, argument=arguments.backward_rows()):
    """A kernel for tiles of queries by keys, with as many columns of all operands, that keeps sums by queries.

    What it keeps belongs to pieces of 64 queries: two statistics of each query, a counter, and sums of dq unless dq has
    a kernel of its own.
    """

    sum = "f32"
    #: keys of a tile: 128 or 64
    tile_k: int

    @property
    def element_o(self) -> str:
        """The type of the gradient of the result."""
        return self.element

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def tile_q(self) -> int:
        """With 64 columns a turn of 64 queries would be too short to hide what comes between its products."""
        return 128 if self.head_dim == 64 and self.tile_k == 128 else 64

    @property
    def pieces(self) -> int:
        """Pieces of 64 queries in a tile: the unit in which dq is added up."""
        return self.tile_q // 64

    @property
    def sums_columns(self) -> int:
        """Columns of the sums of dq."""
        return self.head_dim

    def last(self) -> Rows:
        """The kernel that is started behind this one, which writes dq."""
        raise NotImplementedError(type(self).__name__)

    def grid(self, lists: Lists, card: Card) -> tuple[int, ...]:
        """CTAs stay and claim tiles, and shares of those that are cut."""
        claimed = lists.tiles * lists.heads + lists.cut * (lists.shares - 1)
        return (min(claimed, self.ctas * card.multiprocessors),)

    def parts(self) -> tuple[Rows, Rows]:
        return self, self.last()

    def prepare(self, call: BackwardCall, card: Card) -> Chain:
        """Three launches: statistics and zeros, the products, dq."""
        batches, heads, queries = call.q.shape[:3]
        tiles = -(-queries // self.tile_q) if call.bounds is None else queries // self.tile_q + len(call.bounds[0])
        padded = tiles * self.pieces
        pieces, last = batches * heads * padded, self.last()
        own, rows = Lists(call, self, card), Lists(call, last, card)
        # What belongs to pieces; and for each share of a tile that is cut the sums of dk and dv.
        sizes = {"sums": 64 * self.sums_columns, "logarithms": 64, "deltas": 64, "turns": 1}
        memory, partials = -(-pieces * sum(sizes.values()) // 4) * 4, 2 * self.tile_k * self.head_dim
        rooms = [(size, np.float32) for size in (memory, own.cut * own.shares * partials) if size]
        count, places = places_of(call, (self, last))
        ends = itertools.accumulate(sizes.values())
        inside = {
            name: (count, 4 * pieces * (end - size))
            for (name, size), end in zip(sizes.items(), ends, strict=True)
            if size
        }
        inside |= {"partials": (count + 1, 0)} if len(rooms) > 1 else {}
        listed = call.mask is not None and self.sums_columns  # the rows in which additions take turns
        out = call.dout if call.out is None else call.out

        def packed(kernel: Rows, lists: Lists) -> bytearray:
            return arguments.backward_rows().pack(
                backward=kernel.template(call, lists), out=0, lse=0, dlse=0, delta=0, out_strides=strides_of(out),
                logarithms=0, deltas=0, sums=0, turns=0, row_first=rows.fields["first"] if listed else 0,
                row_columns=rows.fields["columns"] if listed else 0, partials=0, padded=padded, whole=own.whole,
                shares=own.shares,
            )  # fmt: skip

        of_queries = packed(last, rows)
        zeroed = not self.ordered and self.sums_columns
        begin = BackwardBegin(self.element, self.head_dim, self.tile_k, element(out.dtype), not zeroed)
        of_own, of_rows = ({**where, **inside} for where in places)
        held = (own.held, rows.held)
        launches = (
            begin.launch(call, of_queries, (padded, batches * heads), of_rows, rows, held),
            self.launch(call, packed(self, own), self.grid(own, card), of_own, own, held),
            last.launch(call, of_queries, last.grid(rows, card), of_rows, rows, held),
        )
        return Chain([launch.start for launch in launches], rooms)


class OnHopper(Rows, argument=arguments.backward_sm90(), needs="sm_90a"):
    """A kernel that multiplies on Hopper's tensor cores, and reads tiles of its operands through tensor maps."""

    mma_k = 16
    #: columns that it is compiled for
    widths: ClassVar[tuple[int, ...]] = _WIDE

    @property
    def mma_type(self) -> str:
        """The name of the element in the wgmma instruction."""
        return self.element

    def layouts(self, call: BackwardCall) -> tuple[Layout, ...]:
        rows = ((call.q, self.tile_q), (call.k, self.tile_k), (call.v, self.tile_k), (call.dout, self.tile_q))
        return tuple(layout_of(x, tile) for x, tile in rows)

    @classmethod
    def serves(cls, problem: BackwardProblem) -> bool:
        hopper = problem.arch == "sm_90a" and problem.suits_tensor_cores
        return hopper and problem.has_few_heads and not problem.steep and _width(problem) in cls.widths


@dataclass(frozen=True)
class BackwardSm90(OnHopper, source="attention_backward_sm90.cu", derived=_HOPPER):
    """Gradients on Hopper's tensor cores in one pass; `ordered` sums repeat bit by bit."""

    element: str
    head_dim: int
    tile_k: int
    ordered: bool
    scores: int = SIGNED

    role, claims, last_first, widths = OF_KEYS_AND_VALUES, True, True, _NARROW

    @property
    def groups(self) -> int:
        """Warpgroups that multiply, with 64 keys each. A single one leaves room for a second CTA."""
        return self.tile_k // 64

    @property
    def threads(self) -> int:
        return 128 + 128 * self.groups

    @property
    def ctas(self) -> int:
        return 3 - self.groups

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: tiles, statistics, bits of the mask, barriers, descriptions."""
        once = 2 * self.head_dim + 2 * self.tile_k + 4  # of a query, for each slot: dout, ds and a statistic
        row = 2 * (2 * self.head_dim + 4 + self.tile_k // 8) + self.groups * (once + 2 * self.head_dim)
        return 2 * self.tile_k * self.head_dim * 2 + self.tile_q * row + 3072

    @classmethod
    def best(cls, problem: BackwardProblem) -> BackwardSm90:
        """A softcap takes registers, which 128 queries do not leave (see `Rows.tile_q`)."""
        width = _width(problem)
        few_keys = problem.narrow or (width == 64 and problem.scores == CAPPED)
        return cls(element(problem.dtype), width, 64 if few_keys else 128, problem.ordered, problem.scores)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BackwardSm90]:
        for shape in _tiles(dtypes):
            for ordered, scores in itertools.product((True, False), _scores(*shape[1:])):
                yield cls(*shape, ordered, scores)

    def last(self) -> BackwardEnd:
        return BackwardEnd(self.element, self.head_dim, self.tile_k, scores=self.scores)

    def cut(self, call: BackwardCall, lists: Lists, card: Card) -> tuple[int, int]:
        if call.bounds is not None:
            return NOTHING_CUT
        (_, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
        # `longest` is the most turns of a tile over the average: twice as many if causal, and somewhat more in a window
        # and under a mask.
        group, longest = heads // kv_heads, 1.0
        if call.mask is not None:
            patterns = call.mask.heads[0] * call.mask.heads[1]
            turns, longest = lists.fields["entries"] / (lists.tiles * patterns), 1.2
        elif call.left + call.right + self.tile_k < queries:
            turns, longest = (call.left + call.right + self.tile_k) / self.tile_q, 1.1
        elif min(call.left, call.right) < keys:
            turns, longest = queries / self.tile_q / 2, 2.0
        else:
            turns = queries / self.tile_q
        # In order, a share waits for others of its query head, unless these take as long: shares have whole heads.
        of = group if self.ordered and longest > 1 else 0
        return cut(lists.tiles * lists.heads, self.ctas * card.multiprocessors, turns * group, longest, of)

    def tiled(self, call: BackwardCall, together: int, card: Card) -> StreamOrdered:
        """In one order, the entries of a tile of keys are in an order in which few additions wait."""
        mask, shape, walkers = call.mask, (self.tile_q, self.tile_k), self.walkers(call, together, card)
        if mask is None or not walkers:
            return super().tiled(call, together, card)
        rows, tiles = (-(-n // size) for n, size in zip(mask.shape, shape, strict=True))

        def make() -> mask_tiles.Tiles:
            return TurnOrder().in_turn(mask_tiles.by_keys(mask._backend, mask, *shape), tiles, rows, walkers)

        return kept_in(mask.__dict__.setdefault("_tiles", {}), (*shape, "by keys", walkers), make)

    def walkers(self, call: BackwardCall, together: int, card: Card) -> int:
        """How many tiles of keys of a pattern are computed at the same time, or 0 if the order of their entries is that
        of the queries.
        """
        # The kernel finds the entries outside of a band by the order of the queries.
        banded = min(call.left, call.right) < call.k.shape[2]
        if not self.ordered or call.mask is None or banded or not TurnOrder.pays(call.mask, self.tile_q):
            return 0
        return max(1, card.multiprocessors * self.ctas // together)


@dataclass(frozen=True)
class BackwardKeysSm90(OnHopper, source="attention_backward_keys_sm90.cu", derived=f"{_HOPPER} ordered"):
    """dk and dv of wide heads on Hopper's tensor cores: a warpgroup has the sums of one of them."""

    element: str
    head_dim: int
    tile_k: int
    scores: int = SIGNED

    role, threads, ctas, ordered, claims, last_first = OF_KEYS_AND_VALUES, 384, 1, False, True, True
    sums_columns = 0

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: six tiles of 64 rows, the weights, and what is small."""
        return 6 * 64 * self.head_dim * 2 + 64 * 64 * 4 + 5120

    @classmethod
    def best(cls, problem: BackwardProblem) -> BackwardKeysSm90:
        return cls(element(problem.dtype), _width(problem), 64, problem.scores)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BackwardKeysSm90]:
        for name, width, scores in itertools.product(halves(dtypes), _WIDE, (SIGNED, CAPPED)):
            yield cls(name, width, 64, scores)

    def last(self) -> BackwardQueriesSm90:
        return BackwardQueriesSm90(self.element, self.head_dim, self.tile_k, self.scores)


@dataclass(frozen=True)
class BackwardQueriesSm90(OnHopper, source="attention_backward_queries_sm90.cu", derived=f"{_HOPPER} ordered"):
    """dq of wide heads on Hopper's tensor cores: a warpgroup has 64 queries."""

    element: str
    head_dim: int
    tile_k: int
    scores: int = SIGNED

    role, threads, ctas, ordered, tile_q = OF_QUERIES, 384, 1, False, 128

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: 128 rows of q and dout, 128 keys, 64 values, and what is small."""
        return 7 * 64 * self.head_dim * 2 + 1024

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BackwardQueriesSm90]:
        return (keys.last() for keys in BackwardKeysSm90.every(dtypes))

    def grid(self, lists: Lists, card: Card) -> tuple[int, ...]:
        return (min(lists.tiles * lists.heads, jit.MAX_GRID_X),)


@dataclass(frozen=True)
class BackwardBegin(Rows, source="attention_backward_begin.cu", derived=f"{_ALL} scores"):
    """Prepares BackwardSm90, BackwardFused, or BackwardKeysSm90 and BackwardQueriesSm90.

    `element_r` is the type of attention's result; if not `ordered`, the sums of dq are set to 0.
    """

    element: str
    head_dim: int
    tile_k: int
    element_r: str
    ordered: bool

    role, threads, scores = OF_QUERIES, 256, SIGNED

    @property
    def rare(self) -> bool:
        return self.element != self.element_r

    def runs_on(self, arch: str) -> bool:
        """With BackwardFused on Ampere too."""
        fused = (self.head_dim, self.tile_k, self.ordered) == (128, 128, False)
        return reaches(arch, "sm_80") and has_large_shared(arch) if fused else arch == "sm_90a"

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BackwardBegin]:
        for name, width in itertools.product(halves(dtypes), _WIDE):
            yield from (cls(name, width, 64, out, True) for out in (name, "f32"))
        for shape in _tiles(dtypes):
            for ordered, out in itertools.product((True, False), (shape[0], "f32")):
                yield cls(*shape, out, ordered)


@dataclass(frozen=True)
class BackwardEnd(Rows, source="attention_backward_end.cu", derived=_ALL):
    """Rounds the sums of BackwardSm90 to dq, or with `lines` those of BackwardFused.

    Rows that are not finite are computed again, for which the scores matter.
    """

    element: str
    head_dim: int
    tile_k: int
    lines: bool = False
    scores: int = SIGNED

    role, threads, ordered = OF_QUERIES, 256, False

    def grid(self, lists: Lists, card: Card) -> tuple[int, ...]:
        return (lists.tiles * lists.heads * self.pieces,)

    def runs_on(self, arch: str) -> bool:
        return reaches(arch, "sm_80") and has_large_shared(arch) if self.lines else arch == "sm_90a"

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BackwardEnd]:
        for shape in _tiles(dtypes):
            yield from (cls(*shape, scores=scores) for scores in _scores(*shape[1:]))
        yield from (cls(name, 128, 128, lines=True) for name in halves(dtypes))


@dataclass(frozen=True)
class TurnOrder(Kernel, source="turn_order.cu", argument=arguments.TURN_ORDER, needs="sm_90a"):
    """Orders the entries of a mask by tiles of keys for BackwardSm90 in one order, so that few additions wait.

    The tiles of keys of a random mask wait for each other: each adds to dq of a tile of queries when those that were
    claimed before it have done so. An order is found once for each mask, without waiting for the host.
    """

    threads = 256
    #: kMost and kWalkers of the kernel: tiles of queries of a pattern, and tiles of keys that are under way
    most, most_walkers = 2048, 512

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[TurnOrder]:
        if halves(dtypes):
            yield cls()

    @classmethod
    def pays(cls, mask: BlockMask, tile_q: int) -> bool:
        """Whether to order the entries of a mask, judged by numbers that the host knows."""
        return -(-mask.shape[0] // tile_q) <= cls.most and share_of_blocks(mask) <= _LARGEST_SHARE

    def in_turn(self, found: mask_tiles.Tiles, tiles: int, rows: int, walkers: int) -> mask_tiles.Tiles:
        """Return the entries of `mask_tiles.by_keys` in an order in which few additions wait for others.

        A pattern has `tiles` tiles of keys and `rows` tiles of queries, and about `walkers` of its tiles of keys are
        computed at the same time.
        """
        columns = cupy.empty_like(found.columns)
        parts = None if found.parts is None else cupy.empty_like(found.parts)
        packed = arguments.TURN_ORDER.pack(
            first=found.first.data.ptr, columns=found.columns.data.ptr, parts=pointer_of(found.parts),
            to_columns=columns.data.ptr, to_parts=pointer_of(parts), tiles=tiles, rows=rows, entries=len(columns),
            walkers=max(1, min(walkers, self.most_walkers)),
        )  # fmt: skip
        grid = ((len(found.first) - 1) // max(1, tiles),)
        run(self, grid, (jit.argument(packed),), uses=(found, columns, parts))
        return found._replace(columns=columns, parts=parts)


def halves(dtypes: Iterable[Any]) -> list[str]:
    """The types among these that the tensor cores multiply."""
    return [element(dtype) for dtype in dtypes if dtype in HALF_DTYPES]


def _width(problem: BackwardProblem) -> int:
    """Columns of all operands on Hopper."""
    return next(width for width in (*_NARROW, *_WIDE) if width >= max(problem.padded_dims))


def _tiles(dtypes: Any) -> Iterator[tuple[str, int, int]]:
    """Types, columns and keys of the tiles of BackwardSm90."""
    return itertools.product(halves(dtypes), _NARROW, (128, 64))


def _scores(head_dim: int, tile_k: int) -> tuple[int, ...]:
    """How scores can be computed in such tiles (see `BackwardSm90.best`)."""
    return (SIGNED,) if (head_dim, tile_k) == (64, 128) else (SIGNED, CAPPED)


# ----------------------------------------------------------------------------------------- tiles of keys that are cut
#: The most shares of a tile of keys, and of all tiles for each CTA, which bounds the memory for their sums (128 KB
#: each); the fewest turns of one, and what a share costs beside its turns, in turns: K and V are copied again, and sums
#: pass through memory.
_MOST_SHARES, _MOST_OF_CTA, _LEAST_TURNS, _COST_OF_SHARE = 8, 4, 4, 4.0
#: The share of the estimated time below which tiles are cut.
_WORTHWHILE = 0.95


def cut(tiles: int, ctas: int, turns: float, longest: float = 1.0, of: int = 0) -> tuple[int, int]:
    """From which tile of keys on tiles are cut, and into how many shares, so that all CTAs end at about the same time.

    Tiles with as many turns each (`longest` is 1) go to CTAs in rounds: those of a last round that is not full are cut.
    If some are longer, these are claimed first in any order, so that CTAs end at about the same time unless tiles are
    few; then all are cut. In order they are claimed last, and as many as there are CTAs are cut.

    Parameters
    ----------
    tiles : int
        Tiles of keys of all heads, which `ctas` CTAs claim.
    turns : float
        Tiles of queries that see one of them, on average.
    longest : float
        The most turns of a tile, over the average.
    of : int
        If it is not 0, sums are made in order, and the number of shares divides it: query heads of a head of keys.

    Examples
    --------
    Of 2,048 tiles, 15 rounds of 132 leave 68; in sevenths they take four sevenths of a round.

    >>> cut(2048, 132, 256.0), cut(264, 132, 128.0) == NOTHING_CUT, cut(68, 132, 4.0) == NOTHING_CUT
    ((1980, 7), True, True)

    Causal, eight query heads to one of two heads of keys:

    >>> cut(64, 132, 256.0, 2.0), cut(64, 132, 256.0, 2.0, of=8), cut(64, 132, 256.0, 2.0, of=1) == NOTHING_CUT
    ((0, 5), (0, 8), True)
    """
    even = longest == 1
    rest = tiles % ctas if even else min(tiles, ctas) if of else tiles
    if not rest or (not even and not of and tiles >= 2 * ctas):
        return NOTHING_CUT
    most = min(_MOST_SHARES, int(turns / _LEAST_TURNS), _MOST_OF_CTA * ctas // rest)

    def rounds(shares: int) -> float:
        """Estimated time, in that of an average tile."""
        extra = _COST_OF_SHARE / turns if shares > 1 else 0.0
        if even:
            return -(-rest * shares // ctas) * (1 / shares + extra)
        # When the last CTA ends after the average one; in order, the longest tiles are claimed last. These factors fit
        # the times of the table of cuts in bench/NOTES.md.
        late = 0.1 + 0.6 * (longest - 1) if of else 0.2
        return max(longest / shares + extra, (tiles + rest * shares * extra) / ctas + late / shares)

    possible = [shares for shares in range(1, most + 1) if not of or of % shares == 0]
    best = min(possible, key=rounds, default=1)
    return (tiles - rest, best) if rounds(best) < _WORTHWHILE * rounds(1) else NOTHING_CUT
