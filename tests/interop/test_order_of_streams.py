"""MPI reads and writes memory of a card outside of the order of its stream: what must be done before it may.

Ranks are threads, arrays are those of a fake card, and MPI is a model that refuses memory which work that was
queued before still uses. Work counts as done once the host has waited for an event that was recorded after it.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi
from bsrgemm.interop.communicator import MpiCommunicator
from bsrgemm.interop.mpi import multigrid
from bsrgemm.interop.mpi.matrix import matmul as product_of_panels

from .. import fake_cupy
from ..fake_cupy import ndarray
from .ranks import ThreadRank, run

pytestmark = pytest.mark.fake


class Stream(threading.local):
    """The stream of a rank: how much work was queued, and how much of it is known to be done."""

    queued = 0
    done = 0


class Memory:
    """By allocation, the work after which its owner may use it outside of the stream."""

    def __init__(self) -> None:
        self.stream = Stream()
        #: the allocations themselves too, so that no number is used twice
        self.found: dict[int, tuple[Any, int]] = {}

    def used(self, x: ndarray, again: bool) -> None:
        """Note work on an array: when its memory comes from the pool, or, `again`, when it is written."""
        key = x.data.mem.ptr
        if again or key not in self.found:
            self.stream.queued += 1
            self.found[key] = (x._memory, self.stream.queued)

    def check(self, x: ndarray, call: str) -> None:
        assert self.stream.done >= self.found[x.data.mem.ptr][1], f"{call}: the stream still uses this memory"


class Request:
    def __init__(self, done: Callable[[Any], None]) -> None:
        self._done = done

    def Wait(self, status: Any = None) -> None:
        self._done(status)

    @staticmethod
    def Waitall(requests: list[Request]) -> None:
        for request in requests:
            request.Wait()


class Status:
    bytes = 0

    def Get_count(self, _: Any) -> int:
        return self.bytes


class Mpi:
    """What `MpiCommunicator` asks of a communicator of mpi4py that reads and writes the card."""

    def __init__(self, threads: ThreadRank, memory: Memory, seen: list[str]) -> None:
        self._threads, self._memory, self._seen = threads, memory, seen

    def Isend(self, message: Any, rank: int, tag: int) -> Request:
        bytes_ = message[0]
        if isinstance(bytes_, ndarray):
            self._memory.check(bytes_, "Isend")
            self._seen.append("Isend")
            bytes_ = bytes_._memory
        self._threads._put(rank, bytes_.copy())
        return Request(lambda status: None)

    def Irecv(self, message: Any, rank: int, tag: int) -> Request:
        bytes_ = message[0]
        if isinstance(bytes_, ndarray):
            self._memory.check(bytes_, "Irecv")
            self._seen.append("Irecv")
            bytes_ = bytes_._memory

        def done(status: Any) -> None:
            bytes_[...] = self._threads.take(rank)
            status.bytes = bytes_.nbytes

        return Request(done)


class CardRank(MpiCommunicator):
    """A rank whose messages are those of `MpiCommunicator`, and whose collective calls are those of threads."""

    def __init__(self, threads: ThreadRank, memory: Memory, seen: list[str]) -> None:
        self._MPI: Any = SimpleNamespace(BYTE=None, Status=Status, Request=Request, Exception=ArithmeticError)
        self._mpi = Mpi(threads, memory, seen)
        self.rank, self.size, self.cuda_aware, self._held = threads.rank, threads.size, True, []
        self.allgather, self.broadcast = threads.allgather, threads.broadcast  # type: ignore[method-assign]
        self.allreduce, self.barrier = threads.allreduce, threads.barrier  # type: ignore[method-assign]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """A card of which MPI knows: each allocation and each write is work of the stream."""
    found = Memory()
    made, written = ndarray.__init__, ndarray.__setitem__

    class Event:
        def __init__(self, **_: Any) -> None:
            self._after = 0

        def record(self) -> None:
            self._after = found.stream.queued

        def synchronize(self) -> None:
            found.stream.done = max(found.stream.done, self._after)

    def init(self: ndarray, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        found.used(self, again=False)

    def setitem(self: ndarray, key: Any, value: Any) -> None:
        written(self, key, value)
        found.used(self, again=True)

    monkeypatch.setattr(ndarray, "__init__", init)
    monkeypatch.setattr(ndarray, "__setitem__", setitem)
    monkeypatch.setattr(fake_cupy.xp.cuda, "Event", Event)
    yield found


def on_cards(memory: Memory, program: Callable[[Any], Any], size: int = 3) -> list[Any]:
    """What `program` returns on each rank; messages must have come from cards and gone to them."""
    seen: list[str] = []
    found = run(size, lambda threads: program(CardRank(threads, memory, seen)))
    assert {"Isend", "Irecv"} <= set(seen)
    return found


DENSE = np.kron(np.eye(6, k=0) * 4 - np.eye(6, k=5) - np.eye(6, k=-1), np.ones((2, 2))) + np.eye(12)
A = bg.bsr_array(DENSE, blocksize=(2, 2))
X = np.arange(12.0)


def spread(comm: Any) -> Any:
    """The matrix with a panel on each card; nothing is sent from card to card for it."""
    panels = bg.bsr_array(A.toarray()[4 * comm.rank : 4 * comm.rank + 4], blocksize=(2, 2))
    return mpi.from_local(panels, comm, device="cuda")


def part(comm: Any) -> Any:
    return fake_cupy.backend().from_host(X[4 * comm.rank : 4 * comm.rank + 4])


PLACES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "ghosts": (lambda comm: spread(comm) @ part(comm), DENSE @ X),
    "numbers of ghosts": (lambda comm: spread(comm).T @ part(comm), DENSE.T @ X),
    "block rows": (lambda comm: multigrid.Product()(D := spread(comm), D.panel()).toarray(), DENSE @ DENSE),
    "block rows of the transpose": (
        lambda comm: multigrid.TransposedProduct()(D := spread(comm), D.panel()).toarray(),
        DENSE.T @ DENSE,
    ),
    "parts of a vector": (
        lambda comm: spread(comm).scatter(fake_cupy.backend().from_host(X) if comm.rank == 0 else None),
        X,
    ),
    "panels": (lambda comm: mpi.partition(A.to_device("cuda"), comm, rows=[2, 2, 2]).panel().toarray(), DENSE),
}


@pytest.mark.parametrize("name", PLACES)
def test_mpi_gets_memory_of_a_card_after_its_stream(name: str, memory: Memory) -> None:
    program, want = PLACES[name]
    found = on_cards(memory, lambda comm: fake_cupy.backend().to_host(program(comm)))
    np.testing.assert_array_equal(np.concatenate(found), want)


def test_a_whole_vector_comes_after_the_stream(memory: Memory) -> None:
    found = on_cards(memory, lambda comm: spread(comm).gather(part(comm)))
    np.testing.assert_array_equal(fake_cupy.backend().to_host(found[0]), X)


def test_a_solver_over_cards_waits_for_their_streams(memory: Memory) -> None:
    spd = DENSE @ DENSE.T + np.eye(12)

    def program(comm: Any) -> Any:
        panel = bg.bsr_array(spd[4 * comm.rank : 4 * comm.rank + 4], blocksize=(2, 2))
        D = mpi.from_local(panel, comm, device="cuda")
        x, info = linalg.cg(D, part(comm), rtol=1e-12)
        assert info == 0
        return fake_cupy.backend().to_host(x)

    np.testing.assert_allclose(np.concatenate(on_cards(memory, program)), np.linalg.solve(spd, X), rtol=1e-6)


def test_keys_values_and_their_gradients_go_round_the_ring_after_the_stream(
    memory: Memory,
) -> None:
    q, k, v = (np.random.default_rng(seed).standard_normal((1, 2, 30, 8)) for seed in range(3))

    def program(comm: Any) -> Any:
        own = [fake_cupy.backend().from_host(mpi.zigzag_split(x, comm.rank, comm.size)) for x in (q, k, v)]
        out, lse = mpi.ring_attention(*own, comm=comm, causal=True, return_lse=True)
        found = (out, *mpi.ring_attention_backward(out, *own, out, lse, comm=comm, causal=True))
        return [fake_cupy.backend().to_host(x) for x in found]

    found = [mpi.zigzag_join(parts) for parts in zip(*on_cards(memory, program), strict=True)]
    out, lse = bg.attention(q, k, v, causal=True, return_lse=True)
    for mine, want in zip(found, (out, *bg.attention_backward(out, q, k, v, out, lse, causal=True)), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-6, atol=1e-9)


# --------------------------------------------------------------------------------------- until the messages are done
def test_memory_of_messages_is_kept_although_nobody_waits(memory: Memory) -> None:
    def program(comm: Any) -> Any:
        other = 1 - comm.rank
        x, y = (fake_cupy.backend().from_host(np.full(3, float(comm.rank))) for _ in range(2))
        kept = [weakref.ref(z.data.room) for z in (x, y)]
        comm.exchange({other: x}, {other: y})
        memory.found.clear()
        del x, y
        gc.collect()
        return all(one() is not None for one in kept)

    assert run(2, lambda threads: program(CardRank(threads, memory, []))) == [True, True]


def test_memory_of_messages_is_free_once_they_were_waited_for(memory: Memory) -> None:
    def program(comm: Any) -> Any:
        other = 1 - comm.rank
        x, y = (fake_cupy.backend().from_host(np.full(3, float(comm.rank))) for _ in range(2))
        kept = [weakref.ref(z.data.room) for z in (x, y)]
        under_way = comm.exchange({other: x}, {other: y})
        under_way.wait()
        assert y.get().tolist() == [other] * 3
        memory.found.clear()
        del x, y
        gc.collect()
        return all(one() is None for one in kept)

    assert on_cards(memory, program, 2) == [True, True]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_that_fails_waits_for_its_messages(
    transposed: bool, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interior product fails on every rank; the product of ghosts, which is sent, does not."""

    def failing(matrix: Any, x: Any, **options: Any) -> Any:
        if matrix.shape[0] == matrix.shape[1] == 4:
            raise ArithmeticError("no memory")
        return product_of_panels(matrix, x, **options)

    monkeypatch.setattr("bsrgemm.interop.mpi.matrix.matmul", failing)

    def program(comm: Any) -> Any:
        D = spread(comm)
        with pytest.raises(ArithmeticError, match="no memory"):
            (D.T if transposed else D) @ part(comm)
        return all(messages.done for messages in comm._held)

    assert on_cards(memory, program) == [True] * 3
