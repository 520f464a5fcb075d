"""Launches of the tensor-core kernels whose result is a list of blocks: ``BSR @ BSR`` and sampled products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import device, jit, tensor_map
from .._kernels.element_types import element
from .._kernels.launching import contiguous
from .._kernels.workspace import counters
from . import heuristics
from .arguments import BLOCK_PRODUCTS_SM80, BLOCK_PRODUCTS_SM90
from .configs import BlockProductsSm80, BlockProductsSm90
from .heuristics import BlockProblem
from .operand_order import order_of

#: Number of block rows of the result that are computed together: kStrip of cuda/block_products_sm90.cu.
_STRIP = 16
#: The kernels number tiles, rows and columns with 31 bits, so there must be fewer of each than this.
_MOST = 2**31


@dataclass(slots=True)
class _Lists:
    """The pairs of blocks that are multiplied, and the number of blocks."""

    #: index of the left block of each pair; None in a sampled product, where the block row determines it
    left: Array | None
    #: index of the right block of each pair
    right: Array
    #: index of the first pair of each block of the result; in a sampled product, of each block row
    starts: Array
    #: number of blocks of the result, of pairs, of blocks of the left operand and of blocks of the right operand
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


def pair_products(
    a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
) -> Array | None:
    """Compute ``out[s] = sum of a[ia[k]] @ b[ib[k]]`` over the pairs k of block s on the tensor cores.

    The result is None if the tensor cores cannot compute this product. `rows` is the number of block rows of the
    result if its blocks are sorted by block row, otherwise 0. If B is larger than the L2 cache, the Hopper kernel uses
    it to compute the blocks in an order that reads less from memory.
    """
    R, K = a.shape[1:]
    N = b.shape[2]
    a, b = contiguous(a), contiguous(b)
    if not 0 < len(ia) < _MOST or max(len(a) * R, len(b) * K) >= _MOST or (a.data.ptr | b.data.ptr) % 16:
        return None
    problem = BlockProblem(jit.device_target(), a.dtype, b.dtype, dtype, R, K, N)
    out = (len(starts), R, N)
    lists = _Lists(contiguous(ia), contiguous(ib), contiguous(starts), (len(starts), len(ia), len(a), len(b)))
    hopper = heuristics.block_products_sm90(problem)
    if hopper is not None:
        left = _map(a, (K, R, len(a)), (K, R * K), (64, hopper.tile_m))
        right = _map(b, (N, K, len(b)), (N, K * N), (64, 64))
        in_strips = rows >= _STRIP and b.nbytes > device.l2_bytes()
        row_blocks = round(len(starts) / rows) if in_strips else 0
        return _launch_sm90(hopper, (left, right), cupy.empty(out, dtype), lists, K, row_blocks)
    config = heuristics.block_products_sm80(problem)
    if config is None:
        return None
    return _launch_sm80(config, (a, b), cupy.empty(out, dtype), lists, (K, N, R * K, K * N), K)


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
    R, N = block
    M, K = X.shape
    problem = BlockProblem(jit.device_target(), X.dtype, Y.dtype, dtype, R, K, N, "F", tf32)
    if max(*X.shape, *Y.shape) >= _MOST or heuristics.block_products_sm80(problem) is None:
        return None
    if order_of(X) != "C":
        X = cupy.ascontiguousarray(X)
    hopper = heuristics.block_products_sm90(problem) is not None
    order = order_of(Y)
    if not order or (hopper and heuristics.block_products_sm90(replace(problem, order=order)) is None):
        Y, order = cupy.asfortranarray(Y), "F"
    problem = replace(problem, order=order)
    out = cupy.empty((len(indices), R, N), dtype)
    counts = (len(indices), len(indices), M // R, Y.shape[1] // N)
    lists = _Lists(None, contiguous(indices), contiguous(indptr.astype(indices.dtype, copy=False)), counts)
    lines = tuple(x.strides[0 if o == "C" else 1] // x.itemsize for x, o in ((X, "C"), (Y, order)))
    config = heuristics.block_products_sm90(problem)
    if config is None:
        other = heuristics.block_products_sm80(problem)
        assert other is not None
        steps = (*lines, R * lines[0], N * (lines[1] if order == "F" else 1))
        return _launch_sm80(other, (X, Y), out, lists, steps, K)
    left = _map(X, (K, M, 1), (lines[0], lines[0]), (64, config.tile_m))
    slab = min(config.part_n, 64)
    dims, box = ((K, Y.shape[1]), (64, config.part_n)) if config.b_transposed else ((Y.shape[1], K), (slab, 64))
    right = _map(Y, (*dims, 1), (lines[1], lines[1]), box)
    return _launch_sm90(config, (left, right), out, lists, K)


def _map(x: Array, dims: tuple[int, int, int], pitches: tuple[int, int], box: tuple[int, int]) -> bytes:
    """Return the tensor map of a stack of matrices, fastest dimension first; a line of the box is a swizzled row."""
    strides = [p * x.itemsize for p in (*pitches, pitches[-1])]
    swizzle = f"{box[0] * x.itemsize}B"
    return tensor_map.encode(x.data.ptr, str(x.dtype), (*dims, 1), strides, (*box, 1, 1), swizzle=swizzle).tobytes()


def _launch_sm90(
    config: BlockProductsSm90, maps: tuple[bytes, bytes], out: Array, lists: _Lists, K: int, row_blocks: int = 0
) -> Array | None:
    blocks, R, N = out.shape
    heights, parts = -(-R // config.tile_m), blocks * -(-N // config.part_n)
    tiles = heights * parts
    if tiles + heights * lists.counts[2] >= _MOST - 2**20:
        return None
    kernel = _kernel(replace(config, index=element(lists.right.dtype)))
    ctas = min(tiles, device.multiprocessors())
    # The kernel starts with so many wide tiles that every CTA computes the same number of them; the rest are narrow.
    narrow = tiles // (config.parts * ctas) * ctas // heights * config.parts
    packed = BLOCK_PRODUCTS_SM90.pack(
        a=maps[0], b=maps[1], out=out.data.ptr, counters=counters(2).data.ptr, R=R, N=N, K=K, narrow=narrow,
        row_blocks=row_blocks, **lists.fields(),
    )  # fmt: skip
    kernel((ctas,), (config.threads,), (jit.argument(packed),), shared_mem=config.shared_bytes)
    return out


def _launch_sm80(
    config: BlockProductsSm80,
    operands: tuple[Array, Array],
    out: Array,
    lists: _Lists,
    steps: tuple[int, ...],
    K: int,
) -> Array | None:
    blocks, R, N = out.shape
    tiles = blocks * (R // config.tile_m) * -(-N // config.part_n)
    if tiles >= _MOST:
        return None
    kernel = _kernel(replace(config, index=element(lists.right.dtype)))
    a_line, b_line, a_block, b_block = steps
    packed = BLOCK_PRODUCTS_SM80.pack(
        a=operands[0].data.ptr, b=operands[1].data.ptr, out=out.data.ptr, a_line=a_line, b_line=b_line,
        a_block=a_block, b_block=b_block, R=R, N=N, K=K, **lists.fields(),
    )  # fmt: skip
    kernel((tiles,), (config.threads,), (jit.argument(packed),), shared_mem=config.shared_bytes)
    return out


def _kernel(config: BlockProductsSm90 | BlockProductsSm80) -> Any:
    kernel = jit.load(config.spec(), jit.device_target())
    kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    return kernel
