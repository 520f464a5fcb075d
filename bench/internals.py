"""What the benchmark needs from inside bsrgemm, beyond its public names and its clock: everything is in this file."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from bsrgemm import BlockMask

from .place import Call


def on_kernel(kernel: str | None) -> contextlib.AbstractContextManager[Any]:
    """Inside this block products and attention run on the kernel of that name, even if another one would be chosen."""
    from bsrgemm._kernels import forced_kernel

    return contextlib.nullcontext() if kernel is None else forced_kernel.force_kernel(kernel)


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


def work_list_maker(indices: Any, indptr: Any, side: int, per_group: int) -> Call:
    """Group the rows of a pattern on the GPU and build its work list."""
    from bsrgemm._backend import registry
    from bsrgemm._products import row_matching, work_list, work_list_launch

    backend = registry.cuda()
    pattern = work_list.Pattern(indices, indptr, side, side, False)

    def make() -> Any:
        if per_group == 1:
            return work_list_launch.whole(work_list.single(backend, pattern, 1))
        order = row_matching.matched(pattern, 1, per_group)
        merged = work_list_launch.merged(pattern, 1, per_group, order)
        assert merged is not None
        return work_list_launch.whole(merged)

    return make
