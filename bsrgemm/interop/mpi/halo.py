"""The halo of a panel: block columns that other ranks have, and who sends which of them to whom.

The lists are made once for a pattern. ``fetch`` brings the ghosts of a vector, ``give_back`` sends numbers of ghosts to
the ranks that they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..._backend.base import Array, Backend
from ..communicator import Communicator, Exchange


def exchanged(comm: Communicator, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Send ``parts[r]`` to rank r and return what each rank has sent to this one; arrays of one dtype on the host.

    Every rank learns all lengths, so this is for setting up.
    """
    lengths = comm.allgather(np.array([[len(part) for part in parts]], np.int64))
    found = [np.empty(int(lengths[rank][0, comm.rank]), parts[0].dtype) for rank in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    comm.exchange({r: np.ascontiguousarray(parts[r]) for r in others}, {r: found[r] for r in others}).wait()
    found[comm.rank] = parts[comm.rank]
    return found


def _slices(lengths: list[int]) -> dict[int, slice]:
    """By rank, where its part of the concatenation is; ranks without one are left out."""
    ends = np.cumsum([0, *lengths]).tolist()
    return {rank: slice(ends[rank], ends[rank + 1]) for rank, length in enumerate(lengths) if length}


@dataclass(frozen=True)
class Halo:
    """Which block columns of this rank others need, and which of others this rank needs."""

    comm: Communicator
    backend: Backend
    #: Elements of a block column.
    width: int
    #: The block columns of this rank that are sent, from 0 on: those for the lowest rank first.
    index: Array
    #: By rank, the places in `index`.
    sends: dict[int, slice]
    #: By rank, the places among the ghosts.
    receives: dict[int, slice]
    #: How many block columns this rank needs from others.
    count: int

    @classmethod
    def of(cls, comm: Communicator, backend: Backend, width: int, starts: np.ndarray, ghosts: np.ndarray) -> Halo:
        """Make the lists, on all ranks together.

        Parameters
        ----------
        comm, backend, width
            As the fields.
        starts : array (size + 1,)
            The block columns of rank r are those from ``starts[r]`` to ``starts[r + 1] - 1``.
        ghosts : array
            The block columns of others that this rank needs, ascending.
        """
        bounds = np.searchsorted(ghosts, starts)
        wanted = [ghosts[bounds[r] : bounds[r + 1]].astype(np.int64) for r in range(comm.size)]
        asked = exchanged(comm, wanted)
        index = np.concatenate(asked) - starts[comm.rank]
        return cls(
            comm,
            backend,
            width,
            backend.from_host(index),
            _slices([len(part) for part in asked]),
            _slices([len(part) for part in wanted]),
            len(ghosts),
        )

    def fetch(self, x: Array, width: int | None = None) -> tuple[Exchange, Array]:
        """Start to bring the ghosts of x, (n * width,) or (n * width, k); the second array is filled after a wait."""
        width, xp = width or self.width, self.backend.xp
        # NumPy keeps the order of x in memory, which may be that of Fortran.
        packed = xp.ascontiguousarray(x.reshape(len(x) // width, width, *x.shape[1:])[self.index])
        ghosts = xp.empty((self.count, width, *x.shape[1:]), x.dtype)
        under_way = self.comm.exchange(
            {rank: packed[part] for rank, part in self.sends.items()},
            {rank: ghosts[part] for rank, part in self.receives.items()},
        )
        return under_way, ghosts.reshape(self.count * width, *x.shape[1:])

    def give_back(self, ghosts: Array, width: int | None = None) -> tuple[Exchange, Array]:
        """Start to send numbers of the ghosts to their ranks; the second array, one part for each of `index`, comes."""
        width, xp = width or self.width, self.backend.xp
        packed = xp.ascontiguousarray(ghosts).reshape(self.count, width, *ghosts.shape[1:])
        coming = xp.empty((len(self.index), width, *ghosts.shape[1:]), ghosts.dtype)
        under_way = self.comm.exchange(
            {rank: packed[part] for rank, part in self.receives.items()},
            {rank: coming[part] for rank, part in self.sends.items()},
        )
        return under_way, coming

    def refuse(self, back: bool = False) -> None:
        """Let the ranks that wait for this one know that nothing will come: no `fetch`, or no `give_back`."""
        self.comm.refuse(*((self.receives, self.sends) if back else (self.sends, self.receives)))

    def bytes(self, itemsize: int, columns: int = 1) -> int:
        """What this rank receives for one product with so many columns."""
        return self.count * self.width * itemsize * columns
