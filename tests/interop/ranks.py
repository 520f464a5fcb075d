"""Ranks that are threads of this process: tests of several ranks that need no MPI, and fail without a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from bsrgemm.interop.communicator import Communicator, Exchange

#: Seconds after which a rank that waits for another one gives up.
PATIENCE = 20


class _World:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.boxes: dict[tuple[int, int], list[Any]] = {(a, b): [] for a in range(size) for b in range(size)}
        self.changed = threading.Condition()


class _Messages:
    def __init__(self, comm: ThreadRank, receives: Mapping[int, Any]) -> None:
        self._comm, self._receives = comm, receives

    def wait(self) -> None:
        for rank, target in sorted(self._receives.items()):
            if not target.nbytes:
                continue
            found = self._comm.take(rank)
            if found is None or found.nbytes != target.nbytes:
                raise RuntimeError(f"receives: wanted {target.nbytes} bytes from rank {rank}")
            target[...] = found.reshape(target.shape)


class ThreadRank(Communicator):
    """One of the ranks; the arrays may be of any array module. `sent` counts the bytes of its messages."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size
        self.sent = 0

    def exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> Exchange:
        for rank, array in sends.items():
            assert array.flags.c_contiguous and 0 <= rank < self.size
            if array.nbytes:
                self.sent += array.nbytes
                self._put(rank, array.copy())
        assert all(array.flags.c_contiguous for array in receives.values())
        return _Messages(self, receives)

    def refuse(self, sends: Iterable[int], receives: Iterable[int]) -> None:
        for rank in sends:
            self._put(rank, None)
        for rank in receives:
            self.take(rank)

    def _put(self, rank: int, array: Any) -> None:
        with self._world.changed:
            self._world.boxes[self.rank, rank].append(array)
            self._world.changed.notify_all()

    def take(self, rank: int) -> Any:
        box = self._world.boxes[rank, self.rank]
        with self._world.changed:
            assert self._world.changed.wait_for(lambda: box, PATIENCE), f"rank {self.rank} waits for {rank} in vain"
            return box.pop(0)

    def _all(self, value: Any) -> list[Any]:
        self._world.slots[self.rank] = value
        self._world.barrier.wait(PATIENCE)
        found = list(self._world.slots)
        self._world.barrier.wait(PATIENCE)
        return found

    def allreduce(self, array: Any, operation: str = "sum") -> Any:
        parts = self._all(array.copy())
        found = parts[0].copy()
        for part in parts[1:]:
            if operation == "sum":
                found = found + part
            else:
                assert isinstance(found, np.ndarray | np.generic)
                found = {"max": np.maximum, "min": np.minimum}[operation](found, part)
        return found

    def allgather(self, array: Any) -> list[Any]:
        return [part.copy() for part in self._all(array.copy())]

    def broadcast(self, value: object, root: int = 0) -> Any:
        return self._all(value)[root]

    def barrier(self) -> None:
        self._world.barrier.wait(PATIENCE)


def run(size: int, program: Callable[[Any], Any]) -> list[Any]:
    """Call ``program(comm)`` on each of so many ranks; what they return, or the error of the lowest one that fails."""
    outcomes = outcomes_of(size, program)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, threading.BrokenBarrierError):
            raise outcome
    assert not any(isinstance(outcome, BaseException) for outcome in outcomes)
    return outcomes


def outcomes_of(size: int, program: Callable[[Any], Any]) -> list[Any]:
    """What each rank returns or raises."""
    world = _World(size)
    outcomes: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            outcomes[rank] = program(ThreadRank(world, rank))
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes
