"""Every kernel of the package, family by family: what `compile`, `info`, tests and pages walk.

A kernel is named once in the tuple of its family, in the room where its class is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from ._attention.backward import BACKWARD
from ._attention.choose import ATTENTION
from ._attention.decode_kernel import DECODE_KERNELS
from ._backend.array_kernels import ARRAYS
from ._kernels.kernel import Kernel
from ._kernels.rearrange import Rearrange
from ._products.block_products import BLOCKS
from ._products.choice import DENSE
from ._products.filled import Fill, Mend
from ._products.lists import LISTS
from ._products.sparse_dense import TakeBlocks
from ._products.spgemm_pattern import SpgemmPattern

KERNELS: tuple[type[Kernel], ...] = (
    *(*DENSE, Rearrange, Fill, Mend, *BLOCKS, *LISTS, SpgemmPattern, TakeBlocks),
    *(*ATTENTION, *BACKWARD, *DECODE_KERNELS, *ARRAYS),
)


def every(dtypes: Collection[np.dtype[Any]]) -> Iterator[Kernel]:
    """Yield every kernel that can be asked for with operands of these dtypes."""
    for kernel in KERNELS:
        yield from kernel.every(dtypes)
