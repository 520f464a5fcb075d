"""The parts of one line of a benchmark: a problem, its operands, our call and the calls of peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..place import Draw, Place
from ..timing import Call

Error = Callable[[Any], float]


@dataclass
class Peer:
    """The call of another library, and how its result is judged if not in the way that ours is."""

    call: Call
    error: Error | None = None


@dataclass
class Ready:
    """A problem whose operands have been allocated and filled."""

    #: our call
    call: Call
    #: how far a result, ours or a peer's, is from float64, over what rounding explains: right up to 1
    error: Error
    #: name -> what prepares a peer; it raises where the peer is not installed or does not serve the problem
    peers: dict[str, Callable[[], Peer]]


class Problem(Protocol):
    """One product or attention of a given size."""

    @property
    def group(self) -> str:
        """gemm, spmv, attention or decode."""

    def __str__(self) -> str:
        """What is measured, in a few words; different for different problems of a group."""

    def parameters(self) -> dict[str, Any]:
        """The parameters of the problem as numbers, for JSON and for plots."""

    @property
    def computed_in(self) -> str:
        """The kind of number whose rate in a dense product is the upper bound."""

    @property
    def flops(self) -> float:
        """Operations that the stored blocks, or the allowed pairs, need."""

    @property
    def traffic(self) -> float:
        """Bytes that must be read and written at least once."""

    @property
    def memory(self) -> float:
        """Bytes of memory that the measurement needs, roughly, including the operands of peers and the references."""

    def ready(self, place: Place, draw: Draw) -> Ready:
        """Make the operands with `draw`."""
