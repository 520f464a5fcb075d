"""What the benchmark needs from inside bsrgemm, beyond its public names and its clock: everything is in this file."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from bsrgemm import BlockMask

from .place import Call


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
    """The problem of a product, A @ B or B @ A (`left`), and what prepares and starts each kernel that can compute it.

    The first kernel is the one that is chosen, which may be a preparation that copies an operand.
    """
    from bsrgemm._kernels.card import card
    from bsrgemm._products.call import ProductCall, order_of
    from bsrgemm._products.choice import DENSE, variants
    from bsrgemm._products.cuda import prepared_for
    from bsrgemm._products.matmul import for_product, product_dtypes
    from bsrgemm._products.operand import operand_of, problem_of
    from bsrgemm._products.prepared import choose

    fp8, (matrix, transposed) = kind == "e4m3", A._source()
    X, C = (x[:, None] if x.ndim == 1 else x.swapaxes(-1, -2) if left else x for x in (B, out))
    acc = np.dtype(np.float32) if fp8 else product_dtypes(matrix.data.dtype, X.dtype, C.dtype)[1]
    matrix = matrix if fp8 else for_product(matrix, acc)
    call = ProductCall(matrix, X, C, acc, transposed=transposed ^ left, tf32=kind == "tf32", fp8=fp8)
    problem = problem_of(operand_of(matrix), call, (order_of(X), order_of(C)))
    others = (kernel.best(problem) for kernel in DENSE if kernel.serves(problem))

    def on(kernel: Any) -> Call:
        def start() -> Any:
            launch.start((X, C), 1, 0)
            return out

        launch = prepared_for(replace(call, kernel=kernel))
        return start

    kernels = dict.fromkeys([choose(problem, card()), *variants(problem), *others])
    return asdict(problem), {kernel: partial(on, kernel) for kernel in kernels}
