"""What processes tell each other: exchange arrays, sum, gather, broadcast, wait. One rank, or mpi4py.

Everything above this module (matrices in panels, the ring of attention) is written over `Communicator` alone.
"""

from __future__ import annotations

import builtins
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .._backend.base import Array

#: The tag of all messages. The communicator is a duplicate, so that no message of the user has it.
_TAG = 23
_OPERATIONS = ("sum", "max", "min")
#: Bytes of an array that travel with its length: a second call of MPI takes longer than 15 numbers.
_SMALL = 120


class Exchange(Protocol):
    """Messages that are under way."""

    def wait(self) -> None:
        """Return when the arrays to receive are filled and those to send may be changed."""


@runtime_checkable
class Communicator(Protocol):
    """Several ranks that run the same program. Every method except `exchange` is called by all of them together.

    An object of your own with these attributes and methods is a communicator too.

    Attributes
    ----------
    rank : int
        The number of this process, from 0 on.
    size : int
        The number of processes.
    """

    #: The number of this process, from 0 on.
    rank: int
    #: The number of processes.
    size: int

    def exchange(self, sends: Mapping[int, Array], receives: Mapping[int, Array]) -> Exchange:
        """Start to send an array to each rank of `sends`, and to fill an array from each rank of `receives`.

        Parameters
        ----------
        sends, receives : mapping from int to array
            Contiguous arrays of NumPy or CuPy by rank. They stay as they are until ``wait()`` of the result returns.
            Both sides of a message have the same number of bytes. The current stream may still compute an array to
            send, or use memory of one to receive for an earlier owner: only what comes after that in the order of the
            stream may touch them.

        Returns
        -------
        Exchange
            An object whose ``wait()`` returns when the arrays to receive are filled and those to send may be changed.
        """

    def refuse(self, sends: Iterable[int], receives: Iterable[int]) -> None:
        """Take part in an exchange without data: the ranks that wait for this one raise an error instead of waiting.

        Parameters
        ----------
        sends, receives : iterable of int
            The ranks that `exchange` would have sent to and received from.

        Returns
        -------
        None
        """

    def allreduce(self, array: Array, operation: str = "sum") -> Array:
        """Return a sum or an extreme over the ranks, made in the order of the ranks: the same bits on every rank.

        Each rank receives the arrays of all: this is for numbers, not for vectors.

        Parameters
        ----------
        array : array
            All ranks pass the same shape and dtype.
        operation : {"sum", "max", "min"}
            What is computed, element by element.

        Returns
        -------
        array like `array`
        """

    def allgather(self, array: Array) -> list[Array]:
        """Return the arrays of all ranks, by rank.

        Parameters
        ----------
        array : array
            The lengths along the first axis may differ between ranks, and nothing else.

        Returns
        -------
        list of array
        """

    def broadcast(self, value: object, root: int = 0) -> Any:
        """Return the small Python object that rank `root` passes.

        Parameters
        ----------
        value : object
            The object; what the other ranks pass is not looked at.
        root : int
            The rank that has it.

        Returns
        -------
        object
        """

    def barrier(self) -> None:
        """Wait until all ranks have come here.

        Returns
        -------
        None
        """


def is_host(array: Array) -> bool:
    """Tell whether an array is in the memory of the host."""
    return isinstance(array, np.ndarray | np.generic)


def _check(size: int, name: str, messages: Mapping[int, Array]) -> None:
    for other, array in messages.items():
        if not 0 <= other < size:
            raise ValueError(f"{name}: wanted ranks from 0 to {size - 1}, got {other}")
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{name}: wanted a contiguous array for rank {other}, got strides {array.strides}; make a copy first"
            )


def _check_operation(operation: str) -> None:
    if operation not in _OPERATIONS:
        raise ValueError(f"operation: wanted 'sum', 'max' or 'min', got {operation!r}")


def _reduced(parts: Any, operation: str) -> Array:
    """Reduce over the first axis, one after the other, so that the order is that of the ranks."""
    xp: Any = np
    if not is_host(parts[0]):
        import cupy

        xp = cupy
    function = {"sum": xp.add, "max": xp.maximum, "min": xp.minimum}[operation]
    found = parts[0]
    for part in parts[1:]:
        found = function(found, part)
    return found


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


