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
from .._kernels.kernel import Kernel
from .._kernels.launch import Chain, Launch, Step, contiguous
from .._kernels.rearrange import Lie, Rearrange
from . import lists, reals
from .block_products import (
    MOST,
    BlockProblem,
    BlockProductsSm80,
    BlockProductsSm90,
    Lists,
    is_preferred,
    matrix_map,
    sampled_simt_seconds,
    started,
)
from .call import MOST_BYTES, order_of

#: Seconds of a copy at least and the share of the bandwidth of memory that it reaches.
_LAUNCH, _COPY_RATE = 5e-6, 0.75

Kept = Callable[[Any, Callable[[], Any]], Any]


@dataclass(slots=True)
class SampledLaunch:
    """What starts a sampled product again."""

    launch: Launch | Chain
    #: shape and dtype of the blocks
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    #: X and Y
    operands: tuple[Any, Any]
    #: whether to start it again is as good as to make it again: no list is to be made
    lasting: bool

    def start(self, operands: tuple[Array, Array] | None = None) -> Array:
        """Compute the blocks of these operands, or of those for which it was made."""
        return started(self.launch, self.operands if operands is None else operands, self.shape, self.dtype)


def sampled_launch(
    X: Any,
    Y: Any,
    indices: Array,
    indptr: Array,
    block: tuple[int, int],
    dtype: np.dtype[Any],
    tf32: bool = False,
    kept: Kept | None = None,
) -> SampledLaunch | None:
    """Return what computes ``out[p] = X[rows of block p] @ Y[:, columns of block p]`` on the tensor cores.

    The result is None if the tensor cores cannot compute this product, or if the CUDA cores are faster. Operands are
    read as they lie in memory, or copied by the launch (see `_as_read`): for sides of blocks that are no multiples of
    16, and lines that are none of 16 bytes, with zeros at their ends. ``kept(key, make)`` returns what `make` returned
    when this key was first requested for the pattern: its tiles, if the product is computed in tiles of a list.
    """
    (R, N), (M, K), columns = block, X.shape, Y.shape[1]
    given = BlockProblem(card().arch, X.dtype, Y.dtype, dtype, R, K, N, order_of(Y), tf32, order_of(X))
    fit = replace(given.fitting, order="F", x_order="C")
    counts = (len(indices), len(indices), M // R, columns // N)
    if max(M // R * fit.R, K, columns // N * fit.N) >= MOST or not BlockProductsSm80.serves(fit):
        return None
    read = _as_read(given, counts, card())
    if Kernel.forced == "SpgemmSimt" or (not _is_read(given) and not _pays(given, read, counts, card())):
        return None
    found = Lists(None, contiguous(indices), contiguous(indptr.astype(indices.dtype, copy=False)), counts)
    launch: Launch | Chain | None
    if read == given:
        lines = X.strides[0 if read.x_order == "C" else 1], Y.strides[0 if read.order == "C" else 1]
        launch, lasting = _launch(read, (lines[0] // X.itemsize, lines[1] // Y.itemsize), found, kept)
    else:
        launch, lasting = _copying_launch(given, read, (X, Y), found, kept)
    return None if launch is None else SampledLaunch(launch, (counts[0], R, N), dtype, (X, Y), lasting)


def of_reals(
    X: Array, Y: Array, block: tuple[int, int], dtype: np.dtype[Any], make: Callable[..., SampledLaunch | None]
) -> SampledLaunch | None:
    """Return what computes a product of complex numbers as one of real ones (see `reals`), or None.

    ``make(X, Y, block, dtype)`` returns that of real operands, of which it is only said how they lie. X is read as it
    lies if its rows are contiguous.
    """
    if not X.dtype == Y.dtype == dtype or dtype not in reals.REALS:
        return None
    real, (M, K), N, size = reals.REALS[dtype], X.shape, Y.shape[1], dtype.itemsize
    is_plain = X.strides[1] == size
    copy = Lie.in_order(dtype, (1, M, K))
    left = Lie(real, (M, 2 * K), (X.strides[0] if is_plain else K * size, size // 2), X.data.ptr if is_plain else 0)
    made = make(left, Lie(real, (2 * K, 2 * N), (size // 2, K * size)), (block[0], 2 * block[1]), real)
    if made is None:
        return None
    copying = None if is_plain else Rearrange.copying(Lie(dtype, (1, M, K), (0, *X.strides), X.data.ptr), copy)

    def start(arrays: Any) -> None:
        x, y, out, *rooms = arrays
        if copying is not None:
            copying.start((x, rooms[0]))
            x = rooms[0]
        made.launch.start((x, reals.columns(y), out))

    rooms = [] if is_plain else [(copy.shape, copy.dtype)]
    return SampledLaunch(Chain([start], rooms), (made.shape[0], *block), dtype, (X, Y), made.lasting)


def _is_read(given: BlockProblem) -> bool:
    """Whether a kernel can read the operands as they lie."""
    lie = given.x_order and given.order
    return bool(lie) and (BlockProductsSm90.serves(given) or BlockProductsSm80.serves(given))


def _pays(given: BlockProblem, read: BlockProblem, counts: tuple[int, int, int, int], card: Card) -> bool:
    """Whether copies for the tensor cores take less time than the CUDA cores."""
    seconds = copied_seconds(given, read, counts, card)
    return is_preferred("BlockProducts", seconds < sampled_simt_seconds(given, counts[0], card))


def sampled_seconds(given: BlockProblem, counts: tuple[int, int, int, int], card: Card) -> float:
    """What a sampled product takes on the tensor cores, as it is best read."""
    return copied_seconds(given, _as_read(given, counts, card), counts, card)


def _copied(given: BlockProblem, read: BlockProblem) -> tuple[bool, bool]:
    """Whether X and Y are copied: to another order, or with zeros at the ends of lines and of blocks."""
    return (
        (given.x_order, given.R, given.K) != (read.x_order, read.R, read.K),
        (given.order, given.N, given.K) != (read.order, read.N, read.K),
    )


def copied_seconds(given: BlockProblem, read: BlockProblem, counts: tuple[int, int, int, int], card: Card) -> float:
    """What a sampled product takes with operands that are read so, the time of copies included."""
    blocks, _, rows, columns = counts
    kernel = BlockProductsSm90.of(read) or BlockProductsSm80.of(read)
    if kernel is None:
        return math.inf
    moved = [
        n * read.K for n, copied in zip((rows * read.R, columns * read.N), _copied(given, read), strict=True) if copied
    ]
    if (given.R, given.N) != (read.R, read.N):
        moved.append(blocks * read.R * read.N)
    if read.a.itemsize * sum(moved) > MOST_BYTES:
        return math.inf
    copies = sum(_LAUNCH + 2 * n * read.a.itemsize / (_COPY_RATE * card.bandwidth) for n in moved)
    return copies + kernel.sampled_seconds(read, blocks, (rows, columns), card)


def _as_read(given: BlockProblem, counts: tuple[int, int, int, int], card: Card) -> BlockProblem:
    """Return the product of operands as they are best read, the time of copies included.

    Copies have K as their contiguous dimension, as all kernels read best.

    Lines of TMA are short where small blocks lie side by side in a row-major Y or a column-major X. On an H200, X and Y
    of 8192 x 8192 with blocks of 16 x 16 took 8.5 ms with a row-major Y, whose lines have 32 bytes, and 2.7 ms with a
    column-major one.
    """
    fit = given.fitting
    x_orders = (given.x_order, "C") if given.x_order and (fit.R, fit.K) == (given.R, given.K) else ("C",)
    y_orders = (given.order, "F") if given.order and (fit.N, fit.K) == (given.N, given.K) else ("F",)
    reads = (
        replace(fit, x_order=x, order=y) for x, y in itertools.product(dict.fromkeys(x_orders), dict.fromkeys(y_orders))
    )
    return min(reads, key=lambda read: copied_seconds(given, read, counts, card))


def _copying_launch(
    given: BlockProblem, read: BlockProblem, operands: tuple[Any, Any], found: Lists, kept: Kept | None
) -> tuple[Launch | Chain | None, bool]:
    """Return what `_launch` does, with copies of the operands that are read otherwise, made by each launch.

    Where blocks were given zeros at their ends, the result is a copy too.
    """
    K, R, N = read.K, read.R, read.N
    size, (blocks, _, rows, columns) = given.a.itemsize, found.counts
    X, Y = operands
    lies = (
        (X, *X.strides, given.R, rows, R, read.x_order == "C"),
        (Y, *Y.strides[::-1], given.N, columns, N, read.order == "F"),
    )
    steps: list[Step] = []
    rooms: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
    places, lines = [0, 1, 2], []
    for n, (x, along, step, side, count, high, is_deep) in enumerate(lies):
        if _copied(given, read)[n]:
            operand = Lie(x.dtype, (count, side, given.K), (side * along, along, step), x.data.ptr)
            copy = Lie.in_order(x.dtype, (count, high, K))
            places[n] = 3 + len(rooms)
            rooms.append((copy.shape, copy.dtype))
            steps.append(Step(Rearrange.copying(operand, copy), (n, places[n])))
            lines.append(K)
        else:
            lines.append((along if is_deep else step) // size)
    inner, lasting = _launch(read, (lines[0], lines[1]), found, kept)
    if inner is None:
        return None, lasting
    cut = None
    if (R, N) != (given.R, given.N):
        padded = Lie.in_order(read.out, (blocks, R, N))
        inside = padded._replace(shape=(blocks, given.R, given.N))
        cut = Rearrange.copying(inside, Lie.in_order(read.out, inside.shape))
        places[2] = 3 + len(rooms)
        rooms.append((padded.shape, padded.dtype))
    steps.append(Step(inner, tuple(places)))
    if cut is not None:
        steps.append(Step(cut, (places[2], 2)))
    # Without memory for copies the operands are read as they lie, if that is possible.
    stored = (
        X.strides[0 if given.x_order == "C" else 1] // size,
        Y.strides[0 if given.order == "C" else 1] // size,
    )
    otherwise = (lambda: _launch(given, stored, found, None)[0]) if _is_read(given) else None
    return Chain(steps, rooms, otherwise), lasting


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
