"""Launches for operands whose addresses are new at each call: their arguments are written again in place.

Calls of one kind differ in the addresses of their operands alone. A launch copies its argument before it returns, so
that the same memory can serve the next call: to write pointers and tensor maps takes the host 2 us, and a launch of its
own 9. `Launches` holds both: launches of addresses that come again, and some that are moved to any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from . import jit
from .structs import Patch
from .tensor_map import Layout, aligned_memory

#: The largest number of addresses that have a launch of their own, and of those that came once.
MOST_PLACES = 64
#: Kernels and tensor maps are chosen for operands that begin at a multiple of so many bytes, or do not.
ALIGNMENT = 16
#: The addresses that differ between calls of one kind.
Places = tuple[int, ...]


class MovingLaunch(Protocol):
    """A launch that only one caller at a time may use."""

    def move(self, places: Any) -> None:
        """Write other addresses; after an error nobody may use the launch again."""

    def kept(self) -> Any:
        """Return a launch for the addresses at which this one is, which many callers may share."""


class KeptLaunch(Protocol):
    """A launch for one set of addresses."""

    def movable(self) -> MovingLaunch | None:
        """Return a launch that moves and differs in nothing else; None if the plan of this one was dropped."""


Kept = TypeVar("Kept", bound=KeptLaunch)


class MovableArgument:
    """The argument of a launch that moves.

    Parameters
    ----------
    packed : bytes-like
        The bytes of the argument, which are copied; its addresses may be any.
    count : int
        The number of addresses.
    pointers : Patch, optional
        Writes all addresses, if the argument has fields for them.
    maps : sequence of (int, int, Layout)
        For each tensor map which of the addresses it describes, where it lies in the argument, and the map without its
        address.
    """

    __slots__ = ("_maps", "_places", "_write_pointers", "argument", "packed")

    def __init__(
        self, packed: bytes | bytearray, count: int, pointers: Patch | None, maps: Sequence[tuple[int, int, Layout]]
    ) -> None:
        self.packed, address = aligned_memory(len(packed))
        self.packed[:] = packed
        self.argument = jit.argument(self.packed)
        self._places: Places = (0,) * count
        self._write_pointers = None if pointers is None else pointers.into(self.packed)
        self._maps = tuple((number, address + at, layout) for number, at, layout in maps)

    def move(self, places: Places) -> None:
        """Write these addresses into the argument."""
        before = self._places
        for number, target, layout in self._maps:
            if places[number] != before[number]:
                layout.write(target, places[number])
        if self._write_pointers is not None:
            self._write_pointers(*places)
        self._places = places


class Launches(Generic[Kept]):
    """The launches of calls of one kind. Addresses that come twice get a launch of their own."""

    __slots__ = ("_came_once", "_model", "_spare", "kept")

    def __init__(self) -> None:
        self.kept: dict[Any, Kept] = {}
        #: the last launch whose operands were aligned, from which launches that move are made
        self._model: Kept | None = None
        #: launches that nobody uses; a caller takes one out, so that no other thread has it at the same time
        self._spare: list[Any] = []
        self._came_once: set[Any] = set()

    def keep(self, places: Any, launch: Kept, aligned: bool) -> None:
        """Keep the launch of a call that was checked for the next one with these addresses."""
        if len(self.kept) >= MOST_PLACES:
            self.kept.clear()
        self.kept[places] = launch
        if aligned:
            self._model = launch

    def take(self, places: Any) -> Any:
        """Return a launch that was moved to addresses that are aligned; None if there is nothing to make it from."""
        try:
            found = self._spare.pop()
        except IndexError:
            found = None if self._model is None else self._model.movable()
            if found is None:
                return None
        found.move(places)
        return found

    def give_back(self, places: Any, launch: Any) -> None:
        """Let others use a launch that `take` returned, after it was started."""
        came_once = self._came_once
        if places in came_once:
            came_once.discard(places)
            self.keep(places, launch.kept(), True)
        else:
            if len(came_once) >= MOST_PLACES:
                came_once.clear()
            came_once.add(places)
        self._spare.append(launch)