class OneRank(Communicator):
    """The communicator of one process alone.

    Examples
    --------
    >>> import numpy as np
    >>> from bsrgemm.interop.communicator import OneRank
    >>> comm = OneRank()
    >>> comm.rank, comm.size, comm.allreduce(np.array([1.0, 2.0]))
    (0, 1, array([1., 2.]))
    """

    rank, size = 0, 1

    def exchange(self, sends: Mapping[int, Array], receives: Mapping[int, Array]) -> Exchange:
        """Copy what this rank sends to itself."""
        _check(1, "sends", sends)
        _check(1, "receives", receives)
        if set(sends) != set(receives):
            raise ValueError(f"sends, receives: wanted the same ranks, got {sorted(sends)} and {sorted(receives)}")
        for rank, target in receives.items():
            target[...] = sends[rank].reshape(target.shape)
        return _Done()

    def refuse(self, sends: Iterable[int], receives: Iterable[int]) -> None:
        """Return at once: nobody waits."""

    def allreduce(self, array: Array, operation: str = "sum") -> Array:
        """Return a copy."""
        _check_operation(operation)
        return array.copy()

    def allgather(self, array: Array) -> list[Array]:
        """Return a list with a copy."""
        return [array.copy()]

    def broadcast(self, value: object, root: int = 0) -> Any:
        """Return the value."""
        return value

    def barrier(self) -> None:
        """Return at once."""


class _Messages:
    """Messages of mpi4py that are under way.

    A card works in the order of a stream, and MPI reads and writes outside of it. MPI therefore gets memory of the card
    only in `wait`, after an event that `exchange` has recorded: by then the kernels are done that compute what is sent,
    and so are those that used the memory of what is received before the pool gave it to its new owner. What the caller
    starts between `exchange` and `wait` runs on the card meanwhile.

    The communicator keeps an object of this class, and with it the memory, until the messages have come and gone.
    """

    def __init__(self, comm: MpiCommunicator, sends: Mapping[int, Array], receives: Mapping[int, Array]) -> None:
        self._comm = comm
        #: what waits for the event: the ranks, and memory that MPI reads or writes
        self._later: tuple[list[tuple[int, Array]], list[tuple[int, Array]]] = ([], [])
        #: by receive, the rank, the bytes that it is to bring, and its request
        self._receiving: list[tuple[int, int, Any]] = []
        self._sending: list[Any] = []
        #: pairs of an array on the card and the pinned memory in which its message arrives
        self._arriving: list[tuple[Array, Array]] = []
        #: the event before the messages, and the one after the copies of what has arrived, with the copied memory
        self._ready: Any = None
        self._copied: tuple[Any, list[Array]] | None = None
        self._waited = False
        for rank in sorted(receives):
            target = receives[rank]
            if not target.nbytes:
                continue
            place = comm._staged(target)
            if is_host(place):
                self._receive(rank, place)
            else:
                self._later[0].append((rank, place))
            if place is not target:
                self._arriving.append((target, place))
        for rank in sorted(sends):
            array = sends[rank]
            if not array.nbytes:
                continue
            if is_host(array):
                self._send(rank, array)
                continue
            place = comm._staged(array)
            if place is not array:
                array.get(out=place, blocking=False)
            self._later[1].append((rank, place))
        if any(self._later):
            import cupy

            self._ready = cupy.cuda.Event(disable_timing=True)
            self._ready.record()
        if self._ready is not None or self._receiving or self._sending:
            comm._hold(self)

    def _receive(self, rank: int, place: Array) -> None:
        request = self._comm._mpi.Irecv(self._comm._message(place), rank, _TAG)
        self._receiving.append((rank, place.nbytes, request))

    def _send(self, rank: int, place: Array) -> None:
        self._sending.append(self._comm._mpi.Isend(self._comm._message(place), rank, _TAG))

    @property
    def done(self) -> bool:
        """Whether neither MPI nor the card uses the memory any more."""
        return self._waited and (self._copied is None or bool(self._copied[0].done))

    def wait(self) -> None:
        """Return when all has come and gone."""
        comm = self._comm
        if self._ready is not None:
            self._ready.synchronize()  # synchronize!
            self._ready = None
            receives, sends = self._later
            for rank, place in receives:
                self._receive(rank, place)
            for rank, place in sends:
                self._send(rank, place)
        statuses = [comm._MPI.Status() for _ in self._receiving]
        longer = [_is_longer(comm._MPI, one[2], status) for one, status in zip(self._receiving, statuses, strict=True)]
        comm._MPI.Request.Waitall(self._sending)
        receiving, self._receiving, self._sending, self._later = self._receiving, [], [], ([], [])
        self._waited = True
        for (rank, wanted, _), status, more in zip(receiving, statuses, longer, strict=True):
            got = "more" if more else status.Get_count(comm._MPI.BYTE)
            if got != wanted:
                raise RuntimeError(
                    f"receives: wanted {wanted} bytes from rank {rank}, which has sent {got}: it has failed, or "
                    "was given an array of another dtype or with another number of columns"
                )
        if self._arriving:
            import cupy

            stream = cupy.cuda.get_current_stream()
            for target, place in self._arriving:
                target.set(place, stream)
            self._copied = stream.record(), [place for _, place in self._arriving]
            self._arriving = []


