"""Products whose arguments were checked before, on the GPU: the same kind of call is started without other checks.

A `Repeat` belongs to one matrix and to one set of shapes, strides, dtypes and options of a call, which are its key in
`MatrixCache.repeats`. Only two addresses differ between its calls: of the dense operand and of the result of `matmul`,
and of the dense operands of `sddmm`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._kernels.movable import ALIGNMENT, Launches

#: The largest number of kinds of calls per matrix.
MOST_REPEATS = 64


@dataclass(slots=True)
class Repeat:
    """What is known of a product after its arguments were checked: what its result is, and its launches."""

    #: shape and dtype of the array that is allocated for the result, and whether the result is its transpose
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    turned: bool = False
    #: `launch.Launch` or `block_products.BlockLaunch`, by their addresses
    launches: Launches[Any] = field(default_factory=Launches)

    def remember(self, places: tuple[int, int], launch: Any) -> None:
        """Keep the launch of a call for the next one with these addresses."""
        self.launches.keep(places, launch, not (places[0] | places[1]) % ALIGNMENT)

    def moved(self, places: tuple[int, int]) -> Any:
        """Return a launch for addresses that are new; None if the kernel may have to be another one there.

        The caller makes sure that the arrays do not overlap where they must not, and gives the launch back.
        """
        return None if (places[0] | places[1]) % ALIGNMENT else self.launches.take(places)
