"""``BSR @ BSR`` on the tensor cores, for lists of pairs of blocks: how blocks are copied, and what is launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels.card import Card, card
from .._kernels.kernel import Kernel
from .._kernels.launch import Launch, contiguous
from .._kernels.rearrange import LINE, Lie, Rearrange
from . import reals
from .block_products import (
    MOST,
    BlockProblem,
    BlockProductsSm80,
    BlockProductsSm90,
    Lists,
    matrix_map,
    simt_seconds,
    tensor_seconds,
)
from .call import MOST_BYTES

#: Number of block rows of the result that are computed together: kStrip of cuda/block_products_sm90.cu.
_STRIP = 16
#: Seconds of a copy at least and the share of the bandwidth of memory that a copy reaches.
_LAUNCH, _COPY_RATE = 8e-6, 0.6


@dataclass(slots=True)
class PairsLaunch:
    """The launch of ``BSR @ BSR`` for lists of pairs of which it need not be known yet how long they are.

    It can be started again for blocks that lie as those for which it was made.
    """

    launch: Launch
    #: the blocks as they are given, and as they are computed: with zeros at their ends, real ones for complex ones
    given: BlockProblem
    computed: BlockProblem
    #: what copies the left and the right blocks to those that are computed, if they are copied
    copies: tuple[Launch | None, Launch | None]
    #: number of tiles of a block
    tiles: int
    #: whether blocks are computed in strips, so that what is read of B is found in the L2 cache
    in_strips: bool
    #: what copies so many blocks of a result without the zeros, once it was started
    cut: tuple[int, Launch] | None = None

    def start(self, a: Array, b: Array, blocks: int, pairs: int, rows: int) -> Array:
        """Compute so many blocks, of so many pairs; `rows` is as in `pair_products`."""
        a, b = contiguous(a), contiguous(b)
        given, fit = self.given, self.computed
        if fit.a != given.a:
            a, b = reals.left(a), reals.right(b)
        a, b = (
            x if copy is None else copied(copy, x, (len(x), *sides))
            for x, copy, sides in ((a, self.copies[0], (fit.R, fit.K)), (b, self.copies[1], (fit.K, fit.N)))
        )
        out = cupy.empty((blocks, fit.R, fit.N), fit.out)
        tiles = blocks * self.tiles
        persistent = isinstance(self.launch.kernel, BlockProductsSm90)  # whose CTAs go on with tiles
        self.launch.grid = (min(tiles, card().multiprocessors) if persistent else tiles,)
        row_blocks = round(blocks / rows) if self.in_strips and rows >= _STRIP else 0
        self.launch.start((a, b, out), blocks, pairs, row_blocks)
        if out.shape[1:] == (given.real.R, given.real.N):
            return out.view(given.out)
        sides = (blocks, given.real.R, given.real.N)
        if self.cut is None or self.cut[0] != blocks:
            self.cut = blocks, copying(out, sides)
        return copied(self.cut[1], out, sides).view(given.out)


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
    return None if found is None else found.start(a, b, len(starts), len(ia), rows)


def pairs_launch(
    a: Array, b: Array, lists: tuple[Array, Array, Array], dtype: np.dtype[Any], expected: tuple[float, int]
) -> PairsLaunch | None:
    """Return the launch of `pair_products` before the numbers of pairs and blocks are known, or None.

    The lists are as long as they may become, and `expected` has these numbers as they are predicted. Blocks that tensor
    cores cannot read are copied if that pays: with zeros at their ends, or as real ones.
    """
    (R, K), N, pairs = a.shape[1:], b.shape[2], len(lists[0])
    given = BlockProblem(card().arch, a.dtype, b.dtype, dtype, R, K, N)
    aligned = a.data.ptr % LINE == 0, b.data.ptr % LINE == 0
    fit = _computed(given, all(aligned), (len(a), len(b)), (max(1, pairs), len(lists[2])), expected, _forced(), card())
    if fit is None or pairs == 0:
        return None
    shapes = (len(a), given.real.R, given.real.K), (len(b), given.real.K, given.real.N)
    wanted = (fit.R, fit.K), (fit.K, fit.N)
    copies = tuple(
        None if shape[1:] == sides and (start or (is_right and fit.a != given.a))
        else copying(Lie.in_order(fit.a, shape)._replace(address=0 if start else fit.a.itemsize), (len(x), *sides))
        for x, shape, sides, start, is_right in zip((a, b), shapes, wanted, aligned, (False, True), strict=True)
    )  # fmt: skip
    found = Lists(*lists, (len(lists[2]), pairs, len(a), len(b)))
    made = _launch(fit, (len(a), len(b)), found)
    if made is None:
        return None
    launch, tiles = made
    in_strips = len(b) * fit.K * fit.N * fit.b.itemsize > card().l2_bytes
    return PairsLaunch(launch, given, fit, (copies[0], copies[1]), tiles, in_strips)


def _forced() -> bool | None:
    """Whether the tensor cores are forced, or the CUDA cores; None if neither is."""
    return {"BlockProducts": True, "SpgemmSimt": False}.get(Kernel.forced or "")


@lru_cache(maxsize=4096)
def _computed(
    given: BlockProblem,
    aligned: bool,
    stored: tuple[int, int],
    most: tuple[int, int],
    expected: tuple[float, int],
    forced: bool | None,
    card: Card,
) -> BlockProblem | None:
    """The blocks that the tensor cores compute, or None if they cannot, or if their copies do not pay.

    The lists have room for so many pairs and blocks at `most`.
    """
    fit = given.real.fitting
    unfit = most[0] >= MOST or max(stored[0] * fit.R, stored[1] * fit.K) >= MOST
    if unfit or forced is False or not BlockProductsSm80.serves(fit):
        return None
    is_read = fit == given and aligned
    return fit if is_read or forced or pays(given, stored, expected, card) else None


def _launch(problem: BlockProblem, stored: tuple[int, int], found: Lists) -> tuple[Launch, int] | None:
    """Return the launch and the number of tiles of a block, or None if there are too many tiles."""
    R, K, N = problem.R, problem.K, problem.N
    out = found.counts[0], R, N
    hopper = BlockProductsSm90.of(problem)
    if hopper is not None:
        left = matrix_map(problem.a, (K, R, stored[0]), (K, R * K), (64, hopper.tile_m))
        right = matrix_map(problem.b, (N, K, stored[1]), (N, K * N), (64, 64))
        launch = hopper.launch((left, right), out, found, K)
        return None if launch is None else (launch, -(-R // hopper.tile_m) * -(-N // hopper.part_n))
    kernel = BlockProductsSm80.of(problem)
    assert kernel is not None
    launch = kernel.launch((K, N, R * K, K * N), out, found, K)
    return None if launch is None else (launch, R // kernel.tile_m * -(-N // kernel.part_n))


def copying(x: Any, shape: tuple[int, ...]) -> Launch:
    """Return what copies blocks to others: with zeros at their ends, or without what lies beyond."""
    lie = Lie(x.dtype, tuple(map(min, x.shape, shape)), x.strides, x.data.ptr)
    return Rearrange.copying(lie, Lie.in_order(x.dtype, shape))


def copied(copy: Launch, x: Array, shape: tuple[int, ...]) -> Array:
    """Start a copy of blocks."""
    out = cupy.empty(shape, x.dtype)
    if out.size:
        copy.start((x, out))
    return out


def pays(given: BlockProblem, stored: tuple[int, int], expected: tuple[float, int], card: Card) -> bool:
    """Whether copies of all stored blocks, and of the result, save more time on the tensor cores than they take."""
    fit, (pairs, blocks) = given.real.fitting, expected
    copies = stored[0] * fit.R * fit.K, stored[1] * fit.K * fit.N, blocks * fit.R * fit.N
    if fit.a.itemsize * sum(copies) > MOST_BYTES:
        return False
    copying = sum(_LAUNCH + 2 * n * fit.a.itemsize / (_COPY_RATE * card.bandwidth) for n in copies)
    seconds = tensor_seconds(fit, pairs, blocks, card) + copying
    return seconds < simt_seconds(given, pairs, blocks, card)


def seconds(given: BlockProblem, stored: tuple[int, int], expected: tuple[float, int], card: Card) -> float:
    """What so many products of blocks will take, on the tensor cores or on the CUDA cores."""
    fit = given.real.fitting
    is_copied = fit != given
    if BlockProductsSm80.serves(fit) and (not is_copied or pays(given, stored, expected, card)):
        return tensor_seconds(fit, *expected, card) + 3 * _LAUNCH * is_copied
    return simt_seconds(given, *expected, card)
