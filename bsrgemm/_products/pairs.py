"""``BSR @ BSR`` on the tensor cores, for lists of pairs of blocks: how blocks are copied, and what is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import forced_kernel
from .._kernels.card import Card, card
from .._kernels.launch import Launch, contiguous
from .._kernels.rearrange import LINE, Lie, Rearrange
from . import reals
from .block_products import (
    MOST,
    BlockProblem,
    BlockProductsSm80,
    BlockProductsSm90,
    Lists,
    is_preferred,
    matrix_map,
    simt_seconds,
    tensor_seconds,
)

#: Number of block rows of the result that are computed together: kStrip of cuda/block_products_sm90.cu.
_STRIP = 16
#: Seconds of a launch, the share of the bandwidth of memory that a copy reaches, and the most bytes of copies.
_LAUNCH, _COPY_RATE, _MOST_BYTES = 3e-6, 0.6, 4 << 30


@dataclass(slots=True)
class PairsLaunch:
    """The launch of ``BSR @ BSR`` for lists of pairs of which it need not be known yet how long they are."""

    launch: Launch
    operands: tuple[Array, Array]
    #: what is computed: blocks with zeros at their ends, real ones for complex ones
    computed: BlockProblem
    #: sides and dtype of the blocks of the result
    sides: tuple[int, int]
    dtype: np.dtype[Any]
    #: number of tiles of a block
    tiles: int
    #: whether CTAs go on with tiles, as those of the Hopper kernel do
    persistent: bool
    #: whether blocks are computed in strips, so that what is read of B is found in the L2 cache
    in_strips: bool

    def reads(self, a: Array, b: Array) -> bool:
        """Whether it reads the blocks of these arrays, and no copies."""
        return self.operands[0] is a and self.operands[1] is b

    def start(self, blocks: int, pairs: int, rows: int) -> Array:
        """Compute so many blocks, of so many pairs; `rows` is as in `pair_products`."""
        out = cupy.empty((blocks, self.computed.R, self.computed.N), self.computed.out)
        tiles = blocks * self.tiles
        self.launch.grid = (min(tiles, card().multiprocessors) if self.persistent else tiles,)
        row_blocks = round(blocks / rows) if self.in_strips and rows >= _STRIP else 0
        self.launch.start((*self.operands, out), blocks, pairs, row_blocks)
        found = out.view(self.dtype)
        return found if found.shape[1:] == self.sides else resized(found, self.sides)


def pair_products(
    a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
) -> Array | None:
    """Compute ``out[s] = sum of a[ia[k]] @ b[ib[k]]`` over the pairs k of block s on the tensor cores.

    The result is None if the tensor cores cannot compute this product, or if the CUDA cores are faster. `rows` is the
    number of block rows of the result if its blocks are sorted by block row, otherwise 0. If B is larger than the L2
    cache, the Hopper kernel uses it to compute the blocks in an order that reads less from memory.
    """
    lists = contiguous(ia), contiguous(ib), contiguous(starts)
    found = pairs_launch(a, b, lists, dtype, (len(ia), len(starts)))
    return None if found is None else found.start(len(starts), len(ia), rows)


def pairs_launch(
    a: Array, b: Array, lists: tuple[Array, Array, Array], dtype: np.dtype[Any], expected: tuple[float, int]
) -> PairsLaunch | None:
    """Return the launch of `pair_products` before the numbers of pairs and blocks are known, or None.

    The lists are as long as they may become, and `expected` has these numbers as they are predicted. Blocks that tensor
    cores cannot read are copied if that pays: with zeros at their ends, or as real ones.
    """
    (R, K), N, pairs = a.shape[1:], b.shape[2], len(lists[0])
    given = BlockProblem(card().arch, a.dtype, b.dtype, dtype, R, K, N)
    fit = given.real.fitting
    unfit = not 0 < pairs < MOST or max(len(a) * fit.R, len(b) * fit.K) >= MOST
    if unfit or not BlockProductsSm80.serves(fit) or forced_kernel.name == "SpgemmSimt":
        return None
    a, b = contiguous(a), contiguous(b)
    if (fit != given or (a.data.ptr | b.data.ptr) % LINE) and not pays(given, (len(a), len(b)), expected, card()):
        return None
    if fit.a != given.a:
        a, b = reals.left(a), reals.right(b)
    a, b = (
        x if x.shape[1:] == sides and x.data.ptr % LINE == 0 else resized(x, sides)
        for x, sides in ((a, (fit.R, fit.K)), (b, (fit.K, fit.N)))
    )
    found = Lists(*lists, (len(lists[2]), pairs, len(a), len(b)))
    made = _launch(fit, a, b, found)
    if made is None:
        return None
    launch, tiles = made
    persistent = isinstance(launch.kernel, BlockProductsSm90)
    return PairsLaunch(launch, (a, b), fit, (R, N), dtype, tiles, persistent, b.nbytes > card().l2_bytes)


def _launch(problem: BlockProblem, a: Array, b: Array, found: Lists) -> tuple[Launch, int] | None:
    """Return the launch and the number of tiles of a block, or None if there are too many tiles."""
    R, K, N = problem.R, problem.K, problem.N
    out = found.counts[0], R, N
    hopper = BlockProductsSm90.of(problem)
    if hopper is not None:
        left = matrix_map(a.dtype, (K, R, len(a)), (K, R * K), (64, hopper.tile_m))
        right = matrix_map(b.dtype, (N, K, len(b)), (N, K * N), (64, 64))
        launch = hopper.launch((left, right), out, found, K)
        return None if launch is None else (launch, -(-R // hopper.tile_m) * -(-N // hopper.part_n))
    kernel = BlockProductsSm80.of(problem)
    assert kernel is not None
    launch = kernel.launch((K, N, R * K, K * N), out, found, K)
    return None if launch is None else (launch, R // kernel.tile_m * -(-N // kernel.part_n))


def resized(x: Array, sides: tuple[int, int]) -> Array:
    """Return a copy of blocks with other sides: with zeros at their ends, or without what lies beyond."""
    lie = Lie(x.dtype, (len(x), *map(min, x.shape[1:], sides)), x.strides, x.data.ptr)
    out = cupy.empty((len(x), *sides), x.dtype)
    if x.size:
        Rearrange.copying(lie, Lie.in_order(x.dtype, out.shape)).start((x, out))
    return out


def pays(given: BlockProblem, stored: tuple[int, int], expected: tuple[float, int], card: Card) -> bool:
    """Whether copies of all stored blocks, and of the result, save more time on the tensor cores than they take."""
    fit, (pairs, blocks) = given.real.fitting, expected
    copies = stored[0] * fit.R * fit.K, stored[1] * fit.K * fit.N, blocks * fit.R * fit.N
    if fit.a.itemsize * sum(copies) > _MOST_BYTES:
        return False
    copying = sum(_LAUNCH + 2 * n * fit.a.itemsize / (_COPY_RATE * card.bandwidth) for n in copies)
    seconds = tensor_seconds(fit, pairs, blocks, card) + copying
    return is_preferred("BlockProducts", seconds < simt_seconds(given, pairs, blocks, card))


def seconds(given: BlockProblem, stored: tuple[int, int], expected: tuple[float, int], card: Card) -> float:
    """What so many products of blocks will take, on the tensor cores or on the CUDA cores."""
    fit = given.real.fitting
    is_copied = fit != given
    if BlockProductsSm80.serves(fit) and (not is_copied or pays(given, stored, expected, card)):
        return tensor_seconds(fit, *expected, card) + 3 * _LAUNCH * is_copied
    return simt_seconds(given, *expected, card)
