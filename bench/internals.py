"""What the benchmark needs from inside bsrgemm, beyond its public names and its clock: everything is in this file."""

from __future__ import annotations

from functools import partial
from typing import Any

from bsrgemm import BlockMask

from .place import Call


def forced(call: Call, kernel: str | None) -> Call:
    """The call of a product or of attention on the kernel of that name, even if another one would be chosen."""
    from bsrgemm._kernels import forced_kernel

    if kernel is None:
        return call

    def on_kernel() -> Any:
        with forced_kernel.force_kernel(kernel):
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
