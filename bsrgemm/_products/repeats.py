"""Products whose arguments were checked before, on the GPU: the same kind of call is started without other checks.

A `Repeat` belongs to one matrix and to one set of shapes, strides, dtypes and options of a call, which are its key in
`MatrixCache.repeats`. Only the addresses of the operands differ between its calls. It has a launch for each pair of
addresses that it met, and it makes the launch for a new pair from one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from .._backend.base import Array

#: The largest number of kinds of calls per matrix, and the largest number of launches per kind.
MOST_REPEATS, _MOST_PLACES = 64, 64
#: Kernels and tensor maps are chosen for operands that begin at a multiple of so many bytes, or do not.
_ALIGNMENT = 16


class Launch(Protocol):
    """A kernel with the addresses of its operands, which can be started again (see launch.py)."""

    def plan(self) -> Any:
        """Return the plan to start it with, or None if the matrix no longer stores it."""

    def moved(self, plan: Any, b: int, c: int) -> Self:
        """Return the launch for operands at other addresses, which differ from these in nothing else."""

    def start(self, plan: Any, alpha: Any, beta: Any) -> None:
        """Start the kernel with these factors."""


@dataclass(slots=True)
class Repeat:
    """What is known of a product after its arguments were checked: what its result is, and its launches."""

    #: shape and dtype of the array that is allocated for the result, and whether the result is its transpose
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    turned: bool = False
    #: by the addresses of the dense operand and of the result
    launches: dict[tuple[int, int], Launch] = field(default_factory=dict)
    #: the launch from which those for new addresses are made: the last one whose operands were aligned
    model: Launch | None = None

    def remember(self, x: Array, out: Array, launch: Launch) -> None:
        """Keep the launch of a call for the next one with operands at these addresses."""
        b, c = x.data.ptr, out.data.ptr
        if len(self.launches) >= _MOST_PLACES:
            self.launches.clear()
        self.launches[b, c] = launch
        if not (b | c) % _ALIGNMENT:
            self.model = launch

    def moved(self, x: Array, out: Array) -> Launch | None:
        """Return the launch for operands at addresses that are new; None if the kernel may have to be another one.

        The caller makes sure that the arrays do not overlap where they must not.
        """
        model, b, c = self.model, x.data.ptr, out.data.ptr
        plan = None if model is None else model.plan()
        if model is None or plan is None or (b | c) % _ALIGNMENT:
            return None
        found = model.moved(plan, b, c)
        self.remember(x, out, found)
        return found
