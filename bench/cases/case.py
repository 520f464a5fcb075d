"""The parts of a row: a problem, its operands, our call and those that are timed beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..place import Call, Place

Error = Callable[[Any], float]


@dataclass
class Peer:
    """A call that is timed beside ours."""

    call: Call
    #: how its result is judged if not in the way that ours is
    error: Error | None = None
    #: whether it is judged: a call of our own on other operands is not
    judged: bool = True


@dataclass
class Ready:
    """A problem whose operands have been allocated and filled."""

    #: our call
    call: Call
    #: how far a result, ours or a peer's, is from float64, over what rounding explains: right up to 1
    error: Error
    #: name -> what prepares a peer: ImportError where it is not installed, NotImplementedError where it does not serve
    peers: dict[str, Callable[[], Peer]] = field(default_factory=dict)


class Case(Protocol):
    """One problem of a given size."""

    def __str__(self) -> str:
        """What is measured, in a few words; different for different cases of a study."""

    @property
    def kind(self) -> str:
        """The kind of number whose rate in a dense product is the upper bound."""

    @property
    def flops(self) -> float:
        """Operations that the stored blocks, or the pairs that are seen, need."""

    @property
    def moved(self) -> float:
        """Bytes that must be read and written at least once."""

    @property
    def memory(self) -> float:
        """Bytes of memory that the measurement needs, roughly, including the operands of peers and the references."""

    def ready(self, place: Place) -> Ready:
        """Make the operands with `place.draw`."""


def plainly(make: Callable[[], Call]) -> Callable[[], Peer]:
    """A peer whose result is judged as ours."""
    return lambda: Peer(make())


def ours_too(call: Call) -> Callable[[], Peer]:
    """A call of our own that does comparable work, timed in turn with ours; its result is another one."""
    return lambda: Peer(call, judged=False)
