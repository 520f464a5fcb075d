"""Sampled products of two dense matrices on the tensor cores: how operands are read, copied, and tiles are listed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._backend.base import Array
from .._kernels import graphs
from .._kernels.card import Card, card
from .._kernels.launch import Chain, Launch, Step, contiguous
from .._kernels.rearrange import Lie, Rearrange
from ..dtypes import HALF_DTYPES
from . import lists
from .block_products import MOST, BlockProblem, BlockProductsSm80, BlockProductsSm90, Lists, matrix_map, started
from .call import order_of

#: Seconds of a launch, and the share of the bandwidth of memory that a copy reaches.
_LAUNCH, _COPY_RATE = 3e-6, 0.75

Kept = Callable[[Any, Callable[[], Any]], Any]


@dataclass(slots=True)
class SampledLaunch:
    """What starts a sampled product again."""

    launch: Launch | Chain
    #: shape and dtype of the blocks
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    #: X and Y, or copies of them that begin at a multiple of 16 bytes
    operands: tuple[Array, Array]
    #: whether to start it again is as good as to make it again: no operand was copied here, and no list is to be made
    lasting: bool

    def start(self, operands: tuple[Array, Array] | None = None) -> Array:
        """Compute the blocks of these operands, or of those for which it was made."""
        return started(self.launch, self.operands if operands is None else operands, self.shape, self.dtype)


def sampled_launch(
    X: Array,
    Y: Array,
    indices: Array,
    indptr: Array,
    block: tuple[int, int],
    dtype: np.dtype[Any],
    tf32: bool = False,
    kept: Kept | None = None,
) -> SampledLaunch | None:
    """Return what computes ``out[p] = X[rows of block p] @ Y[:, columns of block p]`` on the tensor cores.

    The result is None if the tensor cores cannot compute this product. Operands are read as they lie in memory. One
    that no kernel can read (see `order_of`) is copied at once; one whose copy saves time is copied by the launch (see
    `_as_read`). ``kept(key, make)`` returns what `make` returned when this key was first requested for the pattern: its
    tiles, if the product is computed in tiles of a list.
    """
    R, N = block
    (M, K), columns = X.shape, Y.shape[1]
    problem = BlockProblem(card().arch, X.dtype, Y.dtype, dtype, R, K, N, "F", tf32)
    if max(*X.shape, *Y.shape) >= MOST or not BlockProductsSm80.serves(problem):
        return None
    counts = (len(indices), len(indices), M // R, columns // N)
    given = X, Y
    X, Y = (x if order_of(x) else x.copy(order=order) for x, order in ((X, "C"), (Y, "F")))
    lies = replace(problem, x_order=order_of(X), order=order_of(Y))
    read = _as_read(lies, counts, card())
    if read != lies and X.dtype not in HALF_DTYPES:
        X, lies = X.copy(order="C"), read
    found = Lists(None, contiguous(indices), contiguous(indptr.astype(indices.dtype, copy=False)), counts)
    lines = (
        X.strides[0 if lies.x_order == "C" else 1] // X.itemsize,
        Y.strides[0 if lies.order == "C" else 1] // Y.itemsize,
    )
    launch, lasting = (
        _launch(lies, lines, found, kept) if read == lies else _copying_launch(lies, read, lines, found, kept)
    )
    if launch is None:
        return None
    return SampledLaunch(launch, (counts[0], R, N), dtype, (X, Y), lasting and X is given[0] and Y is given[1])


def _as_read(problem: BlockProblem, counts: tuple[int, int, int, int], card: Card) -> BlockProblem:
    """Return the product in the orders in which its operands are best read, the time of copies included.

    Copies have K as their contiguous dimension, as all kernels read best.

    Lines of TMA are short where small blocks lie side by side in a row-major Y or a column-major X. On an H200, X and Y
    of 8192 x 8192 with blocks of 16 x 16 took 8.5 ms with a row-major Y, whose lines have 32 bytes, and 2.7 ms with a
    column-major one.
    """
    blocks, _, rows, columns = counts

    def seconds(read: BlockProblem) -> float:
        kernel = BlockProductsSm90.of(read) or BlockProductsSm80.of(read)
        if kernel is None:
            return math.inf
        copied = [rows * read.R] * (read.x_order != problem.x_order) + [columns * read.N] * (
            read.order != problem.order
        )
        found = kernel.sampled_seconds(read, blocks, (rows, columns), card)
        return found + sum(_LAUNCH + 2 * n * read.K * read.a.itemsize / (_COPY_RATE * card.bandwidth) for n in copied)

    orders = itertools.product(dict.fromkeys((problem.x_order, "C")), dict.fromkeys((problem.order, "F")))
    return min((replace(problem, x_order=x, order=y) for x, y in orders), key=seconds)


def _copying_launch(
    lies: BlockProblem, read: BlockProblem, lines: tuple[int, int], found: Lists, kept: Kept | None
) -> tuple[Launch | Chain | None, bool]:
    """Return what `_launch` does, with copies of the operands that are read in another order, made by each launch."""
    K, sides = lies.K, (found.counts[2] * lies.R, found.counts[3] * lies.N)
    differs = (read.x_order != lies.x_order, read.order != lies.order)
    inner, lasting = _launch(read, (K if differs[0] else lines[0], K if differs[1] else lines[1]), found, kept)
    if inner is None:
        return None, lasting
    steps, places = [], [0, 1]
    copied = [n for n in range(2) if differs[n]]
    for room, n in enumerate(copied, 3):  # behind X, Y and the result
        size, shape = lies.a.itemsize, (1, K, sides[n])
        operand, copy = (Lie(lies.a, shape, (0, *steps_of)) for steps_of in ((lines[n] * size, size), (size, K * size)))
        steps.append(Step(Rearrange.copying(operand, copy), (n, room)))
        places[n] = room
    steps.append(Step(inner, (*places, 2)))
    # Without memory for copies the operands are read as they lie.
    is_served = BlockProductsSm90.serves(lies) or BlockProductsSm80.serves(lies)
    otherwise = (lambda: _launch(lies, lines, found, None)[0]) if is_served else None
    return Chain(steps, [((sides[n], K), lies.a) for n in copied], otherwise), lasting


def _launch(
    problem: BlockProblem, lines: tuple[int, int], found: Lists, kept: Kept | None
) -> tuple[Launch | None, bool]:
    """Return the launch for operands whose lines begin so many elements apart, or None if there are too many tiles.

    The second result tells whether it serves later products too.
    """
    R, K, N = problem.R, problem.K, problem.N
    blocks, _, rows, columns = found.counts
    kernel = BlockProductsSm90.of(problem)
    if kernel is None:
        other = BlockProductsSm80.of(problem)
        assert other is not None
        a_block = R * (lines[0] if problem.x_order == "C" else 1)
        steps = (*lines, a_block, N * (lines[1] if problem.order == "F" else 1))
        return other.launch(steps, (blocks, R, N), found, K), True
    kernel, tiles, lasting = _tiles_of(kernel, problem, found, kept)
    left, right = (
        matrix_map(problem.a, (side, K, 1), (line, line), (min(part, 64), 64))
        if is_across
        else matrix_map(problem.a, (K, side, 1), (line, line), (64, part))
        for is_across, side, part, line in (
            (kernel.a_transposed, rows * R, kernel.part_m, lines[0]),
            (not kernel.b_transposed, columns * N, kernel.part_n, lines[1]),
        )
    )
    return kernel.launch((left, right), (blocks, R, N), tiles, K), lasting


def _tiles_of(
    kernel: BlockProductsSm90, problem: BlockProblem, found: Lists, kept: Kept | None
) -> tuple[BlockProductsSm90, Lists, bool]:
    """Return the kernel and its list for tiles of a list where they are better, otherwise what was given.

    A list may take as long to make as a product, so the first product with a pattern has none. None is made while a
    graph is captured either, since only the graph would fill it. The last result is False then: the next product should
    have another launch.
    """
    blocks, _, rows, columns = found.counts
    wide = kernel.by_list(problem, blocks, (rows, columns))
    if kept is None or wide is None:
        return kernel, found, True
    key = wide.row_parts, wide.parts, columns
    made = kept("whether tiles were made", dict)
    if key not in made or (not made[key] and graphs.is_capturing()):
        made.setdefault(key, False)
        return kernel, found, False
    tiles = kept(("tiles", *key), lambda: lists.listed(found.right, found.starts, columns, wide.row_parts, wide.parts))
    made[key] = True
    return wide, Lists(tiles.tiles, tiles.order, tiles.counts, (blocks, len(tiles.tiles), rows, columns)), True
