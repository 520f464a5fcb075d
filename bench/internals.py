"""What the benchmark needs from inside bsrgemm, beyond its public names and its clock: everything is in this file."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from bsrgemm import BlockMask

from .place import Call

#: Options of a product that a forced sweep measures, at most.
_OPTIONS = 6


def forced(call: Call, kernel: str | None) -> Call:
    """The call of a product or of attention on the kernel of that name, even if another one would be chosen."""
    from bsrgemm._kernels.kernel import force_kernel

    if kernel is None:
        return call

    def on_kernel() -> Any:
        with force_kernel(kernel):
            return call()

    return on_kernel


def replay(call: Call, xp: Any, graph: bool = True) -> Any:
    """What `bsrgemm.linalg` makes of an iteration: on a card its first call captures it, and all others replay it."""
    from bsrgemm.linalg.graphs import Replay

    return Replay(call, xp, graph)


def overlapping_kernel(kernel: Any) -> Any:
    """A `cupy.RawKernel`, or where cards can do that the same with launches that may overlap with others."""
    from bsrgemm._kernels import jit, overlapping

    return overlapping.OverlappingKernel(kernel) if overlapping.can_overlap(jit.device_target()) else kernel


def mask_listing(mask: BlockMask) -> Call:
    """Listing the tiles of 128 x 128 of a mask."""
    from bsrgemm._attention import mask_tiles

    return partial(mask_tiles.tiles, mask._backend, mask, 128, 128)


def product_kernels(A: Any, B: Any, out: Any, left: bool, kind: str) -> tuple[dict[str, Any], dict[Any, Call]]:
    """The problem of a product, A @ B or B @ A (`left`), and what prepares and starts the options to compute it.

    The first option is the one that is chosen; the others are those with the shortest predicted times.
    """
    from bsrgemm._kernels.card import card
    from bsrgemm._products.call import ProductCall, order_of, order_of_result
    from bsrgemm._products.cuda import prepared_for
    from bsrgemm._products.matmul import for_product, product_dtypes
    from bsrgemm._products.operand import operand_of, problem_of
    from bsrgemm._products.prepared import choose, options

    fp8, (matrix, transposed) = kind == "e4m3", A._source()
    X, C = (x[:, None] if x.ndim == 1 else x.swapaxes(-1, -2) if left else x for x in (B, out))
    acc = np.dtype(np.float32) if fp8 else product_dtypes(matrix.data.dtype, X.dtype, C.dtype)[1]
    matrix = matrix if fp8 else for_product(matrix, acc)
    call = ProductCall(matrix, X, C, acc, transposed=transposed ^ left, tf32=kind == "tf32", fp8=fp8)
    problem = problem_of(operand_of(matrix), call, (order_of(X), order_of_result(C)))

    def on(kernel: Any) -> Call:
        def start() -> Any:
            launch.start((X, C), 1, 0)
            return out

        launch = prepared_for(replace(call, kernel=kernel))
        return start

    every = sorted(options(problem), key=lambda kernel: kernel.seconds(problem, card()))
    kernels = dict.fromkeys([choose(problem, card()), *every[:_OPTIONS]])
    return asdict(problem), {kernel: partial(on, kernel) for kernel in kernels}


def block_ways(part: str) -> tuple[str, ...]:
    """The ways to compute the blocks of "sddmm" or of a "sparse" product, of which one can be forced."""
    from bsrgemm._products.block_products import WAYS

    return tuple(way for way in WAYS if way != {"sddmm": "SparseDense", "sparse": "SampledDense"}[part])
