"""Products whose arguments were checked before, on the GPU: the same kind of call is started without other checks.

A `Repeat` belongs to one matrix and to one set of shapes, strides, dtypes and options of a call, which are its key in
`MatrixCache.repeats`. Only two addresses differ between its calls: of the dense operand and of the result of `matmul`,
and of the dense operands of `sddmm`. It has a launch for each pair of addresses that it met, and it makes the launch
for a new pair from one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

#: The largest number of kinds of calls per matrix, and the largest number of launches per kind.
MOST_REPEATS, _MOST_PLACES = 64, 64
#: Kernels and tensor maps are chosen for operands that begin at a multiple of so many bytes, or do not.
_ALIGNMENT = 16


class Launch(Protocol):
    """A kernel with two addresses in its argument: `launch.Launch` or `block_products.BlockLaunch`."""

    def moved(self, first: int, second: int) -> Self | None:
        """Return the launch for other addresses, all else being equal; None if the matrix has dropped its plan."""


@dataclass(slots=True)
class Repeat:
    """What is known of a product after its arguments were checked: what its result is, and its launches."""

    #: shape and dtype of the array that is allocated for the result, and whether the result is its transpose
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    turned: bool = False
    #: the launches, by their addresses
    launches: dict[tuple[int, int], Any] = field(default_factory=dict)
    #: the launch from which those for new addresses are made: the last one whose operands were aligned
    model: Launch | None = None

    def remember(self, places: tuple[int, int], launch: Launch) -> None:
        """Keep the launch of a call for the next one with these addresses."""
        if len(self.launches) >= _MOST_PLACES:
            self.launches.clear()
        self.launches[places] = launch
        if not (places[0] | places[1]) % _ALIGNMENT:
            self.model = launch

    def moved(self, places: tuple[int, int]) -> Any:
        """Return the launch for addresses that are new; None if the kernel may have to be another one there.

        The caller makes sure that the arrays do not overlap where they must not.
        """
        model = self.model
        if model is None or (places[0] | places[1]) % _ALIGNMENT:
            return None
        found = model.moved(*places)
        if found is not None:
            self.remember(places, found)
        return found
