"""Launches of the tensor-core kernels whose result is a list of blocks: ``BSR @ BSR`` and sampled products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import device, jit, tensor_map
from .._kernels.element_types import element
from .._kernels.graphs import is_capturing
from .._kernels.launching import contiguous, start
from .._kernels.movable import MovableArgument
from .._kernels.structs import TENSOR_MAP_BYTES
from .._kernels.tensor_map import Layout
from .._kernels.workspace import counters
from . import heuristics, sampled_tiles
from .arguments import BLOCK_PRODUCTS_SM80, BLOCK_PRODUCTS_SM90
from .configs import BlockProductsSm80, BlockProductsSm90
from .heuristics import BlockProblem
from .operand_order import order_of
from .spgemm_pattern import Listing
from .work_list import Pattern

#: Number of block rows of the result that are computed together: kStrip of cuda/block_products_sm90.cu.
_STRIP = 16
#: The kernels number tiles, rows and columns with 31 bits, so there must be fewer of each than this.
_MOST = 2**31

Kept = Callable[[Any, Callable[[], Any]], Any]


@dataclass(slots=True)
class _Lists:
    """The pairs of blocks that are multiplied, and the number of blocks."""

    #: index of the left block of each pair; None in a sampled product, where the block row determines it; tiles of a
    #: list
    left: Array | None
    #: index of the right block of each pair
    right: Array
    #: index of the first pair of each block of the result; in a sampled product, of each block row; the number of
    #: tiles of a list
    starts: Array
    #: number of blocks of the result, of pairs (or tiles), of blocks of the left and of blocks of the right operand
    counts: tuple[int, int, int, int]

    def fields(self) -> dict[str, int]:
        """Return the fields of the kernel argument that both kernels have in common."""
        blocks, pairs, a_blocks, b_blocks = self.counts
        return {
            "left": 0 if self.left is None else self.left.data.ptr,
            "right": self.right.data.ptr,
            "starts": self.starts.data.ptr,
            "blocks": blocks,
            "pairs": pairs,
            "a_blocks": a_blocks,
            "b_blocks": b_blocks,
        }


@dataclass(slots=True)
class BlockLaunch:
    """A kernel with its grid, its lists and the addresses of its operands: all that it needs except the result."""

    kernel: Any
    grid: tuple[int]
    threads: tuple[int]
    #: dynamic shared memory of a CTA
    shared_bytes: int
    #: shape and dtype of the result
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    #: the argument without the pointers to the result and to the counters
    template: bytes
    #: on Hopper, the tensor maps of the operands without their addresses; the other kernel takes pointers
    maps: tuple[Layout, Layout] | None
    #: the arrays to which the argument points, so that they stay alive
    lists: _Lists
    #: operands that were copied for this launch, which stay alive with it; those of a user do not
    copies: tuple[Array, ...] = ()
    #: whether to start it again is as good as to make it again: no operand was copied, and no list is to be made
    lasting: bool = True
    #: addresses of the result and of the counters in the last call, and the argument made from them
    filled: tuple[tuple[int, int], Any] | None = None

    def start(self, operands: tuple[Array, ...]) -> Array:
        """Start the kernel on CuPy's current stream, and return the blocks that it computes from the operands.

        Threads can share an argument, so it is never modified after it was created.
        """
        out = cupy.empty(self.shape, self.dtype)
        places = (out.data.ptr, 0 if self.maps is None else counters(2).data.ptr)
        filled = self.filled
        if filled is None or filled[0] != places:
            filled = self.filled = places, self._argument(*places)
        uses = (*operands, out, self.lists, *self.copies)
        start(self.kernel, self.grid, self.threads, (filled[1],), uses, self.shared_bytes)
        return out

    def movable(self) -> MovingBlockLaunch:
        """Return a launch for operands at any aligned addresses, which differs from this one in nothing else."""
        launch = self.kernel, self.grid, self.threads, self.shared_bytes
        return MovingBlockLaunch(*launch, self.shape, self.dtype, self.template, self.maps, self.lists)

    def _argument(self, out: int, counted: int) -> Any:
        packed = bytearray(self.template)
        self._fill(packed, out, counted)
        return jit.argument(packed)

    def _fill(self, packed: bytearray | memoryview, out: int, counted: int) -> None:
        """Write the addresses of the result and of the counters into an argument."""
        if self.maps is None:
            _RESULT_SM80.write(packed, out)
        else:
            _RESULT_SM90.write(packed, out)
            _COUNTERS_SM90.write(packed, counted)


class MovingBlockLaunch(BlockLaunch):
    """A launch that is moved from address to address and filled in place: see `_kernels.movable`."""

    __slots__ = ("argument",)

    def __init__(self, *launch: Any) -> None:
        super().__init__(*launch)
        maps = [(n, n * TENSOR_MAP_BYTES, layout) for n, layout in enumerate(self.maps or ())]
        self.argument = MovableArgument(self.template, 2, None if maps else _OPERANDS_SM80, maps)

    def move(self, places: tuple[int, int]) -> None:
        """Write the addresses of the operands."""
        self.argument.move(places)

    def kept(self) -> BlockLaunch:
        """Return a launch for the operands at which this one is."""
        launch = self.kernel, self.grid, self.threads, self.shared_bytes
        return BlockLaunch(*launch, self.shape, self.dtype, bytes(self.argument.packed), self.maps, self.lists)

    def _argument(self, out: int, counted: int) -> Any:
        self._fill(self.argument.packed, out, counted)
        return self.argument.argument


@dataclass(slots=True)
class PairsLaunch:
    """The launch of ``BSR @ BSR`` for lists of pairs of which it is not known yet how long they are."""

    #: the launch if all memory of the lists is in use
    longest: BlockLaunch
    #: number of tiles of a block
    tiles: int
    #: whether blocks are computed in strips, so that what is read of B is found in the L2 cache
    in_strips: bool

    def of(self, blocks: int, pairs: int, rows: int) -> BlockLaunch:
        """Return the launch for so many blocks and pairs; `rows` is as in `pair_products`."""
        longest, packed = self.longest, bytearray(self.longest.template)
        _NUMBERS_SM90.write(packed, blocks, pairs)
        if self.in_strips and rows >= _STRIP:
            _ROW_BLOCKS_SM90.write(packed, round(blocks / rows))
        grid = (min(blocks * self.tiles, device.multiprocessors()),)
        launch = longest.kernel, grid, longest.threads, longest.shared_bytes
        shape = blocks, *longest.shape[1:]
        return BlockLaunch(*launch, shape, longest.dtype, bytes(packed), longest.maps, longest.lists, longest.copies)


#: Writers for the fields of the arguments that change between calls.
_OPERANDS_SM80, _RESULT_SM80 = BLOCK_PRODUCTS_SM80.patch("a", "b"), BLOCK_PRODUCTS_SM80.patch("out")
_RESULT_SM90, _COUNTERS_SM90 = BLOCK_PRODUCTS_SM90.patch("out"), BLOCK_PRODUCTS_SM90.patch("counters")
_NUMBERS_SM90, _ROW_BLOCKS_SM90 = BLOCK_PRODUCTS_SM90.patch("blocks", "pairs"), BLOCK_PRODUCTS_SM90.patch("row_blocks")


def pair_products(
    a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
) -> Array | None:
    """Compute ``out[s] = sum of a[ia[k]] @ b[ib[k]]`` over the pairs k of block s on the tensor cores.

    The result is None if the tensor cores cannot compute this product. `rows` is the number of block rows of the
    result if its blocks are sorted by block row, otherwise 0. If B is larger than the L2 cache, the Hopper kernel uses
    it to compute the blocks in an order that reads less from memory.
    """
    problem = _pairs_problem(a, b, len(ia), dtype)
    if problem is None:
        return None
    a, b = contiguous(a), contiguous(b)
    lists = _Lists(contiguous(ia), contiguous(ib), contiguous(starts), (len(starts), len(ia), len(a), len(b)))
    if heuristics.block_products_sm90(problem) is not None:
        launch = _pairs_launch(problem, a, b, lists)
        return None if launch is None else launch.of(len(starts), len(ia), rows).start((a, b))
    config = heuristics.block_products_sm80(problem)
    if config is None:
        return None
    R, K, N = problem.R, problem.K, problem.N
    started = _launch_sm80(config, (a, b), ((len(starts), R, N), dtype), lists, (K, N, R * K, K * N), K)
    return None if started is None else started.start((a, b))


def pairs_launch(a: Array, b: Array, listing: Listing, dtype: np.dtype[Any]) -> PairsLaunch | None:
    """Return the launch of `pair_products` on Hopper before the numbers of pairs and blocks are known, or None."""
    problem = _pairs_problem(a, b, len(listing.left), dtype)
    if problem is None:
        return None
    lists = _Lists(
        listing.left, listing.right, listing.starts, (len(listing.starts), len(listing.left), len(a), len(b))
    )
    return _pairs_launch(problem, contiguous(a), contiguous(b), lists)


def _pairs_problem(a: Array, b: Array, pairs: int, dtype: np.dtype[Any]) -> BlockProblem | None:
    """Return the properties of a product that the tensor cores may be able to compute, or None."""
    R, K = a.shape[1:]
    unfit = not 0 < pairs < _MOST or max(len(a) * R, len(b) * K) >= _MOST or (a.data.ptr | b.data.ptr) % 16
    return None if unfit else BlockProblem(jit.device_target(), a.dtype, b.dtype, dtype, R, K, b.shape[2])


def _pairs_launch(problem: BlockProblem, a: Array, b: Array, lists: _Lists) -> PairsLaunch | None:
    """Return the launch for Hopper, or None if it cannot compute the product or there are too many tiles."""
    config = heuristics.block_products_sm90(problem)
    if config is None:
        return None
    R, K, N = problem.R, problem.K, problem.N
    left = _map(a, (K, R, len(a)), (K, R * K), (64, config.tile_m))
    right = _map(b, (N, K, len(b)), (N, K * N), (64, 64))
    longest = _launch_sm90(config, (a, b), (left, right), ((lists.counts[0], R, N), problem.out), lists, K)
    if longest is None:
        return None
    longest.copies = (a, b)
    tiles = -(-R // config.tile_m) * -(-N // config.part_n)
    return PairsLaunch(longest, tiles, b.nbytes > device.l2_bytes())


def sampled(
    X: Array,
    Y: Array,
    indices: Array,
    indptr: Array,
    block: tuple[int, int],
    dtype: np.dtype[Any],
    tf32: bool = False,
) -> Array | None:
    """Compute ``out[p] = X[rows of block p] @ Y[:, columns of block p]`` on the tensor cores.

    The result is None if the tensor cores cannot compute this product. An operand that the copy engine cannot read as
    it lies in memory is copied first (see `order_of`). On Hopper, a row-major Y of 16-bit floats is also copied if the
    number of columns of a block is not a multiple of 32.
    """
    launch = _sampled(X, Y, indices, indptr, block, dtype, tf32)
    return None if launch is None else launch.start((X, Y))


def sampled_launch(
    X: Array, Y: Array, pattern: Pattern, block: tuple[int, int], dtype: np.dtype[Any], tf32: bool, kept: Kept
) -> BlockLaunch | None:
    """Return the launch of `sampled`, to start it again and again if it is `lasting`.

    ``kept(key, make)`` returns what `make` returned when this key was first requested for the pattern: its tiles, if
    the product is computed in tiles of a list.
    """
    return _sampled(X, Y, pattern.indices, pattern.indptr, block, dtype, tf32, kept)


def _sampled(
    X: Array,
    Y: Array,
    indices: Array,
    indptr: Array,
    block: tuple[int, int],
    dtype: np.dtype[Any],
    tf32: bool,
    kept: Kept | None = None,
) -> BlockLaunch | None:
    """Return the launch of `sampled`, or of `sampled_launch` if `kept` is given."""
    R, N = block
    M, K = X.shape
    copies: list[Array] = []
    lasting = True
    problem = BlockProblem(jit.device_target(), X.dtype, Y.dtype, dtype, R, K, N, "F", tf32)
    if max(*X.shape, *Y.shape) >= _MOST or heuristics.block_products_sm80(problem) is None:
        return None
    if order_of(X) != "C":
        X = cupy.ascontiguousarray(X)
        copies.append(X)
    hopper = heuristics.block_products_sm90(problem) is not None
    order = order_of(Y)
    if not order or (hopper and heuristics.block_products_sm90(replace(problem, order=order)) is None):
        Y, order = cupy.asfortranarray(Y), "F"
        copies.append(Y)
    problem = replace(problem, order=order)
    out = (len(indices), R, N), dtype
    counts = (len(indices), len(indices), M // R, Y.shape[1] // N)
    lists = _Lists(None, contiguous(indices), contiguous(indptr.astype(indices.dtype, copy=False)), counts)
    lines = tuple(x.strides[0 if o == "C" else 1] // x.itemsize for x, o in ((X, "C"), (Y, order)))
    config = heuristics.block_products_sm90(problem)
    if config is None:
        other = heuristics.block_products_sm80(problem)
        assert other is not None
        steps = (*lines, R * lines[0], N * (lines[1] if order == "F" else 1))
        launch = _launch_sm80(other, (X, Y), out, lists, steps, K)
    else:
        config, lists, lasting = _tiles_of(config, problem, lists, kept)
        height = config.tile_m // max(1, config.row_parts)
        left = _map(X, (K, M, 1), (lines[0], lines[0]), (64, height))
        slab = min(config.part_n, 64)
        dims, box = ((K, Y.shape[1]), (64, config.part_n)) if config.b_transposed else ((Y.shape[1], K), (slab, 64))
        right = _map(Y, (*dims, 1), (lines[1], lines[1]), box)
        launch = _launch_sm90(config, (X, Y), (left, right), out, lists, K)
    if launch is not None:
        launch.copies = tuple(copies)
        launch.lasting = lasting and not copies
    return launch


def _tiles_of(
    config: BlockProductsSm90, problem: BlockProblem, lists: _Lists, kept: Kept | None
) -> tuple[BlockProductsSm90, _Lists, bool]:
    """Return the kernel and its list for tiles of a list where they are better, otherwise what was given.

    A list may take as long to make as a product, so the first product with a pattern has none. None is made while a
    graph is captured either, since only the graph would fill it. The last result is False then: the next product should
    have another launch.
    """
    blocks, _, rows, columns = lists.counts
    wide = sampled_tiles.config_of(config, problem, blocks, (rows, columns))
    if kept is None or wide is None:
        return config, lists, True
    key = wide.row_parts, wide.parts, columns
    made = kept("whether tiles were made", dict)
    if key not in made or (not made[key] and is_capturing()):
        made.setdefault(key, False)
        return config, lists, False
    found = kept(("tiles", *key), lambda: sampled_tiles.listed(lists.right, lists.starts, columns, wide))
    made[key] = True
    return wide, _Lists(found.tiles, found.tiles, found.counts, (blocks, len(found.tiles), rows, columns)), True


def _map(x: Array, dims: tuple[int, int, int], pitches: tuple[int, int], box: tuple[int, int]) -> Layout:
    """Return the tensor map of a stack of matrices, fastest dimension first; a line of the box is a swizzled row."""
    strides = tuple(p * x.itemsize for p in (*pitches, pitches[-1]))
    swizzle = f"{box[0] * x.itemsize}B"
    return Layout(tensor_map.dtype_name(x.dtype), (*dims, 1), strides, (*box, 1, 1), swizzle)


def _launch_sm90(
    config: BlockProductsSm90,
    operands: tuple[Array, Array],
    maps: tuple[Layout, Layout],
    out: tuple[tuple[int, int, int], np.dtype[Any]],
    lists: _Lists,
    K: int,
) -> BlockLaunch | None:
    """Return the launch for Hopper, or None if there are too many tiles; `out` is the result's shape and dtype."""
    blocks, R, N = out[0]
    heights, parts = -(-R // config.tile_m), blocks * -(-N // config.part_n)
    tiles = heights * parts
    if tiles + heights * lists.counts[2] >= _MOST - 2**20:
        return None
    kernel = _kernel(replace(config, index=element(lists.right.dtype)))
    ctas = min(tiles, device.multiprocessors())
    # The kernel starts with so many wide tiles that every CTA computes the same number of them; the rest are narrow.
    narrow = tiles // (config.parts * ctas) * ctas // heights * config.parts
    a, b = (layout.at(x.data.ptr) for layout, x in zip(maps, operands, strict=True))
    packed = BLOCK_PRODUCTS_SM90.pack(
        a=a, b=b, out=0, counters=0, R=R, N=N, K=K, narrow=narrow, row_blocks=0, **lists.fields()
    )
    return BlockLaunch(kernel, (ctas,), (config.threads,), config.shared_bytes, *out, bytes(packed), maps, lists)


def _launch_sm80(
    config: BlockProductsSm80,
    operands: tuple[Array, Array],
    out: tuple[tuple[int, int, int], np.dtype[Any]],
    lists: _Lists,
    steps: tuple[int, ...],
    K: int,
) -> BlockLaunch | None:
    """Return the launch since Ampere, or None if there are too many tiles; `out` is the result's shape and dtype."""
    blocks, R, N = out[0]
    tiles = blocks * (R // config.tile_m) * -(-N // config.part_n)
    if tiles >= _MOST:
        return None
    kernel = _kernel(replace(config, index=element(lists.right.dtype)))
    a_line, b_line, a_block, b_block = steps
    packed = BLOCK_PRODUCTS_SM80.pack(
        a=operands[0].data.ptr, b=operands[1].data.ptr, out=0, a_line=a_line, b_line=b_line, a_block=a_block,
        b_block=b_block, R=R, N=N, K=K, **lists.fields(),
    )  # fmt: skip
    return BlockLaunch(kernel, (tiles,), (config.threads,), config.shared_bytes, *out, bytes(packed), None, lists)


def _kernel(config: BlockProductsSm90 | BlockProductsSm80) -> Any:
    kernel = jit.load(config.spec(), jit.device_target())
    kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    return kernel
