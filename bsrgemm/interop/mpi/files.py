"""Parts of the arrays in a file of `save_npz`: an array is read up to the part that is wanted, and the part is kept.

A file is not trusted. Nothing in it is unpickled, and the size that an array claims is compared with its data first.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...dtypes import BFLOAT16

#: Bytes that are skipped at a time.
_SKIPPED = 1 << 22
#: How `save_npz` writes bfloat16.
_TWO_BYTES = np.dtype("V2")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


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


def read_pattern(path: str) -> tuple[tuple[int, int], np.ndarray]:
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


def read_panel(path: str, pointers: np.ndarray, first: int, last: int) -> tuple[Any, Any, Any]:
    """The arrays of block rows `first` to ``last - 1``."""
    begin, end = int(pointers[first]), int(pointers[last])
    with _opened(path) as archive:
        data = _read(archive, "data", begin, end)
        if data.ndim != 3:
            raise ValueError(f"data: wanted blocks, (n, R, C), got shape {data.shape}")
        indices = _read(archive, "indices", begin, end)
    data = data.view(BFLOAT16) if data.dtype == _TWO_BYTES else data
    return data, indices, pointers[first : last + 1] - pointers[first]
