"""Matrices in files of the form that ``scipy.sparse.save_npz`` writes: a zip archive of NumPy arrays.

A file is not trusted. Nothing in it is unpickled, the size that an array claims is compared with the size of its data
before memory is taken for it, and the arrays are checked before a matrix is made of them.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from typing import Any

import numpy as np
import scipy.sparse

from .._backend import structure
from .._backend.base import Blocks
from .._backend.registry import host
from ..dtypes import BFLOAT16
from .arrays import leaf
from .base import BsrBase, check_shape, kind_of

#: How NumPy describes bfloat16 in a file: two bytes without a meaning. No matrix of scipy has this dtype.
_TWO_BYTES = np.dtype("V2")
#: The deflate format compresses by at most this factor.
_MOST_COMPRESSED = 1032
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
#: What NumPy, zipfile and zlib raise for a file whose bytes are not what they should be.
_BROKEN = (
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    OSError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def save_npz(file: Any, A: Any, compressed: bool = True) -> None:
    """Save a matrix to a file, in any dtype that a matrix may have.

    Parameters
    ----------
    file : str, path or file object
        The name of the file, to which ".npz" is appended if it does not end so, or an object that is open for binary
        writing.
    A : bsr_array or bsr_matrix
        The matrix. Its blocks are saved as they are stored.
    compressed : bool
        With True the arrays are compressed, which takes longer.

    Raises
    ------
    TypeError
        If `A` is not a `bsr_array` or `bsr_matrix`.
    ValueError
        If the index arrays of `A` have been changed so that they are not valid.
    OSError
        If the file cannot be written.

    See Also
    --------
    load_npz : reads the file.

    Notes
    -----
    The file has the form of ``scipy.sparse.save_npz``. ``scipy.sparse.load_npz`` reads it, unless the dtype is float16
    or bfloat16: scipy has no matrices of them, and its error says so. float16 is stored as such, bfloat16 as
    NumPy's ``V2``, two bytes for each element.

    A matrix on the GPU is copied to the host first, which waits for the GPU. The file does not say where the matrix
    was.

    Examples
    --------
    >>> import io, numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.eye(4, dtype=np.float16), blocksize=(2, 2))
    >>> file = io.BytesIO()  # or a name: "A.npz"
    >>> bg.save_npz(file, A)
    >>> _ = file.seek(0)
    >>> B = bg.load_npz(file)
    >>> B.dtype, B.blocksize
    (dtype('float16'), (2, 2))
    """
    if not isinstance(A, BsrBase):
        way_out = "; scipy.sparse.save_npz takes it" if scipy.sparse.issparse(A) else ""
        raise TypeError(f"A: wanted a bsr_array or bsr_matrix, got {kind_of(A)}{way_out}")
    blocks = A._blocks
    if A._backend is not host():
        blocks = Blocks(*(A._backend.to_host(x) for x in blocks))  # synchronize!
    data, indices, indptr = host().validated(blocks, *A._block_shape)
    arrays: dict[str, Any] = {
        "indices": indices,
        "indptr": indptr,
        "format": A.format.encode("ascii"),
        "shape": A.shape,
        "data": np.ascontiguousarray(data).view(_TWO_BYTES) if data.dtype == BFLOAT16 else data,
    }
    if A._is_array:
        arrays["_is_array"] = True
    (np.savez_compressed if compressed else np.savez)(file, **arrays)


def load_npz(file: Any, *, blocksize: tuple[int, int] | None = None, device: str | None = None) -> Any:
    """Load a matrix from a file that `save_npz` or ``scipy.sparse.save_npz`` has written.

    Parameters
    ----------
    file : str, path or file object
        The name of the file, or an object that is open for binary reading and can seek.
    blocksize : (R, C), optional
        The block size of the result. By default the blocks of the file are kept; a matrix in CSR, CSC, COO or DIA
        format gets a small square block that is guessed, as in `bsr_array`.
    device : {"cpu", "cuda"}, optional
        The device of the matrix, by default "cpu".

    Returns
    -------
    bsr_array or bsr_matrix
        A matrix of the kind that was saved.

    Raises
    ------
    OSError
        If the file cannot be opened, for example FileNotFoundError.
    ValueError
        If the file is truncated, has another format or does not hold a valid matrix; the message names the file. Also
        if `blocksize` does not divide the shape, or `device` is unknown.
    ImportError
        If `device` is "cuda" and CuPy cannot be imported.
    TypeError
        If a matrix on the GPU cannot have the dtype (long double).

    See Also
    --------
    save_npz : writes the file.

    Notes
    -----
    Nothing in the file is unpickled, and its arrays are checked: a file from an unknown source either gives a valid
    matrix or raises an error. A matrix for the GPU is read to the host first.

    A bfloat16 matrix that ``scipy.sparse.save_npz`` has saved can be loaded here as well.

    Examples
    --------
    >>> import io, numpy as np, scipy.sparse as sp, bsrgemm as bg
    >>> file = io.BytesIO()  # or a name: "S.npz"
    >>> sp.save_npz(file, sp.csr_array(np.eye(4)))
    >>> _ = file.seek(0)
    >>> bg.load_npz(file, blocksize=(2, 2)).data.shape
    (2, 2, 2)
    """
    if hasattr(file, "read"):
        A = _load(file, repr(getattr(file, "name", file)), blocksize)
    else:
        if not isinstance(file, str | bytes | os.PathLike):
            raise TypeError(f"file: wanted a path or an open file, got {type(file).__name__}")
        with open(os.fspath(file), "rb") as stream:
            A = _load(stream, repr(os.fspath(file)), blocksize)
    return A if device is None else A.to_device(device)


def _load(stream: Any, name: str, blocksize: Any) -> Any:
    """Read a matrix to the host; `name` is the name of the file in error messages."""
    try:
        with zipfile.ZipFile(stream) as archive:
            S = _matrix(archive)
    except _BROKEN as error:
        what = "is truncated or not an .npz file" if isinstance(error, zipfile.BadZipFile) else "holds no valid matrix"
        raise ValueError(f"file: {name} {what}: {error}") from error
    if isinstance(S, BsrBase) and blocksize is None:
        return S
    return leaf(host(), isinstance(S, scipy.sparse.sparray))(S, blocksize=blocksize)


def _matrix(archive: zipfile.ZipFile) -> Any:
    """Return a valid matrix: of this package in BSR, of scipy in other formats."""
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    def read(name: str) -> np.ndarray[Any, Any]:
        if name not in members:
            raise ValueError(f"it has no array {name!r}")
        return _array(archive, members[name])

    format = read("format").item()
    format = format.decode("ascii") if isinstance(format, bytes) else str(format)
    is_array = bool("_is_array" in members and read("_is_array").all())
    shape = check_shape(read("shape").tolist())
    data = read("data")
    if format == "bsr":
        data = data.view(BFLOAT16) if data.dtype == _TWO_BYTES else data
        indices, indptr = (_indices(read(name), name) for name in ("indices", "indptr"))
        return leaf(host(), is_array)((data, indices, indptr), shape=shape)
    kind: Any = getattr(scipy.sparse, f"{format}_{'array' if is_array else 'matrix'}", None)
    if format in ("csr", "csc"):
        indices, indptr = (_indices(read(name), name) for name in ("indices", "indptr"))
        major, minor = shape if format == "csr" else shape[::-1]
        if data.ndim != 1 or indices.shape != data.shape or indptr.shape != (major + 1,):
            raise ValueError(
                f"data, indices and indptr of shapes {data.shape}, {indices.shape} and {indptr.shape} do not make a "
                f"matrix of shape {shape} in {format.upper()} format"
            )
        structure.check_values(host(), indices, indptr, minor)
        return kind((data, indices, indptr), shape=shape)
    if format == "coo":
        row, col = read("coords") if "coords" in members else (read("row"), read("col"))
        coords = (_indices(row, "row"), _indices(col, "col"))  # the class of scipy checks them
        return kind((data, coords), shape=shape)
    if format == "dia":
        return kind((data, _indices(read("offsets"), "offsets")), shape=shape)
    raise ValueError(f"wanted the format bsr, csr, csc, coo or dia, got {format!r}")


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray[Any, Any]:
    """Read one array; raise ValueError before memory is taken if its size is not that of its data."""
    if info.compress_type not in _COMPRESSIONS:
        raise ValueError(f"{info.filename}: wanted data that is stored or deflated")
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in _HEADERS:
            raise ValueError(f"{info.filename}: has version {version} of the .npy format, wanted one of {[*_HEADERS]}")
        shape, _, dtype = _HEADERS[version](member)
        size = member.tell() + dtype.itemsize * _product(shape)
    most = info.compress_size if info.compress_type == zipfile.ZIP_STORED else info.compress_size * _MOST_COMPRESSED
    if dtype.hasobject:
        raise ValueError(f"{info.filename}: holds {dtype}, wanted plain numbers")
    if size != info.file_size or size > most:
        raise ValueError(f"{info.filename}: wanted {size} bytes for {dtype} of shape {shape}, got {info.file_size}")
    with archive.open(info) as member:
        # The checksum is compared with that of the file when the last byte is read, which is the last one of the array.
        array = np.lib.format.read_array(member, allow_pickle=False)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:  # Python's integers do not overflow
        if side < 0:
            raise ValueError(f"an array has the shape {shape}")
        count *= side
    return count


def _indices(x: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Return an index array in int32 or int64; raise ValueError if it has other numbers or more than one dimension."""
    if x.dtype.kind not in "iu" or x.ndim != 1:
        raise ValueError(f"{name}: wanted integers in one dimension, got {x.dtype} in {x.ndim}")
    if x.dtype.kind == "u" and len(x) and x.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: {x.max()} does not fit into 64 bits with a sign")
    return x.astype(np.int32 if x.dtype == np.int32 or x.dtype.itemsize < 4 else np.int64, copy=False)