def _is_longer(MPI: Any, request: Any, status: Any) -> bool:
    """Wait for a message; tell whether it had more bytes than there is room for."""
    try:
        request.Wait(status)
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            raise
        return True
    return False


class _Freed:
    """Takes the place of a communicator of mpi4py that was freed."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            "comm: the communicator was freed, and what was made with it sends nothing any more; free it last"
        )


class MpiCommunicator(Communicator):
    """The ranks of a communicator of mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator. It is duplicated, which all its ranks do together: messages of this package never meet those
        of the user. `as_communicator` does this once for a communicator, and frees the duplicate with it.
    cuda_aware : bool, optional
        Whether the MPI library reads and writes the memory of the GPU. By default it is asked, by the key
        ``mpi_memory_alloc_kinds`` that MPI 4.1 defines. If it is not, CuPy arrays go through pinned memory.

    Notes
    -----
    An exception that nobody catches on one rank would leave the others waiting for its messages. While there is more
    than one rank, such an exception is printed and then ends all ranks by ``MPI_Abort``.
    """

    def __init__(self, comm: Any, cuda_aware: bool | None = None) -> None:
        from mpi4py import MPI

        self._MPI, self._mpi = MPI, comm.Dup()
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.cuda_aware = _says_cuda(self._mpi) if cuda_aware is None else bool(cuda_aware)
        #: messages whose memory MPI or the card may still use
        self._held: list[_Messages] = []
        if self.size > 1:
            _abort_on_uncaught_errors(MPI)

    def exchange(self, sends: Mapping[int, Array], receives: Mapping[int, Array]) -> Exchange:
        """Start to send and to receive."""
        _check(self.size, "sends", sends)
        _check(self.size, "receives", receives)
        return _Messages(self, sends, receives)

    def refuse(self, sends: Iterable[int], receives: Iterable[int]) -> None:
        """Send messages without bytes, and take those that come."""
        nothing = np.empty(0, np.uint8)
        requests = [self._mpi.Isend(self._message(nothing), rank, _TAG) for rank in sends]
        for rank in receives:
            status = self._MPI.Status()
            coming = self._mpi.Mprobe(rank, _TAG, status)
            coming.Recv(self._message(np.empty(status.Get_count(self._MPI.BYTE), np.uint8)))
        self._MPI.Request.Waitall(requests)

    def allreduce(self, array: Array, operation: str = "sum") -> Array:
        """Return the reduction over the ranks, in their order."""
        _check_operation(operation)
        if not is_host(array):
            import cupy

            return cupy.asarray(self.allreduce(array.get(), operation))  # synchronize!
        parts = np.empty((self.size, *array.shape), array.dtype)
        self._mpi.Allgather(self._message(np.ascontiguousarray(array)), self._message(parts))
        return _reduced(parts, operation)

    def allgather(self, array: Array) -> list[Array]:
        """Return the arrays of all ranks."""
        if not is_host(array):
            import cupy

            return [cupy.asarray(part) for part in self.allgather(array.get())]  # synchronize!
        array = np.ascontiguousarray(array)
        row = math.prod(array.shape[1:]) * array.itemsize
        lengths, small = self._small(array)
        if row * max(lengths) <= _SMALL:
            return [
                np.frombuffer(part[: n * row], array.dtype).reshape(n, *array.shape[1:])
                for part, n in zip(small, lengths, strict=True)
            ]
        counts = [n * row for n in lengths]
        whole = np.empty((sum(lengths), *array.shape[1:]), array.dtype)
        starts = [0, *itertools.accumulate(counts[:-1])]
        target = [whole.reshape(-1).view(np.uint8), counts, starts, self._MPI.BYTE]
        self._mpi.Allgatherv(self._message(array), target)
        return [part.copy() for part in np.split(whole, np.cumsum(lengths)[:-1])]

    def _small(self, array: np.ndarray[Any, Any]) -> tuple[list[int], list[bytearray]]:
        """The lengths of the arrays of all ranks, and the bytes of those that are small, in one call of MPI."""
        own = array.tobytes() if array.nbytes <= _SMALL else b""
        record = len(array).to_bytes(8, "little") + own.ljust(_SMALL, b"\0")
        found = bytearray(self.size * len(record))
        self._mpi.Allgather([record, self._MPI.BYTE], [found, self._MPI.BYTE])
        records = [found[i : i + len(record)] for i in range(0, len(found), len(record))]
        return [int.from_bytes(x[:8], "little") for x in records], [x[8:] for x in records]

    def broadcast(self, value: object, root: int = 0) -> Any:
        """Return the object of rank `root`, which is pickled."""
        return self._mpi.bcast(value, root)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._mpi.Barrier()

    def free(self) -> None:
        """Free the duplicate; all ranks call this together. What was made with it can send nothing any more.

        Returns
        -------
        None
        """
        if not isinstance(self._mpi, _Freed):
            duplicate, self._mpi = self._mpi, _Freed()
            duplicate.Free()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a communicator cannot be pickled, and nor can what was made with it; of a DistributedMatrix, pickle "
            "D.panel() on each rank, and from_local makes the matrix of it again"
        )

    def _hold(self, messages: _Messages) -> None:
        """Keep messages, also if nobody waits for them, until their memory may have another owner."""
        self._held = [*(one for one in self._held if not one.done), messages]

    def _message(self, array: Array) -> Any:
        """What mpi4py takes: the bytes, since MPI knows no dtype such as bfloat16."""
        return [array.reshape(-1).view(np.uint8), self._MPI.BYTE]

    def _staged(self, array: Array) -> Array:
        """The array itself where MPI can reach it, otherwise pinned memory of its size."""
        if is_host(array) or self.cuda_aware:
            return array
        import cupyx

        return cupyx.empty_pinned(array.shape, array.dtype)


def _says_cuda(comm: Any) -> bool:
    info = comm.Get_info()
    try:
        return "cuda" in (info.get("mpi_memory_alloc_kinds") or "")
    finally:
        info.Free()


#: Seconds between the message of a rank that has failed and the end of all ranks. What the launcher of the ranks has
#: not read by then is lost.
_LAST_WORDS = 0.2


def _abort_on_uncaught_errors(MPI: Any) -> None:
    """Let an exception that nobody catches end all ranks; the others would wait for this one."""
    before = sys.excepthook
    if getattr(before, "ends_all_ranks", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        rank = MPI.COMM_WORLD.Get_rank()
        print(f"bsrgemm: rank {rank} has failed ({kind.__name__}): all ranks are ended", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(_LAST_WORDS)
        MPI.COMM_WORLD.Abort(1)

    hook.ends_all_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = hook


#: The key under which the communicator of a communicator of mpi4py is kept with it, once there is one.
_KEY: list[int] = []


def _free_with(comm: Any, key: int, found: MpiCommunicator) -> None:
    """Free the duplicate of a communicator that the user frees: a library has room for some thousands of them.

    Those that MPI made itself end with MPI, when there is nothing to be saved.
    """
    MPI = found._MPI
    if comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):
        found.free()


def as_communicator(comm: object) -> Communicator:
    """Return a communicator for whatever describes one.

    Parameters
    ----------
    comm : None, mpi4py.MPI.Intracomm or Communicator
        None is this process alone.

    Returns
    -------
    Communicator
        The same object for the same communicator of mpi4py. The first call for it is made by all its ranks together.

    Raises
    ------
    TypeError
        If `comm` is none of these.
    ValueError
        If it is the null communicator.

    Examples
    --------
    >>> from bsrgemm.interop.communicator import as_communicator
    >>> as_communicator(None).size
    1
    """
    if comm is None:
        return OneRank()
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is not None and isinstance(comm, MPI.Comm):
        if comm == MPI.COMM_NULL:
            raise ValueError("comm: wanted a communicator that this process belongs to, got MPI.COMM_NULL")
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"comm: wanted an intracommunicator, got {type(comm).__name__}; its Merge makes one")
        if not _KEY:
            _KEY.append(MPI.Comm.Create_keyval(delete_fn=_free_with))
        found = comm.Get_attr(_KEY[0])
        if found is None:
            found = MpiCommunicator(comm)
            comm.Set_attr(_KEY[0], found)
        assert isinstance(found, MpiCommunicator)
        return found
    if isinstance(comm, Communicator):
        return comm
    raise TypeError(
        f"comm: wanted None, a communicator of mpi4py such as MPI.COMM_WORLD, or a Communicator, "
        f"got {type(comm).__name__}"
    )


@contextmanager
def together(comm: Communicator) -> Iterator[None]:
    """Raise on all ranks what the body of the ``with`` statement raises on one of them; the lowest rank's error first.

    The body may not communicate: a rank that fails in it would leave the others waiting. The errors of other ranks
    name them.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    if comm.size == 1:
        if error is not None:
            raise error
        return
    texts = texts_of(comm, "" if error is None else f"{type(error).__name__}\n{error}")
    failed = [rank for rank, other in enumerate(texts) if other]
    if not failed:
        return
    kind, _, message = texts[failed[0]].partition("\n")
    raised = getattr(builtins, kind, RuntimeError)
    if not (isinstance(raised, type) and issubclass(raised, Exception)):
        raised = RuntimeError
    where = "all ranks" if len(failed) == comm.size else f"rank{'s' * (len(failed) > 1)} " + ", ".join(map(str, failed))
    raise raised(f"{message} [on {where}]") from error


