"""How panels come to the ranks: from a matrix on one of them, from parts that each has made, or from a file.

Of a file of `save_npz`, an array is read up to the part that is wanted, and the part is kept. A file is not trusted:
nothing in it is unpickled, and the size that an array claims is compared with its data first.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..._array.arrays import leaf
from ..._array.base import BsrBase, kind_of
from ..._backend.registry import by_name, host
from ...dtypes import BFLOAT16
from ..communicator import Communicator, as_communicator, same, together
from .matrix import DistributedMatrix

#: Bytes that are skipped at a time.
_SKIPPED = 1 << 22
#: How `save_npz` writes bfloat16.
_TWO_BYTES = np.dtype("V2")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def partition(
    A: Any, comm: Any = None, *, rows: Sequence[int] | None = None, device: str | None = None
) -> DistributedMatrix:
    """Spread a matrix of rank 0 over the ranks, in panels of block rows.

    Parameters
    ----------
    A : bsr_array or bsr_matrix, or None
        The matrix on rank 0. Other ranks pass None; what they pass is not looked at.
    comm : mpi4py.MPI.Intracomm, Communicator or None
        The ranks; None is this process alone.
    rows : sequence of int, optional
        Block rows of each rank, from rank 0 on. By default the ranks get about the same number of stored blocks.
    device : {"cpu", "cuda"}, optional
        Where the panels go; by default where A is.

    Returns
    -------
    DistributedMatrix
        The matrix. A rank may be without rows.

    Raises
    ------
    TypeError
        If A is not such a matrix or `comm` is no communicator.
    ValueError
        If `rows` does not fit. Whatever one rank raises, all raise.

    See Also
    --------
    from_local : for panels that the ranks make.
    from_file : for a matrix that no rank has memory for.

    Notes
    -----
    If the matrix and its blocks are square, vectors that it is multiplied with are spread as its rows are. Otherwise
    their blocks are spread evenly.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> from bsrgemm.interop import mpi
    >>> A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    >>> D = mpi.partition(A)
    >>> D @ np.arange(4.0)
    array([0., 1., 2., 3.])
    """
    comm = as_communicator(comm)
    described: Any = None
    with together(comm):
        if comm.rank == 0:
            if not isinstance(A, BsrBase):
                way_out = "rank 0 of comm passes the matrix" if A is None else "bsrgemm.bsr_array(A) makes one"
                raise TypeError(f"A: wanted a bsr_array or bsr_matrix on rank 0, got {kind_of(A)}; {way_out}")
            A.check_format(full_check=True)
            pointers = A._backend.to_host(A._blocks.indptr)  # synchronize!
            starts = _row_starts(pointers, comm.size, rows)
            described = (A.shape, A.blocksize, A.dtype, A.indices.dtype, A._backend.name, starts, pointers[starts])
        if device is not None:
            by_name(device)
    shape, blocksize, dtype, index, name, starts, ends = comm.broadcast(described)
    with together(comm):
        backend = by_name(name)
    xp, rank = backend.xp, comm.rank
    count, length = int(starts[rank + 1] - starts[rank]), int(ends[rank + 1] - ends[rank])
    if rank == 0:
        data, indices, indptr = A._blocks
        data = xp.ascontiguousarray(data)
        cuts = [(slice(ends[r], ends[r + 1]), slice(starts[r], starts[r + 1] + 1)) for r in range(comm.size)]
        pieces = [(data[b], indices[b], indptr[r] - indptr[r.start]) for b, r in cuts]
        mine = tuple(x.copy() for x in pieces[0])
    else:
        mine = (xp.empty((length, *blocksize), dtype), xp.empty(length, index), xp.empty(count + 1, index))
    for k, array in enumerate(mine):
        sends = {r: pieces[r][k] for r in range(1, comm.size)} if rank == 0 else {}
        comm.exchange(sends, {} if rank == 0 else {0: array}).wait()
    panel = leaf(backend, True)(mine, shape=(count * blocksize[0], shape[1]))
    return _distributed(panel, starts, None, comm, device)


def from_local(
    panel: Any, comm: Any = None, *, columns: Sequence[int] | None = None, device: str | None = None
) -> DistributedMatrix:
    """Make a matrix of panels that the ranks have.

    Parameters
    ----------
    panel : bsr_array or bsr_matrix
        The block rows of this rank with all columns of the matrix. The rows of rank 0 come first. A rank without rows
        passes a matrix of shape (0, n).
    comm : mpi4py.MPI.Intracomm, Communicator or None
        The ranks; None is this process alone.
    columns : sequence of int, optional
        Block columns of each rank: how vectors that the matrix is multiplied with are spread. By default as the rows
        if the matrix and its blocks are square, and evenly otherwise.
    device : {"cpu", "cuda"}, optional
        Where the panels go; by default where they are.

    Returns
    -------
    DistributedMatrix
        The matrix.

    Raises
    ------
    TypeError
        If a panel is not such a matrix or `comm` is no communicator.
    ValueError
        If the panels have different dtypes, blocks or numbers of columns, or `columns` does not fit. Whatever one rank
        raises, all raise.

    See Also
    --------
    partition : for a matrix that one rank has.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> from bsrgemm.interop import mpi
    >>> panel = bg.bsr_array(np.eye(2, 4), blocksize=(2, 2))
    >>> mpi.from_local(panel).shape
    (2, 4)
    """
    comm = as_communicator(comm)
    with together(comm):
        if not isinstance(panel, BsrBase):
            raise TypeError(
                f"panel: wanted a bsr_array or bsr_matrix, got {kind_of(panel)}; bsrgemm.bsr_array(panel, "
                "blocksize=(R, C)) makes one if its rows are whole blocks"
            )
        panel.check_format(full_check=True)
    R, C = panel.blocksize
    same(comm, "panel", f"{panel.dtype} in blocks of {(R, C)} with {panel.shape[1]:,} columns on {panel._backend.name}")
    counts = [int(part[0]) for part in comm.allgather(np.array([panel.shape[0] // R], np.int64))]
    return _distributed(panel, np.cumsum([0, *counts]), columns, comm, device)


def from_file(
    path: Any, comm: Any = None, *, rows: Sequence[int] | None = None, device: str | None = None
) -> DistributedMatrix:
    """Read a matrix that `save_npz` has written: each rank keeps its own block rows.

    Parameters
    ----------
    path : str or path
        The file, which all ranks can read.
    comm : mpi4py.MPI.Intracomm, Communicator or None
        The ranks; None is this process alone.
    rows : sequence of int, optional
        Block rows of each rank. By default the ranks get about the same number of stored blocks.
    device : {"cpu", "cuda"}, optional
        Where the panels go, "cpu" by default.

    Returns
    -------
    DistributedMatrix
        The matrix.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it does not hold a valid matrix in BSR format, or `rows` does not fit. Whatever one rank raises, all raise.

    See Also
    --------
    bsrgemm.save_npz : writes the file; with ``compressed=False`` a rank skips what it does not keep.

    Notes
    -----
    No rank holds more than its panel and the pointers of all block rows. Nothing in the file is unpickled.

    Examples
    --------
    >>> import os, tempfile, numpy as np, bsrgemm as bg
    >>> from bsrgemm.interop import mpi
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "A.npz")
    ...     bg.save_npz(path, bg.bsr_array(np.eye(4), blocksize=(2, 2)), compressed=False)
    ...     mpi.from_file(path).shape
    (4, 4)
    """
    comm = as_communicator(comm)
    with together(comm):
        name = os.fspath(path)
        shape, pointers = _read_pattern(name)
        starts = _row_starts(pointers, comm.size, rows)
        first, last = starts[comm.rank], starts[comm.rank + 1]
        data, indices, indptr = _read_panel(name, pointers, first, last)
        if data.shape[1] * (len(pointers) - 1) != shape[0]:
            raise ValueError(f"path: {name!r} has {len(pointers) - 1} block rows of {data.shape[1]}, and shape {shape}")
        panel = leaf(host(), True)((data, indices, indptr), shape=(data.shape[1] * (len(indptr) - 1), shape[1]))
        panel.check_format(full_check=True)
    same(comm, "path", f"{shape} with {pointers[-1]:,} blocks of {panel.blocksize}, {panel.dtype}")
    return _distributed(panel, starts, None, comm, device)


def _distributed(panel: Any, starts: np.ndarray, columns: Any, comm: Communicator, device: Any) -> DistributedMatrix:
    with together(comm):
        R, C = panel.blocksize
        across = panel.shape[1] // C
        if columns is not None:
            other = _given(columns, comm.size, across, "columns")
        elif R == C and int(starts[-1]) == across:
            other = starts
        else:
            other = np.arange(comm.size + 1) * across // comm.size
        if device is not None:
            panel = panel.to_device(device)
    same(comm, "columns", str(np.asarray(other).tolist()))
    return DistributedMatrix(panel, np.asarray(starts, np.int64), np.asarray(other, np.int64), comm)


def _row_starts(pointers: np.ndarray, size: int, rows: Any) -> np.ndarray:
    """Where the block rows of each rank begin: as given, or so that all have about as many blocks and rows."""
    count = len(pointers) - 1
    if rows is not None:
        return _given(rows, size, count, "rows")
    work = pointers.astype(np.int64) + np.arange(count + 1)
    return np.searchsorted(work, np.arange(size + 1) * (int(work[-1]) / size)).clip(0, count)


def _given(given: Any, size: int, count: int, name: str) -> np.ndarray:
    try:
        counts = [int(n.__index__()) for n in given]
    except (TypeError, AttributeError):
        raise TypeError(f"{name}: wanted a sequence of integers, one for each rank, got {given!r}") from None
    unit = "block rows" if name == "rows" else "block columns"
    if len(counts) != size:
        raise ValueError(f"{name}: wanted {size} numbers, one for each rank of the communicator, got {len(counts)}")
    if min(counts) < 0 or sum(counts) != count:
        raise ValueError(f"{name}: wanted {unit} that add up to {count}, got {counts}: panels consist of whole blocks")
    return np.cumsum([0, *counts])


# ------------------------------------------------------------------------------------------ in a file
@contextmanager
def _opened(path: str) -> Iterator[zipfile.ZipFile]:
    """The archive; what is wrong inside it is told as ValueError, with the name of the file."""
    with open(path, "rb") as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                yield archive
        except (zipfile.BadZipFile, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"path: {path!r} holds no matrix that can be read by panels: {error}") from error


def _read(archive: zipfile.ZipFile, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
    """Rows `first` to ``last - 1`` of an array in the archive."""
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in _HEADERS:
            raise ValueError(f"{name}: has version {version} of the .npy format, wanted one of {[*_HEADERS]}")
        shape, fortran, dtype = _HEADERS[version](member)
        if dtype.hasobject or fortran:
            raise ValueError(f"{name}: wanted plain numbers in C order, got {dtype}")
        row = math.prod(shape[1:]) * dtype.itemsize
        if member.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
            raise ValueError(f"{name}: wanted an array {shape} of {dtype}, got {info.file_size} bytes")
        if not shape:
            return np.frombuffer(member.read(dtype.itemsize), dtype)
        last = shape[0] if last is None else last
        if not 0 <= first <= last <= shape[0]:
            raise ValueError(f"{name}: wanted rows {first} to {last}, got an array of {shape[0]}")
        left = first * row
        if info.compress_type == zipfile.ZIP_STORED and left:
            member.seek(left, 1)
            left = 0
        while left:
            left -= len(member.read(min(left, _SKIPPED)))
        found = np.empty((last - first, *shape[1:]), dtype)
        wanted = found.reshape(-1).view(np.uint8)
        done = 0
        while done < len(wanted):
            some = member.read(min(len(wanted) - done, _SKIPPED))
            if not some:
                raise ValueError(f"{name}: the file ends early")
            wanted[done : done + len(some)] = np.frombuffer(some, np.uint8)
            done += len(some)
    return found if dtype.isnative else found.astype(dtype.newbyteorder("="))


def _read_pattern(path: str) -> tuple[tuple[int, int], np.ndarray]:
    """The shape of the matrix, and where the blocks of each block row begin."""
    with _opened(path) as archive:
        kind = bytes(_read(archive, "format")[0])
        if kind != b"bsr":
            raise ValueError(f"wanted the format bsr, as save_npz writes it, got {kind.decode(errors='replace')}")
        rows, columns = (int(n) for n in _read(archive, "shape"))
        pointers = _read(archive, "indptr")
        if pointers.dtype.kind != "i" or pointers.ndim != 1 or not len(pointers) or pointers[0] != 0:
            raise ValueError("indptr: wanted integers from 0 on")
        if (np.diff(pointers) < 0).any() or rows < 0 or rows % max(1, len(pointers) - 1):
            raise ValueError(f"indptr: does not describe block rows of a matrix of {rows} rows")
    return (rows, columns), pointers


def _read_panel(path: str, pointers: np.ndarray, first: int, last: int) -> tuple[Any, Any, Any]:
    """The arrays of block rows `first` to ``last - 1``."""
    begin, end = int(pointers[first]), int(pointers[last])
    with _opened(path) as archive:
        data = _read(archive, "data", begin, end)
        if data.ndim != 3:
            raise ValueError(f"data: wanted blocks, (n, R, C), got shape {data.shape}")
        indices = _read(archive, "indices", begin, end)
    data = data.view(BFLOAT16) if data.dtype == _TWO_BYTES else data
    return data, indices, pointers[first : last + 1] - pointers[first]
