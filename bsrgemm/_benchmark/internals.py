"""What the benchmarks need from inside the package, beyond its public names: everything is in this file."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from bsrgemm import BlockMask

from .._attention import mask_tiles
from .._backend import registry
from .._backend.base import Blocks
from .._kernels import forced_kernel
from .._products.engine import ENGINES
from .timing import Call

#: Inside this block products and attention run on the kernel of that name, even if the rules would choose another one.
force_kernel = forced_kernel.force_kernel


def overlapping_kernel(kernel: Any) -> Any:
    """A `cupy.RawKernel`, or where cards can do that the same with launches that may overlap with others."""
    from .._kernels import jit, overlapping

    return overlapping.OverlappingKernel(kernel) if overlapping.can_overlap(jit.device_target()) else kernel


def square_products(A: Any, device: str) -> tuple[Call, int]:
    """The products of A @ A without the search for pairs of blocks, and the number of blocks of the result."""
    engine, rows = ENGINES.of(registry.by_name(device)), A.shape[0] // A.blocksize[0]
    blocks = Blocks(A.data, A.indices, A.indptr)
    left, right, starts, *_ = engine.product_pattern(blocks, blocks, rows)
    return partial(engine.pair_products, A.data, left, A.data, right, starts, A.dtype, rows), len(starts)


def mask_listing(mask: BlockMask) -> Call:
    """Listing the tiles of 128 x 128 of a mask."""
    return partial(mask_tiles.tiles, mask._backend, mask, 128, 128)


def launches_of_gradients(call: Call) -> list[float]:
    """Seconds of each kernel that the gradients of attention launch, with the L2 flushed and the host hidden before."""
    import cupy

    from .._kernels import launch, timing

    loaded, events = launch.loaded, list[Any]()

    def timed(kernel: Any) -> Call:
        function = loaded(kernel)

        def start(*args: Any, **options: Any) -> None:
            function(*args, **options)
            events.append(cupy.cuda.Event())
            events[-1].record()

        return start

    timing.flushing_array().sum()
    timing.sleep_on_gpu(round(timing.sleep_seconds(1e-3) * 1e9))
    events.append(cupy.cuda.Event())
    events[0].record()
    launch.loaded = timed
    try:
        call()
    finally:
        launch.loaded = loaded
    cupy.cuda.Device().synchronize()
    return [cupy.cuda.get_elapsed_time(a, b) / 1e3 for a, b in itertools.pairwise(events)]


def work_list_maker(indices: Any, indptr: Any, side: int, per_group: int) -> Call:
    """Group the rows of a pattern on the GPU and build its work list."""
    from .._products import row_matching, work_list, work_list_launch

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