def texts_of(comm: Communicator, own: str) -> list[str]:
    """Return the texts of all ranks, by rank."""
    return [bytes(part).decode() for part in comm.allgather(np.frombuffer(own.encode(), np.uint8))]


def same(comm: Communicator, name: str, value: str) -> None:
    """Raise ValueError on all ranks unless all of them have the same text for the argument `name`."""
    if comm.size == 1:
        return
    texts = texts_of(comm, value)
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"{name}: wanted the same on all ranks, got {texts[0]} on rank 0 and {text} on rank {rank}"
            )


def summed(comm: Communicator, name: str, part: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """Return the sum over the ranks, in their order, of arrays on the host; None is a rank that refuses.

    Ranks also tell each other dtypes and shapes, which `Communicator.allreduce` does not: it would read wrong bytes.
    """
    own = b"" if part is None else f"{part.dtype} of shape {part.shape}\n".encode() + part.tobytes()
    others = [bytes(message) for message in comm.allgather(np.frombuffer(own, np.uint8))]
    if b"" in others:
        raise RuntimeError(f"{name}: rank {others.index(b'')} has refused its part")
    kinds, numbers = zip(*(message.split(b"\n", 1) for message in others), strict=True)
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"{name}: wanted the same on all ranks, got {kinds[0].decode()} on rank 0 and {kind.decode()} on rank "
                f"{rank}"
            )
    assert part is not None
    return _reduced([np.frombuffer(x, part.dtype).reshape(part.shape) for x in numbers], "sum")
